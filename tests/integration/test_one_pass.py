"""Restore reads what nobody has yet while it verifies; what is live changes only after that."""

from __future__ import annotations

import gc
import os
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import lightck
from lightck.device.lookup import holder
from lightck.reader import fill
from lightck.reader.assembly import AssembledSnapshot
from lightck.region import location
from lightck.region.region import Region, open_and_recover
from lightck.state import tensor_layout
from support.emulated import EmulatedDevice, devices
from support.emulated_job import Job
from support.loops import adam_loop, attach, of_live, of_stored


class Passes:
    """These are the passes over a region, and where each reads to."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.passes: list[tuple[str, list[tuple[int, int]]]] = []
        fetch, verify, read = Region.fetch, AssembledSnapshot.verify, AssembledSnapshot.read

        def noted(region: Region, candidate: Any, rows: Any, names: Any, threads: int) -> None:
            reads = zip(rows["destination"].tolist(), rows["length"].tolist(), strict=True)
            self.passes[-1][1].extend(reads)
            fetch(region, candidate, rows, names, threads)

        def verifies(snapshot: AssembledSnapshot, *given: Any) -> None:
            self.passes.append(("verify", []))
            verify(snapshot, *given)

        def reads(snapshot: AssembledSnapshot, addresses: Any) -> None:
            self.passes.append(("read", []))
            read(snapshot, addresses)

        patch.setattr(Region, "fetch", noted)
        patch.setattr(AssembledSnapshot, "verify", verifies)
        patch.setattr(AssembledSnapshot, "read", reads)

    def bytes_of(self, i: int) -> tuple[int, int]:
        """Bytes that a pass goes over, and how many of them it stores."""
        reads = self.passes[i][1]
        return sum(length for _, length in reads), sum(length for to, length in reads if to)


def written(path: Path, steps: int = 1) -> None:
    loop = adam_loop()
    with attach(path, loop) as handle:
        for _ in range(steps):
            loop.run(1)
            handle.wait()


def spans(loop: Any) -> list[tuple[int, int]]:
    return [(p.data_ptr(), p.nbytes) for p in loop.model.parameters()]


def test_state_that_is_made_is_read_once_and_live_tensors_only_when_all_is_verified(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(run_dir)
    passes, loop = Passes(monkeypatch), adam_loop()
    info = lightck.restore(loop.model, list(loop.optimizers), run_dir)
    assert info is not None and [name for name, _ in passes.passes] == ["verify", "read"]
    live, weights = dict(spans(loop)), sum(length for _, length in spans(loop))
    whole, made = passes.bytes_of(0)
    assert made == whole - weights > 0, "all of it is checked, and what is made is filled"
    assert live.keys().isdisjoint(to for to, _ in passes.passes[0][1])
    assert dict(passes.passes[1][1]) == live, "only the rest is read again"
    monkeypatch.undo()
    assert of_live(loop.model, loop.optimizers) == of_stored(run_dir, info.step)


def test_nothing_that_exists_is_filled_before_all_is_verified(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(run_dir)
    loop = adam_loop()
    loop.run(1)  # its optimizer has a state
    passes = Passes(monkeypatch)
    info = lightck.restore(loop.model, list(loop.optimizers), run_dir)
    whole, early = passes.bytes_of(0)
    assert early == 0 and passes.bytes_of(1) == (whole, whole)
    monkeypatch.undo()
    assert info and of_live(loop.model, loop.optimizers) == of_stored(run_dir, info.step)


def damage(path: Path, step: int, name: str | None = None) -> None:
    """One bit of a tensor; else of the last extent, come to when the others are filled."""
    region, recovery = open_and_recover(location.locate(path, 0, create=False))
    candidate = next(c for c in recovery.candidates if c.record.step == step)
    ends = candidate.layout.offsets + candidate.layout.lengths
    last = int(ends[candidate.layout.lengths > 0].max())
    at = (last if name is None else int(ends[candidate.layout.index[name]])) - 1
    region.close()
    with open(region.place.file, "r+b") as file:
        byte = os.pread(file.fileno(), 1, at)[0]
        os.pwrite(file.fileno(), bytes([byte ^ 1]), at)


def test_what_was_read_of_a_damaged_snapshot_is_gone_before_the_older_one_is_read(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(run_dir, 2)
    damage(run_dir, 2)
    made: list[tuple[int, weakref.ref[torch.Tensor]]] = []
    alive: list[list[int]] = []
    fresh, verify, attempt = fill.empty_tensor, AssembledSnapshot.verify, [0]

    def noted(entry: Any) -> torch.Tensor:
        tensor = fresh(entry)
        made.append((attempt[0], weakref.ref(tensor)))
        return tensor

    def verifies(snapshot: AssembledSnapshot, *given: Any) -> None:
        alive.append(sorted({i for i, tensor in made if tensor() is not None}))
        attempt[0] += 1
        verify(snapshot, *given)

    monkeypatch.setattr(fill, "empty_tensor", noted)
    monkeypatch.setattr(AssembledSnapshot, "verify", verifies)
    loop = adam_loop()
    gc.disable()
    try:
        info = lightck.restore(loop.model, list(loop.optimizers), run_dir)
    finally:
        gc.enable()
    assert info is not None and info.step == 1 and len(info.fell_back) == 1
    assert alive == [[0], [1]], "memory of each attempt, at the beginning of its pass"
    monkeypatch.undo()
    assert of_live(loop.model, loop.optimizers) == of_stored(run_dir, 1)


def of_device(job: Job, step: int) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Weights and momenta: as they are to be after so many steps, and as they are."""
    (device,), state = job.devices, job.optimizers[0].state
    return {
        name: (tensor, device.read(there))
        for i, layer in enumerate(job.layers)
        for name, there in (
            (f"{layer.name}.weight", layer.weight),
            (f"0/{i}/momentum", state[layer.weight]["momentum"]),
        )
        for tensor in (job.expected(step)[name],)
    }


@pytest.mark.parametrize("whole", [True, False])
def test_what_is_made_on_a_device_is_poured_into_it_and_checked_in_one_pass(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, whole: bool
) -> None:
    device, describe = EmulatedDevice(), tensor_layout.describe

    def described(live: Any) -> Any:
        held = holder(live.local) is not None
        return replace(describe(live), device="emulated" if held else "cpu")

    monkeypatch.setattr(tensor_layout, "describe", described)
    with devices(device):
        job = Job(device, buffers=False)
        with job.attach(run_dir) as handle:
            for _ in range(2):
                job.step()
                handle.wait(timeout=100)
            momentum = "optim/0/0.weight/momentum"
        if not whole:
            damage(run_dir, 2, momentum)
        resumed, passes = Job(device, buffers=False), Passes(monkeypatch)
        before = [device.read(layer.weight) for layer in resumed.layers]
        copy, poured = fill.copy_to_devices, list[tuple[int, list[bool]]]()

        def noted(parts: Any, targets: Any, names: Any) -> None:
            now = [device.read(layer.weight) for layer in resumed.layers]
            same = [torch.equal(a, b) for a, b in zip(before, now, strict=True)]
            copy(parts, targets, names)
            poured.append((len(targets), same))

        monkeypatch.setattr(fill, "copy_to_devices", noted)
        info = lightck.restore(resumed.model, resumed.optimizers, run_dir)
        assert info is not None and info.step == (2 if whole else 1)
        assert len(info.fell_back) == (0 if whole else 1)
        assert poured == [(5, [True] * 5), (5, [True] * 5)], "momenta, then weights, once all is"
        assert [name for name, _ in passes.passes] == ["verify", "read"]
        weights = sum(layer.weight.nbytes for layer in resumed.layers)
        checked, _ = passes.bytes_of(0)
        assert checked == weights + 5 * 4, "momenta are not read for this"
        for name, (expected, found) in of_device(resumed, info.step).items():
            assert torch.equal(expected, found), name
