"""What a cache begins with where it looks at the documents first: principal directions, against an SVD."""

import pytest
import torch

from tests.support.jobs import arguments, full, logged_steps, write_texts
from tests.support.pool import run_ranks
from tests.support.remembering import remembering, segments
from torchtitan.adapters.neurocache.adapter import principal_directions
from torchtitan.config import manager
from torchtitan.core.errors import JobError
from torchtitan.process.ranks import read_ranks
from torchtitan.training.trainer import Trainer


def test_principal_directions_lose_the_least():
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
def test_a_compression_keeps_what_states_have_most_of(family):
    """Of all that is there of the storing layers' states, and of nothing that fills up."""
    how = dict(layers=3, retrieval_map={"1": 1, "2": 2}, init="pca")
    model, installed = remembering(family, torch.float64, **how)
    seen, filled = [], torch.tensor([8, 3])

    def saw(module, inputs, out):
        seen.append(torch.cat([row[:count] for row, count in zip(out, filled.tolist(), strict=True)]))

    model.eval()
    for layer in "12":
        model.layers[layer].attention_norm.register_forward_hook(saw)

    def run_batch(batch):
        before = len(seen)
        model(batch, begins=torch.tensor([True, False]), filled=filled)
        installed.after_batch([model])
        del seen[before + 1 :: 2]  # the block norms again what was looked at

    with torch.no_grad():
        installed.before_training([model], run_batch, lambda tokens: (), lambda count: segments(4))
    states = torch.cat(seen)
    kept = model.memory.h_proj.weight.t()  # [D, C]
    singular = torch.linalg.svdvals(states)
    lost = (states - states @ kept @ kept.t()).square().sum()
    torch.testing.assert_close(lost, singular[8:].square().sum(), rtol=1e-8, atol=0)
    for layer in "12":
        own, reading = model.layers[layer].attention, model.layers[layer].attention.cache.reading
        for name in ("wk", "wv"):
            torch.testing.assert_close(getattr(reading, name), getattr(own, name).weight @ kept)
        assert torch.equal(own.cache.wq.weight, own.wq.weight)
    assert model.memory.stores == {} and model.memory.moments is None


def begun(argv):
    """Losses, and what is left of a vector by the directions that the compression began with."""
    kept = []

    class Watched(Trainer):
        def begin(self, restart):
            super().begin(restart)
            weight = full(self.model.parts[0].memory.h_proj.weight.detach())
            kept.append((weight.t() @ weight).tolist())

    trainer = Watched(manager.load(argv), read_ranks())
    trainer.train()
    trainer.metrics.close()
    return [row["loss"] for row in logged_steps(trainer.folder)], kept[0]


def test_a_run_begins_so_on_any_ranks_and_not_twice(tmp_path):
    """It looks at its documents before the first step, and a resume goes on."""
    texts = write_texts(tmp_path / "data")
    cache = dict(cache_size=64, topk=4, cache_dtype="float32", init="pca", track_hits=True)
    how = {f"adapter__neurocache__{name}": value for name, value in cache.items()}
    how |= dict(task__kind="documents", adapter__kind="neurocache", training__steps=2, training__seq_len=16)
    how |= dict(checkpoint__enable=True, training__local_batch_size=4, training__global_batch_size=8)
    ((losses, kept),) = run_ranks(1, begun, arguments(tmp_path / "one", texts, **how))
    spread = how | dict(training__local_batch_size=2, parallelism__data_parallel_shard_degree=2)
    (others, same), _ = run_ranks(2, begun, arguments(tmp_path / "two", texts, **spread))
    # states of other batches are rounded otherwise, and directions with it, by more than the sums are
    torch.testing.assert_close(torch.tensor(same), torch.tensor(kept), rtol=0, atol=1e-4)
    assert others[0] == pytest.approx(losses[0], rel=1e-3)
    ((again, learned),) = run_ranks(1, begun, arguments(tmp_path / "one", texts, **how | dict(training__steps=3)))
    assert again[:2] == losses and len(again) == 3
    assert not torch.allclose(torch.tensor(learned), torch.tensor(kept), atol=1e-4)
    both = [[row for row in logged_steps(tmp_path / name) if "loss" in row][0] for name in ("one", "two")]
    for name in ("cache_hits", "cache_same_token", "cache_filled", "cache_norm"):
        assert both[0][name] == pytest.approx(both[1][name], rel=0.02), name  # hits of equal scores may be others


def test_without_compression_there_is_nothing_to_choose():
    with pytest.raises(JobError, match='compression: allowed: more than 1 with init = "pca"'):
        remembering(compression=1, init="pca")
