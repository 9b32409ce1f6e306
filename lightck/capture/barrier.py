"""The commit barrier that capture is given says which steps are due, and which count.

Capture knows no ranks. It tells the barrier what becomes of every due step on this rank, exactly
once: opened before the slot's invalidation, then committed here, or lost. What became of the step
over all ranks is its *fate*; a snapshot counts when that is `whole`. `lightck.distributed.job` has
the barrier of several ranks; `Alone` is that of one.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from lightck.errors import DeviceError, LightckError, PreviousPersistError, RegionIOError
from lightck.types import Fate, Moment, Policy


class Barrier(Protocol):
    """Thread: any, the caller holds the recorder's lock; nothing here waits, but `wait`."""

    alone: bool
    """No other rank takes part: a step that slips is made up for by the next."""

    def due(self, moment: Moment, policy: Policy) -> bool:
        """Whether the step that ends now is due, on every rank."""
        ...

    def request(self, step: int) -> bool:
        """Make the last step due, as every rank does now; False if it has had its turn already."""
        ...

    def opening(self, step: int) -> str | None:
        """A slot is about to be invalidated for a due step; or why no snapshot may be opened.

        Asked again for the same step it gives the same answer, unless the step was lost meanwhile.
        """
        ...

    def sample(self, step: int) -> None:
        """Take note that a due step's snapshot is open, and that this thread is at forward start.

        What several ranks hold alike is looked at now: nothing changes it meanwhile.
        """
        ...

    def committed(self, step: int, form: bytes) -> None:
        """This rank's record is durable; `form` must be the same on every rank."""
        ...

    def lost(self, step: int, why: str, *, for_good: bool = False) -> None:
        """This rank has no snapshot of the step; of no effect on one that has had its turn.

        `for_good`: it takes no more snapshots.
        """
        ...

    def fate(self, step: int) -> Fate:
        """What became of a step that this rank has committed, as far as is known here."""
        ...

    def why_dead(self, step: int) -> str:
        """Who made it dead, and why."""
        ...

    def wait(self, step: int, seconds: float) -> None:
        """Wait until the fate of a step is known, or `seconds`."""
        ...

    def compared(self) -> tuple[int, int]:
        """How many samples of replicas were compared, and how many could not be."""
        ...

    def troubles(self) -> Iterable[LightckError]:
        """What went wrong between the ranks since the last call; each is given once."""
        ...

    def begin_close(self) -> None:
        """The next snapshot is that of the last step, due or not, here as on every rank."""
        ...

    def close(self, last: int | None, why: str, seconds: float) -> int | None:
        """Agree on the last step, and part; waits, about `seconds` at most.

        Args:
            last: the last step, if this rank holds a durable snapshot of it.
            why: why it holds none; empty if there was nothing to copy.
            seconds: how long the others are waited for.

        Returns:
            The last step, which every rank holds; None if there was nothing to copy.

        Raises:
            CoordinationError: it is not held by every rank, and by which not.
        """
        ...

    def leave(self, why: str, seconds: float) -> None:
        """Part without a last step, and say so; fates are waited for, `seconds` at most."""
        ...


class Alone:
    """One rank: the policy decides, and what is committed is whole."""

    alone = True

    def due(self, moment: Moment, policy: Policy) -> bool:
        """See `Barrier`; the same holds for all below."""
        return policy.due(moment)

    def request(self, step: int) -> bool:
        """Any number of snapshots may be taken of one step."""
        return True

    def opening(self, step: int) -> str | None:
        """Nobody forbids it."""
        return None

    def sample(self, step: int) -> None:
        """There are no replicas."""

    def committed(self, step: int, form: bytes) -> None:
        """Nobody else wants to know."""

    def lost(self, step: int, why: str, *, for_good: bool = False) -> None:
        """Nobody else wants to know."""

    def fate(self, step: int) -> Fate:
        """Whole at once."""
        return Fate.WHOLE

    def why_dead(self, step: int) -> str:
        """Never."""
        raise AssertionError(f"step {step} of one rank is dead")

    def wait(self, step: int, seconds: float) -> None:
        """There is nothing to wait for."""

    def compared(self) -> tuple[int, int]:
        """There are no replicas."""
        return 0, 0

    def troubles(self) -> Iterable[LightckError]:
        """None."""
        return ()

    def begin_close(self) -> None:
        """Nobody else wants to know."""

    def close(self, last: int | None, why: str, seconds: float) -> int | None:
        """Nobody has to agree."""
        return last

    def leave(self, why: str, seconds: float) -> None:
        """Nobody waits."""


def is_final(error: BaseException) -> bool:
    """The region is latched, or a device has failed: there are no more snapshots."""
    return isinstance(error, RegionIOError | PreviousPersistError | DeviceError)
