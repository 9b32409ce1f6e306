"""The real package with NumPy, in a guest that mounts the host's root: no torch, no other disk."""

from __future__ import annotations

import argparse
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from tests.guest import image, kills
from tests.guest.kills import Bench, Case
from tests.guest.verdict import Verdict

HERE = Path(__file__).parent
NEEDS = "import numpy, pyarrow, cffi"
INSTALL_S = 300


def unusable(options: argparse.Namespace) -> str:
    """Return why it cannot run here; empty: it can. Fetches the kernel that knows 9p."""
    python = Path(options.python)
    if not python.exists():
        return f"no {python} with numpy, pyarrow and cffi: run `make venv` first"
    done = subprocess.run([python, "-c", NEEDS], capture_output=True, text=True)
    if done.returncode:
        return f"{python}: {done.stderr.strip().splitlines()[-1]}"
    install = ["bash", str(HERE / "install.sh"), str(options.folder), "full"]
    done = subprocess.run(install, capture_output=True, text=True, timeout=INSTALL_S)
    return (done.stdout + done.stderr).strip().removeprefix("SKIPPED: ") if done.returncode else ""


def killed(case: Case, bench: Bench, options: argparse.Namespace) -> Iterator[Verdict]:
    """Kill as `kills.persistent` does, with the package for the region code."""
    built = image.build(options.folder / "kernel-full", "full", [], options.folder)
    # Not resolved: a virtual environment's python knows its packages by the path it is called by.
    python, library = Path(options.python).absolute(), options.library.resolve()
    words = f":{HERE.parents[1]}:{python}:{library}"
    yield from kills.persistent(replace(case, options=words), replace(bench, image=built))
