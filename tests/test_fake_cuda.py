"""The step of five large jobs at their stated size on a CUDA that computes nothing: devices, types, waits, messages."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support import fake_cuda

pytestmark = pytest.mark.skipif(bool(fake_cuda.missing()), reason=fake_cuda.missing())

SMALL = ("--model.tokenizer_path=bytes", "--compile.no_enable")


@pytest.fixture(scope="module")
def card(tmp_path_factory: pytest.TempPathFactory) -> Iterator[fake_cuda.FakeCuda]:
    card = fake_cuda.FakeCuda(fake_cuda.build(tmp_path_factory.mktemp("fake_cuda")))
    yield card
    card.close()


def ask(card: fake_cuda.FakeCuda, question: str, rank: int, world_size: int, *argv: str, mutant: str = "") -> Any:
    ok, answer = card.ask(question, list(argv), rank, world_size, mutant)
    assert ok, answer[-3000:]
    return answer


# Job, ranks, options that make it small, most waits of a step by place. Of 405B and 671B, two layers a pipeline rank
# and two microbatches for each of its stages; of 671B's 16 pipeline ranks 4.
JOBS = [
    ("llama3_8b", 8, "--model.overrides={n_layers = 2}", {}),
    ("llama3_70b", 256, "--model.overrides={n_layers = 2}", {}),
    ("llama3_405b", 512, "--model.overrides={n_layers = 16} --training.local_batch_size=8", {}),
    # once in the forward of a layer, and not again when it is computed again
    ("qwen3_moe_235b", 256, "--model.overrides={n_layers = 2}", {"number expert_parallel.py:_tell": 2}),
    # once for each of 8 microbatches in the one layer of this rank that has experts
    (
        "deepseek_671b",
        1024,
        "--model.overrides={n_layers = 8} --training.local_batch_size=8 --parallelism.pipeline_parallel_degree=4",
        {"event exchange.py:wait": 8},
    ),
]


@pytest.mark.parametrize(("job", "ranks", "options", "waits"), JOBS, ids=[case[0] for case in JOBS])
def test_the_host_waits_for_no_more_than_the_sizes_of_exchanges(card, job, ranks, options, waits):
    argv = [f"--job.config_file=train_configs/{job}.toml", *SMALL]
    overrides, _, batch = options.partition("} ")
    argv += [overrides + "}" * bool(batch), *batch.split()]
    assert ask(card, "host_waits", 73 % ranks, ranks, *argv) == waits


def test_experts_are_gathered_before_the_host_waits(card):
    """Those of the next layer, which are 97 % of its bytes: after the wait the network would have stood still."""
    argv = ["--job.config_file=train_configs/qwen3_moe_235b.toml", *SMALL, "--model.overrides={n_layers = 3}"]
    order = ask(card, "gathers_and_waits", 73, 256, *argv)
    experts = 16 * 3 * 4096 * 1536  # numbers of a rank
    waits = [at for at, (kind, _) in enumerate(order) if kind == "wait"]
    assert len(waits) == 3
    assert [sum(size == experts for _, size in order[:at]) for at in waits] == [2, 3, 3]


def test_the_heads_gradient_is_summed_while_blocks_go_backward(card):
    """It is the largest of all. With the root's it would be summed when nothing is left to be computed beside it."""
    argv = ["--job.config_file=train_configs/llama3_8b.toml", *SMALL, "--model.overrides={n_layers = 2}"]
    order = ask(card, "gathers_and_reductions", 3, 8, *argv)
    words, width = 128256 * 4096, 4096
    block = 2 * width * width + 2 * width * 1024 + 3 * width * 14336 + 2 * width
    assert [size for kind, size in order if kind == "gather"] == [words, block, block, words + width, block, block]
    assert [size for kind, size in order if kind == "reduction"] == [words + width, block, block, words]


@pytest.mark.parametrize(
    ("job", "options"),
    [
        ("llama3_70b", []),
        ("qwen3_moe_235b", ["--parallelism.data_parallel_replicate_degree=2"]),
    ],
)
def test_no_communicator_is_made_of_all_ranks_for_what_is_logged(card, job, options):
    """It would take up to a GB on every GPU. Numbers for the host travel over gloo; the load of experts is added up in
    the groups that there are."""
    argv = [f"--job.config_file=train_configs/{job}.toml", *SMALL, "--model.overrides={n_layers = 1}", *options]
    assert max(ask(card, "sizes_of_groups", 73, 256, *argv)) < 256


def mismatches(of_rank: list[list]) -> list[str]:
    """Pairs of pipeline ranks whose two ends do not issue the same messages in the same order."""
    wrong = []
    for low in range(len(of_rank)):
        for high in range(low + 1, len(of_rank)):
            ends = []
            for mine, theirs, sends in ((low, high, "isend"), (high, low, "irecv")):
                ends.append([(name == sends, shape) for name, peer, shape, _ in of_rank[mine] if peer == theirs])
            if ends[0] != ends[1]:
                wrong.append(f"{low} and {high}")
    return wrong


PIPELINES = {  # ranks, distance of pipeline ranks, schedules, job
    "plain": (
        4,
        1,
        ("1F1B", "Interleaved1F1B", "ZBVZeroBubble"),
        "--job.config_file=train_configs/debug_model.toml --model.overrides={n_layers=8} "
        "--parallelism.pipeline_parallel_degree=4 --training.local_batch_size=4",
    ),
    "tied": (
        4,
        1,
        ("1F1B", "ZBVZeroBubble"),
        "--job.config_file=train_configs/debug_model.toml --model.overrides={n_layers=8,tied_embeddings=true} "
        "--parallelism.pipeline_parallel_degree=4 --training.local_batch_size=4",
    ),
    "overlap": (
        4,
        2,
        ("ZBVZeroBubble", "DualPipeV"),
        "--job.config_file=train_configs/deepseek_debug.toml --model.overrides={n_layers=4} "
        "--parallelism.pipeline_parallel_degree=2 --parallelism.expert_parallel_degree=2 "
        "--parallelism.pipeline_parallel_expert_parallel_overlap --training.local_batch_size=4",
    ),
}


def faults_in_messages(
    card: fake_cuda.FakeCuda, case: str, mutant: str = "", schedules: tuple[str, ...] = ()
) -> list[str]:
    ranks, stride, all_schedules, job = PIPELINES[case]
    names = ",".join(schedules or all_schedules)
    found = ask(
        card, "messages_by_schedule", stride, ranks, f"--schedules={names}", *job.split(" "), *SMALL, mutant=mutant
    )
    wrong = []
    for schedule, of_rank in found.items():
        assert all(of_rank)
        wrong += [f"{schedule}: order of {pair}" for pair in mismatches(of_rank)]
        if any(coalesced for messages in of_rank for *_, coalesced in messages):
            wrong.append(f"{schedule}: coalesced")
    return wrong


@pytest.mark.parametrize("case", PIPELINES)
def test_both_ends_of_a_pipeline_issue_the_same_messages_in_the_same_order(card, case):
    """And none of them coalesced: NCCL carries those in another communicator than plain ones."""
    assert faults_in_messages(card, case) == []


# What these checks would find


def test_a_tensor_on_a_wrong_device_would_be_seen(card):
    argv = ["--job.config_file=train_configs/debug_model.toml", *SMALL, "--model.overrides={n_layers = 1}"]
    ok, told = card.ask("host_waits", argv, 0, 2, mutant="wrong_device")
    assert not ok and "FakeTensorDeviceMismatchError" in told


def test_a_wait_in_every_step_would_be_seen(card):
    argv = ["--job.config_file=train_configs/debug_model.toml", *SMALL, "--model.overrides={n_layers = 1}"]
    waits = ask(card, "host_waits", 0, 2, *argv, mutant="host_wait")
    assert waits == {"number parallel_model.py:clip_gradients": 1}


@pytest.mark.parametrize(
    ("mutant", "found"), [("coalesced", "1F1B: coalesced"), ("other_order", "1F1B: order of 1 and 2")]
)
def test_messages_that_do_not_meet_would_be_seen(card, mutant, found):
    assert found in faults_in_messages(card, "plain", mutant, ("1F1B",))
