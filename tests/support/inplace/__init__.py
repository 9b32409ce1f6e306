"""Ranks of a job as threads of one process, for recovery in place without torchrun."""
