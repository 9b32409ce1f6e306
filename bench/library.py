"""Call the native library through its header, where Python's interface is too coarse."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any

from bench.errors import BenchError
from lightck.region._ffi import ffi, library

_SLOT = 0
_PAGE = 4096  # extents start on pages, as large ones do in lightck


def check(code: int) -> None:
    """Raise BenchError with the library's text if a call failed."""
    if code < 0:
        text = ffi.string(library().lck_last_error()).decode(errors="replace")
        raise BenchError(f"native error {code}: {text}")


def kernel() -> str:
    """Return the name of the copy kernel in use."""
    name = ffi.new("const char **")
    check(library().lck_kernel(ffi.NULL, name))
    text: str = ffi.string(name[0]).decode()
    return text


class Writer:
    """A region with one worker, which takes whole snapshots of given memory."""

    def __init__(
        self, folder: Path, sources: list[tuple[int, int]], chunk_bytes: int = 262_144
    ) -> None:
        """Make and pre-fault the region; `sources` are addresses and lengths."""
        self._lib = library()
        sizes = [-(-length // _PAGE) * _PAGE for _, length in sources]
        self._region = self._created(folder / "region", sum(sizes))
        info = ffi.new("lck_region_info *")
        check(self._lib.lck_region_describe(self._region, info))
        offset = info.segments[0].offset  # slot 0 owns the segment's first part
        self._copies = ffi.new("lck_copy[]", len(sources))
        for i, (address, length) in enumerate(sources):
            copy = self._copies[i]
            copy.offset, copy.source, copy.length = offset, ffi.cast("void *", address), length
            copy.layer = i
            offset += sizes[i]
        self._pool = ffi.new("lck_pool **")
        wanted = ffi.new("lck_pool_spec *", {"threads": 1, "chunk_bytes": chunk_bytes})
        check(self._lib.lck_pool_create(wanted, self._pool))
        self._snapshot = ffi.new("lck_snapshot **")
        self._batch = ffi.new("uint32_t *")

    def _created(self, path: Path, slot_bytes: int) -> Any:
        wanted = {"world": 1, "slot_count": 2, "slot_bytes": slot_bytes, "numa_node": -1}
        region = ffi.new("lck_region **")
        with open(path, "w+b") as file, open(path, "r+b") as lock:
            spec = ffi.new("lck_region_spec *", wanted)
            check(self._lib.lck_region_create(file.fileno(), lock.fileno(), spec, region))
        return region[0]

    def begin(self) -> None:
        """Open a snapshot with all copies, held back; give up one that is open."""
        self.drop()
        lib = self._lib
        check(lib.lck_snapshot_begin(self._pool[0], self._region, _SLOT, self._snapshot))
        check(lib.lck_snapshot_add(self._snapshot[0], self._copies, len(self._copies), self._batch))

    def copy(self) -> None:
        """Let the worker copy everything; return when it has."""
        check(self._lib.lck_snapshot_capture(self._snapshot[0], self._batch[0], -1, 0))

    def verify(self) -> None:
        """Read everything back from the region and compare it with the sources' checksums.

        Raises:
            BenchError: an extent differs from its source.
        """
        count = len(self._copies)
        reads = ffi.new("lck_read[]", count)
        for i in range(count):
            copy = self._copies[i]
            reads[i].offset, reads[i].length = copy.offset, copy.length
            reads[i].crc = self._lib.lck_crc32c(0, copy.source, copy.length)
        check(self._lib.lck_slot_fetch(self._region, reads, count, 1, ffi.new("uint64_t *")))

    def drop(self) -> None:
        """Give the open snapshot up, if there is one."""
        check(self._lib.lck_snapshot_free(self._snapshot[0]))
        self._snapshot[0] = ffi.NULL

    def __enter__(self) -> Writer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.drop()
        check(self._lib.lck_pool_destroy(self._pool[0]))
        check(self._lib.lck_region_close(self._region))
