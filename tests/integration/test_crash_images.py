"""Restoring, as users do it, from what crashes can leave of a real run's region.

`traced.py` trains with the trace build; the enumerator of `make crash` replays what it stored and
writes a sample of the images that a machine can be left with; here each is restored.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import lightck
from lightck.errors import LightckError, NoSnapshotError, RegionError
from support import proof, traced

ROOT = Path(__file__).resolve().parents[2]
NATIVE = ROOT / "build" / "native"
BYTE, LINE, PAGE, NONE = 1, 2, 3, 0
MEDIA = {"ADR": (0, LINE), "eADR": (1, BYTE), "file": (2, PAGE), "process": (3, NONE),
         "CXL dirty": (4, LINE)}  # fmt: skip
"""`crash --only` takes this number, and the run took its medium for this (LCK_GRAN_*)."""
ALSO_GOES_ON = 6
"""One of so many images is also trained on."""


MANIFEST_NOT_FLUSHED = 12


def _trace(folder: Path, mutant: int, *granularities: int) -> Path:
    library = NATIVE / "lightck-trace.so"
    assert library.exists(), f"{library} is missing: run `make native-test` first"
    numbers = [str(number) for number in (mutant, *granularities)]
    subprocess.run(
        [sys.executable, "-m", traced.__name__, str(folder), *numbers],
        check=True,
        timeout=300,
        env={**os.environ, "LIGHTCK_NATIVE": str(library)},
    )
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _trace(tmp_path_factory.mktemp("traced"), 0, NONE, BYTE, LINE, PAGE)


@pytest.fixture(scope="module")
def shown(request: pytest.FixtureRequest) -> Iterator[dict[str, dict[str, int]]]:
    by_medium: dict[str, dict[str, int]] = {}
    yield by_medium
    totals = {name: sum(m[name] for m in by_medium.values()) for name in ("images", "bad")}
    proof.record_whole(request, "python_images", {**totals, "by_medium": by_medium})


def _images(runs: Path, medium: str, sample: int, into: Path) -> list[Path]:
    crash = NATIVE / "crash" / "crash"
    assert crash.exists(), f"{crash} is missing: run `make crash` first"
    number, granularity = MEDIA[medium]
    into.mkdir()
    command = [crash, "--replay", runs / str(granularity) / "trace", "--dump", into]
    command += ["--only", number, "--sample", sample, "--seed", 17]
    subprocess.run([str(part) for part in command], check=True, timeout=300)
    return sorted(into.glob("*.image"))


def _restored(run: Path) -> tuple[int | None, traced.State]:
    model, optimizer = traced.build()
    try:
        info = lightck.restore(model, optimizer, run)
    except NoSnapshotError:
        info = None
    return info.step if info else None, traced.state_of(model, optimizer)


def _wrong(run: Path, expected: dict[str, Any], states: dict[int, traced.State]) -> str | None:
    """Return what is wrong about what comes back, or None."""
    lost = expected["lost_lines"] > 0
    try:
        step, state = _restored(run)
        if _restored(run)[0] != step:
            return "another step the second time"
    except RegionError as error:
        if lost or not expected["created"]:
            return None
        return f"nothing comes back: {error}"
    if step is None:
        return None if lost or expected["acked"] == 0 else f"{expected['acked']} is lost"
    if not lost and step < expected["acked"]:
        return f"{step} comes back, {expected['acked']} was committed"
    if step > expected["started"]:
        return f"{step} comes back, {expected['started']} was begun last"
    return None if traced.same(state, states[step]) else f"step {step} comes back with other bytes"


def _cannot_go_on(run: Path) -> str | None:
    """Return what is wrong when the job is started again as after any crash, or None."""
    model, optimizer = traced.build()
    info = None
    with contextlib.suppress(NoSnapshotError):  # the job then starts from the beginning
        info = lightck.restore(model, optimizer, run)
    try:
        with lightck.attach(model, optimizer, run, overwrite=info is None) as handle:
            traced.train_step(model, optimizer, lambda: None)
            handle.snapshot().result(timeout=60)
            state, step = traced.state_of(model, optimizer), handle.step
    except LightckError as error:
        return f"training does not go on: {error!r}"
    found, restored = _restored(run)
    return None if found == step and traced.same(restored, state) else f"{found} after {step}"


def _bad_among(images: list[Path], states: dict[int, traced.State], run: Path) -> list[str]:
    bad = []
    run.mkdir(mode=0o700)
    for number, image in enumerate(images):
        expected = json.loads(image.with_suffix(".json").read_text())
        image.rename(run / "region-00000.lck")
        wrong = _wrong(run, expected, states)
        if wrong is None and number % ALSO_GOES_ON == 0 and expected["created"]:
            wrong = None if expected["lost_lines"] else _cannot_go_on(run)
        if wrong is not None:
            bad.append(f"image {image.stem} {expected}: {wrong}")
    return bad


def _check(runs: Path, medium: str, sample: int, folder: Path) -> dict[str, int]:
    states: dict[int, traced.State] = torch.load(runs / str(MEDIA[medium][1]) / "states")
    images = _images(runs, medium, sample, folder / "images")
    assert len(images) == sample
    bad = _bad_among(images, states, folder / "run")
    assert not bad, "\n".join([medium, *bad[:10]])
    return {"images": len(images), "bad": len(bad)}


@pytest.mark.parametrize("medium", MEDIA)
def test_every_image_gives_back_a_step_of_the_run(
    runs: Path, medium: str, region_dir: Path, shown: dict[str, dict[str, int]]
) -> None:
    shown[medium] = _check(runs, medium, 60, region_dir)


@pytest.mark.soak
@pytest.mark.parametrize("medium", MEDIA)
def test_thousands_of_images_give_back_steps_of_the_run(
    runs: Path, medium: str, region_dir: Path, shown: dict[str, dict[str, int]]
) -> None:
    shown[medium] = _check(runs, medium, 1000, region_dir)


def test_a_mistake_in_the_commit_order_would_be_seen(region_dir: Path) -> None:
    runs = _trace(region_dir, MANIFEST_NOT_FLUSHED, LINE)
    states = torch.load(runs / str(LINE) / "states")
    images = _images(runs, "ADR", 40, region_dir / "images")
    assert _bad_among(images, states, region_dir / "image")
