"""The collectives of one rank, over connections that may break and be made anew.

The training thread calls a collective and waits for its future. If the connections break, the
future stays open: the thread stays where it is, and knows nothing. `Recovery` makes a new link and
has the collectives that are not complete made again on it.

    LIVE       a collective goes to the link, and is complete when gloo says so
    BROKEN     new collectives wait; those under way end with an error, and wait, too
    ALONE      a replacement that sets itself up: every collective is answered here (`setup.py`)
    ENDED      in place is impossible: every open future has raised `why`, and later ones will

Results that another rank has given (`answers`) are taken when the program comes to the collective
of that number.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, Protocol

import torch

from lightck.errors import CoordinationError
from lightck.events import event_aside
from lightck.inplace.operations import (
    UNSPOILED,
    FailedCollective,
    KeptInput,
    Operation,
    State,
    Window,
)
from lightck.inplace.plan import LIBRARY, PROGRAM, Description

DRAIN_S = 30.0
"""Seconds in which collectives on a link that was cut must have ended."""

LOOK = timedelta(seconds=1)
"""Time after which who waits for a collective looks at what else there is: gloo wakes nobody who
waits for a message that is partly written or read where its connection breaks."""

TOGETHER = timedelta(milliseconds=50)
"""Time in which the ends of several collectives are noted at once."""

MOST_ATTEMPTS = 10
"""Attempts after which a collective counts as wrong itself, such as of a dtype that gloo lacks."""

SETUP_MOST = 256
"""Small results of a set-up that are kept for replacements at most."""


class _Thread(threading.local):
    """The thread that asks."""

    completes: bool = False
    """True while it completes a future, and runs what goes on from that."""


_THREAD = _Thread()


def completes() -> bool:
    """Tell whether this thread completes a collective's future, and runs what goes on from it."""
    return _THREAD.completes


class AnyLink(Protocol):
    """A link, as far as the communicator needs it."""

    backend: Any

    def cut(self) -> None:
        """End every collective that is under way."""
        ...


class Answers(Protocol):
    """Answers the collectives of a replacement that sets itself up."""

    def answer(
        self,
        form: Description,
        results: Sequence[torch.Tensor],
        own: Sequence[torch.Tensor],
        *,
        is_whole: bool,
    ) -> None:
        """Put into the results what the collective would have given.

        Raises:
            CoordinationError: that is not known, so that all ranks have to be restarted.
        """
        ...


@dataclass(eq=False)
class Communicator:
    """The collectives of this rank. Any thread; the lock is not held while anything waits."""

    rank: int
    world: int
    setup: Answers | None = None
    """Answers collectives until `join`; None: this is no replacement."""
    window: Window = field(default_factory=Window)
    changed: threading.Condition = field(default_factory=threading.Condition)
    """Guards everything here; notified of what a recovery begins by, not of each collective."""
    ended: str = ""
    """Why recovery in place is impossible; empty while it is not."""
    refused: str = ""
    """Why this rank's program cannot go on in place, until `InPlaceRecovery` has told all and ends
    it; until then its collectives wait. Empty: it can."""
    kept_until: int | None = None
    """The number of the first small result of the set-up that was not kept; None: all were."""
    recovers: bool = False
    """True while a recovery may need what the program's collectives had and have given."""
    transfers: str = ""
    """The kind of a transfer between two ranks that the program has made; empty: none."""
    unfit: str = ""
    """Why what the program does cannot be repeated, noticed as it does it; empty: nothing seen."""
    suspicion: str = ""
    """The error of a collective while no generation has begun for it; empty: none."""
    since_restored: dict[str, str] = field(default_factory=dict)
    """By path that was restored from, the first collective with a result that came since, before
    `keep`; empty: none."""
    commits: bool = True
    """False where ranks make different numbers of updates: `commit` returns at once."""
    _link: AnyLink | None = None
    _answers: dict[int, tuple[Description, list[torch.Tensor]]] = field(default_factory=dict)
    _prelude: dict[int, Description] = field(default_factory=dict)
    """The collectives at which a replacement's program may begin, until it has begun."""
    _withheld: Sequence[Description] = ()
    """Earlier ones, at which it may begin as well, and that nobody can give."""
    _base: int | None = None
    """The first collective behind the forward start that a replacement has not come to yet."""
    _begun: SimpleQueue[Operation | None] = field(default_factory=SimpleQueue)
    """The collectives that were begun on a link and whose ends are waited for; None ends that."""
    _waiter: threading.Thread | None = None
    _libraries_send_models: bool = True
    """False if the program itself has restored: what it has a library send may be of the step."""
    _is_whole: bool = False
    """True once a replacement has restored the job's step: no result of the set-up is of it."""
    _most: int = SETUP_MOST
    """Small results that are kept while none recovers: a set-up's, then none."""

    # ---- for the program ---------------------------------------------------------------------

    def run(
        self,
        form: Description,
        results: list[torch.Tensor],
        start: Callable[[Any], Any],
        *,
        kept: KeptInput = UNSPOILED,
        own: Sequence[torch.Tensor] = (),
        value: Any = None,
    ) -> Operation:
        """Make a collective; returns at once, with what `wait` takes and whose future is then done.

        Args:
            form: of the collective.
            results: the tensors that hold its result.
            start: begins it on a backend, and returns the backend's work.
            kept: its input, if it overwrites that.
            own: what this rank gives to a gathering.
            value: what the future gives.
        """
        with self.changed:
            if self.since_restored and self._most and self._may_be_of_the_state(form):
                first = f"{form.kind} ({form.site})"
                self.since_restored = {at: was or first for at, was in self.since_restored.items()}
            if self.setup is not None and self._is_answered(form, results, own):
                answered = Operation(-1, form, start, results, value=value, state=State.COMPLETE)
                answered.future.set_result(value)
                return answered
            if self._base is not None and not self.refused:
                self._enter(form, self._base)
            if _THREAD.completes:
                self._note_nested(form)
            number = self.window.take_number()
            operation = Operation(number, form, start, results, kept, value=value)
            self.window.add(operation)
            self._begin(operation)
            self._await_end(operation)
        return operation

    def wait(self, operation: Operation) -> None:
        """Wait until a collective is complete, however often it has to be made.

        Raises:
            CoordinationError: recovery in place has ended.
        """
        self._finish(operation)  # at once, where nothing fails: the other thread need not run
        operation.future.wait()

    def between_two(self, kind: str) -> Any:
        """Return the backend for a transfer between two ranks, which is never repeated.

        Raises:
            CoordinationError: there is no link.
        """
        with self.changed:
            self.transfers = self.transfers or kind
            if self._link is None:
                raise CoordinationError(f"{kind}: the connections between the ranks are broken")
            return self._link.backend

    def commit(self, step: int) -> None:
        """Return once every rank has all results of the iteration that makes `step`.

        One collective of one number, after all that were issued before are complete. So where any
        rank has passed it, every rank has all that came before, whatever happens now.
        """
        if not self.commits:
            return
        for operation in self.window.unfinished():
            operation.future.wait()
        token = torch.zeros(1)
        form = Description(f"commit of step {step}", (("float32", (1,)),))
        with self.changed:
            if self.setup is not None:
                return
            start = lambda backend: backend.allreduce([token])  # noqa: E731
            operation = Operation(self.window.take_number(), form, start, [token], commits=step)
            self.window.add(operation)
            self._begin(operation)
        self.wait(operation)

    def forward_started(self, step: int) -> None:
        """Note the forward start of a step.

        A replacement whose program began elsewhere than where it was taken to shows it here, before
        it has a part in any collective.
        """
        with self.changed:
            base, self._base = self._base, None
            if base is not None and not self.refused:
                if self._prelude:  # none of these is at its loop's top
                    self._begin_at(base)
                if self.window.next != base:
                    self._refuse(
                        f"rank {self.rank} replaces one that was lost, and comes to the forward"
                        f" behind step {step} before collective {self.window.next}, the other ranks"
                        f" before {base}: its program does not begin where they are"
                    )
            self.window.forward_started(step)

    # ---- for the recovery --------------------------------------------------------------------

    def restored(self, path: str, *, is_whole: bool, by_integration: bool = False) -> None:
        """Note that the program has restored from a path.

        Args:
            path: from which.
            is_whole: it was the step of a recovery.
            by_integration: lightck's own for a library, which sends nothing then but of its own.
        """
        with self.changed:
            self._libraries_send_models = by_integration
            self.since_restored[path] = ""
            self._is_whole = self._is_whole or is_whole

    def keep(self, *, recovers: bool) -> None:
        """Keep from now on what a recovery needs, or nothing any more."""
        with self.changed:
            self.recovers, self._most = recovers, 0

    def stop_commits(self) -> None:
        """Commit no iteration from now on; every rank has to, between the same two of them."""
        with self.changed:
            self.commits = False

    def detach(self) -> AnyLink | None:
        """Let collectives wait from now on; return the link, to be cut. Under the lock."""
        link, self._link, self.suspicion = self._link, None, ""
        return link

    def interrupt(self) -> None:
        """Break the link: from now on collectives wait. Returns at once."""
        with self.changed:
            link = self.detach()
        if link is not None:
            link.cut()

    def has_drained(self) -> bool:
        """Tell whether no collective is under way any more: their tensors are free of gloo."""
        return not any(each.state is State.FLYING for each in self.window)

    def pass_commit(self, step: int) -> None:
        """Complete the commit of `step` that waits here: another rank has passed it."""
        with self.changed:
            waiting = [each for each in self.window.unfinished() if each.commits == step]
            for each in waiting:
                self._complete(each)
        for each in waiting:
            each.future.set_result(each.value)

    def join(
        self,
        number: int,
        prelude: Mapping[int, Description],
        step: int,
        withheld: Sequence[Description] = (),
    ) -> None:
        """Make collectives with the others from now on, for a replacement whose set-up is over.

        Args:
            number: of the first one.
            prelude: earlier ones, one of which its program may make first.
            step: the step that it has restored.
            withheld: still earlier ones, which it may make first as well, and nobody can give.
        """
        with self.changed:
            self.setup, self._prelude, self._base = None, dict(prelude), number
            self._withheld = withheld
            self.window.go_on_from(number)
            self.window.note_commit(step)
            self.window.joined(step, min(prelude, default=number))

    def give(self, number: int, form: Description, given: list[torch.Tensor]) -> None:
        """Take a result that another rank has given, now or when the program comes to it."""
        with self.changed:
            if self.refused:
                return
            operation = self.window.get(number)
            if operation is None:
                if number >= self.window.next or number in self._prelude:
                    self._answers[number] = form, given
                return
            if operation.state is State.COMPLETE:
                return
            complete = self._answered(operation, form, given)
            self.changed.notify_all()
        # What goes on from the future may wait for collectives, which wait for this recovery.
        threading.Thread(target=complete, name="lightck-given", daemon=True).start()

    def resume(self, link: AnyLink) -> None:
        """Make the collectives that are not complete again on a new link, then all later ones.

        Raises:
            CoordinationError: the input of one is not there any more, it fails every time, or the
                program does what cannot be repeated.
        """
        with self.changed:
            if self.unfit:
                raise CoordinationError(self.unfit)
            for operation in self.window.unfinished():
                if operation.attempt >= MOST_ATTEMPTS:
                    form = operation.form
                    raise CoordinationError(
                        f"collective {operation.number} ({form.kind} {form.tensors}, {form.site})"
                        f" has failed {operation.attempt} times: {operation.error}"
                    )
            self._link = link
            for operation in self.window.unfinished():
                if operation.attempt and not operation.kept.put_back():
                    self._link = None
                    raise CoordinationError(
                        f"the input of collective {operation.number} ({operation.form.kind}) has"
                        " changed since, so that it cannot be made again"
                    )
            for operation in self.window.unfinished():
                self._begin(operation)
                self._await_end(operation)
            self.changed.notify_all()

    def end(self, why: str) -> None:
        """Give up recovery in place: every open collective raises the reason, and later ones."""
        with self.changed:
            self.ended = self.ended or why
            open_ones = self.window.unfinished()
            for each in open_ones:
                each.completed()
            self.changed.notify_all()
        self.interrupt()
        self._begun.put(None)
        for each in open_ones:
            each.future.set_exception(FailedCollective(f"recovery in place: {why}"))

    # ---- inside ------------------------------------------------------------------------------

    def _begin(self, operation: Operation) -> None:
        """Begin a collective on the link, or take its given result; under the lock."""
        if self.ended:
            operation.completed()
            operation.future.set_exception(FailedCollective(self.ended))
        elif self.refused:
            operation.wait_for_link()
        elif (answer := self._answers.pop(operation.number, None)) is not None:
            self._answered(operation, *answer)()
        elif self._link is None:
            operation.wait_for_link()
        else:
            try:
                operation.begin(self._link.backend)
            except RuntimeError as error:
                operation.failed(str(error) or repr(error))
                self._suspect(operation.error)

    def _await_end(self, operation: Operation) -> None:
        """Have the other thread wait for the end of a collective; under the lock."""
        if operation.state is not State.FLYING:
            return
        if _THREAD.completes:
            # This thread may be the other one, and wait for the collective.
            name = "lightck-nested"
            threading.Thread(target=self._finish, args=[operation], name=name, daemon=True).start()
            return
        self._begun.put(operation)
        if self._waiter is None:
            self._waiter = threading.Thread(
                target=self._await_ends, name="lightck-collectives", daemon=True
            )
            self._waiter.start()

    def _await_ends(self) -> None:
        """Wait for the collectives that were begun, for who looks at nothing but their futures.

        On a thread of its own: a callback would hold up gloo's threads, and with them the next
        collectives, until the training thread lets go of Python's lock. The ends of those that are
        under way together are noted together, once the last is complete: each time that two threads
        want that lock costs more than a collective's own Python. But not for long: who waits for
        the first may be the one that others need before they make the last. Where the first never
        ends, the errors of later ones are noted all the same.
        """
        pending: list[Operation] = []
        while True:
            begun = [] if pending else [self._begun.get()]
            while not self._begun.empty():
                begun.append(self._begun.get())
            pending += [each for each in begun if each is not None]
            if None in begun:
                return
            del begun
            if len(pending) > 1 and (work := pending[-1].work) is not None:
                with contextlib.suppress(Exception):  # too late, or it has failed: seen below
                    work.wait(TOGETHER)
                del work  # it keeps the link
            pending = self._without_ended(pending)

    def _without_ended(self, operations: Sequence[Operation]) -> list[Operation]:
        """Note the ends of collectives; return those that have none, a while after the first."""
        found: list[Operation] = []
        for each in operations:
            if not self._has_ended(each, None if found else LOOK):
                found.append(each)
        return found

    def _finish(self, operation: Operation) -> None:
        """Wait until the attempt that is under way has come to its end, and note how."""
        while not self._has_ended(operation, LOOK):
            pass  # it goes on, and nobody has ended recovery in place

    def _has_ended(self, operation: Operation, patience: timedelta | None) -> bool:
        """Note how the attempt that is under way has come to its end; False if it has not."""
        with self.changed:
            attempt, work = operation.attempt, operation.work
        if work is None:
            return True
        why = error_of(work, patience)
        with self.changed:
            if operation.state is not State.FLYING or operation.attempt != attempt:
                return True
            if why is None:
                return False
            if not why:
                self._complete(operation)
            else:
                operation.failed(why)
                if self._link is not None:
                    self._suspect(why)
        if not why:
            _complete_future(operation)
        return True

    def _answered(
        self, operation: Operation, form: Description, given: list[torch.Tensor]
    ) -> Callable[[], None]:
        """Take a given result, under the lock; return what completes the future, without it."""
        if form == operation.form:
            operation.completed()
            operation.take(given)
            self._complete(operation)
            return lambda: _complete_future(operation)
        self._refuse(
            f"collective {operation.number} is {operation.form.kind} {operation.form.tensors} here"
            f" ({operation.form.site}), and was {form.kind} {form.tensors} on the other ranks"
            f" ({form.site}): the program does not begin where they are"
        )
        return lambda: None

    def _note_nested(self, form: Description) -> None:
        """Note that what goes on from one future has made another collective; under the lock.

        It comes on a thread of its own, beside the program's next ones: in another order on each
        rank, so that no number names it.
        """
        if not self.unfit:
            self.unfit = (
                f"a callback of a collective's future, as of a comm hook, makes another collective"
                f" ({form.kind} {form.tensors}), in no order that a replacement could keep"
            )
            self.changed.notify_all()

    def _complete(self, operation: Operation) -> None:
        """Note that a collective is complete; under the lock."""
        operation.completed()
        if operation.commits:
            # Here and not where training waits: a recovery counts it before training goes on.
            self.window.note_commit(operation.commits)
        if self.recovers:
            operation.seal()
            self.window.bound(operation)
        elif not self.window.keeps(operation, self._most):
            self.window.forget(operation.number)
            if self._most and (operation.is_small or operation.form.maker == PROGRAM):
                before = self.kept_until
                number = operation.number
                self.kept_until = number if before is None else min(before, number)

    def _is_answered(
        self, form: Description, results: list[torch.Tensor], own: Sequence[torch.Tensor]
    ) -> bool:
        """Answer a collective of a replacement's set-up; False if it waits for its refusal."""
        assert self.setup is not None
        if not self.ended and not self.refused:
            if self._is_whole and self._may_be_of_the_state(form):
                self._refuse(
                    f"rank {self.rank} replaces one that was lost, and makes {form.kind}"
                    f" ({form.site}) between restore and attach, whose result is not that of the"
                    " step that it has restored: make it before restore"
                )
                return False
            try:
                self.setup.answer(form, results, own, is_whole=self._is_whole)
            except CoordinationError as why:
                self._refuse(str(why))
            else:
                return True
        return False

    def _may_be_of_the_state(self, form: Description) -> bool:
        """Tell whether what a set-up sends may depend on what was restored."""
        of_program = form.maker == PROGRAM
        of_library = form.maker == LIBRARY and not self._libraries_send_models
        return (of_program or of_library) and bool(form.tensors or not form.shared)

    def _refuse(self, why: str) -> None:
        """Have all ranks restarted; under the lock.

        The other thread tells all before it ends the collectives here: else this process might end,
        and be replaced by another that comes no further.
        """
        self.refused = self.refused or why
        self.changed.notify_all()

    def _suspect(self, why: str) -> None:
        if not self.suspicion:
            self.suspicion = why.splitlines()[0]
            # Under the lock: a full pipe must not hold it.
            event_aside("connection_lost", logging.WARNING, rank=self.rank, why=self.suspicion)
        self.changed.notify_all()

    def _enter(self, form: Description, base: int) -> None:
        """Find where a replacement's program is, by a collective before its first forward.

        It is one of the prelude, or nobody knows what it should give: the others are past it.
        """
        if not self._prelude and self.window.next < base:
            return  # it has begun: numbers tell the others
        every = [*self._prelude.items(), *((None, each) for each in self._withheld)]
        alike = [(number, each) for number, each in every if each == form]
        found = [number for number, each in alike if each.site == form.site]
        # The callers may differ by rank, the helper hardly does.
        found = found or [number for number, each in alike if each.line == form.line]
        if len(found) == 1 and found[0] is not None:
            self._begin_at(found[0])
            return
        why = "which the other ranks did not make between the last step and this forward"
        if None in found:
            why = "and the other ranks made one like it whose result nobody can give"
        elif found:
            numbers = ", ".join(map(str, found))
            why = f"and the other ranks made it as collectives {numbers}: which of these it is"
            why += " cannot be told"
        self._refuse(
            f"rank {self.rank} replaces one that was lost, and makes {form.kind} {form.tensors}"
            f" ({form.site}) before its first forward, {why}"
        )

    def _begin_at(self, number: int) -> None:
        """Let a replacement's program begin at a collective; it needs no results before that."""
        self._prelude = {}
        self.window.go_on_from(number)
        for early in [each for each in self._answers if each < number]:
            del self._answers[early]


def error_of(work: Any, patience: timedelta | None) -> str | None:
    """Return the error of a work that has ended, "" if it has none; None: it has not ended.

    Args:
        work: a backend's.
        patience: how long its end is waited for; None: not at all (0 would be for ever).
    """
    if patience is None and not work.is_completed():
        return None
    try:
        work.wait(patience or LOOK)
        return ""
    except Exception:  # noqa: BLE001 - whatever gloo raises, and that the time is over
        if not work.is_completed():
            return None
    try:
        work.wait()
        return ""
    except Exception as error:  # noqa: BLE001 - the error itself would keep the link
        return str(error) or repr(error)


def _complete_future(operation: Operation) -> None:
    """Complete the future of a complete collective, and run what goes on from it; hold no lock."""
    before, _THREAD.completes = _THREAD.completes, True
    try:
        operation.future.set_result(operation.value)
    finally:
        _THREAD.completes = before


def flat(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return contiguous tensors with the same values, which gloo can send."""
    return [each.detach().contiguous() for each in tensors]
