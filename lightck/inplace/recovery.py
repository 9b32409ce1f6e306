"""The recovery of one rank: one generation after the other, on a thread of its own.

    survivor      all ends  ->  committed steps compared  ->  training stands in a collective
                  ->  plan  ->  the step saved  ->  ready  ->  connected  ->  results given  ->  on
    replacement   plan  ->  the script restores that step and attaches  ->  ready  ->  the same

Every wait ends when a newer generation begins, and the recovery begins anew with it; a generation
that never comes to an end is refused after `SETTLE_S`. A second thread does nothing but wait for
the next generation: it is the only source of it, and cuts the link at once.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from lightck.errors import CoordinationError, LightckError, StoreError
from lightck.events import event
from lightck.inplace.communicator import DRAIN_S, AnyLink, Communicator, error_of, flat
from lightck.inplace.generations import Generation, Generations
from lightck.inplace.operations import empty
from lightck.inplace.plan import Description, Plan, PlanRefused, Standing, plan_of
from lightck.inplace.training import Training
from lightck.tracing.trace import now_ns

SETTLE_S = 600.0
"""Seconds that a recovery may take before all ranks are restarted."""
SUSPECT_S = 0.3
"""Seconds after a collective's failure in which an agent may name a lost rank; then the connections
are made anew without one."""
MOST_TRIES = 10
"""Generations in a row, without a further loss, in which an error ends this rank's recovery."""
POLL_S = 0.005
GIVEN = timedelta(milliseconds=50)
"""Time between two looks for a newer generation while a result is given."""
_WATCH_S = 3600.0

T = TypeVar("T")


class _Newer(Exception):  # noqa: N818 - no error
    """A newer generation has begun."""


class _RestartAll(Exception):  # noqa: N818 - no error
    """All ranks have to be restarted; says why."""


class OpenLink(Protocol):
    """Connects all ranks for one generation; blocks until all have come."""

    def __call__(self, generation: int) -> AnyLink:
        """Return the link.

        Raises:
            RuntimeError: a rank did not come.
        """
        ...


@dataclass(eq=False)
class Replacement:
    """The part of the job that a replacement joins by; its script's thread waits for the plan."""

    plan: Plan | None = None
    progress: Any = None
    """The progress that its commit barrier goes on from."""
    attached: bool = False
    """True once its script has restored the plan's step, and attached."""


@dataclass(eq=False)
class InPlaceRecovery:
    """Recovers one rank from failures of others. Threads of its own; see `start`."""

    communicator: Communicator
    generations: Generations
    watched: Generations
    """The same over a connection of its own, on which the watching thread waits."""
    open_link: OpenLink
    life: int = 0
    training: Training | None = None
    """The training of this rank, from its attach on."""
    replacement: Replacement | None = None
    """The plan that a replacement goes by until it has joined; None: this rank survives."""
    settle_s: float = SETTLE_S
    recoveries: int = 0
    """Number of recoveries that came to their end here."""
    recovering_s: float = 0.0
    """Seconds that they took."""
    recovering: str = ""
    """The condition that the running recovery waits for; empty: none runs."""
    off: str = ""
    """The reason why in place is off, and all are restarted at the first loss; empty: it is on."""
    _newest: Generation = field(default_factory=Generation)
    _done: int = 0
    _opening: AnyLink | None = None
    _left: list[AnyLink] = field(default_factory=list)
    """Links on which a result was still being given when its recovery was left. They are kept: to
    free one waits for gloo's threads, and one of these may wait for ever."""
    _stopped: bool = False
    _tries: int = 0
    """Errors that have ended recoveries since the last that came to its end."""
    _lives: Mapping[int, int] | None = None
    """The lives of the ranks when `_until_s` was set; None: no recovery lasts."""
    _until_s: float = 0.0
    """The instant at which this recovery is refused, over all generations without a loss."""

    # ---- threads -----------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to wait for generations, on two daemon threads."""
        for run, name in ((self._watch, "generations"), (self._run, "recovery")):
            threading.Thread(target=run, name=f"lightck-{name}", daemon=True).start()

    def attached(self, training: Training) -> None:
        """Follow the training of this rank from now on; under the communicator's lock."""
        self.training = training
        self.communicator.keep(recovers=True)
        if self.replacement is not None:
            self.replacement.attached = True
        self.communicator.changed.notify_all()

    def tell_off(self, why: str) -> None:
        """Say that in place is off, once in all, and turn it off."""
        if not self.off:
            event("in_place_off", logging.WARNING, why=why)
            self.turn_off(why)

    def turn_off(self, why: str) -> None:
        """Recover from nothing: collectives go on, and all ranks restart at the first loss."""
        self.communicator.keep(recovers=False)
        with self.communicator.changed:
            self._stopped, self.off = True, why
            self.communicator.changed.notify_all()

    def _watch(self) -> None:
        """Wait for the next generation, and cut the link as soon as it is there."""
        while True:
            number = self._newest.number + 1
            try:
                if not self.watched.store.wait(f"gen/{number}", _WATCH_S):
                    continue
                found = self.watched.update()
            except StoreError as error:
                self._store_lost(f"the job's store does not answer: {error}")
                return
            with self.communicator.changed:
                # At once: who sees the generation finds no link of an earlier one.
                self._newest = found
                links = [self.communicator.detach(), self._opening]
                self.communicator.changed.notify_all()
            while links:
                if (link := links.pop()) is not None:
                    link.cut()
                del link  # not under the lock: that may wait for gloo's threads

    def _store_lost(self, why: str) -> None:
        """Recover no more: training goes on, as long as no collective fails."""
        with self.communicator.changed:
            stopped, recovering = self._stopped, self.recovering
        if recovering:
            self.communicator.end(why)
        elif not stopped:
            event("in_place_off", logging.WARNING, why=why)
            self.turn_off(why)

    def _run(self) -> None:
        changed = self.communicator.changed
        while True:
            with changed:
                changed.wait_for(
                    lambda: (
                        self._is_due()
                        or bool(self.communicator.suspicion)
                        or bool(self.off or self.communicator.unfit)
                    )
                )
            if not self.off and self.communicator.unfit:
                self.tell_off(self.communicator.unfit)
            if self.off:
                self._run_off()
                return
            with changed:
                suspected = self.communicator.suspicion
                if self.communicator.ended:
                    return
                refused = self.communicator.refused
                if not self._is_due():
                    changed.wait_for(self._is_due, SUSPECT_S)
                due = self._is_due()
            try:
                if refused:
                    raise _RestartAll(refused)
                if not due:
                    if suspected and self.communicator.suspicion:
                        self.generations.claim_if(self._done, suspected)
                        with changed:
                            changed.wait_for(self._is_due, SUSPECT_S)
                    continue
                generation = self._newest
                self._recover(generation)
            except _Newer:
                continue
            except (_RestartAll, LightckError) as why:
                self._refuse(str(why))
                return
            except RuntimeError as error:  # a connection, once more
                said = (str(error).splitlines() or [repr(error)])[0]
                self._tries += 1
                if self._tries >= MOST_TRIES:
                    self._refuse(f"the recovery has failed {self._tries} times: {said}")
                    return
                self._claim_after(generation.number, said)
            except Exception as error:  # noqa: BLE001 - else training would wait for ever
                self._refuse(f"the recovery has failed: {error!r}")
                return

    def _run_off(self) -> None:
        """Tell the agents to replace nobody, and end the open collectives at the first loss."""
        changed, communicator = self.communicator.changed, self.communicator
        try:
            self.generations.refuse(self.off)
        except StoreError as error:
            event("in_place_off", logging.WARNING, why=f"{self.off}; not told: {error}")
        with changed:
            changed.wait_for(lambda: self._is_due() or bool(communicator.suspicion))
            suspected = communicator.suspicion
        communicator.end(f"{suspected or 'a rank was lost'}; in place is off: {self.off}")

    def _is_due(self) -> bool:
        communicator = self.communicator
        return self._newest.number > self._done or bool(communicator.ended or communicator.refused)

    def _claim_after(self, number: int, why: str) -> None:
        changed = self.communicator.changed
        with changed:
            changed.wait_for(lambda: self._newest.number > number, SUSPECT_S)
            if self._newest.number > number:
                return
        try:
            self.generations.claim_if(number, why)
        except StoreError as error:
            self._refuse(str(error))

    def _refuse(self, why: str) -> None:
        try:
            why = self.generations.refuse(why)
        except StoreError as error:
            why = f"{why}; {error}"
        event("in_place_refused", logging.WARNING, rank=self.communicator.rank, why=why)
        self.communicator.end(why)

    # ---- one recovery ------------------------------------------------------------------------

    def _recover(self, generation: Generation) -> None:
        began_ns, communicator = now_ns(), self.communicator
        if self._lives != generation.lives:  # a loss: what was tried before says nothing
            self._lives, self._tries = generation.lives, 0
            self._until_s = time.monotonic() + self.settle_s
        state = _Recovering(self, generation, self._until_s)
        lost = sorted(generation.lost)
        event(
            "rank_lost",
            logging.WARNING,
            generation=generation.number,
            ranks=lost,
            why=generation.why,
        )
        state.until("all collectives to end", communicator.has_drained, DRAIN_S)
        roster = self.generations.roster(generation, communicator.world)
        gone = [rank for rank in range(communicator.world) if rank not in roster]
        survives = communicator.rank in roster
        if survives != (self.replacement is None):
            raise _RestartAll(
                f"rank {communicator.rank} is counted as"
                f" {'surviving' if survives else 'lost'} and is not"
            )
        if survives:
            plan = state.stand(roster, gone)
            state.save(plan, gone)
        else:
            plan = state.follow(roster, gone)
        state.say("ready", True)
        for rank in range(communicator.world):
            state.hear("ready", rank)
        self._connect(generation, plan, state)
        if self.training is not None:  # while it is a recovery still: nobody ends the new ranks
            self.training.recovered(gone, began_ns)
        with communicator.changed:
            self._done, self._lives = generation.number, None
            self.recoveries += 1
            self.recovering_s += (now_ns() - began_ns) / 1e9
            self.recovering = ""
        event(
            "recovered",
            logging.WARNING,
            generation=generation.number,
            ranks=gone,
            step=plan.step,
            given=len(plan.donors),
            seconds=round((now_ns() - began_ns) / 1e9, 3),
        )

    def _connect(self, generation: Generation, plan: Plan, state: _Recovering) -> None:
        """Open the link, give what ranks lack, and go on."""
        communicator = self.communicator
        link = state.opened()
        with communicator.changed:
            self._opening = link
        try:
            state.check()
            self._give(plan, link, state)
            if self.replacement is not None:
                # Before anything can be complete with it: from here on it survives.
                self.generations.join(communicator.rank, self.life)
                self.replacement = None
            with communicator.changed:
                state.check()  # a newer generation would not cut this link any more
                communicator.resume(link)
        except CoordinationError as error:
            raise _RestartAll(str(error)) from error
        finally:
            with communicator.changed:
                self._opening = None

    def _give(self, plan: Plan, link: AnyLink, state: _Recovering) -> None:
        """Give each result that a rank lacks to all, in order, by its donor."""
        communicator = self.communicator
        for number, donor in plan.donors.items():
            form = plan.forms[number]
            # The program goes on beside it: it may change a result behind the plan, or here.
            changed = f"the result of {form.kind} was changed before every rank had it"
            operation = communicator.window.get(number)
            if donor != communicator.rank:
                given = empty(form)
            elif operation is None or not operation.is_intact:
                raise _RestartAll(changed)
            else:
                given = flat(operation.result())
            self.recovering = f"collective {number} from rank {donor}"
            for tensor in given:
                if tensor.numel():
                    work = _broadcast(link.backend, tensor, donor)
                    try:
                        state.end_of(work)
                    except (_Newer, _RestartAll):
                        self._left.append(link)
                        raise
            if donor == communicator.rank:
                assert operation is not None
                if not operation.is_intact:
                    raise _RestartAll(changed)
            else:
                communicator.give(number, form, given)


@dataclass(eq=False)
class _Recovering:
    """The recovery of one generation on one rank."""

    recovery: InPlaceRecovery
    generation: Generation
    until_s: float

    @property
    def rank(self) -> int:
        return self.recovery.communicator.rank

    # ---- waits ---------------------------------------------------------------------------

    def check(self) -> None:
        """Go no further if a newer generation has begun, or in place is impossible.

        Raises:
            _Newer, _RestartAll: it has.
        """
        recovery = self.recovery
        if recovery._newest.number > self.generation.number:
            raise _Newer
        if why := recovery.communicator.ended or recovery.communicator.refused:
            raise _RestartAll(why)
        if why := recovery.off or recovery.communicator.unfit:
            raise _RestartAll(f"in place is off: {why}")  # results are not kept any more

    def until(self, what: str, holds: Callable[[], bool], seconds: float | None = None) -> None:
        """Wait for a condition of this process.

        Raises:
            _Newer, _RestartAll: it was not waited for, or the time was over.
        """
        changed = self.recovery.communicator.changed
        end_s = self.until_s if seconds is None else time.monotonic() + seconds
        self.recovery.recovering = what
        while True:
            with changed:
                if holds():
                    return
                changed.wait(POLL_S)
            self.check()
            if time.monotonic() > end_s:
                raise _RestartAll(f"rank {self.rank} waited too long for {what}")

    def end_of(self, work: Any) -> None:
        """Wait until a work of the new link has ended.

        Raises:
            _Newer, _RestartAll: it was not waited for, or the time was over.
            RuntimeError: it has failed.
        """
        while (why := error_of(work, GIVEN)) is None:
            self.check()
            if time.monotonic() > self.until_s:
                raise _RestartAll(
                    f"rank {self.rank} waited too long for {self.recovery.recovering}"
                )
        if why:
            raise RuntimeError(why)

    def hear(self, what: str, rank: int) -> Any:
        """Wait until a rank has said something; return it.

        Raises:
            _Newer, _RestartAll: as `until`; also if another rank refuses.
        """
        generations, number = self.recovery.generations, self.generation.number
        self.recovery.recovering = f"rank {rank}: {what}"
        pause_s = POLL_S
        while True:
            value = generations.said(what, number, rank)
            if value is not None:
                return value
            self.check()
            if pause_s > 10 * POLL_S and (why := generations.refusal()):
                raise _RestartAll(why)
            if time.monotonic() > self.until_s:
                raise _RestartAll(
                    f"rank {rank} did not say {what!r} in {self.recovery.settle_s:.0f} s"
                )
            time.sleep(pause_s)
            pause_s = min(1.2 * pause_s, 0.1)

    def say(self, what: str, value: Any) -> None:
        """Say something to the other ranks."""
        self.recovery.generations.say(what, self.generation.number, self.rank, value)

    # ---- the parts of a recovery -----------------------------------------------------------

    def stand(self, roster: list[int], gone: list[int]) -> Plan:
        """Come to stand with the other survivors; return the plan.

        Raises:
            _Newer, _RestartAll: there is none.
        """
        communicator, training = self.recovery.communicator, self.recovery.training
        if training is None:
            raise _RestartAll(f"rank {self.rank} had not attached when {_named(gone)} was lost")
        self.say("count", communicator.window.committed)
        last = max(self.hear("count", rank) for rank in roster)
        if communicator.window.committed < last:
            communicator.pass_commit(last)
        self.until(f"training to stand behind step {last}", lambda: self._has_come_to(last))
        with communicator.changed:
            standing = standing_of(communicator, training.left, last)
        self.say("stand", {"standing": standing.to_message(), "progress": training.progress()})
        return self._plan(roster, gone)

    def _has_come_to(self, step: int) -> bool:
        """Tell whether the training thread waits for the recovery, or can go on without it.

        Raises:
            _RestartAll: it waits amid the updates of the step, in what is made again only later.
        """
        communicator, training = self.recovery.communicator, self.recovery.training
        assert training is not None
        if training.left:
            return True
        window = communicator.window
        if training.step < step:
            # All that came before the step's commit is complete: these came behind it.
            if (waiting := window.unfinished()) and training.stands():
                raise _RestartAll(
                    f"rank {self.rank} waits in {waiting[0].form.kind} ({waiting[0].form.site})"
                    f" between the first update of step {step} and that step's end, so that no"
                    " step can be saved"
                )
            return False
        if step in window.starts:
            return True
        ended = step in window.ends or step == 0
        return ended and bool(window.unfinished()) and training.stands()

    def _plan(self, roster: list[int], gone: list[int]) -> Plan:
        told = [self.hear("stand", rank) for rank in roster]
        found = plan_of([Standing.from_message(each["standing"]) for each in told], gone)
        if isinstance(found, PlanRefused):
            raise _RestartAll(found.why)
        if self.recovery.replacement is not None:
            self.recovery.replacement.progress = told[0]["progress"]
        return found

    def save(self, plan: Plan, gone: list[int]) -> None:
        """Have the step saved that the replacements restore, and say so."""
        if plan.step is None:
            return
        training, why = self.recovery.training, ""
        assert training is not None
        if training.step == plan.step:
            self.recovery.recovering = f"step {plan.step} to be saved"
            why = training.save(f"{_named(gone)} was lost", plan.step)
        self.say("saved", why)

    def follow(self, roster: list[int], gone: list[int]) -> Plan:
        """Let a replacement's script restore the step of the plan, and attach; return the plan."""
        replacement, changed = self.recovery.replacement, self.recovery.communicator.changed
        assert replacement is not None
        plan = self._plan(roster, gone)
        if plan.step is None:
            raise _RestartAll("a replacement joins, and no rank was lost")
        before = replacement.plan  # its script goes by it
        if before is not None and _entry(before) != _entry(plan):
            raise _RestartAll(
                f"rank {self.rank} restores step {before.step} before collective {before.base}, and"
                f" step {plan.step} before collective {plan.base} is asked for"
            )
        if not replacement.attached:
            for rank in roster:
                self.hear("saved", rank)
        with changed:
            replacement.plan = plan
            changed.notify_all()
        self.until("the replacement's script to attach", lambda: replacement.attached)
        return plan

    def opened(self) -> AnyLink:
        """Connect to all ranks, on a thread that a newer generation leaves behind."""
        result: list[AnyLink | Exception] = []
        number = self.generation.number

        def run() -> None:
            try:
                result.append(self.recovery.open_link(number))
            except Exception as error:  # noqa: BLE001 - raised below
                result.append(error)

        threading.Thread(target=run, name="lightck-link", daemon=True).start()
        self.until("the connections", lambda: bool(result))
        found = result[0]
        if isinstance(found, Exception):
            raise found
        return found


def standing_of(communicator: Communicator, left: str, step: int) -> Standing:
    """Return where this rank stands; call it under the communicator's lock."""
    window = communicator.window
    every: dict[str, dict[int, Description]] = {"open": {}, "intact": {}, "spoiled": {}}
    unfinished = {id(each) for each in window.unfinished()}
    for each in window:
        kind = "open" if id(each) in unfinished else "intact" if each.is_intact else "spoiled"
        every[kind][each.number] = each.form
    unable = ""
    if left:
        unable = f"has left the training: {left}"
    elif communicator.transfers:
        transfer = communicator.transfers
        unable = f"makes transfers between two ranks ({transfer}), which cannot be repeated"
    elif window.overflown:
        unable = "made more collectives than are kept, or larger ones"
    return Standing(
        communicator.rank,
        step,
        dict(window.starts),
        dict(window.ends),
        **every,
        issued=window.next,
        unable=unable,
    )


def _entry(plan: Plan) -> tuple[Any, ...]:
    """Return where a replacement's program begins by a plan."""
    return plan.step, plan.base, plan.prelude, plan.withheld


def _broadcast(backend: Any, tensor: torch.Tensor, root: int) -> Any:
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = root, 0
    return backend.broadcast([tensor.view(-1).view(torch.uint8)], options)


def _named(ranks: list[int] | Mapping[int, Any]) -> str:
    return "rank(s) " + ", ".join(map(str, ranks)) if ranks else "no rank"
