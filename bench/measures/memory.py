"""DRAM that an engine takes beyond its region: anonymous memory, at its peak.

Records:
    extra_dram: bytes of peak anonymous memory with the engine, beyond the peak without.
    state: bytes.
"""

from __future__ import annotations

import threading
from pathlib import Path

from bench import engines
from bench.measures import Job
from bench.measures.loop import Loop
from bench.record import Record, single
from bench.work import Training, tensors

_EVERY_S = 0.002


def measure(job: Job) -> list[Record]:
    """See the module and `bench.measures.run`."""
    engine = engines.make(job.contender.engine, job.contender.settings)  # its imports do not count
    training = Training(job.work)
    training.steps(job.method.warmup)
    with _Peak() as without:
        training.steps(job.method.least)
    loop = Loop.of(job, training, engine)
    with _Peak() as attached:
        loop.attach(job.folder)
        for i in range(job.method.least):
            loop.run(then=True)
            job.tell(f"{i + 1} of {job.method.least} steps")
        loop.engine.drain()
    state_bytes = sum(t.nbytes for t in tensors(training.state()))
    verified = loop.finish(Training(job.work, seed=1))
    extra = max(0, attached.bytes - without.bytes)
    return [
        single("extra_dram", "B", extra, note=verified),
        single("state", "B", state_bytes),
    ]


class _Peak:
    """Looks at the process's anonymous memory until left; keeps the highest."""

    def __init__(self) -> None:
        self.bytes = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> _Peak:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while True:
            self.bytes = max(self.bytes, _anonymous_bytes())
            if self._stop.wait(_EVERY_S):
                return


def _anonymous_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    raise OSError("/proc/self/status has no RssAnon: a kernel older than 4.5?")
