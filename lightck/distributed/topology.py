"""The ranks of the job: rank, world, which ranks share a node, and the run id that all agree on."""

from __future__ import annotations

import hashlib
import os
import secrets
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch.distributed as dist

from lightck.distributed.rounds import AgreementRounds, Message
from lightck.errors import CoordinationError

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True)
class Topology:
    """The ranks of the job, as one of them sees them.

    Attributes:
        rank: the rank, below `world`.
        world: number of ranks.
        peers: the ranks of its node, itself among them, in order.
        run_id: 16 bytes, the same on every rank.
    """

    rank: int = 0
    world: int = 1
    peers: tuple[int, ...] = (0,)
    run_id: bytes = bytes(16)


def here() -> tuple[int, int]:
    """Return (rank, world) of torch.distributed; one rank if it is not initialized."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def run_digest(name: str) -> bytes:
    """Return the 16 bytes that stand for a run's name, as in a region's superblock."""
    return hashlib.blake2b(name.encode(), digest_size=16).digest()


def agree_on_topology(
    rounds: AgreementRounds | None,
    *,
    name: str | None = None,
    environment: Mapping[str, str] | None = None,
    node: str | None = None,
    reach: str | None = None,
    found: bytes | None = None,
    kind: str = "attach",
) -> Topology:
    """Find out which ranks share this rank's node, and agree on the run id with all.

    Args:
        rounds: over the job's store; None with one rank.
        name: of the run; else `LIGHTCK_RUN_ID`, else `TORCHELASTIC_RUN_ID`. Ranks that have a name
            must have the same one; with none at all rank 0 draws the run id.
        environment: where the names are looked up; default `os.environ`.
        node: identifies this node; default host name and the kernel's boot id.
        reach: tells apart ranks of a node that cannot read each other's regions, which then count
            as nodes of their own; "": no other rank can read this rank's. None: all can.
        found: run id of the region that this rank has already. Those of all ranks must be the same,
            and it becomes the job's: a restart may well have another name.
        kind: what the ranks are about to do, for messages.

    Raises:
        CoordinationError: names or regions' runs differ, or a rank did not come in time; on every
            rank.
    """
    variables = ("LIGHTCK_RUN_ID", "TORCHELASTIC_RUN_ID")
    known = os.environ if environment is None else environment
    name = name or next((known[v] for v in variables if known.get(v)), None)
    # torchrun's own default is the same in every job, so that it identifies none.
    name = None if name == "none" else name
    if rounds is None:
        return Topology(run_id=run_digest(name) if name else secrets.token_bytes(16))
    message = {
        "name": name,
        "node": _node_name(rounds.rank, reach, node),
        "world": rounds.world,
        "found": found.hex() if found else None,
    }
    return topology_of(rounds.rank, rounds.agree(kind, message, decide_topology))


def decide_topology(messages: Sequence[Message]) -> Message:
    """Decide on rank 0: the run id, and nodes as runs of consecutive ranks, which keeps it short.

    Raises:
        CoordinationError: worlds, names or regions' runs differ.
    """
    worlds = {each["world"] for each in messages}
    if worlds != {len(messages)}:
        raise CoordinationError(f"the ranks count differently: worlds of {sorted(worlds)}")
    names: dict[str, int] = {}
    for rank, each in enumerate(messages):
        if each["name"] is not None:
            names.setdefault(each["name"], rank)
    if len(names) > 1:
        found = ", ".join(f"{name!r} on rank {rank}" for name, rank in list(names.items())[:8])
        raise CoordinationError(
            f"the ranks belong to different runs: {found}; give all of them the same "
            "LIGHTCK_RUN_ID (or run_id=)"
        )
    run_id = _found(messages)
    if run_id is None:
        run_id = run_digest(next(iter(names))) if names else secrets.token_bytes(16)
    numbers: dict[str, int] = {}
    nodes = [numbers.setdefault(each["node"], len(numbers)) for each in messages]
    runs = [[node, len(list(group))] for node, group in groupby(nodes)]
    return {"run_id": run_id.hex(), "runs": runs}


def _found(messages: Sequence[Message]) -> bytes | None:
    """Return the run id of the regions that exist; None without any.

    Raises:
        CoordinationError: they belong to different runs.
    """
    runs: dict[str, list[int]] = {}
    for rank, each in enumerate(messages):
        if each.get("found"):
            runs.setdefault(each["found"], []).append(rank)
    if len(runs) > 1:
        listed = "; ".join(f"run {run} on rank(s) {ranks[:8]}" for run, ranks in runs.items())
        raise CoordinationError(
            f"the ranks' regions belong to different runs: {listed}; give every rank the same path="
            " with the regions of one job, or move the others' away"
        )
    return bytes.fromhex(next(iter(runs))) if runs else None


def topology_of(rank: int, decision: Mapping[str, Any]) -> Topology:
    """Return a rank's topology according to a decision of `decide_topology`."""
    nodes = [node for node, count in decision["runs"] for _ in range(count)]
    peers = tuple(r for r, node in enumerate(nodes) if node == nodes[rank])
    return Topology(
        rank=rank,
        world=len(nodes),
        peers=peers,
        run_id=bytes.fromhex(decision["run_id"]),
    )


def _node_name(rank: int, reach: str | None, node: str | None) -> str:
    within = f"rank {rank}" if reach == "" else reach or ""
    return f"{node or _this_node()} {within}"


def _this_node() -> str:
    boot = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""
    return f"{socket.gethostname()} {boot}"
