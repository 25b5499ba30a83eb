"""Translate DeepSpeed's JSON to options of a job.

ZeRO's stages become ways to shard a data-parallel group. A job has no options for how bytes are moved.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchtitan.config.options import hint
from torchtitan.models.hf.config import read_json
from torchtitan.plugins.importers.translation import AUTO, FLOAT16, CommandLine, JobDraft, is_finite, replicated

COMMUNICATION = """overlap_comm contiguous_gradients reduce_scatter reduce_bucket_size allgather_partitions
    allgather_bucket_size round_robin_gradients sub_group_size stage3_prefetch_bucket_size
    stage3_param_persistence_threshold stage3_max_live_parameters stage3_max_reuse_distance
    stage3_gather_16bit_weights_on_model_save stage3_gather_fp16_weights_on_model_save memory_efficient_linear
    prefetch_bucket_size param_persistence_threshold max_live_parameters max_reuse_distance
    gather_16bit_weights_on_model_save gather_fp16_weights_on_model_save ignore_unused_parameters"""
"""Keys of zero_optimization without an effect on a job."""
UNSUPPORTED = {
    "zero_quantized_nontrainable_weights": "set adapter.kind to quantize frozen weights",
}
HPZ = "zero_hpz_partition_size"
QUANTIZED = {
    "zero_quantized_weights": ("parallelism.fsdp_quantized_gather", "int8"),
    "zero_quantized_gradients": ("parallelism.fsdp_quantized_reduce", "int4"),
}
"""Keys of ZeRO++ that are true or false, and the option that true sets."""
ZERO_PLUS_PLUS = (HPZ, *QUANTIZED)
"""Keys that DeepSpeed reads with stage 3 only."""
ZERO = (
    *(*COMMUNICATION.split(), *UNSUPPORTED, *ZERO_PLUS_PLUS),
    *("stage", "offload_optimizer", "offload_param", "cpu_offload"),
)
NUMBERS = {
    "train_micro_batch_size_per_gpu": "training.local_batch_size",
    "train_batch_size": "training.global_batch_size",
    "gradient_clipping": "training.max_norm",
}
LOGGING = (
    *("steps_per_print", "wall_clock_breakdown", "dump_state", "zero_allow_untested_optimizer"),
    "zero_force_ds_cpu_optimizer",
)
KEYS = (
    *(*NUMBERS, *LOGGING, "gradient_accumulation_steps", "zero_optimization", "bf16", "fp16", "optimizer"),
    *("scheduler", "activation_checkpointing", "compile"),
)
ADAM = {"lr": "optimizer.lr", "eps": "optimizer.eps", "weight_decay": "optimizer.weight_decay"}


def read(line: CommandLine) -> JobDraft:
    """Translate a file that is imported by itself."""
    draft = JobDraft(line.config or "the command line", "")
    for name, text in line.flags:
        draft.refuse(name, text, "no flags after a DeepSpeed file", "write them as options of the job")
    add(Path(line.config or ""), line.ranks, draft)
    return draft


def add(path: Path, ranks: int | None, draft: JobDraft) -> None:
    """Add a file's options to a job, which they may not contradict. Raises JobError if it cannot be read."""
    _File(read_json(path.expanduser()), path, ranks, draft).read()


class _File:
    def __init__(self, table: Mapping[str, Any], path: Path, ranks: int | None, draft: JobDraft) -> None:
        self.table, self.ranks, self.values = table, ranks, draft.values
        self.refuse, self.note = draft.part_of(str(path), "").refuse, draft.notes.append

    def read(self) -> None:
        for key in self.table.keys() - set(KEYS):
            self.refuse(key, self.table[key], "a known key", hint(key, KEYS) or "leave it out")
        self._numbers()
        self._precision()
        zero = self.table.get("zero_optimization", {})
        if not isinstance(zero, dict):
            self.refuse("zero_optimization", zero, "a table with its stage")
            return
        for key in zero.keys() - set(ZERO):
            self.refuse(f"zero_optimization.{key}", zero[key], "a known key", hint(key, ZERO))
        self._stage(zero)
        self._offload(zero)
        self._unsupported(zero)
        self._optimizer()
        self._compile()

    def _set_number(self, key: str, option: str, value: Any) -> None:
        """Set an option of the job, or refuse the value if the job has another."""
        if value in (AUTO, None):
            return
        kind = int if option.endswith("batch_size") else float
        if type(value) not in (int, float) or not is_finite(value) or kind(value) != value:
            self.refuse(key, value, "a finite number, or auto")
        elif self.values.setdefault(option, kind(value)) != value:
            self.refuse(key, value, f"auto, or {self.values[option]} as in the job", "write auto")

    def _numbers(self) -> None:
        for key, option in NUMBERS.items():
            self._set_number(key, option, self.table.get(key))
        passes, local = self.table.get("gradient_accumulation_steps"), self.values.get("training.local_batch_size")
        if passes in (None, AUTO):
            return
        if type(passes) is not int or passes < 1:
            self.refuse("gradient_accumulation_steps", passes, "a whole number, or auto")
        elif local is None or self.ranks is None:
            remedy = "it needs the batch of a rank, and --world-size N"
            self.refuse("gradient_accumulation_steps", passes, "auto", remedy)
        else:
            total = passes * local * self.ranks
            self._set_number("gradient_accumulation_steps", "training.global_batch_size", total)

    def _precision(self) -> None:
        if _is_enabled(self.table.get("fp16")):
            self.refuse("fp16.enabled", True, "auto or false", FLOAT16)
        if not _is_enabled(self.table.get("bf16")):
            return
        if self.values.setdefault("training.mixed_precision_param", "bfloat16") != "bfloat16":
            self.refuse("bf16.enabled", True, "auto, or false as in the job", "write auto")

    def _stage(self, zero: Mapping[str, Any]) -> None:
        stage, values = zero.get("stage", 0), self.values
        if type(stage) is not int or stage not in range(4):
            self.refuse("zero_optimization.stage", stage, "0, 1, 2 or 3")
        elif stage == 0 and self.ranks is not None:
            values |= replicated(self.ranks)
        elif stage == 0:
            self.refuse("zero_optimization.stage", 0, "1, 2 or 3", "or give the number of ranks: --world-size N")
        elif self.ranks == 1:
            self.note(f"ZeRO-{stage}: nothing is sharded over one rank with samples; --world-size N sets all ranks")
        else:
            values["parallelism.fsdp_reshard_after_forward"] = "always" if stage == 3 else "never"
            if stage == 3:
                self._zero_plus_plus(zero)
            elif ignored := [key for key in ZERO_PLUS_PLUS if zero.get(key) not in (None, False, 1)]:
                self.note(f"without effect below stage 3: {', '.join(ignored)}")
            if stage == 1:
                self.note("ZeRO-1: gradients are sharded too, as in ZeRO-2")

    def _zero_plus_plus(self, zero: Mapping[str, Any]) -> None:
        size = zero.get(HPZ, 1)
        if type(size) is not int or size < 1:
            self.refuse(f"zero_optimization.{HPZ}", size, "the number of ranks of a machine")
        elif 1 < size != self.ranks:
            self.values["parallelism.fsdp_reshard_after_forward"] = size
        for key, (option, kind) in QUANTIZED.items():
            value = zero.get(key, False)
            if not isinstance(value, bool):
                self.refuse(f"zero_optimization.{key}", value, "true or false")
            elif value:
                self.values[option] = kind
                self.note(f"{key}: lossy, in blocks of 32 with scales that are powers of two; DeepSpeed's are larger")

    def _offload(self, zero: Mapping[str, Any]) -> None:
        devices: dict[str, Any] = {}
        for key in ("offload_optimizer", "offload_param"):
            table = zero.get(key) or {}
            devices[key] = table.get("device", "none") if isinstance(table, dict) else table
        if zero.get("cpu_offload"):
            devices["cpu_offload"] = "cpu"
        for key, device in devices.items():
            if device not in ("cpu", "none", None):
                self.refuse(f"zero_optimization.{key}", device, "cpu or none", "offloading to disks is not supported")
        if "cpu" in devices.values():
            self.values["training.enable_cpu_offload"] = True
            self.note("offload: parameters, gradients and optimizer state are kept on the host together")

    def _unsupported(self, zero: Mapping[str, Any]) -> None:
        for key, reason in UNSUPPORTED.items():
            value = zero.get(key)
            if value is True or value not in (None, False, 0, 1):
                self.refuse(f"zero_optimization.{key}", value, "false" if value is True else "nothing", reason)
        if ignored := [key for key in (*COMMUNICATION.split(), *LOGGING) if key in zero or key in self.table]:
            self.note(f"without effect, options of DeepSpeed's communication and logging: {', '.join(ignored)}")
        if self.table.get("activation_checkpointing"):
            self.note("activation_checkpointing: set activation_checkpoint.mode instead")
        schedule = self.table.get("scheduler") or {}
        if any(value != AUTO for value in _params(schedule).values()):
            self.refuse("scheduler", schedule, "numbers that are auto", "write them into [lr_scheduler]")

    def _optimizer(self) -> None:
        optimizer = self.table.get("optimizer") or {}
        kind = optimizer.get("type") if isinstance(optimizer, dict) else optimizer
        if kind not in (None, "AdamW", "Adam"):
            self.refuse("optimizer.type", kind, "AdamW or Adam", "write the optimizer into the job")
            return
        if kind is not None and not self.values.setdefault("optimizer.name", kind).startswith("Adam"):
            self.refuse("optimizer.type", kind, f"{self.values['optimizer.name']}, as in the job")
        for key, value in _params(optimizer).items():
            if key == "betas" and isinstance(value, list) and len(value) == 2:
                for number, beta in enumerate(value, 1):
                    self._set_number("optimizer.params.betas", f"optimizer.beta{number}", beta)
            elif key in ADAM:
                self._set_number(f"optimizer.params.{key}", ADAM[key], value)
            elif value != AUTO:
                self.refuse(f"optimizer.params.{key}", value, "auto", hint(key, [*ADAM, "betas"]))

    def _compile(self) -> None:
        table = self.table.get("compile") or {}
        if not isinstance(table, dict) or table.keys() - {"disable", "backend"}:
            self.refuse("compile", table, "a table with disable and backend", "or set [compile] in the job")
            return
        is_off, backend = table.get("disable", False), table.get("backend", "inductor")
        if not isinstance(is_off, bool) or not isinstance(backend, str):
            self.refuse("compile", table, "disable as true or false, and backend as text")
        elif table and not is_off:
            for option, value in {"compile.enable": True, "compile.backend": backend}.items():
                if self.values.setdefault(option, value) != value:
                    allowed = f"{option} = {self.values[option]!r}, as in the job"
                    self.refuse("compile", table, allowed, "leave it out of one of the two")


def _is_enabled(table: Any) -> bool:
    return isinstance(table, dict) and table.get("enabled") is True


def _params(table: Any) -> Mapping[str, Any]:
    params = table.get("params") if isinstance(table, dict) else None
    return params if isinstance(params, dict) else {}
