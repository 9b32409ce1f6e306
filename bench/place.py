"""Say where benchmarks read and write: the checkout, results, and a scratch folder per medium."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.errors import BenchError

ROOT = Path(__file__).parent.parent
BUILD = ROOT / "build" / "bench"
DEFINITIONS = Path(__file__).parent / "definitions"

MEDIA = {
    "tmpfs": Path("/dev/shm"),
    "file": BUILD,  # whatever file system the checkout is on
}


@contextmanager
def scratch(medium: str) -> Iterator[Path]:
    """Yield an empty folder on a medium; it is removed afterwards, after a kill by the next call.

    Only folders of dead processes are removed: a folder's name has its maker's process number.
    """
    if medium not in MEDIA:
        raise BenchError(f"medium {medium!r}: must be one of {', '.join(MEDIA)}")
    root = MEDIA[medium]
    root.mkdir(parents=True, exist_ok=True)
    for left in root.glob("lightck-bench-*"):
        found = re.fullmatch(r"lightck-bench-(\d+)-\w+", left.name)
        if found and not Path("/proc", found[1]).exists():
            shutil.rmtree(left, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=f"lightck-bench-{os.getpid()}-", dir=root))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
