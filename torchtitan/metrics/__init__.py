"""A run's metrics: rates, memory and MFU, on the console, in metrics.jsonl and to trackers."""
