"""Errors, registries, constraints and numerics that everything else builds on. Imports nothing of the package."""
