"""Anything that a trainer says of itself fits the page."""

from __future__ import annotations

from typing import Any, cast

import pytest

from lightck.region._ffi import ffi
from lightck.region.stats_page import Page

ROOM = 560  # bytes of last_error, its terminating zero included


@pytest.mark.parametrize("character", ["x", "\u00e9", "\u20ac"])
def test_a_long_error_ends_within_its_field_and_in_no_character(character: str) -> None:
    page = Page(cast("Any", None), cast("Any", None))
    page.values.bytes_drained, page.values.drain_ns = 2**64 - 1, 2**64 - 2
    page.error(ValueError(character * 1000))
    text = ffi.string(page.values.last_error)
    assert ROOM - len(character.encode()) <= len(text) < ROOM
    assert text.decode() == f"ValueError: {character * 1000}"[: len(text.decode())]
    assert (page.values.bytes_drained, page.values.drain_ns) == (2**64 - 1, 2**64 - 2)
    page.error(ValueError("short"))
    assert ffi.string(page.values.last_error) == b"ValueError: short"
