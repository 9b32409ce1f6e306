"""The regions that a rank can read at a path, and the whole states that it can put together.

A rank reads its own region, and those of its peers where they share. If another number of ranks
wrote, or its own region is missing, it reads every region below the path (`widen`). Rank r takes
over the rank-local state of rank r modulo the number of ranks that wrote.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from lightck.distributed.restore.local_state import LocalState, LocalStates, key_of
from lightck.distributed.restore.offers import (
    Key,
    Lineage,
    RankView,
    SnapshotOffer,
    branch_points,
    rule,
)
from lightck.errors import (
    CoordinationError,
    CorruptSnapshotError,
    RegionError,
    RegionFormatError,
    RegionIOError,
)
from lightck.reader import validation
from lightck.reader.assembly import AssembledSnapshot, peers_of
from lightck.region import location
from lightck.region.backends import select
from lightck.region.location import Location
from lightck.region.native_region import HOLDS_ALL, RECORD_JIT, Record
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
        return Lineage(
            info.timeline,
            tuple(zip(ancestors, branch_points(ancestors, kept), strict=True)),
            worlds[0] if worlds else info.world,
            info.run_id.hex(),
            self.region.place.file.name,
        )


@dataclass(eq=False)
class RegionSurvey:
    """The regions that one rank has read; closes those that it opened. Used by one thread."""

    where: Location
    """The place of the rank's own region."""
    rank: int
    world: int
    """The number of ranks now."""
    lends: bool = True
    """True if a rank beyond the former world takes another rank's own state."""
    regions: list[SurveyedRegion] = field(default_factory=list)
    wide: bool = False
    overtaken: bool = False
    """True if a running job was met that overwrites the snapshots found."""
    broken: RegionError | None = None
    """Why the rank's own region cannot be opened, where others may have the same state."""
    _dropped: set[Key] = field(default_factory=set)
    """Snapshots that ranks lack and cannot be given."""
    _halves: LocalStates | None = None
    _problems: list[str] = field(default_factory=list)
    _failed: set[tuple[int, Record]] = field(default_factory=set)
    """The (rank, record) of each snapshot that turned out to be damaged."""
    _assembled: dict[tuple[int, Record], AssembledSnapshot | str] = field(default_factory=dict)

    @classmethod
    @contextlib.contextmanager
    def opened(
        cls, where: Location, rank: int, world: int, *, lends: bool = True
    ) -> Iterator[RegionSurvey]:
        """Read the rank's own region and yield the result; close every region at the end.

        With several ranks, a region that cannot be opened is noted in `broken`.

        Raises:
            RegionError: the place is not safe, or what lies there is no region.
        """
        found = cls(where, rank, world, lends)
        try:
            if where.exists and not select.is_blank(where):
                try:
                    found._look(where)
                except (RegionFormatError, CorruptSnapshotError, RegionIOError) as error:
                    if world == 1:
                        raise
                    found.broken = error
                    found._problems.append(str(error))
            yield found
        finally:
            found.close()

    @classmethod
    @contextlib.contextmanager
    def everything(
        cls, where: Location, files: Sequence[Location], rank: int = 0
    ) -> Iterator[RegionSurvey]:
        """Read all of these regions, for one reader that is no rank of a job.

        Raises:
            RegionError: the place is not safe, or a file is no region.
        """
        found = cls(where, rank, 1, lends=False, wide=True)
        try:
            for each in files:
                found._look(each)
            yield found
        finally:
            found.close()

    def close(self) -> None:
        """Close every region that is still held."""
        while self.regions:
            self.regions.pop().region.close()

    @property
    def own(self) -> SurveyedRegion | None:
        """Return the rank's own region, if it is there."""
        return next((h for h in self.regions if self._is_own(h)), None)

    def give_up(self, continuation: Continuation) -> None:
        """Declare that the own region's snapshots have never counted, so that attach may go on."""
        own = self.own
        if own is not None and not own.recovery.is_empty:
            continuation.disown(own.region)

    def keep(self, region: Region) -> None:
        """Take a region out of those that `close` closes; the caller closes it."""
        self.regions = [each for each in self.regions if each.region is not region]

    def widen(self) -> None:
        """Read every other region below the path, too; a failure is noted as a problem."""
        self.wide = True
        for where in location.every_rank(self.where):
            self._look_once(where)
        self._assembled.clear()

    def view(self, step: int | None) -> RankView:
        """Return this rank's view of the snapshots: of `step`, or of all if it is None."""
        offers, problems = [], list(self._problems)
        for holding in self.regions:
            problems += holding.recovery.problems
        for key in self._keys(step):
            found = self.assembled(key)
            if key in self._dropped:
                continue
            if isinstance(found, AssembledSnapshot):
                offers.append(self._offer(key, found))
            elif found and not offers:  # what is older than a whole snapshot is not missed
                problems.append(found)
        offers = self._of_all_ranks(offers, problems)
        problems += self._absent()
        # Peers' regions know no more of timelines than the own one does, and may be missing.
        speaking = self.regions if self.wide else [h for h in self.regions if self._is_own(h)]
        return RankView(
            self.where.common,
            step,
            tuple(offers),
            rule([h.lineage for h in speaking]) if speaking else None,
            tuple(problems),
            self.wide,
            self._is_lacking(),
            not problems and all(h.recovery.is_empty for h in self.regions),
            self.overtaken or self._is_overtaken(step),
            self._young(),
            *self._for_others({offer.key for offer in offers}, step),
        )

    def half(self, key: Key, early: bool) -> LocalState | None:
        """Return this rank's own state of one instant of a snapshot, from its region or journal."""
        return next((h for h in self._own_halves(()) if (h.key, h.early) == (key, early)), None)

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
        for holding, own in self._of(key, rank, early):
            mark = (holding.rank, own.record)
            if mark not in self._assembled:
                self._assembled[mark] = self._assemble(holding, own)
            found = self._assembled[mark]
            if isinstance(found, AssembledSnapshot):
                return found
            why = found
        return why

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
            return rule([holding.lineage for holding in self.regions]).excludes(key)
        except CoordinationError:  # regions of two jobs: each stands for itself
            return ""

    def former(self, world: int) -> int:
        """Return the rank, of those that wrote, whose own state this rank takes over."""
        return self.rank % world if self.lends else self.rank

    def failed(self, snapshot: AssembledSnapshot) -> None:
        """Note that a snapshot turned out to be unreadable: it is offered no more."""
        self._failed.add((snapshot.record.rank, snapshot.record))

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

    # ---- inside ----------------------------------------------------------------------------

    def _offer(self, key: Key, found: AssembledSnapshot) -> SnapshotOffer:
        alike = self.world > 1 and found.replica is not None
        size = sum(e.length for e in found.entries)
        return SnapshotOffer(key, found.early, found.suspect, alike, size)

    def _for_others(
        self, offered: set[Key], step: int | None
    ) -> tuple[tuple[tuple[Key, bool], ...], str]:
        """Return the last two fields of `RankView`, for other ranks; empty if there are none."""
        if self.world == 1:
            return (), ""
        own = {
            (half.key, half.early): None
            for half in self._own_halves(offered)
            if step in (None, half.key.step)
        }
        why = "" if self.broken is None else f"{type(self.broken).__name__}: {self.broken}"
        return tuple(own), why

    def _own_halves(self, besides: Collection[Key]) -> list[LocalState]:
        own = self.own
        if self._halves is None and own is not None:
            self._halves = LocalStates(own.region, own.recovery.candidates)
        return self._halves.found(besides) if self._halves is not None else []

    def _of_all_ranks(
        self, offers: list[SnapshotOffer], problems: list[str]
    ) -> list[SnapshotOffer]:
        """Return the offers that are whole over all ranks; all of them if none is.

        This is for a reader that is no rank of a job. Where the other ranks' regions are on other
        nodes, none is whole. Why the others are not is added to `problems`.
        """
        if self.lends or not self.wide:
            return offers
        lacking = {offer.key: self.lacks(offer.key) for offer in offers}
        whole = [offer for offer in offers if not lacking[offer.key]]
        if whole:
            problems += [f"step {key.step}: {why[0]}" for key, why in lacking.items() if why]
        return whole or offers

    def _look(self, where: Location) -> SurveyedRegion:
        holding = SurveyedRegion(*open_and_recover(where))
        self.regions.append(holding)
        return holding

    def _look_once(self, where: Location) -> None:
        """Read a region that is not the rank's own, unless it was read before."""
        if any(where.file == each.region.place.file for each in self.regions):
            return
        try:
            if not select.is_blank(where):
                self._look(where)
        except RegionError as error:
            self._problems.append(str(error))

    def _is_own(self, holding: SurveyedRegion) -> bool:
        return holding.region.place.file == self.where.file

    def _young(self) -> int:
        """Return the own region's timeline if nothing due was ever committed in it; else 0.

        See `RankView.young`.

        A snapshot that was saved at a failure does not count here: it was for this rank alone, and
        kept no other from its slot.
        """
        own = self.own
        if own is None or own.region.info.lineage:
            return 0
        due = any(not c.record.flags & RECORD_JIT for c in own.recovery.candidates)
        return 0 if due or own.recovery.problems else own.region.info.timeline

    def _is_lacking(self) -> bool:
        own = self.own
        if own is not None and not own.recovery.is_empty:
            return False
        return len(location.every_rank(self.where)) > (own is not None)

    def _absent(self) -> list[str]:
        """Say that no region was found of the rank whose own state this one takes over."""
        every = [c.record for h in self.regions for c in h.recovery.candidates]
        if not every:
            return []
        newest = max(every, key=lambda record: record.wall_time_ns)
        former = self.former(newest.world)
        if any(holding.rank == former for holding in self.regions):
            return []
        return [f"{self.where.path}: no region of rank {former}, which wrote step {newest.step}"]

    def _is_overtaken(self, step: int | None) -> bool:
        return not all(
            is_there(h.region, c)
            for h in self.regions
            for c in h.recovery.candidates
            if step in (None, c.record.step)
        )

    def _keys(self, step: int | None) -> list[Key]:
        """Return the snapshots with a part of the rank whose state is taken over; newest first."""
        found: dict[Key, None] = {}
        for holding in self.regions:
            for candidate in holding.recovery.candidates:
                key = key_of(candidate.record)
                if step in (None, key.step) and candidate.record.rank == self.former(key.world):
                    found[key] = None
        return sorted(found, key=lambda key: -key.step)

    def _of(self, key: Key, rank: int, early: bool) -> list[tuple[SurveyedRegion, Candidate]]:
        """Return a rank's snapshots of that key: the wanted instant first, then the newest."""
        found = [
            (holding, candidate)
            for holding in self.regions
            for candidate in holding.recovery.candidates
            if candidate.record.rank == rank
            and key_of(candidate.record) == key
            and (holding.rank, candidate.record) not in self._failed
        ]
        return sorted(found, key=lambda f: (f[1].record.early != early, -f[1].record.sequence))

    def _assemble(self, holding: SurveyedRegion, own: Candidate) -> AssembledSnapshot | str:
        try:
            if own.record.share_digest != HOLDS_ALL:
                self._look_at_peers(holding, own)
            others = {
                id(candidate): (each.region, candidate)
                for each in self.regions
                for candidate in each.recovery.candidates
                if (each.rank, candidate.record) not in self._failed
            }
            peers = {c.record.rank: c for c in peers_of(own, [c for _, c in others.values()])}
            sources = [(holding.region, own), *(others[id(c)] for c in peers.values())]
            return AssembledSnapshot.of(sources)
        except CorruptSnapshotError as error:
            return str(error)

    def _look_at_peers(self, holding: SurveyedRegion, own: Candidate) -> None:
        """Open the regions of the ranks that shared this snapshot's replicated state."""
        if self.wide:
            return
        label = f"{holding.region.place.file} step {own.record.step}"
        for rank in validation.peers(own, context=label):
            where = location.locate(self.where.path, rank, create=False)
            if where.exists:
                self._look_once(where)
