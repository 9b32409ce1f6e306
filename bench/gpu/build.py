"""Compile lightck's native part with gcc alone, where nothing can be installed."""

from __future__ import annotations

import hashlib
import os
import subprocess
import tempfile
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bench.errors import BenchError
from bench.place import ROOT

_FOLDER = ROOT / "build" / "native"


def library() -> Path:
    """Return the library of these sources as pip would build it; build it if it is missing.

    `$LIGHTCK_NATIVE` is used instead if it is set.

    Raises:
        BenchError: gcc is missing or fails; the message has its output.
    """
    given = os.environ.get("LIGHTCK_NATIVE")
    if given:
        return Path(given)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    (module,) = project["tool"]["setuptools"]["ext-modules"]
    flags = [*module["extra-compile-args"], "-fPIC"]
    flags += [f"-I{ROOT / folder}" for folder in module["include-dirs"]]
    sources = [ROOT / name for name in module["sources"]]
    every = [*sources, *(ROOT / name for name in module["depends"])]
    key = hashlib.sha256(b"".join(file.read_bytes() for file in every)).hexdigest()[:16]
    made = _FOLDER / f"lightck-{key}.so"
    if not made.exists():
        _compile(sources, flags, module["extra-link-args"], made)
    return made


def _compile(sources: list[Path], flags: list[str], link: list[str], made: Path) -> None:
    compiler = os.environ.get("CC", "gcc")
    made.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=made.parent) as folder:
        objects = [str(Path(folder, source.stem + ".o")) for source in sources]

        def one(source: Path, target: str) -> None:
            _run([compiler, *flags, "-c", "-o", target, str(source)])

        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            list(pool.map(one, sources, objects))
        part = Path(folder, made.name)
        _run([compiler, "-shared", "-o", str(part), *objects, *link])
        part.rename(made)


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        raise BenchError(f"{command[0]}: {error}: a C compiler is needed") from error
    if done.returncode:
        raise BenchError(f"{' '.join(command)} failed:\n{done.stderr[-4000:]}")
