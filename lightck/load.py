"""Look into a region without a model: its snapshots, and one of them as mapped tensors."""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import torch

from lightck.capture import boundary, parts
from lightck.capture.filling import fresh
from lightck.config import Config
from lightck.errors import CorruptSnapshotError, NoSnapshotError
from lightck.region import backing, native, place
from lightck.region.choice import first_whole, is_there
from lightck.region.layout import Entry
from lightck.region.pool import usual_threads
from lightck.region.region import Candidate, Region, survey

SNAPSHOTS = pa.schema(
    [
        ("step", pa.uint64()),
        ("state", pa.string()),
        ("rank", pa.uint32()),
        ("slot", pa.uint32()),
        ("sequence", pa.uint64()),
        ("timeline", pa.uint64()),
        ("wall_time", pa.timestamp("us", "UTC")),
        ("tensors", pa.uint64()),
        ("payload_bytes", pa.uint64()),
        ("early", pa.bool_()),
        ("suspect", pa.bool_()),
        ("survives", pa.string()),
        ("problem", pa.string()),
        ("file", pa.string()),
    ]
)


def region_files(path: str | os.PathLike[str] | None) -> list[place.Place]:
    """Every rank's region at a path; a device or a pool is one region."""
    root = Config.resolve(path=path).path
    where = place.locate(root, 0, create=False)
    return [each for each in place.every_rank(where) if not backing.is_blank(each)]


def snapshots(path: str | os.PathLike[str] | None = None) -> pa.Table:
    """What is in the regions at `path`, newest first.

    `state` is `whole` (restorable: record, layout table and manifest hold; payload checksums are
    checked by `restore`, `load` and `lightck verify`), `abandoned` (on a branch that a later
    restore left behind) or `damaged` (`problem` says why). Safe while a trainer writes.

    Raises:
        RegionError: the place is not safe, or a file is not a region.
    """
    rows: list[dict[str, Any]] = []
    for where in region_files(path):
        region, recovery = survey(where)
        try:
            ranked = [(c, "whole") for c in recovery.candidates]
            ranked += [(c, "abandoned") for c in recovery.abandoned]
            rows += [row(region, candidate, state) for candidate, state in ranked]
            rows += [
                {"state": "damaged", "problem": text, "file": str(where.file)}
                for text in recovery.problems
            ]
        finally:
            region.close()
    return pa.Table.from_pylist(rows, schema=SNAPSHOTS)


def row(region: Region, candidate: Candidate, state: str) -> dict[str, Any]:
    """A row of `snapshots`."""
    record = candidate.record
    return {
        "step": record.step,
        "state": state,
        "rank": record.rank,
        "slot": record.slot,
        "sequence": record.sequence,
        "timeline": record.timeline,
        "wall_time": record.wall_time_ns // 1000,
        "tensors": len(candidate.layout.entries),
        "payload_bytes": record.payload_bytes,
        "early": record.early,
        "suspect": record.suspect,
        "survives": region.survives,
        "file": str(region.place.file),
    }


class _Mapping(mmap.mmap):
    """A private mapping of a region; the tensors over it keep it alive, and the lease with it."""


def load(
    path: str | os.PathLike[str] | None = None, step: int | Literal["latest"] = "latest"
) -> dict[str, Any]:
    """A snapshot as a plain state dict, without a model: nothing is read until it is used.

    Tensors are mapped copy-on-write: they may be changed, the region does not see it. Their slot is
    leased until the last of them is gone; a trainer that needs it slips its snapshots meanwhile.

    Returns:
        `model` (for `load_state_dict`), `optimizers` (one dict each, as torch's `state_dict` gives
        it), `extras` by name, `rng`, and `step`.

    Raises:
        NoSnapshotError: there is none, or none is whole.
        RegionError: the place is not safe or not a region.
    """
    candidate, tensors = _found(path, step)
    return as_state_dict(candidate, tensors.__getitem__)


def load_tensors(
    path: str | os.PathLike[str] | None = None, step: int | Literal["latest"] = "latest"
) -> tuple[int, dict[str, torch.Tensor]]:
    """The step and every tensor of a snapshot by its name in the region; otherwise as `load`.

    Names begin with `model/`, `optim/` or `extras/`; tied tensors are one object.
    """
    candidate, tensors = _found(path, step)
    return candidate.record.step, tensors


def _found(
    path: str | os.PathLike[str] | None, step: int | Literal["latest"]
) -> tuple[Candidate, dict[str, torch.Tensor]]:
    where = place.locate(Config.resolve(path=path).path, 0, create=False)
    if not where.exists or backing.is_blank(where):
        raise NoSnapshotError(f"{where.file}: nothing is there")
    found = first_whole(where, step, lambda region, best, _: (best, _mapped(region, best)))
    if found is None:
        raise NoSnapshotError(f"{where.file}: no whole snapshot: none was ever written")
    return found


def verify(region: Region, candidate: Candidate) -> None:
    """Check every payload byte of a snapshot against its checksum.

    Raises:
        CorruptSnapshotError: names the tensor.
    """
    rows, names = rows_of(candidate)
    region.fetch(candidate, rows, names, usual_threads())


def rows_of(candidate: Candidate) -> tuple[np.ndarray[Any, Any], list[str]]:
    """What to read to check a snapshot, and the name of each row."""
    entries = candidate.layout.entries
    rows = np.zeros(len(entries), native.READ_DTYPE)
    rows["offset"], rows["length"] = candidate.layout.offsets, candidate.layout.lengths
    rows["crc"] = candidate.manifest.crcs
    chosen = np.flatnonzero(candidate.layout.lengths > 0)
    return rows[chosen], [entries[i].name for i in chosen]


def _mapped(region: Region, candidate: Candidate) -> dict[str, torch.Tensor]:
    """Tensors over the slot, verified; takes over `region`, which closes with the last of them."""
    record = candidate.record
    # Before the caller has them: what cannot be read is passed over for an older one here only.
    parts.read(candidate, context=f"{region.place.file} step {record.step}")
    region.native.lease(record.slot, True)
    try:
        if not is_there(region, candidate):
            raise CorruptSnapshotError(
                f"{region.place.file} step {record.step}: overwritten while it was read"
            )
        verify(region, candidate)
        found = _views(region, candidate) if region.place.is_plain else _copies(region, candidate)
    except BaseException:
        region.native.lease(record.slot, False)
        raise
    for entry in candidate.layout.entries:
        if entry.alias_of is not None:
            found[entry.name] = found[entry.alias_of]
    return found


def _views(region: Region, candidate: Candidate) -> dict[str, torch.Tensor]:
    with place.opened(region.place, writable=False) as (fd, _):
        mapping = _Mapping(
            fd, region.info.size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE
        )
    weakref.finalize(mapping, region.close)
    placed = zip(candidate.layout.entries, candidate.layout.offsets, strict=True)
    return {e.name: _over(mapping, e, int(at)) for e, at in placed if e.alias_of is None}


def _copies(region: Region, candidate: Candidate) -> dict[str, torch.Tensor]:
    """For devices and pools, which cannot be mapped privately."""
    found = {e.name: fresh(e) for e in candidate.layout.entries if e.alias_of is None}
    rows, names = rows_of(candidate)
    rows["destination"] = [found[name].data_ptr() for name in names]
    region.fetch(candidate, rows, names, usual_threads())
    region.close()
    return found


def _over(mapping: _Mapping, entry: Entry, offset: int) -> torch.Tensor:
    if entry.length == 0:
        return fresh(entry)
    dtype = getattr(torch, entry.dtype)
    flat = torch.frombuffer(
        mapping, dtype=dtype, count=entry.length // dtype.itemsize, offset=offset
    )
    return flat.as_strided(entry.shape, entry.strides)


def as_state_dict(candidate: Candidate, tensors: Callable[[str], torch.Tensor]) -> dict[str, Any]:
    """The nested state dict of a snapshot; `tensors` gives each tensor by name."""
    label = f"step {candidate.record.step}"
    first, second = parts.read(candidate, context=label)
    names = [entry.name for entry in candidate.layout.entries]
    extras = {**second["extras"], **first["extras"]}
    return {
        "step": candidate.record.step,
        "model": {
            _unescape(n.removeprefix("model/")): tensors(n) for n in names if n.startswith("model/")
        },
        "optimizers": [
            _optimizer(i, tree, names, tensors) for i, tree in enumerate(second["optimizers"])
        ],
        "extras": {name: boundary.rebuild(tree, tensors) for name, tree in extras.items()},
        "rng": boundary.rebuild(first["rng"]),
    }


def _unescape(part: str) -> str:
    return part.replace("%2F", "/").replace("%25", "%")


def _optimizer(
    i: int, tree: dict[str, Any], names: list[str], tensors: Callable[[str], torch.Tensor]
) -> dict[str, Any]:
    """As torch's `Optimizer.state_dict` has it: state by position."""
    groups: list[dict[str, Any]] = []
    order: list[str] = []
    for group in tree["groups"]:
        positions = range(len(order), len(order) + len(group["params"]))
        groups.append({**boundary.rebuild(group["options"], tensors), "params": list(positions)})
        order += group["params"]
    state: dict[Any, dict[str, Any]] = {}
    for name, rest in tree["state"].items():
        key = order.index(name) if name in order else name.removeprefix("@")
        state[key] = boundary.rebuild(rest, tensors)
    positions_of = {boundary.join("", name): k for k, name in enumerate(order)}
    for full in names:
        parts = full.split("/")
        if full.startswith(f"optim/{i}/") and len(parts) == 4 and parts[2] in positions_of:
            nested = tree["state"].get(order[positions_of[parts[2]]], {})
            if parts[3] not in nested:
                state.setdefault(positions_of[parts[2]], {})[_unescape(parts[3])] = tensors(full)
    return {"state": state, "param_groups": groups}
