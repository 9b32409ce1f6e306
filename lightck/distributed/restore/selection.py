"""The choice of the snapshot that all ranks restore: the newest that every rank can have.

A rank has a snapshot if it can put it together from regions, or can be given it. The decision is a
pure function of every rank's view. It counts the content of the regions and never a key of the
store, for keys may be lost with the store: a snapshot whose outcome was `dead` or never known
counts as whole if every rank can put it together. (A rank reuses a dead slot only by invalidating
it first, and then no longer offers it.) Where replicated state is whole on some ranks, the others
get it from them before an older step is chosen (`Plan`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lightck.distributed.restore.offers import Key, Lineage, RankView, SnapshotOffer, age, rule
from lightck.distributed.rounds import Message as Said
from lightck.distributed.rounds import named
from lightck.errors import CoordinationError
from lightck.region.region import is_near

# ---- the plan by which ranks that lack a snapshot get it from one that has it --------------------
# It is a pure function of every rank's offers. A step is healed only if it is known to be
# replicated, as stated by every part of it that is there: each manifest says whether all
# parameters and optimizer state were held alike by every rank when it was written. State that is
# sharded, or in part rank-local, has no replica and is never healed.


@dataclass(frozen=True, slots=True)
class Plan:
    """The ranks that receive a snapshot, and the rank that sends it.

    Attributes:
        donor: the lowest rank that offers the snapshot.
        lacking: the ranks that do not offer it.
        bare: the lacking ranks whose own rank-local state of that instant is missing, too; they use
            the donor's, as ranks beyond the former world do.
        early: the snapshot was finished before forward start, as was every part that is there.
    """

    donor: int
    lacking: tuple[int, ...]
    bare: tuple[int, ...]
    early: bool

    @property
    def heals(self) -> tuple[tuple[int, int], ...]:
        """Return the pairs of (receiving rank, sending rank)."""
        return tuple((rank, self.donor) for rank in self.lacking)

    @property
    def why(self) -> str:
        """Describe how the snapshot becomes whole, as part of a sentence."""
        text = f"rank(s) {named(self.lacking)} get it from rank {self.donor}"
        if self.bare:
            text += f", rank(s) {named(self.bare)} with that rank's buffers and data position"
        return text


def plan(key: Key, views: Sequence[RankView]) -> Plan | str:
    """Plan how every rank gets a snapshot that some of them offer, or say why that cannot be.

    Args:
        key: the snapshot; at least one rank offers it.
        views: the views of all ranks.
    """
    offers = {rank: offer for rank, view in enumerate(views) if (offer := view.offer(key))}
    apart = [rank for rank, offer in offers.items() if not offer.alike]
    if apart:
        return f"as rank(s) {named(apart)} have it, it is not replicated on every rank"
    instants = {offer.early for offer in offers.values()}
    if len(instants) > 1:
        return "the ranks that have it have it of two instants, before and at the forward"
    early = instants.pop()
    lacking = [rank for rank in range(len(views)) if rank not in offers]
    # A rank beyond the former world uses another rank's own state in any case.
    bare = [r for r in lacking if r < key.world and (key, early) not in views[r].halves]
    return Plan(min(offers), tuple(lacking), tuple(bare), early)


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
        bare: the receiving ranks that also take over the sender's rank-local state.
        size: bytes of the largest rank's part, from which the time to wait for each other follows.
        why: the reason for the choice, in one sentence.
        fell_back: why newer snapshots, or parts of them, are not whole; newest first.
        left: newer snapshots that are whole and were not chosen, or that do not count, and why.
        widen: every rank must scan all regions below the path, then decide again.
        void: nothing was ever written on any rank, or nothing was ever whole.
        overtaken: a running job has overwritten a snapshot that a rank had found; scan again.
    """

    key: Key | None
    why: str = ""
    fell_back: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    widen: bool = False
    void: bool = False
    overtaken: bool = False
    early: bool = False
    heals: tuple[tuple[int, int], ...] = ()
    bare: tuple[int, ...] = ()
    size: int = 0

    @classmethod
    def heard(cls, said: Said) -> Choice:
        """Decode the message that `decide_restore` made."""
        key = said["key"]
        lists = {name: tuple(said[name]) for name in ("fell_back", "left", "bare")}
        lists["heals"] = tuple((rank, donor) for rank, donor in said["heals"])
        return cls(**{**said, "key": key and Key(*key), **lists})


def decide_restore(said: Sequence[Said]) -> dict[str, Any]:
    """Decide the restore round on rank 0, from the message of every rank.

    Raises:
        CoordinationError: the ranks ask for different steps or paths, or their regions are of
            different jobs.
    """
    return asdict(decide([RankView.heard(each) for each in said]))


def decide(views: Sequence[RankView]) -> Choice:
    """Choose the snapshot from the views of all ranks; a single process passes one view."""
    _must_agree("step", [str(view.step) for view in views], "ask for the same step=")
    _must_agree("path", [view.path for view in views], "give every rank the same path=")
    ruling = rule(_speaking(views))
    found: dict[Key, list[SnapshotOffer]] = {}
    for view in views:
        for offer in view.offers:
            found.setdefault(offer.key, []).append(offer)
    excluded = {key: why for key in found if (why := ruling.excludes(key))}
    counting = sorted(
        (key for key in found if key not in excluded), key=lambda k: (age(ruling, k), -k.step)
    )
    left = [f"step {key.step}: {excluded[key]}" for key in sorted(excluded, key=lambda k: -k.step)]
    others = any(key.world != len(views) for key in counting)
    if not all(view.wide for view in views) and (others or any(v.lacking for v in views)):
        return Choice(None, "another number of ranks wrote this, or regions are away", widen=True)
    broken = _told(views)
    plans = {key: plan(key, views) for key in counting if len(found[key]) < len(views)}
    whole = [key for key in counting if not isinstance(plans.get(key), str)]
    chosen, why = _prefer(whole, found, plans, left, broken)
    healed = plans.get(chosen) if chosen is not None else None
    anew = _never_whole(views, {key.timeline for key in excluded})
    if anew and chosen and chosen.step <= 1 and isinstance(healed, Plan) and healed.bare:
        chosen = healed = None  # to begin anew costs one step, and every rank has its own state
    newer = counting[: counting.index(chosen)] if chosen in counting else counting
    broken += [_missing(key, views, plans[key]) for key in newer if key in plans]
    _must_be_readable(views, healed)
    return Choice(
        chosen,
        why,
        tuple(broken[:_LISTED]),
        tuple(left[:_LISTED]),
        void=all(view.void for view in views) or (chosen is None and anew),
        overtaken=any(view.overtaken for view in views),
        early=chosen is not None and _is_early(found[chosen]),
        heals=healed.heals if isinstance(healed, Plan) else (),
        bare=healed.bare if isinstance(healed, Plan) else (),
        size=max((offer.size for offer in found.get(chosen, ())), default=0) if chosen else 0,
    )


def _speaking(views: Sequence[RankView]) -> list[Lineage]:
    """Return the lineages that decide which snapshots count.

    A region that has begun a timeline without an ancestor, and holds no snapshot of it yet, says
    nothing about the other ranks' snapshots: the job was stopped before the others had begun that
    timeline. It is asked only if there is no other.
    """
    every = [view.lineage for view in views if view.lineage is not None and view.lineage.head]
    held = [v.lineage for v in views if v.lineage and v.lineage.head and v.young != v.lineage.head]
    return held or every


def _missing(key: Key, views: Sequence[RankView], planned: Plan | str) -> str:
    lacking = [rank for rank, view in enumerate(views) if view.offer(key) is None]
    why = f"; not healed: {planned}" if isinstance(planned, str) else ""
    return f"step {key.step}: not whole, missing on rank(s) {named(lacking)}{why}"


def _must_be_readable(views: Sequence[RankView], healed: Plan | str | None) -> None:
    """Check that a region that cannot be opened belongs to a rank that is given what it lacks.

    Raises:
        CoordinationError: names the ranks whose regions cannot be read, and why.
    """
    given = healed.lacking if isinstance(healed, Plan) else ()
    unread = [(r, view.broken) for r, view in enumerate(views) if view.broken and r not in given]
    if unread:
        told = "; ".join(f"rank {rank}: {why}" for rank, why in unread[:_LISTED])
        raise CoordinationError(f"no rank can restore: {told}")


def _never_whole(views: Sequence[RankView], left: Collection[int]) -> bool:
    """Tell whether the job was stopped before its first whole snapshot.

    That is so if the region of some rank is of the newest timeline, which has no ancestor, and
    holds nothing but what that rank saved at a failure. Such snapshots may be of steps that do not
    go together with those of other ranks. Nothing that ever counted is lost: by I6 (old before new)
    a whole snapshot stays on every rank until a newer one is whole. A job that restarts by itself
    must be able to start in this state.

    Ranks may be of two timelines, if they were stopped while they began the second one. If a
    snapshot of any other timeline was excluded (`left`), the answer is False, so that it is not
    ignored silently.
    """
    begun = [(view, view.lineage) for view in views if view.lineage and view.lineage.head]
    alike = all(not each.ancestors and each.world == len(views) for _, each in begun)
    alike = alike and views[0].step is None and {each.head for _, each in begun}.issuperset(left)
    return alike and any(view.young == each.head for view, each in begun)


def _told(views: Sequence[RankView]) -> list[str]:
    if len(views) == 1:
        return list(views[0].problems)
    return [f"rank {r}: {text}" for r, view in enumerate(views) for text in view.problems]


def _prefer(
    whole: Sequence[Key],
    found: Mapping[Key, Sequence[SnapshotOffer]],
    plans: Mapping[Key, Plan | str],
    left: list[str],
    broken: list[str],
) -> tuple[Key | None, str]:
    """Return the snapshot to restore and why, or None and why; add to `left` and `broken`.

    The newest comes first, but suspect snapshots come after all others, and an inexact one yields
    to an exact one that is near. A snapshot is suspect or early if it is so on any rank. It is
    inexact if it was finished early, or if a rank restores it without its own data position:
    repeating one step costs less.
    """

    def inexact(key: Key) -> str:
        planned = plans.get(key)
        if _is_early(found[key]):
            return "was finished early"
        if isinstance(planned, Plan) and planned.bare:
            return f"is without what is rank(s) {named(planned.bare)}'s own"
        return ""

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
    planned, how = plans.get(first), inexact(first)
    why = f"step {first.step} is the newest that is whole"
    if isinstance(planned, Plan):
        why = f"step {first.step} is the newest: {planned.why}"
    if not how:
        return first, why
    early = _is_early(found[first])
    exact = next((key for key in clean if not inexact(key)), None)
    if exact is not None and is_near(first.step, exact.step):
        left.append(f"step {first.step} {how}, and step {exact.step} is exact")
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
