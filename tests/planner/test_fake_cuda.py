"""Run a step of large jobs at their stated size on the fake CUDA: devices, types, host waits, messages, kernels."""

import ast
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from torchtitan.config import manager
from torchtitan.job import ResolvedJob
from torchtitan.planner import fake_cuda
from torchtitan.planner.plan import Plan, Workload
from torchtitan.planner.time.block_kernels import elementwise, rounded

pytestmark = pytest.mark.skipif(bool(fake_cuda.missing()), reason=fake_cuda.missing())

SMALL = ("--model.tokenizer_path=bytes", "--compile.no_enable")


@pytest.fixture(scope="module")
def card(tmp_path_factory: pytest.TempPathFactory) -> Iterator[fake_cuda.FakeCuda]:
    """Start a process with the fake CUDA."""
    card = fake_cuda.FakeCuda(fake_cuda.build(tmp_path_factory.mktemp("fake_cuda")))
    yield card
    card.close()


def ask_card(card: fake_cuda.FakeCuda, question: str, rank: int, world_size: int, *argv: str, mutant: str = "") -> Any:
    """Call a function of fake_cuda_questions.py for one rank of a job; fail if it raises."""
    before = f"tests.support.fake_cuda_mutants:{mutant}" if mutant else ""
    ok, answer = card.ask(f"tests.support.fake_cuda_questions:{question}", argv, rank, world_size, before=before)
    assert ok, answer[-3000:]
    return answer


# Job, ranks, options that make it small, number of host waits of a step by place. 405B and 671B have two layers a
# pipeline rank and two microbatches for each stage; 671B has 4 pipeline ranks instead of 16.
JOBS = [
    ("llama3_8b", 8, "--model.overrides={n_layers = 2}", {}),
    ("llama3_70b", 256, "--model.overrides={n_layers = 2}", {}),
    ("llama3_405b", 512, "--model.overrides={n_layers = 16} --training.local_batch_size=8", {}),
    # once in the forward of a layer, and not again when the layer is recomputed
    ("qwen3_moe_235b", 256, "--model.overrides={n_layers = 2}", {"number expert_parallel.py:_exchange_counts": 2}),
    # once for each of 8 microbatches in the one layer of this rank that has experts
    (
        "deepseek_671b",
        1024,
        "--model.overrides={n_layers = 8} --training.local_batch_size=8 --parallelism.pipeline_parallel_degree=4",
        {"event exchange.py:wait": 8},
    ),
]


@pytest.mark.parametrize(("job", "ranks", "options", "waits"), JOBS, ids=[case[0] for case in JOBS])
def test_the_host_waits_only_for_the_sizes_of_exchanges(card, job, ranks, options, waits):
    argv = [f"--job.config_file=train_configs/{job}.toml", *SMALL]
    overrides, _, batch = options.partition("} ")
    argv += [overrides + "}" * bool(batch), *batch.split()]
    assert ask_card(card, "host_waits", 73 % ranks, ranks, *argv) == waits


ADAPTED = ("--model.name=llama3", "--model.flavor=8B", "--model.hf_folder=", "--model.overrides={n_layers = 2}")


DOCUMENTS = ("--task.kind=documents", "--training.dataset=text", "--training.dataset_path=books")
ONE_DIMENSION = tuple(f"--parallelism.{axis}_parallel_degree=1" for axis in ("expert", "context", "pipeline", "tensor"))
# Job, options, kernels of a step of two layers on one rank and on each of two, which FSDP shards.
STEPS = {
    "packs, LoRA with dropout": ("sft_lora", ADAPTED, 740, 620),
    "pairs, LoRA": ("dpo_lora", ADAPTED, 690, 570),
    "ReLoRA": ("relora_250m", ADAPTED, 820, 715),
    "packs, QLoRA": ("sft_qlora", ADAPTED, 830, 710),
    "Neurocache": ("llama3_8b", (ADAPTED[-1], "--adapter.kind=neurocache", *DOCUMENTS), 550, 500),
    "experts": ("qwen3_moe_235b", (ADAPTED[-1], *ONE_DIMENSION), 1030, 975),
}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", STEPS)
def test_a_step_takes_few_kernels_and_the_host_waits_for_nothing(card, name, ranks):
    job, options, *kernels = STEPS[name]
    argv = [f"--job.config_file=train_configs/{job}.toml", *SMALL, *options]
    costs = ask_card(card, "step_costs", 0, ranks, *argv)
    assert costs["host_waits"] == {}
    assert 0.9 * kernels[ranks - 1] < costs["kernels"]["all"] <= kernels[ranks - 1]


def test_the_host_waits_once_for_the_numbers_of_a_restart_of_relora(card):
    """Apart from that, the values of the new A and the masks of the moments of A and B are drawn on the host, for 7
    matrices in 2 layers.
    """
    argv = ["--job.config_file=train_configs/relora_250m.toml", *SMALL, *ADAPTED, "--adapter.relora.reset=random"]
    costs = ask_card(card, "restart_costs", 0, 2, *argv)
    assert costs["host_waits"] == {"copy random_draws.py:draw": 3 * 14, "number low_rank.py:reset_moments": 1}
    assert 0 < costs["kernels"]["all"] <= 550


@pytest.mark.parametrize(("backend", "kernel"), [("auto", None), ("fa3", "FA3")])
def test_flash_attention_3_is_activated_where_asked_for(card, backend, kernel):
    argv = ["--job.config_file=train_configs/llama3_8b.toml", *SMALL, "--model.overrides={n_layers = 1}"]
    assert ask_card(card, "flash_attention", 0, 8, *argv, f"--model.attention_backend={backend}") == [None, kernel]


MATRICES = 2 * 4096 * (4096 + 1024) + 3 * 4096 * 14336
"""Weights of the 7 matrices of a layer of Llama 3 8B."""


@pytest.mark.parametrize("kind", ["qlora", "lora_int8"])
def test_unpacking_a_matrix_takes_few_kernels_and_bytes(card, kind):
    """Matrices are unpacked in forward, in recomputation and in backward."""
    argv = ["--job.config_file=train_configs/sft_qlora.toml", *SMALL, *ADAPTED, f"--adapter.kind={kind}"]
    costs = ask_card(card, "costs", 0, 1, *argv)
    unpacking = tuple(f"quantized.py:{name}" for name in ("unpack_", "_unpack_", "_look_", "_level", "levels"))
    kernels, size = (
        sum(n for place, n in costs[unit].items() if place.startswith(unpacking)) for unit in ("kernels", "bytes")
    )
    assert 0 < kernels <= 3 * 3 * 7 * 2
    assert 2 * 3 * 2 * MATRICES < size <= 24 * 3 * 2 * MATRICES


@pytest.mark.parametrize(("recipe", "gradients"), [("tensorwise", 1), ("rowwise", 2)])
def test_products_in_float8_take_few_kernels_and_bytes(card, recipe, gradients):
    """A linear rounds weight and input for forward and for backward, and the gradient once, or by rows and by columns.

    Each time it is read twice, in bfloat16. The kernels of the products check their layouts.
    """
    argv = ["--job.config_file=train_configs/llama3_8b.toml", *SMALL, "--model.overrides={n_layers = 2}"]
    argv += ["--activation_checkpoint.mode=none", "--training.local_batch_size=1", "--training.seq_len=4096"]
    costs = ask_card(card, "costs", 0, 1, *argv, f"--training.float8={recipe}")
    assert costs["host_waits"] == {}
    kernels, size = costs["kernels"], costs["bytes"]
    times = 4 + gradients
    transposed = 2 + (gradients - 1)  # by one kernel that rounds too; a gradient that is rounded once is copied alone
    assert kernels["float8.py:quantize"] == times * 7 * 2
    assert kernels["float8.py:_rounded"] == (times - transposed) * 7 * 2
    assert kernels["float8.py:_rounded_columns"] == transposed * 7 * 2
    assert kernels["float8.py:product"] == 3 * 7 * 2
    assert kernels.get("float8.py:_row_major", 0) == (2 - gradients) * 7 * 2
    elements = 2 * (2 * MATRICES + 2 * 4096 * (6 * 4096 + 14336) + gradients * 4096 * (3 * 4096 + 2 * 1024 + 2 * 14336))
    assert size["float8.py:quantize"] == pytest.approx(2 * elements, rel=1e-2)
    rounding = size["float8.py:_rounded"] + size["float8.py:_rounded_columns"]
    assert rounding == pytest.approx(3 * elements, rel=1e-2)


def drawn_block(number: int) -> tuple[str, dict[str, int], list[str]]:
    """Return the model, sizes and options of a block that nobody chose: with experts, but for the first."""
    draw = random.Random(number)
    float8 = draw.choice([[], ["--training.float8=tensorwise"], ["--training.float8=rowwise"]])
    if number == 0:
        return "llama3/8B", {}, float8
    sizes = {"n_experts": draw.choice([64, 128, 256]), "expert_dim": 512 * draw.randint(1, 4)}
    model, more = draw.choice([("deepseek/671B", {"n_dense_layers": 0}), ("qwen3_moe/30B-A3B", {"top_k": 8})])
    return model, sizes | more, float8


@pytest.mark.parametrize("number", range(4))
def test_the_planner_has_the_bytes_and_kernels_of_a_block(card, number):
    """Twice the tokens show the bytes of a token, and a second layer the kernels, with casts of matrices both ways."""
    model, sizes, options = drawn_block(number)
    family, flavor = model.split("/")
    argv = ["--job.config_file=train_configs/debug_model.toml", *SMALL, *options, "--training.local_batch_size=1"]
    argv += [f"--model.name={family}", f"--model.flavor={flavor}", "--activation_checkpoint.mode=none"]
    counts = {}
    for layers, tokens in ((1, 1024), (1, 2048), (2, 1024)):
        overrides = ", ".join(
            f"{key} = {size}" for key, size in (sizes | {"n_layers": layers, "vocab_size": 256}).items()
        )
        job = [*argv, f"--model.overrides={{{overrides}}}", f"--training.seq_len={tokens}"]
        counts[layers, tokens] = ask_card(card, "memory_bound_costs", 0, 1, *job)
    workload = Workload.of(ResolvedJob(manager.load(job), 1, "cuda"), 1)
    moved = [elementwise(workload, Plan(), 0, 1024, 1024), rounded(workload, Plan(), 0, 1024, 1024)]
    of_weights = rounded(workload, Plan(), 0, 0, 0).size  # those of weights do not grow with the tokens
    casts = 2 * sum(3 if name == "moe.experts" else 1 for name in workload.kinds[0])
    assert counts[1, 2048][1] - counts[1, 1024][1] == pytest.approx(
        3 * (sum(one.size for one in moved) - of_weights), rel=0.1
    )
    assert counts[2, 1024][0] - counts[1, 1024][0] == pytest.approx(
        3 * sum(one.kernels for one in moved) + casts, rel=0.2
    )


def test_dropout_takes_few_kernels_and_bytes(card):
    """Of 12 bytes, forward and backward move 8 in bfloat16. Here forward runs twice, as layers are recomputed."""
    argv = ["--job.config_file=train_configs/sft_lora.toml", *SMALL, *ADAPTED, "--adapter.dropout=0.05"]
    argv += ["--activation_checkpoint.mode=full", "--training.local_batch_size=1", "--training.seq_len=4096"]
    costs = ask_card(card, "costs", 0, 2, *argv)
    kernels, size = (
        sum(n for place, n in costs[unit].items() if place.startswith(("dropout.py", "random_draws.py")))
        for unit in ("kernels", "bytes")
    )
    elements = 2 * 4096 * (6 * 4096 + 14336)  # inputs of the 7 linears of 2 layers
    assert 0 < kernels <= 3 * 3 * 7 * 2
    assert 8 * elements < size <= (12 + 4) * elements


# Optimizer, options, kernels for 1e9 weights, bytes a weight. torch's fused step is one kernel a group.
BF16 = "--training.dtype=bfloat16"
OPTIMIZER_STEPS = [
    ("AdamW", (), 2, 33),
    ("Lion", (), 15, 21),
    ("Adafactor", (), 99, 33),
    ("APOLLO", (), 138, 31),
    ("Muon", (), 232, 54),
    ("AdamW8bit", (), 15, 17),
    ("AdamWBF16", (BF16,), 15, 37),
    ("AdamWBF16", (BF16, '--optimizer.options={rounding = "stochastic"}'), 15, 29),
]


@pytest.mark.parametrize(("name", "options", "kernels", "size"), OPTIMIZER_STEPS)
def test_the_step_of_an_optimizer_takes_few_kernels_and_bytes(card, name, options, kernels, size):
    argv = ["--job.config_file=train_configs/llama3_8b.toml", *SMALL, "--model.overrides={n_layers = 2}"]
    costs = ask_card(card, "optimizer_costs", 0, 1, *argv, f"--optimizer.name={name}", *options)
    assert costs["host_waits"] == {}
    assert costs["kernels"]["all"] <= kernels * costs["trained"] / 1e9
    assert costs["bytes"]["all"] <= size * costs["trained"]


@pytest.mark.parametrize(("name", "products"), [("AdamW", False), ("Muon", True)])
def test_a_kernel_is_estimated_by_the_longer_of_bytes_and_products(card, name, products):
    """AdamW is bound by its bytes; Muon multiplies each matrix with itself 15 times."""
    argv = ["--job.config_file=train_configs/llama3_8b.toml", *SMALL, "--model.overrides={n_layers = 1}"]
    costs = ask_card(card, "optimizer_costs", 0, 1, *argv, f"--optimizer.name={name}")
    kernels, size, seconds = (costs[unit]["all"] for unit in ("kernels", "bytes", "seconds"))
    by_bytes = size / 2.8e12 + kernels * 2e-6
    assert seconds > 1.5 * by_bytes if products else seconds == pytest.approx(by_bytes)


def test_a_chunk_of_the_loss_reads_and_writes_the_gradient_of_the_head_once(card):
    """A chunk moves 12 bytes a weight: the weight in bfloat16, forward and backward, and the float32 sum, both ways."""
    argv = ["--job.config_file=train_configs/debug_model.toml", *SMALL, "--model.name=llama3.2", "--model.flavor=1B"]
    argv += ["--model.overrides={n_layers = 1}", "--training.local_batch_size=1", "--training.seq_len=1024"]
    few, many = (ask_card(card, "costs", 0, 1, *argv, f"--training.loss_chunks={chunks}") for chunks in (4, 12))
    assert few["host_waits"] == many["host_waits"] == {}
    assert 0 < many["bytes"]["all"] - few["bytes"]["all"] <= 8 * 12 * 128256 * 2048


def test_expert_weights_are_gathered_before_the_host_waits(card):
    """The next layer's experts, 97 % of its bytes, are gathered before the wait, so that the network is not idle."""
    argv = ["--job.config_file=train_configs/qwen3_moe_235b.toml", *SMALL, "--model.overrides={n_layers = 3}"]
    order = ask_card(card, "gathers_and_waits", 73, 256, *argv)
    experts = 16 * 3 * 4096 * 1536  # numbers of a rank
    waits = [at for at, (kind, _) in enumerate(order) if kind == "wait"]
    assert len(waits) == 3
    assert [sum(size == experts for _, size in order[:at]) for at in waits] == [2, 3, 3]


def test_the_gradient_of_the_head_is_reduced_during_the_backward_of_blocks(card):
    """It is the largest gradient. Reduced with the root's group, it would overlap no computation."""
    argv = ["--job.config_file=train_configs/llama3_8b.toml", *SMALL, "--model.overrides={n_layers = 2}"]
    order = ask_card(card, "gathers_and_reductions", 3, 8, *argv)
    embedding, width = 128256 * 4096, 4096
    block = 2 * width * width + 2 * width * 1024 + 3 * width * 14336 + 2 * width
    assert [size for kind, size in order if kind == "gather"] == [
        embedding,
        block,
        block,
        embedding + width,
        block,
        block,
    ]
    assert [size for kind, size in order if kind == "reduction"] == [embedding + width, block, block, embedding]


@pytest.mark.parametrize(
    ("job", "options"),
    [
        ("llama3_70b", []),
        ("qwen3_moe_235b", ["--parallelism.data_parallel_replicate_degree=2"]),
    ],
)
def test_metrics_need_no_communicator_of_all_ranks(card, job, options):
    """Such a communicator would take up to 1 GB on every GPU. Numbers for the host are reduced over gloo, and the load
    of experts in existing groups.
    """
    argv = [f"--job.config_file=train_configs/{job}.toml", *SMALL, "--model.overrides={n_layers = 1}", *options]
    assert max(ask_card(card, "sizes_of_groups", 73, 256, *argv)) < 256


def mismatches(of_rank: list[list]) -> list[str]:
    """Return pairs of pipeline ranks that do not issue matching messages in the same order."""
    mismatched = []
    for low in range(len(of_rank)):
        for high in range(low + 1, len(of_rank)):
            ends = []
            for rank, peer_rank, sends in ((low, high, "isend"), (high, low, "irecv")):
                ends.append([(name == sends, shape) for name, peer, shape, _ in of_rank[rank] if peer == peer_rank])
            if ends[0] != ends[1]:
                mismatched.append(f"{low} and {high}")
    return mismatched


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
    messages_by_schedule = ask_card(
        card, "messages_by_schedule", stride, ranks, f"--schedules={names}", *job.split(" "), *SMALL, mutant=mutant
    )
    faults = []
    for schedule, of_rank in messages_by_schedule.items():
        assert all(of_rank)
        faults += [f"{schedule}: order of {pair}" for pair in mismatches(of_rank)]
        if any(coalesced for messages in of_rank for *_, coalesced in messages):
            faults.append(f"{schedule}: coalesced")
    return faults


@pytest.mark.parametrize("case", PIPELINES)
def test_both_ends_of_a_pipeline_issue_equal_messages_in_order(card, case):
    """No message is coalesced either: NCCL uses another communicator for these."""
    assert faults_in_messages(card, case) == []


# Controls: planted faults that the checks find


def test_control_a_tensor_on_a_wrong_device_is_detected(card):
    argv = ["--job.config_file=train_configs/debug_model.toml", *SMALL, "--model.overrides={n_layers = 1}"]
    before = "tests.support.fake_cuda_mutants:wrong_device"
    ok, error = card.ask("tests.support.fake_cuda_questions:host_waits", argv, 0, 2, before=before)
    assert not ok and "FakeTensorDeviceMismatchError" in error


@pytest.mark.parametrize(
    ("mutant", "wait"), [("host_wait", "number {}:clip_and_read"), ("copied_numbers", "numbers {}:<lambda>")]
)
def test_control_a_host_wait_in_every_step_is_detected(card, mutant, wait):
    argv = ["--job.config_file=train_configs/debug_model.toml", *SMALL, "--model.overrides={n_layers = 1}"]
    waits = ask_card(card, "host_waits", 0, 2, *argv, mutant=mutant)
    assert waits == {wait.format("fake_cuda_mutants.py"): 1}


@pytest.mark.parametrize(
    ("mutant", "fault"), [("coalesced", "1F1B: coalesced"), ("other_order", "1F1B: order of 1 and 2")]
)
def test_control_messages_that_do_not_match_are_detected(card, mutant, fault):
    assert fault in faults_in_messages(card, "plain", mutant, ("1F1B",))


@pytest.mark.parametrize("name", ["kernels", "rehearse", "step"])
def test_the_fake_device_is_imported_before_what_imports_torch(name):
    tree = ast.parse((Path(fake_cuda.__file__).parent / f"{name}.py").read_text())
    sources = [node.module for node in tree.body if isinstance(node, ast.ImportFrom)]
    assert next(source for source in sources if source.startswith("torch")) == "torchtitan.planner.fake_cuda"
