"""The regions that a rank can read at a path, and what it can put together from them.

    own region -> peers' regions, or all -> whole states (assembled) -> the rank's view

A rank reads its own region, and those of its peers where they share. If another number of ranks
wrote, or its own region is missing, it reads every region below the path (`scan_all`). Rank r takes
over the rank-local state of rank r modulo the number of ranks that wrote.

Buffers, generators, extras and data position belong to one rank; no other has them. Where the rest
of a snapshot is missing, they may still be in the rank's own region (`LocalState`).
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from lightck.distributed.restore.local_state import (
    FailureSnapshot,
    LocalState,
    local_state_of_snapshot,
    local_states_of,
    local_states_of_journal,
)
from lightck.distributed.restore.selection import (
    Key,
    Lineage,
    RankView,
    SnapshotOffer,
    branch_points,
    ruling_lineage,
)
from lightck.distributed.sharding import is_own
from lightck.errors import (
    CoordinationError,
    CorruptSnapshotError,
    RegionError,
    RegionFormatError,
    RegionIOError,
)
from lightck.reader.assembly import AssembledSnapshot, peers_of, share_peers
from lightck.region import location
from lightck.region.backends import select
from lightck.region.location import Location
from lightck.region.native_region import (
    HOLDS_ALL,
    RECORD_JIT,
    Record,
)
from lightck.region.region import (
    Candidate,
    Continuation,
    Recovery,
    Region,
    is_there,
    nothing_whole,
    open_and_recover,
)

_LISTED = 12
_ANY_RANK = -1
"""Stands for the rank of a failure region's snapshot among damaged ones."""


@dataclass(eq=False)
class SurveyedRegion:
    """One region that was opened and read."""

    region: Region
    recovery: Recovery

    @property
    def rank(self) -> int:
        """Return the rank that the region belongs to."""
        return self.region.info.rank

    @property
    def lineage(self) -> Lineage:
        """Return the region's timelines, with the steps up to which ancestors count."""
        info = self.region.info
        kept = [(c.record.timeline, c.record.step) for c in self.recovery.candidates]
        ancestors = [timeline for timeline, _ in info.lineage]
        worlds = [c.record.world for c in self.recovery.candidates]
        of_newest = [c for c in self.recovery.candidates if c.record.timeline == info.timeline]
        return Lineage(
            info.timeline,
            tuple(zip(ancestors, branch_points(ancestors, kept), strict=True)),
            worlds[0] if worlds else info.world,
            info.run_id.hex(),
            self.region.place.file.name,
            max((c.record.wall_time_ns for c in of_newest), default=0),
        )


@dataclass(eq=False)
class RegionSurvey:
    """The regions that one rank has read; closes those that it opened. Used by one thread."""

    where: Location
    """The place of the rank's own region."""
    rank: int
    world: int
    """The number of ranks now."""
    may_take_other_state: bool = True
    """True if a rank beyond the former world takes another rank's own state."""
    wants_exact: bool = False
    """True if an exact snapshot, however old, is wanted rather than an inexact one."""
    regions: list[SurveyedRegion] = field(default_factory=list)
    failure_regions: list[SurveyedRegion] = field(default_factory=list)
    """The failure regions of nodes, whose snapshots are of no single rank."""
    scanned_all: bool = False
    overwritten: bool = False
    """True if a running job was met that overwrites the snapshots found."""
    unreadable: RegionError | None = None
    """Why the rank's own region cannot be opened, where others may have the same state."""
    _dropped: set[Key] = field(default_factory=set)
    """Snapshots that ranks lack and cannot be given."""
    _local_states: dict[int, LocalState | None] = field(default_factory=dict)
    """The rank-local state in each of the own region's snapshots that was read, by its place."""
    _journal: list[LocalState] | None = None
    _whole: dict[Record, tuple[AssembledSnapshot, list[LocalState]]] = field(default_factory=dict)
    """The snapshots of failure regions, with what they have of each rank's own."""
    _problems: list[str] = field(default_factory=list)
    _damaged: set[tuple[int, Record]] = field(default_factory=set)
    """The (rank, record) of each snapshot that turned out to be damaged."""
    _assembled: dict[tuple[int, Record], AssembledSnapshot | str] = field(default_factory=dict)

    @classmethod
    @contextlib.contextmanager
    def opened(
        cls,
        where: Location,
        rank: int,
        world: int,
        *,
        may_take_other_state: bool = True,
        wants_exact: bool = False,
    ) -> Iterator[RegionSurvey]:
        """Read the rank's own region and yield the result; close every region at the end.

        With several ranks, a region that cannot be opened is noted in `unreadable`.

        Raises:
            RegionError: the place is not safe, or what lies there is no region.
        """
        found = cls(where, rank, world, may_take_other_state, wants_exact)
        try:
            if where.exists and not select.is_blank(where):
                try:
                    found._survey(where)
                except (RegionFormatError, CorruptSnapshotError, RegionIOError) as error:
                    if world == 1:
                        raise
                    found.unreadable = error
                    found._problems.append(str(error))
            found._survey_failure_regions()
            yield found
        finally:
            found.close()

    @classmethod
    @contextlib.contextmanager
    def of_files(
        cls, where: Location, files: Sequence[Location], rank: int = 0
    ) -> Iterator[RegionSurvey]:
        """Read all of these regions, for one reader that is no rank of a job.

        Raises:
            RegionError: the place is not safe, or a file is no region.
        """
        found = cls(where, rank, 1, may_take_other_state=False, scanned_all=True)
        try:
            for each in files:
                found._survey(each)
            found._survey_failure_regions()
            yield found
        finally:
            found.close()

    def close(self) -> None:
        """Close every region that is still held."""
        while self.regions:
            self.regions.pop().region.close()
        while self.failure_regions:
            self.failure_regions.pop().region.close()

    @property
    def own(self) -> SurveyedRegion | None:
        """Return the rank's own region, if it is there."""
        return next((each for each in self.regions if self._is_own(each)), None)

    def give_up(self, continuation: Continuation) -> None:
        """Declare that the own region's snapshots have never counted, so that attach may go on."""
        own = self.own
        continuation.begin_anew()
        if own is not None and not own.recovery.is_empty:
            continuation.disown(own.region)

    def keep(self, region: Region) -> None:
        """Take a region out of those that `close` closes; the caller closes it."""
        self.regions = [each for each in self.regions if each.region is not region]
        others = (each for each in self.failure_regions if each.region is not region)
        self.failure_regions = [*others]

    def scan_all(self) -> None:
        """Read every other region below the path, too; a failure is noted as a problem."""
        self.scanned_all = True
        for where in location.every_rank(self.where):
            self._survey_once(where)
        self._assembled.clear()

    def view(self, step: int | None) -> RankView:
        """Return this rank's view of the snapshots: of `step`, or of all if it is None."""
        offers, problems = [], list(self._problems)
        for surveyed in (*self.regions, *self.failure_regions):
            problems += surveyed.recovery.problems
        for key in self._keys(step):
            found = self.assembled(key)
            if key in self._dropped:
                continue
            if isinstance(found, AssembledSnapshot):
                offers.append(self._offer(key, found))
            elif found and not offers:  # what is older than a whole snapshot is not missed
                problems.append(found)
        offers = self._whole_over_ranks(offers, problems)
        problems += self._absent_regions()
        # Peers' regions know no more of timelines than the own one does, and may be missing.
        deciding = [each for each in self.regions if self.scanned_all or self._is_own(each)]
        deciding += self._counting_failure_regions()
        return RankView(
            self.where.common,
            step,
            tuple(offers),
            ruling_lineage([each.lineage for each in deciding]) if deciding else None,
            tuple(problems),
            self.scanned_all,
            self._is_own_missing(),
            not problems
            and all(e.recovery.is_empty for e in (*self.regions, *self.failure_regions)),
            self.overwritten or self._is_overwritten(step),
            self._fresh_timeline(),
            self.wants_exact,
            *self._told_to_others({offer.key for offer in offers}, step),
        )

    def local_state(self, key: Key, early: bool) -> LocalState | None:
        """Return this rank's own state of one instant of a snapshot, from its region or journal."""
        held = self._own_local_states(())
        return next((each for each in held if (each.key, each.early) == (key, early)), None)

    def assembled(
        self, key: Key, rank: int | None = None, *, early: bool = False
    ) -> AssembledSnapshot | str:
        """Return a rank's state in a snapshot, or why it cannot be put together, or "" if unknown.

        Args:
            key: which snapshot.
            rank: one of those that wrote it; None: the one whose own state this rank takes over.
            early: prefer the early instant if there are two; else the exact one.
        """
        why = ""
        rank = self.former(key.world) if rank is None else rank
        for surveyed, own in self._of(key, rank, early):
            mark = (surveyed.rank, own.record)
            if mark not in self._assembled:
                self._assembled[mark] = self._assemble(surveyed, own)
            found = self._assembled[mark]
            if isinstance(found, AssembledSnapshot):
                return found
            why = found
        return self._joined(key, rank, early) or why

    def _joined(self, key: Key, rank: int, early: bool) -> FailureSnapshot | None:
        """Return a rank's state in a failure region, the wanted instant first; None: it has none.

        What is the rank's own may be in its own region, too.
        """
        for source, states in self._whole_snapshots():
            if Key.of(source.record) != key:
                continue
            own = [state for state in states if state.rank == rank]
            if rank == self.former(key.world):
                own += [state for state in self._own_local_states(()) if state.key == key]
            for state in sorted(own, key=lambda state: state.early != early):
                with contextlib.suppress(CorruptSnapshotError):
                    return FailureSnapshot.join(source, state)
        return None

    def _whole_snapshots(self) -> list[tuple[AssembledSnapshot, list[LocalState]]]:
        """Return the snapshots of failure regions that are not damaged."""
        found = []
        for surveyed in self.failure_regions:
            for candidate in surveyed.recovery.candidates:
                record = candidate.record
                if (_ANY_RANK, record) in self._damaged or record.share_digest != HOLDS_ALL:
                    continue  # a share is none of a failure region's
                if record not in self._whole:
                    source = AssembledSnapshot.of([(surveyed.region, candidate)])
                    self._whole[record] = source, local_states_of(source)
                found.append(self._whole[record])
        return found

    def ranks_of(self, key: Key) -> set[int]:
        """Return the ranks of whose state in a snapshot something is there."""
        told = (state for _, states in self._whole_snapshots() for state in states)
        return {
            candidate.record.rank
            for surveyed in self.regions
            for candidate in surveyed.recovery.candidates
            if Key.of(candidate.record) == key
        } | {state.rank for state in told if state.key == key}

    def lacks(self, key: Key) -> list[str]:
        """List what is missing of a snapshot, over all ranks that wrote it; empty if it is whole.

        Only the first 12 are listed: a record may claim any number of ranks.
        """
        states = ((rank, self.assembled(key, rank)) for rank in range(key.world))
        lacking = (
            f"rank {rank}: {state or 'nothing of it is there'}"
            for rank, state in states
            if not isinstance(state, AssembledSnapshot)
        )
        return list(itertools.islice(lacking, _LISTED))

    def excludes(self, key: Key) -> str:
        """Return why a snapshot does not count; empty if it does, or if that is not known."""
        try:
            every = (*self.regions, *self._counting_failure_regions())
            return ruling_lineage([surveyed.lineage for surveyed in every]).excludes(key)
        except CoordinationError:  # regions of two jobs: each stands for itself
            return ""

    def former(self, world: int) -> int:
        """Return the rank, of those that wrote, whose own state this rank takes over."""
        return self.rank % world if self.may_take_other_state else self.rank

    def mark_damaged(self, snapshot: AssembledSnapshot) -> None:
        """Note that a snapshot turned out to be unreadable: it is offered no more."""
        if isinstance(snapshot, FailureSnapshot):
            self._damaged.add((_ANY_RANK, snapshot.source.record))
        else:
            self._damaged.add((snapshot.record.rank, snapshot.record))

    def drop(self, key: Key) -> None:
        """Note that ranks cannot be given a snapshot that they lack: it counts no more."""
        self._dropped.add(key)

    def nothing_whole(self, step: int | None, problems: Sequence[str]) -> str:
        """Describe why there is no snapshot to restore, and what is there."""
        wanted: int | Literal["latest"] = "latest" if step is None else step
        if len(self.regions) == 1:
            held = self.regions[0]
            return nothing_whole(held.region.place, held.recovery, wanted, problems)
        lines = [f"{self.where.path}: no whole snapshot (wanted: {wanted})"]
        return "\n  ".join([*lines, *problems])

    # ---- inside ----

    def _offer(self, key: Key, found: AssembledSnapshot) -> SnapshotOffer:
        alike = self.world > 1 and found.replica is not None
        size = sum(e.length for e in found.entries)
        other = self.assembled(key, early=True) if alike and not found.early else ""
        early_too = isinstance(other, AssembledSnapshot) and other.early
        return SnapshotOffer(key, found.early, found.suspect, alike, size, early_too)

    def _told_to_others(
        self, offered: set[Key], step: int | None
    ) -> tuple[tuple[tuple[Key, bool], ...], str]:
        """Return the last two fields of `RankView`, for other ranks; empty if there are none."""
        if self.world == 1:
            return (), ""
        own = {
            (state.key, state.early): None
            for state in self._own_local_states(offered)
            if step in (None, state.key.step)
        }
        why = (
            ""
            if self.unreadable is None
            else f"{type(self.unreadable).__name__}: {self.unreadable}"
        )
        return tuple(own), why

    def _own_local_states(self, offered: Collection[Key]) -> list[LocalState]:
        """Return the rank-local states of snapshots that are not offered, then of the journal.

        Each is read once, when it is first asked for.
        """
        own = self.own
        if own is None:
            return []
        found = []
        for i, candidate in enumerate(own.recovery.candidates):
            if Key.of(candidate.record) not in offered:
                if i not in self._local_states:
                    self._local_states[i] = local_state_of_snapshot(own.region, candidate)
                found.append(self._local_states[i])
        if self._journal is None:
            self._journal = local_states_of_journal(own.region)
        return [each for each in (*found, *self._journal) if each and each.key not in offered]

    def _whole_over_ranks(
        self, offers: list[SnapshotOffer], problems: list[str]
    ) -> list[SnapshotOffer]:
        """Return the offers that are whole over all ranks; all of them if none is.

        This is for a reader that is no rank of a job. Where the other ranks' regions are on other
        nodes, none is whole. Why the others are not is added to `problems`.
        """
        if self.may_take_other_state or not self.scanned_all:
            return offers
        lacking = {offer.key: self.lacks(offer.key) for offer in offers}
        whole = [offer for offer in offers if not lacking[offer.key]]
        if whole:
            problems += [f"step {key.step}: {why[0]}" for key, why in lacking.items() if why]
        return whole or offers

    def _counting_failure_regions(self) -> list[SurveyedRegion]:
        """Return those that hold something: an empty one says nothing of the ranks' timelines."""
        return [each for each in self.failure_regions if each.recovery.candidates]

    def _survey_failure_regions(self) -> None:
        """Read the failure regions beside the regions; one that cannot be read is a problem."""
        for where in location.failure_files(self.where):
            try:
                self.failure_regions.append(SurveyedRegion(*open_and_recover(where)))
            except RegionError as error:
                self._problems.append(str(error))

    def _survey(self, where: Location) -> SurveyedRegion:
        surveyed = SurveyedRegion(*open_and_recover(where))
        self.regions.append(surveyed)
        return surveyed

    def _survey_once(self, where: Location) -> None:
        """Read a region that is not the rank's own, unless it was read before."""
        if any(where.file == each.region.place.file for each in self.regions):
            return
        try:
            if not select.is_blank(where):
                self._survey(where)
        except RegionError as error:
            self._problems.append(str(error))

    def _is_own(self, surveyed: SurveyedRegion) -> bool:
        return surveyed.region.place.file == self.where.file

    def _fresh_timeline(self) -> int:
        """Return the own region's timeline if nothing due was ever committed in it; else 0.

        See `RankView.fresh_timeline`.

        A snapshot that was saved at a failure does not count here: it was for this rank alone, and
        kept no other from its slot.
        """
        own = self.own
        if own is None or own.region.info.lineage:
            return 0
        due = any(not c.record.flags & RECORD_JIT for c in own.recovery.candidates)
        return 0 if due or own.recovery.problems else own.region.info.timeline

    def _is_own_missing(self) -> bool:
        own = self.own
        if own is not None and not own.recovery.is_empty:
            return False
        return len(location.every_rank(self.where)) > (own is not None)

    def _absent_regions(self) -> list[str]:
        """Say that no region was found of the rank whose own state this one takes over."""
        every = [c.record for each in self.regions for c in each.recovery.candidates]
        if not every:
            return []
        newest = max(every, key=lambda record: record.wall_time_ns)
        former = self.former(newest.world)
        if any(surveyed.rank == former for surveyed in self.regions):
            return []
        return [f"{self.where.path}: no region of rank {former}, which wrote step {newest.step}"]

    def note_overwritten(self) -> None:
        """Take note that a running job has overwritten a snapshot that was found."""
        self.overwritten = True

    def _is_overwritten(self, step: int | None) -> bool:
        return not all(
            is_there(each.region, c)
            for each in self.regions
            for c in each.recovery.candidates
            if step in (None, c.record.step)
        )

    def _keys(self, step: int | None) -> list[Key]:
        """Return the snapshots with a part of the rank whose state is taken over; newest first."""
        found: dict[Key, None] = {}
        for surveyed in self.regions:
            for candidate in surveyed.recovery.candidates:
                key = Key.of(candidate.record)
                if step in (None, key.step) and candidate.record.rank == self.former(key.world):
                    found[key] = None
        for source, _ in self._whole_snapshots():
            key = Key.of(source.record)
            if step in (None, key.step):
                found[key] = None
        return sorted(found, key=lambda key: -key.step)

    def _of(self, key: Key, rank: int, early: bool) -> list[tuple[SurveyedRegion, Candidate]]:
        """Return a rank's snapshots of that key: the wanted instant first, then the newest."""
        found = [
            (surveyed, candidate)
            for surveyed in self.regions
            for candidate in surveyed.recovery.candidates
            if candidate.record.rank == rank
            and Key.of(candidate.record) == key
            and (surveyed.rank, candidate.record) not in self._damaged
        ]
        return sorted(found, key=lambda f: (f[1].record.early != early, -f[1].record.sequence))

    def _assemble(self, surveyed: SurveyedRegion, own: Candidate) -> AssembledSnapshot | str:
        try:
            if own.record.share_digest != HOLDS_ALL:
                self._look_at_peers(surveyed, own)
            others = {
                id(candidate): (each.region, candidate)
                for each in self.regions
                for candidate in each.recovery.candidates
                if (each.rank, candidate.record) not in self._damaged
            }
            peers = {c.record.rank: c for c in peers_of(own, [c for _, c in others.values()])}
            sources = [(surveyed.region, own), *(others[id(c)] for c in peers.values())]
            return AssembledSnapshot.of(sources)
        except CorruptSnapshotError as error:
            return str(error)

    def _look_at_peers(self, surveyed: SurveyedRegion, own: Candidate) -> None:
        """Open the regions of the ranks that shared this snapshot's replicated state."""
        if self.scanned_all:
            return
        label = f"{surveyed.region.place.file} step {own.record.step}"
        for rank in share_peers(own, context=label):
            where = location.locate(self.where.path, rank, create=False)
            if where.exists:
                self._survey_once(where)


# ---- tensors that the ranks that wrote a snapshot did not hold alike -----------------------------


def unequal_tensors(survey: RegionSurvey, key: Key, snapshot: AssembledSnapshot) -> dict[str, str]:
    """Return, by name, why a tensor cannot be restored on another number of ranks.

    Where another number of ranks restores a snapshot, each takes over the state of one that wrote.
    That is right for tensors that all of them held alike. Of the rest (experts outside of
    DistributedDataParallel, an optimizer that divides its state among ranks) it would lose what the
    others held. Whether a tensor was alike is known from the snapshot's own statement
    (`RankShare.told`), from its being written in shares, or else from the checksums that every
    rank's region has of it.

    Empty for a snapshot of as many ranks as now. Sharded tensors (DTensors) are not among them:
    they state their places. Nor are buffers, extras and what optimizers keep beside their state:
    each rank has its own of those by rule.
    """
    world = key.world
    if world in (1, survey.world) or snapshot.replica is not None:
        return {}
    rank = snapshot.record.rank
    own = _unshared(snapshot.parts[0].candidate)
    why: dict[str, str] = {}
    for other in _to_compare(survey, key, rank):
        state = survey.assembled(key, other, early=snapshot.early)
        if not isinstance(state, AssembledSnapshot):
            lacking = f"what rank {other} of {world} held of it is not there to compare"
            why = {**dict.fromkeys(own, lacking), **why}
            continue
        theirs = _unshared(state.parts[0].candidate)
        for name in {**own, **theirs}:
            if own.get(name) != theirs.get(name):
                why.setdefault(name, _in_words(name, rank, own, other, theirs, world))
    return why


def _to_compare(survey: RegionSurvey, key: Key, rank: int) -> list[int]:
    """Return the other ranks whose state is there, and the first whose state is not.

    Not all others: a record may claim any number of ranks.
    """
    there = survey.ranks_of(key)
    missing = (each for each in range(key.world) if each != rank and each not in there)
    return sorted({*there, *itertools.islice(missing, 1)} - {rank})


def _unshared(candidate: Candidate) -> dict[str, Any]:
    """Return form and checksum, by name, of tensors that a rank wrote and others may hold alike."""
    crcs = candidate.manifest.crcs
    return {
        e.name: (e.dtype, e.shape, e.strides, int(crcs[i]))
        for i, e in enumerate(candidate.layout.entries)
        if not is_own(e) and e.begin is None and e.alias_of is None and e.shard is None
    }


def _in_words(
    name: str, rank: int, own: dict[str, Any], other: int, theirs: dict[str, Any], world: int
) -> str:
    if name in own and name in theirs:
        return f"ranks {rank} and {other} of the {world} that wrote it held different ones"
    held, not_held = (rank, other) if name in own else (other, rank)
    return f"rank {held} of the {world} that wrote it held it, rank {not_held} did not"
