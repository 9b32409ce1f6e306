"""Name the sources that are measured, where there is no repository to ask."""

from __future__ import annotations

import hashlib

from bench import machine
from bench.errors import BenchError
from bench.place import ROOT

_PATTERNS = ("lightck/**/*.py", "native/**/*.[ch]", "bench/**/*.py", "bench/**/*.toml")


def digest() -> str:
    """Return a digest of everything that results depend on.

    It is the same in any copy of the checkout.
    """
    found = hashlib.sha256()
    for file in sorted(file for pattern in _PATTERNS for file in ROOT.glob(pattern)):
        found.update(str(file.relative_to(ROOT)).encode() + b"\0" + file.read_bytes() + b"\0")
    return f"tree-{found.hexdigest()[:16]}"


def name() -> str:
    """Return the commit, or the sources' digest in a copy without its repository."""
    try:
        return machine.commit()
    except BenchError:
        return digest()
