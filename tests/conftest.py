"""Set before torch is imported: one thread per rank (2 cores), loopback only, no network, no shared autograd cache.

And two options, each with a word for `./run_tests.sh`: --quick leaves out what takes long, for an answer in under
three minutes on two cores; --slurm runs what needs a cluster of SLURM, which it starts on this machine.
"""

import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.leftovers import taken_away

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
if sys.platform == "linux":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
for name in [name for name in os.environ if name.startswith("SLURM_")]:
    del os.environ[name]  # of an allocation in which the tests run, and which their jobs shall not take for theirs
# under nohup it is ignored, and what the tests start would inherit that
signal.signal(signal.SIGHUP, signal.SIG_DFL)
# torch's on-disk autograd cache mixes up entries of different optimizers and wrappers (measured on 2.13)
os.environ["TORCHINDUCTOR_AUTOGRAD_CACHE"] = "0"

# What many ranks, whole jobs or compilers make slow: nine tenths of the suite's time. Of the table of combinations
# some rows on one and two ranks stay, all families and axes among them.
SLOW = {
    f"test_{name}"
    for name in (
        "adapter_dropout",
        "adapters",
        "bench",
        "bench_command",
        "cadence",
        "chat",
        "checkpoint_loading",
        "checkpoint_plans",
        "checkpoint_ranks",
        "clean_start",
        "company",
        "context_parallel",
        "convert",
        "damaged_state",
        "data_parallel",
        "decoders",
        "epochs",
        "evaluate",
        "expert_jobs",
        "export",
        "fake_cuda",
        "findings",
        "galore",
        "galore_ranks",
        "generate",
        "generated",
        "guards",
        "hf",
        "hf_round_trip",
        "hf_tuning",
        "importing_galore",
        "importing_neurocache",
        "launcher",
        "logs",
        "low_rank",
        "masked_lm",
        "memory",
        "memory_limit",
        "mixing",
        "moe_balance",
        "multi_token",
        "neurocache",
        "neurocache_beginning",
        "neurocache_ranks",
        "nodes",
        "noise",
        "notes_script",
        "optimizer_plans",
        "optimizers",
        "overlap",
        "overlap_guards",
        "own_optimizers",
        "pipeline_parallel",
        "pool",
        "preferences",
        "preflight",
        "published",
        "pythons",
        "qlora",
        "random_plans",
        "readme",
        "relora",
        "relora_jobs",
        "relora_regimes",
        "renames",
        "replicas",
        "resizing",
        "restarts",
        "schedule_command",
        "schedule_simulator",
        "segments_of_documents",
        "seq_cls",
        "sft",
        "stops",
        "storage",
        "tokenizer_files",
        "traffic",
        "train_configs",
        "trainer",
        "trainer_options",
        "unfrozen",
        "warm_start",
        "wheel",
    )
}
EVERY_NTH_ROW = 20


@pytest.fixture(autouse=True)
def messages_in_one_piece(nothing_left_by_a_test: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a long message would go on in another line depends on how long the paths of this machine are that it names.
    test_messages.py looks at that by itself."""
    monkeypatch.setattr("torchtitan.core.errors.LONGEST_LINE", 10**6)


@pytest.fixture(autouse=True, scope="module")
def nothing_left_by_a_module() -> Iterator[None]:
    with taken_away():
        yield


@pytest.fixture(autouse=True)
def nothing_left_by_a_test(nothing_left_by_a_module: None) -> Iterator[None]:
    """What fixtures of its module have made stays as long as they do. This comes ahead of monkeypatch, so that what
    a test has replaced is put back when it is looked what it has left."""
    with taken_away():
        yield


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="leave out what takes long: an answer in under three minutes")
    parser.addoption("--slurm", action="store_true", help="start a cluster of SLURM on this machine and test on it")


def _params(item: pytest.Item) -> dict[str, Any]:
    return getattr(getattr(item, "callspec", None), "params", {})


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if passing := [item.nodeid for item in items if " at 0x" in item.nodeid]:
        # an address differs from worker to worker, which then do not agree on what there is to run
        raise pytest.UsageError(f"name the parameters, so that each run gives the same names: {passing}")
    if not config.getoption("--quick"):
        return
    from tests.combinations import Combination  # not above, where nothing of ours may be imported yet

    rows = [item for item in items if isinstance(_params(item).get("row"), Combination)]
    cheap = [item for item in rows if (row := _params(item)["row"]).ranks <= 2 and row.compile == "no"]
    left_out = set(rows) - set(cheap[::EVERY_NTH_ROW])
    left_out |= {item for item in items if item.module.__name__.rpartition(".")[2] in SLOW}
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]
