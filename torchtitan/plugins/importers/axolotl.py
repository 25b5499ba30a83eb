"""Translate Axolotl configs, and the flags that may follow one on a command line, to jobs.

The table in axolotl_options.py translates options that are independent of others. The rest is read here by subject.
"""

import os.path
import re
from fractions import Fraction
from math import ceil, prod
from pathlib import Path
from typing import Any

from torchtitan.core.cadence import steps_of
from torchtitan.core.errors import JobError
from torchtitan.lr_schedules import TRANSFORMERS
from torchtitan.models import CONFIG_CONVERTERS, SIZES, family_for_model_type, family_in
from torchtitan.models.hf.config import CONFIG, read_json
from torchtitan.models.hf.wrappers import text_part
from torchtitan.plugins.importers import deepspeed, launchers
from torchtitan.plugins.importers.axolotl_adapter import AdapterTranslation
from torchtitan.plugins.importers.axolotl_data import DataTranslation
from torchtitan.plugins.importers.axolotl_options import (
    ADAM,
    DEFAULT_STRATEGY,
    HALF_TYPES,
    NEVER_CODE,
    OFFLOADED,
    OPTIMIZERS,
    PLUGINS,
    SCORES,
    read_options,
)
from torchtitan.plugins.importers.axolotl_qat import translate_qat
from torchtitan.plugins.importers.axolotl_tokens import AddedTokens
from torchtitan.plugins.importers.translation import (
    AUTO,
    BFLOAT16_INSTEAD,
    ROUTER_LOSS,
    CommandLine,
    JobDraft,
    from_folder,
    replicated,
    router_loss,
)

MODEL_TYPES = {"distill-qwen": "qwen2", "distill-llama": "llama", "qwen1.5-moe": "qwen2_moe"}
MODEL_TYPES |= {"qwen2-57b-a14b": "qwen2_moe", "qwen3-30b-a3b": "qwen3_moe", "qwen3-235b-a22b": "qwen3_moe"}
MODEL_TYPES |= {f"qwen3.{n}-{size}": "qwen3_5_moe_text" for n in (5, 6) for size in ("35b-a", "122b-a", "397b-a")}
MODEL_TYPES |= {"qwen3-next": "qwen3_next", "qwen3.5": "qwen3_5_text", "qwen3.6": "qwen3_5_text"}
MODEL_TYPES |= {"gemma-3n": "gemma3n_text", "gemma-4": "gemma4_text", "medgemma": "gemma3_text", "trinity": "afmoe"}
MODEL_TYPES |= {"-vision": "mllama", "qwen3-vl-30b-a3b": "qwen3_vl_moe", "qwen3-vl-235b-a22b": "qwen3_vl_moe"}
MODEL_TYPES |= {"llava-v1.6-mistral": "mistral", "llava-1.5": "llama", "pixtral": "mistral", "magistral": "mistral"}
MODEL_TYPES |= {"smolvlm": "llama", "voxtral": "llama", "falcon-h1": "falcon_h1", "mistral-small-4": "mistral4"}
MODEL_TYPES |= {"minimax-m2": "minimax_m2", "gpt-j": "gptj"}
MODEL_TYPES |= {"phi-4": "phi3", "llama-4": "llama4_text", "glm-4.5": "glm4_moe", "glm-4.6": "glm4_moe"}
MODEL_TYPES |= {"glm-4.7-flash": "glm4_moe_lite", "glm-4.7": "glm4_moe", "falcon3": "llama"}
MODEL_TYPES |= {"falcon-mamba": "falcon_mamba", "pythia": "gpt_neox", "redpajama-incite": "gpt_neox"}
MODEL_TYPES |= {"command-r7b": "cohere2", "command-a": "cohere2", "llama-3.1-minitron": "llama"}
MODEL_TYPES |= {"mistral-nemo-minitron": "mistral", "minitron": "nemotron", "llama-3.1-nemotron": "llama"}
MODEL_TYPES |= {"llama-3_1-nemotron": "nemotron-nas", "llama-3_3-nemotron": "nemotron-nas", "reason-nemotron": "qwen2"}
MODEL_TYPES |= {"reasoning-nemotron": "qwen2", "openmath-nemotron": "qwen2", "nemotron-research-reasoning": "qwen2"}
MODEL_TYPES |= {"nemotron-cascade-2": "nemotron_h", "nemotron-cascade": "qwen3", "nvidia-nemotron": "nemotron_h"}
MODEL_TYPES |= {"nemotron-3-": "nemotron_h", "nemotron-nano": "nemotron_h", "nemotron-elastic": "nemotron_h"}
MODEL_TYPES |= {"granite-4": "granitemoehybrid", "-a400m": "granitemoe", "-a800m": "granitemoe"}
MODEL_TYPES |= {f"lfm2{name}": "lfm2_moe" for name in ("-8b-a", ".5-8b-a", "-24b-a")}
MODEL_TYPES |= {"stablelm-base-alpha": "gpt_neox", "stablelm-tuned-alpha": "gpt_neox", "dolly-v2": "gpt_neox"}
MODEL_TYPES |= {"gemma-2b": "gemma", "afm-4.5b": "arcee"}
MODEL_TYPES |= {"hunyuan-a13b": "hunyuan_v1_moe", "hunyuan-": "hunyuan_v1_dense"}
"""Parts of the name of a folder that is not on this machine, and the model type that the first of them indicates.

Without one of them it is the longest model type of the families here that the name contains. DeepSeek's distilled
models have the architecture of their students.
"""
SIZE_OVERRIDES = {"rope_theta": "rope_theta", "max_position_embeddings": "max_seq_len", "rms_norm_eps": "norm_eps"}
SCALING = {"factor": "factor", "original_max_position_embeddings": "original_max_seq_len"}
SCALING |= {name: name for name in ("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow")}
GROUPS = 4
"""Number of groups per sequence in Axolotl's shifted attention."""
STRATEGIES = ("full_shard", "shard_grad_op", "no_shard")
GROUP_SIZES = {"context_parallel_size": "cp", "tensor_parallel_size": "tp"}
GROUP_SIZES |= {"dp_shard_size": "dp_shard", "dp_replicate_size": "dp_replicate", "expert_parallel_size": "ep"}
"""Sizes of parallel groups -> their names in launchers.parallel_sizes."""
VALIDATION_OPTIONS = (
    *("load_best_model_at_end", "metric_for_best_model", "greater_is_better", "early_stopping_patience"),
    *("eval_table_size", "eval_table_max_new_tokens", "do_causal_lm_eval", "eval_causal_lm_metrics"),
)
CONSEQUENCES = {
    "use_eaft": ("eaft_alpha", "eaft_k"),
    "lisa_n_layers": ("lisa_step_interval", "lisa_layers_attribute"),
    "ebft": ("rl", "trl", "vllm"),
    "rl": ("kto_desirable_weight", "kto_undesirable_weight"),
    "process_reward_model": ("num_labels",),
}
"""Options that name a thing that is not done here -> options that only belong to it: one of its lines is enough."""


def read(line: CommandLine) -> JobDraft:
    draft = JobDraft(line.config or line.script, "")
    _Axolotl(line, draft).read()
    return draft


def guess_model_type(folder: str) -> str | None:
    """Return the model type that the name of a folder indicates, which is not on this machine; None without any."""
    if model_type := next((kind for part, kind in MODEL_TYPES.items() if part in folder.lower()), None):
        return model_type
    model_types = {kind for converter in CONFIG_CONVERTERS.values() for kind in converter.model_types}
    name = re.sub("[^a-z0-9]", "", folder.lower().removeprefix("arcee-ai/"))  # whose other models are of any family
    matches = [kind for kind in model_types if kind.removesuffix("_text").replace("_", "") in name]
    parts = re.findall("[a-z]+", folder.lower())  # dolphin and sapphire are no Phi
    matches = [kind for kind in matches if len(kind) > len("phi") or kind in parts]
    return max(matches, key=lambda kind: (len(kind), kind), default="deepseek_v3" if "deepseekr1" in name else None)


class _Axolotl:
    def __init__(self, line: CommandLine, draft: JobDraft) -> None:
        self.line, self.draft, self.options = line, draft, read_options(line, draft)
        self.values, self.note, self.refuse = draft.values, draft.notes.append, draft.refuse
        self.tokens = AddedTokens(self.options, draft)
        max_steps = self.options["max_steps"] or 0
        self.steps = max_steps if max_steps > 0 else None  # length of the run, if the file sets it in steps
        self.degrees = self._degrees()
        self.data_ranks = self._data_ranks()

    def read(self) -> None:
        self.model()
        self.quantized_weights()
        self.plugins()
        self.sizes()
        DataTranslation(self.options, self.draft).read()
        self.batch()
        self.length()
        self.precision()
        self.optimizer()
        self.schedule()
        AdapterTranslation(self.options, self.draft, self.tokens.new).read()
        self.output()
        self.cadence()
        self.validation()
        self.memory()
        self.plan()
        refused = {fault.key for fault in self.draft.faults}
        consequences = {name for cause in CONSEQUENCES.keys() & refused for name in CONSEQUENCES[cause]}
        self.draft.faults[:] = [fault for fault in self.draft.faults if fault.key not in consequences]

    def model(self) -> None:
        options, folder = self.options, self.options["base_model"]
        if folder is None:
            self.refuse("base_model", None, "a folder in Hugging Face format", "name the model to train")
            return
        config_folder = options["base_model_config"]
        if config_folder not in (None, folder):
            remedy = "weights and sizes are read from one folder"
            self.refuse("base_model_config", config_folder, f"{folder}, as base_model", remedy)
        try:
            is_local = os.path.isfile(Path(folder, CONFIG))
            family = family_in(Path(folder)) if is_local else family_for_model_type(guess_model_type(folder))
        except JobError as error:
            is_local, family = True, None
            self.note(str(error))
        if family is None:
            self.refuse("base_model", folder, f"a model of {', '.join(SIZES)}", "no other family is here")
            return
        self.values |= from_folder(family, self.tokens.read(folder))
        if options["reinit_weights"]:
            self.note("reinit_weights: weights begin with the random values of this family here, not transformers'")
            for name in ("initial_load_path", "initial_load_in_hf"):
                del self.values[f"checkpoint.{name}"]
        if not is_local:
            self.note(f"download {folder} to a folder of that name here; its family is a guess from its name")

    def quantized_weights(self) -> None:
        """Read for which format weights are trained, and that those of a quantized folder are read dequantized."""
        kind, settings = (self.options[f"model_quantization_config{end}"] for end in ("", "_kwargs"))
        if kind is not None and (settings or {}) == {"dequantize": True}:
            self.note(f"model_quantization_config: {kind}: weights are read dequantized")
        elif kind is not None or settings:
            remedy = "weights are not trained in a quantized format"
            self.refuse("model_quantization_config_kwargs", settings, "{dequantize = true}", remedy)
        if self.options["qat"] is not None:
            translate_qat(self.options["qat"], self.draft)

    def plugins(self) -> None:
        plugins = self.options["plugins"] or []
        if faster := [name for name in plugins if name in PLUGINS]:
            self.note(f"plugins: {', '.join(name.rpartition('.')[2] for name in faster)}: they change no result")
        if code := [name for name in plugins if name not in PLUGINS]:
            self.refuse("plugins", code, "those of kernels", f"{NEVER_CODE}: leave them out if they change no result")

    def sizes(self) -> None:
        overrides: dict[str, Any] = {}
        for name, value in (self.options["model_config"] or {}).items():
            if name in SIZE_OVERRIDES:
                overrides[SIZE_OVERRIDES[name]] = value
            elif name == ROUTER_LOSS and isinstance(value, bool):
                continue  # see _balance
            elif name != "use_cache":
                remedy = "change others in config.json"
                self.refuse(f"model_config.{name}", value, ", ".join(SIZE_OVERRIDES), remedy)
        if scaling := self.options["rope_scaling"]:
            overrides |= self._rope_scaling(scaling)
        overrides |= self._balance()
        if overrides:
            self.values["model.overrides"] = overrides
        if self.options["s2_attention"]:
            length = self.options["sequence_len"]
            if length % (2 * GROUPS):
                self.refuse("sequence_len", length, f"a multiple of {2 * GROUPS} with s2_attention")
            self.values["model.s2_group_size"] = length // GROUPS
            self.note("s2_attention: shifted groups do not wrap around, so that no token sees a later one")

    def _balance(self) -> dict[str, Any]:
        """Return sizes that turn the balance of experts off, where transformers' models have none."""
        family = self.values.get("model.name")
        if family is None or not hasattr(next(iter(SIZES[family].values())), "aux_loss_weight"):
            return {}
        config = self._config() | (self.options["model_config"] or {})
        if config.get(ROUTER_LOSS) is True:
            self.note(
                f"{ROUTER_LOSS}: experts are balanced within each sequence here, and over a batch by transformers"
            )
            return router_loss(family, self.options["base_model"], None, self.draft)
        self.note(f"without model_config.{ROUTER_LOSS} no loss balances the experts: model.overrides turns it off")
        return {"aux_loss_weight": 0.0, "bias_rate": 0.0}

    def _config(self) -> dict[str, Any]:
        """Return the config.json of base_model; empty if it is not on this machine."""
        path = Path(self.options["base_model"], CONFIG)
        return text_part(read_json(path)) if path.is_file() else {}

    def _rope_scaling(self, scaling: dict[str, Any]) -> dict[str, Any]:
        kind = scaling.get("rope_type", scaling.get("type"))
        settings = {SCALING[name]: value for name, value in scaling.items() if name in SCALING}
        if kind not in ("linear", "ntk", "yarn", "llama3") or set(scaling) - {"rope_type", "type", *SCALING}:
            allowed = f"linear, ntk, yarn or llama3 with {', '.join(SCALING)}"
            remedy = "scaling that depends on the length of a text (dynamic) is not supported"
            self.refuse("rope_scaling", scaling, allowed, remedy)
            return {}
        return {"rope_scaling": {"kind": kind} | settings}

    def batch(self) -> None:
        options, ranks = self.options, self.data_ranks
        local, passes = options["micro_batch_size"], options["gradient_accumulation_steps"]
        if options["batch_size"] is not None:
            if passes is not None or options["batch_size"] % local:
                allowed = f"a multiple of micro_batch_size {local}, without gradient_accumulation_steps"
                self.refuse("batch_size", options["batch_size"], allowed)
            passes = options["batch_size"] // local
        passes = passes or 1
        if passes < 1:
            self.refuse("gradient_accumulation_steps", passes, "at least 1")
        if ranks is not None:
            self.values["training.global_batch_size"] = local * passes * ranks
        elif passes > 1:
            name = "batch_size" if options["batch_size"] is not None else "gradient_accumulation_steps"
            remedy = "Axolotl starts all GPUs of the machine: give the number of ranks, --world-size N"
            self.refuse(name, options[name], "one forward pass a step without the number of ranks", remedy)
        else:
            self.note(f"a step has {local} samples of each rank, as Axolotl starts all GPUs; --world-size N writes out")
            self.note("the total; without fsdp and deepspeed parameters are sharded too, at the same results")
        if self.values.get("validation.enable"):
            eval_batch_size = options["eval_batch_size"]
            self.values["validation.local_batch_size"] = local if eval_batch_size is None else eval_batch_size

    def _degrees(self) -> dict[str, int]:
        """Return the sizes of parallel groups, 1 for none: those of the file, else of the launcher."""
        launched = launchers.parallel_sizes(self.line)
        self.draft.launched.add("use_parallelism_config")
        sizes = {name: self.options[name] or 1 for name in GROUP_SIZES}
        if self.options["context_parallel_size"] is None:
            sizes["context_parallel_size"] = self.options["sequence_parallel_degree"] or 1
        for name, launcher_name in GROUP_SIZES.items():
            size = launched.get(launcher_name, 1)
            if sizes[name] == 1:
                sizes[name] = size
            elif size not in (1, sizes[name]):
                self.note(f"the file's {name} takes precedence over the one given to accelerate launch")
        return sizes

    def _data_ranks(self) -> int | None:
        """Return how many ranks have samples of their own; None if the number of ranks is not known.

        Refuses sizes of parallel groups that contradict each other, the number of ranks, or how the model is sharded.
        """
        sizes, ranks = self.degrees, self.line.ranks
        name = next((name for name in GROUP_SIZES if sizes[name] > 1), None)
        if name is None or ranks is None:
            if name is not None:
                self.refuse(name, sizes[name], "1 without the number of ranks", "give it: --world-size N")
            return ranks if name is None else None
        if ranks % prod(sizes.values()):
            self.refuse(name, sizes[name], f"sizes whose product divides the {ranks} ranks")
            return None
        data_ranks = ranks // (sizes["context_parallel_size"] * sizes["tensor_parallel_size"])
        shards, replicas = sizes["dp_shard_size"], sizes["dp_replicate_size"]
        strategies, copies = self._strategies(), data_ranks // sizes["expert_parallel_size"]
        if shards > 1 and replicas > 1 and shards * replicas != copies:
            self.refuse("dp_shard_size", shards, f"{copies // replicas}, which makes {copies} ranks", "or drop it")
        elif max(shards, replicas) > 1 and self._uses_deepspeed:
            name = "dp_shard_size" if shards > 1 else "dp_replicate_size"
            self.refuse(name, sizes[name], "1 with deepspeed, which shards by its stage")
        elif shards > 1 and ("no_shard" in strategies or not (strategies or self.options["fsdp_config"])):
            self.refuse("dp_shard_size", shards, "1 without fsdp, which shards", "give fsdp_config, as Axolotl demands")
        return data_ranks

    @property
    def _uses_deepspeed(self) -> bool:
        launched = self.line.launched
        return bool(self.options["deepspeed"]) or bool({"use_deepspeed", "zero_stage"} & launched.keys())

    def _strategies(self) -> set[str]:
        """Return the words of the file's fsdp and its sharding strategy, or without any how accelerate shards."""
        strategies = {strategy for entry in self.options["fsdp"] or [] for strategy in str(entry).split()}
        config = self.options["fsdp_config"] or {}
        strategy = str(config.get("fsdp_sharding_strategy", config.get("sharding_strategy", ""))).lower()
        return strategies | ({strategy} & set(STRATEGIES)) or launchers.sharding(self.line)

    def length(self) -> None:
        epochs = self.options["num_epochs"]
        if self.steps is not None:
            self.values["training.steps"] = self.steps
            if "num_epochs" in self.options:
                self.note(f"max_steps {self.steps} end the run, regardless of num_epochs")
        elif epochs != int(epochs) or epochs < 1:
            self.refuse("num_epochs", epochs, "a whole number", "to end within an epoch, set max_steps")
        else:
            self.values["training.epochs"] = int(epochs)

    def precision(self) -> None:
        options, bf16 = self.options, self.options["bf16"]
        half = "float16" if options["float16"] else "torch_dtype" if options["torch_dtype"] in HALF_TYPES else ""
        if half:
            self.note(f"{half}: {BFLOAT16_INSTEAD}")
        stores_bfloat16 = options["bfloat16"] or bf16 == "full" or options["torch_dtype"] in ("bfloat16", "bf16")
        stores_bfloat16 = stores_bfloat16 or bool(half)
        computes_bfloat16 = stores_bfloat16 or bf16 in (True, AUTO) or bool(options["fp16"])
        if options["fp8"]:
            self.values["training.float8"] = "tensorwise"
            self.note("fp8: the head stays in bfloat16; whether the first and last linear layer do there depends on")
            self.note("accelerate's version: training.float8_exclude names further ones")
        if options["gradient_checkpointing"] in OFFLOADED:
            self.note("gradient_checkpointing: inputs of blocks stay on their device, which changes no result")
        self.values["training.dtype"] = "bfloat16" if stores_bfloat16 else "float32"
        self.values["training.mixed_precision_param"] = "bfloat16" if computes_bfloat16 else "float32"

    def optimizer(self) -> None:
        options, values, name = self.options, self.values, self.options["optimizer"]
        if name.startswith("paged_"):
            self.note(f"{name}: the state is not paged; training.enable_cpu_offload keeps it on the host")
        if name == "adamw_torch_4bit":
            self.note("adamw_torch_4bit: not the same: the optimizer's state has 8 bits here, which takes more memory")
        if name == "galore_adamw_8bit":
            values["optimizer.options"] = {"inner": "adamw_8bit"}
        if name == "adamw_anyprecision" and values["training.dtype"] != "bfloat16":
            self.note("adamw_anyprecision: its weights are in bfloat16")
            values |= {"training.dtype": "bfloat16", "training.mixed_precision_param": "bfloat16"}
        values["optimizer.decay_norms_and_biases"] = False
        for option, job_name in {"adam_beta1": "beta1", "adam_beta2": "beta2", "adam_epsilon": "eps"}.items():
            if name in ADAM or OPTIMIZERS[name] in ("GaLore", "Muon"):
                values[f"optimizer.{job_name}"] = options[option]
            elif option in options:
                self.refuse(option, options[option], f"nothing with optimizer: {name}", "it belongs to Adam")

    def schedule(self) -> None:
        options, values, kind = self.options, self.values, self.options["lr_scheduler"]
        floor = options["cosine_min_lr_ratio"] or 0.0
        values |= {"lr_scheduler.min_lr_factor": floor if kind == "cosine" else 0.0}
        values |= {"lr_scheduler.convention": TRANSFORMERS}
        if kind != "cosine" and floor:
            self.refuse("cosine_min_lr_ratio", floor, f"nothing with lr_scheduler: {kind}")
        steps, ratio = options["warmup_steps"], options["warmup_ratio"]
        if steps is not None and ratio:
            self.refuse("warmup_ratio", ratio, "nothing with warmup_steps", "drop one of the two")
        elif kind == "constant":
            values["lr_scheduler.warmup_steps"] = 0
            if steps or ratio:
                self.note(f"no effect with lr_scheduler: constant: {'warmup_steps' if steps else 'warmup_ratio'}")
        elif steps is not None:  # a share is rounded up, as here; Axolotl makes two of one step
            values["lr_scheduler.warmup_steps"] = steps if 0 < steps < 1 else 2 if int(steps) == 1 else int(steps)
        elif ratio:
            values["lr_scheduler.warmup_steps"] = self._share_of_steps(ratio)
        elif self.steps is not None:
            values["lr_scheduler.warmup_steps"] = min(self.steps * 3 // 100, 100)
        else:
            values["lr_scheduler.warmup_steps"] = 0.03
            self.note("with more than 3,333 steps Axolotl's warmup is 100 steps: set lr_scheduler.warmup_steps = 100")

    def _share_of_steps(self, share: float) -> int | float:
        """Return a share of the run's steps as a job writes it. Axolotl rounds down, a job rounds up."""
        if self.steps is None:
            self.note("warmup_ratio: steps are rounded up, where Axolotl rounds them down")
            return share
        steps = int(share * self.steps)
        return share if steps == steps_of(share, self.steps, None) else steps

    def output(self) -> None:
        options, values, resume = self.options, self.values, self.options["resume_from_checkpoint"]
        if options["save_total_limit"] == 1:
            self.note("save_total_limit 1: two are kept, because a single one may be damaged")
        values |= {"checkpoint.enable": True, "checkpoint.keep_latest_k": max(options["save_total_limit"], 2)}
        if options["cleanup_output_dir_on_start"]:
            values["job.clean_start"] = "always" if resume is False else "unsaved"
        elif resume is False:
            self.note("resume_from_checkpoint false: choose a new output_dir; a folder with checkpoints is resumed")
        if "adapter.kind" not in values:
            values |= {"checkpoint.last_save_model_only": True, "checkpoint.last_save_in_hf": True}
        if options["wandb_project"] is not None:
            values.setdefault("metrics.enable_wandb", True)
            self.note(f"set WANDB_PROJECT={options['wandb_project']} in the environment")

    def cadence(self) -> None:
        """Translate how often the run logs, saves and validates."""
        options, values = self.options, self.values
        eval_strategy = options["eval_strategy"] or options["evaluation_strategy"]
        save_strategy = options["save_strategy"]
        log_freq = self._interval("logging_steps")
        if log_freq:
            values["metrics.log_freq"] = log_freq
        if save_interval := self._interval("save_steps", "saves_per_epoch", save_strategy):
            values["checkpoint.interval"] = save_interval
        elif save_strategy == "no" and self.steps is not None:
            values["checkpoint.interval"] = self.steps
        if not values.get("validation.enable"):
            if options["eval_steps"] or options["evals_per_epoch"]:
                self.note("no data to validate on, so no effect: eval_steps, evals_per_epoch")
            return
        eval_interval = self._interval("eval_steps", "evals_per_epoch", eval_strategy)
        if eval_strategy == "no":
            for key in [key for key in values if key.startswith("validation.")]:
                del values[key]
        elif eval_interval or (eval_strategy == "steps" and log_freq):  # as transformers does without eval_steps
            values["validation.freq"] = eval_interval or log_freq

    def _interval(self, name: str, per_epoch_name: str = "", strategy: str | None = None) -> int | float | str | None:
        """Return an interval as a job writes it: in steps, as a fraction of all steps, or as times per epoch."""
        value, per_epoch = self.options[name], self.options[per_epoch_name] if per_epoch_name else None
        given_steps = value or per_epoch
        if given_steps and strategy not in (None, "steps"):  # Axolotl refuses it too
            self.refuse(per_epoch_name if per_epoch else name, given_steps, f"nothing with the strategy {strategy}")
            return None
        if strategy is None and per_epoch_name and not given_steps and self.steps is not None:
            self.note(f"no {name}: Axolotl does it at the end of an epoch, which is not known with max_steps")
            return None
        strategy = strategy or DEFAULT_STRATEGY
        if strategy == "no":
            return None
        if per_epoch and value:
            self.refuse(per_epoch_name, per_epoch, f"nothing with {name}", "drop one of the two")
        elif (per_epoch or 0) < 0 or (value or 0) < 0:
            self.refuse(per_epoch_name if per_epoch else name, per_epoch or value, "a number above 0")
        elif per_epoch or (per_epoch_name and strategy == "epoch" and not value):
            times = per_epoch or 1
            if self.steps is None:
                return "epoch" if times == 1 else f"{times}/epoch"
            return max(1, ceil(Fraction(self.steps, times * max(1, int(self.options["num_epochs"])))))
        elif value and value >= 1 and value != int(value):
            self.refuse(name, value, "a whole number, or a share below 1")
        elif value:
            return int(value) if value >= 1 else float(value)
        return None

    def validation(self) -> None:
        """Translate the options that use validation results: the best model, early stopping, generated samples."""
        options, values = self.options, self.values
        if not values.get("validation.enable"):
            if ignored := [name for name in VALIDATION_OPTIONS if options[name]]:
                self.note(f"no validation, so no effect: {', '.join(ignored)}")
            return
        metric = str(options["metric_for_best_model"] or "loss").removeprefix("eval_")
        if metric != "loss":
            self.refuse("metric_for_best_model", metric, "loss or eval_loss", "only the loss is measured")
        scored = [name for name in options["eval_causal_lm_metrics"] or [] if name != "perplexity"]
        if options["do_causal_lm_eval"] and scored:
            self.refuse("eval_causal_lm_metrics", scored, "perplexity", SCORES)
        elif options["do_causal_lm_eval"]:
            self.note("do_causal_lm_eval: the perplexity is in every validation; generated answers are not scored")
        elif options["eval_causal_lm_metrics"]:
            self.note("no effect without do_causal_lm_eval: eval_causal_lm_metrics")
        if options["eval_table_size"]:
            max_tokens = options["eval_table_max_new_tokens"]
            values["validation.generated"] = options["eval_table_size"]
            values["validation.generated_tokens"] = 128 if max_tokens is None else max_tokens
        elif options["eval_table_max_new_tokens"]:
            self.note("nothing is generated, so no effect: eval_table_max_new_tokens")
        if options["early_stopping_patience"]:
            values["early_stop.patience"] = options["early_stopping_patience"]
        if not options["load_best_model_at_end"]:
            return
        values |= {"checkpoint.best_metric": "validation_loss", "checkpoint.export_best": True}
        if options["greater_is_better"]:
            self.refuse("greater_is_better", True, "false", "the lowest loss is the best")
        if "adapter.last_save_in_peft" not in values:
            values |= {"checkpoint.last_save_model_only": True}

    def memory(self) -> None:
        """Translate the memory limit of a GPU. Whole numbers are GiB; a table has one entry per GPU."""
        limit, max_memory = self.options["gpu_memory_limit"], self.options["max_memory"]
        if isinstance(max_memory, dict):
            gpu_limits = {str(amount) for device, amount in max_memory.items() if device != "cpu"}
            if len(gpu_limits) != 1 or limit is not None:
                allowed = "the same for each GPU, without gpu_memory_limit"
                self.refuse("max_memory", max_memory, allowed, "all ranks have one limit")
                return
            limit = gpu_limits.pop()
        elif max_memory is not None:
            self.refuse("max_memory", max_memory, "a table of GPUs", "give gpu_memory_limit")
        if limit is not None:
            self.values["memory.limit"] = f"{limit}GiB" if str(limit).isdecimal() else limit

    def plan(self) -> None:
        options, values, ranks = self.options, self.values, self.data_ranks
        sizes = self.degrees
        if sizes["context_parallel_size"] > 1:
            values["parallelism.context_parallel_degree"] = sizes["context_parallel_size"]
        if sizes["tensor_parallel_size"] > 1:
            values["parallelism.tensor_parallel_degree"] = sizes["tensor_parallel_size"]
        if sizes["expert_parallel_size"] > 1:
            values["parallelism.expert_parallel_degree"] = sizes["expert_parallel_size"]
        path = options["deepspeed"] or launchers.deepspeed_file(self.line)
        if path is not None:
            relative_path = Path(self.line.config or "").parent / path
            try:
                deepspeed.add(Path(path) if os.path.isfile(path) else relative_path, ranks, self.draft)
            except JobError as error:
                self.refuse("deepspeed", path, "a DeepSpeed file", str(error))
            if options["fsdp"]:
                self.refuse("fsdp", options["fsdp"], "nothing with deepspeed", "drop one of the two")
            return
        strategies = self._strategies()
        config = {str(name).removeprefix("fsdp_"): value for name, value in (options["fsdp_config"] or {}).items()}
        if unknown := strategies - {*STRATEGIES, "auto_wrap", "offload"}:
            self.refuse("fsdp", sorted(unknown), f"{', '.join(STRATEGIES)}, auto_wrap, offload")
        if config.get("offload_params") is True or "offload" in strategies:
            values["training.enable_cpu_offload"] = True
        if ignored := sorted(config.keys() - {"offload_params", "sharding_strategy"}):
            self.note(f"fsdp_config: not needed in a job: {', '.join(ignored)}")
        if ranks == 1:
            return  # nothing is sharded
        if options["fsdp"] and launchers.sharding(self.line) - strategies:
            self.note("the file's fsdp takes precedence over the sharding given to accelerate launch")
        is_sharded = bool(strategies or options["fsdp_config"]) and "no_shard" not in strategies
        if "shard_grad_op" in strategies or config.get("reshard_after_forward") is False:
            values["parallelism.fsdp_reshard_after_forward"] = "never"
        elif "full_shard" in strategies:
            values["parallelism.fsdp_reshard_after_forward"] = "always"
        if ranks is None or sizes["expert_parallel_size"] > 1:  # experts are spread over the shards
            return
        shards, replicas = sizes["dp_shard_size"], sizes["dp_replicate_size"]
        if not is_sharded:
            values |= replicated(ranks)
        elif max(shards, replicas) > 1:
            replicas = ranks // shards if shards > 1 else replicas
            values |= replicated(replicas) | {"parallelism.data_parallel_shard_degree": ranks // replicas}
