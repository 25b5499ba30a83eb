"""Random legal plans of models of published widths with few layers, to compare predictions of their memory."""

import random
from collections.abc import Iterator

from torchtitan.config.manager import load
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
RECOMPUTE = (("none", "op"), ("full", "op"), ("selective", "op"), ("selective", "2"))
NOT_READ = ("model.tokenizer_path", "training.dataset", "data.")
"""Prefixes of options with faults that do not matter, as nothing is trained."""


def memory_plan(seed: int, index: int, models: tuple[tuple[str, str], ...] = MODELS) -> tuple[int, list[str]]:
    """Return the number of ranks and the command line of a legal job."""
    chooser = random.Random(f"{seed}/{index}")
    while True:
        ranks, arguments = _proposed(chooser, models)
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
    dense = ", n_dense_layers = 0" if family == "deepseek" else ""
    settings = {
        "model.name": family,
        "model.flavor": flavor,
        "model.overrides": f"{{n_layers = {layers}{dense}}}",
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
    if family in ("qwen3_moe", "deepseek"):
        settings["parallelism.expert_parallel_degree"] = choose((1, 8, 32))
    return shard * replicas * tp * cp * pp, [f"--{name}={value}" for name, value in settings.items()]
