"""Before training, with several machines: does every rank answer, do all run the same thing, and who is slow?

What would make the run wrong, or end it late, is refused in one message, of rank 0: other code, another torch, job,
tokenizer or other data on some ranks, a folder that is not the same one, sums that are wrong, no space for two
checkpoints. What is only strange (clocks apart, slow ranks or axes) is a warning. It takes some hundred small messages.
"""

import hashlib
import json
import logging
import platform
import shutil
import socket
import statistics
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from torchtitan.config.job import JobConfig, as_dict
from torchtitan.config.options import show
from torchtitan.core.errors import JobError, in_units
from torchtitan.core.initialization import local_part
from torchtitan.parallelisms.parallel_model import ParallelModel
from torchtitan.process import distributed
from torchtitan.process.ranks import Ranks
from torchtitan.training.batches import PeerStopped

logger = logging.getLogger(__name__)

ELEMENTS = {"cpu": 1 << 16, "cuda": 1 << 22}
"""Of the float32 vector that is summed along each axis."""
REPEATS = 3
SLOW, SLOW_SECONDS = 3.0, 0.02
"""Times the median, and by how much more, from which on a rank is called slow: shared cores alone make some noise."""
APART_SECONDS = 5.0
"""From which on clocks are called apart; the way of the question is counted in."""
FOLDER_SECONDS, FOLDER_SAID_SECONDS = 75.0, 5.0
"""How long a shared folder may take to show a new file: machines remember what is in a folder of NFS for up to 60 s
(acdirmax); and from when on it is said what is waited for."""


@dataclass
class Facts:
    """What one rank knows of itself."""

    host: str
    same: dict[str, str]
    """What has to be equal on all ranks, by what it is called."""
    seconds: dict[str, float] = field(default_factory=dict)
    """What it took, by what was done."""
    clock: float = 0.0
    wrong: str = ""
    """The axis along which a sum was wrong."""
    sees_folder: bool = True
    bytes: int = 0
    """Of what this rank keeps in a checkpoint."""


def wanted(config: JobConfig, ranks: Ranks) -> bool:
    several = ranks.local_world_size < ranks.world_size
    return several if config.job.preflight is None else config.job.preflight


def check(config: JobConfig, ranks: Ranks, tokenizer: str, model: ParallelModel) -> None:
    """All ranks call this together, before anything is loaded. `tokenizer` is its fingerprint. Raises `JobError` on
    rank 0 and `PeerStopped` on the others."""
    if not wanted(config, ranks):
        return
    job = {key: value for key, value in _flat(as_dict(config)).items() if key != "job.config_file"}
    python = f"{torch.__version__}, Python {platform.python_version()}"
    same = {"code": _code(), "torch": python, "job": _digest(job), "tokenizer": tokenizer[:16]}
    parameters = [parameter for _, parameter in model.named_parameters()]
    held = sum(local_part(parameter)[0].nbytes * (1 + 2 * parameter.requires_grad) for parameter in parameters)
    facts = Facts(socket.gethostname(), same, bytes=held)  # two moments of each that is trained
    _talk(facts, model.mesh, model.device)
    _compute(facts, model.device)
    folder = Path(config.job.dump_folder)
    saves = config.checkpoint.enable and not config.checkpoint.load_only
    if saves:
        # the launcher would take a longer wait for a hang
        facts.sees_folder = _sees(folder, ranks, min(FOLDER_SECONDS, config.comm.init_timeout_seconds / 2))
    found = _collect(facts)
    faults, warnings = judge(found) if found else ([], [])
    if saves and found and folder.is_dir():
        replicas = max(1, config.parallelism.data_parallel_replicate_degree)
        fresh = not any((folder / config.checkpoint.folder).glob("step-*"))
        # of a run that goes on the older ones are deleted in time, so that it is not kept from going on
        (faults if fresh else warnings).extend(
            space(shutil.disk_usage(folder).free, sum(each.bytes for each in found) // replicas)
        )
    (other_jobs,) = distributed.sum_over_ranks(bool(found) and len({each.same["job"] for each in found}) > 1)
    if other_jobs:
        faults += differences(distributed.gather_json(job) or [], [each.host for each in found])
    _refuse(faults, ranks)
    for warning in warnings:
        logger.warning("preflight: %s", warning)
    took = ", ".join(f"{what} {1e3 * seconds:.1f} ms" for what, seconds in facts.seconds.items())
    hosts = len({each.host for each in found})
    where = f"{hosts} host{'s' if hosts > 1 else ''}"
    logger.info("preflight  %d ranks on %s agree; %s", ranks.world_size, where, took)


def check_data(config: JobConfig, ranks: Ranks, fingerprint: Mapping[str, Any]) -> None:
    """All ranks call this together, once they have found their data."""
    if not wanted(config, ranks):
        return
    found = _collect(Facts(socket.gethostname(), {"data": _digest(dict(fingerprint))}))
    _refuse(judge(found)[0] if found else [], ranks)


# What each rank finds out


def _talk(facts: Facts, mesh: DeviceMesh, device: torch.device) -> None:
    """A sum along each axis of the mesh, whose result is known and whose time is taken."""
    for axis in mesh.mesh_dim_names or ():
        group, size = mesh[axis].get_group(), mesh[axis].size()
        if size == 1:
            continue
        took = []
        for _ in range(1 + REPEATS):  # the first one connects
            vector = torch.full((ELEMENTS[device.type],), 1.0 + mesh[axis].get_local_rank(), device=device)
            _wait(device)
            began = time.perf_counter()
            dist.all_reduce(vector, group=group)
            _wait(device)
            took.append(time.perf_counter() - began)
        facts.seconds[f"sum along {axis}"] = min(took[1:])
        if not bool((vector == size * (size + 1) / 2).all()):
            facts.wrong = axis
    dist.barrier()
    facts.clock = time.time()


def _compute(facts: Facts, device: torch.device) -> None:
    """The same product on every rank."""
    matrix = torch.ones(512 if device.type == "cpu" else 4096, 512, device=device)
    took = []
    for _ in range(1 + REPEATS):
        _wait(device)
        began = time.perf_counter()
        torch.mm(matrix, matrix.T)
        _wait(device)
        took.append(time.perf_counter() - began)
    facts.seconds["product"] = min(took[1:])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _sees(folder: Path, ranks: Ranks, patience: float) -> bool:
    """Whether a file that rank 0 makes in the folder is there for this rank too, after `patience` seconds at most."""
    name = ""
    if ranks.is_main:
        with suppress(OSError):  # where it cannot write is told by whoever saves
            folder.mkdir(parents=True, exist_ok=True)
            made = f".preflight-{uuid.uuid4().hex}"
            (folder / made).touch()
            name = made
    name = distributed.broadcast_json(name)
    began, said = time.monotonic(), False
    while True:
        seen = not name or (folder / name).exists()
        waited = time.monotonic() - began
        blind, over = distributed.sum_over_ranks(not seen, ranks.is_main and waited > patience)
        if not blind or over:
            break
        if not said and waited > FOLDER_SAID_SECONDS:
            said = True
            told = "preflight  %d of %d ranks do not see yet what rank 0 has made in %s; NFS may take %.0f s to show it"
            logger.info(told, blind, ranks.world_size, folder, patience)
        time.sleep(0.1)
    if ranks.is_main and name:
        with suppress(OSError):
            (folder / name).unlink()
    return seen


def _collect(facts: Facts) -> list[Facts]:
    """Of all ranks, on rank 0; nothing on the others."""
    return [Facts(**each) for each in distributed.gather_json(vars(facts)) or ()]


def _code() -> str:
    """Of this package's sources, as they lie on this machine."""
    root, digest = Path(__file__).parent.parent, hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _digest(value: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _flat(tree: Mapping[str, Any], before: str = "") -> dict[str, str]:
    """Option -> value in words."""
    found: dict[str, str] = {}
    for name, value in tree.items():
        found |= _flat(value, f"{before}{name}.") if isinstance(value, Mapping) else {before + name: show(value)}
    return found


# What rank 0 makes of it


def judge(found: Sequence[Facts]) -> tuple[list[str], list[str]]:
    """What has to be refused, and what is only strange: lines."""
    hosts = [each.host for each in found]
    faults: list[str] = [
        line
        for name in found[0].same
        if name != "job"  # whose options are compared one by one
        for line in _table(name, [each.same[name] for each in found], hosts)
    ]
    for axis in sorted({each.wrong for each in found} - {""}):
        wrong = [rank for rank, each in enumerate(found) if each.wrong == axis]
        faults.append(f"a sum along {axis} is wrong on {_named(wrong, hosts)}: a broken device, cable or library")
    blind = [rank for rank, each in enumerate(found) if not each.sees_folder]
    if blind:
        faults.append(f"job.dump_folder is not the folder of rank 0 on {_named(blind, hosts)}: all have to share it")
    strange = []
    clocks = [each.clock - found[0].clock for each in found]
    apart = [rank for rank, offset in enumerate(clocks) if abs(offset) > APART_SECONDS]
    if apart:
        strange.append(f"the clocks of {_named(apart, hosts)} are apart from rank 0's by {clocks[apart[0]]:+.1f} s")
    for what in sorted({what for each in found for what in each.seconds}):
        took = {rank: each.seconds[what] for rank, each in enumerate(found) if what in each.seconds}
        usual = statistics.median_low(took.values())
        slow = [rank for rank, seconds in took.items() if seconds > max(SLOW * usual, usual + SLOW_SECONDS)]
        if slow:
            longest = 1e3 * max(took[rank] for rank in slow)
            strange.append(
                f"slow: {what} takes {longest:.1f} ms on {_named(slow, hosts)}, {1e3 * usual:.1f} ms usually"
            )
    return faults, strange


def differences(jobs: Sequence[Mapping[str, str]], hosts: Sequence[str]) -> list[str]:
    """Options that are not the same everywhere. Given on rank 0 only."""
    keys = sorted({key for job in jobs for key in job})
    return [line for key in keys for line in _table(key, [job.get(key, "not known") for job in jobs], hosts)]


def space(free: int, needed: int) -> list[str]:
    if free >= 2 * needed:
        return []
    told = f"{in_units(free)} are free in job.dump_folder and two checkpoints take {in_units(2 * needed)}"
    return [f"{told}: make room or give another folder"]


def _table(name: str, values: Sequence[str], hosts: Sequence[str]) -> list[str]:
    """A line for each of several values: what is called `name`, the value, who has it."""
    who: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        who.setdefault(value, []).append(rank)
    if len(who) < 2:
        return []
    width = max(map(len, who))
    return [f"{name:24} {value:{width}}  {_named(ranks, hosts)}" for value, ranks in who.items()]


def _named(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    """Ranks with their hosts, neighbours together."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][-1] + 1:
            spans[-1].append(rank)
        else:
            spans.append([rank])
    told = ", ".join(str(span[0]) if len(span) == 1 else f"{span[0]}-{span[-1]}" for span in spans)
    where = ", ".join(sorted({hosts[rank] for rank in ranks}))
    return f"rank{'s' if len(ranks) > 1 else ''} {told} ({where})"


def _refuse(faults: Sequence[str], ranks: Ranks) -> None:
    """On all ranks, if rank 0 has found any."""
    (refused,) = distributed.sum_over_ranks(len(faults))
    if not refused:
        return
    if not ranks.is_main:
        raise PeerStopped("the preflight has found what cannot work")
    told = "preflight: not all ranks fit together, and nothing was started; mend it, or set job.preflight = false"
    raise JobError("\n".join([told, *(f"  {line}" for line in faults)]))
