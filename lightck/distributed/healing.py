"""How ranks that lack a snapshot of replicated state get it from one that has it.

A pure function of what every rank offers. A step is healed only if it is known to be replicated, by
the word of every part of it that is there: each manifest says whether all parameters and optimizer
state were held alike by every rank when it was written. What is sharded, or in part a rank's own,
has no replica and is never healed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightck.distributed.agreement import named
from lightck.distributed.lineage import Key
from lightck.distributed.views import View


@dataclass(frozen=True, slots=True)
class Plan:
    """Who gets a snapshot from whom.

    Attributes:
        donor: the lowest rank that offers it.
        lacking: ranks that do not.
        bare: those among them whose own state of that instant is not there either: they take over
            the donor's, as ranks beyond the former world do.
        early: finished before forward start, like every part that is there.
    """

    donor: int
    lacking: tuple[int, ...]
    bare: tuple[int, ...]
    early: bool

    @property
    def heals(self) -> tuple[tuple[int, int], ...]:
        """(rank that gets, rank that gives)."""
        return tuple((rank, self.donor) for rank in self.lacking)

    @property
    def why(self) -> str:
        """How it becomes whole, for a sentence."""
        text = f"rank(s) {named(self.lacking)} get it from rank {self.donor}"
        if self.bare:
            text += f", rank(s) {named(self.bare)} with that rank's buffers and data position"
        return text


def plan(key: Key, views: Sequence[View]) -> Plan | str:
    """How every rank comes to a snapshot that some of them offer, or why that cannot be.

    Args:
        key: which; at least one rank offers it.
        views: of every rank.
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
    # A rank beyond the former world takes over another's own state anyhow.
    bare = [r for r in lacking if r < key.world and (key, early) not in views[r].halves]
    return Plan(min(offers), tuple(lacking), tuple(bare), early)
