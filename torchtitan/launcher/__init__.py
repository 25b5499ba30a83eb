"""What stands over the ranks of a machine: starts them, passes signals on, and sees that none is left behind.

Needs no torch, listens on nothing and reads nothing but shared memory of its own ranks.
"""
