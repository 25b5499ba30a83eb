"""Every shipped job loads, and builds on a fake mesh of the size that its head states."""

import math
import re
from pathlib import Path

import pytest

from tests.support.jobs import ROOT
from tests.support.pool import run_alone
from torchtitan import build
from torchtitan.config import manager
from torchtitan.initialization import clean_name
from torchtitan.parallelisms.parallel_model import parallel_parts
from torchtitan.rules import check

JOBS = sorted((ROOT / "train_configs").glob("*.toml"))


def stated_ranks(path: Path) -> int:
    (found,) = re.findall(r"^# Hardware: (\d+) (?:GPUs|CPU cores)", path.read_text(), re.MULTILINE)
    return int(found)


def test_the_promised_jobs_are_there():
    names = {path.stem for path in JOBS}
    assert {"debug_model", "llama3_8b", "llama3_70b", "llama3_405b"} <= names


@pytest.mark.parametrize("path", JOBS, ids=lambda path: path.stem)
def test_nothing_is_wrong_but_what_has_to_be_fetched(path, monkeypatch):
    monkeypatch.chdir(ROOT)
    config = manager.load(["--job.config_file", str(path)])
    faults = check(config, stated_ranks(path), "cpu" if "debug" in path.stem else "cuda")
    assert {fault.key for fault in faults} <= {"model.tokenizer_path"}
    assert config.checkpoint.enable and not config.checkpoint.load_only  # no shipped job loses what it learns


def build_on_fake_mesh(path: str, ranks: int) -> tuple[dict[str, int], list[dict[str, int]], dict[str, int]]:
    """Elements of the model's parameters by name, of the shares of one rank for each pipeline rank, and the degrees.
    Nothing gets storage: all stays on meta."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    config = manager.load(["--job.config_file", path])
    dims = build.dims(config, ranks)
    shares = []
    for rank in range(0, ranks, ranks // dims.pp):  # pp is the outermost axis
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
        model = build.meta_model(config)
        whole = {clean_name(name): parameter.numel() for name, parameter in model.named_parameters()}
        options, pipeline = build.parallel_options(config), build.pipeline_options(config)
        plan = build.model_spec(config).plan
        parts, *_ = parallel_parts(
            model, dims.build_mesh("cpu"), dims, plan, options, pipeline, dims.build_expert_mesh("cpu")
        )
        mine = {clean_name(name): parameter for part in parts for name, parameter in part.named_parameters()}
        assert all(parameter.is_meta for parameter in mine.values())
        shares.append({name: getattr(p, "to_local", lambda p=p: p)().numel() for name, p in mine.items()})
        dist.destroy_process_group()
    return whole, shares, dims.degrees


@pytest.mark.parametrize("path", JOBS, ids=lambda path: path.stem)
def test_builds_on_a_mesh_of_its_stated_size(path):
    ranks = stated_ranks(path)
    whole, shares, degrees = run_alone(build_on_fake_mesh, str(path), ranks)
    config = manager.load(["--job.config_file", str(path)])
    assert sum(whole.values()) == build.model_args(config).num_parameters
    assert math.prod(degrees.values()) == ranks and len(shares) == degrees["pp"]
    assert sorted(name for share in shares for name in share) == sorted(whole)  # each on one pipeline rank
    shards = degrees["dp_shard"] * degrees["cp"] * degrees["tp"]
    for share in shares:
        fair = sum(whole[name] for name in share) / shards
        # rows that do not divide are padded on the first ranks, and norms are whole on all of tensor parallel
        assert fair <= sum(share.values()) <= 1.01 * fair
