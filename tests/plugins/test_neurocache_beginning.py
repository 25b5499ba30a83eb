"""Neurocache with `init = "pca"`: the compression starts with the principal directions of states, found by an SVD."""

import pytest
import torch

from tests.support.jobs import arguments, full, logged_steps, write_texts
from tests.support.pool import run_ranks
from tests.support.remembering import remembering, segments
from torchtitan.config import manager
from torchtitan.core.errors import JobError
from torchtitan.plugins.neurocache.adapter import principal_directions
from torchtitan.process.ranks import read_ranks
from torchtitan.training.trainer import Trainer


def test_principal_directions_have_the_least_error():
    torch.manual_seed(0)
    x = torch.randn(200, 12).double() @ torch.randn(12, 12).double()
    directions = principal_directions(x.t() @ x, 5)
    torch.testing.assert_close(directions.t() @ directions, torch.eye(5).double(), rtol=0, atol=1e-12)
    lost = (x - x @ directions @ directions.t()).square().sum()
    singular = torch.linalg.svdvals(x)
    torch.testing.assert_close(lost, singular[5:].square().sum(), rtol=1e-9, atol=0)
    assert (directions.gather(0, directions.abs().argmax(0, keepdim=True)) > 0).all()
    torch.testing.assert_close(principal_directions((-x).t() @ -x, 5), directions)


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_pca_compression_keeps_the_principal_directions_of_states(family):
    """The directions come from all states of the storing layers, without padding."""
    options = dict(layers=3, retrieval_map={"1": 1, "2": 2}, init="pca")
    model, installed = remembering(family, torch.float64, **options)
    recorded, filled = [], torch.tensor([8, 3])

    def record(module, inputs, out):
        recorded.append(torch.cat([row[:count] for row, count in zip(out, filled.tolist(), strict=True)]))

    model.eval()
    for layer in "12":
        model.layers[layer].attention_norm.register_forward_hook(record)

    def run_batch(batch):
        before = len(recorded)
        model(batch, begins=torch.tensor([True, False]), filled=filled)
        installed.after_batch([model])
        del recorded[before + 1 :: 2]  # the block computes the norm a second time

    with torch.no_grad():
        installed.before_training([model], run_batch, lambda tokens: (), lambda count: segments(4))
    states = torch.cat(recorded)
    directions = model.memory.h_proj.weight.t()  # [D, C]
    singular = torch.linalg.svdvals(states)
    lost = (states - states @ directions @ directions.t()).square().sum()
    torch.testing.assert_close(lost, singular[8:].square().sum(), rtol=1e-8, atol=0)
    for layer in "12":
        attention, reading = model.layers[layer].attention, model.layers[layer].attention.cache.reading
        for name in ("wk", "wv"):
            torch.testing.assert_close(getattr(reading, name), getattr(attention, name).weight @ directions)
        assert torch.equal(attention.cache.wq.weight, attention.wq.weight)
    assert model.memory.stores == {} and model.memory.moments is None


def losses_and_projection(argv):
    """Train; return the losses and the projection matrix [D, D] of the initial compression."""
    projections = []

    class RecordingTrainer(Trainer):
        def _begin(self, *args):
            last_data_step = super()._begin(*args)
            weight = full(self.model.parts[0].memory.h_proj.weight.detach())
            projections.append((weight.t() @ weight).tolist())
            return last_data_step

    trainer = RecordingTrainer(manager.load(argv), read_ranks())
    trainer.train()
    trainer.metrics.close()
    return [row["loss"] for row in logged_steps(trainer.exports.folder)], projections[0]


def test_pca_initialization_is_the_same_on_any_ranks_and_not_repeated(tmp_path):
    """The run reads documents before its first step; a resume restores the compression instead."""
    texts = write_texts(tmp_path / "data")
    cache = dict(cache_size=64, topk=4, cache_dtype="float32", init="pca", track_hits=True)
    options = {f"adapter__neurocache__{name}": value for name, value in cache.items()}
    options |= dict(task__kind="documents", adapter__kind="neurocache", training__steps=2, training__seq_len=16)
    options |= dict(checkpoint__enable=True, training__local_batch_size=4, training__global_batch_size=8)
    ((losses, projection),) = run_ranks(1, losses_and_projection, arguments(tmp_path / "one", texts, **options))
    spread = options | dict(training__local_batch_size=2, parallelism__data_parallel_shard_degree=2)
    (sharded_losses, sharded_projection), _ = run_ranks(
        2, losses_and_projection, arguments(tmp_path / "two", texts, **spread)
    )
    # other batch sizes round the states, and so the directions, by more than sums in another order do
    torch.testing.assert_close(torch.tensor(sharded_projection), torch.tensor(projection), rtol=0, atol=1e-4)
    assert sharded_losses[0] == pytest.approx(losses[0], rel=1e-3)
    ((resumed_losses, trained_projection),) = run_ranks(
        1, losses_and_projection, arguments(tmp_path / "one", texts, **options | dict(training__steps=3))
    )
    assert resumed_losses[:2] == losses and len(resumed_losses) == 3
    assert not torch.allclose(torch.tensor(trained_projection), torch.tensor(projection), atol=1e-4)
    both = [[row for row in logged_steps(tmp_path / name) if "loss" in row][0] for name in ("one", "two")]
    for name in ("cache_hits", "cache_same_token", "cache_filled", "cache_norm"):
        assert both[0][name] == pytest.approx(both[1][name], rel=0.02), (
            name
        )  # ties between scores may resolve to other entries


def test_pca_without_compression_is_refused():
    with pytest.raises(JobError, match='compression: allowed: more than 1 with init = "pca"'):
        remembering(compression=1, init="pca")
