"""Random legal plans of models of published widths with few layers, to compare predictions of their memory.

They train all weights, or an adapter.
"""

import random
from collections.abc import Callable, Iterator

from torchtitan.config.manager import load
from torchtitan.models import SIZES
from torchtitan.parallelisms.pipeline.cut import SCHEDULES
from torchtitan.rules import check

MODELS = (
    ("llama3", "8B"),
    ("llama3", "70B"),
    ("llama3.1", "405B"),
    ("llama3.2", "1B"),
    ("qwen3", "8B"),
    ("qwen3", "32B"),
    ("qwen3_moe", "30B-A3B"),
    ("deepseek", "671B"),
)
FAMILIES = (
    *MODELS,
    *(("llama2", "7B"), ("deepseek", "16B"), ("deepseek", "236B"), ("gemma2", "9B"), ("gemma3", "12B"), ("glm", "9B")),
    *(("glm4", "9B"), ("glm4_moe", "106B-A12B"), ("gpt2", "1558M"), ("gpt_oss", "20B"), ("granite", "8B")),
    *(("mistral", "Nemo-12B"), ("mixtral", "8x7B"), ("olmo2", "7B"), ("olmo3", "7B"), ("opt", "6.7B")),
    *(("phi3", "mini-4k"), ("phi4", "14B"), ("qwen2", "7B"), ("qwen2_moe", "57B-A14B"), ("seed_oss", "36B")),
    *(("smollm3", "3B"), ("phi", "2.7B"), ("stablelm", "2-12B"), ("falcon", "40B"), ("glm4_moe_lite", "30B-A3B")),
    *(("mistral4", "Small-119B"), ("minimax_m2", "230B-A10B"), ("afmoe", "19B")),
    *(("gemma", "7B"), ("arcee", "4.5B"), ("gpt_neox", "pythia-12B"), ("gptj", "6B"), ("starcoder2", "7B")),
    *(("nemotron", "8B"), ("cohere", "aya-8B"), ("cohere2", "7B"), ("hunyuan_v1_dense", "4B"), ("apertus", "8B")),
    ("llama4", "scout"),
)
"""Models of all families that the formula describes."""
SMALL_MODELS = tuple((family, "debugmodel") for family in ("llama3", "qwen3", "qwen3_moe", "deepseek"))
MOST_PASSES = 12
"""Most layers times microbatches of a job whose messages are rehearsed."""
RECOMPUTE = (("none", "op"), ("full", "op"), ("selective", "op"), ("selective", "2"))
ADAPTED_MODELS = (("llama3", "8B"), ("llama3", "70B"), ("llama3.2", "1B"), ("qwen3", "8B"), ("llama2", "7B"))
CP_METHODS = ("allgather", "ulysses", "alltoall")
FSDP_MESSAGES = {
    "fsdp_quantized_gather": (None, None, "int8"),
    "fsdp_quantized_reduce": (None, None, "int8", "int4"),
    "fsdp_reshard_after_forward": (None, None, "never", 2, 8),
}
"""Options of FSDP's messages; None: by default."""
TARGETS = ('["all-linear"]', '["*.wq","*.wv"]', '["*attention*"]', '["*feed_forward*"]')
OPTIMIZERS = (
    ("AdamW", "", ""),
    ("AdamW", "foreach", ""),
    ("Adam", "for-loop", ""),
    ("AdamW8bit", "", ""),
    ("AdamWBF16", "", ""),
    ("Adafactor", "", "{}"),
    ("Adafactor", "", "{beta1 = 0.9}"),
    ("Lion", "", ""),
    ("SGD", "", "{}"),
    ("SGD", "for-loop", "{momentum = 0.9, nesterov = true}"),
    ("Muon", "", "{}"),
    ("Muon", "", '{precision = "float32", nesterov = false}'),
    ("APOLLO", "", "{rank = 256}"),
    ("APOLLO", "", '{rank = 1, per = "tensor"}'),
    ("GaLore", "", "{rank = 256}"),
    ("GaLore", "", '{rank = 64, basis = "svd", residual = "fira"}'),
    ("GaLore", "", '{rank = 128, side = "full", inner = "adamw_8bit", basis = "rsvd"}'),
    ("GaLore", "", '{rank = 128, inner = "adafactor", basis = "power"}'),
)
"""Names, implementations and options."""
NOT_READ = ("model.tokenizer_path", "training.dataset", "data.")
"""Prefixes of options with faults that do not matter, as nothing is trained."""


def memory_plan(seed: int, index: int, models: tuple[tuple[str, str], ...] = MODELS) -> tuple[int, list[str]]:
    """Return the number of ranks and the command line of a legal job."""
    return _first_legal(f"{seed}/{index}", lambda chooser: _proposed(chooser, models))


def adapter_plan(seed: int, index: int) -> tuple[int, list[str]]:
    """Return the number of ranks and the command line of a legal job with an adapter."""
    return _first_legal(f"{seed}/{index}", _proposed_adapter)


def message_plan(seed: int, index: int) -> tuple[int, list[str]]:
    """Return the number of ranks and the command line of a legal job, quick to rehearse, on several ranks."""

    def propose(chooser: random.Random) -> tuple[int, list[str]]:
        while True:
            ranks, arguments = _proposed(chooser, MODELS + SMALL_MODELS)
            values = dict(argument.removeprefix("--").split("=", 1) for argument in arguments)
            layers = int(values["model.overrides"].removeprefix("{n_layers = ").partition(",")[0].rstrip("}"))
            passes = (
                layers
                * int(values["training.global_batch_size"])
                // int(values["parallelism.data_parallel_shard_degree"])
            )
            if ranks > 1 and passes <= MOST_PASSES:
                break
        if values["parallelism.context_parallel_degree"] == "2":
            arguments.append(f"--parallelism.context_parallel_rotate_method={chooser.choice(CP_METHODS)}")
        for name, choices in FSDP_MESSAGES.items():
            if (choice := chooser.choice(choices)) is not None:
                arguments.append(f"--parallelism.{name}={choice}")
        return ranks, arguments

    return _first_legal(f"messages {seed}/{index}", propose)


def optimizer_plan(seed: int, index: int) -> tuple[int, list[str]]:
    """Return the number of ranks and the command line of a legal job with any optimizer, with or without an adapter."""

    def propose(chooser: random.Random) -> tuple[int, list[str]]:
        ranks, arguments = _proposed_adapter(chooser) if chooser.random() < 0.25 else _proposed(chooser, MODELS)
        name, implementation, options = chooser.choice(OPTIMIZERS)
        settings = {"name": name, "implementation": implementation, "options": options}
        arguments = [argument for argument in arguments if not argument.startswith("--optimizer.name")]
        return ranks, [*arguments, *(f"--optimizer.{key}={value}" for key, value in settings.items() if value)]

    return _first_legal(f"optimizers {seed}/{index}", propose)


def _first_legal(seed: str, propose: Callable[[random.Random], tuple[int, list[str]]]) -> tuple[int, list[str]]:
    chooser = random.Random(seed)
    while True:
        ranks, arguments = propose(chooser)
        faults = check(load(arguments), ranks, "cuda")
        if all(fault.key.startswith(NOT_READ) for fault in faults):
            return ranks, arguments


def memory_plans(
    seed: int, count: int, models: tuple[tuple[str, str], ...] = MODELS
) -> Iterator[tuple[int, list[str]]]:
    """Yield numbers of ranks and command lines of legal jobs."""
    return (memory_plan(seed, index, models) for index in range(count))


def _proposed(chooser: random.Random, models: tuple[tuple[str, str], ...]) -> tuple[int, list[str]]:
    choose = chooser.choice
    family, flavor = choose(models)
    tp, cp, pp = choose((1, 1, 2, 4, 8)), choose((1, 1, 1, 2)), choose((1, 1, 2, 4))
    shard, replicas = choose((1, 2, 8, 32)), choose((1, 1, 1, 2))
    schedule = choose(tuple(SCHEDULES))
    layers = chooser.randint(1, 3) * pp * SCHEDULES[schedule].stages_per_rank if pp > 1 else chooser.randint(2, 5)
    mode, option = choose(RECOMPUTE)
    local = choose((1, 2)) if pp == 1 else pp * choose((2, 3, 4))
    sizes = SIZES[family][flavor]
    dense = ", n_dense_layers = 0" if getattr(sizes, "n_dense_layers", 0) else ""
    learned_positions = ", max_seq_len = 8192" if family in ("gpt2", "opt") else ""
    settings = {
        "model.name": family,
        "model.flavor": flavor,
        "model.overrides": f"{{n_layers = {layers}{dense}{learned_positions}}}",
        "model.tokenizer_path": "bytes",
        "training.document_mask": "false",
        "training.seq_len": choose((2048, 4096, 8192)),
        "training.local_batch_size": local,
        "training.global_batch_size": local * shard * replicas * choose((1, 1, 2)),
        "training.loss_chunks": choose((0, 0, 1, 4)),
        "training.dtype": choose(("float32", "float32", "bfloat16")),
        "activation_checkpoint.mode": mode,
        "activation_checkpoint.selective_ac_option": option,
        "parallelism.data_parallel_shard_degree": shard,
        "parallelism.data_parallel_replicate_degree": replicas,
        "parallelism.tensor_parallel_degree": tp,
        "parallelism.context_parallel_degree": cp,
        "parallelism.pipeline_parallel_degree": pp,
    }
    if pp > 1:
        settings["parallelism.pipeline_parallel_schedule"] = schedule
    if getattr(sizes, "n_experts", 0):
        settings["parallelism.expert_parallel_degree"] = choose((1, 8, 32))
    return shard * replicas * tp * cp * pp, [f"--{name}={value}" for name, value in settings.items()]


def _proposed_adapter(chooser: random.Random) -> tuple[int, list[str]]:
    choose = chooser.choice
    family, flavor = choose(ADAPTED_MODELS)
    tp, shard, replicas, cp = choose((1, 1, 2, 4)), choose((1, 1, 4, 16)), choose((1, 1, 1, 2)), choose((1, 1, 1, 2))
    mode, option = choose(RECOMPUTE)
    local = choose((1, 2, 4))
    settings = {
        "model.name": family,
        "model.flavor": flavor,
        "model.overrides": f"{{n_layers = {chooser.randint(2, 8)}}}",
        "model.tokenizer_path": "bytes",
        "training.document_mask": "false",
        "training.seq_len": choose((1024, 2048, 4096)),
        "training.local_batch_size": local,
        "training.global_batch_size": local * shard * replicas * choose((1, 1, 2)),
        "training.loss_chunks": choose((0, 0, 4)),
        "training.dtype": choose(("float32", "float32", "bfloat16")),
        "training.enable_cpu_offload": choose(("false", "false", "false", "true")),
        "activation_checkpoint.mode": mode,
        "activation_checkpoint.selective_ac_option": option,
        "parallelism.data_parallel_shard_degree": shard,
        "parallelism.data_parallel_replicate_degree": replicas,
        "parallelism.tensor_parallel_degree": tp,
        "parallelism.context_parallel_degree": cp,
        "adapter.kind": choose(("lora", "qlora", "qlora", "lora_int8")),
        "adapter.rank": choose((8, 16, 64, 256)),
        "adapter.dropout": choose((0.0, 0.0, 0.05)),
        "adapter.target": choose(TARGETS),
        "optimizer.name": choose(("AdamW", "AdamW", "AdamW8bit")),
    }
    return shard * replicas * tp * cp, [f"--{name}={value}" for name, value in settings.items()]
