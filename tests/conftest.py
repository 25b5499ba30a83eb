"""Environment of the tests, set before torch is imported: one thread per rank, loopback only, no network, no shared
autograd cache.

It also adds the options that `./run_tests.sh` sets: --pairwise (its default), --quick and --record-durations, which
tests/support/selection.py explains, and --slurm for the tests that need a SLURM cluster.
"""

import gc
import os
import signal
import sys
from collections.abc import Iterator

import pytest

from tests.support.leftovers import restore_after_test

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
if sys.platform == "linux":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
for name in [name for name in os.environ if name.startswith("SLURM_")]:
    del os.environ[name]  # if the tests run inside an allocation, their jobs must not use its variables
os.environ.pop("NGPU", None)  # tests say themselves how many ranks they start
# nohup ignores SIGHUP, and the processes of the tests would inherit that
signal.signal(signal.SIGHUP, signal.SIG_DFL)
# torch's on-disk autograd cache mixes up entries of different optimizers and wrappers (measured on 2.13)
os.environ["TORCHINDUCTOR_AUTOGRAD_CACHE"] = "0"


@pytest.fixture(autouse=True)
def messages_in_one_piece(nothing_left_by_a_test: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not fold long messages, as the folding depends on the length of this machine's paths.

    test_errors.py tests the folding.
    """
    monkeypatch.setattr("torchtitan.core.errors.LONGEST_LINE", 10**6)


@pytest.fixture(autouse=True, scope="module")
def nothing_left_by_a_module() -> Iterator[None]:
    with restore_after_test():
        yield


@pytest.fixture(autouse=True)
def nothing_left_by_a_test(nothing_left_by_a_module: None) -> Iterator[None]:
    """Restore the process after each test; the state that module fixtures have set up is kept.

    It is set up before monkeypatch, so that monkeypatch undoes its changes first.
    """
    with restore_after_test():
        yield


@pytest.fixture(scope="session")
def is_full_run(pytestconfig: pytest.Config) -> bool:
    """True in `./run_tests.sh full`, in which tests with random draws draw more of them."""
    return bool(pytestconfig.getoption("--record-durations"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--pairwise", action="store_true", help="run a pairwise cover of the table of combinations")
    parser.addoption("--quick", action="store_true", help="leave out what takes long: an answer in under three minutes")
    parser.addoption("--record-durations", action="store_true", help="write the time of each module to a file")
    parser.addoption("--slurm", action="store_true", help="start a cluster of SLURM on this machine and test on it")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--record-durations") and not hasattr(config, "workerinput"):
        from tests.support.selection import DurationRecorder  # not above, where nothing of ours may be imported yet

        config.pluginmanager.register(DurationRecorder())


def pytest_collection_finish() -> None:
    """Exclude what has been imported and collected, millions of objects, from later collections of garbage."""
    gc.freeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if passing := [item.nodeid for item in items if " at 0x" in item.nodeid]:
        # addresses differ between workers, which then disagree on the test ids
        raise pytest.UsageError(f"name the parameters, so that each run gives the same names: {passing}")
    if config.getoption("--quick") or config.getoption("--pairwise"):
        from tests.support.selection import left_out_items  # as above

        left_out = left_out_items(items, quick=config.getoption("--quick"))
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]
