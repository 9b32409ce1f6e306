"""The testing library maps a writer's region so that only its own primitives can write to it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np

from lightck.region._ffi import library_path
from support.regions import Book, random_contents

SIZES = {"a": 5000, "b": 200_000}


def permissions(address: int) -> str:
    """Return the permissions of the mapping that holds an address, as /proc/self/maps has them."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, found = line.split()[:2]
        low, high = (int(end, 16) for end in span.split("-"))
        if low <= address < high:
            return found
    raise AssertionError(f"nothing is mapped at {address:#x}")


def test_python_runs_under_the_guard_of_the_region(
    region_dir: Path, testing_library: Path, rng: np.random.Generator
) -> None:
    assert Path(library_path()).resolve() == testing_library.resolve(), (
        "set LIGHTCK_NATIVE=build/native/lightck-testing.so"
    )
    with Book(region_dir / "run", slot_bytes=1 << 18) as book:
        assert book.commit(1, random_contents(rng, SIZES))
        info = book.region.native.describe()
        assert {permissions(info.base + at) for at in range(0, info.size, 4096)} == {"r--s"}


def test_a_store_by_python_into_the_region_ends_the_process(region_dir: Path) -> None:
    code = f"""
import ctypes
from pathlib import Path
from support.regions import Book
with Book(Path({str(region_dir / "run")!r})) as book:
    print("open", flush=True)
    ctypes.memset(book.region.native.describe().base + 4096, 1, 1)
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        timeout=250,
    )
    assert (done.stdout, done.returncode) == ("open\n", -signal.SIGSEGV), done.stderr
