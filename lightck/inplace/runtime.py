"""The parts of recovery in place in one worker process, and what attach and restore ask of them.

`lightck run` starts workers through `worker.py`, which makes `WORKER`; in any other process it is
None, and nothing here is used.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed as dist
from torch import nn

from lightck.distributed import rendezvous
from lightck.distributed.rendezvous import Joining, Rendezvous
from lightck.distributed.rounds import AgreementRounds, Decide, Message
from lightck.distributed.sharding import is_alike
from lightck.distributed.store import default_store
from lightck.errors import CoordinationError, LightckError, StoreError
from lightck.events import event
from lightck.failure.jit_save import JitSaver
from lightck.failure.jit_save_ranks import RankJitSaver
from lightck.inplace import generations
from lightck.inplace.communicator import Communicator
from lightck.inplace.generations import Generations
from lightck.inplace.group import Group
from lightck.inplace.inputs import Inputs
from lightck.inplace.link import Link
from lightck.inplace.operations import State
from lightck.inplace.recovery import InPlaceRecovery, Replacement
from lightck.inplace.setup import SetupAnswers, SetupRecord
from lightck.inplace.training import HandleTraining, InPlaceListener
from lightck.loop.hooks import Listener

_ATTACH_S = 120.0
_INTEGRATIONS = f"{Path(__file__).parents[1] / 'integrations'}{os.sep}"
_VOTE_S = 1.0
"""Seconds between two looks at who hangs."""
_VOTES = 10
"""Looks at which the same ranks are silent, if they are several: others may still notice it."""


@dataclass
class RecordedRounds(AgreementRounds):
    """The rounds of a replacement's attach: decided as they were for the rank it replaces."""

    decided: list[tuple[str, Message]] = field(default_factory=list)

    def agree(
        self, kind: str, message: Message, decide: Decide, *, timeout_s: float | None = None
    ) -> Message:
        """Return what was decided when the job began; what was not asked then is decided here."""
        if self.decided and self.decided[0][0] == kind:
            return self.decided.pop(0)[1]
        return decide([{"kind": kind, **message}])

    def fail(self, kind: str, why: str) -> None:
        """Tell nobody: the other ranks are in no round."""


@dataclass(eq=False)
class Worker:
    """Recovery in place in one worker process. Made once, with the default process group."""

    communicator: Communicator
    recovery: InPlaceRecovery
    inputs: Inputs
    votes: Generations
    """The job's generations over a connection of its own, for the hang of another rank."""
    told: Mapping[str, Any]
    """The facts that a replacement has of the job's set-up, as `_publish_setup` has told them."""
    thread: int = field(default_factory=threading.get_ident)
    """The thread on which the program has made its first group, and trains."""
    _restored: dict[str, int | None] = field(default_factory=dict)
    """The steps that this process has restored, by path; None: nothing was there."""
    _training: HandleTraining | None = None
    _ending: threading.Thread | None = None
    _silent: tuple[int, list[int], int] = 0, [], 0
    """The ranks that have not said in a generation that they hang, and at how many looks it was
    these: in the next one they are other processes."""
    _standing_ended: bool | None = None
    """False if all ranks wait, so that none can be ended for the others."""

    # ---- restore and attach of a replacement -------------------------------------------------

    def rendezvous(self, kind: str) -> Rendezvous | None:
        """Return the meeting of a replacement, which holds it alone; None: this is none.

        Raises:
            CoordinationError: the ranks that it would join cannot go on.
        """
        replacement, communicator = self.recovery.replacement, self.communicator
        if replacement is None or not self.joins():
            return None
        with communicator.changed:
            communicator.changed.wait_for(
                lambda: replacement.plan is not None or bool(communicator.ended)
            )
            plan = replacement.plan
        if plan is None or plan.step is None:
            raise CoordinationError(f"recovery in place: {communicator.ended}")
        rounds = None
        if kind == "attach":
            store = default_store()
            rounds = RecordedRounds(
                store,
                communicator.rank,
                communicator.world,
                _ATTACH_S,
                self.told["number"],
                decided=[(kind, message) for kind, message in self.told["decided"]],
            )
        path, restored = self.told["path"], self.told["restored"]
        joining = Joining(plan.step, replacement.progress, self._refuse, path, restored)
        return Rendezvous(kind, communicator.rank, communicator.world, rounds, joining=joining)

    def restored(self, path: str, step: int | None) -> None:
        """Note what was restored: the collectives from here to attach may depend on it."""
        self._restored[path] = step
        is_whole = self.joins() and path == self.told["path"]
        by = _called_from(_INTEGRATIONS)
        self.communicator.restored(path, is_whole=is_whole, by_integration=by)

    def _refuse(self, why: str) -> None:
        """Have all ranks restarted: this process cannot join them, and another could not either."""
        plan = self.recovery.replacement.plan if self.recovery.replacement else None
        step = plan.step if plan is not None else None
        why = f"the replacement of rank {self.communicator.rank} cannot restore step {step}: {why}"
        with suppress(StoreError):  # then the store's end ends the others
            why = Generations(generations.connect_worker()).refuse(why)
        event("in_place_refused", logging.WARNING, rank=self.communicator.rank, why=why)

    # ---- attach ------------------------------------------------------------------------------

    def follow(self, listener: Listener, model: nn.Module, saver: JitSaver | None) -> Listener:
        """Return what the hooks call, so that the training of `model` can recover in place.

        Where it cannot, the listener as it is; a warning says why.
        """
        why = self._lacks(saver)
        if why:
            event("in_place_off", logging.WARNING, why=why)
            self.recovery.turn_off(why)
            return listener
        assert isinstance(saver, RankJitSaver)
        self.inputs.models.append(model)
        self._training = HandleTraining(saver)
        return InPlaceListener(listener, self.communicator, self._training)

    def _lacks(self, saver: JitSaver | None) -> str:
        """Return what recovery in place needs and has not; empty: nothing."""
        if self._training is not None:
            return "a second handle: recovery in place is for one"
        if not isinstance(saver, RankJitSaver):
            return 'it needs failure="jit" and several ranks'
        if saver.checkpointer.outcomes.history is not None:
            return "keep= is not rejoined in place"
        everything = saver.checkpointer.inventory.everything()
        if not is_alike(everything, saver.whole_saver.replicated(everything)):
            return "not all parameters and their optimizers' state are alike on all ranks"
        return ""

    def attached(self) -> None:
        """Recover from now on: all ranks have attached, the hooks are in place."""
        communicator, recovery = self.communicator, self.recovery
        training = self._training
        if training is None or self.communicator.ended or recovery.off:
            return
        replacement, path = recovery.replacement, training.path
        if replacement is None and (first := communicator.since_restored.get(path)):
            recovery.tell_off(
                f"{first} comes between restore and attach: a replacement has restored a later step"
                " there than this process had; make it before restore"
            )
            return
        if replacement is not None:
            plan = replacement.plan
            assert plan is not None and plan.step is not None
            prelude = {number: plan.forms[number] for number in plan.prelude}
            communicator.join(plan.base, prelude, plan.step, plan.withheld)
            rendezvous.go_on_from(self.told["number"])
        elif communicator.rank == 0:
            self._publish_setup()
        with communicator.changed:
            for operation in communicator.window:
                if operation.state is State.COMPLETE:
                    communicator.window.forget(operation.number)
            recovery.attached(training)

    def closing(self) -> None:
        """Note that all steps are made: at the close of its handle this rank waits for others."""
        if self._training is not None and self.communicator.recovers:
            self._training.close_begins()
            self.communicator.forward_started(self._training.step)

    def detached(self, why: str) -> None:
        """Recover no more: the handle is closed."""
        if self._training is not None:
            self._training.leave(why)
            self.communicator.keep(recovers=False)

    def joins(self) -> bool:
        """Tell whether this process replaces a lost rank, and has not attached yet."""
        replacement = self.recovery.replacement
        return replacement is not None and not replacement.attached

    def replaces(self) -> bool:
        """Tell whether another process goes on in the place of this one if it fails."""
        return self.communicator.recovers and not self.communicator.ended

    def _publish_setup(self) -> None:
        with self.communicator.changed:
            record = SetupRecord(self.communicator.kept_until)
            for operation in self.communicator.window:
                record.add(operation)
        number, decided = rendezvous.rounds_held()
        assert self._training is not None
        told = {"results": record.to_text(), "decided": decided, "number": number}
        told |= {"path": self._training.path, "restored": self._restored}
        self.recovery.generations.store.claim(generations.SETUP, json.dumps(told).encode())

    def end_standing(self) -> bool:
        """Have ranks ended that stand while all others wait for them; on a thread of its own.

        Returns:
            Whether this rank need not end itself: False if recovery in place is impossible, or all
            ranks wait, for nobody.
        """
        communicator = self.communicator
        if communicator.ended or self._standing_ended is False:
            return False
        if self.recovery.recovering:
            return True  # a lost rank's replacement is waited for
        if self._ending is None or not self._ending.is_alive():
            self._ending = threading.Thread(target=self._end, name="lightck-end", daemon=True)
            self._ending.start()
        return True

    def _end(self) -> None:
        rank, world = self.communicator.rank, self.communicator.world
        try:
            generation, standing = self.votes.wait_for_others(rank, world)
            same = self._silent[:2] == (generation.number, standing)
            looks = self._silent[2] + 1 if same else 1
            self._silent = generation.number, standing, looks
            settled = len(standing) == 1 or looks >= _VOTES
            if not standing:
                self._standing_ended = False
            elif settled and rank == min({*range(world)} - {*standing}):
                for each in standing:
                    event("rank_stands", logging.WARNING, rank=each)
                    self.votes.ask_end(each, generation.life(each))
        except StoreError as error:
            event("rank_stands", logging.WARNING, why=str(error))
        time.sleep(_VOTE_S)

    def stats(self) -> tuple[int, float, str]:
        """Return the number of recoveries, the seconds they took, and what one waits for now."""
        recovery = self.recovery
        return recovery.recoveries, recovery.recovering_s, recovery.recovering


def _called_from(folder: str) -> bool:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not frame.f_code.co_filename.startswith(folder):
        frame = frame.f_back
    return frame is not None


WORKER: Worker | None = None


def make_group(store: Any, rank: int, world: int, timeout: timedelta) -> dist.ProcessGroup:
    """Make a process group of all ranks; the first call makes this process's `Worker`."""
    global WORKER
    if WORKER is None:
        WORKER = _made(rank, world, timeout)
        rendezvous.stand_in(WORKER)
        WORKER.recovery.start()
        return Group(WORKER.communicator, WORKER.inputs)

    def apart() -> Any:
        turn_off("a second thread makes collectives, in an order that no replacement could keep")
        torchs: Any = dist
        return torchs.ProcessGroupGloo(torchs.PrefixStore("apart", store), rank, world, timeout)

    return Group(WORKER.communicator, WORKER.inputs, apart, WORKER.thread)


def _made(rank: int, world: int, timeout: timedelta) -> Worker:
    store = generations.connect_worker()
    life = int(os.environ.get(generations.LIFE, "0"))

    def open_link(generation: int) -> Link:
        return Link(store.plain(f"link/{generation}"), rank, world, timeout)

    told: Mapping[str, Any] = {}
    answers = None
    if life:
        value = store.read(generations.SETUP)
        if value is None:
            Generations(store).refuse(f"rank {rank} was lost before all ranks had attached")
            raise LightckError("recovery in place: not all ranks had attached: all are restarted")
        told = json.loads(value)
        answers = SetupAnswers.from_text(rank, told["results"])
    communicator = Communicator(rank, world, answers)
    if not life:
        communicator.resume(open_link(0))
    recovery = InPlaceRecovery(
        communicator,
        Generations(store.clone()),
        Generations(store.clone()),
        open_link,
        life,
        replacement=Replacement() if life else None,
    )
    inputs = Inputs(world)
    return Worker(communicator, recovery, inputs, Generations(store.clone()), told)


def closing() -> None:
    """Do what `Worker.closing` does, in a process that recovers in place."""
    if WORKER is not None:
        WORKER.closing()


def replaces() -> bool:
    """Return what `Worker.replaces` does; False in a process that does not recover in place."""
    return WORKER is not None and WORKER.replaces()


def joins() -> bool:
    """Return what `Worker.joins` does; False in a process that does not recover in place."""
    return WORKER is not None and WORKER.joins()


def turn_off(why: str, *, commits: bool = True) -> None:
    """Turn recovery in place off, in words, in a process that has it.

    Args:
        why: the reason.
        commits: False if iterations are not committed, either, from here on. All ranks have to come
            here, between the same two updates.
    """
    if WORKER is not None:
        WORKER.recovery.tell_off(why)
        if not commits:
            WORKER.communicator.stop_commits()


def stats() -> tuple[int, float, str]:
    """Return what `Worker.stats` does; zeros in a process that does not recover in place."""
    return (0, 0.0, "") if WORKER is None else WORKER.stats()
