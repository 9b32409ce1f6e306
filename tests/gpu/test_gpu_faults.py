"""A device can refuse memory, lose what it has, or hang."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_failing import ELEMENTS
from gpu_jobs import Job, Mode, check, equal, moded
from test_gpu_ordering import Wave

import lightck

pytestmark = pytest.mark.filterwarnings("default")

_HERE = Path(__file__).parent
_HANG = 8_000_000_000  # clocks: some four seconds
_WAIT_S = 100.0


class Refusing:
    """The CUDA runtime as torch hands it out, for which no memory can be registered."""

    def __init__(self, runtime: Any) -> None:
        self._runtime = runtime
        self.asked = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runtime, name)

    def cudaHostRegister(self, *_: Any) -> int:
        self.asked += 1
        return 801  # cudaErrorNotSupported


@pytest.mark.parametrize("asked", [moded("cpu", "auto"), moded("cuda", "direct")])
def test_where_a_region_cannot_be_registered_copies_go_through_pinned_memory(
    asked: Mode, region_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if asked.gpu:
        runtime = Refusing(torch.cuda.cudart())
        monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
        check(Job, Mode(asked.device, "auto"), region_dir / "run")
        job = Job(asked.device)
        handle = asked.attach(job.models, job.optimizers, region_dir / "other")
        job.step(1, handle)
        job.step(2, handle)
        handle.wait()
        stats: Any = handle.stats()
        assert runtime.asked > 0
        assert stats.device_mode == "host", stats.device_why
        handle.close()
    else:  # nothing is registered for what is in DRAM
        check(Job, asked, region_dir / "run")


@pytest.fixture
def filled() -> Iterator[None]:
    """A GPU with 1 GiB left."""
    if not torch.cuda.is_available():
        yield
        return
    free, _ = torch.cuda.mem_get_info()
    taken = torch.empty(max(free - (1 << 30), 0), dtype=torch.uint8, device="cuda")
    yield
    del taken
    torch.cuda.empty_cache()


@pytest.mark.parametrize("asked", [moded("cpu", "auto"), moded("cuda", "device")])
def test_where_the_device_is_full_nothing_is_copied_there(
    asked: Mode, filled: None, region_dir: Path
) -> None:
    with torch.device(asked.device):
        model = Wave(1 << 24 if asked.gpu else 1 << 10)
        x = torch.ones(8)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    with asked.attach(model, optimizer, region_dir / "run") as handle:
        for _ in range(4):
            model(x).backward()
            optimizer.step()
        handle.wait()
        stats: Any = handle.stats()
        assert (stats.torn, stats.failed) == (0, 0) and stats.committed > 0
        if asked.gpu:
            assert stats.device_mode != "device", stats.device_why
            assert stats.device_copy_bytes == 0
    found = lightck.load(region_dir / "run")["model"]
    assert torch.equal(found["first"], model.first.detach().cpu())


def test_the_last_step_is_saved_beside_a_stream_that_hangs(mode: Mode, region_dir: Path) -> None:
    job = Job(mode.device)
    failure = lightck.Failure(signals=(), hang_s=3600.0)
    handle = mode.attach(
        job.models, job.optimizers, region_dir / "run", policy=1000, failure=failure
    )
    for t in (1, 2, 3):
        job.step(t, handle)
    expected = job.state()
    loss = job.loss(*job.batch(4))  # from here on the state of step 3 is what a save takes
    hung, saved = _Hung(mode), []

    def save() -> None:
        saved.append(handle.snapshot_now("a test"))
        hung.note()

    saving = threading.Thread(target=save)
    saving.start()
    hung.stand()
    saving.join(_WAIT_S)
    assert saved and saved[0].fresh and saved[0].step == 3, saved
    assert hung.still, "the save waited for the stream"
    loss.backward()
    job.optimizers[0].step()
    handle.detach()
    fresh = Job(mode.device, 1)
    info = lightck.restore(fresh.models, fresh.optimizers, region_dir / "run")
    assert info is not None and info.step == 3
    equal(fresh.state(), expected, "what was saved")


def test_the_step_that_a_device_has_is_saved_though_the_next_update_is_queued(
    mode: Mode, region_dir: Path
) -> None:
    job = Job(mode.device)
    failure = lightck.Failure(signals=(), hang_s=3600.0)
    handle = mode.attach(
        job.models, job.optimizers, region_dir / "run", policy=1000, failure=failure
    )
    for t in (1, 2, 3):
        job.step(t, handle)
    expected = job.state()
    loss = job.loss(*job.batch(4))
    if mode.gpu:
        torch.cuda._sleep(_HANG)  # a collective that the others have left
        event = torch.cuda.Event()
        event.record()
    loss.backward()
    for optimizer in job.optimizers:
        optimizer.step()
    with ThreadPoolExecutor(1) as other:
        saved = other.submit(handle.snapshot_now, "a test").result()
    still = mode.gpu and not event.query()
    handle.detach()
    assert saved.fresh, saved
    if mode.gpu:
        assert still, "the save waited for the stream"
        assert (saved.step, saved.early) == (3, False), saved
    else:  # the update is made when it returns
        assert saved.step == 4, saved
        expected = job.state()
    fresh = Job(mode.device, 1)
    info = lightck.restore(fresh.models, fresh.optimizers, region_dir / "run")
    assert info is not None and info.step == saved.step
    equal(fresh.state(), expected, "what was saved")


class _Hung:
    """The training's stream gets nowhere, and with it the training thread; on a CPU that alone."""

    def __init__(self, mode: Mode) -> None:
        self.mode, self.still, self._over = mode, False, threading.Event()
        if mode.gpu:
            torch.cuda._sleep(_HANG)
            self._event = torch.cuda.Event()
            self._event.record()

    def note(self) -> None:
        """Note whether it still hangs, as the saving thread finds."""
        self.still = not self._event.query() if self.mode.gpu else not self._over.is_set()
        self._over.set()

    def stand(self) -> None:
        """The training thread is stuck."""
        if self.mode.gpu:
            torch.cuda.current_stream().synchronize()
        assert self._over.wait(_WAIT_S)


def _failing(what: str, mode: Mode, folder: Path) -> subprocess.CompletedProcess[str]:
    root = str(_HERE.parents[1])
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([root, str(_HERE), os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, str(_HERE / "gpu_failing.py"), what]
    command += [mode.device, mode.placement, str(folder)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_WAIT_S)


def _restored(mode: Mode, folder: Path) -> int:
    """The step that comes back; every element is of it."""
    with torch.device(mode.device):
        model = Wave(ELEMENTS[mode.device])
    info = lightck.restore(model, None, folder / "run")
    assert info is not None
    for name, tensor in model.state_dict().items():
        assert bool((tensor == info.step).all()), f"{name} is not that of step {info.step}"
    return info.step


def test_after_an_error_that_stays_nothing_is_saved(auto: Mode, region_dir: Path) -> None:
    done = _failing("sticky", auto, region_dir)
    assert done.returncode != 0
    told = json.loads((region_dir / "told.json").read_text())
    print(told, done.stderr[-2000:])
    if auto.gpu:
        assert not told["fresh"] and told["why"], told
        assert told["step"] == 2
        assert _restored(auto, region_dir) == 2
    else:
        assert told["fresh"] and told["step"] == 3, told
        assert _restored(auto, region_dir) == 3


@pytest.mark.parametrize(
    "asked", [moded("cpu", "auto"), moded("cuda", "direct"), moded("cuda", "host")]
)
def test_a_process_killed_while_it_copies_leaves_whole_snapshots(
    asked: Mode, region_dir: Path
) -> None:
    done = _failing("killed", asked, region_dir)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert 2 <= _restored(asked, region_dir) <= 10
