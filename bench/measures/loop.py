"""The training loop that every measure shares: steps with and without snapshots, verified."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from bench import engines
from bench.bus import behind_bus
from bench.engines.base import Counts, Engine, Plan
from bench.engines.none import Nothing
from bench.errors import BenchError, NoNumber
from bench.measures import Job
from bench.work import State, Training, copied, difference


@dataclass
class Loop:
    """A training with an engine attached, which knows the due steps and checks that all were taken.

    A step's time begins before its forward and ends after its update. It *carries* a snapshot of
    the step before it: an engine that copies in the background does so during this step.
    """

    training: Training
    engine: Engine
    plan: Plan = field(default_factory=Plan)
    patient: bool = False  # see `Method`
    step: int = 0  # the last complete step, counted from attach
    inside: dict[str, float] = field(default_factory=dict)  # s in the engine's calls, by name

    @classmethod
    def of(cls, job: Job, training: Training, engine: Engine | None = None) -> Loop:
        """Make a loop as a job asks for it; with the job's engine, unless one is given."""
        asked = job.contender
        made = engine or engines.make(asked.engine, asked.settings)
        if job.work.emulated:
            made = behind_bus(made, asked.engine, asked.settings, job.work.emulated)
        return cls(training, made, patient=job.method.patient)

    def attach(self, folder: Path) -> None:
        """Attach the engine. The first step after it carries nothing."""
        self.engine.attach(self.training, folder, self.plan)

    def run(self, *, then: bool) -> float:
        """Run one step and return its seconds; `then` says that the next one carries a snapshot."""
        if self.plan.every and then != ((self.step + 1) % self.plan.every == 0):
            raise ValueError(f"step {self.step + 1}: every {self.plan.every} steps, then={then}")
        if then:
            self.plan.due.add(self.step + 1)
        if self.patient:
            self.engine.drain()
        begin = time.perf_counter()
        if self.step in self.plan.due:
            with self._inside("begin"):
                self.engine.begin(self.step)
        self.training.compute()
        with self._inside("before_update"):
            self.engine.before_update()
        self.training.update()
        self.step += 1
        return time.perf_counter() - begin

    @contextmanager
    def _inside(self, call: str) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        spent = time.perf_counter() - begin
        self.inside[call] = self.inside.get(call, 0.0) + spent

    def stalls(self) -> Mapping[str, float]:
        """Return the seconds that training has spent in the engine so far.

        They are as the engine counts them, else those of its calls.
        """
        return self.engine.stalls() or self.inside

    def finish(self, fresh: Training) -> str:
        """Take one last snapshot during a running step, then restore it and compare every bit.

        The last `run` must have been told that this step carries one.

        Returns:
            A text on what was verified.

        Raises:
            BenchError: snapshots were lost, or the restored state differs from what was saved.
        """
        if self.step not in self.plan.due:
            raise ValueError("the last step did not plan this one's snapshot")
        kept, step = copied(self.training.state()), self.step
        self.run(then=False)
        counts = self.engine.finish()
        require_all(counts, len(self.plan.due))
        if isinstance(self.engine, Nothing):
            return "nothing to verify"
        found = self.engine.restore(fresh)
        if found != step:
            raise BenchError(f"restored step {found}, the last snapshot is of step {step}")
        problem = difference(kept, fresh.state())
        if problem is not None:
            raise BenchError(f"the restored state of step {step} is not what was saved: {problem}")
        return f"{counts.complete} snapshots complete, step {step} restored and equal bit for bit"


@dataclass(frozen=True)
class Saved:
    """An engine that has finished, holding one snapshot of a step.

    Attributes:
        engine: the engine, which can restore.
        state: a copy of the saved state.
        verified: a text, see `Loop.finish`.
        fresh: another training, with state of its own, to restore into.
    """

    engine: Engine
    state: State
    verified: str
    fresh: Training

    @classmethod
    def of(cls, job: Job) -> Saved:
        """Train, take one snapshot with the job's engine, verify it."""
        training = Training(job.work)
        training.steps(job.method.warmup)
        loop = Loop.of(job, training)
        loop.attach(job.folder)
        loop.run(then=True)
        state = copied(training.state())
        verified = loop.finish(Training(job.work, seed=1))
        fresh = Training(job.work, seed=2)
        fresh.steps(1)
        return cls(loop.engine, state, verified, fresh)

    def check(self, repetition: int) -> None:
        """Raise BenchError if `fresh` is not what was saved."""
        problem = difference(self.state, self.fresh.state())
        if problem is not None:
            raise BenchError(f"repetition {repetition}: the restored state differs: {problem}")


def require_all(counts: Counts, due: int) -> None:
    """Check that every due snapshot was taken and finished: only then a result counts.

    Raises:
        NoNumber: some have slipped; the message says how many.
        BenchError: some were torn, have failed, or are missing without a reason.
    """
    lost = {reason: number for reason, number in counts.lost.items() if number}
    if lost or counts.complete != due:
        why = ", ".join(f"{number} {reason}" for reason, number in lost.items()) or "no reason told"
        kind = NoNumber if lost.keys() == {"slipped"} else BenchError
        raise kind(f"{due} snapshots were due, {counts.complete} are complete ({why}): no number")
