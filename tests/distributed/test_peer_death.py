"""A rank is killed with no snapshot due, ever: a survivor of its node finishes its share, and the
job goes on as if nothing had happened, from the last complete step."""

from __future__ import annotations

import importlib
import logging
import os
import signal
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # what an optimizer would load on first use, in every rank by itself
from test_golden import Job
from torch.utils.data import DataLoader

import lightck
from lightck.distributed.commit.distributed_barrier import DistributedBarrier
from lightck.failure import whole_save
from lightck.failure.whole_save import WholeSaver
from lightck.region import location
from lightck.region.region import open_and_recover
from lightck.region.slot_writer import SlotWriter
from support.distributed import ranks
from support.distributed.resumed import same, state_of
from support.proof import record

LAST, AT = 7, 4
NEVER = 10**6
LONG_S = 100.0
FORWARD, LOOP = "in its next forward", "in its loop"
KIND = "unused"
"""With three ranks the order of summation must not change: see `test_golden.py`."""
BEFORE = ["forward", "backward"]
PHASES = [*BEFORE, "fence", "half", "updated", "step end", "loop"]
"""The rank dies here in iteration AT: before its update, inside, at its end or behind it."""


class Mortal(Job):
    """Kills itself with SIGKILL at one instant; weights are clipped before forward start."""

    def __init__(self, rank: int, kind: str, phase: str = "", **settings: Any) -> None:
        super().__init__(rank, kind, **settings)
        self.phase, self.iteration, self.last = phase, 0, AT
        self.tell: Callable[[float], object] = id
        self.gathered: Callable[[], object] = lambda: None
        """Called between its gradients and its update."""
        self.handle: Any = None
        self.module[0].register_forward_hook(self._in_forward)
        self.module[3].weight.register_hook(lambda grad: self._die_in("backward"))
        self.optimizer.register_step_pre_hook(lambda *_: self._die_in("fence"))
        self.optimizer.register_step_post_hook(lambda *_: self._die_in("updated"))
        if phase == "half":
            adam: Any = importlib.import_module("torch.optim.adam")
            adam._single_tensor_adam = self._half_of(adam._single_tensor_adam)

    def _in_forward(self, *_: Any) -> None:
        self._die_in("forward")

    def _half_of(self, update: Callable[..., None]) -> Callable[..., None]:
        """Adam's update, that dies between two parameters."""

        def half(parameters: Any, *lists: Any, **options: Any) -> None:
            count = len(parameters) // 2
            update(parameters[:count], *(each[:count] for each in lists), **options)
            self._die_in("half")
            update(parameters[count:], *(each[count:] for each in lists), **options)

        return half

    def _die_in(self, phase: str) -> None:
        if phase == self.phase and self.iteration == self.last:
            self.tell(time.monotonic())
            os.kill(os.getpid(), signal.SIGKILL)

    def iterate(self) -> float:
        self.iteration += 1
        self.optimizer.zero_grad()
        loss = self.loss()
        loss.backward()
        self.gathered()
        self.optimizer.step()
        self._die_in("step end")
        self.pending()
        self._die_in("loop")
        return loss.item()

    def resume(self, path: Path, seed: int) -> lightck.types.RestoreInfo | None:
        """Go on from what is there, with what the loop had still to do."""
        torch.manual_seed(1)  # as another process would: restore sets the generators
        info = self.restore(path)
        if info is None:
            torch.manual_seed(seed)
        else:
            self.iteration = info.step
            if info.early:
                self.pending()
        return info

    def pending(self) -> None:
        """Do what the loop does between step end and forward start, as far as it is not done."""
        if self.schedule.last_epoch < self.iteration:
            self.schedule.step()


class Epochs(Mortal):
    """Iterates a loader anew at each step: generators are taken again behind step end."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.loader = DataLoader(range(2))  # type: ignore[arg-type]

    def pending(self) -> None:
        super().pending()
        self.progress["passes"] = 10 * self.iteration + self.progress["rank"]  # at step end
        assert len(list(self.loader)) == 2  # draws from the global generator


class Events(logging.Handler):
    """This handler collects what lightck logs in a rank's process."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, dict[str, Any]]] = []
        self.settled_at = 0.0
        """The save was logged at this time, by the clock that all processes share."""
        logging.getLogger("lightck").setLevel(logging.INFO)
        logging.getLogger("lightck").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.seen.append((record.lightck_event, record.lightck))  # type: ignore[attr-defined]
        if self.seen[-1][0] == "saved":
            self.settled_at = time.monotonic()

    def of(self, name: str) -> list[dict[str, Any]]:
        return [fields for event, fields in self.seen if event == name]


def first_life(
    path: Path,
    dead: int,
    phase: str,
    meanwhile: Callable[[int], object] = id,
    last: int = AT,
    kind: type[Mortal] = Mortal,
    prepare: Callable[[ranks.Me, Any], object] = lambda me, job: None,
    **settings: Any,
) -> Callable[..., Any]:
    """Trains until the rank `dead` kills itself; the others' errors leave their training, too.

    `prepare` is given each rank and its job, before that begins.
    """

    def train(me: ranks.Me) -> Any:
        events = Events()
        meanwhile(me.rank)
        job = kind(me.rank, KIND, phase if me.rank == dead else "", **settings)
        job.tell, job.last = me.send, last
        prepare(me, job)
        job.resume(path, 300 + me.rank)
        job.handle = job.attach(path, failure="jit", on_error=lambda error: None)
        try:
            with job.handle:
                while True:
                    job.iterate()
        except RuntimeError:
            saved = events.of("saved")[-1]  # the watchdog may have seen the dead one first
            return saved, events.of("saved_whole"), events.of("not_saved_whole"), events.settled_at

    return train


def until(holds: Callable[[], object]) -> None:
    deadline = time.monotonic() + LONG_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def stand(me: ranks.Me, job: Mortal, dead: int, where: str, tell: Callable[[], Any]) -> None:
    """The dead rank dies when it is let go; the survivor says `tell()` where it then is.

    That is LOOP, between the last step's end and the forward start, until its watchdog has saved
    that; or FORWARD, where it has passed forward start, and waits for the dead one. Of step 1,
    which is whole when step 2 has ended, the fate is known on both.
    """
    if me.rank == dead:
        job.tell = lambda at: me.pause()
    events, pending = Events(), job.pending

    def loop() -> None:
        if job.iteration == 2:
            job.handle.wait(1, LONG_S)
            assert job.handle.last_committed_step == 1
        if job.iteration == job.last and me.rank != dead and where == LOOP:
            me.send(tell())
            until(lambda: events.of("saved"))
        pending()

    def begun(*_: Any) -> None:  # behind forward start, before DDP waits
        if job.iteration == job.last + 1 and where == FORWARD:
            me.send(tell())

    job.pending = loop  # type: ignore[method-assign]
    job.model.register_forward_pre_hook(begun)


def exact_steps(path: Path, rank: int) -> set[int]:
    """Return the steps of the exact snapshots that are committed in a rank's region."""
    region, recovery = open_and_recover(location.locate(path, rank, create=False))
    region.close()
    return {each.record.step for each in recovery.candidates if not each.record.early}


def passed(me: ranks.Me, job: Mortal, dead: int, phase: str) -> None:
    """The dead rank says when it dies, which is when it is let go.

    The others say that they have come as far as it takes: to the forward start after the step
    before, or to the end of the step.
    """
    if me.rank == dead:
        job.tell = lambda at: (me.pause(), me.send(time.monotonic()))
        return

    def said(*_: Any) -> None:
        if job.iteration == job.last:
            me.send(phase)

    if phase in BEFORE:
        job.model.register_forward_pre_hook(said)  # behind forward start
    else:
        job.optimizer.register_step_post_hook(said)  # before step end


def second_life(path: Path, kind: type[Mortal], last: int = LAST) -> Callable[..., Any]:
    def train(me: ranks.Me) -> Any:
        job = kind(me.rank, KIND)
        info = job.resume(path, 300 + me.rank)
        with job.attach(path) as handle:
            losses = [job.iterate() for _ in range(handle.step, last)]
        return info, losses, state_of(job)

    return train


@cache
def golden(world: int, kind: type[Mortal], count: int = LAST) -> list[Any]:
    """Losses and last state of each rank of a run that nothing interrupts."""

    def train(me: ranks.Me) -> Any:
        job = kind(me.rank, KIND)
        return [job.iterate() for _ in range(count)], state_of(job)

    with ranks.started(world, train) as job:
        return job.results()


def go_on(
    path: Path, world: int, kind: type[Mortal] = Mortal, last: int = LAST
) -> lightck.types.RestoreInfo | None:
    """The rest of the trajectory is golden; returns what was restored."""
    with ranks.started(world, second_life(path, kind, last)) as job:
        results = job.results()
    infos = [info for info, _, _ in results]
    steps = {info.step if info else 0 for info in infos}
    assert len(steps) == 1, infos
    wanted = golden(world, kind, last)
    for (_, losses, state), (all_losses, final) in zip(results, wanted, strict=True):
        assert losses == all_losses[steps.copy().pop() :]
        assert same(state, final)
    return infos[0]


def last_complete_step_is_everywhere(
    path: Path, world: int, dead: int, phase: str, kind: type[Mortal]
) -> None:
    """A rank dies in one phase: the others save, one of them its share, and the rest is golden."""

    def prepare(me: ranks.Me, job: Mortal) -> None:
        passed(me, job, dead, phase)

    code = first_life(path, dead, phase, kind=kind, prepare=prepare, policy=NEVER)
    living = [r for r in range(world) if r != dead]
    with ranks.started(world, code) as job:
        assert [job.receive(rank) for rank in living] == [phase] * len(living)
        job.let_go(dead)
        outcomes = job.outcomes(living)
        died_at = job.receive(dead)
    step = AT - 1 if phase in BEFORE else AT
    for outcome in outcomes:
        assert not isinstance(outcome, BaseException), outcome
        saved, _, refused, at = outcome
        record(f"peer_killed_in_{phase.replace(' ', '_')}", {"settled_after_s": at - died_at})
        assert saved["fresh"] and saved["step"] == step and not refused, outcome
    written = [each for _, taken, _, _ in outcomes for each in taken]
    assert [(each["ranks"], each["step"]) for each in written] == [([*range(world)], step)]
    info = go_on(path, world, kind)
    assert info is not None and info.step == step
    assert info.early == (phase not in BEFORE)


EVERYWHERE = [(world, dead, phase) for world, dead in ((2, 0), (3, 1)) for phase in PHASES]
SOME = {(2, 0, "backward"), (2, 0, "half"), (2, 0, "loop"), (3, 1, "fence"), (3, 1, "step end")}


@pytest.mark.parametrize(
    ("world", "dead", "phase"),
    [
        *((2, 1, phase) for phase in PHASES),
        *(pytest.param(*e, marks=[] if e in SOME else pytest.mark.soak) for e in EVERYWHERE),
    ],
)
def test_the_last_complete_step_is_there_on_every_rank(
    region_dir: Path, world: int, dead: int, phase: str
) -> None:
    last_complete_step_is_everywhere(region_dir, world, dead, phase, Mortal)


@pytest.mark.parametrize("phase", ["half", "step end"])
def test_what_a_survivor_takes_again_behind_its_update_does_not_hide_the_update(
    region_dir: Path, phase: str
) -> None:
    def prepare(me: ranks.Me, job: Mortal) -> None:
        passed(me, job, 1, phase)

    code = first_life(region_dir, 1, phase, kind=Epochs, prepare=prepare, policy=NEVER)
    with ranks.started(2, code) as job:
        assert job.receive(0) == phase
        job.let_go(1)
        ((saved, taken, refused, _),) = job.outcomes([0])
    assert saved["step"] == AT and not refused
    assert [each["step"] for each in taken] == [AT]
    info = go_on(region_dir, 2, Epochs)
    assert info is not None and info.step == AT and info.early


def test_a_survivor_that_hears_of_it_before_its_own_update_finishes_both_steps(
    region_dir: Path,
) -> None:
    """Both had the forward start of the step before; it ends the update that killed the other."""

    def prepare(me: ranks.Me, job: Mortal) -> None:
        events = Events()
        if me.rank == 1:
            job.tell = lambda at: me.pause()

        def late() -> None:
            if job.iteration == AT and me.rank == 0:
                me.send("all gradients are here")
                until(lambda: events.of("saved"))

        job.gathered = late

    with ranks.started(2, first_life(region_dir, 1, "half", prepare=prepare, policy=NEVER)) as job:
        assert job.receive(0) == "all gradients are here"
        job.let_go(1)
        ((saved, taken, refused, _),) = job.outcomes([0])
    assert saved["step"] == AT and not refused
    assert [each["step"] for each in taken] == [AT - 1, AT]
    info = go_on(region_dir, 2)
    assert info is not None and info.step == AT - 1 and not info.early, "exact, and near"


def following(me: ranks.Me, save: Callable[..., bool]) -> Callable[..., bool]:
    """Saves once the test lets it go."""
    heard: list[Any] = []

    def when_let_go(*arguments: Any, **named: Any) -> bool:
        if not heard:
            heard.append(me.pause())
        return save(*arguments, **named)

    return when_let_go


def test_a_survivor_that_dies_while_it_saves_is_followed_by_the_next(region_dir: Path) -> None:
    """The next survivor begins anew what the dead one had begun."""

    def prepare(me: ranks.Me, job: Mortal) -> None:
        passed(me, job, 1, "backward")
        save = WholeSaver._save

        def end(*_: Any) -> None:
            me.send("at it")
            time.sleep(0.3)  # the other finds it at work
            os.kill(os.getpid(), signal.SIGKILL)

        def dying(*arguments: Any, **named: Any) -> bool:
            SlotWriter.seal = end
            return save(*arguments, **named)

        if me.rank == 0:
            WholeSaver._save = dying  # type: ignore[method-assign]
        if me.rank == 2:
            whole_save.TURN_S = 0.0  # it does not wait for the other's turn to be over
            WholeSaver._save = following(me, save)  # type: ignore[method-assign]

    code = first_life(region_dir, 1, "backward", prepare=prepare, policy=NEVER)
    with ranks.started(3, code) as job:
        assert [job.receive(rank) for rank in (0, 2)] == ["backward"] * 2
        job.let_go(1)
        assert job.receive(0) == "at it"
        job.let_go(2)
        killed, (saved, taken, refused, _) = job.outcomes([0, 2])
    assert isinstance(killed, ranks.Gone)
    assert [each["ranks"] for each in taken] == [[0, 1, 2]], (refused, saved)
    info = go_on(region_dir, 3)
    assert info is not None and info.step == AT - 1 and not info.early


def test_a_rank_that_dies_while_it_saves_just_in_time_is_completed_by_another(
    region_dir: Path,
) -> None:
    """An exception is on its way out; of what it saves a slot is begun, and nothing said."""

    def meanwhile(rank: int) -> None:
        def fail(job: Mortal, phase: str) -> None:
            if (phase, job.iteration) == (job.phase, AT):
                raise RuntimeError("no such file")

        if rank == 1:
            Mortal._die_in = fail
            SlotWriter.seal = lambda *_: os.kill(os.getpid(), signal.SIGKILL)

    with ranks.started(2, first_life(region_dir, 1, "backward", meanwhile, policy=NEVER)) as job:
        (saved, taken, refused, _), killed = job.outcomes()
    assert isinstance(killed, ranks.Gone) and saved["fresh"] and not refused
    assert [each["step"] for each in taken] == [AT - 1]
    info = go_on(region_dir, 2)
    assert info is not None and info.step == AT - 1 and not info.early


def test_a_rank_that_dies_inside_its_update_is_finished_though_an_exact_step_is_whole(
    region_dir: Path,
) -> None:
    """Restore prefers the exact step, which is only one older."""

    def prepare(me: ranks.Me, job: Mortal) -> None:
        passed(me, job, 1, "half")
        if me.rank == 1:
            job.tell = lambda at: (me.pause(), until(lambda: AT - 1 in exact_steps(region_dir, 1)))

    code = first_life(region_dir, 1, "half", prepare=prepare, policy=1, slots=8)
    with ranks.started(2, code) as job:
        assert job.receive(0) == "half"
        job.let_go(1)
        ((saved, taken, refused, _),) = job.outcomes([0])
    assert saved["step"] == AT and not refused
    assert [each["step"] for each in taken] == [AT]
    info = go_on(region_dir, 2)
    assert info is not None and info.step == AT - 1 and not info.early


@pytest.mark.parametrize(
    ("dead", "phase", "where"),
    [
        (0, "step end", FORWARD),
        (0, "loop", LOOP),
        (1, "step end", LOOP),
        (1, "loop", FORWARD),
    ],
)
def test_with_every_step_due_an_exact_snapshot_outlives_a_death_before_the_next_forward(
    region_dir: Path, dead: int, phase: str, where: str
) -> None:
    """The snapshot that is whole then is early; a loop that ignores that is resumed exactly, too.

    The exact one is of the step before: its slot is not taken for the early one. Where it was not
    whole yet, the early one counts, which the loop makes up for.
    """

    def prepare(me: ranks.Me, job: Mortal) -> None:
        stand(me, job, dead, where, lambda: None)

    with ranks.started(2, first_life(region_dir, dead, phase, prepare=prepare, policy=1)) as job:
        assert job.receive(1 - dead) is None
        job.let_go(dead)
        ((saved, taken, refused, _),) = job.outcomes([1 - dead])
    assert saved["step"] == AT and saved["fresh"] and not refused, (saved, refused)
    assert [each["step"] for each in taken] == [AT]
    info = go_on(region_dir, 2)
    assert info is not None and "was finished early" in info.why
    assert (info.step, info.early) in {(AT - 1, False), (AT, True)}


def test_one_rank_after_the_other_dies_and_no_step_is_lost(region_dir: Path) -> None:
    """The second life saves in slots of the first, whose snapshot stays until then."""
    for dead, last, phase in ((1, AT, "loop"), (0, AT + 1, "backward"), (1, AT + 2, "forward")):

        def prepare(me: ranks.Me, job: Mortal, dead: int = dead, phase: str = phase) -> None:
            passed(me, job, dead, phase)

        code = first_life(region_dir, dead, phase, last=last, prepare=prepare, policy=NEVER)
        with ranks.started(2, code) as job:
            assert job.receive(1 - dead) == phase
            job.let_go(dead)
            ((saved, taken, refused, _),) = job.outcomes([1 - dead])
        assert saved["step"] == (last if phase == "loop" else last - 1)
        assert saved["fresh"] and not refused
        assert len(taken) == 1, "also of the step that was restored: the timeline is a new one"
    info = go_on(region_dir, 2)
    assert info is not None and info.step == AT + 1


def test_outcomes_that_a_dead_rank_has_taken_with_it_keep_no_slot_from_its_survivors(
    region_dir: Path,
) -> None:
    """Three slots hold step 1, which is whole, and steps 2 and 3, which are open.

    The dead rank has committed them and told nobody. The survivor gives up the older one.
    """

    def prepare(me: ranks.Me, job: Mortal) -> None:
        passed(me, job, 1, "step end")
        if me.rank == 1:
            kind: Any = DistributedBarrier
            committed = kind.committed

            def tell_first(barrier: Any, step: int, form: bytes) -> None:
                if step == 1:
                    committed(barrier, step, form)

            kind.committed = tell_first
        pending = job.pending

        def first_is_whole() -> None:
            if job.iteration == 2:
                job.handle.wait(1, LONG_S)
            pending()

        job.pending = first_is_whole  # type: ignore[method-assign]

    code = first_life(region_dir, 1, "step end", prepare=prepare, policy=1, slots=3)
    with ranks.started(2, code) as job:
        assert job.receive(0) == "step end"
        job.let_go(1)
        ((saved, taken, refused, _),) = job.outcomes([0])
    assert saved["step"] == AT and saved["fresh"] and not refused, (saved, refused)
    assert [each["step"] for each in taken] == [AT]
    assert AT - 1 in exact_steps(region_dir, 0), "the newer one of the open steps was given up"
    info = go_on(region_dir, 2)
    assert info is not None and (info.step, info.early) in {(AT - 1, False), (AT, True)}
