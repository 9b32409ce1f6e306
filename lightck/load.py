"""Look into a region without a model: its snapshots, and one of them as mapped tensors."""

from __future__ import annotations

import contextlib
import logging
import math
import mmap
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, SupportsIndex

import numpy as np
import torch

from lightck.config import Config
from lightck.distributed.rendezvous import Rendezvous, meeting
from lightck.distributed.restore.protocol import RestoreAttempt, restore_attempts
from lightck.distributed.restore.selection import Key
from lightck.distributed.restore.survey import RegionSurvey
from lightck.errors import (
    ConfigError,
    CorruptSnapshotError,
    NoSnapshotError,
    RegionBusyError,
    StateError,
)
from lightck.events import event
from lightck.reader.assembly import AssembledSnapshot, RegionPart, Snapshot
from lightck.reader.fill import empty_tensor
from lightck.region import location
from lightck.region.backends import select
from lightck.region.layout import Entry
from lightck.region.region import Candidate, Continuation, Region
from lightck.state import boundary_codec, key_order
from lightck.state.extras import OF_MODULES, is_own
from lightck.state.inventory import labelled_key

if TYPE_CHECKING:
    import pyarrow as pa

_NAMED = 8
_MAP_NORESERVE = 0x4000  # most of a mapping is never written: a region may be larger than memory
region_files = select.region_files


@cache
def snapshot_columns() -> pa.Schema:
    """Return the columns of `snapshots`."""
    import pyarrow as pa

    return pa.schema(
        [
            ("step", pa.uint64()),
            ("state", pa.string()),
            ("rank", pa.uint32()),
            ("world", pa.uint32()),
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


def snapshots(path: str | os.PathLike[str] | None = None) -> pa.Table:
    """List the snapshots in the regions at `path`, newest first, with a row for each rank.

    `state` is `whole` (restorable: record, layout table and manifest hold, with several ranks those
    of all that are needed; payload checksums are checked by `restore`, `load` and `lightck
    verify`), `partial` (another rank's part is missing: `problem` says which), `abandoned` (on a
    branch that a later restore left) or `damaged` (`problem` says why). It is safe while a trainer
    writes.

    Raises:
        RegionError: the place is not safe, or a file is not a region.
    """
    import pyarrow as pa

    files = region_files(path)
    rows: list[dict[str, Any]] = []
    where = location.locate(Config.resolve(path=path).path, 0, create=False)
    with RegionSurvey.of_files(where, files) as survey:
        for each in (*survey.regions, *survey.failure_regions):
            region, recovery = each.region, each.recovery
            rows += [row(region, c, **_state_of(survey, c)) for c in recovery.candidates]
            rows += [row(region, c, "abandoned") for c in recovery.abandoned]
            rows += [
                {"state": "damaged", "problem": text, "file": str(region.place.file)}
                for text in recovery.problems
            ]
    if len(files) > 1:
        rows.sort(key=lambda r: (-r.get("step", -1), r.get("rank", 0)))
    return pa.Table.from_pylist(rows, schema=snapshot_columns())


def _state_of(survey: RegionSurvey, candidate: Candidate) -> dict[str, str]:
    """Return the state of a rank's snapshot: abandoned, partial (with the problem), or whole."""
    key = Key.of(candidate.record)
    if survey.excludes(key):
        return {"state": "abandoned"}
    missing = survey.lacks(key) if key.world > 1 else []
    return (
        {"state": "partial", "problem": "; ".join(missing[:4])} if missing else {"state": "whole"}
    )


def row(
    region: Region, candidate: Candidate, state: str, problem: str | None = None
) -> dict[str, Any]:
    """Return a row of `snapshots`."""
    record = candidate.record
    return {
        "step": record.step,
        "state": state,
        "rank": record.rank,
        "world": record.world,
        "slot": record.slot,
        "sequence": record.sequence,
        "timeline": record.timeline,
        "wall_time": record.wall_time_ns // 1000,
        "tensors": len(candidate.layout.entries),
        "payload_bytes": record.payload_bytes,
        "early": record.early,
        "suspect": record.suspect,
        "survives": region.survives,
        "problem": problem,
        "file": str(region.place.file),
    }


class _Mapping(mmap.mmap):
    """A private mapping of a region; the tensors over it keep it and its lease alive."""


def load(
    path: str | os.PathLike[str] | None = None,
    step: int | Literal["latest"] = "latest",
    *,
    rank: int = 0,
    whole: bool = False,
) -> dict[str, Any]:
    """Return a snapshot as a plain state dict, without a model.

    Nothing is read until it is used.

    Tensors are mapped copy-on-write: they may be changed, the region does not see it. Their slots
    are leased until the last of them is gone; a trainer that needs one slips its snapshots
    meanwhile. A tensor of which several ranks wrote parts is assembled in memory.

    Args:
        path: as for `snapshots`.
        step: the step to load; by default the newest that is whole.
        rank: with several ranks, whose buffers, extras and random generators to take. Of sharded
            state (FSDP2 and other DTensors) the tensors are that rank's parts. Of parameters that
            ranks did not hold alike, as experts outside of DDP, they are that rank's, and a warning
            is logged that names them.
        whole: put sharded tensors together from the parts of all ranks, in memory.

    Returns:
        `model` (for `load_state_dict`), `optimizers` (one dict each, as torch's `state_dict` gives
        it), `extras` by name, `rng`, and `step`.

    Raises:
        NoSnapshotError: there is none, or none is whole.
        RegionError: the place is not safe or not a region.
    """
    snapshot, tensors = _found(path, step, rank, whole)
    return as_state_dict(snapshot, tensors.__getitem__)


def load_tensors(
    path: str | os.PathLike[str] | None = None,
    step: int | Literal["latest"] = "latest",
    *,
    rank: int = 0,
    whole: bool = False,
) -> tuple[int, dict[str, torch.Tensor]]:
    """Return the step and every tensor of a snapshot by its name in the region.

    Otherwise it is as `load`.

    Names begin with `model/`, `optim/` or `extras/`; tied tensors are one object.
    """
    snapshot, tensors = _found(path, step, rank, whole)
    return snapshot.record.step, tensors


def load_owned(path: str | os.PathLike[str], step: int | Literal["latest"]) -> dict[str, Any]:
    """Return a snapshot as `load` does, with tensors in memory of their own: nothing is leased."""
    snapshot, tensors = _found(path, step, 0, whole=False, mapped=False)
    return as_state_dict(snapshot, tensors.__getitem__)


def load_agreed(
    path: str | os.PathLike[str] | None, *, tensors: bool
) -> tuple[int, dict[str, Any]] | None:
    """Return the step that all ranks' `restore(step="exact")` would take, and its state as `load`.

    For frameworks that ask where to go on before there is a model. Every rank calls it; one without
    `tensors` checks its own state, which the others rely on, and gets an empty dict. None:
    `restore` would begin anew. Raises what `restore` raises.
    """
    with meeting("load") as ranks:
        place = Config.resolve(path=path).path
        where = location.locate(place, ranks.rank, create=False)
        wanted = ranks.joining.step_at(place) if ranks.joining is not None else None
        if ranks.joining is not None and wanted is None:
            return None  # nor was there anything when the job began
        attempts = restore_attempts(ranks, where, wanted, Continuation(), wants_exact=True)
        with contextlib.closing(attempts):
            for attempt in attempts:
                found = _read(attempt, whole=False, mapped=True, tensors=tensors)
                if found is not None:
                    ranks.leave()
                    snapshot, by_name = found
                    state = as_state_dict(snapshot, by_name.__getitem__) if tensors else {}
                    return snapshot.record.step, state
        ranks.leave()
    return None


def _found(
    path: str | os.PathLike[str] | None,
    step: int | Literal["latest"],
    rank: int,
    whole: bool,
    *,
    mapped: bool = True,
) -> tuple[Snapshot, dict[str, torch.Tensor]]:
    """Return the newest snapshot that is whole, or the wanted one, and its tensors by name."""
    wanted = _wanted(step)
    if not isinstance(rank, SupportsIndex) or isinstance(rank, bool) or int(rank) < 0:
        raise ConfigError(f"load: rank must be the number of a rank, 0 or more, found {rank!r}")
    where = location.locate(Config.resolve(path=path).path, int(rank), create=False)
    ranks = Rendezvous("load", int(rank))
    with contextlib.closing(restore_attempts(ranks, where, wanted)) as attempts:
        for attempt in attempts:
            if (found := _read(attempt, whole, mapped)) is not None:
                return found
    raise NoSnapshotError(f"{where.file}: no whole snapshot: none was ever written")


def _wanted(step: object) -> int | None:
    if step == "latest":
        return None
    if not isinstance(step, SupportsIndex) or isinstance(step, bool) or int(step) < 0:
        raise ConfigError(f"load: step must be the number of a step or 'latest', found {step!r}")
    return int(step)


def _read(
    attempt: RestoreAttempt, whole: bool, mapped: bool, *, tensors: bool = True
) -> tuple[Snapshot, dict[str, torch.Tensor]] | None:
    """Verify a snapshot and make its tensors; None if an older one is needed.

    `mapped`: over its slots, which stay leased as long as the tensors are there; what another rank
    sends is in memory. Without `tensors` it is verified only.
    """
    made: dict[str, torch.Tensor] = {}
    wholes: dict[str, torch.Tensor] = {}
    mappings: list[tuple[Region, _Mapping]] = []
    with attempt.verifying():
        snapshot = attempt.assemble()
        # Decode before the caller has it: only here can an older one replace one that is
        # unreadable.
        snapshot.trees()
        _warn_of_other_ranks(attempt, snapshot)
        if mapped:
            snapshot.verify()
        else:  # what is read is checked on the way
            made, _ = _tensors(snapshot, owned=True)
        if whole:
            wholes = _whole_tensors(attempt, snapshot)
    if not attempt.is_verified():
        return None
    if not mapped:
        return snapshot, made
    with attempt.copying():
        if tensors:
            made, mappings = _tensors(snapshot)
    if not attempt.is_copied():
        return None
    if tensors:
        attempt.leases.pop_all()  # the leases are dropped when their region is closed
    for region, mapping in mappings:
        attempt.survey.keep(region)
        weakref.finalize(mapping, region.close)
    return snapshot, made | wholes


def _warn_of_other_ranks(attempt: RestoreAttempt, snapshot: Snapshot) -> None:
    """Warn of tensors that ranks did not hold alike: one rank's are returned."""
    if differing := attempt.unequal_tensors(snapshot):
        names = f"{', '.join([*differing][:_NAMED])}{', ...' if len(differing) > _NAMED else ''}"
        why = f"rank {snapshot.record.rank}'s are given, other ranks held others: see rank="
        where, count = attempt.survey.where.path, len(differing)
        event("of_one_rank", logging.WARNING, path=where, tensors=count, names=names, why=why)


def _tensors(
    snapshot: Snapshot, *, owned: bool = False
) -> tuple[dict[str, torch.Tensor], list[tuple[Region, _Mapping]]]:
    """Make tensors over the slots where one piece holds all, and return their regions' mappings.

    Copy the others, and those of devices; all of them if `owned`.
    """
    mappings = []
    over: list[tuple[RegionPart, Sequence[int]]] = [
        (part, _complete_rows(part, snapshot) if part.region.place.is_plain and not owned else [])
        for part in (snapshot.parts if isinstance(snapshot, AssembledSnapshot) else ())
    ]
    mapped = {part.entries[row] for part, rows in over for row in rows}
    tensors: dict[str, torch.Tensor] = {}
    addresses = np.zeros(len(snapshot.entries), np.uint64)
    for i, entry in enumerate(snapshot.entries):
        if entry.alias_of is None and i not in mapped:
            tensors[entry.name] = empty_tensor(entry)
            addresses[i] = tensors[entry.name].data_ptr()
    snapshot.read(addresses)
    for part, rows in over:
        if len(rows):
            mapping = _mapping(part.region)
            mappings.append((part.region, mapping))
        for row in rows:
            entry = snapshot.entries[part.entries[row]]
            tensors[entry.name] = _over(mapping, entry, int(part.rows["offset"][row]))
    for entry in snapshot.entries:
        if entry.alias_of is not None:
            tensors[entry.name] = tensors[entry.alias_of]
    return {entry.name: tensors[entry.name] for entry in snapshot.entries}, mappings


def _complete_rows(part: RegionPart, snapshot: Snapshot) -> list[int]:
    """Return the rows whose bytes are all of their tensor."""
    sizes = np.array([snapshot.entries[i].length for i in part.entries], np.uint64)
    found: list[int] = np.flatnonzero(part.rows["length"] == sizes).tolist()
    return found


def _mapping(region: Region) -> _Mapping:
    with location.opened(region.place, writable=False) as (fd, _):
        if not region.is_of(fd):  # what was verified and leased is another file
            raise RegionBusyError(f"{region.place.file} was replaced while it was read; try again")
        flags, prot = mmap.MAP_PRIVATE | _MAP_NORESERVE, mmap.PROT_READ | mmap.PROT_WRITE
        return _Mapping(fd, region.info.size, flags=flags, prot=prot)


def _over(mapping: _Mapping, entry: Entry, offset: int) -> torch.Tensor:
    dtype = getattr(torch, entry.dtype)
    flat = torch.frombuffer(
        mapping, dtype=dtype, count=entry.length // dtype.itemsize, offset=offset
    )
    return flat.as_strided(entry.shape, entry.strides)


# ---- sharded tensors, put together from the parts of every rank that wrote -----------------------

_Parts = dict[tuple[tuple[int, ...], tuple[int, ...]], torch.Tensor]
"""Parts by offset and shape.

Ranks that hold the same part (replicated groups) hold the same bytes.
"""


def _whole_tensors(attempt: RestoreAttempt, snapshot: Snapshot) -> dict[str, torch.Tensor]:
    """Return every sharded tensor of this rank by name, whole, in memory of its own.

    Raises:
        CorruptSnapshotError: a rank's part is missing or damaged.
        StateError: the rows of one part lie between those of another, which is not supported yet.
    """
    wanted = {e.name: e for e in snapshot.entries if e.shard is not None}
    if not wanted:
        return {}
    attempt.survey.scan_all()
    parts: dict[str, _Parts] = {name: {} for name, e in wanted.items() if e.alias_of is None}
    for rank in range(attempt.key.world):
        state = attempt.survey.assembled(attempt.key, rank)
        if not isinstance(state, AssembledSnapshot):
            why = state or "nothing of it is there"
            raise CorruptSnapshotError(f"step {attempt.key.step}: the parts of rank {rank}: {why}")
        state.trees()  # checks the layout before memory is allocated from it
        for entry, part in _read_parts(state, {name: wanted[name] for name in parts}):
            assert entry.shard is not None
            parts[entry.name][entry.shard.offset, entry.shape] = part
    wholes = {name: _tiled(wanted[name], held) for name, held in parts.items()}
    return {name: wholes[e.alias_of or name] for name, e in wanted.items()}


def _read_parts(
    state: AssembledSnapshot, wanted: Mapping[str, Entry]
) -> list[tuple[Entry, torch.Tensor]]:
    """Read the parts that one rank has; each is verified against its checksum as it is read."""
    addresses = np.zeros(len(state.entries), np.uint64)
    found = []
    for i, entry in enumerate(state.entries):
        if entry.shard is not None and entry.name in wanted:
            of, expected = _whole_form(entry), _whole_form(wanted[entry.name])
            if of != expected:
                raise CorruptSnapshotError(
                    f"{state.label}: {entry.name} is a part of {of}, on another rank of {expected}"
                )
            part = empty_tensor(entry)
            addresses[i] = part.data_ptr()
            found.append((entry, part))
    with contextlib.ExitStack() as held:
        state.lease(held)
        state.read(addresses)
    return found


def _whole_form(entry: Entry) -> str:
    """Describe the whole tensor that a part belongs to; the text is the same on every rank."""
    assert entry.shard is not None
    tied = f" tied to {entry.alias_of}" if entry.alias_of else ""
    return f"{entry.dtype}{list(entry.shard.shape)}{tied}"


def _tiled(entry: Entry, parts: _Parts) -> torch.Tensor:
    assert entry.shard is not None
    # Compared before memory is allocated for the size that a layout states.
    if sum(part.numel() for part in parts.values()) != math.prod(entry.shard.shape):
        raise _untiled(entry, len(parts))
    whole = torch.empty(entry.shard.shape, dtype=getattr(torch, entry.dtype))
    times = torch.zeros(entry.shard.shape, dtype=torch.uint8)
    for (offset, shape), part in parts.items():
        at = tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))
        whole[at] = part
        times[at] += 1
    if not bool((times == 1).all()):
        raise _untiled(entry, len(parts))
    return whole


def _untiled(entry: Entry, parts: int) -> StateError:
    assert entry.shard is not None
    return StateError(
        f"{entry.name}: {parts} parts do not tile {list(entry.shard.shape)}"
        f" ({entry.shard.placements}): putting such together is not supported yet",
        path=entry.name,
    )


# ---- the state dict ------------------------------------------------------------------------------


def as_state_dict(snapshot: Snapshot, tensors: Callable[[str], torch.Tensor]) -> dict[str, Any]:
    """Build the nested state dict of a snapshot; `tensors` returns each tensor by name."""
    first, second = snapshot.trees()
    names = [entry.name for entry in snapshot.entries]
    every = {**second["extras"], **first["extras"]}
    extras = {
        name: boundary_codec.rebuild(tree, tensors)
        for name, tree in every.items()
        if not is_own(name)
    }
    of_modules = {name: value for name, value in extras.items() if name.startswith(OF_MODULES)}
    return {
        "step": snapshot.record.step,
        "model": {
            _unescape(n.removeprefix("model/")): tensors(n) for n in names if n.startswith("model/")
        }
        | {name.removeprefix(OF_MODULES): value for name, value in of_modules.items()},
        "optimizers": [
            _optimizer(i, tree, names, tensors) for i, tree in enumerate(second["optimizers"])
        ],
        "extras": {name: value for name, value in extras.items() if name not in of_modules},
        "rng": boundary_codec.rebuild(first["rng"]),
    }


def _unescape(part: str) -> str:
    return part.replace("%2F", "/").replace("%25", "%")


def _optimizer(
    i: int, tree: dict[str, Any], names: list[str], tensors: Callable[[str], torch.Tensor]
) -> dict[str, Any]:
    """Return an optimizer's state as torch's `Optimizer.state_dict` has it: by position."""
    groups: list[dict[str, Any]] = []
    order: list[str] = []
    for group in tree["groups"]:
        positions = range(len(order), len(order) + len(group["params"]))
        groups.append(
            {**boundary_codec.rebuild(group["options"], tensors), "params": list(positions)}
        )
        order += group["params"]
    keys: dict[str, Any] = {name: k for k, name in enumerate(order)}
    keys |= {name: labelled_key(name) for name in tree["state"] if name not in keys}
    escaped = {boundary_codec.join("", name): name for name in keys}
    found = {name: boundary_codec.rebuild(rest, tensors) for name, rest in tree["state"].items()}
    for full in names:
        parts = full.split("/")
        if full.startswith(f"optim/{i}/") and len(parts) == 4 and parts[2] in escaped:
            name = escaped[parts[2]]
            if parts[3] not in tree["state"].get(name, {}):
                found.setdefault(name, {})[_unescape(parts[3])] = tensors(full)
    said = tree.get("order", {})
    labels = (name for name in key_order.outer(said, keys) if name in found)
    state = {keys[name]: key_order.arranged(said, name, found[name]) for name in labels}
    return {"state": state, "param_groups": groups}
