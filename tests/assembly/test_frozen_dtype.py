"""`training.frozen_dtype`: frozen weights are stored in the type that they are computed with, others in float32."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch

from tests.support import jobs
from tests.support.pool import run_alone, run_ranks
from tests.support.preference_jobs import dpo_arguments, write_pairs
from torchtitan import cli
from torchtitan.adapters.low_rank import add_product
from torchtitan.assembly import parts
from torchtitan.assembly.parts import ModelBuilder
from torchtitan.checkpoint.layout import MODEL, read_manifest
from torchtitan.config.manager import load
from torchtitan.core.random_draws import initialize
from torchtitan.job import ResolvedJob
from torchtitan.models.spec import MODELS
from torchtitan.planner.estimate import predict
from torchtitan.planner.rehearsal import FROZEN
from torchtitan.process.ranks import read_ranks
from torchtitan.training.reporting import describe_precision
from torchtitan.training.trainer import Trainer

LORA = dict(adapter__kind="lora", adapter__rank=4, training__mixed_precision_param="bfloat16")


def job(folder: Path, texts: Path, **options: object) -> list[str]:
    shared = LORA | dict(training__steps=6, checkpoint__enable=True, checkpoint__interval=2)
    return jobs.arguments(folder, texts, **shared | options)


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    return jobs.write_texts(tmp_path_factory.mktemp("texts"))


@pytest.fixture(scope="module")
def base(texts, tmp_path_factory):
    """Write initial weights in the Hugging Face layout in float32; return their folder."""
    folder = tmp_path_factory.mktemp("base")
    model = ModelBuilder(ResolvedJob(load(job(folder, texts)))).meta_model().to_empty(device="cpu")
    initialize(model, 5, model.init_rule)
    MODELS["llama3"].hf.save_hf(folder, model.state_dict(), model.args)
    return folder


def saved_dtypes(run: Path, step: int = 6) -> dict[str, set[str]]:
    """Return the dtypes of the frozen and trained weights and of the moments in a checkpoint."""
    dtypes: dict[str, set[str]] = {"frozen": set(), "trained": set(), "moments": set()}
    for name, entry in read_manifest(run / f"checkpoint/step-{step:08}").tensors.items():
        kind = "moments" if not name.startswith(MODEL) else "trained" if "lora_" in name else "frozen"
        dtypes[kind].add(entry.dtype)
    return dtypes


RELORA = dict(adapter__relora__every=3, lr_scheduler__decay_type="relora_cosine", lr_scheduler__restart_warmup_steps=1)
TYPES = [
    ({}, "bfloat16"),
    (dict(training__frozen_dtype="float32"), "float32"),
    (dict(training__mixed_precision_param="float32"), "float32"),
    (RELORA, "float32"),
    (RELORA | dict(training__frozen_dtype="bfloat16"), "bfloat16"),
]


@pytest.mark.parametrize(("options", "dtype"), TYPES, ids=str)
def test_a_checkpoint_has_the_types_and_a_resume_is_bit_exact(texts, tmp_path, options, dtype):
    argv = job(tmp_path, texts, **options, training__local_batch_size=4, lr_scheduler__warmup_steps=1)
    steps, state = run_ranks(2, jobs.train, argv)[0]
    assert all(math.isfinite(step["loss"]) for step in steps)
    assert saved_dtypes(tmp_path) == {"frozen": {dtype}, "trained": {"float32"}, "moments": {"float32"}}
    assert run_ranks(2, jobs.train, [*argv, "--checkpoint.load_step=4"])[0][1] == state
    assert cli.main(["export", str(tmp_path), "--to", str(tmp_path / "merged"), "--merge"]) == 0


def test_a_run_keeps_the_type_that_it_began_with(texts, tmp_path):
    """A run of an earlier version lacks the option in its job, and resumes with float32."""
    folder = tmp_path / "run"
    run_ranks(1, jobs.train, job(folder, texts, training__frozen_dtype="float32"))
    assert ResolvedJob(load(job(folder, texts))).saving.frozen_dtype == "float32"
    assert ResolvedJob(load(job(tmp_path / "another", texts))).saving.frozen_dtype == "bfloat16"
    shutil.copytree(jobs.ROOT / "tests/assets/lora_epochs/run", tmp_path / "earlier")
    assert ResolvedJob(load(job(tmp_path / "earlier", texts))).saving.frozen_dtype == "float32"
    longer = dict(lr_scheduler__total_steps=6)
    run_ranks(1, jobs.train, job(folder, texts, **longer, training__steps=7))
    assert saved_dtypes(folder, 7)["frozen"] == {"float32"}
    changed = longer | dict(training__steps=8, training__frozen_dtype="bfloat16")
    assert cli.main(["check", "--no-memory", *job(folder, texts, **changed)]) == 2
    changed |= dict(checkpoint__allow_config_change='["training.frozen_dtype"]')
    assert cli.main(["check", "--no-memory", *job(folder, texts, **changed)]) == 0
    run_ranks(1, jobs.train, job(folder, texts, **changed))
    assert saved_dtypes(folder, 8)["frozen"] == {"bfloat16"}


def test_the_type_is_of_the_checkpoint_that_a_resume_takes(texts, tmp_path):
    run_ranks(1, jobs.train, job(tmp_path, texts, training__frozen_dtype="float32", training__steps=4))
    newest, other = (tmp_path / f"checkpoint/step-{step:08}" for step in (4, 2))
    state = json.loads((other / "state.json").read_text())
    state["trainer"]["job"]["training"]["frozen_dtype"] = "bfloat16"
    (other / "state.json").write_text(json.dumps(state))
    manifest = json.loads((other / "manifest.json").read_text())
    manifest["files"]["state.json"]["size"] = (other / "state.json").stat().st_size
    (other / "manifest.json").write_text(json.dumps(manifest))
    assert ResolvedJob(load(job(tmp_path, texts))).saving.frozen_dtype == "float32"
    assert ResolvedJob(load([*job(tmp_path, texts), "--checkpoint.load_step=2"])).saving.frozen_dtype == "bfloat16"
    damaged = (newest / "state.json").read_bytes()
    (newest / "state.json").write_bytes(b"0" * len(damaged))  # loading skips it, too
    assert ResolvedJob(load(job(tmp_path, texts))).saving.frozen_dtype == "bfloat16"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_base_weights_are_rounded_once_and_a_merge_is_summed_in_float32(base, texts, tmp_path, dtype):
    folder = tmp_path / "base"
    model = ModelBuilder(ResolvedJob(load(job(folder, texts)))).meta_model().to_empty(device="cpu")
    MODELS["llama3"].hf.load_hf(base, model, model.args)
    MODELS["llama3"].hf.save_hf(folder, model.state_dict(), model.args, dtype=parts.DTYPES[dtype])
    saves = dict(checkpoint__last_save_model_only=True, checkpoint__last_save_in_hf=True)
    argv = job(tmp_path / "run", texts, checkpoint__initial_load_path=folder, optimizer__lr=0.1, **saves)
    run_alone(train_and_store_weights, argv, tmp_path)
    before, after = (torch.load(tmp_path / name) for name in ("before", "after"))
    for name, weight in before.items():
        assert weight.dtype == (torch.float32 if "lora_" in name else torch.bfloat16)
        if "lora_" not in name:
            assert torch.equal(weight, model.get_parameter(name).bfloat16()) and torch.equal(weight, after[name])
    assert saved_dtypes(tmp_path / "run") == {"frozen": set(), "trained": {"float32"}, "moments": {"float32"}}
    merged = ModelBuilder(ResolvedJob(load(argv))).meta_model().to_empty(device="cpu")
    MODELS["llama3"].hf.load_hf(tmp_path / "run/model_hf", merged, merged.args)
    w, b, a = (after[f"layers.0.attention.wo.{name}"] for name in ("weight", "lora_B", "lora_A"))
    expected = add_product(w.float(), b, a, 32 / 4)
    assert not torch.equal(expected, expected.bfloat16().float())
    assert torch.equal(merged.layers["0"].attention.wo.weight, expected)


def train_and_store_weights(argv: list[str], folder: Path) -> None:
    trainer = Trainer(load(argv), read_ranks())
    torch.save(dict(trainer.model.named_parameters()), folder / "before")
    trainer.train()
    trainer.metrics.close()
    torch.save(dict(trainer.model.named_parameters()), folder / "after")


@pytest.mark.parametrize("options", [{}, dict(adapter__train_fully='["tok_embeddings.weight", "*norm*"]')], ids=str)
def test_a_reference_model_is_stored_like_the_policy(base, tmp_path, options):
    """The reference has the policy's types, and a policy that starts as its reference a first loss of ln 2."""
    argv = dpo_arguments(tmp_path / "run", write_pairs(tmp_path / "rows.jsonl"), **LORA | dict(training__steps=1))
    argv += [f"--checkpoint.initial_load_path={base}", f"--dpo.reference={base}"]
    argv += [f"--{name.replace('__', '.')}={value}" for name, value in options.items()]
    ((steps, _),) = run_ranks(1, jobs.train, argv)
    assert steps[0]["reward_margin"] == 0 and steps[0]["loss"] == pytest.approx(math.log(2), abs=1e-7)
    ((policy, reference, same_autocast),) = run_ranks(1, policy_and_reference, argv)
    assert {name: policy[name] for name in reference} == reference
    assert same_autocast, "even if all weights of the reference are in bfloat16"


def policy_and_reference(argv: list[str]) -> tuple[dict[str, str], dict[str, str], bool]:
    """Return the dtypes of both models' parameters, and whether they share the autocast."""
    config, device = load(argv), torch.device("cpu")
    dims = ResolvedJob(config).layout.dims
    policy = ModelBuilder(ResolvedJob(config, dims.world_size)).model(dims.build_mesh("cpu"), device)
    reference = ModelBuilder(ResolvedJob(config, dims.world_size)).model(policy.mesh, device, policy=policy)
    dtypes, reference_dtypes = (
        {name: str(parameter.dtype) for name, parameter in model.named_parameters()} for model in (policy, reference)
    )
    return dtypes, reference_dtypes, reference.autocast is policy.autocast


def test_estimate_check_and_header_name_the_type(texts, tmp_path, capsys):
    narrow, wide = (load(job(tmp_path, texts, training__frozen_dtype=dtype)) for dtype in ("bfloat16", "float32"))
    sizes = [run_alone(predict, ResolvedJob(config))[0].kinds[FROZEN] for config in (narrow, wide)]
    assert sizes[1] == 2 * sizes[0]
    resolved = ResolvedJob(narrow)
    assert (
        describe_precision(resolved.model, resolved.saving.frozen_dtype, "cpu")
        == "bfloat16 with bfloat16 frozen and float32 trained parameters and float32 reduction"
    )
    assert cli.main(["check", "--no-memory", *job(tmp_path, texts)]) == 0
    assert "frozen weights in bfloat16, trained ones and their state in float32" in capsys.readouterr().out
    assert ResolvedJob(load(job(tmp_path, texts, adapter__kind="none"))).saving.frozen_dtype is None
