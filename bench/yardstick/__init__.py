"""The yardstick of all results: a synchronous non-temporal copy, built from `ntcopy.c`."""

from bench.yardstick.kernels import Kernels, SyncCopy

__all__ = ["Kernels", "SyncCopy"]
