"""Watch running trainers from another process: their statistics pages and what is committed."""

from __future__ import annotations

import os
import time
from typing import Any

from lightck.errors import CorruptSnapshotError, NoSnapshotError
from lightck.region import stats_page
from lightck.region.backends.select import region_files
from lightck.region.location import Location
from lightck.region.native_region import Record
from lightck.region.region import Region
from lightck.region.stats_page import Reading

RUNNING, ENDED, GONE, ELSEWHERE, NONE = "running", "ended", "gone", "unknown owner", "idle"
_COUNTERS = (
    *("payload_bytes", "captured", "committed", "slipped", "torn", "failed", "bytes_copied"),
    *("bytes_skipped", "bytes_helped", "staging_bytes", "bytes_drained", "errors"),
)
"""The counters of a statistics page that `published` hands on as they are."""


def readings(path: str | os.PathLike[str] | None = None) -> list[dict[str, Any]]:
    """Read what each region at `path` and its trainer say now, and return one dict per rank.

    Takes no lease and waits for nobody; costs the trainer nothing. `state` is `running`, `ended`
    (the handle was closed), `gone` (it ended without closing: killed, or its machine restarted),
    `unknown owner` (somebody owns the region who has published nothing) or `idle` (nobody owns it
    and nobody has published anything). `published` holds what the trainer says of itself, None
    without a page; then `problem` says why.

    Raises:
        RegionError: the place is not safe, or a file is not a region.
    """
    return [_reading(where) for where in region_files(path)]


def _reading(where: Location) -> dict[str, Any]:
    region = Region.open(where, writable=False)
    try:
        said = stats_page.read(region.native)
        newest, problems = _newest(region)
        return {
            "file": str(where.file),
            "rank": region.info.rank,
            "world": region.info.world,
            "medium": region.info.medium,
            "survives": region.survives,
            "size_bytes": region.info.size,
            "state": _state(said),
            "committed": newest and _committed(newest),
            "published": _published(said) if said.process is not None else None,
            "problem": "; ".join(filter(None, [said.problem, *problems])) or None,
        }
    finally:
        region.close()


def _newest(region: Region) -> tuple[Record | None, list[str]]:
    """Return the newest record that counts, and problems; the trainer may replace any meanwhile."""
    found: list[Record] = []
    problems: list[str] = []
    for slot in region.slots:
        try:
            record = region.native.read_record(slot.index)
        except NoSnapshotError:
            continue
        except CorruptSnapshotError as error:
            problems.append(str(error))
            continue
        if region.counts(record):
            found.append(record)
    return max(found, key=lambda record: record.sequence, default=None), problems


def _committed(record: Record) -> dict[str, Any]:
    return {
        "step": record.step,
        "age_s": max(0.0, time.time() - record.wall_time_ns / 1e9),
        "payload_bytes": record.payload_bytes,
        "early": record.early,
    }


def _state(said: Reading) -> str:
    """Return the trainer's state from the owner lock and the page.

    The lock tells whether there is an owner, the page who wrote it; together, whether it is the
    same.
    """
    if said.process is None:
        return ELSEWHERE if said.owned else NONE
    ended = bool(said.numbers["ended"])
    if not said.owned:
        return ENDED if ended else GONE
    # In another PID namespace a living trainer has another process number: the lock decides.
    return ELSEWHERE if ended else RUNNING


def _published(said: Reading) -> dict[str, Any]:
    numbers, process = said.numbers, said.process
    assert process is not None
    seconds, drain_s = numbers["copy_ns"] / 1e9, numbers["drain_ns"] / 1e9
    lived = (numbers["updated_ns"] - numbers["began_ns"]) / 1e9
    steps = numbers["step"] - numbers["began_step"]
    stalls = {cause: ns / 1e9 for cause, ns in (said.stalls_ns or {}).items()}
    return {
        "process": process.number,
        "began_ns": numbers["began_ns"],
        "process_runs": process.is_running,
        "step": numbers["step"],
        "captured_step": said.captured_step,
        "committed_step": said.committed_step,
        "steps": steps,
        "began_s": lived,
        "age_s": max(0.0, time.time() - numbers["updated_ns"] / 1e9),
        "step_s": numbers["step_ns"] / 1e9,
        **{name: numbers[name] for name in _COUNTERS},
        "drain_rate": numbers["bytes_drained"] / drain_s if drain_s else 0.0,
        "copy_rate": numbers["bytes_copied"] / seconds if seconds else 0.0,
        "write_rate": numbers["bytes_copied"] / lived if lived > 0 else 0.0,
        "commit_s": numbers["commit_ns"] / 1e9 / max(1, numbers["committed"]),
        "stall_s": stalls,
        "stall_s_per_step": sum(stalls.values()) / steps if steps else 0.0,
        "last_error": said.last_error or None,
    }
