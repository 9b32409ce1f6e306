"""Jobs whose regions PMDK maps."""

from __future__ import annotations

from jobs import Plain


class InAPool(Plain):
    settings = {"backend": "pmemobj"}
