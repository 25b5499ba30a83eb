"""The launcher of a machine: starts its ranks, passes signals on, and leaves no process behind.

Needs no torch and, on a single machine, listens on no socket. It reads only memory that it shares with its ranks.
"""
