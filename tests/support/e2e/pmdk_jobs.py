"""Jobs whose regions PMDK maps."""

from __future__ import annotations

from support.e2e.jobs import Plain


class InAPool(Plain):
    settings = {"backend": "pmemobj"}
