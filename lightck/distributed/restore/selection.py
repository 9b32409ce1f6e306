"""The choice of the snapshot that all ranks restore: the newest that every rank can have.

    rank views (what each rank can put together) -> which timelines count -> plans -> the choice

A rank has a snapshot if it can put it together from regions, or can be given it. The decision is a
pure function of every rank's view. It counts the content of the regions and never a key of the
store, for keys may be lost with the store: a snapshot whose outcome was `dead` or never known
counts as whole if every rank can put it together. (A rank reuses a dead slot only by invalidating
it first, and then no longer offers it.) Where replicated state is whole on some ranks, the others
get it from them before an older step is chosen (`HealingPlan`, carried out by `healing.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from lightck.distributed.rounds import Message, named
from lightck.errors import CoordinationError
from lightck.region.native_region import Record
from lightck.region.region import is_near

# ---- timelines over several regions: which snapshots count, and of which job ---------------------

_UNKNOWN = -1
"""The branch point of an ancestor of which no snapshot that counts is left."""


class Key(NamedTuple):
    """The identity of a snapshot over all ranks."""

    timeline: int
    step: int
    world: int
    """Number of ranks that wrote it."""

    @classmethod
    def of(cls, record: Record) -> Key:
        """Return the key of the snapshot, over all ranks, that a region's record belongs to."""
        return cls(record.timeline, record.step, record.world)


@dataclass(frozen=True, slots=True)
class Lineage:
    """The newest timeline of a region, or of several, and the timelines that it continues.

    Attributes:
        head: the newest timeline; 0 before the first attach.
        ancestors: (timeline, step up to which its snapshots count), the newest first.
        world: number of ranks that write the newest timeline, as far as is known.
        run: the run id of the region, in hexadecimal.
        where: the name of the region, for messages.
        newest_ns: the wall time of its newest whole snapshot; 0: it has none.
    """

    head: int
    ancestors: tuple[tuple[int, int], ...] = ()
    world: int = 1
    run: str = ""
    where: str = ""
    newest_ns: int = 0

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


def ruling_lineage(lineages: Sequence[Lineage]) -> Lineage:
    """Return the lineage that counts, of those of several regions or ranks.

    A rank that died between the others' attach and its own is one timeline behind: its newest
    timeline is an ancestor of theirs. Newest timelines that are not ancestors of each other mean
    regions that were missing during whole attaches; then the timeline counts of which the largest
    part of its ranks is present, and of two that continue others and of which that is the same the
    one with the newer snapshot: a life that ended before its first one is nobody's ancestor. An
    ancestor counts up to its branch point: the last step of it that a region of the newest timeline
    still keeps.

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
    newest = {each.head: 0 for each in heads}
    for each in heads:
        if each.ancestors:  # one that began anew gave up what was there before, with or without
            newest[each.head] = max(newest[each.head], each.newest_ns)
    ahead = max(heads, key=lambda e: (votes[e.head] / e.world, votes[e.head], newest[e.head]))
    alike = [each for each in heads if each.head == ahead.head]
    limits: dict[int, int] = {}
    for each in sorted(alike, key=lambda each: -len(each.ancestors)):
        for timeline, step in each.ancestors:
            limits[timeline] = max(step, limits.get(timeline, _UNKNOWN))
    return replace(ahead, ancestors=tuple(limits.items()), newest_ns=newest[ahead.head])


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
MAX_LOCAL_STATES = 4
MAX_ANCESTORS = 16  # as in a superblock
_MAX_PROBLEMS = 4  # problems in a message
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
        early_too: it has an early one, too.
    """

    key: Key
    early: bool = False
    suspect: bool = False
    alike: bool = False
    size: int = 0
    early_too: bool = False

    def to_message(self) -> list[int]:
        """Encode it for JSON."""
        flags = self.early | self.suspect << 1 | self.alike << 2 | self.early_too << 3
        return [*self.key, flags, self.size]

    @classmethod
    def from_message(cls, message: list[int]) -> SnapshotOffer:
        """Decode the result of `to_message`."""
        flags, size = message[3:]
        early, suspect, alike, early_too = (bool(flags & 1 << bit) for bit in range(4))
        return cls(Key(*message[:3]), early, suspect, alike, size, early_too)


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
        scanned_all: it has read every region below the path, not only its own and its peers'.
        own_missing: its own region is missing or empty, while others lie below the path.
        never_written: nothing was ever written in the regions that it sees.
        overwritten: a running job has overwritten a snapshot that it found.
        fresh_timeline: the newest timeline of its own region, if that continues no other and no due
            snapshot is committed in it yet, only ones saved at a failure (older timelines'
            snapshots were given up then); else 0.
        local_states: snapshots of which it has the rank-local state (buffers, generators, data
            position), but not the rest: (key, whether of the early instant).
        wants_exact: an exact snapshot, however old, is wanted rather than an inexact one.
        unreadable: why its own region cannot be opened; empty if it can, or does not exist.
    """

    path: str
    step: int | None
    offers: tuple[SnapshotOffer, ...] = ()
    lineage: Lineage | None = None
    problems: tuple[str, ...] = ()
    scanned_all: bool = False
    own_missing: bool = False
    never_written: bool = False
    overwritten: bool = False
    fresh_timeline: int = 0
    wants_exact: bool = False
    local_states: tuple[tuple[Key, bool], ...] = ()
    unreadable: str = ""

    def offer(self, key: Key) -> SnapshotOffer | None:
        """Return its offer of one snapshot; None if there is none."""
        return next((offer for offer in self.offers if offer.key == key), None)

    def to_message(self) -> Message:
        """Encode it for JSON; the newest offers and the first problems only."""
        newest = sorted(self.offers, key=lambda o: (age(self.lineage, o.key), -o.key.step))
        local_states = sorted(
            self.local_states, key=lambda h: (age(self.lineage, h[0]), -h[0].step)
        )
        lineage = self.lineage and asdict(self.lineage)
        if lineage:
            lineage["ancestors"] = [list(a) for a in lineage["ancestors"][:MAX_ANCESTORS]]
            lineage["where"] = printable(lineage["where"])[:_PLACE]
        return {
            "path": printable(self.path)[-_PATH_END:],
            "step": self.step,
            "offers": [offer.to_message() for offer in newest[:MAX_OFFERS]],
            "local_states": [[*key, int(early)] for key, early in local_states[:MAX_LOCAL_STATES]],
            "lineage": lineage,
            "problems": [printable(text)[:_LETTERS] for text in self.problems[:_MAX_PROBLEMS]],
            "flags": [
                self.scanned_all,
                self.own_missing,
                self.never_written,
                self.overwritten,
                self.fresh_timeline,
                self.wants_exact,
            ],
            "unreadable": printable(self.unreadable)[:_LETTERS],
        }

    @classmethod
    def from_message(cls, message: Message) -> RankView:
        """Decode the result of `to_message`."""
        lineage = message["lineage"] and Lineage(
            **{
                **message["lineage"],
                "ancestors": tuple((t, s) for t, s in message["lineage"]["ancestors"]),
            }
        )
        offers = tuple(map(SnapshotOffer.from_message, message["offers"]))
        local_states = tuple((Key(*each[:3]), bool(each[3])) for each in message["local_states"])
        problems = tuple(message["problems"])
        found = cls(message["path"], message["step"], offers, lineage, problems, *message["flags"])
        return replace(found, local_states=local_states, unreadable=message["unreadable"])


def printable(text: str) -> str:
    """Replace characters that JSON would escape, so that a text has one byte per character."""
    ascii_text = text.encode("ascii", "replace").decode()
    return "".join(each if each.isprintable() and each not in '"\\' else "?" for each in ascii_text)


# ---- the plan by which ranks that lack a snapshot get it from one that has it --------------------
# It is a pure function of every rank's offers. A step is healed only if it is known to be
# replicated, as stated by every part of it that is there: each manifest says whether all
# parameters and optimizer state were held alike by every rank when it was written. State that is
# sharded, or in part rank-local, has no replica and is never healed.


@dataclass(frozen=True, slots=True)
class HealingPlan:
    """The ranks that receive a snapshot, and the rank that sends it.

    Attributes:
        donor: the lowest rank that offers the snapshot.
        lacking: the ranks that do not offer it.
        without_local_state: the lacking ranks whose own rank-local state of that instant is
            missing, too; they use the donor's, as ranks beyond the former world do.
        early: the snapshot was finished before forward start, as was every part that is there.
    """

    donor: int
    lacking: tuple[int, ...]
    without_local_state: tuple[int, ...]
    early: bool

    @property
    def heals(self) -> tuple[tuple[int, int], ...]:
        """Return the pairs of (receiving rank, sending rank)."""
        return tuple((rank, self.donor) for rank in self.lacking)

    @property
    def why(self) -> str:
        """Describe how the snapshot becomes whole, as part of a sentence."""
        text = f"rank(s) {named(self.lacking)} get it from rank {self.donor}"
        if self.without_local_state:
            ranks = named(self.without_local_state)
            text += f", rank(s) {ranks} with that rank's buffers and data position"
        return text


def plan_healing(key: Key, views: Sequence[RankView]) -> HealingPlan | str:
    """Plan how every rank gets a snapshot that some of them offer, or say why that cannot be.

    Args:
        key: the snapshot; at least one rank offers it.
        views: the views of all ranks.
    """
    offers = {rank: offer for rank, view in enumerate(views) if (offer := view.offer(key))}
    apart = [rank for rank, offer in offers.items() if not offer.alike]
    if apart:
        return f"as rank(s) {named(apart)} have it, it is not replicated on every rank"
    early = any(offer.early for offer in offers.values())
    if early and not all(offer.early or offer.early_too for offer in offers.values()):
        return "the ranks that have it have it of two instants, before and at the forward"
    lacking = [rank for rank in range(len(views)) if rank not in offers]
    # A rank beyond the former world uses another rank's own state in any case.
    bare = [r for r in lacking if r < key.world and (key, early) not in views[r].local_states]
    return HealingPlan(min(offers), tuple(lacking), tuple(bare), early)


# ---- the choice ----------------------------------------------------------------------------------

_LISTED = 12
_SUSPECT = "suspect, for replicas were found to differ there or before"


@dataclass(frozen=True, slots=True)
class Choice:
    """The decision about a restore, the same on every rank.

    Attributes:
        key: the snapshot to restore; None if there is none.
        early: at least one rank has only an early snapshot of the step, so a rank that has both
            kinds restores the early one, too.
        heals: pairs of (rank that receives the snapshot, rank that sends it).
        without_local_state: the receiving ranks that also take over the sender's rank-local state.
        size: bytes of the largest rank's part, from which the time to wait for each other follows.
        why: the reason for the choice, in one sentence.
        fell_back: why newer snapshots, or parts of them, are not whole; newest first.
        passed_over: newer snapshots that are whole and were not chosen, or that do not count, and
            why.
        scan_all: every rank must scan all regions below the path, then decide again.
        never_written: nothing was ever written on any rank, or nothing was ever whole.
        overwritten: a running job has overwritten a snapshot that a rank had found; scan again.
    """

    key: Key | None
    why: str = ""
    fell_back: tuple[str, ...] = ()
    passed_over: tuple[str, ...] = ()
    scan_all: bool = False
    never_written: bool = False
    overwritten: bool = False
    early: bool = False
    heals: tuple[tuple[int, int], ...] = ()
    without_local_state: tuple[int, ...] = ()
    size: int = 0

    @classmethod
    def from_message(cls, message: Message) -> Choice:
        """Decode the message that `decide_restore` made."""
        key = message["key"]
        lists = {
            name: tuple(message[name])
            for name in ("fell_back", "passed_over", "without_local_state")
        }
        lists["heals"] = tuple((rank, donor) for rank, donor in message["heals"])
        return cls(**{**message, "key": key and Key(*key), **lists})


def decide_restore(messages: Sequence[Message]) -> dict[str, Any]:
    """Decide the restore round on rank 0, from the message of every rank.

    Raises:
        CoordinationError: the ranks ask for different steps or paths, or their regions are of
            different jobs.
    """
    return asdict(decide([RankView.from_message(each) for each in messages]))


def decide(views: Sequence[RankView]) -> Choice:
    """Choose the snapshot from the views of all ranks; a single process passes one view."""
    steps = [f"{view.step}{', exact' if view.wants_exact else ''}" for view in views]
    _must_agree("step", steps, "ask for the same step=")
    _must_agree("path", [view.path for view in views], "give every rank the same path=")
    ruling = ruling_lineage(_deciding_lineages(views))
    found: dict[Key, list[SnapshotOffer]] = {}
    for view in views:
        for offer in view.offers:
            found.setdefault(offer.key, []).append(offer)
    excluded = {key: why for key in found if (why := ruling.excludes(key))}
    counting = sorted(
        (key for key in found if key not in excluded), key=lambda k: (age(ruling, k), -k.step)
    )
    newest = sorted(excluded, key=lambda key: -key.step)
    passed_over = [f"step {key.step}: {excluded[key]}" for key in newest]
    others = any(key.world != len(views) for key in counting)
    away = any(view.own_missing for view in views)
    if (others or away) and not all(view.scanned_all for view in views):
        why = "another number of ranks wrote this, or regions are away"
        return Choice(None, why, scan_all=True)
    problems = _problems_of(views)
    plans = {key: plan_healing(key, views) for key in counting if len(found[key]) < len(views)}
    whole = [key for key in counting if not isinstance(plans.get(key), str)]
    chosen, why = _prefer(
        whole, found, plans, passed_over, problems, wants_exact=views[0].wants_exact
    )
    planned = plans.get(chosen) if chosen is not None else None
    healed = planned if isinstance(planned, HealingPlan) else None
    anew = _never_whole(views, {key.timeline for key in excluded})
    if anew and chosen and chosen.step <= 1 and healed and healed.without_local_state:
        chosen = healed = None  # to begin anew costs one step, and every rank has its own state
    newer = counting[: counting.index(chosen)] if chosen in counting else counting
    problems += [_not_whole(key, views, plans[key]) for key in newer if key in plans]
    _must_be_readable(views, chosen, healed)
    return Choice(
        chosen,
        why,
        tuple(problems[:_LISTED]),
        tuple(passed_over[:_LISTED]),
        never_written=all(view.never_written for view in views) or (chosen is None and anew),
        overwritten=any(view.overwritten for view in views),
        early=chosen is not None and _is_early(found[chosen]),
        heals=healed.heals if healed else (),
        without_local_state=healed.without_local_state if healed else (),
        size=max((offer.size for offer in found.get(chosen, ())), default=0) if chosen else 0,
    )


def _deciding_lineages(views: Sequence[RankView]) -> list[Lineage]:
    """Return the lineages that decide which snapshots count.

    A region that has begun a timeline without an ancestor, and holds no snapshot of it yet, says
    nothing about the other ranks' snapshots: the job was stopped before the others had begun that
    timeline. It is asked only if there is no other.
    """
    begun = [(view, view.lineage) for view in views if view.lineage and view.lineage.head]
    deciding = [each for view, each in begun if view.fresh_timeline != each.head]
    return deciding or [each for _, each in begun]


def _not_whole(key: Key, views: Sequence[RankView], planned: HealingPlan | str) -> str:
    lacking = [rank for rank, view in enumerate(views) if view.offer(key) is None]
    why = f"; not healed: {planned}" if isinstance(planned, str) else ""
    return f"step {key.step}: not whole, missing on rank(s) {named(lacking)}{why}"


def _must_be_readable(
    views: Sequence[RankView], chosen: Key | None, healed: HealingPlan | None
) -> None:
    """Check that a region that cannot be opened is of a rank that needs nothing of it.

    It is given the snapshot, or puts it together from other regions.

    Raises:
        CoordinationError: names the ranks whose regions cannot be read, and why.
    """
    given = healed.lacking if healed else ()
    unread = [
        (r, view.unreadable)
        for r, view in enumerate(views)
        if view.unreadable and r not in given and not (chosen and view.offer(chosen))
    ]
    if unread:
        told = "; ".join(f"rank {rank}: {why}" for rank, why in unread[:_LISTED])
        raise CoordinationError(f"no rank can restore: {told}")


def _never_whole(views: Sequence[RankView], excluded: Collection[int]) -> bool:
    """Tell whether the job was stopped before its first whole snapshot.

    That is so if the region of some rank is of the newest timeline, which has no ancestor, and
    holds nothing but what that rank saved at a failure. Such snapshots may be of steps that do not
    go together with those of other ranks. Nothing that ever counted is lost: by I6 (old before new)
    a whole snapshot stays on every rank until a newer one is whole. A job that restarts by itself
    must be able to start in this state.

    Ranks may be of two timelines, if they were stopped while they began the second one. If a
    snapshot of any other timeline was excluded, the answer is False, so that it is not
    ignored silently.
    """
    begun = [(view, view.lineage) for view in views if view.lineage and view.lineage.head]
    alike = all(not each.ancestors and each.world == len(views) for _, each in begun)
    heads = {each.head for _, each in begun}
    alike = alike and views[0].step is None and heads.issuperset(excluded)
    return alike and any(view.fresh_timeline == each.head for view, each in begun)


def _problems_of(views: Sequence[RankView]) -> list[str]:
    if len(views) == 1:
        return list(views[0].problems)
    return [f"rank {r}: {text}" for r, view in enumerate(views) for text in view.problems]


def _prefer(
    whole: Sequence[Key],
    found: Mapping[Key, Sequence[SnapshotOffer]],
    plans: Mapping[Key, HealingPlan | str],
    passed_over: list[str],
    problems: list[str],
    *,
    wants_exact: bool,
) -> tuple[Key | None, str]:
    """Return the snapshot to restore and why, or None and why; add to `passed_over` and `problems`.

    The newest comes first, but suspect snapshots come after all others, and an inexact one yields
    to an exact one that is near, with `wants_exact` to any. A snapshot is suspect or early if it is
    so on any rank. It is inexact if it was finished early, or if a rank restores it without its own
    data position: repeating one step costs less.
    """

    def inexact(key: Key) -> str:
        planned = plans.get(key)
        if _is_early(found[key]):
            return "was finished early"
        if isinstance(planned, HealingPlan) and planned.without_local_state:
            return f"is without what is rank(s) {named(planned.without_local_state)}'s own"
        return ""

    suspect = [key for key in whole if any(offer.suspect for offer in found[key])]
    clean = [key for key in whole if key not in suspect]
    if not clean:
        if not suspect:
            return None, "no snapshot is whole"
        problems.append(f"step {suspect[0].step}: {_SUSPECT}; no other was found that is not")
        return suspect[0], f"step {suspect[0].step} is suspect, but no other is whole"
    first = clean[0]
    problems += [
        f"step {key.step}: {_SUSPECT}" for key in suspect if whole.index(key) < whole.index(first)
    ]
    planned, how = plans.get(first), inexact(first)
    why = f"step {first.step} is the newest that is whole"
    if isinstance(planned, HealingPlan):
        why = f"step {first.step} is the newest: {planned.why}"
    if not how:
        return first, why
    early = _is_early(found[first])
    exact = next((key for key in clean if not inexact(key)), None)
    if exact is not None and (wants_exact or is_near(first.step, exact.step)):
        passed_over.append(f"step {first.step} {how}, and step {exact.step} is exact")
        return exact, f"step {exact.step} is exact, and step {first.step} {how}"
    if early:
        why += f", and {how}"
        why += f"; of the exact ones step {exact.step} is the newest" if exact is not None else ""
    return first, why


def _is_early(offers: Sequence[SnapshotOffer]) -> bool:
    return any(offer.early for offer in offers)


def _must_agree(what: str, values: Sequence[str], remedy: str) -> None:
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    if len(ranks) > 1:
        listed = "; ".join(f"{v} on rank(s) {named(r)}" for v, r in list(ranks.items())[:4])
        raise CoordinationError(f"the ranks differ in {what}: {listed}; {remedy}")
