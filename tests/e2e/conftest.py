"""The fork servers, one per session, and a bed of folders per test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.e2e.resume import Bed, Server
from support.e2e.script_server import Scripts


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A process that forks trainers."""
    running = Server(tmp_path_factory.mktemp("e2e"))
    yield running
    running.close()


@pytest.fixture(scope="session")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scripts]:
    """A process that forks scripts."""
    running = Scripts(tmp_path_factory.mktemp("scripts"))
    yield running
    running.close()


@pytest.fixture
def bed(server: Server, region_dir: Path) -> Bed:
    """Experiments with regions in a folder of their own."""
    return Bed(server, region_dir)
