"""The exception tree, and the one mapping from native codes to it.

Every error that lightck raises on purpose is a `LightckError`. Messages state values (expected and
actual, step, rank, slot); what a program may want to act on is an attribute as well. All of them
can be pickled, so that they can cross process borders.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

_LISTED = 10  # names listed per kind of difference in one message; the attributes hold all


class LightckError(Exception):
    """Any error that lightck raises on purpose.

    Attributes:
        code: the native `LCK_E_*` code that the error came from; None if it came from elsewhere.
    """

    code: int | None = None


class ConfigError(LightckError, ValueError):
    """A setting is unknown, of the wrong type or impossible; nothing was done."""


class StateError(LightckError, TypeError):
    """Some state could be saved but not restored; raised before anything is saved.

    Attributes:
        path: the position of the state, such as `extras.sampler.queue[3]`; empty when unknown.
    """

    def __init__(self, message: str, *, path: str = "") -> None:
        super().__init__(message)
        self.path = path


class RegionError(LightckError):
    """A region cannot do what was asked; also the fallback for native codes without a class."""


class RegionFormatError(RegionError):
    """The file is not a region, is truncated, or is of another format version."""


class RegionFullError(RegionError):
    """The medium has too little space, or the region cannot grow.

    The message names bytes needed and free.
    """


class RegionBusyError(RegionError):
    """Another process owns the region, or a reader holds the slot."""


class CorruptSnapshotError(RegionError):
    """A checksum or a bound of stored bytes does not hold."""


class RegionIOError(RegionError, OSError):
    """The medium or a system call failed; a region open for writing takes no more snapshots."""


class PmdkMissingError(RegionError):
    """A back end needs a library of PMDK that is not installed.

    The message names its Debian package.
    """


class UnrestoredError(RegionError):
    """`attach` found snapshots neither restored into this model nor recorded from it.

    Nothing was overwritten. Restore them first, choose another path, or pass `overwrite=True`.
    """


class PersistError(LightckError):
    """A snapshot could not be made durable; older snapshots are as they were."""


class PreviousPersistError(PersistError):
    """The region is latched by an earlier failure and takes no more snapshots."""


class TornSnapshotError(LightckError):
    """Tensors changed inside the copy window; the snapshot was dropped.

    Attributes:
        names: the tensors that changed, as far as they are known.
    """

    def __init__(self, message: str, *, names: Iterable[str] = ()) -> None:
        super().__init__(message)
        self.names = tuple(names)


class DivergenceError(LightckError):
    """Ranks that must hold the same bytes do not; the snapshots from there on are suspect.

    Attributes:
        step: the step at which it was found; the difference may be older.
        names: the tensors that differ, as far as they are known.
        ranks: those that differ from the majority; all ranks if no value has a majority.
    """

    def __init__(
        self, message: str, *, step: int = 0, names: Iterable[str] = (), ranks: Iterable[int] = ()
    ) -> None:
        super().__init__(message)
        self.step = step
        self.names = tuple(names)
        self.ranks = tuple(ranks)


class DeviceError(LightckError):
    """A device or its driver failed.

    This process no longer trusts what the device's memory holds.
    """


class NoSnapshotError(LightckError):
    """There is no whole snapshot of the wanted kind."""


class RestoreMismatchError(LightckError):
    """A snapshot and the live state differ in names, shapes or dtypes; no tensor was changed.

    Attributes:
        missing: names that the live state has and the snapshot lacks.
        unexpected: names that the snapshot has and the live state lacks.
        different: name to the difference in words, such as `saved float32[4], live float32[5]`.
    """

    def __init__(
        self,
        message: str,
        *,
        missing: Iterable[str] = (),
        unexpected: Iterable[str] = (),
        different: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.missing = tuple(missing)
        self.unexpected = tuple(unexpected)
        self.different = dict(different or {})

    def __str__(self) -> str:
        parts = [super().__str__()]
        parts += _listing("missing from the snapshot", self.missing)
        parts += _listing("only in the snapshot", self.unexpected)
        parts += _listing("different", [f"{k}: {v}" for k, v in self.different.items()])
        return "\n  ".join(parts)


class WaitTimeoutError(LightckError, TimeoutError):
    """A wait ran out of time; the operation that was waited for goes on."""


class CoordinationError(LightckError, TimeoutError):
    """The ranks could not agree, or not in time; no snapshot of this step becomes visible."""


class StoreError(CoordinationError):
    """The job's store did not answer; whether the call had its effect is not known."""


# Codes of native/include/lightck.h; a test compares the two. A code that is missing here, also one
# of a newer library, becomes a RegionError.
_NATIVE: dict[int, type[LightckError]] = {
    -2: RegionIOError,  # LCK_E_IO
    -3: PreviousPersistError,  # LCK_E_PREVIOUS
    -4: RegionFormatError,  # LCK_E_FORMAT
    -5: CorruptSnapshotError,  # LCK_E_CORRUPT
    -6: NoSnapshotError,  # LCK_E_EMPTY
    -7: RegionBusyError,  # LCK_E_BUSY
    -8: RegionBusyError,  # LCK_E_LEASED
    -9: RegionFullError,  # LCK_E_FULL
    -10: WaitTimeoutError,  # LCK_E_TIMEOUT
    -13: TornSnapshotError,  # LCK_E_MISMATCH
}


def from_native(code: int, text: str, *, context: str) -> LightckError:
    """Make the exception for a native return code; the caller raises it.

    Args:
        code: the negative `LCK_E_*` code that a native function returned.
        text: `lck_last_error()` of the thread that made the call.
        context: what was being done, such as `open region /dev/shm/run/rank-0`.

    Returns:
        An instance of the mapped class, of `RegionError` for codes without one; its `code` is set.
    """
    kind = _NATIVE.get(code, RegionError)
    error = kind(f"{context}: {text or 'no details'} (native code {code})")
    error.code = code
    return error


def _listing(title: str, names: Iterable[str]) -> list[str]:
    every = list(names)
    if not every:
        return []
    rest = len(every) - _LISTED
    tail = f" and {rest} more" if rest > 0 else ""
    return [f"{title} ({len(every)}): {', '.join(every[:_LISTED])}{tail}"]
