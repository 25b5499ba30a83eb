"""Tests of the steps that `torchtitan verify` chooses; tests/training/test_verification.py has the command."""

from torchtitan.commands.verify import chosen_steps


def test_the_last_step_is_always_chosen():
    for seed in range(20):
        steps = chosen_steps(list(range(1, 61)), 3, seed)
        assert len(set(steps)) == 3 and steps[-1] == 60 and steps == sorted(steps)
    assert chosen_steps([7], 3, 0) == [7]
