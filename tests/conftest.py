"""Fixtures that every test may use."""

from __future__ import annotations

import contextlib
import gc
import os
import secrets
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import tiers

gc.disable()  # until all is collected: it takes a quarter of what imports do
_TESTS = Path(__file__).parent
_ROOT = _TESTS.parent
# Most tests mean every step; those of the default policy take this away.
os.environ.setdefault("LIGHTCK_POLICY", "1")
# Before torch is loaded: its threads spin while they wait, and on busy processors that is most of
# what a test of large tensors takes.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
with contextlib.suppress(ImportError):  # the tests on a GPU go without it
    from hypothesis import HealthCheck, settings

    # A loaded machine is no failure of a test.
    settings.register_profile(
        "lightck", deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile("lightck")


@pytest.fixture
def rng() -> np.random.Generator:
    """A random generator; pytest shows the seed of a failed test, LIGHTCK_TEST_SEED repeats it."""
    seed = int(os.environ.get("LIGHTCK_TEST_SEED") or secrets.randbits(32))
    print(f"rng fixture: LIGHTCK_TEST_SEED={seed}")
    return np.random.default_rng(seed)


@pytest.fixture(autouse=True)
def window(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small states go through the window, as large ones do, but in tests marked `at_once`."""
    from lightck.pipeline import at_once

    if request.node.get_closest_marker("at_once") is None:
        monkeypatch.setattr(at_once, "MOST_BYTES", -1)


@pytest.fixture
def region_dir() -> Iterator[Path]:
    """An empty folder on tmpfs that only this user can enter; removed afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="lightck-test-", dir="/dev/shm"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def disk_dir() -> Iterator[Path]:
    """A path for a run on an ordinary file system, where commits sync; not made yet."""
    folder = Path(tempfile.mkdtemp(prefix="lightck-test-", dir="/var/tmp"))
    yield folder / "run"
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def testing_library() -> Path:
    """The native library with fault injection; a subprocess loads it through LIGHTCK_NATIVE."""
    library = _ROOT / "build" / "native" / "lightck-testing.so"
    assert library.exists(), f"{library} is missing: run `make native-test` first"
    return library


def pytest_configure() -> None:
    """Let child processes import what this one does, and wait a second for a name.

    Also undo an ignored SIGINT, which a shell passes on to what it runs in the background.
    """
    path = [str(_ROOT), str(_TESTS), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(filter(None, path)))
    # torch's store looks up the name of each connection's address, and all its clients wait where
    # the resolver loses the question: 5 s, and once more.
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave the frameworks' own loops to `make integrations`, which names their folder."""
    if collection_path != _TESTS / "integrations":
        return None
    return None if any("integrations" in Path(each).parts for each in config.args) else True


@pytest.hookimpl(tryfirst=True)  # before `-m` is looked at
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    tiers.mark(items)


def pytest_collection_finish() -> None:
    """Keep all that was imported out of the collector's sight, which took a sixth of the time."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")
