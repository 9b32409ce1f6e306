"""Fixtures of the integrations' tests; `make integrations` runs them, in an environment of its own.

Nothing here imports a framework: servers do, one per framework and test process.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from support.integrations.chain import Chain, Server


@pytest.fixture(scope="session")
def servers() -> Iterator[Callable[[tuple[str, ...]], Server]]:
    """A function that returns the server which has imported the given modules."""
    running: dict[tuple[str, ...], Server] = {}
    folder = Path(tempfile.mkdtemp(prefix="lightck-test-", dir="/dev/shm"))

    def get(modules: tuple[str, ...]) -> Server:
        if modules not in running:
            running[modules] = Server(folder, modules)
        return running[modules]

    yield get
    for each in running.values():
        each.close()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def chain(
    request: pytest.FixtureRequest, servers: Callable[[tuple[str, ...]], Server]
) -> Iterator[Callable[..., Chain]]:
    """A function that makes a chain of a script; a test module names what its scripts import.

    The module's `FRAMEWORK` is the package without which its tests are skipped, visibly, and
    `MODULES` what its server imports before it forks.
    """
    framework: str = request.module.FRAMEWORK
    if find_spec(framework) is None:
        pytest.skip(f"SKIPPED: {framework} is not installed: make integrations")
    folder = Path(tempfile.mkdtemp(prefix="lightck-test-", dir="/dev/shm"))

    def make(script: str, **fields: Any) -> Chain:
        return Chain(servers(request.module.MODULES), folder, script, **fields)

    yield make
    shutil.rmtree(folder, ignore_errors=True)
