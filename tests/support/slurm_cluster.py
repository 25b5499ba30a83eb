"""A real SLURM cluster of two nodes on this machine, for tests.

Debian's `slurm-wlm` and `munge` are started as root in a temporary folder, without systemd. Nothing below /etc changes.
"""

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

NEEDED = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scontrol")
FREEZER = Path("/sys/fs/cgroup/freezer")
GPUS_PER_NODE = 2


def missing() -> str | None:
    """Return the reason why no cluster can be started here, or None."""
    missing_programs = [name for name in NEEDED if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") is None]
    if missing_programs:
        return f"no {', '.join(missing_programs)} here: apt-get install slurm-wlm munge"
    return None if os.geteuid() == 0 else "the daemons of SLURM need root to start jobs"


CONFIG = """\
ClusterName=lab
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/sock,cred_expire=5
CredType=cred/munge
SlurmctldPort={port}
SlurmctldPidFile={folder}/run/slurmctld.pid
SlurmdPidFile={folder}/run/slurmd-%n.pid
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd-%n.log
SwitchType=switch/none
MpiDefault=none
ProctrackType=proctrack/{tracking}
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1,sched_min_interval=0
PriorityType=priority/basic
PropagateResourceLimits=NONE
ReturnToService=2
KillWait=20
MinJobAge=600
SlurmctldTimeout=60
SlurmdTimeout=60
JobRequeue=1
GresTypes=gpu
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={port_1} CPUs=2 RealMemory=1000 Gres=gpu:{gpus}
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={port_2} CPUs=2 RealMemory=1000 Gres=gpu:{gpus}
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=train Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=0
PartitionName=high Nodes=n1,n2 MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""


@dataclass
class Cluster:
    """A running cluster: its folder, the environment of its commands, and the version of SLURM."""

    folder: Path
    environment: dict[str, str]
    version: str

    def run(self, *command: str, **options: object) -> str:
        """Run one of SLURM's commands and return its output."""
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=60, **options)
        assert done.returncode == 0, (command, done.stdout, done.stderr)
        return done.stdout

    def state(self, job: str) -> dict[str, str]:
        fields = self.run("scontrol", "--oneliner", "show", "job", job).split()
        return dict(field.split("=", 1) for field in fields if "=" in field)

    def wait(self, job: str, until: Callable[[dict[str, str]], bool], seconds: float = 90) -> dict[str, str]:
        deadline = time.monotonic() + seconds
        while not until(state := self.state(job)):
            assert time.monotonic() < deadline, state
            time.sleep(0.2)
        return state

    def ended(self, job: str, seconds: float = 90) -> dict[str, str]:
        over = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED")
        return self.wait(job, lambda state: state["JobState"] in over, seconds)


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [listener.getsockname()[1] for listener in sockets]
    for listener in sockets:
        listener.close()
    return ports


def tracking() -> str:
    """Return the process tracking plugin of SLURM.

    cgroup, usual in production, signals only a step's tasks. linuxproc signals their children too and needs no
    permissions, so it hides some mistakes.
    """
    probe = FREEZER / "torchtitan-probe"
    try:
        probe.mkdir()
        probe.rmdir()
    except OSError:
        return "linuxproc"
    return "cgroup"


@contextmanager
def cluster(folder: Path) -> Iterator[Cluster]:
    """Start two idle nodes, n1 and n2, with two CPUs and two fake GPUs each, and stop them afterwards."""
    for name in ("munge", "run", "state", "log", "dev", "spool/n1", "spool/n2"):
        (folder / name).mkdir(parents=True)
    (folder / "munge").chmod(0o700)
    key = folder / "munge/key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    for number in range(GPUS_PER_NODE):
        subprocess.run(["mknod", folder / f"dev/gpu{number}", "c", "1", "3"], check=True)
    host, (port, port_1, port_2) = socket.gethostname().split(".")[0], free_ports(3)
    names = dict(host=host, folder=folder, port=port, port_1=port_1, port_2=port_2, gpus=GPUS_PER_NODE)
    config = folder / "slurm.conf"
    config.write_text(CONFIG.format(tracking=tracking(), **names))
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    (folder / "gres.conf").write_text(f"NodeName=n[1-2] Name=gpu File={folder}/dev/gpu[0-{GPUS_PER_NODE - 1}]\n")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
    environment |= {"SLURM_CONF": str(config), "PATH": f"{os.environ['PATH']}:/usr/sbin"}
    munge = [f"--{name}={folder}/munge/{file}" for name, file in (("key-file", "key"), ("socket", "sock"))]
    munge += [f"--seed-file={folder}/munge/seed", f"--log-file={folder}/log/munged.log"]
    daemons = [
        ["munged", "--force", *munge, f"--pid-file={folder}/run/munged.pid", "--num-threads=2"],
        ["slurmctld", "-c", "-f", str(config)],
        *(["slurmd", "-N", name, "-f", str(config)] for name in ("n1", "n2")),
    ]
    try:
        for command in daemons:
            subprocess.run(command, env=environment, check=True, capture_output=True, timeout=30)
        version = subprocess.run(["slurmctld", "-V"], env=environment, capture_output=True, text=True).stdout.strip()
        slurm = Cluster(folder, environment, version)
        deadline = time.monotonic() + 20
        while len(set(slurm.run("sinfo", "-h", "-N", "-t", "idle", "-o", "%N").split())) < 2:
            assert time.monotonic() < deadline, slurm.run("sinfo")
            time.sleep(0.1)
        yield slurm
        for job in slurm.run("squeue", "-h", "-o", "%A").split():
            for options in (["--signal=KILL", "--full"], []):  # the second call cancels jobs that still wait
                subprocess.run(["scancel", *options, job], env=environment, capture_output=True, timeout=30)
        deadline = time.monotonic() + 40
        while slurm.run("squeue", "-h").strip() and time.monotonic() < deadline:
            time.sleep(0.2)
    finally:
        end(folder)


def end(folder: Path) -> None:
    """Stop the daemons; munged last, since the others authenticate with it."""
    pids = {path.name: int(path.read_text()) for path in (folder / "run").glob("*.pid") if path.read_text().strip()}
    munged = pids.pop("munged.pid", None)
    for group in (list(pids.values()), [munged] if munged else []):
        for pid in group:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + 20
        while any(os.path.exists(f"/proc/{pid}") for pid in group) and time.monotonic() < deadline:
            time.sleep(0.05)
    for name in ("n1", "n2"):
        with suppress(OSError):
            (FREEZER / f"slurm_{name}").rmdir()
