"""Check jobs against the rules, for tests that compare the faults.

The model is the debug model (6 layers, 16 heads, feed-forward width 768, vocabulary 2048) unless a job says otherwise.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from torchtitan.config.manager import load
from torchtitan.rules import check

TP, CP, PP = (f"--parallelism.{axis}_parallel_degree=" for axis in ("tensor", "context", "pipeline"))
EP, MOE = "--parallelism.expert_parallel_degree=", "--model.name=deepseek"
SCHEDULE, CSV = "--parallelism.pipeline_parallel_schedule=", "--parallelism.pipeline_parallel_schedule_csv="
METHOD, PARTS = "--parallelism.context_parallel_rotate_method=", "--parallelism.module_fqns_per_model_part="


@pytest.fixture(autouse=True)
def anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Check jobs in an empty folder: checking must neither create nor need output folders."""
    monkeypatch.chdir(tmp_path)
    yield
    assert not (tmp_path / "outputs").exists()


def lines(*arguments: str, ranks: int | None = None, device: str = "cpu", tokenizer: object = "bytes") -> list[str]:
    """Return the faults of a job. By default it runs on as many ranks as its parallelism degrees need."""
    for argument in arguments if ranks is None else ():
        degree = re.fullmatch(r"--parallelism\.(?!expert)\w+_degree=(\d+)", argument)
        ranks = (ranks or 1) * (int(degree[1]) if degree else 1)
    faults = check(load([f"--model.tokenizer_path={tokenizer}", *arguments]), ranks or 1, device)
    return [str(fault).removeprefix("the job: ").removeprefix("parallelism.") for fault in faults]


def name(case: object) -> str:
    """Return the test id of a table's case: its arguments."""
    return " ".join(case[0])[:90]
