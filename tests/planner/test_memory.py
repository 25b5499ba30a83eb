"""Memory by formula against the rehearsal, and its parts against the simulated schedules."""

import itertools
import operator

import pytest

from tests.support.memory_plans import FAMILIES, MODELS, adapter_plan, memory_plan, memory_plans, optimizer_plan
from tests.support.pool import run_alone
from torchtitan.config.manager import load
from torchtitan.core.hardware import load_hardware
from torchtitan.job import ResolvedJob
from torchtitan.models import SIZES
from torchtitan.parallelisms.pipeline.actions import with_full_backward
from torchtitan.parallelisms.pipeline.cut import schedule_traits, stages_of_rank
from torchtitan.parallelisms.pipeline.simulator import simulate
from torchtitan.parallelisms.pipeline.tables import build_table
from torchtitan.planner import estimate
from torchtitan.planner.memory.closed_form import fit, fullest, moments, predict_memory
from torchtitan.planner.memory.rank_layout import in_flight, stages_in_flight, waiting_weight_gradients
from torchtitan.planner.memory.rank_sizes import RankSizes

SCHEDULES = {
    "GPipe": 1,
    "1F1B": 1,
    "LoopedBFS": 2,
    "Interleaved1F1B": 3,
    "InterleavedZeroBubble": 2,
    "ZBVZeroBubble": 2,
    "DualPipeV": 2,
}
"""Schedule -> stages per rank."""


def numbers_of_microbatches(schedule, pp):
    """Return numbers of microbatches that the schedule supports: few, even rounds of pp, and others."""
    traits, stages = schedule_traits(schedule), pp * SCHEDULES[schedule]
    numbers = sorted({2, pp // 2, pp - 1, pp, pp + pp // 2, 2 * pp, 2 * pp + 2, 3 * pp, 8 * pp})
    least = stages if traits.microbatch_per_stage else 1
    return [n for n in numbers if n >= least and not (traits.equal_rounds and n % max(1, n // pp))]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("merged", [False, True])
def test_microbatches_in_flight_are_those_of_the_simulation(schedule, merged):
    chunks = SCHEDULES[schedule]
    for pp in (2, 4, 8):
        for microbatches in numbers_of_microbatches(schedule, pp):
            table = build_table(schedule, pp, microbatches, chunks)
            simulated = simulate(with_full_backward(table) if merged else table).peak_activations
            counts = [in_flight(schedule, rank, pp, microbatches, chunks, merged) for rank in range(pp)]
            assert counts == [chunks * peak for peak in simulated], (pp, microbatches)


def fullest_states(row, stages):
    """Return the numbers of stored microbatches of each stage in all states that no other one exceeds."""
    counts, states = dict.fromkeys(stages, 0), set()
    for action in (single for pair in row for single in pair.singles):
        counts[action.stage] += action.kind == "F"
        states.add(tuple(counts.values()))
        counts[action.stage] -= action.kind in ("B", "W")
    return {
        state for state in states if not any(state != other and all(map(operator.le, state, other)) for other in states)
    }


@pytest.mark.parametrize("merged", [False, True])
def test_weight_gradients_wait_as_in_the_table(merged):
    schedules = [name for name in SCHEDULES if schedule_traits(name).split_backward]
    for schedule, pp in itertools.product(schedules, (2, 4, 8)):
        for microbatches in numbers_of_microbatches(schedule, pp):
            table = build_table(schedule, pp, microbatches, SCHEDULES[schedule])
            for rank, row in enumerate(with_full_backward(table) if merged else table):
                stored, waiting, states = 0, 0, []
                for action in (single for pair in row for single in pair.singles):
                    stored += action.kind == "F"
                    states += [(stored, waiting)] * (action.kind == "F")
                    stored -= action.kind in ("B", "W")
                    waiting += (action.kind == "I") - (action.kind == "W")
                expected = waiting_weight_gradients(schedule, rank, pp, microbatches, merged)
                assert max(states)[1] == expected, (schedule, pp, microbatches, rank)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("merged", [False, True])
def test_stages_in_flight_are_those_of_the_table(schedule, merged):
    chunks = SCHEDULES[schedule]
    for pp in (2, 4, 8):
        for microbatches in numbers_of_microbatches(schedule, pp):
            table = build_table(schedule, pp, microbatches, chunks)
            for rank, row in enumerate(with_full_backward(table) if merged else table):
                stages = stages_of_rank(rank, pp, pp * chunks, schedule_traits(schedule).style)
                states = stages_in_flight(schedule, rank, pp, microbatches, chunks, merged)
                assert set(states) == fullest_states(row, stages), (pp, microbatches, rank)


def test_random_plans_are_of_all_families_that_the_formula_describes():
    """All decoders without layers that have a state, and with heads of one width."""
    decoders = {name: flavors["debugmodel"] for name, flavors in SIZES.items() if name != "roberta"}
    described = {
        name
        for name, args in decoders.items()
        if not hasattr(args, "n_state_layers") and not hasattr(args, "global_head_dim")
    }
    assert {family for family, _ in FAMILIES} == described


def rehearsed_peaks(jobs):
    """Return the peak of the tensors of each job's worst rank, in bytes."""
    resolved = [ResolvedJob(load(arguments), ranks, "cuda") for ranks, arguments in jobs]
    return [estimate.worst(estimate.predict(job)).peak for job in resolved]


DENSE, EXPERTS, FEW_EXPERTS = MODELS[:6], MODELS[6:], (("mixtral", "8x7B"),)
ROTATION = "--parallelism.context_parallel_rotate_method="
CONTEXT = [
    *("--model.name=llama3", "--model.flavor=8B", "--model.overrides={n_layers=4}", "--training.seq_len=32768"),
    *("--activation_checkpoint.mode=selective", "--activation_checkpoint.selective_ac_option=op"),
    *("--parallelism.context_parallel_degree=4", "--parallelism.data_parallel_shard_degree=8"),
    "--training.local_batch_size=1",
]
"""Selective recompute by operator stores what each method of context parallel sends."""


def latent_plan(method, mode, sizes="n_layers = 4, n_dense_layers = 4", cp=4, tp=1, ep=1):
    """Return a plan of latent attention with 8 x cp x tp ranks and 32,768 tokens.

    Context parallel stores copies of the keys and values of every head. With full recompute of dense layers the
    backward of attention has the peak: its float32 sums and kernels are a third of it where 4 ranks gather keys.
    """
    settings = {
        "model.name": "deepseek",
        "model.flavor": "671B",
        "model.overrides": f"{{{sizes}}}",
        "training.seq_len": 32768,
        "training.local_batch_size": 1,
        "activation_checkpoint.mode": mode,
        "activation_checkpoint.selective_ac_option": "op",
        "parallelism.data_parallel_shard_degree": 8,
        "parallelism.context_parallel_degree": cp,
        "parallelism.context_parallel_rotate_method": method,
        "parallelism.tensor_parallel_degree": tp,
        "parallelism.expert_parallel_degree": ep,
    }
    return 8 * cp * tp, [f"--{name}={value}" for name, value in settings.items()]


REPLICAS = {
    "model.name": "llama3",
    "model.flavor": "8B",
    "model.overrides": "{n_layers = 5}",
    "model.tokenizer_path": "bytes",
    "training.seq_len": 2048,
    "training.local_batch_size": 1,
    "training.dtype": "bfloat16",
    "parallelism.data_parallel_shard_degree": 1,
    "parallelism.data_parallel_replicate_degree": 2,
}
"""FSDP keeps the float32 sums over replicas of all units until the end of backward: a third of this plan's peak. Where
gradients are accumulated in a pipeline, plan 102, it keeps those of the earlier batch."""
WIDE = [
    *("--model.name=llama3", "--model.flavor=70B", "--model.overrides={n_layers=4}", "--training.seq_len=2048"),
    *("--training.local_batch_size=1", "--parallelism.data_parallel_shard_degree=32"),
    "--activation_checkpoint.mode=full",
]
SHARDS = "--parallelism.data_parallel_shard_degree="
BIASES = ["--model.name=qwen2", "--model.flavor=0.5B", "--model.overrides={n_layers=4}", "--training.seq_len=2048"]
QUANTIZED = ["--parallelism.fsdp_quantized_reduce=int4", "--parallelism.fsdp_quantized_gather=int8"]
GEMMA = [
    *("--model.name=gemma3", "--model.flavor=4B", "--model.overrides={n_layers=6}", "--training.seq_len=4096"),
    *("--training.local_batch_size=2", "--parallelism.data_parallel_shard_degree=8", "--model.tokenizer_path=bytes"),
    "--training.document_mask=false",
]
"""Norms of the outputs too; two rotations; a large tied embedding."""
OF_8 = ["--training.seq_len=2048", "--training.local_batch_size=1", f"{SHARDS}8", "--activation_checkpoint.mode=none"]
CAPPED = ["--model.name=gemma2", "--model.flavor=9B", "--model.overrides={n_layers=3}", *OF_8]
CLAMPED = ["--model.name=gpt_oss", "--model.flavor=20B", "--model.overrides={n_layers=2}", *OF_8]


def rounded_plan(weights, inputs, *options, tp=1, words=128256):
    """Return a job of quantization-aware training whose peak is in the head's backward, or in a feed-forward's."""
    model = ["--model.name=llama3", "--model.flavor=8B", f"--model.overrides={{n_layers=2, vocab_size={words}}}"]
    formats = [f"--qat.weight_dtype={weights}", f"--qat.activation_dtype={inputs}"]
    plan = [f"{SHARDS}4", f"--parallelism.tensor_parallel_degree={tp}", "--activation_checkpoint.mode=full"]
    return 4 * tp, [*model, *formats, *plan, "--model.tokenizer_path=bytes", "--training.local_batch_size=1", *options]


SMALL = [
    *("--model.name=llama3", "--model.flavor=8B", "--model.overrides={n_layers=5}", "--training.seq_len=4096"),
    *("--model.tokenizer_path=bytes", "--training.local_batch_size=2", f"{SHARDS}4"),
]
SAMPLES = {
    "state on the host": [(4, [*SMALL, "--training.enable_cpu_offload=true"])],
    "every second block": [
        (4, [*SMALL, "--activation_checkpoint.mode=selective", "--activation_checkpoint.selective_ac_option=2"])
    ],
    "dense": [*memory_plans(1, 2, DENSE), memory_plan(3, 3, DENSE), memory_plan(5, 7, DENSE)],
    "windows": [(8, [*GEMMA, f"--activation_checkpoint.mode={mode}"]) for mode in ("none", "selective", "full")],
    "caps and clamps": [(8, [*CAPPED, f"--training.loss_chunks={chunks}"]) for chunks in (0, 1)] + [(8, CLAMPED)],
    "biases": [(4, [*BIASES, f"--parallelism.tensor_parallel_degree={tp}", f"{SHARDS}{4 // tp}"]) for tp in (1, 2)],
    "context": [(32, [*CONTEXT, ROTATION + method]) for method in ("allgather", "ulysses", "alltoall")],
    "second shards": [
        (32, [*WIDE, "--parallelism.fsdp_reshard_after_forward=2"]),
        (32, [*WIDE, "--parallelism.fsdp_reshard_after_forward=8", *QUANTIZED]),
    ],
    "latent attention": [
        latent_plan("ulysses", "selective", "n_layers = 3"),
        memory_plan(1, 9),
        latent_plan("alltoall", "full"),
        latent_plan("allgather", "none", cp=2),
        latent_plan("allgather", "full", "n_layers = 2, n_dense_layers = 0", cp=8, ep=8),
        latent_plan("allgather", "full", "n_layers = 16, n_dense_layers = 16", tp=4),
    ],
    "experts": [*(memory_plan(1, index, EXPERTS) for index in (0, 7)), memory_plan(7, 0, FEW_EXPERTS)],
    "replicas": [(2, [f"--{name}={value}" for name, value in REPLICAS.items()]), memory_plan(1, 102)],
    "optimizers": [optimizer_plan(1, index) for index in (0, 2)],
    "units": [memory_plan(1, index) for index in (8, 24, 41, 128, 151)],
    "last blocks": [memory_plan(1, index) for index in (78, 72)],
    "stages": [*(memory_plan(1, index) for index in (28, 60, 127, 132, 149, 154, 187)), memory_plan(2, 0)],
    "loss": [memory_plan(1, index) for index in (23, 34)],
    "rounded operands": [
        rounded_plan("int4", "int8", "--training.seq_len=2048", "--training.loss_chunks=1"),
        rounded_plan("nvfp4", "nvfp4", "--training.seq_len=2048", "--training.loss_chunks=4"),
        rounded_plan("int8", "int8", "--training.seq_len=8192", "--training.loss_chunks=32", tp=2, words=2048),
    ],
}
"""Random plans. The last two dense ones: GPipe, accumulated gradients. With experts: GPipe with tensor parallel,
experts that no other rank has, and fewer experts than shards. Peaks in the reduction of a unit: of a block while one
other is gathered, divided on one shard, of the embedding on one shard, of experts, of the head. Last blocks: two of
them, of which the first gathers no other in backward; experts that replicas gather again. Stages: probabilities that
live through backward; weight gradients that wait; gathered on one shard; no gradients before all forwards of a stage;
reduced one after the other; unequal ones in flight; the backward of the second loss in chunks; experts that tensor-
parallel ranks add in the end. Loss: three gradients of a tied head; the head's gathered buffer lives until the end of
forward. Rounded operands: of the head, of its chunks, of a feed-forward's last matrix."""


@pytest.mark.parametrize("kind", SAMPLES)
def test_the_formula_agrees_with_the_rehearsal(kind):
    """A sample of random plans; scripts/compare_memory.py compares any number of them."""
    jobs = SAMPLES[kind]
    for (ranks, arguments), peak in zip(jobs, run_alone(rehearsed_peaks, jobs), strict=True):
        assert predict_memory(ResolvedJob(load(arguments), ranks)).total == pytest.approx(peak, rel=0.03), arguments


ONE_SAMPLE = ["--model.overrides={n_layers=3}", "--training.seq_len=4096", "--training.local_batch_size=1"]
SHARDED = [*ONE_SAMPLE, "--parallelism.data_parallel_shard_degree=4", "--activation_checkpoint.mode=full"]
LORA_8B = ["--model.name=llama3", "--model.flavor=8B", "--adapter.kind=lora", "--adapter.rank=8"]
TIED = ["--model.name=llama3.2", "--model.flavor=1B"]
MISTRAL = ["--model.name=mistral", "--model.flavor=7B", "--adapter.kind=qlora", "--adapter.rank=8"]
KNOWN_MOMENTS = {
    "float32, one rank": (1, [*LORA_8B, *ONE_SAMPLE, "--training.mixed_precision_param=float32"]),
    "float32, loss in chunks": (
        2,
        [
            *("--model.name=llama3", "--model.flavor=8B", "--training.mixed_precision_param=float32"),
            *(*ONE_SAMPLE, "--training.loss_chunks=4", "--parallelism.tensor_parallel_degree=2"),
        ],
    ),
    "tied, autocast": (1, [*TIED, *ONE_SAMPLE, "--training.loss_chunks=8"]),
    "tied, last gather": (4, [*TIED, *SHARDED, "--adapter.kind=lora_int8", "--adapter.rank=8"]),
    "gather of the head": (4, [*LORA_8B, *SHARDED, "--training.loss_chunks=16"]),
    "gate of a frozen feed-forward": (
        4,
        [*MISTRAL, *SHARDED, "--training.loss_chunks=16", '--adapter.target=["*.wq"]'],
    ),
    "unpacked w2": (4, [*MISTRAL, *SHARDED, "--training.loss_chunks=16", '--adapter.target=["*.w2"]']),
    "recompute at the border of a region": (
        16,
        [
            *(*LORA_8B, "--model.overrides={n_layers=2}", "--training.seq_len=4096", "--training.local_batch_size=4"),
            *("--parallelism.data_parallel_shard_degree=4", "--parallelism.tensor_parallel_degree=4"),
            *("--training.loss_chunks=64", "--activation_checkpoint.mode=full", '--adapter.target=["*.wq"]'),
        ],
    ),
    "unpacked w1": (4, [*MISTRAL, *SHARDED, "--training.loss_chunks=16", '--adapter.target=["*.w1"]']),
}
"""Jobs whose peak is at a moment of its own."""


def test_the_formula_has_moments_of_frozen_and_tied_models_and_of_float32():
    peaks = run_alone(rehearsed_peaks, list(KNOWN_MOMENTS.values()))
    for (name, (ranks, arguments)), peak in zip(KNOWN_MOMENTS.items(), peaks, strict=True):
        total = predict_memory(ResolvedJob(load(arguments), ranks, "cuda")).total
        assert total == pytest.approx(peak, rel=0.012), (name, total / peak - 1)


def test_the_formula_agrees_with_rehearsals_of_adapters():
    """A sample of random plans, as of full training. docs/planning.md has the errors of more of them."""
    plans = [adapter_plan(1, index) for index in range(8)]
    peaks = run_alone(rehearsed_peaks, plans)
    errors = [
        predict_memory(ResolvedJob(load(arguments), ranks)).total / peak - 1
        for (ranks, arguments), peak in zip(plans, peaks, strict=True)
    ]
    assert max(map(abs, errors)) < 0.08 and sum(abs(error) < 0.03 for error in errors) >= 7, errors


@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble"])
def test_fewer_microbatches_than_ranks_need_less(schedule):
    job = [
        *("--model.name=llama3", "--model.flavor=8B", "--parallelism.pipeline_parallel_degree=4"),
        f"--parallelism.pipeline_parallel_schedule={schedule}",
    ]
    jobs = [ResolvedJob(load([*job, f"--training.local_batch_size={n}"]), 4) for n in (2, 3, 4)]
    two, three, four = (predict_memory(job).total for job in jobs)
    assert two < three < four


UNEVEN = [
    ("llama3.1", "405B", "n_layers = 126", "1F1B", 64, 128, 1),
    ("llama3.1", "405B", "n_layers = 45", "Interleaved1F1B", 4, 8, 1),
    ("llama3.1", "405B", "n_layers = 45", "ZBVZeroBubble", 8, 10, 5),  # later ranks have more in flight
    ("llama3.1", "405B", "n_layers = 30", "InterleavedZeroBubble", 8, 16, 6),  # the most weight gradients wait
    ("deepseek", "671B", "n_layers = 61", "1F1B", 16, 64, 1),
    ("deepseek", "671B", "n_layers = 61", "DualPipeV", 8, 16, 1),
    ("deepseek", "671B", "n_layers = 61", "GPipe", 4, 4, 1),
]
"""Family, flavor, size, schedule, pipeline ranks, microbatches, and the rank that needs the most."""


@pytest.mark.parametrize(("family", "flavor", "size", "schedule", "pp", "microbatches", "rank"), UNEVEN)
def test_the_rank_that_needs_the_most_is_examined(family, flavor, size, schedule, pp, microbatches, rank):
    settings = {
        "model.name": family,
        "model.flavor": flavor,
        "model.overrides": f"{{{size}}}",
        "training.seq_len": 4096,
        "training.local_batch_size": microbatches,
        "parallelism.pipeline_parallel_degree": pp,
        "parallelism.pipeline_parallel_schedule": schedule,
        "activation_checkpoint.mode": "none" if schedule == "InterleavedZeroBubble" else "selective",
    }
    job = ResolvedJob(load([f"--{name}={value}" for name, value in settings.items()]), pp)
    ranks = [RankSizes(job, number) for number in range(pp)]
    peaks = [max(moment.total() for moment in moments(sizes)) for sizes in ranks]
    assert predict_memory(job).total == max(peaks) == peaks[rank]
    assert len(fullest(job)) <= 5


def test_blocks_that_are_gathered_in_advance_take_memory():
    """The rehearsal of this job with fsdp_prefetch = 3 has 5.93 GiB, 0.64 more than without."""
    arguments = ["--model.name=llama3", "--model.flavor=8B", "--model.overrides={n_layers=8, vocab_size=512}"]
    arguments += ["--training.seq_len=2048", "--training.local_batch_size=1", "--activation_checkpoint.mode=full"]
    usual, one, three = (
        predict_memory(ResolvedJob(load([*arguments, f"--parallelism.fsdp_prefetch={blocks}"]), 8, "cuda")).total
        / 2**30
        for blocks in (0, 1, 3)
    )
    assert one == usual and three == pytest.approx(5.93, rel=0.04)


def test_a_gpu_reserves_more_than_its_tensors():
    (ranks, arguments), *_ = memory_plans(1, 1, DENSE)
    prediction = predict_memory(ResolvedJob(load(arguments), ranks), load_hardware("h100-80"))
    assert prediction.total < prediction.low < prediction.high


SELECTIVE = {"activation_checkpoint.mode": "selective", "activation_checkpoint.selective_ac_option": "op"}
PIPELINE = {"parallelism.pipeline_parallel_degree": 8, "parallelism.pipeline_parallel_schedule": "1F1B"}
PUBLISHED = [
    ("8B", dict(shard=8, batch=2), SELECTIVE, (82.4, 77.0, 76.8)),  # eager, compiled, compiled in float8
    ("8B", dict(shard=128, batch=2), SELECTIVE, (67.0, 62.0, 61.8)),
    ("8B", dict(shard=8, seq_len=32768), {}, (83.9,)),  # float8, as all below
    ("8B", dict(shard=4, cp=2, seq_len=65536), {}, (84.2,)),
    ("8B", dict(shard=2, cp=4, seq_len=131072), {}, (84.0,)),
    ("8B", dict(shard=1, cp=8, seq_len=262144), {}, (84.5,)),
    ("70B", dict(shard=32, tp=8, batch=16), {}, (71.9, 67.6)),  # without and with asynchronous tensor parallel
    ("405B", dict(shard=8, tp=8, batch=32), PIPELINE, (82.5,)),
    (
        "405B",
        dict(shard=8, tp=8, batch=32),
        PIPELINE | {"parallelism.pipeline_parallel_schedule": "Interleaved1F1B"},
        (72.7,),
    ),
]
"""Flavor, plan, further options, and GiB that PyTorch's torchtitan published for H100 with 96 GB (commit 9dec370)."""


def published_prediction(flavor, options, *, shard, tp=1, cp=1, batch=1, seq_len=8192):
    settings = {
        "model.name": "llama3.1",
        "model.flavor": flavor,
        "model.tokenizer_path": "bytes",
        "training.seq_len": seq_len,
        "training.local_batch_size": batch,
        "training.loss_chunks": 1,  # the whole logits in float32
        "activation_checkpoint.mode": "full",
        "parallelism.data_parallel_shard_degree": shard,
        "parallelism.tensor_parallel_degree": tp,
        "parallelism.context_parallel_degree": cp,
    }
    ranks = shard * tp * cp * options.get("parallelism.pipeline_parallel_degree", 1)
    job = ResolvedJob(load([f"--{name}={value}" for name, value in (settings | options).items()]), ranks)
    return predict_memory(job, load_hardware("h100-96-500w"), drops_every_second_product=True)


def test_published_runs_reserve_memory_within_the_interval():
    inside = []
    for flavor, plan, options, figures in PUBLISHED:
        prediction = published_prediction(flavor, options, **plan)
        inside += [prediction.low <= gib * 2**30 <= prediction.high for gib in figures]
    assert (sum(inside), len(inside)) == (13, 14)


TRAINED = {
    "30B, 8k": (dict(dim=7168, n_layers=48, n_heads=56, ffn_dim=28672), 8192, 1, 21, "full", "h100-80", "may fit"),
    "30B, 2k": (dict(dim=7168, n_layers=48, n_heads=56, ffn_dim=28672), 2048, 3, 21, "full", "a100-80", "may fit"),
    "7B, 2k": (dict(dim=4096, n_layers=32, n_heads=32, ffn_dim=16384), 2048, 6, 1, "none", "h100-80", "may fit"),
    "1B, 2k": (dict(dim=2048, n_layers=24, n_heads=16, ffn_dim=8192), 2048, 8, 8, "none", "a100-40", "may fit"),
    "7B, 8k": (dict(dim=4096, n_layers=32, n_heads=32, ffn_dim=16384), 8192, 8, 2, "full", "h100-80", "fits"),
}
"""MPT's sizes in runs of llm-foundry (8c8dd48f7) on 8 GPUs: length, samples, passes, recompute, GPU."""


@pytest.mark.parametrize("name", TRAINED)
def test_published_runs_that_trained_are_not_excluded(name):
    sizes, seq_len, rows, passes, recompute, gpu, expected = TRAINED[name]
    sizes = ", ".join(
        f"{key} = {size}" for key, size in (sizes | {"vocab_size": 50368, "max_seq_len": seq_len}).items()
    )
    settings = {
        "model.name": "gpt2",
        "model.flavor": "1558M",
        "model.overrides": f"{{{sizes}}}",
        "model.tokenizer_path": "bytes",
        "training.seq_len": seq_len,
        "training.local_batch_size": rows,
        "training.global_batch_size": 8 * rows * passes,
        "training.loss_chunks": 1,
        "activation_checkpoint.mode": recompute,
    }
    hardware = load_hardware(gpu)
    job = ResolvedJob(load([f"--{key}={value}" for key, value in settings.items()]), 8)
    memory = predict_memory(job, hardware)
    assert fit(memory.low, memory.needed, hardware.memory_gib * 2**30) == expected


def test_repeated_products_are_not_stored():
    """In 8B with two samples of 8,192 tokens, wk, wo and w3 of 32 layers are 19.0 GiB in bfloat16."""
    options = SELECTIVE | {"model.name": "llama3", "model.flavor": "8B", "model.tokenizer_path": "bytes"}
    options |= {"training.seq_len": 8192, "training.local_batch_size": 2, "parallelism.data_parallel_shard_degree": 8}
    job = ResolvedJob(load([f"--{name}={value}" for name, value in options.items()]), 8)
    difference = predict_memory(job).total - predict_memory(job, drops_every_second_product=True).total
    assert difference == 32 * 2 * 2 * 8192 * (1024 + 4096 + 14336)


@pytest.mark.parametrize("tp", [1, 2])
def test_biases_are_split_with_the_rows_of_their_matrices(tp):
    """Tensor parallel divides everything in a block of Qwen 2 except its norms; the final norm is not counted."""
    config = load(["--model.name=qwen2", "--model.flavor=0.5B", f"--parallelism.tensor_parallel_degree={tp}"])
    norms = 2 * 24 * 896
    assert RankSizes(ResolvedJob(config, tp), 0).all_weights == (494_032_768 - 896 - norms) / tp + norms
