"""The benchmarks declare of the native library what the package declares."""

from __future__ import annotations

from bench import library as ours
from lightck.region import _ffi as package


def _statements(cdef: str) -> set[str]:
    """Declarations, blanks aside; the inside of a struct stays with it."""
    joined, depth, found = "", 0, set()
    for character in cdef:
        depth += {"{": 1, "}": -1}.get(character, 0)
        if character == ";" and depth == 0:
            found.add(" ".join(joined.split()))
            joined = ""
        else:
            joined += character
    return found


def test_declarations_are_a_part_of_the_package_s() -> None:
    known = _statements(package.CDEF)
    assert _statements(ours.CDEF) - known == set()


def test_they_are_for_the_package_s_abi() -> None:
    assert ours.ABI == package.ABI
