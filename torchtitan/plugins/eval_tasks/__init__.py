"""Answers to lm-eval tasks: `torchtitan evaluate FOLDER --tasks TASKS`."""
