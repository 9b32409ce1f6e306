"""lightck: asynchronous, layer-wise, crash-safe checkpoints for PyTorch training.

handle = lightck.attach(model)
info = lightck.restore(model)

What needs torch is imported on first use: the command line and child processes start without it.
"""

import os
import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

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
from lightck.types import Failure, Moment, Policy, RestoreInfo, Saved, Stats

if TYPE_CHECKING:
    import lightck.optim as optim
    from lightck.attach import attach
    from lightck.data.prefetched import Prefetched
    from lightck.data.sampler import ResumableSampler
    from lightck.handle import Handle
    from lightck.load import load, snapshots
    from lightck.restore import restore
    from lightck.state.extras import at_forward, at_step
    from lightck.store import Store

    __version__: str

_LATE = {
    "Handle": "lightck.handle",
    "Prefetched": "lightck.data.prefetched",
    "ResumableSampler": "lightck.data.sampler",
    "Store": "lightck.store",
    "at_forward": "lightck.state.extras",
    "at_step": "lightck.state.extras",
    "attach": "lightck.attach",
    "load": "lightck.load",
    "restore": "lightck.restore",
    "snapshots": "lightck.load",
}
"""The module of each name that is imported on first use."""

__all__ = [
    "Config",
    "ConfigError",
    "CoordinationError",
    "CorruptSnapshotError",
    "DivergenceError",
    "Failure",
    "Handle",
    "LightckError",
    "Moment",
    "NoSnapshotError",
    "PersistError",
    "PmdkMissingError",
    "Policy",
    "Prefetched",
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
    "Store",
    "TornSnapshotError",
    "UnrestoredError",
    "WaitTimeoutError",
    "at_forward",
    "at_step",
    "attach",
    "load",
    "optim",
    "restore",
    "snapshots",
]


class _Package(ModuleType):
    """The class of the package module, in which two functions have the names of their modules."""

    def __setattr__(self, name: str, value: Any) -> None:
        """Bind the function to the name that an import of `lightck.restore` binds to the module."""
        if isinstance(value, ModuleType) and _LATE.get(name) == value.__name__:
            value = _made(name, value)
        super().__setattr__(name, value)

    def __reduce__(self) -> Any:
        """Be pickled by name, as any module by those who pickle modules: Ray, for a function's."""
        return import_module, (self.__name__,)


def _made(name: str, module: ModuleType) -> Any:
    value = getattr(module, name)
    if name == "restore" and "LIGHTCK_CHAOS" in os.environ:  # set by `lightck chaos`
        from lightck.failure.fault_plan import with_restore_faults

        value = with_restore_faults(value)
    return value


def __getattr__(name: str) -> Any:
    if name == "__version__":
        value: Any = _version()
    elif name == "optim":
        value = import_module("lightck.optim")
    elif name in _LATE:
        value = _made(name, import_module(_LATE[name]))
    else:
        raise AttributeError(f"module 'lightck' has no attribute {name!r}", name=name)
    globals()[name] = value
    return value


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("lightck")
    except PackageNotFoundError:  # run from a checkout that was never installed
        return "0+unknown"


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})


sys.modules[__name__].__class__ = _Package
