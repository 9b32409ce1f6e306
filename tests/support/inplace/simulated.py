"""A job of simulated ranks: threads that train, are lost, and are replaced.

Communicators, recoveries and plans are lightck's. Links and the store are made here: a collective
ends on each rank at a time of its own, so that a link that is cut leaves it complete on some ranks
and failed on others, its input overwritten with anything.
"""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
from torch.futures import Future

from lightck.errors import StoreError
from lightck.inplace.communicator import Communicator
from lightck.inplace.generations import SETUP, Generations
from lightck.inplace.inputs import Inputs
from lightck.inplace.operations import Operation, described
from lightck.inplace.plan import Description
from lightck.inplace.recovery import InPlaceRecovery, Replacement
from lightck.inplace.setup import SetupAnswers

MOST_S = 60.0
VALUES = 64


class Store:
    """The job's store, in memory; `JobStore` as far as recovery uses it."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.changed = threading.Condition()
        self.closed = False

    def read(self, key: str) -> bytes | None:
        with self.changed:
            return self.values.get(key)

    def set(self, key: str, value: bytes) -> None:
        with self.changed:
            self.values[key] = value
            self.changed.notify_all()

    def claim(self, key: str, value: bytes) -> bytes:
        with self.changed:
            found = self.values.setdefault(key, value)
            self.changed.notify_all()
            return found

    def wait(self, key: str, seconds: float) -> bool:
        with self.changed:
            self.changed.wait_for(lambda: key in self.values or self.closed, seconds)
            if self.closed:
                raise StoreError("the job is over")
            return key in self.values

    def close(self) -> None:
        """End every wait: the job is over, and its threads with it."""
        with self.changed:
            self.closed = True
            self.changed.notify_all()


@dataclass(eq=False)
class _Call:
    kind: str
    tensors: Sequence[torch.Tensor]
    root: int
    works: dict[int, Work] = field(default_factory=dict)
    inputs: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    outputs: dict[int, list[torch.Tensor]] = field(default_factory=dict)


class Work:
    """The work that a backend gives for a collective."""

    def __init__(self) -> None:
        self.future: Future[Any] = Future()

    def wait(self, timeout: timedelta | None = None) -> None:
        end_s = math.inf if timeout is None else time.monotonic() + timeout.total_seconds()
        while timeout is not None and not self.future.done():
            if time.monotonic() > end_s:
                raise RuntimeError("Operation timed out!")
            time.sleep(0.0005)
        self.future.wait()

    def is_completed(self) -> bool:
        return self.future.done()


@dataclass(eq=False)
class Switch:
    """The connections of one generation, between all ranks."""

    world: int
    seed: int
    cut: set[int] = field(default_factory=set)
    _calls: list[_Call] = field(default_factory=list)
    _position: dict[int, int] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _came: set[int] = field(default_factory=set)
    opened: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def open(self, rank: int) -> SimulatedLink:
        with self._lock:
            self._came.add(rank)
            if len(self._came) == self.world:
                self.opened.set()
        if not self.opened.wait(8.0):
            raise RuntimeError("a rank did not come")
        return SimulatedLink(self, rank)

    def call(self, rank: int, kind: str, tensors: Sequence[torch.Tensor], root: int) -> Work:
        work = Work()
        with self._lock:
            if rank in self.cut:
                raise RuntimeError("connection reset by peer")
            at = self._position.get(rank, 0)
            self._position[rank] = at + 1
            if at == len(self._calls):
                self._calls.append(_Call(kind, tensors, root))
            call = self._calls[at]
            form = [each.numel() for each in tensors]
            assert (call.kind, [t.numel() for t in call.tensors]) == (kind, form), "mixed up"
            call.works[rank] = work
            call.inputs[rank] = [each.detach().clone() for each in tensors]
            call.outputs[rank] = list(tensors)
            through = kind == "broadcast" and rank == call.root  # it only sends
            ready = list(call.works) if len(call.works) == self.world else [rank] if through else []
            delays = {each: self._random.choice((0.0, 0.0, 0.001, 0.004)) for each in ready}
        for each, delay in delays.items():
            _later(delay, lambda each=each: self._complete(call, each))
        return work

    def _complete(self, call: _Call, rank: int) -> None:
        with self._lock:
            work = call.works[rank]
            if rank in self.cut or work.future.done():
                return
            if call.kind == "broadcast":
                given = call.inputs.get(call.root, call.inputs[rank])
            else:  # in the order of ranks: the same sum everywhere
                rows = [call.inputs[each] for each in sorted(call.inputs)]
                given = [sum(column[1:], column[0]) for column in zip(*rows, strict=True)]
            if call.kind != "broadcast" or rank != call.root:
                with torch.no_grad():
                    for mine, theirs in zip(call.outputs[rank], given, strict=True):
                        mine.detach().copy_(theirs)
            work.future.set_result(None)  # under the lock: a cut spoils no complete result

    def cut_off(self, rank: int, *, everyone: bool = True) -> None:
        """Break one rank's connections, and so everyone's collectives."""
        with self._lock:
            self.cut |= {*range(self.world)} if everyone else {rank}
            for call in self._calls:
                for each, work in call.works.items():
                    if each in self.cut and not work.future.done():
                        if call.kind != "broadcast":
                            for tensor in call.outputs[each]:
                                with torch.no_grad():
                                    tensor.detach().fill_(self._random.random())
                        work.future.set_exception(RuntimeError("connection reset by peer"))


def _later(delay: float, action: Callable[[], None]) -> None:
    timer = threading.Timer(delay, action)
    timer.daemon = True
    timer.start()


@dataclass(eq=False)
class SimulatedLink:
    """One rank's end of a switch."""

    switch: Switch
    rank: int

    @property
    def backend(self) -> SimulatedLink:
        return self

    def allreduce(self, tensors: Sequence[torch.Tensor], *_: Any) -> Work:
        return self.switch.call(self.rank, "allreduce", tensors, -1)

    def broadcast(self, tensors: Sequence[torch.Tensor], options: Any) -> Work:
        root = options if isinstance(options, int) else options.rootRank
        return self.switch.call(self.rank, "broadcast", tensors, root)

    def cut(self) -> None:
        self.switch.cut_off(self.rank, everyone=False)


class Lost(BaseException):
    """The process of a rank ends here."""


@dataclass(eq=False)
class Rank:
    """One life of a rank: its training, and lightck's recovery of it."""

    job: Job
    rank: int
    life: int
    state: torch.Tensor = field(default_factory=lambda: torch.zeros(VALUES))
    step: int = 0
    left: str = ""
    trace: list[tuple[int, float]] = field(default_factory=list)
    points: int = 0
    error: BaseException | None = None
    link: SimulatedLink | None = None

    def __post_init__(self) -> None:
        answers = SetupAnswers(self.rank) if self.life else None
        self.communicator = Communicator(self.rank, self.job.world, answers)
        self.inputs = Inputs(self.job.world)
        store: Any = self.job.store
        self.recovery = InPlaceRecovery(
            self.communicator,
            Generations(store),
            Generations(store),
            self._open,
            self.life,
            replacement=Replacement() if self.life else None,
            settle_s=MOST_S,
        )
        self.thread = threading.Thread(target=self._run, name=f"rank-{self.rank}", daemon=True)

    def _open(self, number: int) -> SimulatedLink:
        self.link = self.job.switch(number).open(self.rank)
        return self.link

    # ---- what recovery asks of the training ------------------------------------------------

    def stands(self) -> bool:
        before = self.points
        time.sleep(0.01)
        return self.points == before

    def save(self, reason: str, step: int) -> str:
        if self.step != step:
            return f"step {self.step}"
        self.job.saved(self, step)
        return ""

    def progress(self) -> Any:
        return None

    def recovered(self, ranks: Sequence[int], began_ns: int) -> None:
        """Nothing follows."""

    # ---- the program -------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            if self.life:
                self._join()
            else:
                self.communicator.resume(self._open(0))
                with self.communicator.changed:
                    self.recovery.attached(self)
                self.recovery.start()
            self._train()
            self.left = "it is over"
        except Lost:
            self.job.lost(self)
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            self.error = error
            self.job.failed(self)

    def _join(self) -> None:
        self.recovery.start()
        replacement, changed = self.recovery.replacement, self.communicator.changed
        assert replacement is not None
        with changed:
            changed.wait_for(lambda: replacement.plan is not None or self.communicator.ended)
        plan = replacement.plan
        if plan is None:
            raise RuntimeError(self.communicator.ended)
        assert plan.step is not None
        self.point("restore")
        self.state, self.step = self.job.restored(plan.step)
        with changed:
            prelude = {n: plan.forms[n] for n in plan.prelude}
            self.communicator.join(plan.base, prelude, plan.step, plan.withheld)
            self.recovery.attached(self)

    def point(self, where: str) -> None:
        """Pass a point of the program, at which the rank may be lost."""
        self.points += 1
        self.job.passes(self, where)

    def _reduce(self, tensor: torch.Tensor, what: str) -> Operation:
        form = Description(f"allreduce {what}", described([tensor]), site=what)
        kept = self.inputs.keep([tensor])
        return self.communicator.run(form, [tensor], lambda b: b.allreduce([tensor]), kept=kept)

    def _train(self) -> None:
        window = self.communicator.window
        while self.step < self.job.steps:
            if self.job.top:  # a collective at the loop's top
                flag = torch.tensor([float(self.rank + self.step)])
                self.communicator.wait(self._reduce(flag, "flag"))
                self.trace.append((self.step, float(flag)))
            self.point("forward")
            self.communicator.forward_started(self.step)
            buckets = [self._gradient(part) for part in range(3)]
            flying = []
            for part, bucket in enumerate(buckets):
                flying.append(self._reduce(bucket, f"bucket {part}"))
                if self.job.divides:  # at once, and out of the version counter's sight
                    self.communicator.wait(flying[-1])
                    bucket.data /= self.job.world
                self.point(f"bucket {part}")
            for each in flying:
                each.future.wait()  # as DDP does; the others are waited for as programs do
            self.point("fence")
            self.communicator.commit(self.step + 1)
            self.point("update")
            if self.job.second:  # as of a second optimizer
                self.communicator.wait(self._reduce(torch.ones(1), "second"))
                self.point("second")  # nobody is before the commit now
                self.communicator.wait(self._reduce(torch.ones(1), "third"))
            for bucket in buckets:
                self.state = self.state * 0.5 + bucket
            self.step += 1
            self.job.ended(self)
            with self.communicator.changed:
                window.step_ended(self.step)
                self.communicator.changed.notify_all()
            self.point("end")
            for _ in range(self.job.evaluation if self.step == 3 else 0):
                self.communicator.wait(self._reduce(torch.ones(1), "evaluation"))
            if self.job.metric:
                loss = self.state.sum().reshape(1) + self.rank
                self.communicator.wait(self._reduce(loss, "metric"))
                loss /= self.job.world  # changed in place at once
                self.trace.append((self.step, float(loss)))
                self.point("metric")

    def _gradient(self, part: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000 * self.step + 10 * self.rank + part)
        return torch.rand(VALUES, generator=generator) + self.state * 0.01


@dataclass(eq=False)
class Job:
    """A job of ranks that are lost at chosen points, and replaced."""

    world: int
    steps: int
    seed: int
    losses: dict[int, tuple[str, int, int]] = field(default_factory=dict)
    """For the n-th loss the point, the step and the rank at which it happens."""
    metric: bool = False
    top: bool = False
    second: bool = False
    """True if each step has collectives behind its first update."""
    evaluation: int = 0
    """Number of reductions behind step 3."""
    divides: bool = False
    """True if each bucket's sum is divided by the program."""
    every: bool = True
    """True if every step is whole in a region."""
    store: Store = field(default_factory=Store)
    ranks: dict[int, Rank] = field(default_factory=dict)
    refusal: str = ""

    def __post_init__(self) -> None:
        self._lock = threading.RLock()
        self._switches: dict[int, Switch] = {}
        self._saved: dict[int, torch.Tensor] = {}
        self._due = dict(self.losses)
        self._gone: list[Communicator] = []
        self._agent = Generations(self.store)  # type: ignore[arg-type]
        self.store.set(SETUP, b"{}")

    def switch(self, number: int) -> Switch:
        with self._lock:
            if number not in self._switches:
                self._switches[number] = Switch(self.world, self.seed + number)
            return self._switches[number]

    def run(self) -> None:
        """Run the job to its end."""
        with self._lock:
            for rank in range(self.world):
                self.ranks[rank] = Rank(self, rank, 0)
        try:
            self._run()
        finally:
            self.store.close()
            for each in [*self.ranks.values()]:
                each.communicator.end("the job is over")
            for communicator in self._gone:
                communicator.end("its rank was lost")

    def _run(self) -> None:
        for each in [*self.ranks.values()]:
            each.thread.start()
        end_s = time.monotonic() + MOST_S
        while time.monotonic() < end_s:
            with self._lock:
                ranks = [*self.ranks.values()]
            if all(each.left for each in ranks) or any(each.error for each in ranks):
                return
            time.sleep(0.005)
        waits = {
            r: (e.step, e.recovery.recovering, e.recovery._newest.number, e.recovery._done)
            for r, e in self.ranks.items()
        }
        raise TimeoutError(f"the job hangs: {waits}")

    # ---- called by ranks -----------------------------------------------------------------------

    def passes(self, rank: Rank, where: str) -> None:
        with self._lock:
            for number, (point, step, wanted) in self._due.items():
                if (point, step, wanted) == (where, rank.step, rank.rank):
                    del self._due[number]
                    raise Lost

    def lost(self, rank: Rank) -> None:
        """Cut the rank off, and replace it."""
        with self._lock:
            rank.communicator.ended = "lost"
            self._gone.append(rank.communicator)
            if rank.link is not None:
                rank.link.switch.cut_off(rank.rank)
            generation = self._agent.claim((rank.rank,), "killed")
            self.ranks[rank.rank] = Rank(self, rank.rank, generation.life(rank.rank))
            self.ranks[rank.rank].trace = rank.trace
            self.ranks[rank.rank].thread.start()

    def failed(self, rank: Rank) -> None:
        """Note a rank whose training ended with an exception."""

    def ended(self, rank: Rank) -> None:
        if self.every:
            self.saved(rank, rank.step)

    def saved(self, rank: Rank, step: int) -> None:
        with self._lock:
            known = self._saved.setdefault(step, rank.state.clone())
            assert torch.equal(known, rank.state), f"step {step} differs on rank {rank.rank}"

    def restored(self, step: int) -> tuple[torch.Tensor, int]:
        with self._lock:
            if step not in self._saved:
                raise RuntimeError(f"step {step} is in no region")
            return self._saved[step].clone(), step


def states(job: Job) -> list[torch.Tensor]:
    """Return the final states of all ranks."""
    return [job.ranks[rank].state for rank in range(job.world)]


def undisturbed(world: int, steps: int, **more: Any) -> Job:
    """Return a job that nothing has happened to, at its end."""
    job = Job(world, steps, seed=0, **more)
    job.run()
    return job


def errors(ranks: Iterable[Rank]) -> list[str]:
    """Return the errors of ranks."""
    return [str(each.error) for each in ranks if each.error]
