"""Define the commit barrier, which says which steps are due and which snapshots count.

The pipeline knows no ranks. It tells the barrier what becomes of every due step on this rank,
exactly once: opened before the slot's invalidation, then committed here, or lost. The step's
outcome over all ranks is its *fate*; a snapshot counts when that is `whole`: every rank has
committed it. The barrier of several ranks is in `lightck.distributed.commit.distributed_barrier`,
that of one is `SingleProcessBarrier`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from lightck.errors import DeviceError, LightckError, PreviousPersistError, RegionIOError
from lightck.types import Fate, Moment, Policy


class CommitBarrier(Protocol):
    """Commit barrier of the job, as the pipeline sees it.

    For any thread, with the checkpointer's lock held. Only `wait`, `close` and `leave` wait.
    """

    alone: bool
    """True if no other rank takes part: the next step then makes up for one that is skipped."""

    def begin(self) -> int | None:
        """Begin, as the last of attach that may fail on one rank alone.

        Returns the timeline that the ranks agreed on; None: a single rank draws its own.
        """
        ...

    def due(self, moment: Moment, policy: Policy) -> bool:
        """Tell whether the step that ends now is due; every rank gets the same answer."""
        ...

    def request(self, step: int) -> bool:
        """Make the last step due, as every rank does now; return False if it had its turn."""
        ...

    def opening(self, step: int) -> str | None:
        """Announce that a slot is about to be invalidated for a due step.

        Returns why no snapshot of it may be opened; None if one may. Asked again for the same step
        it gives the same answer, unless the step was lost meanwhile.
        """
        ...

    def sample(self, step: int) -> None:
        """Note that a due step's snapshot is open, and that this thread is at forward start.

        Samples of what several ranks hold alike are taken now: nothing changes it meanwhile.
        """
        ...

    def committed(self, step: int, form: bytes) -> None:
        """Note that this rank's record is durable; `form`, a fingerprint, must be alike on all."""
        ...

    def lost(self, step: int, why: str, *, for_good: bool = False) -> None:
        """Note that this rank has no snapshot of the step; ignored if that has had its turn.

        `for_good`: this rank takes no more snapshots.
        """
        ...

    def fate(self, step: int) -> Fate:
        """Return the fate of a step that this rank has committed, as far as it is known here."""
        ...

    def why_dead(self, step: int) -> str:
        """Say which rank made the step dead, so that its snapshot counts nowhere, and why."""
        ...

    def wait(self, step: int, seconds: float) -> None:
        """Wait until the fate of a step is known, `seconds` at most."""
        ...

    def abandon(self, step: int) -> None:
        """Claim that a step which this rank has committed is dead; at once.

        Its fate is known soon after, and is dead unless another one stands already. Ignored before
        this rank has reported the step, and if the fate is known.
        """
        ...

    def compared(self) -> tuple[int, int]:
        """Return how many samples of replicas were compared, and how many could not be."""
        ...

    def troubles(self) -> Iterable[LightckError]:
        """Return the errors between the ranks since the last call; each is given once."""
        ...

    def begin_close(self) -> None:
        """Note that the next snapshot is the last step's, due or not, here as on every rank."""
        ...

    def close(self, last: int | None, why: str, seconds: float) -> int | None:
        """Agree on the last step with all ranks, and leave; waits about `seconds` at most.

        Args:
            last: the last step, if this rank holds a durable snapshot of it.
            why: why it holds none; empty if there was nothing to copy.
            seconds: how long the others are waited for.

        Returns:
            The last step, which every rank holds; None if there was nothing to copy.

        Raises:
            CoordinationError: not every rank holds it; names those that do not.
        """
        ...

    def leave(self, why: str, seconds: float) -> None:
        """Leave the barrier without a last step, and say so; waits `seconds` at most for fates."""
        ...

    def give_up(self) -> None:
        """Stop, and say nothing: for the other ranks this one goes on, in another process."""
        ...


class SingleProcessBarrier:
    """Barrier of a single rank: the policy decides, and what is committed here counts at once."""

    alone = True

    def begin(self) -> int | None:
        """Return None: no other rank takes part. See `CommitBarrier` for this and all below."""
        return None

    def due(self, moment: Moment, policy: Policy) -> bool:
        """Ask the policy."""
        return policy.due(moment)

    def request(self, step: int) -> bool:
        """Allow it: any number of snapshots may be taken of one step."""
        return True

    def opening(self, step: int) -> str | None:
        """Allow it: no other rank can forbid it."""
        return None

    def sample(self, step: int) -> None:
        """Do nothing: there are no replicas."""

    def committed(self, step: int, form: bytes) -> None:
        """Do nothing: there is no other rank to tell."""

    def lost(self, step: int, why: str, *, for_good: bool = False) -> None:
        """Do nothing: there is no other rank to tell."""

    def fate(self, step: int) -> Fate:
        """Return `Fate.WHOLE`: what this rank has committed counts."""
        return Fate.WHOLE

    def why_dead(self, step: int) -> str:
        """Raise an `AssertionError`: no step of a single rank is dead."""
        raise AssertionError(f"step {step} of one rank is dead")

    def wait(self, step: int, seconds: float) -> None:
        """Do nothing: fates are known at once."""

    def abandon(self, step: int) -> None:
        """Do nothing: fates are known at once."""

    def compared(self) -> tuple[int, int]:
        """Return zeros: there are no replicas."""
        return 0, 0

    def troubles(self) -> Iterable[LightckError]:
        """Return no errors: there is no other rank."""
        return ()

    def begin_close(self) -> None:
        """Do nothing: there is no other rank to tell."""

    def close(self, last: int | None, why: str, seconds: float) -> int | None:
        """Return `last` at once: no other rank has to agree."""
        return last

    def leave(self, why: str, seconds: float) -> None:
        """Do nothing: no other rank waits."""

    def give_up(self) -> None:
        """Do nothing: there is no other rank."""


def is_final(error: BaseException) -> bool:
    """Tell whether no snapshot can follow: the region is latched, or a device has failed."""
    return isinstance(error, RegionIOError | PreviousPersistError | DeviceError)
