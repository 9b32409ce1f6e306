"""Sums of what a device's own stores into the region cost, and the ring, decide which is on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightck.pipeline import device_placement, device_transfer
from lightck.pipeline.device_transfer import DeviceTransfer, TransferChunk, TransferMode, took
from lightck.pipeline.trial import LOOKS

DEVICE: Any = SimpleNamespace(name="here:0")


class Clock:
    """Goes when it is told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The one that both modules read."""
    made = Clock()
    for module in (device_transfer, device_placement):
        monkeypatch.setattr(module, "time", made)
    return made


class Copies:
    """A device whose copies take so many seconds a byte."""

    name = "here:0"

    def __init__(self, clock: Clock, costs: list[float]) -> None:
        self.clock, self.costs, self.sizes = clock, costs, list[int]()

    def pinned(self, size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.uint8)

    def copy(self, targets: list[torch.Tensor], sources: list[torch.Tensor]) -> Any:
        assert [t.numel() for t in targets] == [s.numel() for s in sources]
        self.sizes.append(sum(source.numel() for source in sources))
        self.clock.now += self.costs.pop(0) * self.sizes[-1]
        return SimpleNamespace(wait=lambda: None)


def chosen(clock: Clock, *, wanted: str = "auto") -> device_placement.DevicePlacement:
    """Knows that a plain copy takes one second a byte."""
    made = device_placement.DevicePlacement(Any, wanted)  # type: ignore[arg-type]
    made._refused["SimpleNamespace"] = ""
    made._plain["here:0"], made._contests["here:0"] = 1.0, device_placement.ABTrial()
    return made


def paid(of: device_placement.DevicePlacement, *costs: float) -> None:
    """Snapshots that went the way in use."""
    for cost in costs:
        of.paid(DEVICE, cost, in_place=not of._beaten(DEVICE))


def test_a_plain_copy_is_the_best_of_three_of_at_most_the_sample(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_placement, "SAMPLE_BYTES", 1000)
    made, device = device_placement.DevicePlacement(Any), Copies(clock, [0.5, 0.25, 0.75])  # type: ignore[arg-type]
    tensors = [torch.zeros(650, dtype=torch.uint8) for _ in range(5)]
    for _ in range(2):  # the second time it is known
        made.measure(device, tensors, 400)  # type: ignore[arg-type]
    assert device.sizes == [1050] * 3
    assert made._plain == {"here:0": 0.25}


def test_less_than_one_load_is_too_little_to_judge_by(clock: Clock) -> None:
    made, device = device_placement.DevicePlacement(Any), Copies(clock, [])  # type: ignore[arg-type]
    made.measure(device, [torch.zeros(399, dtype=torch.uint8)], 400)  # type: ignore[arg-type]
    assert not made._plain
    made.paid(DEVICE, 1e9, in_place=True)
    assert not made._beaten(DEVICE)


def test_stores_of_twice_a_plain_copy_are_kept_and_slower_ones_doubted(clock: Clock) -> None:
    of = chosen(clock)
    paid(of, *[2.0] * 10)
    assert not of._beaten(DEVICE)
    paid(of, *[2.1] * 2)
    assert "own stores" in of._beaten(DEVICE)


def test_the_ring_is_kept_for_half_of_the_cost_and_not_for_more(clock: Clock) -> None:
    for cost, kept in ((2.0, True), (2.01, False)):
        of = chosen(clock)
        paid(of, *[4.0] * LOOKS, *[cost] * LOOKS)
        assert bool(of._beaten(DEVICE)) is kept


def test_what_went_before_the_turn_is_not_counted_for_the_other_way(clock: Clock) -> None:
    of = chosen(clock)
    paid(of, *[4.0] * LOOKS)
    for _ in range(LOOKS):
        of.paid(DEVICE, 99.0, in_place=True)  # was under way
    assert of._beaten(DEVICE)
    paid(of, *[1.0] * LOOKS)
    assert of._beaten(DEVICE)
    assert "ring 0.00 GB/s" in of._beaten(DEVICE)


@pytest.mark.parametrize(
    ("wanted", "judged"), [("auto", True), ("device", True), ("direct", False)]
)
def test_a_region_that_was_asked_for_by_name_is_not_judged(
    monkeypatch: pytest.MonkeyPatch, wanted: str, judged: bool
) -> None:
    monkeypatch.setattr(device_placement.DevicePlacement, "_refuses", lambda self, device: "")
    made = device_placement.DevicePlacement(Any, wanted)  # type: ignore[arg-type]
    assert made.judged(DEVICE) is judged
    assert (
        made.in_place(DEVICE, TransferMode.DEVICE)
        is made.in_place(DEVICE, TransferMode.DIRECT)
        is True
    )


def test_transfers_take_from_their_first_load_to_their_last(clock: Clock) -> None:
    def transfer_of(*sizes: int) -> DeviceTransfer:
        sources = [torch.zeros(size, dtype=torch.uint8) for size in sizes]
        batch: Any = SimpleNamespace(total_bytes=sum(sizes))
        return DeviceTransfer(DEVICE, Any, batch, sources, None)  # type: ignore[arg-type]

    first, empty, last = run = [transfer_of(8, 4), transfer_of(), transfer_of(3)]
    assert not first.in_place
    assert took(run) == took([empty]) == (0, 0.0)
    seen = []
    for of, end in ((first, 2), (first, 5), (first, 12), (last, 3)):
        clock.now += 3.0
        of.came(TransferChunk(end, Any, None))  # type: ignore[arg-type]
        seen.append(took(run))
    assert seen == [(0, 0.0), (3, 3.0), (10, 6.0), (13, 9.0)]
    assert took([last]) == (0, 0.0)
