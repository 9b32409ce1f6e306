"""Optimizers whose update writes the snapshot itself: torch's, bit for bit, for the CPU.

Use them in place of torch's; nothing else changes. See `docs/guide/optimizers.md`.
"""

from lightck.optim.optimizers import SGD, Adam, AdamW

__all__ = ["SGD", "Adam", "AdamW"]
