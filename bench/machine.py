"""Describe on what a result was measured: machine, versions, commit. No version, no number."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from bench.errors import BenchError
from bench.place import ROOT


def machine() -> dict[str, Any]:
    """Return CPU, memory and kernel of this machine."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "cpu": _field(Path("/proc/cpuinfo"), "model name") or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": memory,
        "kernel": platform.release(),
        "libc": " ".join(platform.libc_ver()),
    }


def _field(file: Path, name: str) -> str | None:
    for line in file.read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return None


def load() -> list[float]:
    """Return the load averages now.

    On a busy machine numbers mean little, and the report says so.
    """
    return [round(value, 2) for value in os.getloadavg()]


def commit() -> str:
    """Return the checkout's commit, with `+` if files differ from it.

    Raises:
        BenchError: there is no git or no repository.
    """
    try:
        head = _git("rev-parse", "--short=12", "HEAD")
        return head + ("+" if _git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError) as error:
        raise BenchError(
            f"{ROOT}: the commit cannot be told ({error}); results without one are not comparable"
        ) from error


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, check=True)
    return done.stdout.decode().strip()


def installed(package: str) -> bool:
    """Return whether a package is installed, in any version."""
    try:
        version(package)
    except PackageNotFoundError:
        return False
    return True


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Return the versions of Python and of the packages.

    Raises:
        BenchError: a package is not installed; the message says how to get it.
    """
    found = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError as error:
            raise BenchError(
                f"package {package} is not installed, so nothing was run: pip install -c"
                " constraints.txt '.[bench]'"
            ) from error
    return found
