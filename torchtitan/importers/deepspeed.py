"""DeepSpeed's JSON as options: ZeRO's stages are ways to shard a data-parallel group, and how it moves bytes is nothing
that a job says.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchtitan.config.options import hint
from torchtitan.importers.command_line import CommandLine
from torchtitan.importers.translation import Meaning, is_finite
from torchtitan.models.hf.config import read_json

AUTO = "auto"
MOVING: tuple[str, ...] = (
    "overlap_comm",
    "contiguous_gradients",
    "reduce_scatter",
    "reduce_bucket_size",
    "allgather_partitions",
)
MOVING += ("allgather_bucket_size", "round_robin_gradients", "sub_group_size", "stage3_prefetch_bucket_size")
MOVING += ("stage3_param_persistence_threshold", "stage3_max_live_parameters", "stage3_max_reuse_distance")
MOVING += (
    "stage3_gather_16bit_weights_on_model_save",
    "stage3_gather_fp16_weights_on_model_save",
    "memory_efficient_linear",
)
MOVING += ("ignore_unused_parameters",)
ZERO: tuple[str, ...] = (
    *MOVING,
    "stage",
    "offload_optimizer",
    "offload_param",
    "cpu_offload",
    "zero_hpz_partition_size",
)
ZERO += ("zero_quantized_weights", "zero_quantized_gradients", "zero_quantized_nontrainable_weights")
NOT_HERE = {
    "zero_hpz_partition_size": "a second copy of the weights in each node is not here yet",
    "zero_quantized_weights": "weights are gathered in the type that they compute in",
    "zero_quantized_gradients": "gradients are reduced in training.mixed_precision_reduce",
    "zero_quantized_nontrainable_weights": "frozen weights are packed by adapter.kind alone",
}
NUMBERS = {
    "train_micro_batch_size_per_gpu": "training.local_batch_size",
    "train_batch_size": "training.global_batch_size",
    "gradient_clipping": "training.max_norm",
}
TALK: tuple[str, ...] = (
    "steps_per_print",
    "wall_clock_breakdown",
    "dump_state",
    "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer",
)
KEYS: tuple[str, ...] = (
    *NUMBERS,
    *TALK,
    "gradient_accumulation_steps",
    "zero_optimization",
    "bf16",
    "fp16",
    "optimizer",
    "scheduler",
)
KEYS += ("activation_checkpointing",)
ADAM = {"lr": "optimizer.lr", "eps": "optimizer.eps", "weight_decay": "optimizer.weight_decay"}


def read(line: CommandLine) -> Meaning:
    """What a file alone says."""
    meaning = Meaning(line.config or "the command line", "")
    for name, text in line.flags:
        meaning.refuse(name, text, "no flags behind a DeepSpeed file", "write them as options of the job")
    add(Path(line.config or ""), line.ranks, meaning)
    return meaning


def add(path: Path, ranks: int | None, meaning: Meaning) -> None:
    """What the file says into `meaning`, whose values it may not contradict. JobError where it cannot be read."""
    _File(read_json(path.expanduser()), path, ranks, meaning).read()


class _File:
    def __init__(self, said: Mapping[str, Any], path: Path, ranks: int | None, meaning: Meaning) -> None:
        self.said, self.path, self.ranks, self.values = said, path, ranks, meaning.values
        self.meaning = Meaning(str(path), "", meaning.values, meaning.notes, meaning.faults)

    def read(self) -> None:
        for key in self.said.keys() - set(KEYS):
            self.meaning.refuse(key, self.said[key], "a key that is known", hint(key, KEYS) or "leave it out")
        self._numbers()
        self._precision()
        zero = self.said.get("zero_optimization", {})
        if not isinstance(zero, dict):
            self.meaning.refuse("zero_optimization", zero, "a table with its stage")
            return
        for key in zero.keys() - set(ZERO):
            self.meaning.refuse(f"zero_optimization.{key}", zero[key], "a key that is known", hint(key, ZERO))
        self._stage(zero)
        self._rest(zero)

    def _set(self, key: str, option: str, value: Any) -> None:
        """A number of the file, unless the job has another."""
        if value == AUTO or value is None:
            return
        kind = int if option.endswith("batch_size") else float
        if type(value) not in (int, float) or not is_finite(value) or kind(value) != value:
            self.meaning.refuse(key, value, "a finite number, or auto")
        elif option in self.values and self.values[option] != value:
            self.meaning.refuse(key, value, f"auto, or {self.values[option]} as in the job", "write auto")
        else:
            self.values[option] = kind(value)

    def _numbers(self) -> None:
        for key, option in NUMBERS.items():
            self._set(key, option, self.said.get(key))
        passes, local = self.said.get("gradient_accumulation_steps"), self.values.get("training.local_batch_size")
        if passes in (None, AUTO) or type(passes) is not int or passes < 1:
            if passes not in (None, AUTO):
                self.meaning.refuse("gradient_accumulation_steps", passes, "a whole number, or auto")
        elif local is None or self.ranks is None:
            self.meaning.refuse(
                "gradient_accumulation_steps", passes, "auto", "it needs the batch of a rank, and --world-size N"
            )
        else:
            self._set("gradient_accumulation_steps", "training.global_batch_size", passes * local * self.ranks)

    def _precision(self) -> None:
        if _on(self.said.get("fp16")):
            self.meaning.refuse(
                "fp16.enabled", True, "auto or false", "float16 overflows without a scaler; bf16 needs none"
            )
        if _on(self.said.get("bf16")):
            self.values.setdefault("training.mixed_precision_param", "bfloat16")
            if self.values["training.mixed_precision_param"] != "bfloat16":
                self.meaning.refuse("bf16.enabled", True, "auto, or false as in the job", "write auto")

    def _stage(self, zero: Mapping[str, Any]) -> None:
        stage, values = zero.get("stage", 0), self.values
        if type(stage) is not int or stage not in range(4):
            self.meaning.refuse("zero_optimization.stage", stage, "0, 1, 2 or 3")
        elif stage == 0 and self.ranks is None:
            self.meaning.refuse("zero_optimization.stage", 0, "1, 2 or 3", "or write how many ranks: --world-size N")
        elif stage == 0:
            values["parallelism.data_parallel_replicate_degree"] = self.ranks
            values["parallelism.data_parallel_shard_degree"] = 1
        elif self.ranks == 1:
            self.meaning.notes.append(f"ZeRO-{stage}: on one rank nothing is sharded; --world-size N is for more")
        else:
            values["parallelism.fsdp_reshard_after_forward"] = "always" if stage == 3 else "never"
            if stage == 1:
                self.meaning.notes.append("ZeRO-1: gradients are sharded too, as in ZeRO-2")

    def _rest(self, zero: Mapping[str, Any]) -> None:
        notes, devices = self.meaning.notes, dict[str, Any]()
        for key in ("offload_optimizer", "offload_param"):
            table = zero.get(key) or {}
            devices[key] = table.get("device", "none") if isinstance(table, dict) else table
        if zero.get("cpu_offload"):
            devices["cpu_offload"] = "cpu"
        for key, device in devices.items():
            if device not in ("cpu", "none", None):
                self.meaning.refuse(f"zero_optimization.{key}", device, "cpu or none", "disks are not offloaded to")
        if "cpu" in devices.values():
            self.values["training.enable_cpu_offload"] = True
            notes.append("offload: parameters, gradients and optimizer state go to the host together")
        for key, why in NOT_HERE.items():
            if zero.get(key) not in (None, False, 0, 1):
                self.meaning.refuse(f"zero_optimization.{key}", zero[key], "nothing", why)
            elif zero.get(key) is True:
                self.meaning.refuse(f"zero_optimization.{key}", True, "false", why)
        if dropped := [key for key in (*MOVING, *TALK) if key in zero or key in self.said]:
            notes.append(f"of DeepSpeed, how bytes are moved and what is printed, left out: {', '.join(dropped)}")
        if self.said.get("activation_checkpointing"):
            notes.append("activation_checkpointing: activation_checkpoint.mode says what is recomputed")
        self._optimizer()
        schedule = self.said.get("scheduler") or {}
        if any(value != AUTO for value in _params(schedule).values()):
            self.meaning.refuse("scheduler", schedule, "numbers that are auto", "write them into [lr_scheduler]")

    def _optimizer(self) -> None:
        optimizer = self.said.get("optimizer") or {}
        kind = optimizer.get("type") if isinstance(optimizer, dict) else optimizer
        if kind not in (None, "AdamW", "Adam"):
            self.meaning.refuse("optimizer.type", kind, "AdamW or Adam", "write the optimizer into the job")
            return
        if kind is not None:
            self.values.setdefault("optimizer.name", kind)
            if not self.values["optimizer.name"].startswith("Adam"):
                self.meaning.refuse("optimizer.type", kind, f"{self.values['optimizer.name']}, as in the job")
        params = _params(optimizer)
        for key, value in params.items():
            if key == "betas" and value != AUTO and isinstance(value, list) and len(value) == 2:
                for number, beta in enumerate(value, 1):
                    self._set("optimizer.params.betas", f"optimizer.beta{number}", beta)
            elif key in ADAM:
                self._set(f"optimizer.params.{key}", ADAM[key], value)
            elif value != AUTO:
                self.meaning.refuse(f"optimizer.params.{key}", value, "auto", hint(key, [*ADAM, "betas"]))


def _on(table: Any) -> bool:
    return isinstance(table, dict) and table.get("enabled") is True


def _params(table: Any) -> Mapping[str, Any]:
    params = table.get("params") if isinstance(table, dict) else None
    return params if isinstance(params, dict) else {}
