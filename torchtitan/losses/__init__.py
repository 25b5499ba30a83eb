"""Tasks and their objectives."""
