"""The trainer, and its parts around a step: batches, restore, validation, exports."""
