"""The restore by all ranks: choose a snapshot, verify it on every rank, and only then copy it.

    for attempt in restore_attempts(ranks, where, step):    # find the snapshots, and choose one
        with attempt.verifying():
            snapshot = attempt.assemble()                   # or receive it; hold it
            ...                                             # check it, and verify all of its bytes
        if attempt.is_verified():                           # on every rank
            with attempt.copying():
                ...                                         # copy it into the live objects
            if attempt.is_copied():                         # on every rank
                break

A snapshot that one rank finds damaged is missing there from then on: the next attempt is the same
one, sent by other ranks (`healing.py`), or an older one. If a rank cannot go on at all, every rank
raises an error that names it (`rendezvous.py`); before the copy nothing live has changed. A single
process does the same, and sends no message.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field

from lightck.distributed.rendezvous import Rendezvous
from lightck.distributed.restore import healing
from lightck.distributed.restore.healing import Healing, HealingError
from lightck.distributed.restore.local_state import FailureSnapshot
from lightck.distributed.restore.selection import Choice, Key, decide, decide_restore
from lightck.distributed.restore.survey import RegionSurvey, unequal_tensors
from lightck.distributed.rounds import Message
from lightck.errors import (
    CoordinationError,
    CorruptSnapshotError,
    NoSnapshotError,
    RegionBusyError,
    RegionIOError,
)
from lightck.events import event
from lightck.history import item
from lightck.reader.assembly import AssembledSnapshot, Snapshot
from lightck.region.location import Location
from lightck.region.region import Continuation

_TRIES = 8
"""The most scans of the regions: a running job may overwrite a snapshot before it is leased."""
_NEEDS_OLDER = (CorruptSnapshotError, RegionBusyError, RegionIOError)
_LETTERS = 1000  # the longest failure text that is sent to the others, in characters
_LISTED = 12


def restore_attempts(
    ranks: Rendezvous,
    where: Location,
    step: int | None,
    continuation: Continuation | None = None,
    wants_exact: bool = False,
) -> Generator[RestoreAttempt, None, None]:
    """Yield the best snapshot that every rank can restore, then the next one if that failed.

    It ends without one when nothing was ever whole: the model may then overwrite what single ranks
    hold. A wanted step that the slots do not have (any more) is looked for in the history.

    Args:
        ranks: the meeting; every rank calls this with the same step.
        where: the place of this rank's own region.
        step: only this step; None for the newest.
        wants_exact: the newest exact one, however old, if there is one.
        continuation: of the model that is restored; None for a reader, which is no rank of a job.
            With one, a rank beyond the former world takes another's own state.

    Raises:
        NoSnapshotError: snapshots are there, but none is whole, or not the wanted step.
        CoordinationError: a rank failed, or did not come; on every other rank.
        RegionError: the place is not safe or not a region.
    """
    is_rank = continuation is not None
    why_not_here = ""  # in the run's own slots, once the history is looked at
    never_written = False
    for _ in range(_TRIES):
        damaged: list[str] = []
        with RegionSurvey.opened(
            where, ranks.rank, ranks.world, may_take_other_state=is_rank, wants_exact=wants_exact
        ) as survey:
            while (choice := _choose(ranks, survey, step)).key is not None:
                why_not = (*choice.fell_back, *damaged)
                with RestoreAttempt(ranks, survey, choice, choice.key, why_not) as attempt:
                    yield attempt
                damaged += attempt.problems
            anew = choice.never_written and not damaged
            if anew and not why_not_here:
                if problems := [*choice.fell_back, *choice.passed_over]:
                    path, why = survey.where.path, "; ".join(problems)
                    event("begins_anew", logging.WARNING, path=path, why=why)
                if continuation is not None:
                    survey.give_up(continuation)
            never_written = anew and (never_written or not why_not_here)
            problems = [*choice.fell_back, *damaged, *choice.passed_over]
            text = why_not_here or survey.nothing_whole(step, problems)
        if choice.overwritten and not anew:
            continue
        if why_not_here or step is None or where.path == where.file:
            break
        why_not_here, where = text, item.place(where.path, step, ranks.rank)
    ranks.leave()  # every rank comes to the same result by itself
    if not never_written:
        raise NoSnapshotError(text)


def _choose(ranks: Rendezvous, survey: RegionSurvey, step: int | None) -> Choice:
    """Agree on the next snapshot to try, the same on every rank."""
    while (choice := _decided(ranks, survey, step)).scan_all:
        survey.scan_all()
    return choice


def _decided(ranks: Rendezvous, survey: RegionSurvey, step: int | None) -> Choice:
    """Return the decision about what all ranks see, or that each must read more regions first."""
    view, rounds = survey.view(step), ranks.rounds
    if rounds is None:
        return decide([view])
    message = view.to_message()
    try:
        answer = ranks.agree(lambda _: rounds.agree("restore", message, decide_restore))
    except CoordinationError:
        if survey.unreadable is not None:
            raise survey.unreadable from None
        raise
    return Choice.from_message(answer)


@dataclass(eq=False)
class RestoreAttempt:
    """One chosen snapshot, held while it is verified and copied. Used by one thread."""

    ranks: Rendezvous
    survey: RegionSurvey
    choice: Choice
    key: Key
    fell_back: tuple[str, ...]
    """The reasons why newer snapshots were not whole."""
    problems: list[str] = field(default_factory=list)
    """The reasons why this one cannot be restored; the same on every rank."""
    healed: tuple[str, ...] = ()
    """The replicas that ranks received, and from whom, in words; known once it is verified."""
    leases: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    """The leases of the snapshot's slots; what is taken off the stack stays held."""
    _own: AssembledSnapshot | None = None
    """The state that this rank assembled by itself; None if it receives one."""
    _healing: Healing | None = None
    _problem: Exception | None = None

    def __enter__(self) -> RestoreAttempt:
        """Return it; what it holds is given back at the end of the block."""
        return self

    def __exit__(self, *_: object) -> None:
        """Give back what is held."""
        self.leases.close()
        self._healing = None

    @contextlib.contextmanager
    def verifying(self) -> Iterator[None]:
        """Note for `is_verified` that an older snapshot is needed, as is found in the block.

        The block assembles the snapshot, verifies it, and changes nothing live; then it is sent to
        the ranks that lack it.
        """
        healing, rounds = None, self.ranks.rounds
        if self.choice.heals and rounds is not None:  # a single rank is not healed
            heals = dict(self.choice.heals)
            healing = Healing(self.ranks, self.key, heals, rounds.timeout_s)
        self._healing = healing
        try:
            with healing or contextlib.nullcontext():
                yield
                if healing is not None:
                    healing.send()
        except (*_NEEDS_OLDER, HealingError) as error:
            self._problem = error.with_traceback(None)  # which holds the data read so far

    def assemble(self) -> Snapshot:
        """Assemble this rank's snapshot from regions, or receive it; hold it for reading.

        Raises:
            HealingError: the snapshot that this rank was to receive did not come.
            RegionBusyError, CorruptSnapshotError: a trainer overwrites it.
        """
        healing, early = self._healing, self.choice.early
        if healing is not None:
            healing.connect()
        if healing is not None and healing.is_receiver:
            received = healing.receive()
            received.join(self.survey.local_state(self.key, early))
            return received
        own = self.survey.assembled(self.key, early=early)
        assert isinstance(own, AssembledSnapshot), "chosen, but not offered here"
        self._own = own
        if healing is not None:
            healing.announce(own.source if isinstance(own, FailureSnapshot) else own)
        own.lease(self.leases)
        return own

    @contextlib.contextmanager
    def copying(self) -> Iterator[None]:
        """Note for `is_copied` that the medium fails on the second read, in the block."""
        try:
            yield
        except _NEEDS_OLDER as error:
            self._problem = error

    def unequal_tensors(self, snapshot: Snapshot) -> dict[str, str]:
        """Return, by name, why tensors cannot be restored on this number of ranks; else nothing."""
        if isinstance(snapshot, AssembledSnapshot):
            return unequal_tensors(self.survey, self.key, snapshot)
        return {}  # a received snapshot is alike, as stated by the ranks that wrote it

    def is_verified(self) -> bool:
        """Ask whether every rank's snapshot holds; a rank that learns of damage changed nothing."""
        return self._all_agree("restore: verified")

    def is_copied(self) -> bool:
        """Ask whether every rank has copied its snapshot into the live objects."""
        return self._all_agree("restore: filled")

    def _all_agree(self, kind: str) -> bool:
        """Return whether no rank met a problem; the same on every rank.

        A rank whose own snapshot is damaged lacks it from here on, and the others may send it
        theirs. If no rank's own snapshot is damaged, and a replica did not come well, the snapshot
        counts no more.
        """
        problem, rounds = self._problem, self.ranks.rounds
        if isinstance(problem, RegionBusyError):
            self.survey.note_overwritten()
        if rounds is None:
            problems, is_own = [str(problem)] if problem is not None else [], True
        else:
            text = str(problem).encode("ascii", "replace").decode() if problem is not None else ""
            healed = self._healing.description() if self._healing is not None else ""
            own = self._own is not None
            message = {"problem": text[:_LETTERS], "own": own, "healed": healed}
            # Another rank's medium may be slower: all wait longer, one that fails at once, too.
            times = (1 + len(self.choice.heals)) * self.choice.size
            limit_s = rounds.timeout_s + times / healing.SLOWEST_BYTES_S
            answer = self.ranks.agree(
                lambda _: rounds.agree(kind, message, decide_outcome, timeout_s=limit_s),
                timeout_s=limit_s,
            )
            problems, is_own = answer["problems"], answer["own"]
            self.healed = tuple(answer["healed"])
        for text in problems:
            event("fell_back", logging.WARNING, step=self.key.step, why=text)
        self.problems += problems
        if problems and not is_own:
            self.survey.drop(self.key)
        elif problem is not None and self._own is not None:
            self.survey.mark_damaged(self._own)
        return not problems


def decide_outcome(messages: Sequence[Message]) -> Message:
    """Decide the round on rank 0: collect the problems and the replicas received."""
    failed = [(rank, each) for rank, each in enumerate(messages) if each["problem"]]
    healed = [each["healed"] for each in messages if each["healed"]]
    return {
        "problems": [f"rank {rank}: {each['problem']}" for rank, each in failed][:_LISTED],
        "own": any(each["own"] for _, each in failed),
        "healed": healed[:_LISTED],
    }
