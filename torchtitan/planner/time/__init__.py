"""Time of a step: computation, messages between ranks, and what measured runs say about both."""
