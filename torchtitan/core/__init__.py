"""Errors, registries, constraints and numerics that everything else builds on. Imports only torch_internals."""
