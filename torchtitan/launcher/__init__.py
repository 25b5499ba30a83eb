"""The launcher of a machine: starts its ranks, passes signals on, and leaves no process behind.

Needs no torch and, on a single machine, listens on nothing. It reads only shared memory of its own ranks.
"""
