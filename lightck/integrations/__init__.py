"""Frameworks' own loops, checkpointed by a few lines; each module imports one framework."""
