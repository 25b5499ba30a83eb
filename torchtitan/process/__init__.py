"""This process among others: rank, process group, log, heartbeat, exit."""
