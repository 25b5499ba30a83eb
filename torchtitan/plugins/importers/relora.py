"""Translate command lines of ReLoRA's torchrun_main.py to jobs: its flags of July 2023, with defaults, and later ones.

A note records behavior of the script that a job does not reproduce. A flag without an equivalent is refused with the
reason. Most flags are translated by a table (`FLAGS`), the others by subject. GaLore's script has the same name and
some more flags. A file of flags is read as flags.
"""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from torchtitan.core import yaml_file
from torchtitan.core.errors import JobError
from torchtitan.datasets.sources.pretokenized import PretokenizedBlocks
from torchtitan.datasets.streams import stream_count
from torchtitan.lr_schedules import CYCLICAL, JAGGED, TRANSFORMERS
from torchtitan.models import CONFIG_CONVERTERS, SIZES, family_in
from torchtitan.models.hf.config import CONFIG, check_supported, read_json
from torchtitan.models.llama import RELORA
from torchtitan.plugins.importers.translation import FLOAT16, CommandLine, Script, Setting, from_folder, replicated

OPTIMIZERS = {"adam": "Adam", "adam_zero": "Adam", "sgd": "SGD", "adafactor": "Adafactor", "adam8bit": "AdamW8bit"}
GALORE_MOMENTS = {
    "galore_adamw": "adamw",
    "galore_adafactor": "adafactor",
    "galore_adamw8bit": "adamw_8bit",
    "galore_adamw8bit_per_layer": "adamw_8bit",
}
"""Optimizers of GaLore's script that project gradients -> options.inner of a job's GaLore."""
OPTIMIZERS |= dict.fromkeys(GALORE_MOMENTS, "GaLore")
GALORE_ONLY = OPTIMIZERS.keys() - {"adam", "adam_zero"}
"""Optimizers that only GaLore's script has."""
PROJECTION_FLAGS = ("rank", "update_proj_gap", "galore_scale", "proj_type", "proj_quant")
WITH_BETA1 = ("sgd", "adafactor", "galore_adafactor")
"""Optimizers of GaLore's script that read its --beta1."""
GALORE_TORCH: tuple[float, dict[str, str]] = 1e-6, {"formula": "galore_torch"}
"""Default eps and formula of AdamW in GaLore's library, which scripts keep, as eps and options of a job."""
SCHEDULES = {"cosine": CYCLICAL, "linear": "linear", "cosine_restarts": JAGGED}
DTYPES = {"bf16": "bfloat16", "bfloat16": "bfloat16", "fp32": "float32", "float32": "float32"}
PRUNING = "use --optimizer_magnitude_pruning 0.9, as later versions of the script do, to keep a part of the state"

FLAGS: dict[str, Setting] = {
    "dataset_path": Setting("text"),
    "dataset": Setting("text", "c4,en"),  # of the first versions, as are the next two
    "streaming_dataset": Setting("bool", True),
    "use_hf_model": Setting("bool", False, note="there is one Llama here, which computes what transformers' does"),
    "tokenizer": Setting("text", "t5-base"),
    "model_config": Setting("text"),
    "model_name_or_path": Setting("text"),
    "model_revision": Setting("text"),
    "batch_size": Setting("int", least=1, required=True),
    "total_batch_size": Setting("int", least=1),
    "gradient_accumulation": Setting("int", least=1),
    "max_length": Setting("int", 256, to="training.seq_len", least=1),
    "lr": Setting("float", 1e-4, to="optimizer.lr"),
    "weight_decay": Setting("float", 0.0, to="optimizer.weight_decay"),
    "adam_beta1": Setting("float", 0.9),
    "adam_beta2": Setting("float", 0.999),
    "clip_grad_norm": Setting("float", 1.0),
    "optimizer": Setting("text", "adam", "optimizer.name", OPTIMIZERS, reason="other optimizers are not supported"),
    "rank": Setting("int", 128),
    "update_proj_gap": Setting("int", 50),
    "galore_scale": Setting("float", 1.0),
    "proj_type": Setting("text", "std", choices=("std", "reverse_std", "left", "right", "full")),
    "proj_quant": Setting("bool", False),
    "grad_clipping": Setting("float", 0.0),
    "beta1": Setting("float", 0.0),
    "activation_checkpointing": Setting(
        "bool", False, "activation_checkpoint.mode", choices={True: "full", False: "none"}
    ),
    "single_gpu": Setting("bool", False, note="one rank, as the command line starts it"),
    "name": Setting("text", note="the script ignored it; --save_dir names the run's folder"),
    "scheduler": Setting("text", "cosine", "lr_scheduler.decay_type", choices=SCHEDULES),
    "warmup_steps": Setting("int", 1000, to="lr_scheduler.warmup_steps"),
    "restart_warmup_steps": Setting("int"),
    "min_lr_ratio": Setting("float", 0.1),
    "adjust_step": Setting("int", 0),
    "cycle_length": Setting("int"),
    "use_peft": Setting("bool", False),
    "lora_r": Setting("int", 128),
    "lora_alpha": Setting("float", 32.0),
    "relora": Setting("int"),
    "train_scaling": Setting("bool", False),
    "force_keep_original": Setting("bool", False),
    "reset_optimizer_on_relora": Setting("bool", True),
    "optimizer_random_pruning": Setting("float", 0.0),
    "optimizer_magnitude_pruning": Setting("float", 0.0),
    "svd_optimizer_on_relora": Setting("int", 0, reason=PRUNING),  # of the first versions, as is the next one
    "keep_first_opt_rows": Setting("int", 0, reason=PRUNING),
    "continue_from": Setting("text"),
    "warmed_up_model": Setting("text"),
    "continue_from_peft": Setting("text"),
    "resume_from": Setting("text"),
    "restore_optimizer": Setting("bool", False),
    "load_optimizer_state_on_resume": Setting("bool", True),
    "num_training_steps": Setting("int", 10_000, least=1),
    "max_train_tokens": Setting("text"),
    "eval_every": Setting("int", 1_000, to="validation.freq"),
    "save_every": Setting("int", 10_000, to="checkpoint.interval"),
    "save_dir": Setting("text"),
    "dtype": Setting("text", "bf16", "training.dtype training.mixed_precision_param", DTYPES, reason=FLOAT16),
    "distributed_type": Setting("text", "ddp", choices=("ddp", "fsdp")),
    "workers": Setting("int", 8, to="training.dataloader.num_workers"),
    "seed": Setting("int", 0, to="debug.seed"),
    "tags": Setting("text"),
    "comment": Setting("text", to="job.description"),
    "train_ln": Setting("bool", True, choices=(True,), reason="the norms are always trained"),
    "keep_checkpoints": Setting("int", 0),
    "autoresume": Setting("bool", False, note="a job that is started again always resumes from its newest checkpoint"),
    "skip_batches": Setting("text", reason="updates cannot be skipped; training.on_bad_data skips damaged data"),
    "profile": Setting("bool", to="profiling.enable_profiling", choices={True: True, False: None}),
    "quantize": Setting("text", choices=("4bit", "8bit")),
    "use_double_quant": Setting("bool", True),
    "wandb_watch": Setting("bool", False, reason="gradients of single parameters are not logged"),
    "megatron_dataset_config": Setting(
        "text", reason="Megatron's index is not supported; give --dataset_path, or make shards with torchtitan prepare"
    ),
    "training_config": Setting("text"),
}


def translate_optimizer(script: Script) -> None:
    """Translate the optimizer of a script with these flags."""
    options, values, name = script.options, script.values, script.options["optimizer"]
    max_norm = options["grad_clipping" if "grad_clipping" in options or name in GALORE_ONLY else "clip_grad_norm"]
    values |= {"training.max_norm": max_norm, "optimizer.beta1": options["adam_beta1"]}
    values["optimizer.beta2"] = options["adam_beta2"]
    if name == "adam_zero":
        if options["distributed_type"] == "fsdp":
            script.refuse("optimizer", "adam_zero", "adam with --distributed_type fsdp", "which shards its state")
        script.note("adam_zero: FSDP shards the optimizer's state, and parameters and gradients with it")
    if name == "adam8bit" and options["weight_decay"]:
        script.note("adam8bit: weight decay is decoupled here; the script adds it to the gradient")
    optimizer_options = _projection(script, name) if name in GALORE_MOMENTS else {}
    if name in WITH_BETA1:  # these have no second moment as Adam has
        del values["optimizer.beta1"], values["optimizer.beta2"]
        if name == "galore_adafactor":
            values["optimizer.beta1"] = options["beta1"]
        elif options["beta1"]:
            optimizer_options["momentum" if name == "sgd" else "beta1"] = options["beta1"]
    if optimizer_options:
        values["optimizer.options"] = optimizer_options
    if name.endswith("per_layer"):
        values["optimizer.early_step_in_backward"] = True
        _step_per_layer(script)
    flags_read = PROJECTION_FLAGS * (name in GALORE_MOMENTS) + ("beta1",) * (name in WITH_BETA1)
    if ignored := [flag for flag in (*PROJECTION_FLAGS, "beta1") if flag in options and flag not in flags_read]:
        script.note(f"no effect with --optimizer {name}: --{', --'.join(ignored)}")


def _projection(script: Script, name: str) -> dict[str, Any]:
    """Return optimizer.options of an optimizer that projects gradients."""
    options = script.options
    projection = {"rank": options["rank"], "update_gap": options["update_proj_gap"], "scale": options["galore_scale"]}
    projection |= {"side": options["proj_type"], "inner": GALORE_MOMENTS[name]}
    if name == "galore_adamw":
        script.values["optimizer.eps"], formula = GALORE_TORCH
        projection |= formula
    script.note("gradients of attention and feed-forward are projected; other parameters use the same moments directly")
    if options["proj_quant"]:
        reason = "bases are not quantized; of Q-GaLore, options.adaptive_gap is supported"
        script.refuse("proj_quant", True, "nothing", reason)
    return projection


def _step_per_layer(script: Script) -> None:
    """Translate per-layer optimizer steps, which free a gradient as soon as its weights are updated."""
    options, batch = script.options, script.values.get("training.global_batch_size")
    if options["grad_clipping"]:
        script.values["training.max_norm"] = 0.0
        script.note(f"--grad_clipping {options['grad_clipping']} clips nothing, as in the script: gradients are freed")
    ranks = script.line.ranks or 1
    if batch is not None and options["batch_size"] * ranks < batch:
        allowed = f"one forward pass: {options['batch_size']} x {ranks} ranks"
        remedy = "the script stepped in each pass; use --optimizer galore_adamw8bit, or a larger --batch_size"
        script.refuse("total_batch_size", batch, allowed, remedy)


def with_file(line: CommandLine) -> CommandLine:
    """Return the line with the flags of its --training_config, a YAML table, before its own.

    Raises JobError if the file cannot be read.
    """
    path = next((value for name, value in reversed(line.flags) if name == "training_config" and value), None)
    if path is None:
        return line
    file_flags = {name: value for name, value in yaml_file.read(path).items() if value is not None}
    line_flags = [flag for flag in line.flags if flag[0] != "training_config"]
    return replace(line, flags=[*((name, str(value)) for name, value in file_flags.items()), *line_flags])


TOKENS = re.compile(r"(\d+)([KMB]?)", re.IGNORECASE)
UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9}
EVALUATED_TOKENS = 10**7
DROPOUT = 0.1
"""Dropout of the adapters' inputs, for which the script had no flag."""
VOCABULARY = 32_100
"""Vocabulary size of the script's own model configs, which use T5's tokenizer."""
NEED_FULL_MATRICES = (
    *("relora", "force_keep_original", "continue_from", "warmed_up_model", "continue_from_peft"),
    *("resume_from", "model_name_or_path", "quantize"),
)


class _ReLoRA(Script):
    FLAGS = FLAGS

    def __init__(self, line: CommandLine) -> None:
        super().__init__(with_file(line))

    def read(self) -> None:
        self.data()
        self.model()
        self.batch()
        translate_optimizer(self)
        self.schedule()
        self.adapter()
        self.reset()
        self.initial_weights()
        self.precision_and_sharding()
        self.output()
        self.validation()

    def data(self) -> None:
        options, values, path = self.options, self.values, self.options["dataset_path"]
        dataset, tokenizer = "c4", options["tokenizer"]
        values["training.shuffle"] = options["seed"] != 0 or path is None
        if path is None:
            self.note("without --dataset_path C4 is streamed, as by the script; its documents are packed, not padded,")
            self.note("and shuffled for any seed")
            if options["dataset"] != FLAGS["dataset"].default:
                remedy = "make another dataset with torchtitan prepare, or pretokenize.py"
                self.refuse("dataset", options["dataset"], "c4,en", remedy)
        else:
            in_order = "seed 0 keeps the data in their order, as in the script"
            self.note("data shuffled" if options["seed"] else in_order)
            dataset, values["training.dataset_path"] = "pretokenized", path
            tokenizer = self._tokenizer_of(Path(path))
        values |= {"training.dataset": dataset, "model.tokenizer_path": tokenizer}
        if tokenizer != "bytes" and not Path(tokenizer).exists():
            self.note(f"the tokenizer {tokenizer} has to be in a folder of that name here, see docs/data.md")

    def _tokenizer_of(self, folder: Path) -> str:
        try:
            arguments = read_json(folder / "args.json")
            name = arguments["tokenizer"]
        except (JobError, KeyError):
            name = None  # `torchtitan check` reports problems of the folder
        tokenizer: str = self.options["tokenizer"]
        if not isinstance(name, str):
            return tokenizer
        if "tokenizer" in self.options and Path(tokenizer).name != Path(name).name:
            self.refuse("tokenizer", tokenizer, f"{name}, as in {folder / 'args.json'}", "leave the flag out")
        return tokenizer if "tokenizer" in self.options else name

    def model(self) -> None:
        options, config, folder = self.options, self.options["model_config"], self.options["model_name_or_path"]
        if (config is None) == (folder is None):
            self.refuse("model_config", config, "one of --model_config and --model_name_or_path", "give one")
        elif config is not None:
            self._preset(Path(config))
        elif Path(folder, CONFIG).is_file():
            family = family_in(Path(folder))
            if family is None:
                self.refuse("model_name_or_path", folder, f"a model of {', '.join(SIZES)}", "no other family is here")
                return
            self.values |= from_folder(family, folder)
        else:
            self.refuse("model_name_or_path", folder, "a folder in Hugging Face format", "download the model to one")
        if "model_revision" in options:
            self.note(f"--model_revision {options['model_revision']}: not checked; download this one to the folder")

    def _preset(self, path: Path) -> None:
        """Set the model size from a config file, or from the file's name if the file is not on this machine."""
        flavor = path.stem.removeprefix("llama_").lower()
        self.values["model.name"] = "llama2"
        overrides: dict[str, Any] = {}
        if not path.is_file():
            if flavor not in RELORA:
                self.refuse("model_config", str(path), f"a file, or llama_SIZE of {', '.join(RELORA)}", "give its path")
                return
            has_script_vocabulary = RELORA[flavor].vocab_size == 32_000
            overrides = {"vocab_size": VOCABULARY} if has_script_vocabulary else {}
            suffix = f", vocabulary {VOCABULARY}" * has_script_vocabulary
            self.note(f"{path} is not here: {flavor} by its name{suffix}")
        else:
            try:
                config = read_json(path)
                if config.get("model_type", "llama") != "llama":
                    raise JobError(f"its model_type is {config['model_type']}")
                flavor, overrides = _sizes(config)
            except (JobError, KeyError, TypeError, ValueError) as error:
                self.refuse("model_config", str(path), "a config of a Llama", f"{type(error).__name__}: {error}")
                return
        self.values["model.flavor"] = flavor
        if overrides:
            self.values["model.overrides"] = overrides

    def batch(self) -> None:
        options, local, ranks = self.options, self.options["batch_size"], self.line.ranks
        total, passes = options["total_batch_size"], options["gradient_accumulation"]
        if ranks is None:
            self.refuse("nproc_per_node", None, "a number", "give the number of ranks: --world-size N")
        if ranks is None or not options.is_complete:
            return
        if total is None:
            total = local * ranks * (passes or 1)
        required_passes, remainder = divmod(total, local * ranks)
        if remainder or not required_passes or passes not in (None, required_passes):
            factors = f"batch_size {local} x {ranks} ranks" + f" x gradient_accumulation {passes}" * bool(passes)
            self.refuse("total_batch_size", total, f"a multiple of {local * ranks}: {factors}", "change one of them")
        self.values |= {"training.local_batch_size": local, "training.global_batch_size": total}
        tokens, steps = options["max_train_tokens"], options["num_training_steps"]
        if tokens is not None:
            match = TOKENS.fullmatch(tokens)
            steps = int(match[1]) * UNITS[match[2].upper()] // (total * options["max_length"]) if match else 0
            if steps:
                self.note(f"--max_train_tokens {tokens} are {steps} steps of {total} x {options['max_length']} tokens")
            else:
                self.refuse("max_train_tokens", tokens, "such as 100M, and at least the tokens of one step")
        self.values["training.steps"] = max(steps, 1)

    def schedule(self) -> None:
        options, values, kind = self.options, self.values, self.options["scheduler"]
        warmup, floor, cycle = options["warmup_steps"], options["min_lr_ratio"], options["cycle_length"]
        if not 0 < floor <= 1:
            self.refuse("min_lr_ratio", floor, "more than 0 and at most 1")
        values["lr_scheduler.min_lr_factor"] = 0.0 if kind == "linear" else floor
        if kind == "linear":
            values["lr_scheduler.convention"] = TRANSFORMERS
        if kind == "cosine_restarts":
            restart_flags = [flag for flag in ("restart_warmup_steps", "adjust_step") if flag in options]
            values |= {f"lr_scheduler.{flag}": options[flag] for flag in restart_flags}
            if options["adjust_step"]:
                self.note("--adjust_step: the rate is cut where the step plus this is a multiple of the cycle, as by")
                self.note("the script of July 2023; its later version leaves out the first of these cuts")
            if options["restart_warmup_steps"] is None:
                self.refuse("restart_warmup_steps", None, "a number of updates with cosine_restarts", "give it")
        else:
            if options["restart_warmup_steps"]:
                self.note(f"no effect with --scheduler {kind}: --restart_warmup_steps")
            if options["adjust_step"]:
                allowed, remedy = f"nothing with --scheduler {kind}", "it belongs to cosine_restarts"
                self.refuse("adjust_step", options["adjust_step"], allowed, remedy)
        if cycle is not None and kind == "linear":
            self.note(f"--cycle_length {cycle} has no effect on the rate of the linear schedule")
        elif cycle is not None:
            values["lr_scheduler.cycle_length"] = cycle
        if warmup >= values.get("training.steps", warmup + 1) and kind != "cosine_restarts":
            values["lr_scheduler.total_steps"] = warmup + 1
            self.note(f"--warmup_steps {warmup} is longer than the run, so the schedule is made longer than the run")

    def adapter(self) -> None:
        options, values = self.options, self.values
        if not options["use_peft"]:
            if options["relora"] is None:
                if ignored := [flag for flag in ("lora_r", "lora_alpha", "train_scaling") if flag in options]:
                    self.note(f"no effect without --use_peft: --{', --'.join(ignored)}")
                return
            self.note("--relora implies --use_peft, which is not given")
        values |= {"adapter.kind": "lora", "adapter.rank": options["lora_r"], "adapter.train_dense_rest": True}
        values["adapter.dropout"] = DROPOUT
        if any(options[flag] for flag in NEED_FULL_MATRICES):
            self.note("A begins at random and B at zero, at first and after each restart; in the script's last version")
            self.note("A was zero too at first, so that neither learned anything before the first restart")
        else:
            values["adapter.lora_only"] = True
            self.note("nothing needs the full matrices, so, as in the script, only A and B are trained, without them")
        if options["train_scaling"]:
            values["adapter.train_scaling"] = True
            if options["relora"] is not None:
                self.note("learned scales begin again at 1 after a restart: the script set them to 0, where they stay")
        else:
            values["adapter.alpha"] = options["lora_alpha"]
        if options["quantize"]:
            self._quantized()

    def _quantized(self) -> None:
        quantization = self.options["quantize"]
        if self.options["relora"] is not None:
            remedy = "each restart would round the quantized matrices again"
            self.refuse("quantize", quantization, "nothing with --relora", remedy)
        elif quantization == "8bit":
            self.values["adapter.kind"] = "lora_int8"
            self.note("--quantize 8bit: only weights are in 8 bits here, with a scale per row; inputs are not rounded")
        else:
            self.values["adapter.kind"] = "qlora"
            if not self.options["use_double_quant"]:
                self.refuse("use_double_quant", False, "true", "scales are always in 8 bits here")

    def reset(self) -> None:
        """Translate the resets of the optimizer's state at restarts."""
        options, values, every = self.options, self.values, self.options["relora"]
        ratios = {mode: options[f"optimizer_{mode}_pruning"] for mode in ("random", "magnitude")}
        for mode, ratio in ratios.items():
            if not 0 <= ratio < 1:
                self.refuse(f"optimizer_{mode}_pruning", ratio, "at least 0 and less than 1")
        prunings = {mode: ratio for mode, ratio in ratios.items() if 0 < ratio < 1}
        resets_all, cycle = options["reset_optimizer_on_relora"], options["cycle_length"]
        if every is None:
            if prunings or not resets_all:
                self.note("no effect without --relora: the flags that reset the optimizer's state")
            return
        values["adapter.relora.every"] = every
        if cycle is not None and cycle != every:
            values["adapter.relora.reset_every"] = cycle
        if len(prunings) + resets_all > 1:
            remedy = "write --reset_optimizer_on_relora False with one of the prunings"
            self.refuse("reset_optimizer_on_relora", resets_all, "one kind of reset", remedy)
        elif resets_all:
            values["adapter.relora.reset"] = "zero"
            self.note("reset to zero: all of the moments, where the script left a thousandth of them")
        elif not prunings:
            values["adapter.relora.reset"] = "none"
        for mode, ratio in prunings.items():
            values |= {"adapter.relora.reset": mode, "adapter.relora.prune_ratio": ratio}
            self.note("the two moments of A keep the same entries, and so do B's; the script pruned each by itself, so")
            self.note('that a step may divide by almost zero: adapter.relora.mask = "independent" does that too')

    def initial_weights(self) -> None:
        """Translate the flags that load weights or resume."""
        options, values = self.options, self.values
        warm_start_path = options["continue_from"] or options["warmed_up_model"]
        resume_path = options["continue_from_peft"] or options["resume_from"]
        if warm_start_path and resume_path:
            self.refuse("continue_from", warm_start_path, "nothing with --continue_from_peft", "drop one of the two")
        elif warm_start_path:
            values |= {"checkpoint.initial_load_path": warm_start_path, "checkpoint.initial_load_counters": True}
        elif resume_path:
            values |= {"checkpoint.initial_load_path": resume_path, "checkpoint.initial_load_model_only": False}
            # the older flag loaded the optimizer state only on request, the newer one unless it was turned off
            flag = "restore_optimizer" if options["continue_from_peft"] else "load_optimizer_state_on_resume"
            if not options[flag]:
                values["checkpoint.exclude_from_loading"] = ["optimizer"]
        elif options["restore_optimizer"]:
            self.note("no effect without --continue_from_peft: --restore_optimizer")

    def precision_and_sharding(self) -> None:
        options = self.options
        is_sharded = options["distributed_type"] == "fsdp" or options["optimizer"] == "adam_zero"
        if not is_sharded and self.line.ranks is not None:
            self.values |= replicated(self.line.ranks)
        if "dtype" not in options:
            self.note("no --dtype: bfloat16, the script's choice where it was supported")

    def output(self) -> None:
        options, values = self.options, self.values
        config = Path(options["model_config"] or options["model_name_or_path"] or "model").stem
        num_kept = options["keep_checkpoints"]
        if num_kept == 1:
            self.note("--keep_checkpoints 1: two are kept, because a single one may be damaged")
        values["job.dump_folder"] = options["save_dir"] or f"checkpoints/{config}"
        values |= {"checkpoint.enable": True, "checkpoint.keep_latest_k": 2 if num_kept == 1 else num_kept}
        if options["tags"]:
            values["job.tags"] = [tag.strip() for tag in options["tags"].split(",") if tag.strip()]
        self.note("the script logged to Weights & Biases: here metrics.enable_wandb = true does")

    def validation(self) -> None:
        options, values, local, ranks = self.options, self.values, self.options["batch_size"], self.line.ranks
        values |= {"validation.enable": True, "validation.dataset": f"{values['training.dataset']}_validation"}
        if options["dataset_path"] is not None:
            values["validation.dataset_path"] = options["dataset_path"]
        held_out = self._held_out()
        if local and ranks:
            values["validation.local_batch_size"] = local
            if held_out is not None and held_out * options["max_length"] < EVALUATED_TOKENS:
                values["validation.samples"] = held_out
            else:
                values["validation.steps"] = max(1, EVALUATED_TOKENS // (local * ranks * options["max_length"]))
        self.note("evaluated on at most 10M tokens each time; the script's last evaluation, on 100M, is not made")

    def _held_out(self) -> int | None:
        """Return how many validation blocks are read before any repeats; None if the data are not on this machine."""
        try:
            blocks = len(PretokenizedBlocks(self.options["dataset_path"], "validation"))
        except (OSError, JobError):  # `torchtitan check` reports problems of the data
            return None
        return blocks - blocks % stream_count(blocks)


read = _ReLoRA.draft_of


def _sizes(config: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the closest preset and the values that differ from it."""
    length = config.get("max_sequence_length", config.get("max_position_embeddings", 2048))
    llama_config = {"model_type": "llama", "vocab_size": 32_000, **config, "max_position_embeddings": length}
    check_supported(llama_config, {"attention_bias": False, "mlp_bias": False})  # the scripts' Llama has none
    args = CONFIG_CONVERTERS["llama2"].args_from_config(llama_config)
    model_args = vars(args) | ({"n_kv_heads": None} if args.n_kv_heads == args.n_heads else {})

    def differing(flavor: str) -> dict[str, Any]:
        return {name: value for name, value in model_args.items() if vars(RELORA[flavor])[name] != value}

    flavor = min(RELORA, key=lambda candidate: (None in differing(candidate).values(), len(differing(candidate))))
    return flavor, differing(flavor)
