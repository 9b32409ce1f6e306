"""Give tests the parts inside a handle that they look at: no test reaches in itself."""

from __future__ import annotations

import lightck
from lightck.failure.watchdog import HandleGuard
from lightck.loop.checkpointer import Checkpointer
from lightck.loop.hooks import Hooks
from lightck.pipeline.pipeline import InflightSnapshot, Pipeline


def checkpointer(handle: lightck.Handle) -> Checkpointer:
    """Return what follows the loop."""
    return handle._checkpointer


def pipeline(handle: lightck.Handle) -> Pipeline:
    """Return what has the snapshots under way."""
    return handle._checkpointer.pipeline


def window(handle: lightck.Handle) -> InflightSnapshot | None:
    """Return the snapshot whose sources must not change now."""
    return handle._checkpointer.pipeline.window


def hooks(handle: lightck.Handle) -> Hooks:
    """Return the hooks of the handle."""
    return handle._hooks


def guard(handle: lightck.Handle) -> HandleGuard:
    """Return the handle's entry with the watchdog; the failure path is armed."""
    assert handle._guard is not None
    return handle._guard
