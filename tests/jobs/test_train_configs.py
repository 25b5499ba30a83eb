"""Every shipped job loads, and builds on a fake mesh of the size that its head states.

Jobs for fine-tuning need a model and records of the user; here they train two steps on tiny ones.
"""

import math
import re
from pathlib import Path

import pytest

from tests.support import jobs
from tests.support.jobs import ROOT
from tests.support.pool import run_alone, run_ranks
from tests.support.presets import SEQ_LEN, model_and_record_options
from torchtitan.assembly import parts
from torchtitan.assembly.parts import ModelBuilder
from torchtitan.config import manager
from torchtitan.core.files import MODEL_PLACEHOLDER
from torchtitan.core.random_draws import clean_name
from torchtitan.job import ResolvedJob
from torchtitan.parallelisms.parallel_model import parallel_parts
from torchtitan.planner.estimate import predict, worst
from torchtitan.rules import check

JOBS = sorted((ROOT / "train_configs").glob("*.toml"))
FINE_TUNING = [path for path in JOBS if MODEL_PLACEHOLDER in path.read_text()]


@pytest.fixture(scope="module")
def user_arguments(tmp_path_factory):
    """Map each job to the arguments that a user has to add: model and records for fine-tuning, otherwise none."""
    arguments = model_and_record_options(tmp_path_factory.mktemp("user_arguments"))
    return {
        path.stem: arguments["pairs" if "po_" in path.stem else "sft"] if path in FINE_TUNING else [] for path in JOBS
    }


def stated_ranks(path: Path) -> int:
    (number,) = re.findall(r"^# Hardware: (\d+) (?:GPUs?|CPU cores?)", path.read_text(), re.MULTILINE)
    return int(number)


def test_the_documented_jobs_exist():
    names = {path.stem for path in JOBS}
    assert {"debug_model", "llama3_8b", "llama3_70b", "llama3_405b"} <= names
    assert {path.stem for path in FINE_TUNING} == {
        *("sft_qlora", "sft_lora", "sft_full", "sft_long_context", "dpo_lora", "orpo_lora")
    }


@pytest.mark.parametrize("path", JOBS, ids=lambda path: path.stem)
def test_shipped_jobs_lack_nothing_but_a_tokenizer(path, user_arguments, monkeypatch):
    monkeypatch.chdir(ROOT)
    config = manager.load(["--job.config_file", str(path), *user_arguments[path.stem]])
    faults = check(config, stated_ranks(path), "cpu" if "debug" in path.stem else "cuda")
    assert {fault.key for fault in faults} <= ({"model.tokenizer_path"} if path not in FINE_TUNING else set())
    assert config.checkpoint.enable and not config.checkpoint.load_only  # every shipped job saves its weights


def predicted_gib(jobs: list[tuple[list[str], int]]) -> list[float]:
    """Predict the GiB that the worst rank of each job needs on a GPU."""
    loaded = [(manager.load(["--job.config_file", *arguments]), ranks) for arguments, ranks in jobs]
    return [worst(predict(ResolvedJob(config, ranks, "cuda"))).peak / 2**30 for config, ranks in loaded]


STATED = re.compile(
    r"^# Memory: tensors take (\d+) GiB at most \(`torchtitan estimate`, uncompiled(?:, with ([^,)]+))?", re.MULTILINE
)
MODEL_ARGUMENTS = {
    "Llama 3 8B": ["--model.flavor=8B"],
    "Llama 2 7B": ["--model.name=llama2", "--model.flavor=7B"],
}
"""Arguments that replace the folder of a user's model."""


def test_heads_state_the_memory_that_estimate_predicts():
    """Every job for GPUs states its memory.

    The two pipelines, which take a minute or two to rehearse, and near-duplicates among the fine-tuning jobs are not
    compared.
    """
    stating = {path: match.groups() for path in JOBS if (match := STATED.search(path.read_text()))}
    assert {path.stem for path in stating} == {path.stem for path in JOBS if "debug" not in path.stem}
    arguments = {path: [str(path), *MODEL_ARGUMENTS.get(model, ())] for path, (_, model) in stating.items()}
    ranks = {path: stated_ranks(path) for path in stating}
    left_out = ("llama3_405b", "deepseek_671b", "orpo_lora", "sft_full", "sft_long_context")
    quick = [path for path in stating if path.stem not in left_out]
    match = run_alone(predicted_gib, [(arguments[path], ranks[path]) for path in quick], limit=600)
    assert {path.stem: round(size) for path, size in zip(quick, match, strict=True)} == {
        path.stem: int(stating[path][0]) for path in quick
    }


def build_on_fake_mesh(argv: list[str], ranks: int) -> tuple[dict[str, int], list[dict[str, int]], dict[str, int]]:
    """Return elements by parameter name, of the model and of one rank for each pipeline rank, and the degrees.

    All parameters stay on the meta device.
    """
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    config = manager.load(argv)
    dims = ResolvedJob(config, ranks).layout.dims
    shares = []
    for rank in range(0, ranks, ranks // dims.pp):  # pp is the outermost axis
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
        model = ModelBuilder(ResolvedJob(config)).meta_model()
        full_sizes = {clean_name(name): parameter.numel() for name, parameter in model.named_parameters()}
        options, pipeline = (
            ModelBuilder(ResolvedJob(config)).parallel_options(),
            ModelBuilder(ResolvedJob(config)).pipeline_options(),
        )
        plan = parts.model_spec(ResolvedJob(config).model).plan
        model_parts, *_ = parallel_parts(
            model, dims.build_mesh("cpu"), dims, plan, options, pipeline, dims.build_expert_mesh("cpu")
        )
        local_parameters = {
            clean_name(name): parameter for part in model_parts for name, parameter in part.named_parameters()
        }
        assert all(parameter.is_meta for parameter in local_parameters.values())
        shares.append({name: getattr(p, "to_local", lambda p=p: p)().numel() for name, p in local_parameters.items()})
        dist.destroy_process_group()
    return full_sizes, shares, dims.degrees


@pytest.mark.parametrize("path", JOBS, ids=lambda path: path.stem)
def test_jobs_build_on_a_mesh_of_their_stated_size(path, user_arguments):
    ranks, argv = stated_ranks(path), ["--job.config_file", str(path), *user_arguments[path.stem]]
    full_sizes, shares, degrees = run_alone(build_on_fake_mesh, argv, ranks)
    config = manager.load(argv)
    assert sum(full_sizes.values()) == ResolvedJob(config).model.args.num_parameters
    assert math.prod(degrees.values()) == ranks and len(shares) == degrees["pp"]
    assert sorted(name for share in shares for name in share) == sorted(full_sizes)  # each on one pipeline rank
    shards = degrees["dp_shard"] * degrees["cp"] * degrees["tp"]
    for share in shares:
        fair = sum(full_sizes[name] for name in share) / shards
        # rows that do not divide are padded on the first ranks, and tensor parallel replicates norms
        assert fair <= sum(share.values()) <= 1.01 * fair


@pytest.mark.parametrize("path", FINE_TUNING, ids=lambda path: path.stem)
def test_fine_tuning_jobs_train_two_steps(path, user_arguments, tmp_path):
    """Run a job in full with small lengths and counts, from loading weights to validation, a checkpoint and the export.

    Each record is a sample; 18 or 19 of 20 are trained on, the rest is held out.
    """
    sizes = dict(training__seq_len=SEQ_LEN, training__epochs=1, training__global_batch_size=10)
    sizes |= dict(job__dump_folder=tmp_path, metrics__log_freq=1, data__num_proc=1, metrics__plot=False)
    options = [f"--{name.replace('__', '.')}={str(value).lower()}" for name, value in sizes.items()]
    argv = ["--job.config_file", str(path), *user_arguments[path.stem], *options]
    assert check(manager.load(argv), 1, "cpu") == []
    ((steps, _),) = run_ranks(1, jobs.train, argv)
    assert [step["step"] for step in steps] == [1, 2]
    if "dpo" in path.stem:
        assert steps[0]["loss"] == pytest.approx(math.log(2), abs=1e-5)
        assert steps[0]["reward_margin"] == pytest.approx(0, abs=1e-5)
    else:
        assert 7 < steps[0]["loss"] < 9.5  # initial weights give about ln 2,112 + 1/2 = 8.2
    assert (tmp_path / "checkpoint/step-00000002").is_dir()
    assert list(tmp_path.glob("adapter/*.safetensors" if "lora" in path.stem else "model_hf/*.safetensors"))
