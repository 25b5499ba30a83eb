"""Command lines of PyTorch's torchtitan since its jobs are Python functions (read at b5bcd76, August 2026):
`torchtitan import "torchrun ... -m torchtitan.train --module llama3 --config llama3_8b --training.steps 100"`.

No Python is run: CONFIGS has the values of the functions that have a translation. They and the options of the line are
written with the names of v0.2.2, which upgrade.py translates. Batches were counted in tokens, here in samples.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torchtitan.config.changes import renamed
from torchtitan.config.layers import Values, layer_of
from torchtitan.config.manager import parse_arguments
from torchtitan.config.options import YES_OR_NO, Fault, hint, show
from torchtitan.core.errors import JobError
from torchtitan.plugins.dialects.models import AUGUST_2026, V0_2_2
from torchtitan.plugins.dialects.upgrade import SAMPLES, upgrade, with_effect
from torchtitan.plugins.importers import TORCHTITAN, ImportSource
from torchtitan.plugins.importers.translation import CommandLine, JobDraft

SOURCE = ImportSource(TORCHTITAN, f"{__name__}:read", "lines with --module and --config of PyTorch's torchtitan")

ROWS, STEP, LENGTH = (
    f"training.{name}"
    for name in ("num_tokens_per_microbatch_per_dp_rank", "num_tokens_per_train_step", "max_context_length")
)
MICROBATCHES, STAGES = "parallelism.num_pp_microbatches", "parallelism.pipeline_parallel_degree"
COUNTS = {ROWS: -1, STEP: -1, LENGTH: -1, MICROBATCHES: 1}
"""Options that are counted otherwise here, and their defaults; those of -1 come from the function."""
RENAMED = {
    "hf_assets_path": "model.hf_assets_path",
    "dump_folder": "job.dump_folder",
    "debug.print_config": "job.print_config",
    "debug.save_config_file": "job.save_config_file",
    "compile.enable_async_tensor_parallel": "parallelism.enable_async_tensor_parallel",
}
SECTIONS = {"profiler": "profiling", "validator": "validation"}
NOTED = {
    "training.disable_cuda_graphs": "no graphs are captured here",
    "parallelism.spmd_backend": "plans are applied without types of tensors; results are the same",
    "parallelism.enable_fsdp_symm_mem": "FSDP communicates as torch does by default",
    "parallelism.enable_sequence_parallel": "tensor parallel splits activations by sequence",
    "dataloader.seed": "not the same: debug.seed decides the order of the data",
    **dict.fromkeys(("debug.enable_structured_logging", "debug.spmd_typechecking"), "it changed no result"),
}
"""Options of the line that become a note."""
WITH_VALUE = ("parallelism.spmd_backend", "dataloader.seed")
"""Those of them that are no flags."""
REPLACED = {"training.seq_len": LENGTH, "training.local_batch_size": ROWS, "training.global_batch_size": STEP}
"""Options of v0.2.2 that such a line no longer has, and those in their place."""
CROSSING = f"not the same: documents went on where samples of {LENGTH} met within {ROWS}; here each sample begins anew"
SHUFFLED = "not the same: documents were shuffled in a buffer of 1,000, and by another seed"


@dataclass(frozen=True)
class Recipe:
    """The job that a function of PyTorch's torchtitan returns.

    `module`: of the function, and name of its model. `samples`: of a microbatch, each of `length` tokens. `values`: the
    other options, by the names of v0.2.2.
    """

    module: str
    flavor: str
    samples: int
    length: int
    values: Values

    def as_values(self) -> Values:
        model = {"model.name": self.module, "model.flavor": self.flavor, "training.document_mask": True}
        return model | self.values


def _of(steps: int, lr: float, assets: str, warmup: int = 200, mode: str = "selective", **values: Any) -> Values:
    """Return the values of a function that trains on C4. Keywords are options, with __ for the point."""
    common = {"training.dataset": "c4", "training.shuffle": True, "training.steps": steps, "optimizer.lr": lr}
    common |= {"model.hf_assets_path": f"./assets/hf/{assets}", "lr_scheduler.warmup_steps": warmup}
    common |= {"activation_checkpoint.mode": mode}
    common |= {"activation_checkpoint.selective_ac_option": "op"} if mode == "selective" else {}
    return common | {name.replace("__", "."): value for name, value in values.items()}


_DEBUG = _of(10, 8e-4, "", warmup=2, lr_scheduler__decay_ratio=0.8, metrics__log_freq=1, checkpoint__interval=10)
_DEBUG |= {"training.dataset": "c4_test", "training.shuffle": False, "model.hf_assets_path": "./tests/assets/tokenizer"}
_DEBUG |= {"checkpoint.last_save_model_only": False}
_LLAMA_DEBUG = _DEBUG | {"validation.freq": 5, "validation.steps": 10, "validation.dataset": "c4_test"}
_LLAMA_DEBUG |= {"validation.dataset_path": SAMPLES["c4_test"]}
_LLAMA_DEBUG |= {"parallelism.pipeline_parallel_schedule": "Interleaved1F1B"}
_QWEN_DEBUG = _DEBUG | {"model.overrides": {"tied_embeddings": True}}
_QWEN_MOE_DEBUG = _DEBUG | {"optimizer.lr": 3e-4, "checkpoint.export_dtype": "float16"}
del _QWEN_MOE_DEBUG["lr_scheduler.decay_ratio"]
_LLAMA: dict[str, Any] = {
    "profiling__enable_profiling": True,
    "profiling__profile_freq": 100,
    "metrics__enable_tensorboard": True,
}
_LLAMA |= {"validation__freq": 500, "validation__steps": 1200, "checkpoint__interval": 500}
_WIDE: dict[str, Any] = _LLAMA | {"parallelism__tensor_parallel_degree": 8, "mode": "full"}
_FLOAT8: dict[str, Any] = {"model__converters": ["float8"], "quantize__linear__float8__filter_fqns": ["output"]}
_FLOAT8 |= {"compile__enable": True, "parallelism__enable_async_tensor_parallel": True}
_QWEN: dict[str, Any] = {"checkpoint__last_save_model_only": False, "checkpoint__export_dtype": "float16"}
_LARGE: dict[str, Any] = _QWEN | {"warmup": 600, "mode": "full"}
_SHUFFLED = _DEBUG | {"training.shuffle": True}
_FLOORED: dict[str, Any] = {"lr_scheduler__decay_ratio": 0.8, "lr_scheduler__decay_type": "cosine"}
_FLOORED |= {"lr_scheduler__min_lr_factor": 0.1}
_DEEPSEEK: dict[str, Any] = _FLOORED | {"parallelism__pipeline_parallel_schedule": "Interleaved1F1B"}
_DEEPSEEK |= {"compile__enable": True, "compile__components": ["loss"]}
_GPT_OSS: dict[str, Any] = _FLOORED | {"warmup": 2000, "mode": "full", "checkpoint__interval": 500}
_GPT_OSS_DEBUG = _SHUFFLED | {"validation.freq": 5, "validation.steps": 10, "activation_checkpoint.mode": "none"}
del _GPT_OSS_DEBUG["activation_checkpoint.selective_ac_option"]
CONFIGS = {
    **dict.fromkeys(
        ("llama3_debugmodel", "llama3_debugmodel_varlen_attn", "llama3_debugmodel_ce_loss"),
        Recipe("llama3", "debugmodel", 8, 2048, _LLAMA_DEBUG),
    ),
    "llama3_8b": Recipe("llama3", "8B", 1, 8192, _of(1000, 3e-4, "Llama-3.1-8B", **_LLAMA)),
    "llama3_70b": Recipe("llama3", "70B", 8, 8192, _of(1000, 1.5e-4, "Llama-3.1-70B", **_WIDE)),
    "llama3_405b": Recipe("llama3", "405B", 2, 8192, _of(3000, 8e-5, "Llama-3.1-405B", warmup=600, **_WIDE, **_FLOAT8)),
    **dict.fromkeys(
        ("qwen3_debugmodel", "qwen3_debugmodel_non_fused_qkv", "qwen3_debugmodel_flex_flash"),
        Recipe("qwen3", "debugmodel", 8, 2048, _QWEN_DEBUG),
    ),
    "qwen3_0_6b": Recipe("qwen3", "0.6B", 4, 4096, _of(10, 3e-4, "Qwen3-0.6B", warmup=2, metrics__log_freq=1, **_QWEN)),
    "qwen3_1_7b": Recipe(
        "qwen3", "1.7B", 4, 4096, _of(100, 8e-4, "Qwen3-1.7B", warmup=20, checkpoint__interval=50, **_QWEN)
    ),
    "qwen3_14b": Recipe("qwen3", "14B", 4, 4096, _of(3000, 8e-4, "Qwen3-14B", **_LARGE)),
    "qwen3_32b": Recipe("qwen3", "32B", 2, 4096, _of(3000, 8e-4, "Qwen3-32B", **_LARGE)),
    "qwen3_moe_debug": Recipe("qwen3", "debugmodel_moe", 4, 4096, _QWEN_MOE_DEBUG),
    "qwen3_30b_a3b": Recipe("qwen3", "30B-A3B", 2, 4096, _of(3000, 8e-4, "Qwen3-30B-A3B", **_LARGE)),
    "deepseek_v3_debugmodel": Recipe("deepseek_v3", "debugmodel", 8, 2048, _SHUFFLED),
    "deepseek_v3_16b": Recipe(
        "deepseek_v3",
        "16B",
        4,
        4096,
        _of(
            1000,
            2.2e-4,
            "deepseek-moe-16b-base",
            parallelism__expert_parallel_degree=8,
            checkpoint__interval=10,
            **_DEEPSEEK,
        ),
    ),
    "deepseek_v3_671b": Recipe(
        "deepseek_v3",
        "671B",
        4,
        4096,
        _of(
            10000,
            2.2e-4,
            "DeepSeek-V3.1-Base",
            warmup=2000,
            parallelism__expert_parallel_degree=2,
            checkpoint__interval=500,
            **_DEEPSEEK,
        ),
    ),
    **dict.fromkeys(
        ("gpt_oss_debugmodel", "gpt_oss_debugmodel_flex"), Recipe("gpt_oss", "debugmodel", 8, 2048, _GPT_OSS_DEBUG)
    ),
    "gpt_oss_20b": Recipe("gpt_oss", "20b", 1, 8192, _of(10000, 8e-4, "gpt-oss-20b", **_GPT_OSS)),
    "gpt_oss_120b": Recipe("gpt_oss", "120b", 1, 8192, _of(10000, 8e-4, "gpt-oss-120b", **_GPT_OSS)),
}
"""By name. Functions that differ in kernels alone have one recipe."""
REFUSED = {
    "llama4": 'its sizes are not translated; write a job with model.name = "llama4" and flavor scout or maverick',
    "qwen3_5|qwen35|kimi_vl|kimi_k2_5_debug|muse_glimmer|flux": "models of images are not in this version",
    "kimi|moonlight": "its optimizer, Muon with updates of AdamW's size, is not in this version",
    "mxfp8|nvfp4": "training.float8 has the formats of 8 bits; those with scales of blocks are not supported",
    "671b_float8": "stacks of experts are not multiplied in float8",
    "float8_emulate": "float8 is not emulated; write [adapter] and training.float8 into a job",
    "param_groups": "parameters have one optimizer here: give the --config without it",
    "hybridep|deepep|minimal_async_ep|dist_gemm": "it chooses how messages are sent: give the --config without it",
    "_mtp": "give the --config without it, and n_mtp_layers in model.overrides of the job",
    "sft_": "its records are made by a function of Python: begin with `torchtitan presets ls`",
}
"""Parts of functions and modules without a translation, as regexes, and why they have none."""


def read(line: CommandLine) -> JobDraft:
    """Translate a line of PyTorch's torchtitan."""
    draft, flags = JobDraft(), dict(line.flags)
    if "job.config_file" in flags:
        raise JobError(f"its job is a file: torchtitan check --upgrade {flags['job.config_file'] or 'FILE'}")
    module, config = (flags.pop(name, "") or line.environment.get(name.upper(), "") for name in ("module", "config"))
    recipe = _recipe(module, config)
    if mode := line.environment.get("COMM_MODE"):
        draft.refuse("comm.mode", mode, "nothing, or default", "COMM_MODE ran one step without communication")
    counts = {name: _count(draft, name, flags.pop(name)) for name in COUNTS if name in flags}
    arguments = [argument for name, text in flags.items() if (argument := _argument(draft, name, text))]
    _, of_line = parse_arguments(arguments)
    recipe_layer = layer_of(draft.source, recipe.as_values().items())
    values = recipe_layer.values | of_line.values
    values |= _batches(draft, recipe, counts, values)
    draft.faults += [fault for fault in of_line.all_faults() if renamed(fault.key) is None]
    result = upgrade(recipe_layer.old | of_line.old, values, V0_2_2, AUGUST_2026)
    draft.faults += [
        Fault(draft.source, f"--{key}", show(value), "", f"has no translation: {reason}")
        for key, value, reason in result.stuck
    ]
    if not draft.faults:
        result.notes += [CROSSING, *[SHUFFLED] * bool(recipe.values["training.shuffle"])]
        draft.values |= with_effect(result.values, result)
        draft.notes += result.notes
    return draft


def _recipe(module: str, config: str) -> Recipe:
    """Return the recipe of a line. Raises JobError for a function without a translation."""
    recipe = CONFIGS.get(config)
    name = module.removeprefix("torchtitan.models.").removesuffix(".config_registry")  # others are not its functions
    if recipe is None or name != recipe.module:
        pairs = [f"--module {entry.module} --config {name}" for name, entry in CONFIGS.items()]
        reason = next((text for part, text in REFUSED.items() if re.search(part, f"{module} {config}")), "")
        near = reason or (hint(config, CONFIGS) if recipe is None else f"{config} is of the module {recipe.module}")
        remedy = near or "it is a function of Python, which is not run: write a job, see `torchtitan presets ls`"
        shown = f"--module {module or 'nothing'} --config {config or 'nothing'}"
        raise JobError(f"{shown}; allowed: one of {', '.join(pairs)}; {remedy}")
    return recipe


def _argument(draft: JobDraft, name: str, text: str | None) -> str:
    """Return an option of the line as an argument by the name of v0.2.2; empty if it is noted or refused."""
    section, _, last = name.rpartition(".")
    is_off = text is None and last.startswith("no_")
    name = f"{section}.{last[3:]}" if is_off else name
    if name in NOTED:
        if text is not None and name not in WITH_VALUE and text.lower() not in YES_OR_NO:
            draft.refuse(name, text, "true or false", "an option of another kind stands behind it")
        draft.notes.append(f"--{name}: {NOTED[name]}")
        return ""
    if name in REPLACED or name.startswith("model."):
        draft.refuse(name, text, "an option of such a line", f"give {REPLACED.get(name, 'another --config')}")
        return ""
    first, _, key = name.partition(".")
    name = RENAMED.get(name, f"{SECTIONS.get(first, first)}.{key}")
    section, _, last = name.rpartition(".")
    return f"--{section}.{'no_' * is_off}{last}" + ("" if text is None else f"={text}")


def _count(draft: JobDraft, name: str, text: str | None) -> int:
    """Return a number of tokens or microbatches; the default for one that is refused."""
    try:
        number = int(text or "")
    except ValueError:
        number = 0
    if number < 1 and not (name == STEP and number == -1):
        draft.refuse(name, text, "a whole number, at least 1")
        return COUNTS[name]
    return number


def _batches(draft: JobDraft, recipe: Recipe, counts: Mapping[str, int], values: Values) -> Values:
    """Return sizes of batches in samples of the longest context, from those in tokens."""
    length = counts.get(LENGTH, recipe.length)
    tokens, step = counts.get(ROWS, recipe.samples * recipe.length), counts.get(STEP, -1)
    for name, number in ((ROWS, tokens), (STEP, step)):
        if number != -1 and number % length:
            draft.refuse(name, number, f"a multiple of {LENGTH} = {length}", "a batch has whole samples here")
    samples = tokens // length
    batches = {"training.seq_len": length, "training.local_batch_size": samples}
    if values.get(STAGES, 1) != 1:
        batches["training.local_batch_size"] = samples * counts.get(MICROBATCHES, COUNTS[MICROBATCHES])
        batches["parallelism.pipeline_parallel_microbatch_size"] = samples
    if step != -1:
        batches["training.global_batch_size"] = step // length
    if values.get("validation.enable"):
        batches |= {"validation.seq_len": length, "validation.local_batch_size": samples}
    return batches
