"""lightck's CUDA path over torch's own, down to the calls of the runtime: see run.py.

Every element of every tensor is the number of the step; tensors change by copies from pinned
memory, as the stand-in runs no kernels.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lightck
from lightck.device import cuda
from lightck.pipeline import device_offload, device_placement, device_transfer

if "LIGHTCK_CUDART" not in os.environ:
    pytest.skip("run by tests/cudart/run.py, with torch for CUDA", allow_module_level=True)

stand: Any = ctypes.CDLL("libcudart.so.13")
stand.stand_sleep.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
stand.stand_hang.argtypes = [ctypes.c_void_p]
WAYS = ("direct", "host", "device")
FOUND = (
    b"pageable",
    b"ended a capture",
    b"waited for what hangs",
    b"registered for one device only",
)
_kept: list[torch.Tensor] = []


@pytest.fixture(autouse=True)
def nothing_forbidden(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing that CUDA forbids, or may block in, is done; and nothing goes on."""
    monkeypatch.setattr(device_offload, "PEAK_STEPS", 0)
    before = [stand.stand_count(each) for each in FOUND]
    yield
    stand.stand_go_on(), stand.stand_fail(0), stand.stand_slow(0), stand.stand_refuse(0)
    torch.cuda.synchronize(0), torch.cuda.synchronize(1)
    assert [stand.stand_count(each) for each in FOUND] == before, FOUND


def put(
    tensor: torch.Tensor, value: float, microseconds: int = 0, source: torch.Tensor | None = None
) -> None:
    """Queue it to the current stream, as late as that."""
    if source is None:
        source = torch.full(tensor.shape, float(value)).pin_memory()
    _kept.append(source)
    stand.stand_sleep(torch.cuda.current_stream(tensor.device).cuda_stream, microseconds)
    tensor.detach().copy_(source, non_blocking=True)
    torch.autograd.graph.increment_version(tensor)


def got(tensor: torch.Tensor) -> torch.Tensor:
    """Return what a tensor holds, copied by way of pinned memory."""
    there = torch.empty(tensor.shape, pin_memory=True).copy_(tensor.detach(), non_blocking=True)
    torch.cuda.synchronize(tensor.device)
    return there


class Model(nn.Module):
    """Parameters on devices in turns, and a buffer that the forward changes."""

    def __init__(self, *devices: str) -> None:
        super().__init__()
        sizes = [50_000 + 7 * i for i in range(6)]
        made = [torch.empty(n, device=devices[i % len(devices)]) for i, n in enumerate(sizes)]
        self.weights = nn.ParameterList(made)
        self.register_buffer("seen", torch.empty(37, device=devices[0]))
        self.forwards = 0
        for tensor in (*self.weights, self.seen):
            put(tensor, 0)

    def forward(self) -> None:
        self.forwards += 1
        put(self.seen, self.forwards, 1000)


class Update(torch.optim.Optimizer):
    """Writes the number of the step."""

    def __init__(self, model: Model) -> None:
        super().__init__(model.parameters(), {})
        self.steps = 0
        self.ready: dict[torch.Tensor, torch.Tensor] = {}

    def prepare(self) -> None:
        """The next step asks no driver for memory."""
        for weight, state in self.state.items():
            for each in (weight, state["momentum"]):
                self.ready[each] = torch.full(each.shape, self.steps + 1.0).pin_memory()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.steps += 1
        for weight in self.param_groups[0]["params"]:
            state = self.state[weight]
            if not state:
                state["momentum"] = torch.empty_like(weight)
            momentum = state["momentum"]
            put(weight, self.steps, 1000, self.ready.pop(weight, None))
            put(momentum, self.steps, 0, self.ready.pop(momentum, None))


def made(*devices: str) -> tuple[Model, Update]:
    """Make both the model and its update."""
    _kept.clear()
    model = Model(*devices)
    return model, Update(model)


def look(path: Path, step: int) -> None:
    """The snapshot has that value everywhere."""
    found = lightck.load(path)
    states = {f"{i}": s["momentum"] for i, s in found["optimizers"][0]["state"].items()}
    for name, tensor in {**found["model"], **states}.items():
        assert bool((tensor == step).all()), (name, step, tensor)


@pytest.mark.parametrize("devices", [("cuda:0",), ("cuda:1",), ("cuda:0", "cuda:1")])
@pytest.mark.parametrize("way", WAYS)
def test_every_snapshot_is_of_one_step(
    way: str, devices: tuple[str, ...], region_dir: Path
) -> None:
    model, optimizer = made(*devices)
    stand.stand_slow(1000)
    said = (b"cudaStreamSynchronize", b"cudaDeviceSynchronize")
    before = [stand.stand_count(each) for each in said]
    path = region_dir / "run"
    with lightck.attach(model, optimizer, path, placement=way, on_error="raise") as handle:
        for _ in range(6):
            model()
            if optimizer.steps % 2:
                handle.wait()
                look(path, handle.last_committed_step or -1)
            optimizer.step()
        handle.wait()
        stats = handle.stats()
    assert (stats.device_mode, stats.torn, stats.failed) == (way, 0, 0), stats
    assert [stand.stand_count(each) for each in said] == before, "streams were waited for"
    look(path, 6)
    fresh, update = made(*devices)
    info = lightck.restore(fresh, update, path)
    assert info is not None and info.step == 6
    for tensor in (*fresh.weights, fresh.seen):
        assert bool((got(tensor) == 6).all())


@pytest.mark.parametrize("spare", [False, True])
@pytest.mark.parametrize("devices", [("cuda:1",), ("cuda:0", "cuda:1")])
def test_a_region_that_is_slow_to_store_into_is_left_for_the_ring(
    devices: tuple[str, ...], spare: bool, region_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_transfer, "CHUNK_BYTES", 1 << 16)
    monkeypatch.setattr(device_transfer, "RING_BYTES", 1 << 20)
    monkeypatch.setattr(device_placement, "TOO_SLOW", 0.0)  # whatever they take
    if not spare:
        monkeypatch.setattr(cuda.Cuda, "allocate_spare", lambda self, size: None)
    model, optimizer = made(*devices)
    path, went = region_dir / "run", []
    settings = {"chunk_bytes": 1 << 16, "on_error": "raise", "slots": 16}
    with lightck.attach(model, optimizer, path, **settings) as handle:
        model()
        for _ in range(8):
            optimizer.step()
            model()  # opens the snapshot
            handle.wait()
            stats = handle.stats()
            went.append((stats.device_mode, "through the ring" in stats.device_why))
            look(path, optimizer.steps)
        optimizer.step()
    assert (stats.torn, stats.failed) == (0, 0), stats
    assert went == [("device" if spare else "host", True)] * 8


@pytest.mark.parametrize("aside", [False, True])
@pytest.mark.parametrize("device", ["cuda:0", "cuda:1"])
@pytest.mark.parametrize("way", (*WAYS, "auto"))
def test_a_save_beside_a_stream_that_hangs_asks_the_driver_for_nothing(
    way: str, device: str, aside: bool, region_dir: Path
) -> None:
    model, optimizer = made(device)
    failure = lightck.Failure(signals=(), hang_s=3600.0)
    handle = lightck.attach(
        model, optimizer, region_dir / "run", placement=way, policy=1000, failure=failure
    )
    stream = torch.cuda.Stream(device) if aside else torch.cuda.current_stream(device)
    with torch.cuda.stream(stream):
        for _ in range(3):
            model()
            optimizer.step()
        model()
        others = [torch.cuda.Stream(device) for _ in range(40)]  # torch has 32 of them
        hanging = others[-1] if aside else stream
        stand.stand_hang(hanging.cuda_stream)
        saved: list[Any] = []
        saving = threading.Thread(target=lambda: saved.append(handle.snapshot_now("a test")))
        saving.start()
        saving.join(60)
        came = bool(saved)
        stand.stand_go_on()
        saving.join()
    assert came and (saved[0].step, saved[0].fresh, saved[0].early) == (3, True, False), saved
    handle.detach()
    look(region_dir / "run", 3)


@pytest.mark.parametrize("devices", [("cuda:1",), ("cuda:0", "cuda:1")])
@pytest.mark.parametrize("way", (*WAYS, "auto"))
def test_what_devices_have_is_saved_though_the_update_is_queued_behind_what_hangs(
    way: str, devices: tuple[str, ...], region_dir: Path
) -> None:
    model, optimizer = made(*devices)
    failure = lightck.Failure(signals=(), hang_s=3600.0)
    handle = lightck.attach(
        model, optimizer, region_dir / "run", placement=way, policy=1000, failure=failure
    )
    for _ in range(6):
        model()
        optimizer.step()
    model()
    optimizer.prepare()
    for device in devices:
        with torch.cuda.device(device):  # whose default stream has no name
            stand.stand_hang(torch.cuda.current_stream(device).cuda_stream)
    saved: list[Any] = []
    optimizer.step()  # to the training thread step 7 is complete
    saving = threading.Thread(target=lambda: saved.append(handle.snapshot_now("a test")))
    saving.start()
    saving.join(60)
    came = bool(saved)
    stand.stand_go_on()
    saving.join()
    assert came and (saved[0].step, saved[0].fresh, saved[0].early) == (6, True, False), saved
    for device in devices:
        torch.cuda.synchronize(device)
    model()
    assert handle.snapshot_now("a test").step == 7
    handle.detach()
    look(region_dir / "run", 7)
    found = lightck.load(region_dir / "run", 6)
    assert all(bool((each == 6).all()) for each in found["model"].values())


@pytest.mark.parametrize("policy", [1, 1000])
@pytest.mark.parametrize("way", WAYS)
def test_a_recording_is_not_ended_by_copies_or_by_a_save(
    way: str, policy: int, region_dir: Path
) -> None:
    model, optimizer = made("cuda:0")
    failure = lightck.Failure(signals=(), hang_s=3600.0)
    handle = lightck.attach(
        model, optimizer, region_dir / "run", placement=way, policy=policy, failure=failure
    )
    source, target = torch.full((8,), 7.0).pin_memory(), torch.empty(8, device="cuda:0")
    for _ in range(3):
        model()
        optimizer.step()
    model()
    stand.stand_slow(5000)
    graph, saved = torch.cuda.CUDAGraph(), list[Any]()
    with torch.cuda.graph(graph, capture_error_mode="global"):
        target.copy_(source, non_blocking=True)
        saving = threading.Thread(target=lambda: saved.append(handle.snapshot_now("a test")))
        saving.start()
        saving.join()
    graph.replay()
    assert saved[0].fresh and saved[0].step == 3, saved
    assert bool((got(target) == 7).all())
    handle.detach()
    look(region_dir / "run", 3)


@pytest.mark.parametrize("way", WAYS)
def test_an_error_that_stays_is_told_and_what_was_committed_is_there(
    way: str, region_dir: Path
) -> None:
    model, optimizer = made("cuda:0")
    told: list[BaseException] = []
    failure = lightck.Failure(signals=(), hang_s=3600.0)
    handle = lightck.attach(
        model,
        *(optimizer, region_dir / "run"),
        placement=way,
        on_error=told.append,
        failure=failure,
    )
    for _ in range(3):
        model()
        optimizer.step()
    model()
    handle.wait()
    stand.stand_fail(700)
    try:
        with pytest.raises(RuntimeError):  # the training's own
            optimizer.step()
        saved = handle.snapshot_now("a test")
        handle.detach()  # frees what was pinned, which must not end the process
    finally:
        stand.stand_fail(0)
    assert saved.step == 3, saved
    assert all(isinstance(error, lightck.LightckError) for error in told), told
    look(region_dir / "run", 3)


def test_what_the_driver_refuses_leaves_no_error_behind(region_dir: Path) -> None:
    model, optimizer = made("cuda:0")
    stand.stand_refuse(801)
    path = region_dir / "run"
    with lightck.attach(model, optimizer, path, placement="direct", on_error="raise") as handle:
        assert stand.cudaPeekAtLastError() == 0
        model()
        optimizer.step()
        stats = handle.stats()
    assert stats.device_mode == "host" and "(801)" in stats.device_why
    look(path, 1)


def test_a_number_is_fetched_in_the_stream_s_order_and_not_waited_for() -> None:
    device, number = cuda.Cuda(1), torch.empty((), device="cuda:1")
    earlier, later = (torch.full((), value).pin_memory() for value in (5.0, 7.0))
    place = torch.zeros((), pin_memory=True)
    with torch.cuda.device(1):  # a default stream is that of the current device
        stand.stand_hang(torch.cuda.current_stream(1).cuda_stream)
    put(number, 5.0, source=earlier)
    there = device.fetch(place, number)
    put(number, 7.0, source=later)
    assert not there.query()
    stand.stand_go_on()
    there.synchronize()
    assert place.item() == 5.0


def test_no_context_is_made_on_a_device_that_the_model_is_not_on(region_dir: Path) -> None:
    before = stand.stand_contexts()
    if before & 1:
        pytest.skip("other tests have used device 0: run this one alone")
    model, optimizer = made("cuda:1")
    failure = lightck.Failure(signals=(), hang_s=3600.0)
    with lightck.attach(model, optimizer, region_dir / "run", failure=failure) as handle:
        for _ in range(3):
            model()
            optimizer.step()
        model()
        handle.snapshot_now("a test")
    assert stand.stand_contexts() == 2
