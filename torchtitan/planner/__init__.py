"""Memory and communication of a rank, estimated by one step on tensors without values."""
