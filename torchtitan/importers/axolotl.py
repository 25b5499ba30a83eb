"""Translate Axolotl configs, and the flags that may follow one on a command line, to jobs.

Options are handled by subject, each in one place. axolotl_options.py lists the options that have the same meaning in
a job, those that are only noted and those that are refused.
"""

import os.path
from pathlib import Path
from typing import Any

from torchtitan.core.errors import JobError
from torchtitan.importers import deepspeed, launchers
from torchtitan.importers.axolotl_data import Data
from torchtitan.importers.axolotl_pace import Pace
from torchtitan.importers.axolotl_tokens import Tokens
from torchtitan.importers.axolotl_unfrozen import unfrozen
from torchtitan.importers.axolotl_values import AUTO, Values
from torchtitan.importers.command_line import CommandLine
from torchtitan.importers.translation import LINEARS, Meaning, family_in, from_folder
from torchtitan.models import SIZES, family_of
from torchtitan.models.hf.config import CONFIG

FAMILIES = ("mistral", "qwen3", "deepseek", "gpt2", "opt", "llama")
"""Model types to look for in the name of a folder that is not on this machine."""
ADAM = {"adamw_torch": "AdamW", "adamw_torch_fused": "AdamW", "adamw_hf": "AdamW", "adamw_apex_fused": "AdamW"}
ADAM |= {"paged_adamw_32bit": "AdamW", "adamw_bnb_8bit": "AdamW8bit", "adamw_8bit": "AdamW8bit"}
ADAM |= {"paged_adamw_8bit": "AdamW8bit", "adamw_anyprecision": "AdamWBF16"}
OPTIMIZERS = ADAM | {"adafactor": "Adafactor", "lion_pytorch": "Lion", "paged_lion_32bit": "Lion", "sgd": "SGD"}
OPTIMIZERS |= {"galore_adamw": "GaLore", "galore_adamw_8bit": "GaLore", "muon": "Muon"}
SCHEDULES = {"cosine": "cosine", "linear": "linear", "constant": "constant", "constant_with_warmup": "constant"}
WHOLE = {"embed_tokens": "tok_embeddings.weight", "lm_head": "output.weight", "norm": "norm.weight"}
"""Modules outside the layers, by their names in the Llama of transformers."""
ENDS = ("embed_tokens", "lm_head")
"""Modules with one row per token of the vocabulary."""
DTYPES = (None, AUTO, "bfloat16", "bf16", "float32", "fp32", "float")
"""Accepted values of torch_dtype."""
SCALING = {"factor": "factor", "original_max_position_embeddings": "original_max_seq_len"}
SCALING |= {name: name for name in ("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow")}
SEQUENCE_LEN, GROUPS = 2048, 4
"""Axolotl's default sequence length, and the number of groups per sequence in its shifted attention."""
BASIS_PRUNED = 0.999
"""Fraction of the moments of A and B that a restart prunes."""


def read(line: CommandLine) -> Meaning:
    meaning = Meaning(line.config or line.script, "")
    _Axolotl(line, Values(line, meaning), meaning).read()
    return meaning


class _Axolotl:
    def __init__(self, line: CommandLine, options: Values, meaning: Meaning) -> None:
        self.line, self.given, self.meaning = line, options, meaning
        self.values, self.note, self.refuse = meaning.values, meaning.notes.append, meaning.refuse
        self.tokens = Tokens(options, meaning)
        self.steps = options["max_steps"] if (options["max_steps"] or 0) > 0 else None

    def read(self) -> None:
        self.model()
        self.sizes()
        Data(self.given, self.meaning).read()
        self.batch()
        self.length()
        self.precision()
        self.optimizer()
        self.schedule()
        self.adapter()
        self.output()
        Pace(self.given, self.meaning, self.steps).read()
        self.memory()
        self.plan()

    def model(self) -> None:
        options, folder = self.given, self.given["base_model"]
        if folder is None:
            self.refuse("base_model", None, "a folder in the form of Hugging Face", "say which model is trained")
            return
        config_folder = options["base_model_config"]
        if config_folder not in (None, folder):
            self.refuse(
                "base_model_config", config_folder, f"{folder}, as base_model", "weights and sizes are of one folder"
            )
        try:
            is_local = os.path.isfile(Path(folder, CONFIG))
            family = (
                family_in(Path(folder)) if is_local else family_of(next(filter(folder.lower().count, FAMILIES), None))
            )
        except JobError as error:
            is_local, family = True, None
            self.note(str(error))
        if family is None:
            self.refuse("base_model", folder, f"a model of {', '.join(SIZES)}", "no other family is here")
            return
        self.values |= from_folder(family, self.tokens.read(folder))
        if not is_local:
            self.note(f"{folder} has to be a folder of that name here: fetch the model; its family is by its name")

    def sizes(self) -> None:
        overrides: dict[str, Any] = {}
        names = {"rope_theta": "rope_theta", "max_position_embeddings": "max_seq_len", "rms_norm_eps": "norm_eps"}
        for name, value in (self.given["model_config"] or {}).items():
            if name in names:
                overrides[names[name]] = value
            elif name != "use_cache":
                self.refuse(f"model_config.{name}", value, ", ".join(names), "others are changed in config.json")
        if scaling := self.given["rope_scaling"]:
            overrides |= self._rope(scaling)
        if overrides:
            self.values["model.overrides"] = overrides
        if self.given["s2_attention"]:
            self._groups(self.given.of("sequence_len", SEQUENCE_LEN))

    def _groups(self, length: int) -> None:
        if length % (2 * GROUPS):
            self.refuse("sequence_len", length, f"a multiple of {2 * GROUPS} with s2_attention")
        self.values["model.s2_group_size"] = length // GROUPS
        self.note("s2_attention: groups that are shifted do not wrap round, so that no token sees a later one")

    def _rope(self, scaling: dict[str, Any]) -> dict[str, Any]:
        kind = scaling.get("rope_type", scaling.get("type"))
        parts = {SCALING[name]: value for name, value in scaling.items() if name in SCALING}
        if kind not in ("linear", "ntk", "yarn", "llama3") or set(scaling) - {"rope_type", "type", *SCALING}:
            allowed = f"linear, ntk, yarn or llama3 with {', '.join(SCALING)}"
            self.refuse("rope_scaling", scaling, allowed, "what depends on the length of a text (dynamic) is not here")
            return {}
        return {"rope_scaling": {"kind": kind} | parts}

    def batch(self) -> None:
        options, ranks = self.given, self.line.ranks
        local, passes = options.of("micro_batch_size", 1), options["gradient_accumulation_steps"]
        if options["batch_size"] is not None:
            if passes is not None or local < 1 or options["batch_size"] % local:
                allowed = f"a multiple of micro_batch_size {local}, without gradient_accumulation_steps"
                self.refuse("batch_size", options["batch_size"], allowed)
            passes = options["batch_size"] // max(local, 1)
        passes = passes or 1
        for name, value in (("micro_batch_size", local), ("gradient_accumulation_steps", passes)):
            if value < 1:
                self.refuse(name, value, "at least 1")
        self.values["training.local_batch_size"] = local
        if ranks is not None:
            self.values["training.global_batch_size"] = local * passes * ranks
        elif passes > 1:
            self.refuse("gradient_accumulation_steps", passes, "1", "or write how many ranks there are: --world-size N")
        self.values["debug.seed"] = options.of("seed", 42)
        if self.values.get("validation.enable"):
            self.values["validation.local_batch_size"] = options.of("eval_batch_size", local)

    def length(self) -> None:
        epochs = self.given.of("num_epochs", 1.0)
        if self.steps is not None:
            self.values["training.steps"] = self.steps
            if "num_epochs" in self.given:
                self.note(f"max_steps {self.steps} end the run, whatever num_epochs says")
        elif epochs != int(epochs) or epochs < 1:
            self.refuse("num_epochs", epochs, "a whole number", "end a part of an epoch by max_steps")
        else:
            self.values["training.epochs"] = int(epochs)

    def precision(self) -> None:
        options, values = self.given, self.values
        narrow = (
            bool(options["bfloat16"]) or options["bf16"] == "full" or options["torch_dtype"] in ("bfloat16", "bf16")
        )
        if options["torch_dtype"] not in DTYPES:
            self.refuse(
                "torch_dtype", options["torch_dtype"], "bfloat16 or float32", "float16 overflows without a scaler"
            )
        if options["bf16"] not in (None, True, False, AUTO, "full"):
            self.refuse("bf16", options["bf16"], "true, false, auto or full")
        if options["gradient_checkpointing"] not in (None, True, False, AUTO):
            reason = "what is kept stays on its device"
            self.refuse("gradient_checkpointing", options["gradient_checkpointing"], "true or false", reason)
        computed = narrow or options["bf16"] in (True, AUTO, "full")
        values["training.dtype"] = "bfloat16" if narrow else "float32"
        values["training.mixed_precision_param"] = "bfloat16" if computed else "float32"
        values["activation_checkpoint.mode"] = "full" if options["gradient_checkpointing"] else "none"

    def optimizer(self) -> None:
        options, values, name = self.given, self.values, self.given.of("optimizer", "adamw_torch")
        if name not in OPTIMIZERS:
            self.refuse("optimizer", name, f"one of {', '.join(OPTIMIZERS)}", "no other is here")
            return
        values["optimizer.name"] = OPTIMIZERS[name]
        if name.startswith("paged_"):
            self.note(f"{name}: the state is not paged out; training.enable_cpu_offload keeps it on the host")
        if name == "galore_adamw_8bit":
            values["optimizer.options"] = {"inner": "adamw_8bit"}
        if name == "adamw_anyprecision" and values["training.dtype"] != "bfloat16":
            self.note("adamw_anyprecision: its weights are in bfloat16")
            values |= {"training.dtype": "bfloat16", "training.mixed_precision_param": "bfloat16"}
        if options["learning_rate"] is None:
            self.refuse("learning_rate", None, "a number", "Axolotl needs it too")
        values["optimizer.weight_decay"] = options.of("weight_decay", 0.0)
        values["optimizer.decay_norms_and_biases"] = False
        moments = {"adam_beta1": ("beta1", 0.9), "adam_beta2": ("beta2", 0.999), "adam_epsilon": ("eps", 1e-8)}
        for axolotl_name, (option, default) in moments.items():
            if name in ADAM or OPTIMIZERS[name] in ("GaLore", "Muon"):
                values[f"optimizer.{option}"] = options.of(axolotl_name, default)
            elif axolotl_name in options:
                self.refuse(
                    axolotl_name, options[axolotl_name], f"nothing with optimizer: {name}", "it belongs to Adam"
                )

    def schedule(self) -> None:
        options, values, kind = self.given, self.values, self.given.of("lr_scheduler", "cosine")
        if kind not in SCHEDULES:
            self.refuse("lr_scheduler", kind, f"one of {', '.join(SCHEDULES)}", "others are not here yet")
            return
        values["lr_scheduler.decay_type"] = SCHEDULES[kind]
        values["lr_scheduler.min_lr_factor"] = options.of("cosine_min_lr_ratio", 0.0) if kind == "cosine" else 0.0
        if kind != "cosine" and options["cosine_min_lr_ratio"]:
            self.refuse("cosine_min_lr_ratio", options["cosine_min_lr_ratio"], f"nothing with lr_scheduler: {kind}")
        steps, ratio = options["warmup_steps"], options["warmup_ratio"]
        if steps is not None and ratio:
            self.refuse("warmup_ratio", ratio, "nothing beside warmup_steps", "drop one of the two")
        elif steps is not None or kind == "constant":
            values["lr_scheduler.warmup_steps"] = steps or 0
        elif ratio:
            values["lr_scheduler.warmup_steps"] = ratio
        elif self.steps is not None:
            values["lr_scheduler.warmup_steps"] = min(self.steps * 3 // 100, 100)
        else:
            values["lr_scheduler.warmup_steps"] = 0.03
            self.note("of more than 3,333 steps Axolotl's own warmup is 100: write lr_scheduler.warmup_steps = 100")
        if options["lr_quadratic_warmup"]:
            values["lr_scheduler.warmup_type"] = "quadratic"

    def adapter(self) -> None:
        options, values, kind = self.given, self.values, self.given["adapter"]
        packed = {"load_in_4bit": "qlora", "load_in_8bit": "lora"}
        for name, required_kind in packed.items():
            if options[name] and kind != required_kind:
                self.refuse(name, True, f"false, or adapter: {required_kind}", "weights are packed below an adapter")
        if kind not in ("lora", "qlora", "dora"):
            if kind is not None:
                self.refuse("adapter", kind, "lora, qlora or dora", "no other is here")
            for name in ("lora_target_modules", "lora_modules_to_save", "relora_steps", "peft_use_dora"):
                if options[name]:
                    self.refuse(name, options[name], "nothing without an adapter", "give adapter: lora")
            for key in [key for key in values if key.startswith("adapter.")]:
                self.note(f"no adapter, so no effect: {key} = {values.pop(key)}")
            if regexes := options["unfrozen_parameters"]:
                values["training.unfrozen"] = unfrozen(regexes, options.of("base_model", ""), self.meaning)
            return
        if regexes := options["unfrozen_parameters"]:
            reason = "lora_modules_to_save says what is trained beside it"
            self.refuse("unfrozen_parameters", regexes, "nothing with an adapter", reason)
        if options["peft_use_dora"] and kind != "lora":
            self.refuse("peft_use_dora", True, "false, or adapter: lora", "the base of DoRA is not packed")
        values["adapter.kind"] = (
            "dora" if options["peft_use_dora"] else "lora_int8" if options["load_in_8bit"] else kind
        )
        if options["load_in_8bit"]:
            self.note("load_in_8bit: weights alone are in 8 bits here, a scale for each row; inputs are not rounded")
        values.setdefault("adapter.rank", 8)
        values.setdefault("adapter.alpha", 16.0)
        values.setdefault("adapter.dropout", 0.0)
        self._targets()
        self._packing()
        self._restarts()

    def _targets(self) -> None:
        options, values = self.given, self.values
        target_modules = options["lora_target_modules"] or []
        if options["lora_target_linear"] and all(name in LINEARS for name in target_modules):
            values["adapter.target"] = ["all-linear"]
            if target_modules:
                self.note(f"lora_target_linear has all linears: {', '.join(target_modules)} and the others")
        elif target_modules and all(name in LINEARS for name in target_modules):
            values["adapter.target"] = list(
                dict.fromkeys(pattern for name in target_modules for pattern in LINEARS[name])
            )
        else:
            allowed = f"some of {', '.join(LINEARS)}, or lora_target_linear: true"
            self.refuse("lora_target_modules", target_modules or None, allowed)
        full_modules = list(options["lora_modules_to_save"] or [])
        if self.tokens.new and (ends := [name for name in ENDS if name not in full_modules]):
            self.note(f"rows of new tokens are trained, so beside the adapter {' and '.join(ends)}")
            full_modules += ends
        if unknown := [name for name in full_modules if name not in WHOLE]:
            self.refuse("lora_modules_to_save", unknown, f"some of {', '.join(WHOLE)}")
        elif full_modules:
            values["adapter.train_fully"] = [WHOLE[name] for name in full_modules]
        if full_modules:
            self.note("the parts trained in full are not of peft's layout: torchtitan export --merge writes the result")
        elif values["adapter.kind"] != "dora":
            values["adapter.last_save_in_peft"] = True

    def _packing(self) -> None:
        """Check the 4-bit options of bitsandbytes. Only one 4-bit format is supported here."""
        required = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True, "load_in_4bit": True}
        for name, value in (self.given["bnb_config_kwargs"] or {}).items():
            if name in required and value != required[name]:
                self.refuse(f"bnb_config_kwargs.{name}", value, str(required[name]), "no other form is here")
            elif name == "bnb_4bit_compute_dtype" and value in ("float16", "fp16"):
                self.refuse(f"bnb_config_kwargs.{name}", value, "bfloat16 or float32", "float16 overflows")
            elif name not in required and name != "bnb_4bit_compute_dtype":
                self.refuse(f"bnb_config_kwargs.{name}", value, ", ".join([*required, "bnb_4bit_compute_dtype"]))

    def _restarts(self) -> None:
        every, values = self.given["relora_steps"], self.values
        if every:
            values |= {"adapter.relora.every": every, "adapter.relora.reset": "magnitude"}
            values["adapter.relora.prune_ratio"] = BASIS_PRUNED
            values["adapter.relora.warmup_steps"] = self.given["relora_warmup_steps"] or 0
            values.pop("adapter.last_save_in_peft", None)
        elif self.given["relora_warmup_steps"]:
            self.refuse("relora_warmup_steps", self.given["relora_warmup_steps"], "nothing without relora_steps")
        if not every:
            values["adapter.save"] = "alone"

    def output(self) -> None:
        options, values = self.given, self.values
        values |= {"job.dump_folder": options.of("output_dir", "./model-out"), "checkpoint.enable": True}
        num_kept = options.of("save_total_limit", 4)
        if num_kept == 1:
            self.note("save_total_limit 1: two are kept, as the last one alone could not be trusted")
        values["checkpoint.keep_latest_k"] = max(num_kept, 2)
        resume = options["resume_from_checkpoint"]
        if options["cleanup_output_dir_on_start"]:
            values["job.clean_start"] = "always" if resume is False else "unsaved"
        elif resume is False:
            self.note(
                "resume_from_checkpoint false: take a new output_dir, as a folder with checkpoints is gone on with"
            )
        elif resume not in (None, True, AUTO):
            reason = "a job that is started again goes on by itself; checkpoints of other trainers are not read"
            self.refuse("resume_from_checkpoint", resume, "true or false", reason)
        if options["save_safetensors"] is False:
            self.refuse("save_safetensors", False, "true", "weights are never pickled")
        if "adapter.kind" not in values:
            values |= {"checkpoint.last_save_model_only": True, "checkpoint.last_save_in_hf": True}
        if options["wandb_project"] is not None:
            values["metrics.enable_wandb"] = options.of("use_wandb", True)
            self.note(f"WANDB_PROJECT={options['wandb_project']} in the environment says the project")
        if options["use_mlflow"]:
            values["metrics.trackers"] = ["mlflow"]

    def memory(self) -> None:
        """Translate the memory limit of a GPU. Whole numbers are GiB; a table has one entry per GPU."""
        limit, max_memory = self.given["gpu_memory_limit"], self.given["max_memory"]
        if isinstance(max_memory, dict):
            gpu_limits = {str(amount) for device, amount in max_memory.items() if device != "cpu"}
            if len(gpu_limits) != 1 or limit is not None:
                self.refuse(
                    "max_memory", max_memory, "the same for each GPU, without gpu_memory_limit", "ranks are alike"
                )
                return
            limit = gpu_limits.pop()
        elif max_memory is not None:
            self.refuse("max_memory", max_memory, "a table of GPUs", "give gpu_memory_limit")
        if limit is not None:
            limit_text = f"{limit}GiB" if str(limit).isdecimal() else limit
            self.values["memory.limit"] = limit_text

    def plan(self) -> None:
        options, values, ranks = self.given, self.values, self.line.ranks
        path = options["deepspeed"] or launchers.deepspeed_file(self.line)
        if path is not None:
            relative_path = Path(self.line.config or "").parent / path
            deepspeed.add(Path(path) if os.path.isfile(path) else relative_path, ranks, self.meaning)
            if options["fsdp"]:
                self.refuse("fsdp", options["fsdp"], "nothing beside deepspeed", "drop one of the two")
            return
        strategies = {strategy for entry in options["fsdp"] or [] for strategy in str(entry).split()}
        config = {name.removeprefix("fsdp_"): value for name, value in (options["fsdp_config"] or {}).items()}
        if unknown := strategies - {"full_shard", "shard_grad_op", "no_shard", "auto_wrap", "offload"}:
            self.refuse("fsdp", sorted(unknown), "full_shard, shard_grad_op, no_shard, auto_wrap, offload")
        kind = str(config.pop("sharding_strategy", "")).lower()
        strategies |= {kind} if kind in ("full_shard", "shard_grad_op", "no_shard") else set()
        if config.pop("offload_params", False) is True or "offload" in strategies:
            values["training.enable_cpu_offload"] = True
        if config:
            self.note(f"of fsdp_config, what a job need not say: {', '.join(sorted(config))}")
        if ranks == 1:
            return  # nothing is sharded
        if strategies and launchers.sharding(self.line) - strategies:
            self.note("the file's fsdp counts before the sharding that accelerate launch was given")
        strategies = strategies or launchers.sharding(self.line)
        if "shard_grad_op" in strategies or config.get("reshard_after_forward") is False:
            values["parallelism.fsdp_reshard_after_forward"] = "never"
        elif "full_shard" in strategies:
            values["parallelism.fsdp_reshard_after_forward"] = "always"
        elif ranks is not None:
            values |= {
                "parallelism.data_parallel_replicate_degree": ranks,
                "parallelism.data_parallel_shard_degree": 1,
            }
