"""The trainer and what it needs around a step: batches, restore, validation, exports."""
