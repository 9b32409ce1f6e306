"""Compare micro-benchmarks of this tree with another commit's: `make bench-compare BASE=...`.

The other commit's files are unpacked into a scratch folder (no git worktree, which git would have
to prune). The folder is removed afterwards or, if this process is killed, by the next run. Both
trees' native libraries are built the same way, by the flags of each.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import sysconfig
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from bench.errors import BenchError
from bench.place import ROOT, scratch
from bench.quantity import digits, quantity

Tell = Callable[[str], None]
_MICRO = Path("bench") / "micro"
_TOLD = 0.05  # share of the time below which a difference is not reported
_ROUNDS = 3  # with fewer rounds, all agree by chance too often


@dataclass
class Tree:
    """A checkout that is measured.

    Attributes:
        name: its name in the output.
        root: folder of its files.
        library: file of its native library.
        seconds: each benchmark's medians, one per round.
    """

    name: str
    root: Path
    library: Path
    seconds: dict[str, list[float]] = field(default_factory=dict)


def compare(base: str, rounds: int, only: str, tell: Tell) -> str:
    """Measure both trees in alternating rounds; return a table of the ratios.

    Args:
        base: a commit, as git names it.
        rounds: how often each of the files in `bench/micro` runs in each tree.
        only: an expression that chooses benchmarks, as pytest's -k; empty: all.
        tell: called with progress.

    Raises:
        BenchError: there is no such commit, or it cannot be built or measured here.
        KeyboardInterrupt: also on SIGTERM; nothing is left behind.
    """
    commit = _git("rev-parse", "--verify", "--quiet", f"{base}^{{commit}}").decode().strip()
    with _terminable(), scratch("file") as folder:
        there = Tree(f"{base} ({commit[:12]})", folder / "base", folder / "base.so")
        here = Tree("this tree", ROOT, folder / "this.so")
        _unpack(commit, there.root)
        for tree in (there, here):
            tell(f"building {tree.name}")
            build(tree.root, tree.library)
        notes = [_same_measure(there, here)]
        files = sorted(file.name for file in (ROOT / _MICRO).glob("test_*.py"))
        for number in range(rounds):
            order = (there, here) if number % 2 == 0 else (here, there)
            for file in files:
                for tree in order:
                    tell(f"round {number + 1} of {rounds}: {file}, {tree.name}")
                    if problem := _measure(tree, file, only, folder / "found.json"):
                        notes.append(problem)
    if not (there.seconds or here.seconds or any(notes)):
        raise BenchError(f"-k {only!r}: no benchmark in {_MICRO} of this name")
    return table(there, here, list(dict.fromkeys(filter(None, notes))))


@contextmanager
def _terminable() -> Iterator[None]:
    """Let the first SIGTERM or SIGINT raise KeyboardInterrupt.

    Further ones are ignored until the work is undone.
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
        for each in before:
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = {each: signal.signal(each, interrupt) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def _git(*arguments: str) -> bytes:
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True)
    if done.returncode:
        told = done.stderr.decode().strip() or "there is none"
        name = arguments[-1].removesuffix("^{commit}")
        raise BenchError(f"{name}: no commit to compare with: {told}")
    return done.stdout


def _unpack(commit: str, root: Path) -> None:
    root.mkdir()
    packed = _git("archive", "--format=tar", commit)
    subprocess.run(["tar", "-x", "-C", str(root)], input=packed, check=True)


def build(root: Path, library: Path) -> None:
    """Compile a tree's native library by the settings of its pyproject.toml.

    Raises:
        BenchError: the tree has no native library, or the compiler failed; the message has its
            output.
    """
    try:
        project = tomllib.loads((root / "pyproject.toml").read_text())
        (extension,) = project["tool"]["setuptools"]["ext-modules"]
    except (OSError, KeyError, ValueError) as error:
        raise BenchError(f"{root}: no native library to build: {error!r}") from error
    flags = sysconfig.get_config_var("CFLAGS") or ""
    command = shlex.split(f"{os.environ.get('CC', 'gcc')} {flags}")
    command += ["-fPIC", "-shared", *extension["extra-compile-args"]]
    command += [f"-I{each}" for each in extension["include-dirs"]]
    command += ["-o", str(library.absolute()), *extension["sources"], *extension["extra-link-args"]]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    if done.returncode:
        raise BenchError(f"{root}: {command[0]} failed:\n{done.stderr[-4000:]}")


def _same_measure(there: Tree, here: Tree) -> str:
    """Measure both with this tree's benchmarks, where they fit; else return why they do not.

    The benchmarks know the native library by its declarations. Another ABI needs the other tree's
    own benchmarks, and where those differ, one name may stand for different measurements.
    """
    first, second = (_abi(tree.library) for tree in (there, here))
    if first != second:
        return (
            f"native ABI {first} there, {second} here: each tree is measured by its own benchmarks,"
            " which may differ"
        )
    shutil.rmtree(there.root / "bench", ignore_errors=True)
    left_out = shutil.ignore_patterns("results", "__pycache__")
    shutil.copytree(ROOT / "bench", there.root / "bench", ignore=left_out)
    return ""


def _abi(library: Path) -> int:
    from cffi import FFI

    ffi = FFI()
    ffi.cdef("uint32_t lck_abi_version(void);")
    return int(ffi.dlopen(str(library)).lck_abi_version())


def _measure(tree: Tree, file: str, only: str, found: Path) -> str:
    """Run one file of benchmarks in a process of its own.

    Return an error text, empty if all passed.
    """
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(_MICRO / file)]
    command += ["--benchmark-json", str(found), "--benchmark-disable-gc"]
    command += ["-W", "ignore::pytest_benchmark.logger.PytestBenchmarkWarning"]  # nothing is saved
    command += ["-k", only] if only else []
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(tree.root)}
    environment["LIGHTCK_NATIVE"] = str(tree.library.absolute())
    found.unlink(missing_ok=True)
    with subprocess.Popen(
        command,
        cwd=tree.root,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as child:
        try:
            told, _ = child.communicate()
        except BaseException:
            child.kill()
            raise
    measured = json.loads(found.read_text())["benchmarks"] if found.exists() else []
    for each in measured:
        tree.seconds.setdefault(each["name"], []).append(each["stats"]["median"])
    if child.returncode in (0, 5):  # 5: no test was selected
        return ""
    why = next((line[1:].strip() for line in told.splitlines() if line.startswith("E ")), "")
    return f"{file} failed in {tree.name}: {why or told.strip()[-200:]}"


def table(there: Tree, here: Tree, notes: Sequence[str]) -> str:
    """Return the table of all benchmarks.

    A row has both times, and the ratio with its lowest and highest round.
    """
    rows: list[tuple[str, ...]] = [("", there.name, here.name, "ratio", "rounds", "")]
    for name in sorted(there.seconds.keys() & here.seconds.keys()):
        pairs = list(zip(there.seconds[name], here.seconds[name], strict=False))
        ratios = [now / before for before, now in pairs]
        times = (quantity(statistics.median(side), "s") for side in zip(*pairs, strict=True))
        span = f"[{digits(min(ratios))}, {digits(max(ratios))}]"
        rows.append((name, *times, digits(statistics.median(ratios)), span, _word(ratios)))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    for tree, other in ((there, here), (here, there)):
        if gone := sorted(tree.seconds.keys() - other.seconds.keys()):
            lines.append(f"only {tree.name}: {', '.join(gone)}")
    lines.append(
        f"ratio: {here.name} / {there.name}, the median of the rounds, in brackets their ends;"
        f" slower, faster: every one of {_ROUNDS} rounds and more, by more than {_TOLD:.0%}"
    )
    return "\n".join([*lines, *notes])


def _word(ratios: Sequence[float]) -> str:
    """Return the word that all rounds agree on, slower or faster, or nothing."""
    if len(ratios) < _ROUNDS:
        return ""
    if min(ratios) > 1 + _TOLD:
        return "slower"
    return "faster" if max(ratios) < 1 - _TOLD else ""
