"""Every shipped job loads, and builds on a fake mesh of the size that its head states."""

import re
from pathlib import Path

import pytest

from tests.jobs import ROOT
from tests.pool import run_alone
from torchtitan import build, config_manager
from torchtitan.parallelisms.parallelize import parallelize

JOBS = sorted((ROOT / "train_configs").glob("*.toml"))


def stated_ranks(path: Path) -> int:
    (found,) = re.findall(r"^# Hardware: (\d+) (?:GPUs|CPU cores)", path.read_text(), re.MULTILINE)
    return int(found)


def test_the_promised_jobs_are_there():
    names = {path.stem for path in JOBS}
    assert {"debug_model", "llama3_8b", "llama3_70b", "llama3_405b"} <= names


def build_on_fake_mesh(path: str, ranks: int) -> tuple[int, int, dict[str, int]]:
    """Elements of the model, of this rank's share, and the degrees. Nothing gets storage: all stays on meta."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    config = config_manager.load(["--job.config_file", path])
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    dims = build.dims(config, ranks)
    model = build.meta_model(config)
    whole = sum(parameter.numel() for parameter in model.parameters())
    parallelize(model, dims.build_mesh("cpu"), dims, build.model_spec(config).plan, build.parallel_options(config))
    mine = sum(getattr(p, "to_local", lambda p=p: p)().numel() for p in model.parameters())
    assert all(parameter.is_meta for parameter in model.parameters())
    return whole, mine, dims.degrees


@pytest.mark.parametrize("path", JOBS, ids=lambda path: path.stem)
def test_builds_on_a_mesh_of_its_stated_size(path):
    ranks = stated_ranks(path)
    whole, mine, degrees = run_alone(build_on_fake_mesh, str(path), ranks)
    config = config_manager.load(["--job.config_file", str(path)])
    assert whole == build.model_args(config).num_parameters
    shards = degrees["dp_shard"] * degrees["tp"] * degrees["pp"]
    assert whole / shards <= mine <= 1.01 * whole / shards  # rows that do not divide are padded on the first ranks
