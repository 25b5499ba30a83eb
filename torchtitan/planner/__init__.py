"""Predict what a job needs of its GPUs before it runs: memory, traffic and time, and find the fastest plan."""
