"""The plan by which ranks that lack a snapshot of replicated state get it from one that has it.

It is a pure function of every rank's offers. A step is healed only if it is known to be replicated,
as stated by every part of it that is there: each manifest says whether all parameters and optimizer
state were held alike by every rank when it was written. State that is sharded, or in part
rank-local, has no replica and is never healed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightck.distributed.agreement import named
from lightck.distributed.restore.lineage import Key
from lightck.distributed.restore.offers import View


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


def plan(key: Key, views: Sequence[View]) -> Plan | str:
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
