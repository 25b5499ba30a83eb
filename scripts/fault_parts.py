"""The parts of `fault_sweep.py` in addition to the drawn kills: faults, their jobs and the expected outcome.

A case is one job under the launcher; `faults[n]` are the faults of its n-th start. A rank is a fork of the launcher,
which is a fork of the sweep, so a start costs a second, and each fault is a function replaced in the rank's memory.
"""

import importlib
import os
import resource
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from torchtitan.process.exit import NOT_EXPORTED

BOTH = -1
"""Every rank."""
LONG = {"training.steps": 28, "checkpoint.interval": 2}
DDP = {"parallelism.data_parallel_replicate_degree": 2, "parallelism.data_parallel_shard_degree": 1}
WATCHED = {"comm.train_timeout_seconds": 20}


@dataclass(frozen=True)
class Fault:
    """A fault, planted in one rank's process."""

    kind: str
    rank: int = 1
    step: int = 7
    """The step at which it happens. A kill at a point happens in the first save after the start instead."""
    point: str = ""
    after: bool = False


@dataclass(frozen=True)
class Case:
    """A job with faults, and its expected outcome."""

    name: str
    faults: list[list[Fault]]
    options: dict = field(default_factory=dict)
    restarts: int | None = None
    """Starts after the first; None: one for each fault."""
    log: str = ""
    """Text that the log has to contain."""
    machines: int = 1
    exit_code: int = 0
    """Expected exit code of the job with the faults. After one other than 0 the job is started again without faults."""

    @property
    def expected_restarts(self) -> int:
        return len(self.faults) if self.restarts is None else self.restarts


CHECKPOINT = "torchtitan.checkpoint."
OF_EVERY_RANK = (
    "checkpointer:Checkpointer._snapshot",
    "saving:save",
    "saving:_save_once",
    "storage:write_tensors",
    "hashed_files:HashedFile.close",
    "saving:_write",
    "saving:_entry",
    "hashed_files:sha256_of",
    "layout:dump_json",
    "saving:_read_back",
    "hashed_files:hash_files",
    "saving:_commit",
    "agreement:Peers.agree",
    "agreement:Peers.gather",
    "agreement:Peers.broadcast",
    "saving:delete_old",
)
OF_THE_FIRST = (
    "folders:unpublish",
    "folders:delete",
    "saving:_without_needed",
    "saving:_open",
    "folders:remove_leftovers",
    "saving:_look_for_space",
    "folders:create_temporary",
    "folders:write_file",
    "layout:manifest_text",
    "folders:publish",
    "folders:sync_folder",
    "folders:replace_file",
)
RETENTION = (
    "saving:delete_old",
    "saving:_without_needed",
    "folders:unpublish",
    "folders:delete",
    "shutil:rmtree",
)
EXPORT = ("saving:snapshot_of_model", "saving:_write", "saving:_commit", "folders:publish")


def save_points() -> list[Fault]:
    """Return kills before and after 28 functions of a save, on alternate ranks where both run them."""
    ranks = dict.fromkeys(OF_THE_FIRST, 0) | {name: index % 2 for index, name in enumerate(OF_EVERY_RANK)}
    ordered = [*OF_THE_FIRST, *OF_EVERY_RANK]
    return [Fault("kill", ranks[name], point=name, after=after) for name in ordered for after in (False, True)]


def cases_of_saves() -> list[Case]:
    """Return cases that kill ranks around the functions of a save, several kills in one job."""
    points, size = save_points(), 8
    parts = [points[start : start + size] for start in range(0, len(points), size)]
    return [Case(f"{len(part)} points, from {part[0].point}", [[one] for one in part], LONG) for part in parts]


def cases_of_exports() -> list[Case]:
    """Return cases that kill rank 0 around the functions of an export."""
    faults = [[Fault("kill in export", 0, point=name, after=after)] for name in EXPORT for after in (False, True)]
    options = {"checkpoint.last_save_model_only": True}
    return [
        Case(f"{'after' if fault.after else 'before'} {fault.point}", [[fault]], options, 0, exit_code=NOT_EXPORTED)
        for (fault,) in faults
    ]


GUARDS = [
    Case(
        "spike of the loss, rollback",
        [[Fault("spike")]],
        {"guard.spike": "rollback", "guard.spike_window": 4, "guard.spike_sigmas": 50.0},
        0,
    ),
    Case("NaN in the loss, rollback", [[Fault("nan loss")]], {"guard.non_finite": "rollback"}, 0),
    Case("NaN in a weight", [[Fault("nan weight")]], {}, 0, "NaN or infinite"),
    Case("flipped bit in a shard", [[Fault("flip")]], {"guard.shard_checksums": True}, 0, "bits have changed"),
]
DESYNC = [
    Case("a rank leaves out a collective", [[Fault("skip collective")]], WATCHED),
    Case("a rank makes one more", [[Fault("extra collective")]], WATCHED),
    Case("a rank is stopped (SIGSTOP)", [[Fault("stop")]], WATCHED, log="is stopped by a signal"),
    Case("replicas differ by one bit", [[Fault("flip")]], DDP | {"guard.replica_check_interval": 4}, log="differ"),
]
CLOCK = [
    Case("a day ahead", [[Fault("clock ahead", BOTH)]], {}, 0),
    Case("a day back", [[Fault("clock back", BOTH)]], {}, 0),
    Case("a day ahead, then a kill", [[Fault("clock ahead", BOTH), Fault("kill", 1, 8, "step")]], {}),
]
TRACKED = {"metrics.enable_tensorboard": True}
TRACKERS = [
    Case("a tracker cannot be opened", [[Fault("tracker absent", 0)]], TRACKED, 0),
    Case("a tracker raises at every record", [[Fault("tracker raises", 0)]], TRACKED, 0),
    Case("a tracker blocks", [[Fault("tracker blocks", 0)]], TRACKED, 0),
]
DISK = [
    Case("0.05 s for every operation on a file", [[Fault("slow disk", BOTH)]], {}, 0),
    Case(
        "the same, with background saves and a kill in one",
        [[Fault("slow disk", BOTH), Fault("kill", 0, point="saving:_commit")]],
        {"checkpoint.async_mode": "async"},
    ),
]
MEMORY = [Case("a rank exceeds its memory limit", [[Fault("memory")]], {})]
MACHINES = [
    Case(
        "two machines: a kill on each in a step, and one in a save",
        [
            [Fault("kill", 1, 4, "step")],
            [Fault("kill", 0, 8, "step")],
            [Fault("kill", 1, point="saving:_write", after=True)],
        ],
        machines=2,
    )
]
PARTS = {
    "save": cases_of_saves,
    "export": cases_of_exports,
    "retention": lambda: [
        Case(
            "kills before and after what deletes old checkpoints",
            [[Fault("kill", 0, point=name, after=after)] for name in RETENTION for after in (False, True)],
            LONG,
        )
    ],
    "guards": lambda: GUARDS,
    "desync": lambda: DESYNC,
    "clock": lambda: CLOCK,
    "trackers": lambda: TRACKERS,
    "disk": lambda: DISK,
    "memory": lambda: MEMORY,
    "machines": lambda: MACHINES,
}


# In a rank


def arm_starts(faults: list[list[Fault]], folder: Path) -> None:
    """Plant the faults of each start in the ranks that are forked from this process."""
    from torchtitan.training.trainer import Trainer

    original = Trainer.__init__

    def init(self, config, ranks):
        number = ranks.launcher.restart.number if ranks.launcher.restart else 0
        for fault in faults[number] if number < len(faults) else []:
            if fault.rank in (ranks.rank, BOTH):
                arm(fault, folder)
        original(self, config, ranks)

    Trainer.__init__ = init


def arm(fault: Fault, folder: Path) -> None:
    """Plant a fault in this process."""
    from torchtitan.training.trainer import Trainer

    if fault.kind.startswith("kill") and fault.point != "step":
        return arm_kill(fault)
    if fault.kind.startswith("tracker"):
        return arm_tracker(fault.kind)
    if fault.kind == "slow disk":
        return arm_slow_disk(folder)
    fetch = Trainer.fetch
    done = []

    def strike(self, batches):
        if self.current_step + 1 == fault.step and not done:
            done.append(True)
            AT_A_STEP[fault.kind](self)
        return fetch(self, batches)

    Trainer.fetch = strike
    return None


def kill(trainer=None) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def arm_kill(fault: Fault) -> None:
    """Kill this process before or after a function, during a save or an export."""
    from torchtitan.checkpoint.checkpointer import Checkpointer

    inside = []
    name = "export_model" if fault.kind == "kill in export" else "_save_if_due"
    operation = getattr(Checkpointer, name)

    def entered(self, *args, **kwargs):
        inside.append(True)
        try:
            return operation(self, *args, **kwargs)
        finally:
            if self.running is None:  # else a thread continues it
                inside.pop()

    setattr(Checkpointer, name, entered)
    module, _, path = fault.point.partition(":")
    owner = importlib.import_module(module if module == "shutil" else CHECKPOINT + module)
    *parts, last = path.split(".")
    for part in parts:
        owner = getattr(owner, part)
    original_function = getattr(owner, last)

    def fatal(*args, **kwargs):
        if not inside:
            return original_function(*args, **kwargs)
        if fault.after:
            original_function(*args, **kwargs)
        return kill()

    setattr(owner, last, fatal)


def arm_tracker(kind: str) -> None:
    """Let TensorBoard be absent, raise or block."""
    from torchtitan.metrics.trackers import TRACKERS, interface

    interface.CLOSE_SECONDS = 2.0
    interface.TrackerThread.__init__.__defaults__ = (interface.PAUSES, 2.0)
    tracker = TRACKERS["tensorboard"]

    def fail(self, *args, **kwargs):
        if kind == "tracker blocks":
            time.sleep(3600)
        raise ConnectionError("no route to the tracker")

    setattr(tracker, "__init__" if kind == "tracker absent" else "log", fail)


SLOW = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.listdir", "os.scandir"}


def arm_slow_disk(folder: Path, seconds: float = 0.05) -> None:
    """Delay every operation on a file of the run, as a busy NFS server does."""

    def wait(event, args):
        if event in SLOW and isinstance(args[0], (str, os.PathLike)) and str(args[0]).startswith(str(folder)):
            time.sleep(seconds)

    sys.addaudithook(wait)
    fsync = os.fsync
    os.fsync = lambda descriptor: (time.sleep(seconds), fsync(descriptor))[1]


def spike(trainer) -> None:
    """Add 1000 to the loss of one step."""
    forward_backward = trainer.model.forward_backward

    def spiked(*args, **kwargs):
        trainer.model.forward_backward = forward_backward
        return forward_backward(*args, **kwargs) + 1e3

    trainer.model.forward_backward = spiked


def nan_loss(trainer) -> None:
    """Make the loss of one step NaN."""
    forward_backward = trainer.model.forward_backward

    def nan(*args, **kwargs):
        trainer.model.forward_backward = forward_backward
        return forward_backward(*args, **kwargs) * float("nan")

    trainer.model.forward_backward = nan


def local_weight(trainer):
    """Return this rank's shard of a weight that every token uses."""
    from torchtitan.core.random_draws import local_part

    parameters = dict(trainer.model.named_parameters())
    return local_part(parameters["layers.0.attention.wq.weight"].detach())[0].view(-1)


def nan_weight(trainer) -> None:
    local_weight(trainer)[0] = float("nan")


def flip(trainer) -> None:
    import torch

    local_weight(trainer).view(torch.int32)[0] ^= 1 << 3


def skip_collective(trainer) -> None:
    """Leave out the reduction of the gradient norm in one step."""
    import torch

    clip = trainer.model.clip_gradients

    def skip(max_norm):
        trainer.model.clip_gradients = clip
        return torch.tensor(1.0)

    trainer.model.clip_gradients = skip


def extra_collective(trainer) -> None:
    import torch

    torch.distributed.all_reduce(torch.zeros(3))


def stop(trainer) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def move_clock(seconds: float) -> None:
    now = time.time
    time.time = lambda: now() + seconds


CGROUP = Path("/sys/fs/cgroup/memory")


def exhaust_memory(trainer) -> None:
    """Allocate beyond the limit of a cgroup of our own, or of the address space where none can be made."""
    most = 64 << 20
    group = (CGROUP if CGROUP.is_dir() else CGROUP.parent) / f"fault-sweep-{os.getpid()}"
    try:
        group.mkdir()
        (group / ("memory.limit_in_bytes" if CGROUP.is_dir() else "memory.max")).write_text(str(most))
        (group / "cgroup.procs").write_text(str(os.getpid()))
        print("memory limited by a cgroup", flush=True)
    except OSError:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + most, used + most))
        print("memory limited by RLIMIT_AS", flush=True)
    blocks = [bytearray(os.urandom(1 << 20)) for _ in range(4 * (most >> 20))]
    raise AssertionError(f"{len(blocks)} MiB were allocated within a limit of {most >> 20}")


def remove_cgroups() -> None:
    for root in (CGROUP, CGROUP.parent):
        for group in root.glob("fault-sweep-*"):
            group.rmdir()


AT_A_STEP = {
    "kill": kill,
    "spike": spike,
    "nan loss": nan_loss,
    "nan weight": nan_weight,
    "flip": flip,
    "skip collective": skip_collective,
    "extra collective": extra_collective,
    "stop": stop,
    "clock ahead": lambda trainer: move_clock(86400.0),
    "clock back": lambda trainer: move_clock(-86400.0),
    "memory": exhaust_memory,
}
