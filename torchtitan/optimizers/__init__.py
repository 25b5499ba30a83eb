"""Optimizers by name, and their assembly for a model."""

from torchtitan.optimizers.build import OPTIMIZERS, Optimizers, OptimizersInBackward, build_optimizers

__all__ = ["OPTIMIZERS", "Optimizers", "OptimizersInBackward", "build_optimizers"]
