"""Where benchmarks read and write: the checkout, results, and a scratch folder per medium."""

from __future__ import annotations

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
    """An empty folder on a medium; removed afterwards."""
    if medium not in MEDIA:
        raise BenchError(f"medium {medium!r}: must be one of {', '.join(MEDIA)}")
    root = MEDIA[medium]
    root.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="lightck-bench-", dir=root))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
