"""Which snapshot all ranks restore: the newest that every one of them can put together.

The decision is a pure function of what every rank said. What counts is the content of the regions,
never a fate key: keys may be lost with the store, and a snapshot whose fate was `dead` or never
known, but that every rank can put together, is whole (a rank reuses a dead slot only by
invalidating it first, and then no longer offers it).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from lightck.distributed.agreement import named
from lightck.distributed.exchange import Said
from lightck.errors import CoordinationError
from lightck.region.preference import is_near

MAX_OFFERS = 16  # per rank: slots of one region, or a few regions of a larger former world
MAX_ANCESTORS = 16  # as in a superblock
_SPOKEN = 4  # problems that a rank tells
_LETTERS = 250  # of each
_LISTED = 12
_PLACE = 60  # letters of a region's name
_SUSPECT = "suspect, for replicas were found to differ there or before"
_PATH_END = 200  # what is compared of a path
_UNKNOWN = -1
"""As a branch point: nothing of that ancestor is there that counts."""


class Key(NamedTuple):
    """What a snapshot is over all ranks."""

    timeline: int
    step: int
    world: int
    """Number of ranks that wrote it."""


@dataclass(frozen=True, slots=True)
class Offer:
    """A snapshot that a rank can put together wholly.

    Attributes:
        key: which.
        early: finished before the boundary instant (b).
        suspect: replicas were found to differ.
    """

    key: Key
    early: bool = False
    suspect: bool = False


@dataclass(frozen=True, slots=True)
class Lineage:
    """The newest timeline of a region, or of several, and what it continues.

    Attributes:
        head: the newest timeline; 0 before the first attach.
        ancestors: (timeline, step up to which its snapshots count), the newest first.
        world: number of ranks that write the newest timeline, as far as is known.
        run: of the region, in hexadecimal.
        where: whose it is, for messages.
    """

    head: int
    ancestors: tuple[tuple[int, int], ...] = ()
    world: int = 1
    run: str = ""
    where: str = ""

    @property
    def timelines(self) -> tuple[int, ...]:
        """The newest first."""
        return (self.head, *(timeline for timeline, _ in self.ancestors))

    def excludes(self, key: Key) -> str:
        """Why a snapshot does not count, in words; empty if it does."""
        if key.timeline == self.head:
            return ""
        limit = dict(self.ancestors).get(key.timeline)
        if limit is None:
            return "of a timeline that was abandoned"
        if key.step > limit:
            return "beyond the step at which a later restore went on from its timeline"
        return ""


@dataclass(frozen=True, slots=True)
class View:
    """What one rank sees.

    Attributes:
        path: the path that it was given.
        step: the only step that is wanted; None for the newest.
        offers: snapshots that it can put together, of what counts in the regions they come from.
        lineage: of the regions it reads; None if it has none.
        problems: what is there and cannot be put together, and why.
        wide: it has looked into every region below the path, not only its own and its peers'.
        lacking: its own region is not there or empty, while others lie below the path.
        void: nothing was ever written in what it sees.
        overtaken: a trainer has overwritten what it found.
        young: the newest timeline of its own region, if that continues nothing and nothing is
            committed in it yet (what older ones left was given up then); else 0.
    """

    path: str
    step: int | None
    offers: tuple[Offer, ...] = ()
    lineage: Lineage | None = None
    problems: tuple[str, ...] = ()
    wide: bool = False
    lacking: bool = False
    void: bool = False
    overtaken: bool = False
    young: int = 0

    def said(self) -> Said:
        """As JSON; the newest offers and the first problems only."""
        newest = sorted(self.offers, key=lambda o: (_age(self.lineage, o.key), -o.key.step))
        lineage = self.lineage and asdict(self.lineage)
        if lineage:
            lineage["ancestors"] = [list(a) for a in lineage["ancestors"][:MAX_ANCESTORS]]
            lineage["where"] = _plain(lineage["where"])[:_PLACE]
        return {
            "path": _plain(self.path)[-_PATH_END:],
            "step": self.step,
            "offers": [[*o.key, int(o.early), int(o.suspect)] for o in newest[:MAX_OFFERS]],
            "lineage": lineage,
            "problems": [_plain(text)[:_LETTERS] for text in self.problems[:_SPOKEN]],
            "flags": [self.wide, self.lacking, self.void, self.overtaken, self.young],
        }

    @classmethod
    def heard(cls, said: Said) -> View:
        """The inverse of `said`."""
        lineage = said["lineage"] and Lineage(
            **{
                **said["lineage"],
                "ancestors": tuple((t, s) for t, s in said["lineage"]["ancestors"]),
            }
        )
        offers = tuple(
            Offer(Key(*each[:3]), bool(each[3]), bool(each[4])) for each in said["offers"]
        )
        problems = tuple(said["problems"])
        return cls(said["path"], said["step"], offers, lineage, problems, *said["flags"])


@dataclass(frozen=True, slots=True)
class Choice:
    """What all ranks do next.

    Attributes:
        key: the snapshot to restore; None if there is none.
        early: a rank has only an early one: whoever has both takes the early one, too.
        why: one sentence.
        fell_back: why newer ones, or parts of them, are not whole; newest first.
        left: newer ones that are whole and were not chosen, or do not count, and why.
        widen: look into every region below the path first, then decide again.
        void: nothing was ever written on any rank, or nothing ever whole.
        overtaken: a trainer has overwritten what a rank had found: look again.
    """

    key: Key | None
    why: str = ""
    fell_back: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    widen: bool = False
    void: bool = False
    overtaken: bool = False
    early: bool = False

    @classmethod
    def heard(cls, said: Said) -> Choice:
        """From what `decide_restore` made."""
        key = said["key"]
        lists = {name: tuple(said[name]) for name in ("fell_back", "left")}
        return cls(**{**said, "key": key and Key(*key), **lists})


def decide_restore(said: Sequence[Said]) -> dict[str, Any]:
    """Rank 0's decision at restore.

    Raises:
        CoordinationError: the ranks want different things, or their regions are of different jobs.
    """
    return asdict(decide([View.heard(each) for each in said]))


def decide(views: Sequence[View]) -> Choice:
    """The choice, from what every rank sees; with one, what a single process takes."""
    _must_agree("step", [str(view.step) for view in views], "ask for the same step=")
    _must_agree("path", [view.path for view in views], "give every rank the same path=")
    ruling = rule([view.lineage for view in views if view.lineage is not None])
    found: dict[Key, list[Offer]] = {}
    for view in views:
        for offer in view.offers:
            found.setdefault(offer.key, []).append(offer)
    excluded = {key: why for key in found if (why := ruling.excludes(key))}
    counting = sorted(
        (key for key in found if key not in excluded), key=lambda k: (_age(ruling, k), -k.step)
    )
    left = [f"step {key.step}: {excluded[key]}" for key in sorted(excluded, key=lambda k: -k.step)]
    others = any(key.world != len(views) for key in counting)
    if not all(view.wide for view in views) and (others or any(v.lacking for v in views)):
        return Choice(None, "another number of ranks wrote this, or regions are away", widen=True)
    broken = _told(views)
    whole = [key for key in counting if len(found[key]) == len(views)]
    chosen, why = _prefer(whole, found, left, broken)
    newer = counting[: counting.index(chosen)] if chosen in counting else counting
    for key in newer:
        missing = [r for r, view in enumerate(views) if key not in {o.key for o in view.offers}]
        if missing:
            broken.append(f"step {key.step}: not whole, missing on rank(s) {named(missing)}")
    return Choice(
        chosen,
        why,
        tuple(broken[:_LISTED]),
        tuple(left[:_LISTED]),
        void=all(view.void for view in views)
        or (chosen is None and _never_whole(views, {key.timeline for key in excluded})),
        overtaken=any(view.overtaken for view in views),
        early=chosen is not None and _is_early(found[chosen]),
    )


def _never_whole(views: Sequence[View], left: Collection[int]) -> bool:
    """The job was stopped before its first whole snapshot: a rank has never committed one.

    That is no loss: what the others hold has never counted (I6: a whole snapshot stays on every
    rank until a newer one is whole). It must not keep a job that restarts by itself from starting.
    Ranks may be of two timelines: they were stopped while they began the second one. A snapshot of
    any other that was `left` is not passed over in silence.
    """
    begun = [(view, view.lineage) for view in views if view.lineage and view.lineage.head]
    alike = all(not each.ancestors and each.world == len(views) for _, each in begun)
    alike = alike and views[0].step is None and {each.head for _, each in begun}.issuperset(left)
    return alike and any(view.young == each.head for view, each in begun)


def _told(views: Sequence[View]) -> list[str]:
    if len(views) == 1:
        return list(views[0].problems)
    return [f"rank {r}: {text}" for r, view in enumerate(views) for text in view.problems]


def _prefer(
    whole: Sequence[Key],
    found: Mapping[Key, Sequence[Offer]],
    left: list[str],
    broken: list[str],
) -> tuple[Key | None, str]:
    """Newest first; one found suspect comes after all others, an early one after near exact ones.

    One rank's suspicion, and one rank's early finish, is everybody's.
    """
    suspect = [key for key in whole if any(offer.suspect for offer in found[key])]
    clean = [key for key in whole if key not in suspect]
    if not clean:
        if not suspect:
            return None, "no snapshot is whole"
        broken.append(f"step {suspect[0].step}: {_SUSPECT}; no other was found that is not")
        return suspect[0], f"step {suspect[0].step} is suspect, but no other is whole"
    first = clean[0]
    broken += [
        f"step {key.step}: {_SUSPECT}" for key in suspect if whole.index(key) < whole.index(first)
    ]
    if not _is_early(found[first]):
        return first, f"step {first.step} is the newest that is whole"
    exact = next((key for key in clean if not _is_early(found[key])), None)
    why = f"step {first.step} is the newest that is whole, and was finished early"
    if exact is None:
        return first, why
    if not is_near(first.step, exact.step):
        return first, f"{why}; of the exact ones step {exact.step} is the newest"
    left.append(f"step {first.step}: early, and step {exact.step} is exact")
    return exact, f"step {exact.step} is exact, and step {first.step} was finished early"


def _is_early(offers: Sequence[Offer]) -> bool:
    return any(offer.early for offer in offers)


def rule(lineages: Sequence[Lineage]) -> Lineage:
    """The lineage that counts, of several regions or ranks.

    One that died between the others' attach and its own is a timeline behind: its newest is an
    ancestor of theirs. Timelines that are no ancestors of each other mean regions that were away
    for whole attaches; then the one counts of whose ranks the most are there. An ancestor counts
    up to its branch point: the last step of it that a region of the newest timeline still keeps.

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
    """Of each ancestor of a region's newest timeline: the step up to which it counts.

    Args:
        ancestors: timelines.
        kept: (timeline, step) of the snapshots that the region keeps and counts. While nothing of
            the newest timeline is whole, the one at which it branched off is among them (I6).
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


def _must_agree(what: str, values: Sequence[str], remedy: str) -> None:
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    if len(ranks) > 1:
        listed = "; ".join(f"{v} on rank(s) {named(r)}" for v, r in list(ranks.items())[:4])
        raise CoordinationError(f"the ranks differ in {what}: {listed}; {remedy}")


def _plain(text: str) -> str:
    """As many bytes in JSON as letters."""
    plain = text.encode("ascii", "replace").decode()
    return "".join(each if each.isprintable() and each not in '"\\' else "?" for each in plain)


def _age(lineage: Lineage | None, key: Key) -> int:
    timelines = lineage.timelines if lineage else ()
    return timelines.index(key.timeline) if key.timeline in timelines else len(timelines)
