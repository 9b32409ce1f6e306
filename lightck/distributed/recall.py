"""Choose a snapshot together, show that every rank can read it, and only then let each take it.

    look -> [say what is there -> choose -> verify -> say how that went] -> take -> say it is done

What one rank finds damaged leads all of them to the next older one. What a rank cannot do at all is
an error on every rank, which names it (`meeting`); before the last two points nothing has changed.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from lightck.capture.assembled import Assembled
from lightck.distributed.choice import Choice, Key, decide_restore
from lightck.distributed.exchange import Decide, Said
from lightck.distributed.holdings import Holdings
from lightck.distributed.meeting import Meeting
from lightck.errors import (
    CorruptSnapshotError,
    NoSnapshotError,
    RegionBusyError,
    RegionIOError,
)
from lightck.events import event
from lightck.region.place import Place

_TRIES = 8
"""How often to look at most: a trainer may overwrite what was found before it is leased."""
_PASSED_OVER = (CorruptSnapshotError, RegionBusyError, RegionIOError)
_LETTERS = 1000  # of a failure that is told to the others

_LISTED = 12
_SLOWEST_BYTES_S = 100e6  # at which a rank is still believed to be reading

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True)
class Found:
    """A snapshot that was chosen, with this rank's state in it."""

    key: Key
    snapshot: Assembled
    why: str
    """One sentence: why this one."""
    fell_back: tuple[str, ...]
    """Why newer ones were not whole."""
    holdings: Holdings


class Taking(Protocol[T_co]):
    """How a snapshot is taken, in two phases."""

    def __call__(self, found: Found, /) -> contextlib.AbstractContextManager[Callable[[], T_co]]:
        """Hold it and verify all of it, changing nothing; the context gives what then takes it.

        Raises:
            CorruptSnapshotError, RegionIOError, RegionBusyError: take an older one.
        """
        ...


def recall(
    ranks: Meeting, where: Place, step: int | None, taking: Taking[T], *, lends: bool = True
) -> T | None:
    """What `taking` makes of the best snapshot that every rank can take.

    Args:
        ranks: who takes part; every rank calls this with the same step.
        where: of this rank's own region.
        step: only this one; None for the newest.
        taking: see `Taking`.
        lends: a rank beyond the former world takes another's own state.

    Returns:
        None when nothing was ever whole: what single ranks hold may then be overwritten.

    Raises:
        NoSnapshotError: snapshots are there, none is whole, or not the wanted step.
        CoordinationError: a rank failed, or did not come; on every other rank.
        RegionError: the place is not safe or not a region.
    """
    for _ in range(_TRIES):
        with Holdings.opened(where, ranks.rank, ranks.world, lends=lends) as holdings:
            attempt = _Attempt(ranks, holdings, step)
            choice = attempt.choose()
            while choice.key is not None:
                taken = attempt.take(choice, choice.key, taking)
                if taken:
                    return taken[0]
                choice = attempt.choose()
            if choice.void:
                holdings.give_up()
                return None
            problems = [*choice.fell_back, *attempt.damaged, *choice.left]
            text = holdings.nothing_whole(step, problems)
        if not choice.overtaken:
            break
    ranks.part()  # every rank has come to this by itself
    raise NoSnapshotError(text)


@dataclass
class _Attempt:
    """What was found at one look, tried until something holds."""

    ranks: Meeting
    holdings: Holdings
    step: int | None
    damaged: list[str] = field(default_factory=list)
    """What was chosen and could not be read, and why; the same on every rank."""

    def choose(self) -> Choice:
        """The next choice, the same on every rank."""
        while True:
            view = self.holdings.view(self.step)
            choice = Choice.heard(self._together("restore", view.said(), decide_restore))
            if not choice.widen:
                return choice
            self.holdings.widen()

    def take(self, choice: Choice, key: Key, taking: Taking[T]) -> list[T]:
        """Take what was chosen; nothing in the list if a rank finds it damaged."""
        snapshot = self.holdings.assembled(key, early=choice.early)
        assert isinstance(snapshot, Assembled), "chosen, but not offered here"
        fell_back = (*choice.fell_back, *self.damaged)
        found = Found(key, snapshot, choice.why, fell_back, self.holdings)
        with contextlib.ExitStack() as held:
            held.enter_context(self._patient(snapshot))
            taken: list[T] = []
            problem: Exception | None = None
            try:
                finish = held.enter_context(taking(found))
            except _PASSED_OVER as error:
                problem = error
            # A rank that is told of damage here has changed nothing.
            if self._all_well("restore: verified", key, problem):
                try:
                    taken.append(finish())
                except _PASSED_OVER as error:  # the medium has changed its mind
                    problem = error
                if self._all_well("restore: filled", key, problem):
                    return taken
        self.holdings.failed(snapshot)
        return []

    @contextlib.contextmanager
    def _patient(self, snapshot: Assembled) -> Iterator[None]:
        """Wait longer for ranks that read: another's medium may be much slower than this one's."""
        rounds = self.ranks.rounds
        if rounds is None:
            yield
            return
        usual = rounds.timeout_s
        rounds.timeout_s = usual + sum(e.length for e in snapshot.entries) / _SLOWEST_BYTES_S
        try:
            yield
        finally:
            rounds.timeout_s = usual

    def _all_well(self, kind: str, key: Key, problem: Exception | None) -> bool:
        """Whether no rank has met a problem; every rank gets to know all of them."""
        self.holdings.overtaken |= isinstance(problem, RegionBusyError)
        text = str(problem).encode("ascii", "replace").decode()[:_LETTERS] if problem else None
        verdict = self._together(kind, {"problem": text}, _problems)
        for text in verdict["problems"]:
            event("fell_back", logging.WARNING, step=key.step, why=text)
        self.damaged += verdict["problems"]
        return not verdict["problems"]

    def _together(self, kind: str, said: Said, decide: Decide) -> Said:
        return self.ranks.agree(
            lambda rounds: decide([said]) if rounds is None else rounds.agree(kind, said, decide)
        )


def _problems(said: Sequence[Said]) -> Said:
    """Rank 0's word on how the ranks fared."""
    met = [(rank, each["problem"]) for rank, each in enumerate(said) if each["problem"]]
    told = [text if len(said) == 1 else f"rank {rank}: {text}" for rank, text in met]
    return {"problems": told[:_LISTED]}
