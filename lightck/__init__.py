"""lightck: asynchronous, layer-wise, crash-safe checkpoints for PyTorch training.

handle = lightck.attach(model)
info = lightck.restore(model)
"""

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
from lightck.types import Layerwise, Moment, Policy, RestoreInfo, Stats

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
