"""One measurement says whether a device stores into the region itself, or the ring does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightck.pipeline import device_placement
from lightck.pipeline.device_placement import DevicePlacement
from lightck.pipeline.device_transfer import TransferMode

PLACE = torch.zeros(400, dtype=torch.uint8)


class Clock:
    """Goes when it is told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The one that the module reads."""
    made = Clock()
    monkeypatch.setattr(device_placement, "time", made)
    return made


class Copies:
    """A device whose copies take so many seconds a byte."""

    name = "here:0"

    def __init__(self, clock: Clock, costs: list[float]) -> None:
        self.clock, self.costs, self.sizes = clock, costs, list[int]()

    def copy(self, targets: list[torch.Tensor], sources: list[torch.Tensor]) -> Any:
        assert [t.numel() for t in targets] == [s.numel() for s in sources]
        self.sizes.append(sum(source.numel() for source in sources))
        self.clock.now += self.costs.pop(0) * self.sizes[-1]
        return SimpleNamespace(synchronize=lambda: None)


def placement_of(wanted: str = "auto", refused: str = "") -> DevicePlacement:
    """Knows whether the region is registered."""
    made = DevicePlacement(Any, wanted)  # type: ignore[arg-type]
    made._refused["Copies"] = refused
    return made


def measured(clock: Clock, region: float, pinned: float) -> tuple[DevicePlacement, Copies]:
    """Stores into the region take so many seconds a byte at best, and so do copies to DRAM."""
    costs = [factor * each for each in (region, pinned) for factor in (2.0, 1.0, 3.0)]
    made, device = placement_of(), Copies(clock, costs)
    tensors = [torch.zeros(650, dtype=torch.uint8) for _ in range(5)]
    extents = [torch.zeros(650, dtype=torch.uint8) for _ in range(5)]
    assert made.needs_measuring(device)  # type: ignore[arg-type]
    made.measure(device, tensors, extents, PLACE)  # type: ignore[arg-type]
    assert not made.needs_measuring(device)  # type: ignore[arg-type]
    return made, device


def test_the_best_of_three_of_at_most_the_sample_counts(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_placement, "SAMPLE_BYTES", 1000)
    made, device = measured(clock, 0.5, 0.25)
    assert device.sizes == [1050] * 6
    assert made._rates == {"here:0": (2.0, 4.0)}


@pytest.mark.parametrize(("cost", "ring"), [(2.0, False), (2.1, True)])
@pytest.mark.parametrize("mode", [TransferMode.DIRECT, TransferMode.DEVICE])
def test_a_device_half_as_fast_into_the_region_leaves_it_to_the_ring(
    clock: Clock, cost: float, ring: bool, mode: TransferMode
) -> None:
    made, device = measured(clock, cost, 1.0)
    assert ("through the ring" in made._too_slow(device)) is ring  # type: ignore[arg-type]
    chosen, _ = made.choose(device, 100, ask=False)  # type: ignore[arg-type]
    assert chosen is (TransferMode.HOST if ring else TransferMode.DIRECT)
    if mode is TransferMode.DEVICE:
        assert made.in_place(device, mode) is not ring  # type: ignore[arg-type]


def test_no_bytes_are_measured_that_lie_in_two_registered_pieces(clock: Clock) -> None:
    made, device = placement_of(), Copies(clock, [1.0] * 6)
    extents = [torch.zeros(400, dtype=torch.uint8) for _ in range(3)]
    pieces = sorted(each.data_ptr() for each in extents)
    made._registered["Copies"] = (device, [pieces[0], pieces[1] + 100, pieces[2]])  # type: ignore[assignment]
    made.measure(device, extents, extents, PLACE)  # type: ignore[arg-type]
    assert device.sizes == [800] * 6


def test_without_a_place_of_the_ring_nothing_is_measured(clock: Clock) -> None:
    made, device = placement_of(), Copies(clock, [])
    made.measure(device, [PLACE], [PLACE], None)  # type: ignore[arg-type]
    assert made.needs_measuring(device)  # type: ignore[arg-type]
    assert made.in_place(device, TransferMode.DIRECT)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("wanted", "refused", "needed"),
    [
        ("auto", "", True),
        ("device", "", True),
        ("direct", "", False),
        ("host", "", False),
        ("auto", "an ordinary file", False),
    ],
)
def test_only_a_region_that_need_not_be_used_and_can_be_is_measured(
    clock: Clock, wanted: str, refused: str, needed: bool
) -> None:
    made = placement_of(wanted, refused)
    assert made.needs_measuring(Copies(clock, [])) is needed  # type: ignore[arg-type]
