"""torch's log of collectives. Importing this file does not import torch."""

import sys


def collectives_log() -> bytes | None:
    """torch 2.13: the collectives of this rank as JSON, to name the rank that is behind; None before torch is used."""
    torch = sys.modules.get("torch")
    return None if torch is None else torch._C._distributed_c10d._dump_fr_trace_json()
