"""Memory of the GPU and pinned memory of the host."""

import torch
from torch.cuda import _pin_memory_utils

record_memory_history = torch.cuda.memory._record_memory_history
"""torch 2.13: starts and ends the log of allocations, for the profiler's snapshots."""
dump_snapshot = torch.cuda.memory._dump_snapshot
"""torch 2.13: writes the log of allocations to a file."""
pin_memory = _pin_memory_utils.pin_memory
"""torch 2.13: pins memory that is shared already, in place, for copies of a background save."""
unpin_memory = _pin_memory_utils.unpin_memory
"""torch 2.13: undoes `pin_memory`."""
