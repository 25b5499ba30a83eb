"""Neurocache with offloaded weights: the cache is on the compute device. The meta device simulates one of the two."""

from types import SimpleNamespace

import pytest
import torch

from tests.support.remembering import read, remembering, segments
from torchtitan.config.job import JobConfig
from torchtitan.job import ResolvedJob
from torchtitan.losses.objective import SummedCrossEntropy
from torchtitan.training.restore import Restorer

ELSEWHERE = torch.device("meta")


@pytest.mark.parametrize("compression", [1, 4])
def test_a_restored_cache_is_on_the_compute_device(compression):
    """Without a compression the memory has no weights that show the device, and other weights may be offloaded."""
    model, installed = remembering(compression=compression, resume_warmup="saved")
    model.train()
    read(model, installed, segments(2))
    saved = installed.state_tensors([model])
    assert saved["0.counts"].tolist() == [16, 16]
    job = ResolvedJob(JobConfig()).with_options({"training.local_batch_size": 2})
    reference = SimpleNamespace(adapter=installed, parts=[model], device=ELSEWHERE, dims=job.layout.dims)
    back = Restorer(job, None, reference, 0, *[None] * 5)._state_to_restore(
        {"degrees": job.layout.dims.all_degrees}, {n: list(t.shape) for n, t in saved.items()}
    )
    assert back.keys() == saved.keys()
    devices = {name: tensor.device for name, tensor in back.items()}
    assert devices.pop("0.clock").type == "cpu"  # the clock stays on the CPU
    assert set(devices.values()) == {ELSEWHERE}


def calibrated_weights(offloaded):
    """Return the weights of a PCA calibration, with or without offloaded weights."""
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


def test_pca_calibration_works_with_offloaded_weights():
    assert torch.equal(calibrated_weights(offloaded=True), calibrated_weights(offloaded=False))


def hit_metrics(offloaded):
    """Return the hit metrics of a few batches, with or without offloaded weights."""
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


def test_hit_metrics_work_with_offloaded_weights():
    assert hit_metrics(offloaded=True) == hit_metrics(offloaded=False) != {}
