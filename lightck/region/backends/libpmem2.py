"""Ask libpmem2 about the medium below a region."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from lightck.errors import RegionError
from lightck.region.backends.pmdk import ffi, pmem2, text_of

_PAGE = 2  # PMEM2_GRANULARITY_PAGE: any medium will do
_PROT_READ = 1 << 30
_NO_BAD_BLOCK = -100029
_DEVICE_BYTES = 256


@dataclass(frozen=True, slots=True)
class Media:
    """The answers of libpmem2 about the medium below a file or device."""

    granularity: int | None
    """The granularity of stores, as libpmem2 maps them: native.GRAN_*; the environment can make it
    lie. None: it cannot map this."""
    device: str | None
    numa_node: int | None
    bad_blocks: tuple[tuple[int, int], ...] | None
    """(offset, length) in the file or device, in bytes; None: it cannot tell."""
    unsafe_shutdowns: int | None
    """Unsafe shutdowns of the devices below, over their life; None: they do not count."""
    unknown: tuple[str, ...]
    """The reasons why fields are None, in libpmem2's words."""


def media_of(fd: int, label: str) -> Media:
    """Ask libpmem2 about the medium below an open file or device."""
    unknown: list[str] = []
    with _source(fd, label) as source:
        granularity = None
        try:
            held = _map(source, label)
            granularity = _granularity(held[0])
            _check(pmem2().pmem2_map_delete(held), f"{label}: unmap")
        except RegionError as error:
            unknown.append(str(error))
        return Media(
            granularity,
            _device(source, unknown),
            _number(source, "numa_node", "int *", unknown),
            _bad_blocks(source, unknown),
            _number(source, "device_usc", "uint64_t *", unknown),
            tuple(unknown),
        )


@contextlib.contextmanager
def _source(fd: int, label: str) -> Iterator[Any]:
    held = ffi.new("struct pmem2_source **")
    _check(pmem2().pmem2_source_from_fd(held, fd), label)
    try:
        yield held[0]
    finally:
        pmem2().pmem2_source_delete(held)


def _map(source: Any, label: str) -> Any:
    lib = pmem2()
    config, held = ffi.new("struct pmem2_config **"), ffi.new("struct pmem2_map **")
    _check(lib.pmem2_config_new(config), label)
    try:
        _check(lib.pmem2_config_set_required_store_granularity(config[0], _PAGE), label)
        _check(lib.pmem2_config_set_protection(config[0], _PROT_READ), label)
        _check(lib.pmem2_map_new(held, config[0], source), f"{label}: map")
    finally:
        lib.pmem2_config_delete(config)
    return held


def _granularity(mapping: Any) -> int:
    """PMEM2_GRANULARITY_BYTE is 0 where LCK_GRAN_BYTE is 1, and so on."""
    return int(pmem2().pmem2_map_get_store_granularity(mapping)) + 1


def _device(source: Any, unknown: list[str]) -> str | None:
    size, text = ffi.new("size_t *", _DEVICE_BYTES), ffi.new("char[]", _DEVICE_BYTES)
    if _told(pmem2().pmem2_source_device_id(source, text, size), "device_id", unknown):
        return str(ffi.string(text).decode(errors="replace")) or None
    return None


def _number(source: Any, what: str, kind: str, unknown: list[str]) -> int | None:
    value = ffi.new(kind)
    code = getattr(pmem2(), f"pmem2_source_{what}")(source, value)
    return int(value[0]) if _told(code, what, unknown) else None


def _bad_blocks(source: Any, unknown: list[str]) -> tuple[tuple[int, int], ...] | None:
    lib = pmem2()
    context, block = ffi.new("struct pmem2_badblock_context **"), ffi.new("pmem2_badblock *")
    if not _told(lib.pmem2_badblock_context_new(context, source), "badblock", unknown):
        return None
    found: list[tuple[int, int]] = []
    try:
        while (code := lib.pmem2_badblock_next(context[0], block)) == 0:
            found.append((int(block.offset), int(block.length)))
    finally:
        lib.pmem2_badblock_context_delete(context)
    if code != _NO_BAD_BLOCK and not _told(code, "badblock", unknown):
        return None
    return tuple(found)


def _told(code: int, what: str, unknown: list[str]) -> bool:
    if code != 0:
        unknown.append(f"{what}: {text_of(pmem2().pmem2_errormsg())} (code {code})")
    return code == 0


def _check(code: int, context: str) -> None:
    if code != 0:
        text = text_of(pmem2().pmem2_errormsg())
        raise RegionError(f"{context}: libpmem2: {text} (code {code})")
