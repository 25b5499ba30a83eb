"""The learning rate as a pure function of the step. No torch."""
