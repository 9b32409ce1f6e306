"""The small state of every step, kept for the moment of a failure."""
