"""One process of a run: rank, process group, log, heartbeat, exit code."""
