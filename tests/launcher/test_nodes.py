"""Several machines, simulated by several launchers on this one: one world, the same bits and exit codes, and no socket
that listens elsewhere than at HEAD_ADDR."""

import os
import signal
import socket
import subprocess
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pytest

from tests.support import jobs
from tests.support.launched_ranks import LOOPBACK, has_ended, listening
from tests.support.pool import run_alone, run_ranks
from tests.support.ports import free_port
from tests.support.proxy import Proxy
from torchtitan.config.manager import load
from torchtitan.core.errors import JobError
from torchtitan.launcher import nodes
from torchtitan.launcher.nodes import Nodes
from torchtitan.launcher.run_folder import SECRET_FILE
from torchtitan.process import distributed, ranks
from torchtitan.process.heartbeat import Progress
from torchtitan.process.ranks import Launcher, Ranks, variables_of
from torchtitan.training.trainer import Trainer


def start(argv: list[str], head: str = "127.0.0.1") -> list[subprocess.Popen]:
    """Start the launchers of two machines with one rank each."""
    where = dict(NNODES="2", HEAD_ADDR=head, HEAD_PORT=str(free_port()))
    return [jobs.start(argv, ranks=1, NODE_RANK=str(index), **where) for index in range(2)]


def test_ranks_are_numbered_across_machines():
    launcher = Launcher(1, "", "", "", "", 3)
    variables = variables_of(1, 4, launcher, (2, 1, "10.0.0.1", 29500))
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
    assert [variables[name] for name in names] == ["5", "1", "8", "4", "1", "10.0.0.1", "29500"]


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (
            dict(NNODES="2", NODE_RANK="2", HEAD_ADDR="127.0.0.1"),
            "NODE_RANK: given 2, of NNODES = 2 machines; allowed: 0 to 1",
        ),
        (dict(NNODES="2"), "HEAD_ADDR: not given, with NNODES = 2 machines; allowed: the address"),
        (dict(NNODES="0"), "NNODES: given 0; allowed: 1 or more"),
        (dict(NNODES="2", HEAD_ADDR="127.0.0.1", HEAD_PORT="99999"), "HEAD_PORT: given 99999; allowed: 1 to 65535"),
        (dict(NNODES="two"), "NNODES in the environment: given 'two'; allowed: a whole number"),
        (
            dict(NNODES="2", HEAD_ADDR="192.0.2.1"),
            "HEAD_ADDR, HEAD_PORT: given 192.0.2.1, 29500, where this machine cannot listen",
        ),
        (
            dict(NNODES="2", NODE_RANK="1", HEAD_ADDR="no.such.host.invalid"),
            "HEAD_ADDR: given 'no.such.host.invalid', to which no way",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_impossible_settings_are_refused_before_any_rank_starts(environment, message, tmp_path):
    argv = jobs.arguments(tmp_path / "run", jobs.write_texts(tmp_path), training__local_batch_size=4)
    code, out, err = jobs.run(argv, ranks=1, **environment)
    assert (code, out) == (2, "") and err.startswith(message) and len(err.splitlines()) == 1


def wait_for_absent_machine(port: int) -> str:
    """Join as the second machine of a job without a first one; return the error."""
    ranks = Ranks(rank=1, world_size=2, local_world_size=1, head=("127.0.0.1", port))
    try:
        distributed._rendezvous_store(ranks, Launcher(1, "", "", "", "", 3), timedelta(seconds=1))
    except JobError as error:
        return str(error)
    raise AssertionError


def test_an_unreachable_first_machine_is_reported():
    error = run_alone(wait_for_absent_machine, port := free_port())
    assert error.startswith(f"HEAD_ADDR, HEAD_PORT: given 127.0.0.1, {port}, where no store answers within 1 s")


def startup_timeouts(folder: Path) -> tuple[float, float]:
    """Return the timeouts of the rendezvous and of the launcher's watchdog, in seconds."""
    timeouts = []

    def record_timeout(ranks, launcher, timeout):
        timeouts.append(timeout.total_seconds())
        raise JobError("nobody there")

    distributed._rendezvous_store = record_timeout
    ranks = Ranks(rank=1, world_size=2, local_world_size=1, launcher=Launcher(1, "", os.devnull, "", "", 3))
    config = load(jobs.arguments(folder, folder, comm__init_timeout_seconds=50))
    with pytest.MonkeyPatch.context() as patch, suppress(JobError):
        patch.setattr("torchtitan.training.run.Progress", lambda path, row: Progress())
        Trainer(config, ranks)
    return timeouts[0], config.comm.init_timeout_seconds


def test_a_missing_machine_is_reported_before_the_watchdog_times_out(tmp_path):
    timeout, patience = run_alone(startup_timeouts, tmp_path)
    assert 0 < timeout < patience - 5


def test_the_interface_is_that_of_the_route():
    assert nodes.local_address(Nodes(2, 1, "127.0.0.1", 1)) == "127.0.0.1"
    assert nodes.interface_of("127.0.0.1") == "lo" and nodes.interface_of("192.0.2.1") is None


def test_the_interface_of_an_ipv6_address(tmp_path, monkeypatch):
    table = tmp_path / "if_inet6"
    table.write_text(
        "00000000000000000000000000000001 01 80 10 80       lo\nfd000000000000000000000000000002 04 40 00 82     eth0\n"
    )
    monkeypatch.setattr(nodes, "ipv6_rows", lambda: ranks.ipv6_rows(table=table))
    addresses = ("::1", "fd00::2", "fd00:0::0002", "fd00::3", "fe80::1%eth1")
    assert [nodes.interface_of(one) for one in addresses] == ["lo", "eth0", "eth0", None, "eth1"]
    assert ranks.ipv6_rows("eth0", table) == [(0xFD << 120 | 2, "eth0")]
    table.unlink()
    assert nodes.interface_of("::1") is None


def test_two_machines_form_one_world_and_stop_together(tmp_path, monkeypatch):
    """A stop request on the second machine makes both save the same step; the resume equals a run on one machine."""
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    texts = jobs.write_texts(tmp_path)
    options = dict(training__local_batch_size=4, training__steps=400, checkpoint__enable=True, optimizer__lr=1e-3)
    options |= dict(model__overrides=jobs.SHALLOW)
    argv = jobs.arguments(tmp_path / "run", texts, **options)
    machines = start(argv)
    jobs.wait_for_step(tmp_path / "run", 3, machines[0])
    pids = [pid for machine in machines for pid in [machine.pid, *jobs.children(machine.pid)]]
    assert len(pids) == 4 and listening(pids) and listening(pids) <= LOOPBACK
    machines[1].send_signal(signal.SIGTERM)
    ends = [jobs.finish(machine) for machine in machines]
    assert [code for code, _, _ in ends] == [143, 143], ends
    last = jobs.logged_steps(tmp_path / "run")[-1]["step"]
    assert (tmp_path / "run" / "checkpoint" / f"step-{last:08d}" / "manifest.json").exists()
    shorter = [argument for argument in argv if "training.steps" not in argument] + [f"--training.steps={last + 3}"]
    shorter += ["--lr_scheduler.total_steps=400"]
    ends = [jobs.finish(machine) for machine in start(shorter)]
    assert [code for code, _, _ in ends] == [0, 0], ends
    rows = jobs.logged_steps(tmp_path / "run")
    uninterrupted = jobs.arguments(tmp_path / "straight", texts, **options | dict(training__steps=last + 3))
    expected = run_ranks(2, jobs.train, [*uninterrupted, "--lr_scheduler.total_steps=400"])[0][0]
    assert [row["loss"] for row in rows] == [row["loss"] for row in expected]


def test_a_rank_killed_on_one_machine_restarts_both_to_the_same_bits(tmp_path):
    texts = jobs.write_texts(tmp_path)
    options = dict(training__local_batch_size=4, training__steps=50, checkpoint__enable=True, checkpoint__interval=10)
    options |= dict(optimizer__lr=1e-3, model__overrides=jobs.SHALLOW)
    machines = start(jobs.arguments(tmp_path / "run", texts, **options))
    jobs.wait_for_step(tmp_path / "run", 11, machines[0])
    ranks = [jobs.children(machine.pid)[0] for machine in machines]
    os.kill(ranks[1], signal.SIGKILL)
    (code_0, out_0, err_0), (code_1, _, err_1) = (jobs.finish(machine) for machine in machines)
    assert (code_0, code_1) == (0, 0) and all(map(has_ended, ranks)), (err_0, err_1)
    assert out_0.count("preflight  2 ranks on 1 host agree; sum along dp_shard ") == 2  # of both starts
    assert "restart 1 of 3" in err_0 and err_1 == f"rank 1 on {socket.gethostname()} was ended by SIGKILL\n"
    rows = jobs.logged_steps(tmp_path / "run")
    uninterrupted = run_ranks(2, jobs.train, jobs.arguments(tmp_path / "straight", texts, **options))[0][0]
    assert [row["step"] for row in rows] == list(range(1, 51))
    assert [row["loss"] for row in rows] == [row["loss"] for row in uninterrupted]


HOLDS = """
import time
from torchtitan.core.callbacks import Callback

class Holds(Callback):
    def after_step(self, result):
        while result.step == 12 and self.engine.ranks.launcher.restart is None:
            time.sleep(1)  # until the launcher kills this rank
"""


def test_a_run_resumes_to_the_same_bits_after_a_network_failure(tmp_path):
    """The coordinator's secret is deleted afterwards."""
    texts, proxy = jobs.write_texts(tmp_path), Proxy(free_port(), free_port())
    (tmp_path / "holding.py").write_text(HOLDS)
    options = dict(training__local_batch_size=4, training__steps=20, checkpoint__enable=True, checkpoint__interval=10)
    options |= dict(optimizer__lr=1e-3, model__overrides=jobs.SHALLOW)
    argv = jobs.arguments(tmp_path / "run", texts, **options, callbacks__use="holding:Holds")
    where = [
        dict(NNODES="2", NODE_RANK=str(index), HEAD_ADDR="127.0.0.1", HEAD_PORT=str(port), PYTHONPATH=str(tmp_path))
        for index, port in enumerate((proxy.target_port, proxy.port))
    ]
    machines = [jobs.start(argv, ranks=1, **environment) for environment in where]
    try:
        jobs.wait_for_step(tmp_path / "run", 11, machines[0])
        assert (tmp_path / "run" / SECRET_FILE).stat().st_mode & 0o777 == 0o600
        proxy.cut()
        assert any("trying for up to 900 s" in line for line in machines[1].stderr)
        proxy.heal()
        (code_0, _, err_0), (code_1, _, err_1) = (jobs.finish(machine) for machine in machines)
    finally:
        proxy.close()
    assert (code_0, code_1) == (0, 0), (err_0, err_1)
    assert "gone; waiting for a new connection for up to 900 s" in err_0 and "restart 1 of 3" in err_0
    assert not (tmp_path / "run" / SECRET_FILE).exists()
    rows = jobs.logged_steps(tmp_path / "run")
    uninterrupted = run_ranks(2, jobs.train, jobs.arguments(tmp_path / "straight", texts, **options))[0][0]
    assert [row["step"] for row in rows] == list(range(1, 21))
    assert [row["loss"] for row in rows] == [row["loss"] for row in uninterrupted]


def test_a_job_refused_by_one_machine_ends_on_all(tmp_path):
    """The data are on one machine only; the other learns of the fault before any rank waits for its peers."""
    texts = jobs.write_texts(tmp_path)
    where = dict(NNODES="2", HEAD_ADDR="127.0.0.1", HEAD_PORT=str(free_port()))
    argv = [
        jobs.arguments(tmp_path / "run", texts=path, training__local_batch_size=4)
        for path in (texts, tmp_path / "none.jsonl")
    ]
    machines = [jobs.start(argv[index], ranks=1, NODE_RANK=str(index), **where) for index in range(2)]
    (code_0, _, err_0), (code_1, _, err_1) = (jobs.finish(machine) for machine in machines)
    assert (code_0, code_1, err_1) == (2, 2, "")
    first, *fault, last = err_0.splitlines()
    assert first == f"machine 1 ({socket.gethostname()}) refuses the job:"
    assert "training.dataset_path" in fault[0] and "none.jsonl" in " ".join(fault)
    assert last == "1 fault in the job; nothing was started"


def test_a_job_refused_by_the_first_machine_alone_ends_on_all(tmp_path):
    """The folder in which the others find its proof is removed again."""
    texts = jobs.write_texts(tmp_path)
    where = dict(NNODES="2", HEAD_ADDR="127.0.0.1", HEAD_PORT=str(free_port()))
    argv = [
        jobs.arguments(tmp_path / "run", texts=path, training__local_batch_size=4)
        for path in (tmp_path / "none.jsonl", texts)
    ]
    machines = [jobs.start(argv[index], ranks=1, NODE_RANK=str(index), **where) for index in range(2)]
    (code_0, _, err_0), (code_1, _, err_1) = (jobs.finish(machine) for machine in machines)
    assert (code_0, code_1, err_1) == (2, 2, "") and "none.jsonl" in err_0 and not (tmp_path / "run").exists()


def test_differing_jobs_are_refused_in_one_message(tmp_path):
    texts = jobs.write_texts(tmp_path)
    where = dict(NNODES="2", HEAD_ADDR="127.0.0.1", HEAD_PORT=str(free_port()))
    argv = [jobs.arguments(tmp_path / "run", texts, training__local_batch_size=4, optimizer__lr=lr) for lr in (1, 2)]
    machines = [jobs.start(argv[index], ranks=1, NODE_RANK=str(index), **where) for index in range(2)]
    (code_0, _, err_0), (code_1, out_1, err_1) = (jobs.finish(machine) for machine in machines)
    assert (code_0, code_1, err_1) == (2, 2, "")
    assert err_0.startswith("ERROR: preflight: the ranks do not match, and nothing was started")
    host = socket.gethostname()
    differences = [line.split() for line in err_0.splitlines()[1:]]
    assert differences == [
        ["optimizer.lr", "1.0", "rank", "0", f"({host})"],
        ["optimizer.lr", "2.0", "rank", "1", f"({host})"],
    ]
    assert not jobs.logged_steps(tmp_path / "run")  # only how the run ended
