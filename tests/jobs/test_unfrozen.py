"""`training.unfrozen`: only the named parameters are trained and have optimizer state; others count as frozen."""

import json

import pytest
import torch

from tests.support import jobs
from tests.support.judged import lines
from tests.support.pool import run_alone, run_ranks
from torchtitan import cli
from torchtitan.assembly.parts import ModelBuilder
from torchtitan.commands.generate import find_checkpoint
from torchtitan.config.manager import load
from torchtitan.core.errors import JobError
from torchtitan.job import ResolvedJob
from torchtitan.models.hf.config import UNTRAINED
from torchtitan.planner.estimate import flops_of_a_rank, predict
from torchtitan.planner.rehearsal import FROZEN, GRADIENTS, OPTIMIZER_STATE, PARAMETERS
from torchtitan.process.ranks import read_ranks
from torchtitan.training import inference_model
from torchtitan.training.trainer import Trainer

PATTERNS = ["layers.3.*", "layers.*norm*", "output.weight"]


def is_trained(name: str) -> bool:
    return name.startswith("layers.3.") or "norm" in name and name != "norm.weight" or name == "output.weight"


def job(folder, texts, **options):
    shared = dict(training__unfrozen=json.dumps(PATTERNS), checkpoint__enable=True, checkpoint__interval=2)
    return jobs.arguments(folder, texts, **shared | dict(training__steps=4, training__local_batch_size=4) | options)


def train_and_compare(argv: list[str]) -> tuple[str, dict, list[str], set[str]]:
    """Train; return the final state's hash, names of changed parameters, all names, and names with optimizer state."""
    trainer = Trainer(load(argv), read_ranks())
    before = {name: jobs.full(p.detach()).clone() for name, p in trainer.model.named_parameters()}
    trainer.train()
    trainer.metrics.close()
    after = {name: jobs.full(p.detach()) for name, p in trainer.model.named_parameters()}
    state_ids = {id(p) for optimizer in trainer.optimizers for p in optimizer.state}
    names_with_state = {name for name, p in trainer.model.named_parameters() if id(p) in state_ids}
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    return jobs.state_hash(trainer), changed, sorted(before), names_with_state


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    return jobs.write_texts(tmp_path_factory.mktemp("texts"))


def test_only_named_parameters_are_trained_and_a_resume_is_bit_exact(texts, tmp_path):
    argv = job(tmp_path / "run", texts)
    uninterrupted, changed, names, names_with_state = run_ranks(2, train_and_compare, argv)[0]
    assert changed == names_with_state == set(filter(is_trained, names)) and len(changed) < len(names)
    assert run_ranks(2, train_and_compare, [*argv, "--checkpoint.load_step=2"])[0][0] == uninterrupted
    assert cli.main(["export", str(tmp_path / "run"), "--to", str(tmp_path / "whole")]) == 0
    run, checkpoint = find_checkpoint(tmp_path / "run", None)
    filled, installed = inference_model.load_model(run, checkpoint, torch.device("cpu"))
    assert {name for name, p in filled.named_parameters() if p.requires_grad} == changed
    num_trained = sum(filled.get_parameter(name).numel() for name in changed)
    assert (installed.num_trained, installed.num_parameters) == (
        num_trained,
        sum(p.numel() for p in filled.parameters()),
    )
    assert f"unfrozen: {num_trained:,} of" in installed.describe()
    model, _, installed = ModelBuilder(run).adapted_model()
    with (
        inference_model.open_run(run, checkpoint, model, installed) as weights,
        inference_model.plain_state(run.model, model, installed, weights) as (state, kind),
    ):
        assert kind == "weights" and state.keys() == filled.state_dict().keys()
        assert all(torch.equal(state[name].detach(), value) for name, value in filled.state_dict().items())


def test_estimates_treat_other_parameters_as_frozen(texts, tmp_path):
    config = load(job(tmp_path, texts, training__seq_len=16))
    model, _, installed = ModelBuilder(ResolvedJob(config)).adapted_model()
    trained_bytes = sum(p.numel() for p in model.parameters() if p.requires_grad) * 4
    frozen_bytes = sum(p.numel() for p in model.parameters()) * 4 - trained_bytes
    (estimate,) = run_alone(predict, ResolvedJob(config))  # a process that has trained has a process group
    kinds = estimate.kinds
    assert (kinds[PARAMETERS], kinds[FROZEN]) == (trained_bytes, frozen_bytes)
    assert kinds[OPTIMIZER_STATE] == pytest.approx(2 * trained_bytes, rel=0.01)
    assert kinds.get(GRADIENTS, 0) <= trained_bytes
    full_job = load(job(tmp_path, texts, training__seq_len=16, training__unfrozen="[]"))
    full_flops = flops_of_a_rank(ResolvedJob(full_job))
    saved_flops = 2 * (
        ResolvedJob(config).model.args.num_matmul_parameters - installed.trained_weights_per_token
    )  # no gradients of weights
    assert flops_of_a_rank(ResolvedJob(config)) == pytest.approx(full_flops - saved_flops * 8 * 16) and saved_flops > 0


def test_invalid_patterns_are_refused(texts, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    argv = job(tmp_path / "run", texts, training__unfrozen='["layers.9.*"]')
    with pytest.raises(JobError, match=r"training.unfrozen = 'layers.9.\*' fits nothing in this model; it has layers"):
        ModelBuilder(ResolvedJob(load(argv))).adapted_model()
    (fault,) = lines('--training.unfrozen=["layers.9.*", "*norm*"]')  # checked before every start, without the model
    message = 'training.unfrozen: given "layers.9.*"; allowed: patterns that fit one of layers.*.attention.wk.weight, '
    assert fault.startswith(message)
    matrices = '--adapter.train_fully=["*attention.wq.weight"]'
    assert lines("--adapter.kind=lora", matrices) == []
    (fault,) = lines("--adapter.kind=qlora", matrices)
    assert fault.startswith('adapter.train_fully: given "*attention.wq.weight"; '), "quantized weights are packed"
    arguments = ['--training.unfrozen=["*norm*"]', "--adapter.kind=lora"]
    (fault,) = lines(*arguments)
    assert (
        'nothing with adapter.kind = "lora"; write adapter.train_fully for parameters to train with the adapter'
        in fault
    )
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", UNTRAINED: [3]}))
    arguments = ['--training.unfrozen=["*norm*"]', "--checkpoint.enable", f"--checkpoint.initial_load_path={tmp_path}"]
    assert any(
        "training.unfrozen" in fault and "with rows of 1 new token; write" in fault for fault in lines(*arguments)
    )
    tied = ["--model.overrides={tied_embeddings=true}", '--training.unfrozen=["output.weight"]', *arguments[1:]]
    assert not any("new token" in fault for fault in lines(*tied)), "either name selects both"
    assert any("patterns that match tok_embeddings.weight, with" in fault for fault in lines(*tied[1:]))
    assert cli.main(["check", "--no-memory", '--training.unfrozen=["*norm*"]']) == 0
    assert (
        "  types     frozen weights in bfloat16, trained ones and their state in float32\n" in capsys.readouterr().out
    )
