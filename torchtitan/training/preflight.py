"""Check before a run on several machines that all ranks respond, agree and are equally fast.

Rank 0 refuses in one message whatever would make the run wrong or end it late: ranks with different code, torch, job,
tokenizer or data, a dump folder that is not shared, wrong all-reduce results, or no space for two checkpoints. Clock
differences and slow ranks or axes are only warnings. The checks send a few hundred small messages.
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
from torchtitan.core.errors import JobError, format_bytes
from torchtitan.core.random_draws import local_part
from torchtitan.parallelisms.parallel_model import ParallelModel
from torchtitan.process import distributed
from torchtitan.process.ranks import Ranks
from torchtitan.training.batches import PeerStopped

logger = logging.getLogger(__name__)

ELEMENTS = {"cpu": 1 << 16, "cuda": 1 << 22}
"""Number of float32 values that are summed along each axis."""
REPEATS = 3
SLOW, SLOW_SECONDS = 3.0, 0.02
"""A rank is slow if it takes this many times the median, and this many seconds more: shared cores add noise."""
APART_SECONDS = 5.0
"""Largest accepted difference of clocks in seconds, including the time of the measurement."""
FOLDER_SECONDS, FOLDER_LOG_SECONDS = 75.0, 5.0
"""Longest wait for a new file in a shared folder, as NFS clients cache folders for up to 60 s (acdirmax), and the wait
after which it is logged."""


@dataclass
class RankFacts:
    """One rank's measurements and fingerprints."""

    host: str
    fingerprints: dict[str, str]
    """Values that must be equal on all ranks, by name."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Duration of each measurement, by name."""
    clock: float = 0.0
    wrong_axis: str = ""
    """A mesh axis with a wrong all-reduce result."""
    sees_folder: bool = True
    bytes: int = 0
    """Bytes of this rank's part of a checkpoint."""


def is_enabled(option: bool | None, ranks: Ranks) -> bool:
    """Return True if ranks are checked, by job.preflight or, if it is unset, because there are several machines."""
    return ranks.local_world_size < ranks.world_size if option is None else option


def check(config: JobConfig, ranks: Ranks, tokenizer: str, model: ParallelModel) -> None:
    """Check the ranks before anything is loaded; all ranks call it together. `tokenizer`: its fingerprint.

    Raises `JobError` on rank 0 and `PeerStopped` on the others.
    """
    if not is_enabled(config.job.preflight, ranks):
        return
    job = {key: value for key, value in _flat(as_dict(config)).items() if key != "job.config_file"}
    python = f"{torch.__version__}, Python {platform.python_version()}"
    fingerprints = {"code": _code(), "torch": python, "job": _digest(job), "tokenizer": tokenizer[:16]}
    parameters = [parameter for _, parameter in model.named_parameters()]
    checkpoint_bytes = sum(
        local_part(parameter)[0].nbytes * (1 + 2 * parameter.requires_grad) for parameter in parameters
    )
    facts = RankFacts(
        socket.gethostname(), fingerprints, bytes=checkpoint_bytes
    )  # with two moments of each trained parameter
    _time_all_reduces(facts, model.mesh, model.device)
    _time_matmul(facts, model.device)
    folder = Path(config.job.dump_folder)
    saves = config.checkpoint.enable and not config.checkpoint.load_only
    if saves:
        # the launcher would take a longer wait for a hang
        facts.sees_folder = _sees_new_file(folder, ranks, min(FOLDER_SECONDS, config.comm.init_timeout_seconds / 2))
    all_facts = _collect(facts)
    faults, warnings = compare(all_facts) if all_facts else ([], [])
    if saves and all_facts and folder.is_dir():
        replicas = max(1, config.parallelism.data_parallel_replicate_degree)
        fresh = not any((folder / config.checkpoint.folder).glob("step-*"))
        # a resumed run deletes older checkpoints in time, so it is only warned
        (faults if fresh else warnings).extend(
            space_faults(shutil.disk_usage(folder).free, sum(rank_facts.bytes for rank_facts in all_facts) // replicas)
        )
    (other_jobs,) = distributed.sum_ints(
        bool(all_facts) and len({rank_facts.fingerprints["job"] for rank_facts in all_facts}) > 1
    )
    if other_jobs:
        faults += differences(distributed.gather_json(job) or [], [rank_facts.host for rank_facts in all_facts])
    _refuse(faults, ranks)
    for warning in warnings:
        logger.warning("preflight: %s", warning)
    took = ", ".join(f"{measurement} {1e3 * seconds:.1f} ms" for measurement, seconds in facts.seconds.items())
    hosts = len({rank_facts.host for rank_facts in all_facts})
    host_count = f"{hosts} host{'s' if hosts > 1 else ''}"
    logger.info("preflight  %d ranks on %s agree; %s", ranks.world_size, host_count, took)


def check_data(option: bool | None, ranks: Ranks, fingerprint: Mapping[str, Any]) -> None:
    """Check that all ranks read the same data; all ranks call it together once their data is open.

    `option`: job.preflight.
    """
    if not is_enabled(option, ranks):
        return
    all_facts = _collect(RankFacts(socket.gethostname(), {"data": _digest(dict(fingerprint))}))
    _refuse(compare(all_facts)[0] if all_facts else [], ranks)


# Measurements of each rank


def _time_all_reduces(facts: RankFacts, mesh: DeviceMesh, device: torch.device) -> None:
    """Time an all-reduce along each axis of the mesh and check its result."""
    for axis in mesh.mesh_dim_names or ():
        group, size = mesh[axis].get_group(), mesh[axis].size()
        if size == 1:
            continue
        took = []
        for _ in range(1 + REPEATS):  # the first one connects
            vector = torch.full((ELEMENTS[device.type],), 1.0 + mesh[axis].get_local_rank(), device=device)
            _synchronize(device)
            began = time.perf_counter()
            dist.all_reduce(vector, group=group)
            _synchronize(device)
            took.append(time.perf_counter() - began)
        facts.seconds[f"sum along {axis}"] = min(took[1:])
        if not bool((vector == size * (size + 1) / 2).all()):
            facts.wrong_axis = axis
    dist.barrier()
    facts.clock = time.time()


def _time_matmul(facts: RankFacts, device: torch.device) -> None:
    """Time the same matrix product on every rank."""
    matrix = torch.ones(512 if device.type == "cpu" else 4096, 512, device=device)
    took = []
    for _ in range(1 + REPEATS):
        _synchronize(device)
        began = time.perf_counter()
        torch.mm(matrix, matrix.T)
        _synchronize(device)
        took.append(time.perf_counter() - began)
    facts.seconds["product"] = min(took[1:])


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _sees_new_file(folder: Path, ranks: Ranks, timeout: float) -> bool:
    """Return True if this rank sees a file that rank 0 creates in the folder, after `timeout` seconds at most."""
    name = ""
    if ranks.is_main:
        with suppress(OSError):  # the first save reports a folder that cannot be written
            folder.mkdir(parents=True, exist_ok=True)
            file_name = f".preflight-{uuid.uuid4().hex}"
            (folder / file_name).touch()
            name = file_name
    name = distributed.broadcast_json(name)
    began, logged = time.monotonic(), False
    while True:
        visible = not name or (folder / name).exists()
        waited = time.monotonic() - began
        blind, over = distributed.sum_ints(not visible, ranks.is_main and waited > timeout)
        if not blind or over:
            break
        if not logged and waited > FOLDER_LOG_SECONDS:
            logged = True
            text = "preflight  %d of %d ranks do not see yet what rank 0 has made in %s; NFS may take %.0f s to show it"
            logger.info(text, blind, ranks.world_size, folder, timeout)
        time.sleep(0.1)
    if ranks.is_main and name:
        with suppress(OSError):
            (folder / name).unlink()
    return visible


def _collect(facts: RankFacts) -> list[RankFacts]:
    """Gather the facts of all ranks on rank 0; return an empty list on the others."""
    return [RankFacts(**fields) for fields in distributed.gather_json(vars(facts)) or ()]


def _code() -> str:
    """Return a digest of this package's sources on this machine."""
    root, digest = Path(__file__).parent.parent, hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _digest(value: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _flat(tree: Mapping[str, Any], before: str = "") -> dict[str, str]:
    """Flatten nested tables to {dotted name: value as text}."""
    flattened: dict[str, str] = {}
    for name, value in tree.items():
        flattened |= _flat(value, f"{before}{name}.") if isinstance(value, Mapping) else {before + name: show(value)}
    return flattened


# Comparison on rank 0


def compare(all_facts: Sequence[RankFacts]) -> tuple[list[str], list[str]]:
    """Compare the facts of all ranks. Return lines of faults and lines of warnings."""
    hosts = [facts.host for facts in all_facts]
    faults: list[str] = [
        line
        for name in all_facts[0].fingerprints
        if name != "job"  # its options are compared one by one
        for line in _table(name, [facts.fingerprints[name] for facts in all_facts], hosts)
    ]
    for axis in sorted({facts.wrong_axis for facts in all_facts} - {""}):
        ranks = [rank for rank, facts in enumerate(all_facts) if facts.wrong_axis == axis]
        faults.append(
            f"a sum along {axis} is wrong on {_format_ranks(ranks, hosts)}: a broken device, cable or library"
        )
    blind = [rank for rank, facts in enumerate(all_facts) if not facts.sees_folder]
    if blind:
        faults.append(
            f"job.dump_folder is not the folder of rank 0 on {_format_ranks(blind, hosts)}: all have to share it"
        )
    strange = []
    clocks = [facts.clock - all_facts[0].clock for facts in all_facts]
    off = [rank for rank, offset in enumerate(clocks) if abs(offset) > APART_SECONDS]
    if off:
        strange.append(f"the clocks of {_format_ranks(off, hosts)} are apart from rank 0's by {clocks[off[0]]:+.1f} s")
    for measurement in sorted({measurement for facts in all_facts for measurement in facts.seconds}):
        took = {
            rank: facts.seconds[measurement] for rank, facts in enumerate(all_facts) if measurement in facts.seconds
        }
        usual = statistics.median_low(took.values())
        slow = [rank for rank, seconds in took.items() if seconds > max(SLOW * usual, usual + SLOW_SECONDS)]
        if slow:
            longest = 1e3 * max(took[rank] for rank in slow)
            strange.append(
                f"slow: {measurement} takes {longest:.1f} ms on {_format_ranks(slow, hosts)}, "
                f"{1e3 * usual:.1f} ms usually"
            )
    return faults, strange


def differences(jobs: Sequence[Mapping[str, str]], hosts: Sequence[str]) -> list[str]:
    """Return lines on the options that differ between the ranks' jobs."""
    keys = sorted({key for job in jobs for key in job})
    return [line for key in keys for line in _table(key, [job.get(key, "not known") for job in jobs], hosts)]


def space_faults(free: int, needed: int) -> list[str]:
    """Return a fault if two checkpoints of `needed` bytes do not fit into `free` bytes."""
    if free >= 2 * needed:
        return []
    message = f"{format_bytes(free)} are free in job.dump_folder and two checkpoints take {format_bytes(2 * needed)}"
    return [f"{message}: make room or give another folder"]


def _table(name: str, values: Sequence[str], hosts: Sequence[str]) -> list[str]:
    """Return a line per value with the ranks that have it; none if all values are equal."""
    ranks_by_value: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks_by_value.setdefault(value, []).append(rank)
    if len(ranks_by_value) < 2:
        return []
    width = max(map(len, ranks_by_value))
    return [f"{name:24} {value:{width}}  {_format_ranks(ranks, hosts)}" for value, ranks in ranks_by_value.items()]


def _format_ranks(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    """Format ranks with their hosts, consecutive ranks as spans: "ranks 0-3, 6 (a, b)"."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][-1] + 1:
            spans[-1].append(rank)
        else:
            spans.append([rank])
    numbers = ", ".join(str(span[0]) if len(span) == 1 else f"{span[0]}-{span[-1]}" for span in spans)
    host_names = ", ".join(sorted({hosts[rank] for rank in ranks}))
    return f"rank{'s' if len(ranks) > 1 else ''} {numbers} ({host_names})"


def _refuse(faults: Sequence[str], ranks: Ranks) -> None:
    """Raise on all ranks if rank 0 has faults: JobError there, PeerStopped on the others."""
    (refused,) = distributed.sum_ints(len(faults))
    if not refused:
        return
    if not ranks.is_main:
        raise PeerStopped("the preflight check failed")
    headline = "preflight: the ranks do not match, and nothing was started; correct this, or set job.preflight = false"
    raise JobError("\n".join([headline, *(f"  {line}" for line in faults)]))
