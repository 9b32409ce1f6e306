"""A region's memory goes away under a training: it is told, and computes what it would have."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import lightck
from lightck import examine
from lightck.cli.main import main as command
from lightck.errors import PreviousPersistError
from support import faults, proof
from support.loops import Loop, adam_loop, attach, of_live, of_stored, restored, steps_at

PLACES = [("tmpfs", "direct"), ("tmpfs", "staged"), ("file", "auto")]
CUTS: dict[str, Callable[[int], int]] = {
    "all of it": lambda size: 0,
    "behind the records": lambda size: 1 << 20,
    "in the slots": lambda size: size // 2,
    "a page that holds nothing": lambda size: size - 4096,
}


class Reports(list[BaseException]):
    """`on_error` was called with these errors."""

    def __call__(self, error: BaseException) -> None:
        self.append(error)


@pytest.fixture(params=PLACES, ids="-".join)
def where(request: pytest.FixtureRequest, run_dir: Path, disk_dir: Path) -> tuple[Path, str]:
    """A path on a medium, and a placement."""
    medium, placement = request.param
    return (run_dir if medium == "tmpfs" else disk_dir), placement


def region_file(path: Path) -> Path:
    return path / "region-00000.lck"


def train(loop: Loop, steps: int, handle: lightck.Handle | None = None) -> Iterator[float]:
    """The losses; with a handle every snapshot is committed, or has failed, before the next."""
    for _ in range(steps):
        loss = loop.forward()
        yield loss.item()
        loss.backward()
        loop.update()
        if handle is not None:
            handle.wait()


def uninterrupted(steps: int) -> list[float]:
    """The losses of the same training without lightck."""
    torch.manual_seed(5)
    return list(train(adam_loop(), steps))


def fresh_loop() -> Loop:
    torch.manual_seed(5)
    return adam_loop()


def cut_in_flight(loop: Loop, file: Path, length: int) -> float:
    """A step in whose window the file is cut while its copies wait, each behind a delay."""
    with faults.delayed(faults.COPY, 0.01):
        loss = loop.forward()
        os.truncate(file, length)
        loss.backward()
        loop.update()
    return loss.item()


# ---- The file is cut ----------------------------------------------------------------------------


@pytest.mark.parametrize("cut", CUTS)
def test_a_cut_file_is_told_once_and_the_training_computes_what_it_would_have(
    where: tuple[Path, str], cut: str
) -> None:
    path, placement = where
    loop, reports = fresh_loop(), Reports()
    handle = attach(path, loop, on_error=reports, placement=placement, chunk_bytes=4096)
    losses = list(train(loop, 3, handle))
    size = region_file(path).stat().st_size
    length = CUTS[cut](size)
    losses.append(cut_in_flight(loop, region_file(path), length))
    losses += train(loop, 4, handle)
    assert losses == uninterrupted(8)

    assert [type(error) for error in reports] == [lightck.RegionIOError]
    for part in (str(path), f"{size} bytes", f"has {length} bytes now", f"truncate -s {size}"):
        assert part in str(reports[0])
    with pytest.raises(lightck.RegionIOError, match="was cut while it was open"):
        handle.close()
    handle.close()

    with pytest.raises(lightck.RegionFormatError, match=rf"\b{length}\b"):
        restored(path)
    os.truncate(region_file(path), size)
    if cut == "all of it":
        with pytest.raises(lightck.RegionFormatError):
            restored(path)
        return
    # What was committed before the cut is there if its bytes are, and nothing else.
    try:
        info, again = restored(path)
    except lightck.NoSnapshotError:
        assert cut != "a page that holds nothing"
        return
    assert info is not None and info.step in (1, 2, 3)
    assert of_live(again.model, again.optimizers) == loop.seen[info.step]


@pytest.mark.parametrize("is_open", [False, True])
def test_a_cut_is_an_error_though_all_handlers_of_python_s_were_put_back(
    run_dir: Path, is_open: bool
) -> None:
    """Lightning does so at the end of a fit: the default then replaces lightck's handler.

    It does so before the region is opened, or between two snapshots.
    """
    attach(run_dir.with_name("earlier"), fresh_loop()).close()
    loop, reports = fresh_loop(), Reports()
    if not is_open:
        signal.signal(signal.SIGBUS, signal.SIG_DFL)
    handle = attach(run_dir, loop, on_error=reports, placement="direct")
    losses = list(train(loop, 3, handle))
    if is_open:
        signal.signal(signal.SIGBUS, signal.SIG_DFL)
    losses.append(cut_in_flight(loop, region_file(run_dir), 0))
    losses += train(loop, 2, handle)
    assert losses == uninterrupted(6)
    assert [type(error) for error in reports] == [lightck.RegionIOError]
    with pytest.raises(lightck.RegionIOError, match="was cut while it was open"):
        handle.close()
    handle.close()


def test_restore_falls_back_to_the_snapshot_that_the_cut_has_left(where: tuple[Path, str]) -> None:
    path, placement = where
    loop = fresh_loop()
    with attach(path, loop, placement=placement) as handle:
        list(train(loop, 2, handle))
        while newest_slot(path) != 0:
            list(train(loop, 1, handle))
        loop.note()
    assert newest_slot(path) == 1, "made by close(), behind the older one"
    steps = steps_at(path)
    assert len(steps) == 2
    size, start = region_file(path).stat().st_size, first_offset(path, steps[1])
    os.truncate(region_file(path), start)
    os.truncate(region_file(path), size)
    info, again = restored(path)
    assert info is not None and info.step == steps[0]
    assert len(info.fell_back) == 1 and str(region_file(path)) in info.fell_back[0]
    assert of_live(again.model, again.optimizers) == loop.seen[steps[0]]
    with attach(path, again) as handle:  # and the training goes on from there
        list(train(again, 2, handle))
        again.note()
    assert of_stored(path, steps[0] + 2) == again.seen[steps[0] + 2]


def newest_slot(path: Path) -> int:
    row: dict[str, Any] = max(lightck.snapshots(path).to_pylist(), key=lambda row: row["step"])
    slot: int = row["slot"]
    return slot


def first_offset(path: Path, step: int) -> int:
    """Return where a snapshot's payload begins, down to a page."""
    offset: int = min(examine.contents(path, step).tensors["offset"].to_pylist())
    return offset // 4096 * 4096


def test_with_warn_a_cut_file_is_one_warning(run_dir: Path) -> None:
    loop = fresh_loop()
    handle = attach(run_dir, loop)
    losses = list(train(loop, 2, handle))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        losses.append(cut_in_flight(loop, region_file(run_dir), 8192))
        losses += train(loop, 3, handle)
    assert [w.category for w in caught] == [RuntimeWarning]
    assert "has 8192 bytes now" in str(caught[0].message)
    assert losses == uninterrupted(6)
    with pytest.raises(lightck.RegionIOError):
        handle.close()


def test_with_raise_a_cut_file_stops_the_loop_at_a_call_of_the_engine(run_dir: Path) -> None:
    loop = fresh_loop()
    handle = attach(run_dir, loop, on_error="raise")
    list(train(loop, 2, handle))
    with pytest.raises(lightck.RegionIOError, match="has 8192 bytes now"):
        cut_in_flight(loop, region_file(run_dir), 8192)
        list(train(loop, 2, handle))
    with pytest.raises(lightck.RegionIOError, match="has 8192 bytes now"):
        handle.close()
    handle.close()


@pytest.mark.parametrize("cut", CUTS)
def test_whoever_reads_beside_a_cut_region_gets_a_typed_error(
    where: tuple[Path, str], cut: str
) -> None:
    path, placement = where
    loop = fresh_loop()
    handle = attach(path, loop, placement=placement, on_error=Reports())
    list(train(loop, 3, handle))
    os.truncate(region_file(path), CUTS[cut](region_file(path).stat().st_size))
    readers: list[Callable[[Path], object]] = [
        restored, lightck.load, lightck.snapshots, examine.regions, examine.contents, examine.check,
    ]  # fmt: skip
    for read in readers:
        with pytest.raises(lightck.RegionFormatError):
            read(path)
    for name in ("ls", "inspect", "verify"):
        assert command([name, str(path)]) not in (0, 130)
    handle.detach()


# ---- Memory is poisoned -------------------------------------------------------------------------


def test_poison_at_any_access_of_a_training_is_told_and_costs_no_older_snapshot(
    where: tuple[Path, str],
) -> None:
    path, placement = where
    expected, met = uninterrupted(4), 0
    for after in range(0, 84, 7):  # every kind of access, in a dozen runs
        loop, reports = fresh_loop(), Reports()
        run = path.with_name(f"run-{after}")
        handle = attach(run, loop, on_error=reports, placement=placement, chunk_bytes=4096)
        losses = list(train(loop, 2, handle))
        faults.arm(faults.POISON, after=after)
        losses += train(loop, 2, handle)
        faults.disarm(faults.POISON)
        handle.detach()
        loop.note()
        assert losses == expected
        told = bool(reports)
        met += told
        for error in reports:
            # The commit thread may come across it where nobody waits; the next one is told why.
            assert isinstance(error, lightck.RegionIOError | PreviousPersistError), error
            assert "poisoned" in str(error) and str(run) in str(error)
        assert len(reports) <= 1
        info, again = restored(run)
        assert info is not None and info.step >= (1 if told else 2)
        assert of_live(again.model, again.optimizers) == loop.seen[info.step]
    assert met > 0, "a snapshot that slips is not met; not all of them slip"


def test_poison_at_any_access_of_a_restore_falls_back_or_is_a_typed_error(run_dir: Path) -> None:
    loop = fresh_loop()
    with attach(run_dir, loop) as handle:
        list(train(loop, 3, handle))
        loop.note()
    outcomes = []
    for after in range(60):
        faults.arm(faults.POISON, after=after)
        try:
            info, again = restored(run_dir)
        except lightck.RegionError as error:
            assert "poisoned" in str(error)
            outcomes.append("typed error")
        else:
            assert info is not None
            assert of_live(again.model, again.optimizers) == loop.seen[info.step]
            fell_back = [text for text in info.fell_back if "poisoned" in text]
            assert (info.step == 3) == (not fell_back)
            outcomes.append("fell back" if fell_back else "as ever")
        faults.disarm(faults.POISON)
    assert "fell back" in outcomes
    assert outcomes[-1] == "as ever", "more accesses than were poisoned"


# ---- Everybody else's faults --------------------------------------------------------------------

FOREIGN = """
import ctypes, faulthandler, mmap, os, sys, tempfile
import torch, lightck

when, path = sys.argv[1:]
model = torch.nn.Linear(16, 16)
optimizer = torch.optim.AdamW(model.parameters())
if when == "before":
    faulthandler.enable()
handle = lightck.attach(model, optimizer, path, on_error=lambda error: None)
if when == "after":
    faulthandler.enable()

def step():
    model(torch.ones(2, 16)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()

step()
handle.wait()
if when == "before":  # ours: told, and the training goes on
    os.truncate(path + "/region-00000.lck", 8192)
    step()
    step()
print("trained", flush=True)
with tempfile.TemporaryFile() as file:
    file.truncate(4096)
    theirs = mmap.mmap(file.fileno(), 4096)
    file.truncate(0)
    ctypes.string_at(ctypes.addressof(ctypes.c_char.from_buffer(theirs)), 1)
print("survived")
"""


@pytest.mark.parametrize("when", ["never", "before", "after"])
def test_a_foreign_fault_still_ends_the_process_with_its_traceback(
    run_dir: Path, when: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FOREIGN, when, str(run_dir)],
        capture_output=True, text=True, timeout=250, check=False,
    )  # fmt: skip
    assert done.stdout == "trained\n", done.stderr
    assert done.returncode == -signal.SIGBUS
    printed = done.stderr.count("Fatal Python error: Bus error")
    assert printed == (0 if when == "never" else 1), done.stderr


# ---- The numbers --------------------------------------------------------------------------------


def test_the_native_programs_fail_every_call_and_access_and_live(testing_library: Path) -> None:
    """The programs' counts go to the proof; a death would be their exit status."""
    names = ("test_calls", "test_media_faults")
    programs = [testing_library.parent / "plain" / name for name in names]
    runs = [
        subprocess.run([program], capture_output=True, text=True, timeout=300, check=False)
        for program in programs
    ]
    deaths = sum(run.returncode < 0 for run in runs)
    assert [run.returncode for run in runs] == [0, 0], [run.stderr for run in runs]
    counted = re.search(r"(\d+) calls, (\d+) errnos, (\d+) cases", runs[0].stdout)
    accesses = re.findall(r"SIGBUS at each of (\d+) accesses", runs[1].stdout)
    assert counted is not None and len(accesses) == 2
    calls, errnos, cases = map(int, counted.groups())
    numbers = {"calls": calls, "errnos": errnos, "cases": cases, "process_deaths": deaths}
    proof.record("media", numbers | {"accesses_with_sigbus": sum(map(int, accesses))})
