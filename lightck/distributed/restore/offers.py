"""The snapshots that one rank sees and can offer, and the message that tells the other ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace
from typing import NamedTuple

from lightck.distributed.rounds import Message as Said
from lightck.errors import CoordinationError

# ---- timelines over several regions: which snapshots count, and of which job ---------------------

_UNKNOWN = -1
"""The branch point of an ancestor of which no snapshot that counts is left."""


class Key(NamedTuple):
    """The identity of a snapshot over all ranks."""

    timeline: int
    step: int
    world: int
    """Number of ranks that wrote it."""


@dataclass(frozen=True, slots=True)
class Lineage:
    """The newest timeline of a region, or of several, and the timelines that it continues.

    Attributes:
        head: the newest timeline; 0 before the first attach.
        ancestors: (timeline, step up to which its snapshots count), the newest first.
        world: number of ranks that write the newest timeline, as far as is known.
        run: the run id of the region, in hexadecimal.
        where: the name of the region, for messages.
    """

    head: int
    ancestors: tuple[tuple[int, int], ...] = ()
    world: int = 1
    run: str = ""
    where: str = ""

    @property
    def timelines(self) -> tuple[int, ...]:
        """Return all timelines, the newest first."""
        return (self.head, *(timeline for timeline, _ in self.ancestors))

    def excludes(self, key: Key) -> str:
        """Return why a snapshot does not count, in words; empty if it does."""
        if key.timeline == self.head:
            return ""
        limit = dict(self.ancestors).get(key.timeline)
        if limit is None:
            return "of a timeline that was abandoned"
        if key.step > limit:
            return "beyond the step at which a later restore went on from its timeline"
        return ""


def rule(lineages: Sequence[Lineage]) -> Lineage:
    """Return the lineage that counts, of those of several regions or ranks.

    A rank that died between the others' attach and its own is one timeline behind: its newest
    timeline is an ancestor of theirs. Newest timelines that are not ancestors of each other mean
    regions that were missing during whole attaches; then the timeline counts of which the largest
    part of its ranks is present. An ancestor counts up to its branch point: the last step of it
    that a region of the newest timeline still keeps.

    Raises:
        CoordinationError: regions of two jobs are mixed.
    """
    lineages = [each for each in lineages if each.head]
    older = {ancestor for each in lineages for ancestor, _ in each.ancestors}
    heads = [each for each in lineages if each.head not in older] or list(lineages)
    if not heads:
        return Lineage(0)
    if len({each.head for each in heads}) > 1:
        _must_be_one_job(heads)
    votes = Counter(each.head for each in heads)
    ahead = max(heads, key=lambda each: (votes[each.head] / each.world, votes[each.head]))
    alike = [each for each in heads if each.head == ahead.head]
    limits: dict[int, int] = {}
    for each in sorted(alike, key=lambda each: -len(each.ancestors)):
        for timeline, step in each.ancestors:
            limits[timeline] = max(step, limits.get(timeline, _UNKNOWN))
    return Lineage(ahead.head, tuple(limits.items()), ahead.world, ahead.run, ahead.where)


def branch_points(ancestors: Collection[int], kept: Collection[tuple[int, int]]) -> list[int]:
    """Return, for each ancestor of a region's newest timeline, the step up to which it counts.

    Args:
        ancestors: timelines.
        kept: (timeline, step) of the snapshots that the region keeps and counts. While no snapshot
            of the newest timeline is whole, the one at which it branched off is among them.
    """
    return [max((s for t, s in kept if t == each), default=_UNKNOWN) for each in ancestors]


def _must_be_one_job(heads: Sequence[Lineage]) -> None:
    runs: dict[str, list[str]] = {}
    for each in heads:
        runs.setdefault(each.run, []).append(each.where)
    if len(runs) > 1:
        listed = "; ".join(
            f"run {run[:8]} in {', '.join(where[:4])}" for run, where in list(runs.items())[:4]
        )
        raise CoordinationError(
            f"regions of different jobs are mixed: {listed}; give every rank the path of one job,"
            " or move the others' regions away"
        )


def age(lineage: Lineage | None, key: Key) -> int:
    """Return the age of a snapshot's timeline: 0 for the newest, plus one for each newer one.

    A timeline outside the lineage is older than all in it.
    """
    timelines = lineage.timelines if lineage else ()
    return timelines.index(key.timeline) if key.timeline in timelines else len(timelines)


# ---- offers, and the message that has them -------------------------------------------------------

MAX_OFFERS = 16  # per rank: slots of one region, or a few regions of a larger former world
MAX_HALVES = 4
MAX_ANCESTORS = 16  # as in a superblock
_SPOKEN = 4  # problems in a message
_LETTERS = 250  # characters of each
_PLACE = 60  # characters of a region's name
_PATH_END = 200  # characters at the end of a path that are compared


@dataclass(frozen=True, slots=True)
class SnapshotOffer:
    """A snapshot that a rank can put together completely.

    Attributes:
        key: the snapshot.
        early: it was finished before forward start.
        suspect: replicas were found to differ.
        alike: the snapshot states that every rank held the same parameters and optimizer state, so
            that any rank that offers it can send them to any other.
        size: bytes of all tensors, as this rank has them.
    """

    key: Key
    early: bool = False
    suspect: bool = False
    alike: bool = False
    size: int = 0

    def said(self) -> list[int]:
        """Encode it for JSON."""
        return [*self.key, self.early | self.suspect << 1 | self.alike << 2, self.size]

    @classmethod
    def heard(cls, said: list[int]) -> SnapshotOffer:
        """Decode the result of `said`."""
        flags, size = said[3:]
        return cls(Key(*said[:3]), bool(flags & 1), bool(flags & 2), bool(flags & 4), size)


@dataclass(frozen=True, slots=True)
class RankView:
    """The view of one rank.

    Attributes:
        path: the path that it was given.
        step: the only step that is wanted; None for the newest.
        offers: snapshots that it can put together, among those that count in the regions they come
            from.
        lineage: of the regions it reads; None if it has none.
        problems: snapshots or regions that are there and cannot be used, and why.
        wide: it has read every region below the path, not only its own and its peers'.
        lacking: its own region is missing or empty, while others lie below the path.
        void: nothing was ever written in the regions that it sees.
        overtaken: a running job has overwritten a snapshot that it found.
        young: the newest timeline of its own region, if that continues no other and no due snapshot
            is committed in it yet, only ones saved at a failure (older timelines' snapshots were
            given up then); else 0.
        halves: snapshots of which it has the rank-local state (buffers, generators, data position),
            but not the rest: (key, whether of the early instant).
        broken: why its own region cannot be opened; empty if it can, or does not exist.
    """

    path: str
    step: int | None
    offers: tuple[SnapshotOffer, ...] = ()
    lineage: Lineage | None = None
    problems: tuple[str, ...] = ()
    wide: bool = False
    lacking: bool = False
    void: bool = False
    overtaken: bool = False
    young: int = 0
    halves: tuple[tuple[Key, bool], ...] = ()
    broken: str = ""

    def offer(self, key: Key) -> SnapshotOffer | None:
        """Return its offer of one snapshot; None if there is none."""
        return next((offer for offer in self.offers if offer.key == key), None)

    def said(self) -> Said:
        """Encode it for JSON; the newest offers and the first problems only."""
        newest = sorted(self.offers, key=lambda o: (age(self.lineage, o.key), -o.key.step))
        halves = sorted(self.halves, key=lambda h: (age(self.lineage, h[0]), -h[0].step))
        lineage = self.lineage and asdict(self.lineage)
        if lineage:
            lineage["ancestors"] = [list(a) for a in lineage["ancestors"][:MAX_ANCESTORS]]
            lineage["where"] = plain(lineage["where"])[:_PLACE]
        return {
            "path": plain(self.path)[-_PATH_END:],
            "step": self.step,
            "offers": [offer.said() for offer in newest[:MAX_OFFERS]],
            "halves": [[*key, int(early)] for key, early in halves[:MAX_HALVES]],
            "lineage": lineage,
            "problems": [plain(text)[:_LETTERS] for text in self.problems[:_SPOKEN]],
            "flags": [self.wide, self.lacking, self.void, self.overtaken, self.young],
            "broken": plain(self.broken)[:_LETTERS],
        }

    @classmethod
    def heard(cls, said: Said) -> RankView:
        """Decode the result of `said`."""
        lineage = said["lineage"] and Lineage(
            **{
                **said["lineage"],
                "ancestors": tuple((t, s) for t, s in said["lineage"]["ancestors"]),
            }
        )
        offers = tuple(map(SnapshotOffer.heard, said["offers"]))
        halves = tuple((Key(*each[:3]), bool(each[3])) for each in said["halves"])
        problems = tuple(said["problems"])
        found = cls(said["path"], said["step"], offers, lineage, problems, *said["flags"])
        return replace(found, halves=halves, broken=said["broken"])


def plain(text: str) -> str:
    """Replace characters that JSON would escape, so that a text has one byte per character."""
    plain = text.encode("ascii", "replace").decode()
    return "".join(each if each.isprintable() and each not in '"\\' else "?" for each in plain)
