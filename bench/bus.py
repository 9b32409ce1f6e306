"""Put engines in front of an emulated accelerator: none copies faster than its bus."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.emulated import DEVICES
from bench.engines.base import Counts, Engine, Plan
from bench.errors import BenchError
from bench.work import Training

_WAIT_IN_BEGIN = ("blocking", "torch.save", "dcp")
_COPY_BEHIND = ("checkfreq",)


class Bus:
    """An engine whose copies of the state take at least as long as the bus would need.

    An engine that blocks is held until then in `begin`, one that copies in the background is held
    before the update. Whatever else they do in the call (torch.save writes, too) may overlap with
    it.
    """

    def __init__(self, engine: Engine, device: str, *, behind: bool) -> None:
        self._engine, self._rate, self._behind = engine, DEVICES[device].bus, behind
        self._seconds = self._until = 0.0
        self.spills, self.interval = engine.spills, engine.interval

    def attach(self, training: Training, folder: Path, plan: Plan) -> None:
        """Attach the engine; see `Engine`."""
        self._engine.attach(training, folder, plan)
        self.interval = self._engine.interval
        self._seconds = training.bytes() / self._rate

    def begin(self, step: int) -> None:
        """Begin a snapshot, held to the bus's rate if the engine blocks; see `Engine`."""
        self._engine.drain()  # as `begin` does itself: it is not part of the copy
        begin = time.perf_counter()
        self._engine.begin(step)
        self._until = (time.perf_counter() if self._behind else begin) + self._seconds
        if not self._behind:
            self._hold()

    def _hold(self) -> None:
        left = self._until - time.perf_counter()
        if left > 0:
            time.sleep(left)

    def before_update(self) -> None:
        """Wait for the engine and for the bus; see `Engine`."""
        self._engine.before_update()
        self._hold()

    def drain(self) -> None:
        """Drain the engine; see `Engine`."""
        self._engine.drain()

    def finish(self) -> Counts:
        """Finish the engine; see `Engine`."""
        return self._engine.finish()

    def restore(self, training: Training) -> int:
        """Restore with the engine; see `Engine`."""
        return self._engine.restore(training)

    def written(self) -> int:
        """Return the engine's count of written bytes; see `Engine`."""
        return self._engine.written()

    def stalls(self) -> Mapping[str, float]:
        """Return the engine's stalls; see `Engine`."""
        return self._engine.stalls()


def behind_bus(engine: Engine, name: str, settings: Mapping[str, Any], device: str) -> Engine:
    """Return the engine, held to the rate of a device's bus.

    Raises:
        BenchError: it is not known when the engine copies, or lightck's settings do not fit the
            bus.
    """
    bus = DEVICES[device].bus
    if name == "none":
        return engine
    if name == "lightck":
        if (settings.get("write_limit"), settings.get("placement")) != (bus, "direct"):
            raise BenchError(
                f'emulated {device}: lightck needs write_limit = {bus} and placement = "direct",'
                f" not {dict(settings)}: the region is then what is behind the bus"
            )
        return engine
    if name in _WAIT_IN_BEGIN or name in _COPY_BEHIND:
        return Bus(engine, device, behind=name in _COPY_BEHIND)
    raise BenchError(f"emulated {device}: when {name} copies the state is not known")
