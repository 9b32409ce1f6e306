"""Every order in which a few ranks and a store can act, explored: the model of the commit protocol.

A rank is a real `CommitProtocol` with slots. The scheduler picks who acts next: a rank's program (a
due step: open or slip; a commit; a tear), one call to the store with or without effect and answer,
or one read by its watcher. States that were seen are not visited again.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from lightck.distributed.commit.protocol import (
    SUSPECT,
    Add,
    Claim,
    CommitProtocol,
    Delete,
    DueStep,
    Read,
)

NEVER = 1e9  # patience is a case of its own


@dataclass
class Rank:
    ledger: CommitProtocol
    slots: list[int | None]
    """Step whose snapshot a slot holds or gets; None: empty."""
    records: set[int] = field(default_factory=set)
    """Steps whose record is durable in a slot."""
    opened: int | None = None
    """Step whose copy is going on."""
    at: int = 0
    """DueStep steps that this rank has passed."""


@dataclass
class World:
    ranks: list[Rank]
    store: dict[str, bytes]
    due: int
    tears: int
    outages: int
    deaths: int = 0
    """Ranks that may lose patience at any instant."""
    unlike: int = 0
    """Up to this step the last rank's state has another form than the others'."""
    whole: list[int] = field(default_factory=list)
    """These are whole and above suspicion."""
    suspect: list[int] = field(default_factory=list)
    """These are whole and suspect."""
    odd: dict[int, int] = field(default_factory=dict)
    """Per step the rank whose replica differs there."""


@dataclass
class Found:
    states: int = 0
    whole: int = 0
    suspect: int = 0
    dead: int = 0
    ends: int = 0


def world(
    ranks: int,
    due: int,
    *,
    slots: int,
    tears: int = 0,
    outages: int = 0,
    deaths: int = 0,
    unlike: int = 0,
    odd: dict[int, int] | None = None,
) -> World:
    members = [
        Rank(
            CommitProtocol(
                r,
                ranks,
                patience_s=NEVER,
                on_fate=_ignore,
                on_suspect=_ignore,
                compares=odd is not None,
            ),
            [None] * slots,
        )
        for r in range(ranks)
    ]
    return World(members, {}, due, tears, outages, deaths, unlike, odd=odd or {})


def _ignore(*told: object) -> None:
    """Fates are looked up, not told."""


def explore(
    start: World, limit: int = 200_000, choose: Callable[[Rank], int | None] | None = None
) -> Found:
    """Visit every state; raise AssertionError in one that breaks a guarantee."""
    choose = choose or free_slot
    found = Found()
    seen: set[bytes] = set()
    stack = [pickle.dumps(start)]
    while stack:
        packed = stack.pop()
        moves = 0
        for move in _moves(pickle.loads(packed), choose):
            state = pickle.loads(packed)
            move(state)
            moves += 1
            _check(state)
            after = pickle.dumps(state)
            if after not in seen:
                seen.add(after)
                assert len(seen) <= limit, f"more than {limit} states"
                stack.append(after)
        if not moves:
            _check_end(pickle.loads(packed), found)
    found.states = len(seen)
    return found


def free_slot(rank: Rank) -> int | None:
    """The slot to overwrite: an empty one, else one that the protocol lets go."""
    for index, step in enumerate(rank.slots):
        if step is None:
            return index
    for index, step in enumerate(rank.slots):
        if step != rank.opened and rank.ledger.reusable(0, step):
            return index
    return None


def _moves(state: World, choose: Callable[[Rank], int | None]) -> Iterator[Callable[[World], None]]:
    for r, rank in enumerate(state.ranks):
        if rank.opened is None and rank.at < state.due:
            yield lambda w, r=r: _step(w, w.ranks[r], choose)
        if rank.opened is not None:
            yield lambda w, r=r: _commit(w, w.ranks[r])
            if state.tears:
                yield lambda w, r=r: _tear(w, w.ranks[r])
        watched = rank.ledger.watched
        if watched is not None and f"f/{watched}" in state.store:
            yield lambda w, r=r, s=watched: w.ranks[r].ledger.heard(s, w.store[f"f/{s}"])
        if watched is not None and state.deaths:
            yield lambda w, r=r: _lose_patience(w, w.ranks[r])
        call = rank.ledger.next_call(NEVER / 2)
        if call is not None:
            yield lambda w, r=r: _call(w, w.ranks[r], True, True)
            if state.outages:
                yield lambda w, r=r: _call(w, w.ranks[r], False, False)
                yield lambda w, r=r: _call(w, w.ranks[r], True, False)


def _step(state: World, rank: Rank, choose: Callable[[Rank], int | None]) -> None:
    due = DueStep(rank.at + 1, rank.at)
    rank.at += 1
    slot = choose(rank) if rank.ledger.reachable and not rank.ledger.ended else None
    if slot is None:
        rank.ledger.lost(due, "slip", 0.0)
        return
    old = rank.slots[slot]
    rank.ledger.opened(due, 0.0)
    if old is not None:
        rank.records.discard(old)
    rank.slots[slot] = rank.opened = due.step


def _commit(state: World, rank: Rank) -> None:
    step, rank.opened = rank.opened, None
    assert step is not None
    rank.records.add(step)
    other = step <= state.unlike and rank is state.ranks[-1]
    digest = b""
    if rank.ledger.compares:
        digest = b"all:%d" % (state.odd.get(step) == rank.ledger.rank)
    rank.ledger.committed(step, 0.0, b"other" if other else b"form", digest)


def _tear(state: World, rank: Rank) -> None:
    step, rank.opened = rank.opened, None
    assert step is not None
    state.tears -= 1
    rank.ledger.lost(DueStep(step, step - 1), "torn", 0.0)


def _lose_patience(state: World, rank: Rank) -> None:
    state.deaths -= 1
    rank.ledger.patience_s = -1.0
    _call(state, rank, True, True)
    rank.ledger.patience_s = NEVER


def _call(state: World, rank: Rank, effect: bool, answer: bool) -> None:
    call = rank.ledger.next_call(NEVER / 2)
    assert call is not None
    result: object = None
    store = state.store
    if effect:
        match call:
            case Add(key, amount):
                result = int(store.get(key, b"0")) + amount
                store[key] = str(result).encode()
            case Claim(key, value):
                result = store.setdefault(key, value)
                if key.startswith("f/") and result.startswith(b"whole"):
                    found = state.whole if result == b"whole" else state.suspect
                    found[:] = sorted({*found, int(key.partition("/")[2])})
            case Read(key):
                result = store.get(key)
            case Delete(keys):
                for each in keys:
                    store.pop(each, None)
    if answer:
        rank.ledger.answered(result, 0.0)
    else:
        state.outages -= 1
        rank.ledger.failed(0.0)


def _check(state: World) -> None:
    fates: dict[int, set[str]] = {}
    for rank in state.ranks:
        for step in range(1, state.due + 1):
            fate = rank.ledger.fate(step).value
            if fate != "unknown":
                fates.setdefault(step, set()).add(fate)
    for step, said in fates.items():
        assert len(said) == 1, f"step {step} is {said}"
        stored = state.store.get(f"f/{step}")
        assert stored is None or stored.startswith(b"whole") == (said == {"whole"})
    assert all(step > state.unlike for step in state.whole), "whole with states that differ"
    # What a crash at this very instant leaves: the newest whole step, or a newer one, everywhere;
    # nothing that is known to be suspect takes the place of one that is not.
    common = set.intersection(*(rank.records for rank in state.ranks))
    left, kept = common, state.suspect
    if state.whole:
        left, kept = common - {*state.suspect}, state.whole
    if kept:
        assert left and max(left) >= kept[-1], (
            f"step {kept[-1]} is whole, and all ranks hold {sorted(left)}"
        )
    seen = [step for step in state.odd if step in state.whole + state.suspect]
    trusted = [step for step in state.whole if seen and step >= min(seen)]
    assert not trusted, f"replicas differ since step {min(seen)}, and {trusted} are trusted"
    for step in {*state.suspect} & {*state.odd}:
        said = state.store.get(f"f/{step}")
        assert said in (None, SUSPECT + b"%d" % step), f"what differs at {step} is named: {said!r}"
    blamed = [step for step in state.suspect if step < min(state.odd, default=state.due + 1)]
    assert not blamed, f"{blamed} are suspect, and replicas differ at {sorted(state.odd)}"


def _check_end(state: World, found: Found) -> None:
    """Nothing more can happen: every rank has come through and knows every fate."""
    found.ends += 1
    for rank in state.ranks:
        assert rank.at == state.due, "a rank stopped before the end"
        assert not rank.ledger.unsettled, f"never settled: {rank.ledger.unsettled}"
    found.whole += len(state.whole)
    found.suspect += len(state.suspect)
    found.dead += state.due - len(state.whole) - len(state.suspect)
