"""CheckFreq (Mohan et al., FAST'21): our own implementation of the published algorithm for CPUs.

Two phases. `snapshot`: a consistent copy of the state in memory, made by a background thread during
the next forward and backward; the weight update waits for it. `persist`: torch.save and fsync of
that copy, in the background. One checkpoint in flight: a new one waits for the last one's persist.
The published code spins at the update; here the wait sleeps, which costs training less.
With several ranks, rank 0 saves, as there; the others wait for it where they need its gradients.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from bench.engines.base import Counts, Plan
from bench.engines.torch_save import read, write
from bench.statistics import trimmed_mean
from bench.work import State, Training, copied


@dataclass(frozen=True)
class Profile:
    """The profile that CheckFreq measures; seconds, as in the paper's Algorithm 1.

    Attributes:
        iteration: Ti, an iteration without checkpoints.
        update: Tw, the weight update.
        copy: Tc, the snapshot to CPU memory.
        storage: Ts, writing the snapshot out.
        on_device: Tg, the snapshot on the GPU; None where it does not fit, or there is no GPU.
    """

    iteration: float
    update: float
    copy: float
    storage: float
    on_device: float | None = None


def interval(profile: Profile, budget: float) -> int:
    """Return the iterations between checkpoints at which their cost stays within `budget`.

    This is Algorithm 1; the result is rounded up, 1 or more.

    Source: prior-systems.md F5 (paper: overlap To, then k = (Tc + Ts - To) / Ti, at least
    kmin = To / (p Ti)).
    """
    overhead = max(0.0, profile.copy - (profile.iteration - profile.update))
    if profile.on_device is not None and profile.on_device <= overhead:
        overhead = profile.on_device
    pipelined = (profile.copy + profile.storage - overhead) / profile.iteration
    affordable = overhead / (budget * profile.iteration)
    return max(1, math.ceil(pipelined), math.ceil(affordable))


@dataclass
class CheckFreq:
    """The CheckFreq engine.

    With `profiled` its interval comes from the settling steps and Algorithm 1, else it is 1.
    """

    profiled: bool
    budget: float
    spills = True
    interval: int = field(default=1, init=False)

    def attach(self, training: Training, folder: Path, plan: Plan) -> None:
        """See `Engine`."""
        self._training, self._path = training, folder / "snapshot.pt"
        self._saves = training.rank == 0
        self._background = ThreadPoolExecutor(1, thread_name_prefix="checkfreq")
        self._snapshot: Future[State] | None = None
        self._persist: Future[None] | None = None
        self._complete = 0
        if self.profiled:
            self.interval = interval(self._measure(), self.budget)

    def _measure(self) -> Profile:
        """Measure the times of a few iterations and one checkpoint, in sequence as in the paper."""
        iterations, updates = [], []
        for _ in range(5):
            begin = time.perf_counter()
            self._training.compute()
            computed = time.perf_counter()
            self._training.update()
            end = time.perf_counter()
            iterations.append(end - begin)
            updates.append(end - computed)
        begin = time.perf_counter()
        state = {"step": 0, **copied(self._training.state())}
        staged = time.perf_counter()
        write(state, self._path, sync=True)
        stored = time.perf_counter()
        return Profile(
            iteration=trimmed_mean(iterations),
            update=trimmed_mean(updates),
            copy=staged - begin,
            storage=stored - staged,
        )

    def begin(self, step: int) -> None:
        """See `Engine`."""
        if not self._saves:
            self._complete += 1
            return
        self.drain()

        # The update waits for the thread; the forward does not, and it changes BatchNorm's buffers.
        buffers = {name: tensor.clone() for name, tensor in self._training.buffers().items()}

        def snapshot() -> State:
            state = copied(self._training.state())
            state["model"].update(buffers)
            return {"step": step, **state}

        self._snapshot = self._background.submit(snapshot)
        self._persist = self._background.submit(self._write, self._snapshot)

    def _write(self, snapshot: Future[State]) -> None:
        write(snapshot.result(), self._path, sync=True)
        self._complete += 1

    def before_update(self) -> None:
        """Wait for the snapshot: the update would change what it is still copying."""
        if self._snapshot is not None:
            self._snapshot.result()
            self._snapshot = None  # frees the copy, too, once it is written

    def drain(self) -> None:
        """See `Engine`."""
        if self._persist is not None:
            self._persist.result()
            self._persist = None

    def finish(self) -> Counts:
        """See `Engine`."""
        self.drain()
        self._background.shutdown()
        del self._training
        return Counts(self._complete)

    def restore(self, training: Training) -> int:
        """See `Engine`."""
        return read(self._path, training, mapped=False)

    def written(self) -> int:
        """See `Engine`."""
        return self._path.stat().st_size if self._saves else 0

    def stalls(self) -> Mapping[str, float]:
        """See `Engine`."""
        return {}


def make(profiled: bool = False, budget: float = 0.05) -> CheckFreq:
    """Make the engine; see `bench.engines.make`."""
    return CheckFreq(profiled, budget)
