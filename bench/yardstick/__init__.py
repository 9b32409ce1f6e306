"""What results are measured against: a synchronous non-temporal copy, built from `ntcopy.c`."""

from bench.yardstick.kernels import Kernels, SyncCopy

__all__ = ["Kernels", "SyncCopy"]
