"""Shares as they lie in regions: the ranks of a node, in one process, write and read back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from lightck.distributed.sharding import SharePartitioner
from lightck.distributed.topology import Topology
from lightck.pipeline.pipeline import Pipeline
from lightck.pipeline.placement import HostPlacement, Mode, PlacementChoice
from lightck.pipeline.schedule import Eager
from lightck.reader.assembly import Assembly, assemble, peers_of
from lightck.region import location, native_region
from lightck.region.native_pool import NativePool
from lightck.region.native_region import RegionSpec
from lightck.region.region import Candidate, Region, open_and_recover
from lightck.state import tensor_layout
from lightck.state.inventory import CollectedState, StateTensor

TIMELINE = 5


def sharing(rank: int, world: int, own: Sequence[str] = ()) -> SharePartitioner:
    """All ranks are on one node; everything is replicated but buffers and what is named."""
    place_of = Topology(rank, world, rank, world, 0, tuple(range(world)), bytes(16))
    return SharePartitioner(
        place_of,
        lambda lives: {
            v.name
            for v in lives
            if v.role in ("parameter", "optimizer") and not v.alias_of and v.name not in own
        },
    )


class Writer:
    """A writer is one rank."""

    def __init__(
        self, folder: Path, rank: int, world: int, mode: Mode = "direct", *, proof: bool = True
    ) -> None:
        self.share = sharing(rank, world)
        where = location.locate(folder, rank, create=True)
        spec = RegionSpec(bytes(16), 3, 1 << 16, rank, world, process_durable=True)
        self.region = Region.create(where, spec)
        self.region.native.branch(TIMELINE, [])
        self.region.info = self.region.native.describe()
        self.region.timeline = TIMELINE
        self.pool = NativePool(threads=1, chunk_bytes=4096, idle=False)
        self.pipeline = Pipeline(self.region, self.pool, Eager(), proof=proof)
        self.pipeline.placement = HostPlacement(PlacementChoice(mode, "the test asks for it"))

    def open(self, step: int, lives: Sequence[StateTensor]) -> None:
        """Open a snapshot at forward start; sources must not change until the fence."""
        shared = self.share(lives)
        collected = CollectedState(shared.lives, {}, shared.digest)
        total = sum(tensor_layout.describe(v).length for v in shared.lives)
        self.pipeline.placement.prepare(total, self.pool)
        flight = self.pipeline.open(step, collected, b"a", b"b")
        assert not isinstance(flight, str), flight

    def commit(self) -> bool:
        """Say whether what was open is committed; otherwise it was torn."""
        return self.pipeline.fence() and bool(list(self.pipeline.poll(None)))

    def write(self, step: int, lives: Sequence[StateTensor]) -> None:
        """Write and commit a whole snapshot."""
        self.open(step, lives)
        assert self.commit()

    def close(self) -> None:
        """Close the region, which stays."""
        self.pipeline.close()
        self.region.close()


@contextmanager
def writers(folder: Path, world: int, mode: Mode = "direct") -> Iterator[list[Writer]]:
    """Give a writer for every rank."""
    made: list[Writer] = []
    try:
        made += [Writer(folder, rank, world, mode) for rank in range(world)]
        yield made
    finally:
        for each in made:
            each.close()


class Readers:
    """Every rank's region, opened for reading; a context manager."""

    def __init__(self, folder: Path, world: int) -> None:
        self._looks = [
            open_and_recover(location.locate(folder, r, create=False)) for r in range(world)
        ]

    def __enter__(self) -> Readers:
        return self

    def __exit__(self, *_: object) -> None:
        for region, _ in self._looks:
            region.close()

    def found(self, rank: int, step: int) -> list[Candidate]:
        """A rank's snapshot of a step, if there is one, and its peers'."""
        every = [[c for c in r.candidates if c.record.step == step] for _, r in self._looks]
        own = every[rank]
        others = [c for r, held in enumerate(every) if r != rank for c in held]
        return [*own, *(peers_of(own[0], others) if own else [])]

    def assembled(self, rank: int, step: int) -> Assembly:
        """Return what `rank` would restore."""
        return assemble(self.found(rank, step))

    def contents(self, rank: int, step: int) -> dict[str, bytes]:
        """The bytes of every tensor of a rank's state, verified; aliases are resolved."""
        candidates, assembly = self.found(rank, step), self.assembled(rank, step)
        assert not assembly.missing, assembly.missing
        held = {}
        for name, entry in assembly.entries.items():
            data = np.zeros(entry.length, np.uint8)
            for piece in assembly.pieces.get(name, ()):
                candidate = candidates[piece.source]
                rows = np.zeros(1, native_region.READ_DTYPE)
                rows["offset"] = candidate.layout.offsets[piece.position]
                rows["length"], rows["crc"] = piece.length, candidate.manifest.crcs[piece.position]
                rows["destination"] = data.ctypes.data + piece.begin
                self._looks[candidate.record.rank][0].fetch(candidate, rows, [name], 1)
            held[name] = data.tobytes()
        for name, entry in assembly.entries.items():
            if entry.alias_of is not None:
                held[name] = held[entry.alias_of]
        return held


def stored(tensor: torch.Tensor) -> bytes:
    """The bytes that a region holds of a tensor."""
    if not tensor_layout.is_dense(tensor):
        tensor = tensor.resolve_conj().resolve_neg().contiguous()
    flat = tensor.detach().as_strided((tensor.numel(),), (1,))
    return flat.view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def whole(lives: Sequence[StateTensor]) -> dict[str, bytes]:
    """The bytes of these tensors."""
    return {live.name: stored(live.tensor) for live in lives}
