"""The meeting of all ranks at attach and restore: an error on one rank is raised on all of them.

No rank waits for ever for one that failed.

    with meeting("attach") as ranks:
        ...                                # whatever may fail here, on this rank alone
        ranks.agree(lambda rounds: ...)    # a round; raises the same on every rank
        ...
        ranks.leave()                      # from here on no rank waits for another

A single rank holds no meeting: `rounds` is None, and nothing happens.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch.distributed as dist

from lightck.distributed.rounds import AgreementRounds, Message
from lightck.distributed.store import JobStore, bounded, default_store
from lightck.distributed.topology import here
from lightck.errors import CoordinationError, LightckError, StoreError

MOST_S = 120.0
"""The longest wait of ranks for each other at attach and restore, unless torch's own is less."""
_GRACE_S = 10.0  # for messages after the last rank has come

T = TypeVar("T")

_rounds: tuple[Any, AgreementRounds] | None = None
"""The default process group and the rounds over its store: one count for the process's life."""


@dataclass(frozen=True, slots=True)
class Joining:
    """The facts by which a replacement of a lost rank joins the others in mid-training.

    Attributes:
        step: the step that it has to restore; the others stand behind it.
        progress: what its commit barrier goes on from.
        refuse: called with the reason if it cannot join: all ranks are restarted.
        path: of the job's regions.
        restored: the steps that the first life of the job has restored, by path; None: nothing.
    """

    step: int
    progress: Any
    refuse: Callable[[str], object]
    path: str
    restored: Mapping[str, int | None]

    def step_at(self, path: str | os.PathLike[str]) -> int | None:
        """Return the step to restore from a path: of another one than the job's, as at first.

        Raises:
            CoordinationError: the first life has restored from no such path.
        """
        name = os.fspath(path)
        if name == self.path:
            return self.step
        if name not in self.restored:
            raise CoordinationError(f"it restores {name}, and the first life of the job did not")
        return self.restored[name]


class StandIn(Protocol):
    """Recovery in place, as far as it has a part in the meetings of this process."""

    def rendezvous(self, kind: str) -> Rendezvous | None:
        """Return the meeting of a replacement, which holds it alone; None: this is none."""
        ...

    def restored(self, path: str, step: int | None) -> None:
        """Note what was restored from a path; None: nothing was there."""
        ...


_stand_in: StandIn | None = None
"""Recovery in place, if this process has it; None: all ranks hold their meetings together."""


def stand_in(recovery: StandIn) -> None:
    """Let a replacement of a lost rank hold its meetings alone (`inplace/`)."""
    global _stand_in
    _stand_in = recovery


def note_restored(path: str | os.PathLike[str], step: int | None) -> None:
    """Note what all ranks have restored from a path; None: nothing was there."""
    if _stand_in is not None:
        _stand_in.restored(os.fspath(path), step)


def rounds_held() -> tuple[int, list[tuple[str, Message]]]:
    """Return the number of the next round, and what was decided in the last meeting."""
    assert _rounds is not None
    return _rounds[1].number, [*_rounds[1].decided]


def go_on_from(number: int) -> None:
    """Take part in the rounds from `number` on: those before were held without this process."""
    global _rounds
    rank, world = here()
    rounds = AgreementRounds(default_store(), rank, world, _patience(), number=number)
    _rounds = (dist.group.WORLD, rounds)


@dataclass(eq=False)
class Rendezvous:
    """One meeting of the ranks, seen from this rank."""

    kind: str
    rank: int = 0
    world: int = 1
    rounds: AgreementRounds | None = None
    left: bool = False
    """True if a failure from here on is this rank's own."""
    joining: Joining | None = None
    """The facts by which a lost rank's replacement joins the others; None: this is none."""

    @property
    def store(self) -> JobStore:
        """Return the job's store; with several ranks only."""
        assert self.rounds is not None and isinstance(self.rounds.store, JobStore)
        return self.rounds.store

    def agree(
        self, ask: Callable[[AgreementRounds | None], T], *, timeout_s: float | None = None
    ) -> T:
        """Hold a round, if there are several ranks; every rank must, in the same order.

        Args:
            ask: called with the rounds, or None with one rank; an exception that it raises is
                raised on every rank.
            timeout_s: the time-out of the round that `ask` holds; None: the usual one.

        Raises:
            CoordinationError: names the ranks that failed or did not come, and why; on every rank.
            StoreError: the store does not answer.
        """
        if self.rounds is None:
            return ask(None)
        rounds, limit_s = self.rounds, self.rounds.timeout_s if timeout_s is None else timeout_s
        seconds = 1.5 * limit_s + _GRACE_S
        try:
            return bounded(f"{self.kind} on rank {self.rank}", seconds, lambda: ask(rounds))
        except BaseException:
            self.left = True  # the others raise, too, or wait in vain for a bounded time
            raise

    def leave(self) -> None:
        """End the meeting for this rank: a failure from here on is this rank's own."""
        self.left = True


@contextmanager
def meeting(kind: str) -> Iterator[Rendezvous]:
    """Hold a meeting; a failure inside, before `leave`, makes every other rank fail, too.

    Args:
        kind: what the ranks want to do together, for messages.
    """
    rank, world = here()
    if world == 1:
        yield Rendezvous(kind)
        return
    if _stand_in is not None and (alone := _stand_in.rendezvous(kind)) is not None:
        try:
            yield alone
        except LightckError as error:
            if alone.joining is not None:
                alone.joining.refuse(str(error))
            raise
        return
    rounds = _over_default_store(rank, world)
    rounds.decided.clear()
    ranks = Rendezvous(kind, rank, world, rounds)
    try:
        yield ranks
    except BaseException as error:
        if not ranks.left:
            ranks.leave()
            why = f"{type(error).__name__}: {error}"
            # A store that is away must not hide the error of this rank.
            with suppress(StoreError):
                bounded(kind, _GRACE_S, lambda: rounds.fail(kind, why))
        raise


def _over_default_store(rank: int, world: int) -> AgreementRounds:
    global _rounds
    group = dist.group.WORLD
    if _rounds is None or _rounds[0] is not group:
        # A new group may have the old group's store: keys go on from the last round.
        number = _rounds[1].number if _rounds else 0
        rounds = AgreementRounds(default_store(), rank, world, _patience(), number=number)
        _rounds = (group, rounds)
    return _rounds[1]


def _patience() -> float:
    store: Any = dist.distributed_c10d._get_default_store()
    own: timedelta = store.timeout
    return min(MOST_S, own.total_seconds())
