"""Examine regions without a model: what they are, what a snapshot holds, whether it is sound."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from lightck.config import Config
from lightck.distributed.restore.selection import decide
from lightck.distributed.restore.survey import RegionSurvey
from lightck.errors import (
    CorruptSnapshotError,
    NoSnapshotError,
    RegionBusyError,
    RegionIOError,
)
from lightck.history import item
from lightck.load import region_files, row, snapshot_columns
from lightck.loop.policy_state import described, text_of
from lightck.reader.assembly import AssembledSnapshot
from lightck.region import location
from lightck.region.backends.select import every_file
from lightck.region.layout import Entry, Shard
from lightck.region.medium import GRANULARITIES
from lightck.region.native_pool import usual_threads
from lightck.region.region import Candidate, Region, open_and_recover, payload_reads
from lightck.state.extras import is_own

if TYPE_CHECKING:
    import pyarrow as pa

CHECKED_AT_ONCE_BYTES = 64 << 20  # checked between two reports of progress


@cache
def tensor_columns() -> pa.Schema:
    """Return the columns of a table with a row for each piece of a tensor.

    `rank` and `begin` are used only where there are several regions, `part_of` (the whole's shape,
    the part's offset in it, mesh and placements) only where state is sharded.
    """
    import pyarrow as pa

    return pa.schema(
        [
            ("name", pa.string()),
            ("role", pa.string()),
            ("dtype", pa.string()),
            ("shape", pa.list_(pa.int64())),
            ("bytes", pa.uint64()),
            ("offset", pa.uint64()),
            ("crc", pa.uint32()),
            ("layer", pa.string()),
            ("device", pa.string()),
            ("alias_of", pa.string()),
            ("rank", pa.uint32()),
            ("begin", pa.uint64()),
            ("part_of", pa.string()),
        ]
    )


def regions(path: str | os.PathLike[str] | None = None) -> list[dict[str, Any]]:
    """Return what each region at `path` says about itself, one dict per rank; sizes in bytes.

    Raises:
        RegionError: the place is not safe, or a file is not a region.
    """
    found: list[dict[str, Any]] = []
    for where in region_files(path):
        region, _ = open_and_recover(where)
        info = region.info
        found.append(
            {
                "file": str(where.file),
                "uuid": info.uuid.hex(),
                "run": info.run_id.hex(),
                "format_version": info.format_version,
                "rank": info.rank,
                "world": info.world,
                "medium": info.medium,
                "granularity": GRANULARITIES[info.granularity],
                "survives": region.survives,
                "created": datetime.fromtimestamp(info.created_ns / 1e9, UTC),
                "size_bytes": info.size,
                "slots": info.slot_count,
                "segments": [
                    {"offset": s.offset, "length": s.length, "slot_bytes": s.slot_bytes}
                    for s in info.segments
                ],
                "timeline": info.timeline,
                "lineage": [{"timeline": t, "up_to_sequence": s} for t, s in info.lineage],
            }
        )
        region.close()
    return found


@dataclass(frozen=True)
class Contents:
    """The description of one snapshot."""

    snapshot: dict[str, Any]
    """The snapshot's row of `snapshots`."""
    tensors: pa.Table
    """A table with one row per tensor, see `tensor_columns`; nothing of the payload was read."""
    extras: tuple[str, ...]
    optimizers: tuple[str, ...]
    """The classes of the optimizers."""
    learned: str | None = None
    """The policies' state of that step as text, as `lightck.loop.policy_state` reads it."""

    @property
    def learned_words(self) -> str:
        """The policies' state of that step, in words."""
        return "nothing" if self.learned is None else described(self.learned)


def contents(
    path: str | os.PathLike[str] | None = None, step: int | Literal["latest"] = "latest"
) -> Contents:
    """Describe a snapshot: every tensor with its place, the names of extras and optimizers.

    With several ranks it is rank 0's state, put together from the regions that hold its parts.

    Raises:
        NoSnapshotError: there is none, or none is whole.
        RegionError: the place is not safe or not a region.
    """
    files = region_files(path)
    root = Config.resolve(path=path).path
    if not files:
        raise NoSnapshotError(f"{root}: nothing is there")
    with RegionSurvey.of_files(location.locate(root, 0, create=False), files) as survey:
        wanted = None if step == "latest" else step
        choice = decide([survey.view(wanted)])
        if choice.key is not None:
            snapshot = survey.assembled(choice.key)
            assert isinstance(snapshot, AssembledSnapshot), "chosen, but not offered"
            return _contents(snapshot, "whole", len(files) > 1)
        for first in survey.regions[:1]:
            for candidate in first.recovery.abandoned:
                if step == candidate.record.step:
                    return _contents(AssembledSnapshot.of([(first.region, candidate)]), "abandoned")
        raise NoSnapshotError(survey.nothing_whole(wanted, choice.fell_back))


def _contents(snapshot: AssembledSnapshot, state: str, ranks: bool = False) -> Contents:
    import pyarrow as pa

    first, second = snapshot.trees()
    own = snapshot.parts[0]
    described = row(own.region, own.candidate, state)
    described["tensors"] = len(snapshot.entries)
    described["payload_bytes"] = sum(int(part.rows["length"].sum()) for part in snapshot.parts)
    table = pa.Table.from_pylist(_tensor_rows(snapshot), schema=tensor_columns())
    sharded = any(entry.shard is not None for entry in snapshot.entries)
    unused = [*([] if ranks else ["rank", "begin"]), *([] if sharded else ["part_of"])]
    return Contents(
        pa.Table.from_pylist([described], schema=snapshot_columns()).to_pylist()[0],
        table.drop_columns(unused),
        tuple(sorted(n for n in {*first["extras"], *second["extras"]} if not is_own(n))),
        tuple(tree["class"] for tree in second["optimizers"]),
        text_of(first["extras"]),
    )


def _tensor_rows(snapshot: AssembledSnapshot) -> list[dict[str, Any]]:
    """Return a row for every piece, in the order of the tensors and their bytes."""
    numbered: list[tuple[int, int, dict[str, Any]]] = []
    for i, entry in enumerate(snapshot.entries):
        if entry.alias_of is not None or not entry.length:
            numbered.append((i, 0, {"rank": snapshot.record.rank, "bytes": 0, "offset": 0}))
    for part in snapshot.parts:
        rank, rows = part.candidate.record.rank, part.rows
        for at, i, begin in zip(rows, part.entries, part.begins, strict=True):
            piece = {"bytes": int(at["length"]), "offset": int(at["offset"])}
            said = {"rank": rank, "begin": int(begin), "crc": int(at["crc"]), **piece}
            numbered.append((int(i), int(begin), said))
    return [
        {"begin": 0, "crc": 0, **_described(snapshot.entries[i]), **said}
        for i, _, said in sorted(numbered, key=lambda each: each[:2])
    ]


def _described(entry: Entry) -> dict[str, Any]:
    return {
        "name": entry.name,
        "role": entry.role,
        "dtype": entry.dtype,
        "shape": entry.shape,
        "layer": entry.layer,
        "device": entry.device,
        "alias_of": entry.alias_of,
        "part_of": _part_of(entry.shard) if entry.shard else None,
    }


def _part_of(shard: Shard) -> str:
    return f"{list(shard.shape)} at {list(shard.offset)}, {shard.placements}"


def kept(path: str | os.PathLike[str] | None = None) -> list[dict[str, Any]]:
    """Describe what the history at `path` keeps, newest first; nothing of the payload is read.

    Returns:
        One dict per step: `step`, `state` (`kept`, `unfinished`, or `left`: of a branch that a
        later attach left), `time`, `epoch`, `metrics`, `pinned`, `bytes`, `folder`.

    Raises:
        RegionError: the place is not safe.
    """
    where = location.locate(Config.resolve(path=path).path, 0, create=False)
    if where.path == where.file:
        return []
    found = []
    for each, left in item.every_item_and_left(where.path):
        files = [file.stat() for file in each.folder.glob("region-*.lck")]
        found.append(
            {
                "step": each.kept.step,
                "state": "left" if left else "kept" if each.is_whole else "unfinished",
                "time": datetime.fromtimestamp(each.kept.time_s, UTC),
                "epoch": each.kept.epoch,
                "metrics": dict(each.kept.metrics),
                "pinned": each.kept.pinned,
                "bytes": sum(file.st_blocks * 512 for file in files),
                "folder": str(each.folder),
            }
        )
    return sorted(found, key=lambda row: (row["state"] == "left", -row["step"]))


def check(
    path: str | os.PathLike[str] | None = None,
    step: int | None = None,
    *,
    progress: Callable[[int], object] = lambda more: None,
) -> list[dict[str, Any]]:
    """Read every payload byte of the snapshots at `path`, or of one step's, and check it.

    A slot is leased while it is read: a trainer that needs it slips its snapshots meanwhile.

    Args:
        path: as for `snapshots`.
        step: check only this step, on every rank.
        progress: called with the number of bytes read since the last call.

    Returns:
        One dict per snapshot: `step`, `slot`, `rank`, `file`, `bytes`, `suspect` (replicas were
        found to differ: sound bytes, perhaps of wrong values), `state` (`good`, `damaged`, or
        `gone`: a trainer replaced it meanwhile), `damaged` (names of tensors), `problem`.
    """
    results: list[dict[str, Any]] = []
    for where in every_file(path):
        region, recovery = open_and_recover(where)
        try:
            every = (*recovery.candidates, *recovery.abandoned)
            chosen = [c for c in every if step in (None, c.record.step)]
            results += [_check(region, c, progress) for c in chosen]
            results += [
                {"state": "damaged", "problem": text, "damaged": [], "file": str(where.file)}
                for text in recovery.problems
            ]
        finally:
            region.close()
    return results


def _check(
    region: Region, candidate: Candidate, progress: Callable[[int], object]
) -> dict[str, Any]:
    record = candidate.record
    result: dict[str, Any] = {
        "step": record.step,
        "slot": record.slot,
        "rank": record.rank,
        "file": str(region.place.file),
        "bytes": record.payload_bytes,
        "suspect": record.suspect,
        "state": "gone",
        "damaged": [],
        "problem": None,
    }
    try:
        region.native.lease(record.slot, True)
    except RegionBusyError:
        return result
    try:
        if region.native.read_record(record.slot) != record:
            return result
        result["damaged"] = _damaged(region, candidate, progress)
        result["state"] = "damaged" if result["damaged"] else "good"
    except (NoSnapshotError, CorruptSnapshotError):
        return result
    except RegionIOError as error:
        result["state"], result["problem"] = "damaged", str(error)
    finally:
        region.native.lease(record.slot, False)
    return result


def _damaged(region: Region, candidate: Candidate, progress: Callable[[int], object]) -> list[str]:
    """Return the names of the tensors whose bytes do not match their checksums."""
    rows, names = payload_reads(candidate)
    bad, begin = [], 0
    while begin < len(rows):
        sizes = np.cumsum(rows["length"][begin:])
        end = begin + max(1, int(np.searchsorted(sizes, CHECKED_AT_ONCE_BYTES)))
        found = region.native.fetch(rows[begin:end], usual_threads())
        if found is not None:
            bad.append(names[begin + found])
            end = begin + found + 1
        progress(int(rows["length"][begin:end].sum()))
        begin = end
    return bad
