"""A stand-in records what is asked of CUDA; tests/cudart runs the rest of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from lightck.device import cuda
from lightck.errors import DeviceError
from lightck.state import boundary_codec, rng


class Recorded:
    """Stands for `torch.cuda`: a thread's device, and what it was when something was asked."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now, self.said = 0, list[Any]()
        self.capturing: bool | RuntimeError = False
        for name in ("device", "current_device", "is_current_stream_capturing", "cudart"):
            patch.setattr(torch.cuda, name, getattr(self, name))

    @contextmanager
    def device(self, index: int) -> Iterator[None]:
        before, self.now = self.now, index
        yield
        self.now = before

    def current_device(self) -> int:
        return self.now

    def is_current_stream_capturing(self) -> bool:
        self.said.append(self.now)
        if isinstance(self.capturing, RuntimeError):
            raise self.capturing
        return self.capturing

    def cudart(self) -> Recorded:
        return self

    def cudaHostRegister(self, address: int, length: int, flags: int) -> int:
        self.said.append((self.now, address, length, flags))
        return 0


@pytest.fixture
def stand(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    """CUDA, as far as it is asked here."""
    return Recorded(monkeypatch)


def test_memory_is_registered_for_every_device(stand: Recorded) -> None:
    assert cuda.Cuda(1).register(1 << 20, 4096) == ""
    assert stand.said == [(1, 1 << 20, 4096, 1)]  # cudaHostRegisterPortable


@pytest.mark.parametrize("index", [0, 1])
def test_the_device_itself_is_asked_whether_it_records(stand: Recorded, index: int) -> None:
    stand.capturing = True
    assert cuda.Cuda(index).recording()
    assert (stand.said, stand.now) == ([index], 0)


def test_a_device_that_has_failed_records_nothing(stand: Recorded) -> None:
    stand.capturing = RuntimeError("CUDA error: an illegal memory access was encountered")
    assert not cuda.Cuda(0).recording()  # in a hook: the training's own error is what it hears of


def test_generators_of_a_lost_device_are_an_error_of_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def lost() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    for name in ("is_available", "is_initialized"):
        monkeypatch.setattr(torch.cuda, name, lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lost)
    with pytest.raises(DeviceError, match="random generators cannot be read"):
        rng.capture()


@pytest.mark.parametrize("there", [0, 2])
def test_generators_of_other_devices_are_not_set_and_that_is_said(
    monkeypatch: pytest.MonkeyPatch, there: int
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: there)
    states = {**boundary_codec.rebuild(rng.capture()), "cuda": [torch.get_rng_state()]}
    why = f"of 1 CUDA device(s) in the snapshot, {there} here: they stay as they are"
    assert rng.restore(states) == why
