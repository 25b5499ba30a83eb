"""The step of every shipped job at its stated size on a CUDA that computes nothing: devices, types, waits, messages."""

import json
from pathlib import Path

import pytest

from tests.support import fake_cuda

pytestmark = pytest.mark.skipif(bool(fake_cuda.missing()), reason=fake_cuda.missing())

SMALL = ("--model.tokenizer_path=bytes", "--compile.no_enable")


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fake_cuda.build(tmp_path_factory.mktemp("fake_cuda"))


def ask(library: Path, question: str, rank: int, world_size: int, *argv: str, mutant: str = "") -> dict:
    done = fake_cuda.run(library, question, str(rank), str(world_size), *argv, mutant=mutant)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


# Job, ranks, options that make it small, most waits of a step by place. Of 405B and 671B, two layers a pipeline rank
# and two microbatches for each of its stages.
JOBS = [
    ("llama3_8b", 8, "--model.overrides={n_layers = 2}", {}),
    ("llama3_70b", 256, "--model.overrides={n_layers = 2}", {}),
    ("llama3_405b", 512, "--model.overrides={n_layers = 16} --training.local_batch_size=8", {}),
    # once in the forward of a layer, and once when it is computed again
    ("qwen3_moe_235b", 256, "--model.overrides={n_layers = 2}", {"number expert_parallel.py:run_experts": 2 * 2}),
    # once for each of 32 microbatches in the one layer of this rank that has experts
    (
        "deepseek_671b",
        1024,
        "--model.overrides={n_layers = 32} --training.local_batch_size=32",
        {"event exchange.py:wait": 32},
    ),
]


@pytest.mark.parametrize(("job", "ranks", "options", "waits"), JOBS, ids=[case[0] for case in JOBS])
def test_the_host_waits_for_no_more_than_the_sizes_of_exchanges(library, job, ranks, options, waits):
    argv = [f"--job.config_file=train_configs/{job}.toml", *SMALL]
    overrides, _, batch = options.partition("} ")
    argv += [overrides + "}" * bool(batch), *([batch] if batch else [])]
    assert ask(library, "host_waits", 73 % ranks, ranks, *argv) == waits


def test_experts_are_gathered_before_the_host_waits(library):
    """Those of the next layer, which are 97 % of its bytes: after the wait the network would have stood still."""
    argv = ["--job.config_file=train_configs/qwen3_moe_235b.toml", *SMALL, "--model.overrides={n_layers = 3}"]
    order = ask(library, "gathers_and_waits", 73, 256, *argv)
    experts = 16 * 3 * 4096 * 1536  # numbers of a rank
    waits = [at for at, (kind, _) in enumerate(order) if kind == "wait"]
    assert len(waits) == 3
    assert [sum(size == experts for _, size in order[:at]) for at in waits] == [2, 3, 3]


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
    "overlap": (
        4,
        2,
        ("ZBVZeroBubble", "DualPipeV"),
        "--job.config_file=train_configs/deepseek_debug.toml --model.overrides={n_layers=4} "
        "--parallelism.pipeline_parallel_degree=2 --parallelism.expert_parallel_degree=2 "
        "--parallelism.pipeline_parallel_expert_parallel_overlap --training.local_batch_size=4",
    ),
}


def faults_in_messages(library: Path, case: str, mutant: str = "", schedules: tuple[str, ...] = ()) -> list[str]:
    ranks, stride, all_schedules, job = PIPELINES[case]
    names = ",".join(schedules or all_schedules)
    found = ask(
        library, "messages_by_schedule", stride, ranks, f"--schedules={names}", *job.split(" "), *SMALL, mutant=mutant
    )
    wrong = []
    for schedule, of_rank in found.items():
        assert all(of_rank)
        wrong += [f"{schedule}: order of {pair}" for pair in mismatches(of_rank)]
        if any(coalesced for messages in of_rank for *_, coalesced in messages):
            wrong.append(f"{schedule}: coalesced")
    return wrong


@pytest.mark.parametrize("case", PIPELINES)
def test_both_ends_of_a_pipeline_issue_the_same_messages_in_the_same_order(library, case):
    """And none of them coalesced: NCCL carries those in another communicator than plain ones."""
    assert faults_in_messages(library, case) == []


# What these checks would find


def test_a_tensor_on_a_wrong_device_would_be_seen(library):
    argv = ["--job.config_file=train_configs/debug_model.toml", *SMALL, "--model.overrides={n_layers = 1}"]
    done = fake_cuda.run(library, "host_waits", "0", "2", *argv, mutant="wrong_device")
    assert done.returncode and "FakeTensorDeviceMismatchError" in done.stderr


def test_a_wait_in_every_step_would_be_seen(library):
    argv = ["--job.config_file=train_configs/debug_model.toml", *SMALL, "--model.overrides={n_layers = 1}"]
    waits = ask(library, "host_waits", 0, 2, *argv, mutant="host_wait")
    assert waits == {"number parallel_model.py:clip_gradients": 1}


@pytest.mark.parametrize(
    ("mutant", "found"), [("coalesced", "1F1B: coalesced"), ("other_order", "1F1B: order of 1 and 2")]
)
def test_messages_that_do_not_meet_would_be_seen(library, mutant, found):
    assert found in faults_in_messages(library, "plain", mutant, ("1F1B",))
