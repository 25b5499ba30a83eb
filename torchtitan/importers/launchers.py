"""The options of a line's launcher in a job: each is taken over, noted in the job's head, or refused.

accelerate launch sets up mixed precision, sharding and compilation for a script that asks it to, as the Trainer of
transformers does. What the script says itself counts before that, as it does there.
"""

from pathlib import Path
from typing import Any

from torchtitan.config.options import hint
from torchtitan.importers.axolotl_values import KINDS
from torchtitan.importers.command_line import CommandLine
from torchtitan.importers.launcher_options import MACHINES, OPTIONS, PARALLELISM, SETUP, START
from torchtitan.importers.translation import Meaning

SHARDING = {"full_shard": "full_shard", "shard_grad_op": "shard_grad_op", "no_shard": "no_shard"}
SHARDING |= {"1": "full_shard", "2": "shard_grad_op", "3": "no_shard"}
STAGES = {0: "no_shard", 1: "shard_grad_op", 2: "shard_grad_op", 3: "full_shard"}
DEFAULT_STAGE = 2
"""Of accelerate launch --use_deepspeed, without a file or a stage."""
BACKENDS = ("eager", "aot_eager", "inductor", "cudagraphs")
MAX_NORM = 1.0
"""Of the Trainer, where nothing is said."""
DEFAULT_FILE = Path("~/.cache/huggingface/accelerate/default_config.yaml")
"""The file that `accelerate config` writes, which accelerate launch reads if none is named."""
NO, YES = ("no", "false", "none", ""), ("true", "1", "yes")


def add(line: CommandLine, meaning: Meaning, is_accelerated: bool) -> None:
    """Add the options of the line's launcher to the job that its script means. `is_accelerated`: whether the script
    lets accelerate set up precision, sharding and compilation."""
    _Launch(line, meaning, is_accelerated).read()


def deepspeed_file(line: CommandLine) -> str | None:
    """The path of the file that accelerate hands to DeepSpeed."""
    return line.launched.get("deepspeed_config_file")


def sharding(line: CommandLine) -> set[str]:
    """How accelerate shards the model, as a word of FSDP's sharding strategies; empty where it does not."""
    options = line.launched
    if "use_deepspeed" in options or "zero_stage" in options:
        stage = options.get("zero_stage", str(DEFAULT_STAGE))
        return {STAGES[int(stage)]} if stage in map(str, STAGES) else set()
    if "use_fsdp" in options:
        regather = options.get("fsdp_reshard_after_forward", "true").lower()
        strategy = options.get("fsdp_sharding_strategy", regather)
        strategy = {**dict.fromkeys(YES, "full_shard"), "false": "shard_grad_op"}.get(
            strategy.lower(), strategy.lower()
        )
        return {SHARDING[strategy]} if strategy in SHARDING else set()
    return set()


class _Launch:
    def __init__(self, line: CommandLine, meaning: Meaning, is_accelerated: bool) -> None:
        self.line, self.meaning, self.is_accelerated = line, meaning, is_accelerated
        self.name = "accelerate launch" if line.launcher == "accelerate" else line.launcher
        self.values, self.note = meaning.values, meaning.notes.append
        self.options: dict[str, Any] = {}

    def read(self) -> None:
        if self.line.unread:
            unread = " ".join(self.line.unread)
            self.note(f"ahead of the launcher, not read: {unread}; --world-size N says how many ranks there are")
        if not self.line.launcher:
            return
        if "use_parallelism_config" in self.line.launched:
            self.values |= {fate.to: 1 for name, fate in PARALLELISM.items() if name.endswith("_size") and fate.to}
        of_start = [name for name in self.line.launched if not self._take(name, self.line.launched[name])]
        if of_start:
            self.note(f"of {self.name}, nothing that a job says, as {START}: --{', --'.join(of_start)}")
        if self.is_accelerated:
            if (
                self.line.launcher == "accelerate"
                and "config_file" not in self.line.launched
                and DEFAULT_FILE.expanduser().is_file()
            ):
                self.note(f"{self.name}: its default file {DEFAULT_FILE} is not read; name it by --config_file")
            self._precision()
            self._compile()
            self._deepspeed()
            self._fsdp()

    def _refuse(self, name: str, value: Any, allowed: str, remedy: str = "") -> None:
        self.meaning.refuse(f"{name} ({self.name})", value, allowed, remedy)

    def _take(self, name: str, text: str) -> bool:
        """Take an option over by its fate. False for one that only says how processes are started."""
        fate = OPTIONS[self.line.launcher].get(name)
        if fate is None:
            self._refuse(name, text, f"an option of {self.name}", hint(name, OPTIONS[self.line.launcher]))
            return True
        value = True if fate.kind == "bool" and not text else KINDS[fate.kind][1](text)
        if value is None:
            self._refuse(name, text, KINDS[fate.kind][0])
        elif fate.reason:
            if value is not False:
                self._refuse(name, value, "nothing", fate.reason)
        elif name in SETUP and not self.is_accelerated and text not in NO[:3]:
            reason = f"{self.line.script} does not ask accelerate for it: its own flags say precision and sharding"
            self._refuse(name, value, f"nothing ahead of {self.line.script}", reason)
        elif name in PARALLELISM and "use_parallelism_config" not in self.line.launched:
            self.note(f"{self.name} --{name}: no effect without --use_parallelism_config")
        elif fate.note == START or (fate.note == MACHINES and not self._has_machines()):
            return False
        elif fate.note:
            self.note(f"{self.name} --{name}: {fate.note}")
        elif fate.to:
            self.values[fate.to] = value
        self.options[name] = value
        return True

    def _has_machines(self) -> bool:
        counts = (self.line.launched.get(name, "1") for name in ("num_machines", "nnodes", "num_nodes"))
        return any(count != "1" for count in counts)

    def _precision(self) -> None:
        """bf16 counts where the script says nothing of it; the Trainer's own option counts before it."""
        requested, computed = (
            self.options.get("mixed_precision", "no"),
            self.values.get("training.mixed_precision_param"),
        )
        if requested in NO or "mixed_precision" in self.meaning.launched:
            return
        if computed == "bfloat16":
            if requested != "bf16":
                self.note(f"{self.name} --mixed_precision {requested}: bf16 of the file counts before it")
        elif requested == "bf16":
            self.values["training.mixed_precision_param"] = "bfloat16"
            self.note(f"{self.name} --mixed_precision bf16: it computes in bfloat16, though the file does not say bf16")
        else:
            reason = "float16 overflows without a scaler; bf16 needs none"
            self._refuse("mixed_precision", requested, "no or bf16", reason)

    def _compile(self) -> None:
        backend = str(self.options.get("dynamo_backend", "no")).lower()
        if (mode := self.options.get("dynamo_mode", "default")) != "default":
            self._refuse("dynamo_mode", mode, "default", "compile.* has no modes")
        if backend in NO:
            return
        if backend not in BACKENDS:
            self._refuse("dynamo_backend", backend, f"no, {', '.join(BACKENDS)}")
            return
        self.values["compile.enable"] = True
        self.values.setdefault("compile.backend", backend)

    def _deepspeed(self) -> None:
        stage = self.options.get("zero_stage")
        if stage is not None and stage not in STAGES:
            self._refuse("zero_stage", stage, "0, 1, 2 or 3")
        for name in ("offload_optimizer_device", "offload_param_device"):
            device = str(self.options.get(name, "none")).lower()
            if device == "cpu":
                self.values["training.enable_cpu_offload"] = True
                self.note(f"{self.name} --{name} cpu: parameters and optimizer are kept on the host together")
            elif device not in NO:
                self._refuse(name, device, "none or cpu", "nothing is moved to disks")
        same = {
            "gradient_accumulation_steps": self._passes(),
            "gradient_clipping": self.values.get("training.max_norm", MAX_NORM),
        }
        for name, job_value in same.items():
            value = self.options.get(name)
            if value is not None and job_value is not None and value != job_value:
                self._refuse(name, value, f"{job_value:g}, as the job has it", "say it once, to the script")
            elif value is not None and job_value is None and value != 1:
                self.note(f"{self.name} --{name} {value:g}: not compared with the job; say --world-size N")
        if self.options.get("parallelism_config_sp_size", 1) != 1:
            reason = "parallelism.context_parallel_degree shards sequences"
            self._refuse("parallelism_config_sp_size", self.options["parallelism_config_sp_size"], "1", reason)

    def _passes(self) -> int | None:
        local, whole = (self.values.get(f"training.{name}_batch_size") for name in ("local", "global"))
        return whole // (local * self.line.ranks) if local and whole and self.line.ranks else None

    def _fsdp(self) -> None:
        strategy = str(self.options.get("fsdp_sharding_strategy", "full_shard")).lower()
        if strategy not in SHARDING and strategy not in (*YES, *NO):
            allowed = "FULL_SHARD, SHARD_GRAD_OP or NO_SHARD"
            reason = "parallelism.data_parallel_replicate_degree of the job makes it hybrid"
            self._refuse("fsdp_sharding_strategy", self.options["fsdp_sharding_strategy"], allowed, reason)
        if self._is_on("fsdp_offload_params"):
            self.values["training.enable_cpu_offload"] = True
        if self._is_on("fsdp_activation_checkpointing"):
            self.values["activation_checkpoint.mode"] = "full"
        if self._is_on("fsdp_activation_checkpointing_offload"):
            self._refuse("fsdp_activation_checkpointing_offload", True, "false", "what is kept stays on its device")

    def _is_on(self, name: str) -> bool:
        return str(self.options.get(name, "false")).lower() in YES
