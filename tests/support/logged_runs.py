"""Metrics of a run that was never trained, and the size of a picture."""

from dataclasses import fields

import torch

from torchtitan.metrics.json_lines import JsonLinesWriter
from torchtitan.metrics.logger import LogOptions, MetricsLogger, RunConstants

CPU = torch.device("cpu")


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def build(folder, clock=None, **options) -> MetricsLogger:
    """Return a logger; `options` are its arguments, and fields of its workload and of its log options."""
    workload = dict(
        total_steps=10,
        device=CPU,
        compute_dtype=torch.bfloat16,
        world_size=2,
        num_parameters=8_030_000_000,
        flops_per_token_full=57.91e9,
        flops_per_token_causal=51.47e9,
    )
    log_options = {field.name: options.pop(field.name) for field in fields(LogOptions) if field.name in options}
    workload |= {field.name: options.pop(field.name) for field in fields(RunConstants) if field.name in options}
    arguments = dict(writes=True, clock=clock or Clock()) | options
    return MetricsLogger(folder, RunConstants(**workload), LogOptions(**{"log_freq": 4} | log_options), **arguments)


def write_run(path, losses, **changes):
    file = JsonLinesWriter(path, None)
    for step, loss in enumerate(losses, start=1):
        file.write({"step": step, "loss": loss, "lr": 1e-3 / step, "tokens_per_second": 5000.0} | changes)
    file.close()


def png_size(path) -> tuple[int, int]:
    head = path.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    return int.from_bytes(head[16:20], "big"), int.from_bytes(head[20:24], "big")
