"""A cache lies where the model computes, wherever its weights are; the meta device stands for one of both."""

from types import SimpleNamespace

import pytest
import torch

from tests.support.remembering import read, remembering, segments
from torchtitan.losses.objective import SummedCrossEntropy
from torchtitan.training.restore import Restorer

ELSEWHERE = torch.device("meta")


@pytest.mark.parametrize("compression", [1, 4])
def test_what_is_taken_back_lies_where_the_model_computes(compression):
    """Without a compression the memory has no weights that could tell, and others may be offloaded."""
    model, installed = remembering(compression=compression, resume_warmup="saved")
    model.train()
    read(model, installed, segments(2))
    kept = installed.state_tensors([model])
    assert kept["0.counts"].tolist() == [16, 16]
    task = SimpleNamespace(kind="documents")
    config = SimpleNamespace(training=SimpleNamespace(local_batch_size=2), task=task)
    dims, whole = (
        SimpleNamespace(all_degrees={"ep": 1}),
        SimpleNamespace(adapter=installed, parts=[model], device=ELSEWHERE),
    )
    back = Restorer(config, dims, whole)._state_to_restore(
        {"degrees": {"ep": 1}}, {n: list(t.shape) for n, t in kept.items()}
    )
    assert back.keys() == kept.keys()
    devices = {name: tensor.device for name, tensor in back.items()}
    assert devices.pop("0.clock").type == "cpu"  # the host's
    assert set(devices.values()) == {ELSEWHERE}


def seen(offloaded):
    torch.manual_seed(0)
    model, installed = remembering(dtype=torch.float64, init="pca")
    weights = model.memory.state_dict()
    model.eval()
    if offloaded:
        model.memory.to(ELSEWHERE)

    def calibration(count):
        model.memory.load_state_dict(weights, assign=True)
        yield from segments(2)

    with torch.no_grad():
        installed.before_training([model], lambda batch: read(model, installed, [batch]), lambda n: (), calibration)
    return model.memory.h_proj.weight


def test_states_are_looked_at_where_they_are():
    assert torch.equal(seen(offloaded=True), seen(offloaded=False))


def counted(offloaded):
    torch.manual_seed(0)
    model, installed = remembering(track_hits=True)
    model.loss = SummedCrossEntropy(1)
    model.train()
    for batch in segments(3):
        model(batch, labels=batch.roll(-1)).backward()
        installed.after_batch([model])
    if offloaded:
        model.to(ELSEWHERE)
    return installed.metrics([model])


def test_hits_are_summed_wherever_the_weights_are():
    assert counted(offloaded=True) == counted(offloaded=False) != {}
