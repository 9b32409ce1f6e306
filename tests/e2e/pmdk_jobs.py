"""Jobs whose regions PMDK maps."""

from __future__ import annotations

from jobs import Plain


class ThroughPmem2(Plain):
    settings = {"backend": "pmem2"}


class InAPool(Plain):
    settings = {"backend": "pmemobj"}
