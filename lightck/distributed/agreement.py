"""What ranks agree on before they train: a timeline at attach, a snapshot at restore.

The decisions are pure functions of what every rank said; `Rounds` carries them. What counts at
restore is the content of the regions, never a fate key: keys may be lost with the store, and a
snapshot whose fate was `dead` or never known, but that every rank needed still holds whole, is
whole (a rank reuses a dead slot only by invalidating it first, and then no longer offers it).
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lightck.distributed.exchange import Rounds, Said
from lightck.errors import CoordinationError

MAX_CANDIDATES = 16  # per rank: slots of one region, or a few regions of a larger former world
MAX_TIMELINES = 17  # the newest and its ancestors in a superblock
_NAMED = 8

Covers = Callable[[frozenset[int]], bool]
"""Whether snapshots of these former ranks together hold the whole state."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A snapshot that a rank can read.

    Attributes:
        timeline: that wrote it.
        step: its step.
        holder: the rank that wrote it, in the world of that time.
        world: number of ranks at that time.
        early: finished before the boundary instant (b).
        suspect: replicas were found to differ.
        verified: this rank has checked its payload.
    """

    timeline: int
    step: int
    holder: int
    world: int
    early: bool = False
    suspect: bool = False
    verified: bool = False


@dataclass(frozen=True, slots=True)
class Choice:
    """What all ranks restore.

    Attributes:
        timeline: of the snapshot; None if there is none.
        step: of the snapshot.
        world: number of ranks that wrote it.
        why: one sentence.
        passed_over: newer ones and why they were not chosen, newest first; at most eight.
    """

    timeline: int | None
    step: int
    world: int
    why: str
    passed_over: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Identity:
    """What must be the same on every rank at attach.

    Attributes:
        run_id: 16 bytes.
        world: number of ranks.
        path: the path below which each rank has its region.
        slots: per region.
        policy: how due steps are decided, such as `every 5 steps`.
        restored: (timeline, step) that this rank continues; None for a fresh start.
        step: the last complete one: training goes on after it.
    """

    run_id: bytes
    world: int
    path: str
    slots: int
    policy: str = ""
    restored: tuple[int, int] | None = None
    step: int = 0


def agree_on_attach(rounds: Rounds, identity: Identity) -> int:
    """Compare the identities and draw a timeline; returns its id, the same on every rank.

    Raises:
        CoordinationError: something differs, named with the ranks; on every rank.
    """
    said = {**asdict(identity), "run_id": identity.run_id.hex()}
    return int(rounds.agree("attach", said, decide_attach)["timeline"])


def decide_attach(said: Sequence[Said]) -> Said:
    """Rank 0's decision at attach."""
    remedies = {
        "run_id": "regions of two jobs are mixed: give every rank the same run",
        "world": "every rank must be started for the same world",
        "path": "give every rank the same path=; it may be node-local",
        "slots": "give every rank the same slots=",
        "policy": "give every rank the same policy=",
        "restored": "every rank must restore the same snapshot, or none",
        "step": "every rank must attach at the same step",
    }
    for field, remedy in remedies.items():
        values: dict[str, list[int]] = {}
        for rank, each in enumerate(said):
            values.setdefault(str(each[field]), []).append(rank)
        if len(values) > 1:
            found = "; ".join(f"{v} on rank(s) {_ranks(r)}" for v, r in list(values.items())[:4])
            raise CoordinationError(f"the ranks differ in {field}: {found}; {remedy}")
    return {"timeline": secrets.randbits(63) | 1}


def agree_on_restore(
    rounds: Rounds,
    candidates: Sequence[Candidate],
    timelines: Sequence[int],
    *,
    covers: Callable[[int], Covers] | None = None,
    step: int | None = None,
) -> Choice:
    """Choose the newest snapshot that is whole over the ranks needed for it.

    Args:
        rounds: over the job's store.
        candidates: what this rank can read, of the timelines that count in its regions; the newest
            `MAX_CANDIDATES` are said.
        timelines: of its region, the newest first, then its ancestors; empty without a region.
        covers: for a former world: whether snapshots of a set of its ranks suffice; default: all of
            its ranks are needed. Used on rank 0.
        step: only this one, if the user named it.

    Returns:
        The choice, the same on every rank; `timeline` is None if there is nothing to restore.

    Raises:
        CoordinationError: ranks ask for different steps, or one did not come; on every rank.
    """
    newest = sorted(candidates, key=lambda c: (_age(timelines, c.timeline), -c.step))
    said = {
        "candidates": [list(asdict(c).values()) for c in newest[:MAX_CANDIDATES]],
        "timelines": list(timelines[:MAX_TIMELINES]),
        "step": step,
    }
    decision = rounds.agree("restore", said, lambda every: decide_restore(every, covers))
    return Choice(**{**decision, "passed_over": tuple(decision["passed_over"])})


def decide_restore(
    said: Sequence[Said], covers: Callable[[int], Covers] | None = None
) -> dict[str, Any]:
    """Rank 0's decision at restore: a pure function of what the ranks said."""
    steps = {each["step"] for each in said}
    if len(steps) > 1:
        raise CoordinationError(f"the ranks ask for different steps: {sorted(map(str, steps))}")
    wanted = steps.pop()
    ruling = _ruling([each["timelines"] for each in said if each["timelines"]])
    holders: dict[tuple[int, int, int], set[int]] = {}
    flags: dict[tuple[int, int, int], Candidate] = {}
    for each in said:
        for values in each["candidates"]:
            c = Candidate(*values)
            identity = (c.timeline, c.step, c.world)
            holders.setdefault(identity, set()).add(c.holder)
            known = flags.get(identity, c)
            # One rank's suspicion, or one rank's early finish, is everybody's.
            flags[identity] = Candidate(
                *identity[:2], 0, c.world, c.early or known.early, c.suspect or known.suspect
            )
    considered = [i for i in flags if wanted in (None, i[1])]
    order = sorted(considered, key=lambda i: (_age(ruling, i[0]), -i[1]))
    abandoned = [i for i in order if i[0] not in ruling]
    reasons = [f"step {step}: of a timeline that was abandoned" for _, step, _ in abandoned]
    whole = []
    for identity in order[: len(order) - len(abandoned)]:
        _, step, world = identity
        held = frozenset(holders[identity])
        if not (covers(world)(held) if covers else held >= frozenset(range(world))):
            missing = [r for r in range(world) if r not in held]
            reasons.append(f"step {step}: not whole, missing on rank(s) {_ranks(missing)}")
        else:
            whole.append(identity)
            if not (flags[identity].suspect or flags[identity].early):
                break  # nothing older can be preferred to it
    chosen, why = _prefer(whole, flags, reasons)
    passed_over = tuple(reasons[:_NAMED])
    if chosen is None:
        asked = "no snapshot" if wanted is None else f"no snapshot of step {wanted}"
        return asdict(Choice(None, -1, 0, f"{asked} is whole on any set of ranks", passed_over))
    return asdict(Choice(*chosen, why, passed_over))


def _prefer(
    whole: Sequence[tuple[int, int, int]],
    flags: Mapping[tuple[int, int, int], Candidate],
    reasons: list[str],
) -> tuple[tuple[int, int, int] | None, str]:
    """Newest first; one found suspect comes after all others, an early one after an exact twin."""
    clean = [i for i in whole if not flags[i].suspect]
    reasons += [f"step {i[1]}: suspect, replicas differed" for i in whole if flags[i].suspect]
    if not clean:
        if not whole:
            return None, ""
        return whole[0], f"step {whole[0][1]} is suspect, but no other is whole"
    first = clean[0]
    if flags[first].early and len(clean) > 1:
        second = clean[1]
        if not flags[second].early and second[0] == first[0] and first[1] - second[1] <= 1:
            reasons.append(f"step {first[1]}: early, and step {second[1]} is exact")
            first = second
    return first, f"step {first[1]} is the newest that is whole over the ranks needed"


def _ruling(lineages: Sequence[Sequence[int]]) -> list[int]:
    """The lineage that counts: of the newest timeline of any rank.

    A rank that died between the others' attach and its own is one timeline behind: its newest is an
    ancestor of theirs. Timelines that are no ancestors of each other mean regions that were away
    for whole attaches; then the one that most ranks have counts.
    """
    votes = Counter(lineage[0] for lineage in lineages)
    older = {ancestor for lineage in lineages for ancestor in lineage[1:]}
    heads = [t for t in votes if t not in older] or list(votes)
    head = max(heads, key=lambda t: (votes[t], t), default=None)
    return list(next((each for each in lineages if each[0] == head), []))


def _age(timelines: Sequence[int], timeline: int) -> int:
    return timelines.index(timeline) if timeline in timelines else len(timelines)


def _ranks(ranks: Sequence[int]) -> str:
    more = f" and {len(ranks) - _NAMED} more" if len(ranks) > _NAMED else ""
    return ", ".join(str(r) for r in ranks[:_NAMED]) + more
