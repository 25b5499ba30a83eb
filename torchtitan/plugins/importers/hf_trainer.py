"""Translate the TrainingArguments of transformers, which LLaMA-Factory and trl add to (versions 4.55 to 5.23).

`ARGUMENTS` says what becomes of each, and what a file or line means that lacks it. Those that need others to be
understood are read by `TrainerTranslation`.
"""

from collections.abc import Mapping
from math import ceil
from pathlib import Path
from typing import Any

from torchtitan.config.options import hint
from torchtitan.core.errors import JobError
from torchtitan.lr_schedules import TRANSFORMERS
from torchtitan.plugins.importers import deepspeed, launchers
from torchtitan.plugins.importers.axolotl_options import ADAM, OPTIMIZERS
from torchtitan.plugins.importers.translation import (
    AUTO,
    BFLOAT16_INSTEAD,
    FLOAT16,
    KINDS,
    CommandLine,
    JobDraft,
    Options,
    Setting,
    Table,
    replicated,
    same,
)

SCHEDULES = {"linear": "linear", "cosine": "cosine", "constant": "constant", "constant_with_warmup": "constant"}
SCHEDULES |= {"cosine_with_restarts": "cosine_restarts", "polynomial": "linear", "cosine_with_min_lr": "cosine"}
LAST_RATE = 1e-7
"""Final learning rate of the polynomial schedule."""
STRATEGIES = ("no", "steps", "epoch")
SHARDING = ("full_shard", "shard_grad_op", "no_shard", "auto_wrap", "offload", "true")
TRACKERS = ("wandb", "tensorboard", "mlflow")


def noted(kinds: Mapping[str, str], note: str) -> dict[str, Setting]:
    """Return options that change no result. `kinds`: kind -> names, separated by blanks."""
    return {name: Setting(kind, note=note) for kind, names in kinds.items() for name in names.split()}


def refused(reason: str, **defaults: Any) -> dict[str, Setting]:
    """Return options that are refused unless they have the program's default, which tells their kind."""
    kinds = {bool: "bool", int: "int", float: "float", str: "text"}
    return {name: Setting(kinds.get(type(value), "any"), value, reason=reason) for name, value in defaults.items()}


START = "torchtitan train starts the ranks, and chooses their devices"
FASTER = "it changes no result; compile.enable = true fuses operations"
LOGS = "logs are as [metrics] says"
NOT_PUBLISHED = "nothing is published: upload the folder of the export"
ONE_LOSS = "the loss is a mean over all tokens of a step, of all ranks"
ARGUMENTS: dict[str, Setting] = {
    "output_dir": Setting("text", "trainer_output", "job.dump_folder"),
    "run_name": Setting("text", to="job.description"),
    **same("do_train do_eval do_predict overwrite_output_dir", Setting("bool")),
    "per_device_train_batch_size": Setting("int", 8, "training.local_batch_size", least=1),
    "per_device_eval_batch_size": Setting("int", 8, least=1),
    "gradient_accumulation_steps": Setting("int", 1, least=1),
    "num_train_epochs": Setting("float", 3.0),
    "max_steps": Setting("int", -1),
    "learning_rate": Setting("float", 5e-5, "optimizer.lr"),
    "lr_scheduler_type": Setting("text", "linear", "lr_scheduler.decay_type", SCHEDULES, reason="write it yourself"),
    "lr_scheduler_kwargs": Setting("table"),
    **same("warmup_steps warmup_ratio", Setting("float", 0.0, least=0)),
    "optim": Setting("text", "adamw_torch", "optimizer.name", OPTIMIZERS, reason="others are not supported"),
    **refused("write it into optimizer.options", optim_args="", optim_target_modules=None),
    "weight_decay": Setting("float", 0.0, "optimizer.weight_decay"),
    "adam_beta1": Setting("float", 0.9),
    "adam_beta2": Setting("float", 0.999),
    "adam_epsilon": Setting("float", 1e-8),
    "max_grad_norm": Setting("float", 1.0, "training.max_norm"),
    "average_tokens_across_devices": Setting("bool", choices=(True,), reason=ONE_LOSS),
    **refused("labels are not smoothed; dpo.label_smoothing does for pairs", label_smoothing_factor=0.0),
    "bf16": Setting("bool", False),
    "fp16": Setting("bool", False, note=BFLOAT16_INSTEAD),
    **refused(FLOAT16, fp16_full_eval=False, fp16_backend=AUTO, fp16_opt_level="O1"),
    "half_precision_backend": Setting("text", note="bfloat16 has one implementation"),
    "neftune_noise_alpha": Setting("float", to="training.neftune_alpha"),
    **same("gradient_checkpointing activation_checkpointing", Setting("bool", False)),
    "torch_compile": Setting("bool", to="compile.enable"),
    "torch_compile_backend": Setting("text", to="compile.backend"),
    **refused("a step has the samples that the job says", auto_find_batch_size=False, sortish_sampler=False),
    **refused("write the plan into [parallelism]", parallelism_config=None, accelerator_config=None, mp_parameters=""),
    **refused("answers are not generated in training; see validation.generated", predict_with_generate=False),
    "logging_steps": Setting("float", 500.0),
    **same("logging_strategy eval_strategy evaluation_strategy", Setting("word", choices=STRATEGIES)),
    "save_strategy": Setting("word", "steps", choices=STRATEGIES, reason="checkpoint.best_metric keeps the best"),
    "eval_steps": Setting("float"),
    "save_steps": Setting("float", 500.0),
    "save_total_limit": Setting("int"),
    "save_safetensors": Setting("bool", choices=(True,), reason="weights are never pickled"),
    **refused("validations begin with the run", eval_delay=0.0),
    "load_best_model_at_end": Setting("bool"),
    "metric_for_best_model": Setting("text"),
    "greater_is_better": Setting("bool"),
    "report_to": Setting("list"),
    "seed": Setting("int", 42, "debug.seed"),
    "dataloader_num_workers": Setting("int", to="training.dataloader.num_workers"),
    "dataloader_pin_memory": Setting("bool", to="training.dataloader.pin_memory"),
    "dataloader_persistent_workers": Setting("bool", to="training.dataloader.persistent_workers"),
    "dataloader_prefetch_factor": Setting("int", to="training.dataloader.prefetch_factor"),
    "group_by_length": Setting("bool", to="data.group_by_length", choices={True: True, False: None}),
    "train_sampling_strategy": Setting("text", choices=("random", "sequential", "group_by_length")),
    "ddp_timeout": Setting("int", to="comm.train_timeout_seconds"),
    "resume_from_checkpoint": Setting("any"),
    **same("fsdp fsdp_config deepspeed", Setting("any")),
    **noted({"any": "data_seed full_determinism dataloader_in_order"}, "the order follows from debug.seed alone"),
    **noted({"any": "gradient_checkpointing_kwargs activation_checkpointing_kwargs"}, "recompute has one kind"),
    **noted({"any": "use_liger_kernel liger_kernel_config torch_compile_mode tf32 use_cache"}, FASTER),
    **noted({"any": "torch_empty_cache_steps save_only_model enable_jit_checkpoint save_on_each_node"}, "not needed"),
    **noted({"any": "bf16_full_eval eval_on_start eval_accumulation_steps eval_do_concat_batches"}, "not needed"),
    **noted(
        {"any": "eval_use_gather_object include_for_metrics batch_eval_metrics prediction_loss_only"}, "not needed"
    ),
    **noted({"any": "ignore_data_skip restore_callback_states_from_checkpoint"}, "a resume continues exactly"),
    **noted({"any": "remove_unused_columns label_names length_column_name"}, "only the fields of a format are read"),
    "dataloader_drop_last": Setting("bool", note="the last step is filled up with samples without weight in the loss"),
    "dataloader_multiprocessing_context": Setting("any", note=START),
    **noted({"any": "local_rank use_cpu no_cuda ddp_backend ddp_static_graph ddp_find_unused_parameters"}, START),
    **noted({"any": "ddp_bucket_cap_mb ddp_broadcast_buffers fsdp_transformer_layer_cls_to_wrap"}, START),
    **noted({"any": "logging_first_step log_on_each_node logging_nan_inf_filter log_level log_level_replica"}, LOGS),
    **noted({"any": "disable_tqdm skip_memory_metrics include_num_input_tokens_seen logging_dir debug"}, LOGS),
    **noted({"any": "include_tokens_per_second project trackio_space_id trackio_bucket_id"}, LOGS),
    "trackio_static_space_id": Setting("any", note=LOGS),
    **noted(
        {"any": "push_to_hub hub_model_id hub_strategy hub_private_repo hub_always_push hub_revision"}, NOT_PUBLISHED
    ),
    "hub_token": Setting("any", note="a token of the hub is only read from HF_TOKEN, never from a file"),
    **noted({"any": "generation_max_length generation_num_beams generation_config"}, "nothing is generated"),
}
"""By name. A default is that of transformers."""


def options_of(values: Mapping[str, Any], table: Table, draft: JobDraft) -> Options:
    """Return the options with these values. Record their translations by `table` in `draft`.

    An option whose value is null has its default, if that is nothing."""
    options = Options(table, draft)
    for name, value in values.items():
        option = table.get(name)
        if option is None:
            draft.refuse(name, value, "a known option", hint(name, list(table)))
        elif value is None and option.default not in (None, False, ""):
            draft.refuse(name, None, option.allowed(), "or leave it out")
        elif value is not None:
            options.add(name, value, KINDS[option.kind][1](value))
    options.translate()
    return options


class TrainerTranslation:
    """The work of the Trainer with its arguments: batches, precision, optimizer, schedule, saves, validations, plan.

    `program`: its name in remarks.
    """

    def __init__(self, program: str, line: CommandLine, options: Options, draft: JobDraft) -> None:
        self.program, self.line, self.options, self.draft = program, line, options, draft
        self.values, self.note, self.refuse = draft.values, draft.notes.append, draft.refuse
        max_steps = options["max_steps"]
        self.steps = max_steps if max_steps > 0 else None
        self.ranks = line.ranks

    def read(self) -> None:
        """Translate everything but data, model and adapter, which have to be in the draft."""
        self._batch()
        self._length()
        self._precision()
        self._optimizer()
        self._schedule()
        self._output()
        self._cadence()
        self._plan()

    def _batch(self) -> None:
        local, passes = self.options["per_device_train_batch_size"], self.options["gradient_accumulation_steps"]
        if self.ranks is not None:
            self.values["training.global_batch_size"] = local * passes * self.ranks
        elif passes > 1:
            remedy = f"{self.program} starts all GPUs of the machine: give the number of ranks, --world-size N"
            allowed = "one forward pass a step without the number of ranks"
            self.refuse("gradient_accumulation_steps", passes, allowed, remedy)
        else:
            self.note(f"a step has {local} samples of each rank, as {self.program} starts all GPUs; --world-size N")
            self.note("writes out the total; where nothing is sharded there, parameters are here, at the same results")

    def _length(self) -> None:
        epochs = self.options["num_train_epochs"]
        if self.steps is not None:
            self.values["training.steps"] = self.steps
            if "num_train_epochs" in self.options:
                self.note(f"max_steps {self.steps} end the run, regardless of num_train_epochs")
        elif epochs != int(epochs) or epochs < 1:
            self.refuse("num_train_epochs", epochs, "a whole number", "to end within an epoch, set max_steps")
        else:
            self.values["training.epochs"] = int(epochs)

    def _precision(self) -> None:
        computes_bfloat16 = self.options["bf16"] or self.options["fp16"]
        self.values.setdefault("training.dtype", "float32")
        self.values.setdefault("training.mixed_precision_param", "bfloat16" if computes_bfloat16 else "float32")
        recomputes = self.options["gradient_checkpointing"] or self.options["activation_checkpointing"]
        self.values.setdefault("activation_checkpoint.mode", "full" if recomputes else "none")

    def _optimizer(self) -> None:
        options, values, name = self.options, self.values, self.options["optim"]
        if name.startswith("paged_"):
            self.note(f"{name}: the state is not paged; training.enable_cpu_offload keeps it on the host")
        values.setdefault("optimizer.decay_norms_and_biases", False)
        has_moments = (
            name in ADAM or OPTIMIZERS[name] in ("GaLore", "Muon") or values["optimizer.name"] != OPTIMIZERS[name]
        )
        for option, job_name in {"adam_beta1": "beta1", "adam_beta2": "beta2", "adam_epsilon": "eps"}.items():
            if has_moments:
                values[f"optimizer.{job_name}"] = options[option]
            elif option in options:
                self.refuse(option, options[option], f"nothing with optim: {name}", "it belongs to Adam")

    def _schedule(self) -> None:
        options, values, kind = self.options, self.values, self.options["lr_scheduler_type"]
        values |= {"lr_scheduler.min_lr_factor": 0.0, "lr_scheduler.convention": TRANSFORMERS}
        if kind == "polynomial":
            values["lr_scheduler.min_lr_factor"] = self._factor(LAST_RATE)
        self._schedule_settings(kind, dict(options["lr_scheduler_kwargs"] or {}))
        steps, ratio = options["warmup_steps"], options["warmup_ratio"]
        if steps >= 1 and steps != int(steps):
            self.refuse("warmup_steps", steps, "a whole number, or a share of all steps below 1")
        elif ratio > 1:
            self.refuse("warmup_ratio", ratio, "a share of all steps, at most 1")
        elif kind == "constant":
            values["lr_scheduler.warmup_steps"] = 0
            if steps or ratio:
                self.note(f"no effect with lr_scheduler_type: constant: {'warmup_steps' if steps else 'warmup_ratio'}")
        elif steps >= 1:
            values["lr_scheduler.warmup_steps"] = int(steps)
            if ratio:
                self.note("warmup_steps precede warmup_ratio")
        else:
            share = steps or ratio
            values["lr_scheduler.warmup_steps"] = share if 0 < share < 1 else ceil(share * (self.steps or 0))
            if share == 1 and self.steps is None:
                self.refuse("warmup_ratio", ratio, "a share below 1")

    def _factor(self, rate: float) -> float:
        """Return a final learning rate as a part of the highest; 0 without one, as a job refuses a rate of 0."""
        highest = self.options["learning_rate"]
        return rate / highest if highest else 0.0

    def _schedule_settings(self, kind: str, settings: dict[str, Any]) -> None:
        """Translate lr_scheduler_kwargs."""
        if kind == "cosine_with_restarts" and _is_count(settings.get("num_cycles", 1)):
            self.values["lr_scheduler.num_cycles"] = settings.pop("num_cycles", 1)
        elif kind == "cosine_with_min_lr" and len(settings) == 1:
            name, floor = next(iter(settings.items()))
            if name in ("min_lr", "min_lr_rate") and isinstance(floor, float | int) and floor >= 0:
                self.values["lr_scheduler.min_lr_factor"] = self._factor(floor) if name == "min_lr" else floor
                settings = {}
        elif kind == "cosine_with_min_lr":
            self.refuse("lr_scheduler_kwargs", settings, "one of min_lr and min_lr_rate with cosine_with_min_lr")
            return
        if settings:
            self.refuse("lr_scheduler_kwargs", settings, f"nothing else with {kind}", "write it into [lr_scheduler]")

    def _output(self) -> None:
        options, values = self.options, self.values
        limit = options["save_total_limit"]
        if limit == 1:
            self.note("save_total_limit 1: two are kept, because a single one may be damaged")
        values |= {"checkpoint.enable": True, "checkpoint.keep_latest_k": max(limit, 2) if limit else 0}
        if "adapter.kind" not in values:
            values |= {"checkpoint.last_save_model_only": True, "checkpoint.last_save_in_hf": True}
        resume = options["resume_from_checkpoint"]
        if isinstance(resume, str) and resume.lower() not in ("true", "false"):
            self.refuse("resume_from_checkpoint", resume, "nothing", "checkpoints of other trainers are not read")
        elif options["overwrite_output_dir"]:
            self.note(
                "overwrite_output_dir: choose a new output_dir to begin again; a folder with checkpoints is resumed"
            )
        trackers = [name for entry in options["report_to"] or [] for name in str(entry).split()]
        for name in trackers:
            if name in TRACKERS:
                values.setdefault("metrics.trackers", []).append(name)
            elif name not in ("none", "all"):
                self.refuse("report_to", name, f"none, {', '.join(TRACKERS)}", "metrics.trackers names what there is")
        if "all" in trackers:
            self.note("report_to all: no tracker is set; metrics.trackers names those to use")

    def _cadence(self) -> None:
        """Translate how often the run logs, saves and validates."""
        values = self.values
        if self.options["logging_strategy"] == "no":
            self.note("logging_strategy no: lines are printed as [metrics] says")
        elif log_freq := self._interval("logging_steps", self.options["logging_strategy"]):
            values["metrics.log_freq"] = log_freq
        save = self.options["save_strategy"]
        if save == "no" and self.steps is not None:
            values["checkpoint.interval"] = self.steps
        elif save == "no":
            values["checkpoint.interval"] = 1.0
        elif save_interval := self._interval("save_steps", save):
            values["checkpoint.interval"] = save_interval
        strategy = self.options["eval_strategy"] or self.options["evaluation_strategy"] or "no"
        if not values.get("validation.enable"):
            if strategy != "no":
                self.note("no data to validate on, so no effect: eval_strategy")
            return
        values["validation.local_batch_size"] = self.options["per_device_eval_batch_size"]
        if strategy == "no":
            self.note("the held-out data are validated once an epoch, though the file asks for no evaluation")
            values["validation.freq"] = "epoch" if self.steps is None else self.steps
        else:
            name = "eval_steps" if self.options["eval_steps"] is not None else "logging_steps"
            values["validation.freq"] = self._interval(name, strategy)
        self._best()

    def _interval(self, name: str, strategy: str | None) -> int | float | str | None:
        """Return an interval as a job writes it: in steps, as a fraction of all steps, or "epoch"."""
        value = self.options[name]
        if strategy == "epoch" and self.steps is None:
            return "epoch"
        if strategy == "epoch":
            self.refuse(name, strategy, "steps with max_steps", "the length of an epoch is not known then")
        elif value <= 0 or (value >= 1 and value != int(value)):
            self.refuse(name, value, "a whole number, or a share below 1")
        else:
            return int(value) if value >= 1 else float(value)
        return None

    def _best(self) -> None:
        options = self.options
        if not options["load_best_model_at_end"]:
            return
        metric = str(options["metric_for_best_model"] or "loss").removeprefix("eval_")
        if metric != "loss":
            self.refuse("metric_for_best_model", metric, "loss or eval_loss", "only the loss is measured")
        if options["greater_is_better"]:
            self.refuse("greater_is_better", True, "false", "the lowest loss is the best")
        self.values |= {"checkpoint.best_metric": "validation_loss", "checkpoint.export_best": True}
        if "adapter.last_save_in_peft" not in self.values:
            self.values |= {"checkpoint.last_save_model_only": True}

    def _plan(self) -> None:
        options, values, ranks = self.options, self.values, self.ranks
        path = options["deepspeed"] or launchers.deepspeed_file(self.line)
        config = options["fsdp_config"] or {}
        entries = options["fsdp"] if isinstance(options["fsdp"], list) else [options["fsdp"] or ""]
        strategies = {strategy.lower() for entry in entries for strategy in str(entry).split()}
        if unknown := strategies - {*SHARDING}:
            self.refuse("fsdp", sorted(unknown), f"some of {', '.join(SHARDING)}")
        if path is not None and not isinstance(path, str):
            self.refuse("deepspeed", path, "the path of a file", "write the table into one")
        elif path is not None:
            if strategies:
                self.refuse("fsdp", options["fsdp"], "nothing with deepspeed", "drop one of the two")
            relative_path = Path(self.line.config or "").parent / path
            try:
                deepspeed.add(Path(path) if Path(path).is_file() else relative_path, ranks, self.draft)
            except JobError as error:
                self.refuse("deepspeed", path, "a DeepSpeed file", str(error))
        if path is not None:
            return
        if not isinstance(config, dict):
            self.refuse("fsdp_config", config, "a table", "write the file's table into it")
            return
        config = {str(name).removeprefix("fsdp_"): value for name, value in config.items()}
        if config.pop("offload_params", False) or config.pop("cpu_offload", False) or "offload" in strategies:
            values["training.enable_cpu_offload"] = True
        if config.pop("activation_checkpointing", False):
            values["activation_checkpoint.mode"] = "full"
        keeps_weights = config.pop("reshard_after_forward", True) in (False, "false")
        if config:
            self.note(f"fsdp_config: not needed in a job: {', '.join(sorted(config))}")
        strategies = strategies or launchers.sharding(self.line)
        if ranks == 1:
            return
        if "shard_grad_op" in strategies or (keeps_weights and strategies):
            values["parallelism.fsdp_reshard_after_forward"] = "never"
        elif {"full_shard", "true"} & strategies:
            values["parallelism.fsdp_reshard_after_forward"] = "always"
        if ranks is not None and (not strategies or "no_shard" in strategies):
            values |= replicated(ranks)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
