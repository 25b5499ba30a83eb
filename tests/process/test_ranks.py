"""What launchers read from the environment, from SLURM and from their own child processes."""

import os
import subprocess
import sys

import pytest

from tests.support import jobs
from torchtitan import launch
from torchtitan.core.errors import JobError
from torchtitan.launcher import forks, nodes, slurm
from torchtitan.launcher.nodes import Nodes
from torchtitan.process import distributed, ranks
from torchtitan.process.exit import REFUSED
from torchtitan.process.ranks import env_number, parse_number, slurm_job, slurm_seconds_left

HUGE = "9" * 5000
STRANGE = ["", " ", "-1", "1.0", "1e3", "0x10", "abc", HUGE, "NaN", "1\n", "½", "²"]


@pytest.mark.parametrize("text", STRANGE)
def test_a_variable_that_is_no_number_is_refused_or_unused(text, monkeypatch):
    assert parse_number(text) is None
    for name in ("SLURM_STEP_ID", "SLURM_JOB_ID", "SLURM_RESTART_COUNT", "SLURM_JOB_END_TIME", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.setenv(name, text)
    for name in ("SLURM_STEP_TASKS_PER_NODE", "SLURM_JOB_CPUS_PER_NODE", "SLURM_PROCID", "SLURM_LOCALID"):
        monkeypatch.setenv(name, text)
    assert not slurm.in_step() and slurm_job()[1] == 0 and slurm_seconds_left() is None
    assert slurm._cpus() >= 1 and slurm.tasks_per_machine() >= 0
    with pytest.raises(JobError, match="in the environment: given .*; allowed: a whole number; let srun set it"):
        slurm.nodes_of_step(1)
    with pytest.raises(JobError, match="allowed: a whole number"):
        env_number("SLURM_PROCID", 0)


@pytest.mark.parametrize("text", [*STRANGE, "0"])
def test_a_number_of_ranks_that_is_none_is_refused(text, capsys):
    assert launch.main([text, "debug_model"]) == REFUSED
    assert f"(NGPU): given {text!r}; allowed: 1 or more, or auto" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, variable, expected",
    [
        (["job"], None, (1, ["job"])),
        (["job"], "4", (4, ["job"])),
        (["job", "--ranks", "2", "--training.steps=3"], "4", (2, ["job", "--training.steps=3"])),
        (["--ranks=auto", "job"], "4", (None, ["job"])),
        (["job"], "auto", (None, ["job"])),
    ],
)
def test_the_number_of_ranks_is_the_options_or_the_variables(arguments, variable, expected, monkeypatch):
    monkeypatch.delenv("NGPU", raising=False)
    if variable is not None:
        monkeypatch.setenv("NGPU", variable)
    assert launch.split_ranks(arguments) == expected


@pytest.mark.parametrize("arguments", [["job", "--ranks"], ["--ranks=0", "job"], ["job", "--ranks", "two"]])
def test_a_number_of_ranks_of_train_is_refused_by_its_name(arguments):
    with pytest.raises(JobError, match="^--ranks: (not given|given '(0|two)'); allowed: 1 or more, or auto"):
        launch.split_ranks(arguments)


@pytest.mark.parametrize("option", launch.OTHER_NAMES)
def test_names_of_other_launchers_are_refused_with_ours(option):
    for arguments in ([f"{option}=2", "job"], ["job", option, "2"]):
        with pytest.raises(JobError, match=f"^{option}: no option of torchtitan train; did you mean --ranks?"):
            launch.split_ranks(arguments)


def test_a_number_of_ranks_that_are_started_already_is_refused(monkeypatch):
    message = "--ranks: allowed where torchtitan train starts the ranks; {}; leave one of the two out"
    given = message.format("torchtitan.launch was given 3")
    assert launch.load_and_check(["debug_model", "--ranks=2"], 3) == (None, given)
    monkeypatch.setenv("WORLD_SIZE", "3")
    of_environment = message.format("WORLD_SIZE in the environment, as torchrun sets it, says 3")
    assert launch.load_and_check(["debug_model", "--ranks", "2"], 3) == (None, of_environment)


@pytest.mark.parametrize(
    "variables, message",
    [
        ({"RANK": "3"}, "RANK in the environment: given 3; allowed: at most 0 with WORLD_SIZE = 1; unset RANK, WORLD"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK .* given 2; allowed: at most 1 with WORLD_SIZE = 2"),
        ({"WORLD_SIZE": "0"}, "RANK .* given 0; allowed: at most -1 with WORLD_SIZE = 0"),
        ({"LOCAL_RANK": "1"}, "LOCAL_RANK .* given 1; allowed: at most 0 with LOCAL_WORLD_SIZE = 1"),
        ({"LOG_RANK": "all"}, "LOG_RANK in the environment: given 'all'; allowed: local ranks separated by commas"),
        ({"LOG_RANK": "0,-1"}, "LOG_RANK in the environment: given '0,-1'"),
        ({"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "4"}, "LOCAL_WORLD_SIZE .* given 4; allowed: at most 2"),
    ],
)
def test_variables_that_contradict_each_other_are_refused(variables, message, monkeypatch):
    """A rank 3 of one would log nothing, and leave the run's folder without a lock and the end of the run."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "LOG_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert ranks.read_ranks() == ranks.Ranks()
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(JobError, match=message):
        ranks.read_ranks()


@pytest.mark.parametrize(
    ("number", "variables", "logs"),
    [
        ("01", {"WORLD_SIZE": "2", "LOCAL_RANK": "1"}, True),
        (" 1, 0", {"WORLD_SIZE": "2", "LOCAL_RANK": "1"}, True),
        ("1", {"WORLD_SIZE": "2"}, False),
        ("", {"WORLD_SIZE": "2"}, True),
        ("1", {}, False),  # of the ranks that this process may start
    ],
)
def test_ranks_that_log(number, variables, logs, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in (variables | {"LOG_RANK": number}).items():
        monkeypatch.setenv(name, value)
    assert ranks.read_ranks().logs == logs


def test_ranks_that_log_are_looked_at_before_any_rank_starts(capsys, monkeypatch):
    monkeypatch.setenv("LOG_RANK", "1")
    assert launch.main(["1", "debug_model", "--training.no_such_option=1"]) == REFUSED
    assert "LOG_RANK in the environment: given '1'; allowed: local ranks separated by commas, one of them below 1" in (
        " ".join(capsys.readouterr().err.split())
    )


@pytest.mark.parametrize(
    "variables",
    [
        {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8"},  # srun by a script, DeepSpeed
        {"RANK": "1", "WORLD_SIZE": "2"},  # Kubeflow's PyTorchJob, a process in each pod
        {"RANK": "9", "LOCAL_RANK": "1", "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8", "GROUP_RANK": "1"},  # torchrun
        {"RANK": "3", "LOCAL_RANK": "3", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4", "NODE_RANK": "0"},  # Ray
    ],
)
def test_ranks_of_launchers_are_accepted(variables, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "LOG_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    place = ranks.read_ranks()
    assert (place.rank, place.world_size) == (int(variables["RANK"]), int(variables["WORLD_SIZE"]))
    assert place.local_rank == int(variables.get("LOCAL_RANK", 0))


def test_a_world_size_without_the_place_of_the_others_is_refused(monkeypatch):
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: False)
    with pytest.raises(JobError, match="WORLD_SIZE in the environment: given 2; allowed: with RANK, MASTER_ADDR and"):
        distributed.init(ranks.read_ranks(), 10)


@pytest.mark.parametrize("head", ["a..b", "x" * 70, ".", "a b", "\ud800"])
def test_a_head_that_no_host_can_be_called_is_refused(head):
    machines = Nodes(2, 0, head, 29500)
    with pytest.raises(JobError, match="HEAD_ADDR, HEAD_PORT: given .* where this machine cannot listen"):
        nodes.listen(machines, 29500)
    with pytest.raises(JobError, match="HEAD_ADDR: given .* to which no way is known"):
        nodes.local_address(machines)


def test_only_a_list_of_process_ids_is_taken_for_one():
    assert forks._parse_pids("[12, 345]") == [12, 345]
    for text in ("", "[]", "[[{}, []]]", "[12, ", "[-1]", "[0]", "[1.0]", "[true]", "null", f"[{HUGE}]", "[1,2]x"):
        assert forks._parse_pids(text) == []


# The network interface of ranks


def test_an_interface_that_is_not_there_is_named(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere0")
    with pytest.raises(JobError, match="GLOO_SOCKET_IFNAME: given 'nowhere0', which is no interface .* allowed: .*lo"):
        ranks.require_interfaces()
    for name in ("lo", ""):
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", name)
        ranks.require_interfaces()


def test_a_machine_without_loopback_is_refused_before_any_rank_starts(tmp_path):
    """In a new network namespace loopback is down."""
    if subprocess.run(["unshare", "--net", "true"], capture_output=True).returncode:
        pytest.skip("this user may not make a network namespace")
    argv = jobs.arguments(tmp_path / "run", jobs.write_texts(tmp_path), training__local_batch_size=4)
    environment = {name: value for name, value in os.environ.items() if name != "GLOO_SOCKET_IFNAME"}
    command = ["unshare", "--net", sys.executable, "-m", "torchtitan.launch", "2", *argv]
    done = subprocess.run(command, cwd=jobs.ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("network: the loopback interface (lo) has no address, and ranks communicate over it")
    assert "Traceback" not in done.stderr and "ip link set lo up" in done.stderr and not (tmp_path / "run").exists()
