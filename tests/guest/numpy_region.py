"""Runs in the guest: snapshots of NumPy arrays through lightck's own Python region floor.

python -m tests.guest.numpy_region write|verify FOLDER; says what lckguest says (native/guest).
"""

from __future__ import annotations

import sys
import termios
import types
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[2]
# lightck/__init__.py imports torch, which takes half a minute here and which no region needs.
_package = types.ModuleType("lightck")
_package.__path__ = [str(ROOT / "lightck")]
sys.modules["lightck"] = _package

from tests.regions import Book, Contents, newest, same  # noqa: E402

from lightck.region import location, native_region  # noqa: E402
from lightck.region.region import Region, open_and_recover  # noqa: E402

UNITS = ("none", "byte", "line", "page")
SIZES = {"weight": 300_000, "bias": 77, "moment": 65_536, "step": 8}


def contents(step: int) -> Contents:
    """Make what a step's snapshot holds."""
    rng = np.random.default_rng(step)
    return {name: rng.integers(0, 256, size, np.uint8) for name, size in SIZES.items()}


def say(line: str) -> None:
    """One line, on its way out of the machine when this returns."""
    print(line, flush=True)
    if sys.stdout.isatty():
        termios.tcdrain(sys.stdout)


def describe(region: Region) -> None:
    """Say what the package says of a region, with the words of `handle.survives`."""
    info = region.info
    unit = UNITS[info.granularity]
    say(f"IS {info.medium} {unit} granularity={info.granularity} survives {region.survives}")


def write(folder: Path) -> None:
    """Commit one snapshot after the other."""
    say(f"CREATING {folder} with kernel {native_region.kernel()}")
    with Book(folder, durable=True) as book:
        describe(book.region)
        candidates = book.region.recover().candidates
        book.region.begin_timeline(candidates[0].record if candidates else None)
        step = candidates[0].record.step if candidates else 0
        while True:
            step += 1
            say(f"BEGUN {step}")
            if not book.commit(step, contents(step)):
                sys.exit("FAILED no slot is free")
            say(f"COMMITTED {step}")


def verify(folder: Path) -> None:
    """Recover as a reader and as the owner; both must find the same, contents compared."""
    where = location.locate(folder, 0, create=False)
    if not where.exists:
        say("RECOVERED none")
        return
    reader, _ = open_and_recover(where)
    describe(reader)
    step, found, problems = newest(reader)
    reader.close()
    owner = Region.open(where, writable=True)
    again, *_ = newest(owner)
    owner.close()
    for problem in problems:
        say(f"FELLBACK {problem}")
    if again != step or (step is not None and not same(found, contents(step))):
        say(f"WRONG a reader recovers {step}, the owner {again}; contents may differ")
        sys.exit(1)
    say(f"RECOVERED {'none' if step is None else step}")


if __name__ == "__main__":
    assert "torch" not in sys.modules, "the region's floor imports torch"
    {"write": write, "verify": verify}[sys.argv[1]](Path(sys.argv[2]))
