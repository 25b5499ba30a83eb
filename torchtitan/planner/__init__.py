"""What a job's rank will need of memory, foretold: its step on tensors without values, all of them counted."""
