"""lightck: asynchronous, layer-wise, crash-safe checkpoints for PyTorch training.

handle = lightck.attach(model)
info = lightck.restore(model)
"""

import os
from importlib.metadata import PackageNotFoundError, version

from lightck.capture.extras import at_forward, at_step
from lightck.capture.sampler import ResumableSampler
from lightck.checkpointer import attach
from lightck.config import Config
from lightck.errors import (
    ConfigError,
    CoordinationError,
    CorruptSnapshotError,
    DivergenceError,
    LightckError,
    NoSnapshotError,
    PersistError,
    PmdkMissingError,
    PreviousPersistError,
    RegionBusyError,
    RegionError,
    RegionFormatError,
    RegionFullError,
    RegionIOError,
    RestoreMismatchError,
    StateError,
    TornSnapshotError,
    UnrestoredError,
    WaitTimeoutError,
)
from lightck.handle import Handle
from lightck.load import load, snapshots
from lightck.restore import restore
from lightck.types import Failure, Layerwise, Moment, Policy, RestoreInfo, Saved, Stats

if "LIGHTCK_CHAOS" in os.environ:  # `lightck chaos` has started this process
    from lightck.failure.chaos import around_restore

    restore = around_restore(restore)

try:
    __version__ = version("lightck")
except PackageNotFoundError:  # run from a checkout that was never installed
    __version__ = "0+unknown"

__all__ = [
    "Config",
    "ConfigError",
    "CoordinationError",
    "CorruptSnapshotError",
    "DivergenceError",
    "Failure",
    "Handle",
    "Layerwise",
    "LightckError",
    "Moment",
    "NoSnapshotError",
    "PersistError",
    "PmdkMissingError",
    "Policy",
    "PreviousPersistError",
    "RegionBusyError",
    "RegionError",
    "RegionFormatError",
    "RegionFullError",
    "RegionIOError",
    "RestoreInfo",
    "ResumableSampler",
    "RestoreMismatchError",
    "Saved",
    "StateError",
    "Stats",
    "TornSnapshotError",
    "UnrestoredError",
    "WaitTimeoutError",
    "at_forward",
    "at_step",
    "attach",
    "load",
    "restore",
    "snapshots",
]
