"""Timelines over several regions: which snapshots count, and which job they belong to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lightck.errors import CoordinationError

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
