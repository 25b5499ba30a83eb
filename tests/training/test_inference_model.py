"""Models for inference: the kernels that they compute with."""

import torch

from torchtitan.training import inference_model


def test_a_model_for_inference_does_without_flash_attention_3_on_another_gpu(monkeypatch, caplog):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with caplog.at_level("INFO"):
        assert inference_model.available_attention("fa3", torch.device("cuda")) == "auto"
    assert 'attention_backend = "auto" is used instead' in caplog.text and "compute capability 8.0" in caplog.text
    assert inference_model.available_attention("fa3", torch.device("cpu")) == "fa3"
