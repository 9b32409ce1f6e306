"""Which parameters and optimizer tensors the ranks that wrote a snapshot did not hold alike.

Where another number of ranks restores it, each takes over the state of one that wrote. That is
right for what all of them held alike. Of the rest (experts outside of DistributedDataParallel, an
optimizer that divides its state among ranks) it would lose what the others held.

That it was alike is known from the snapshot's own word (`Shared.told`), from its being written in
shares, or else from the checksums that every rank's region has of it.
"""

from __future__ import annotations

from typing import Any

from lightck.capture.assembled import Assembled
from lightck.distributed.recall import Found
from lightck.distributed.replicas import is_own
from lightck.region.region import Candidate


def unequal(found: Found) -> dict[str, str]:
    """Name to why it cannot go to another number of ranks; of a snapshot of as many, nothing.

    Sharded tensors (DTensors) are not among them: they know their places. Nor are buffers, extras
    and what optimizers keep beside their state: of those each rank has its own by rule.
    """
    snapshot, world = found.snapshot, found.key.world
    if world in (1, found.holdings.world) or not isinstance(snapshot, Assembled):
        return {}  # what was given to this rank is alike by the word of whoever wrote it
    if snapshot.replica is not None:
        return {}
    rank = snapshot.record.rank
    own = _alone(snapshot.parts[0].candidate)
    why: dict[str, str] = {}
    for other in range(world):
        if other == rank:
            continue
        state = found.holdings.assembled(found.key, other, early=snapshot.early)
        if not isinstance(state, Assembled):
            lacking = f"what rank {other} of {world} held of it is not there to compare"
            why = {**dict.fromkeys(own, lacking), **why}
            continue
        theirs = _alone(state.parts[0].candidate)
        for name in {**own, **theirs}:
            if own.get(name) != theirs.get(name):
                why.setdefault(name, _in_words(name, rank, own, other, theirs, world))
    return why


def _alone(candidate: Candidate) -> dict[str, Any]:
    """What a rank wrote alone and ranks may hold alike: form and checksum by name."""
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
