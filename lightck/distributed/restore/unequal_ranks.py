"""The parameters and optimizer tensors that the ranks that wrote a snapshot did not hold alike.

Where another number of ranks restores it, each takes over the state of one that wrote. That is
right for tensors that all of them held alike. Of the rest (experts outside of
DistributedDataParallel, an optimizer that divides its state among ranks) it would lose what the
others held.

Whether a tensor was alike is known from the snapshot's own statement (`RankShare.told`), from its
being written in shares, or else from the checksums that every rank's region has of it.
"""

from __future__ import annotations

from typing import Any

from lightck.distributed.restore.protocol import ChosenSnapshot
from lightck.distributed.sharding import is_own
from lightck.reader.assembly import AssembledSnapshot
from lightck.region.region import Candidate


def unequal(found: ChosenSnapshot) -> dict[str, str]:
    """Return, by name, why a tensor cannot be restored on another number of ranks; else nothing.

    Empty for a snapshot of as many ranks as now. Sharded tensors (DTensors) are not among them:
    they state their places. Nor are buffers, extras and what optimizers keep beside their state:
    each rank has its own of those by rule.
    """
    snapshot, world = found.snapshot, found.key.world
    if world in (1, found.holdings.world) or not isinstance(snapshot, AssembledSnapshot):
        return {}  # a received snapshot is alike, as stated by the ranks that wrote it
    if snapshot.replica is not None:
        return {}
    rank = snapshot.record.rank
    own = _alone(snapshot.parts[0].candidate)
    why: dict[str, str] = {}
    for other in range(world):
        if other == rank:
            continue
        state = found.holdings.assembled(found.key, other, early=snapshot.early)
        if not isinstance(state, AssembledSnapshot):
            lacking = f"what rank {other} of {world} held of it is not there to compare"
            why = {**dict.fromkeys(own, lacking), **why}
            continue
        theirs = _alone(state.parts[0].candidate)
        for name in {**own, **theirs}:
            if own.get(name) != theirs.get(name):
                why.setdefault(name, _in_words(name, rank, own, other, theirs, world))
    return why


def _alone(candidate: Candidate) -> dict[str, Any]:
    """Return form and checksum, by name, of tensors that a rank wrote and others may hold alike."""
    crcs = candidate.manifest.crcs
    return {
        e.name: (e.dtype, e.shape, e.strides, int(crcs[i]))
        for i, e in enumerate(candidate.layout.entries)
        if not is_own(e) and e.begin is None and e.alias_of is None and e.shard is None
    }


def _in_words(
    name: str, rank: int, own: dict[str, Any], other: int, theirs: dict[str, Any], world: int
) -> str:
    if name in own and name in theirs:
        return f"ranks {rank} and {other} of the {world} that wrote it held different ones"
    held, not_held = (rank, other) if name in own else (other, rank)
    return f"rank {held} of the {world} that wrote it held it, rank {not_held} did not"
