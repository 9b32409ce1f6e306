"""The agreement of all ranks at attach: they belong together, and share one new timeline."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from lightck.distributed.rounds import Rounds, Said
from lightck.errors import CoordinationError

_NAMED_RANKS = 8


@dataclass(frozen=True, slots=True)
class Identity:
    """The facts about a rank that must be the same on every rank at attach.

    Attributes:
        run_id: the job's id, 16 bytes.
        world: number of ranks.
        path: the path below which each rank has its region.
        slots: number of slots in each region.
        policy: how due steps are decided, such as `every 5 steps`.
        restored: (timeline, step) that this rank continues; None for a fresh start.
        step: the last complete step; training goes on after it.
    """

    run_id: bytes
    world: int
    path: str
    slots: int
    policy: str = ""
    restored: tuple[int, int] | None = None
    step: int = 0


def agree_on_attach(rounds: Rounds, identity: Identity) -> int:
    """Compare the identities of all ranks; return the id of a new timeline, the same on all.

    Raises:
        CoordinationError: the identities differ; names the field, the values and the ranks. Raised
            on every rank.
    """
    said = {**asdict(identity), "run_id": identity.run_id.hex()}
    return int(rounds.agree("attach", said, decide_attach)["timeline"])


def decide_attach(said: Sequence[Said]) -> Said:
    """Decide the attach round on rank 0: draw a timeline id, or raise if the identities differ."""
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
            found = "; ".join(f"{v} on rank(s) {named(r)}" for v, r in list(values.items())[:4])
            raise CoordinationError(f"the ranks differ in {field}: {found}; {remedy}")
    return {"timeline": secrets.randbits(63) | 1}


def named(ranks: Sequence[int]) -> str:
    """List ranks for a message: the first 8, and how many more."""
    more = f" and {len(ranks) - _NAMED_RANKS} more" if len(ranks) > _NAMED_RANKS else ""
    return ", ".join(str(r) for r in ranks[:_NAMED_RANKS]) + more
