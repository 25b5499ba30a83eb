"""Tensors of a low-rank adapter."""


def adapter_tensors(model, adapter):
    """Return the tensors that the adapter added."""
    return {name: tensor.detach() for name, tensor in model.state_dict().items() if name in adapter.added_parameters}
