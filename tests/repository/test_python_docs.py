"""The programs of docs/python.md run as they are written, with a smaller model in another folder."""

import functools
import re

import pytest

from tests.support.jobs import ROOT
from tests.support.pool import run_alone
from torchtitan.training.engine import Engine

PAGE = (ROOT / "docs/python.md").read_text()
PROGRAMS = [block for block in re.findall(r"```python\n(.*?)```", PAGE, re.S) if "Engine.from_job" in block]
SMALL = {"model.overrides": {"dim": 32, "n_layers": 1, "n_heads": 4}, "training.seq_len": 32, "metrics.plot": False}


def run(program: str, folder: str) -> None:
    from_job = Engine.from_job.__func__

    @functools.wraps(from_job)
    def smaller(cls, source, **options):
        return from_job(cls, source, **SMALL, **{"job.dump_folder": folder} | options)

    Engine.from_job = classmethod(smaller)
    exec(compile(program, "docs/python.md", "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("program", PROGRAMS, ids=range(len(PROGRAMS)))
def test_a_program_of_the_page_runs(program, tmp_path):
    run_alone(run, program, str(tmp_path))
    assert (tmp_path / "metrics.jsonl").exists()
