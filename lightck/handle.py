"""The handle on a running engine: its figures, the calls for the loop, and how it ends."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from lightck.config import Config
from lightck.errors import LightckError
from lightck.events import event
from lightck.failure import triggers
from lightck.failure.jit_save import JitSaver
from lightck.failure.watchdog import WATCHDOG, HandleGuard
from lightck.history.history import checked_metrics
from lightck.inplace import runtime
from lightck.loop.checkpointer import Checkpointer
from lightck.loop.hooks import Hooks
from lightck.loop.policy_state import SavedPolicyState
from lightck.loop.requests import POLL_S, Requests
from lightck.region import failure_region
from lightck.region.region import Region
from lightck.restore import ModelProgress
from lightck.tracing import perfetto
from lightck.types import Failure, Saved, Stats

FAILED_S = 4.0
"""Seconds that a rank whose loop has failed waits for the outcome of its last snapshots over all
ranks. Another rank's failure may be the cause, and then no outcome comes."""
_handles: weakref.WeakSet[Handle] = weakref.WeakSet()


@dataclass(eq=False)
class Components:
    """The parts that attach has put together."""

    config: Config
    region: Region
    checkpointer: Checkpointer
    hooks: Hooks
    progress: ModelProgress
    rescue: JitSaver | None
    """The saver of the last complete step, while the failure path is armed."""
    learned: SavedPolicyState | None
    """The policies' state, from which an attach to the same model goes on; None: there is none."""
    undo: list[Callable[[], object]]
    """The functions that release the parts; the last one is called first."""


def release(undo: list[Callable[[], object]], first: BaseException | None = None) -> None:
    """Undo attach, newest part first, whatever a part raises; then raise the first error."""
    while undo:
        try:
            undo.pop()()
        except BaseException as error:  # noqa: BLE001
            first = first or error
    if first is not None:
        raise first


class Handle:
    """A running engine. Methods are for the training thread unless they say otherwise."""

    def __init__(self, engine: Components) -> None:
        """Take over a complete engine, whose hooks are installed; see `attach`."""
        self.config, self.region = engine.config, engine.region
        self._checkpointer, self._requests = engine.checkpointer, Requests(engine.checkpointer)
        self._reporter = engine.checkpointer.outcomes.reporter
        self._hooks, self._progress = engine.hooks, engine.progress
        self._rescue, self._learned = engine.rescue, engine.learned
        self._guard: HandleGuard | None = None
        """The watchdog's guard of this handle."""
        self._closed = False
        self._failed_at: int | None = None
        """The step at which an exception left the training: no more is saved at the exit."""
        self._pid = os.getpid()
        # The following functions run first: the hooks are removed before the pipeline is stopped.
        self._undo = engine.undo
        self._undo.append(self._leave)
        self._progress.attached.append(self._checkpointer.steps)
        self.stats()
        _handles.add(self)
        atexit.register(self._at_exit)
        triggers.register(self._failed)
        if self._rescue is not None:
            self._watch(self._rescue)
        region = self.region
        takes = f"{region.info.slot_count} slots x {region.slot_bytes} bytes"
        where, size = region.place.path, region.info.size
        survives = self.survives
        placed = self._checkpointer.pipeline.placement.choice
        event(
            "attached",
            path=where,
            step=self.step,
            survives=survives,
            takes=takes,
            bytes=size,
            placement=placed.mode,
            placement_why=placed.why,
        )

    # ---- figures ---------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """Return the last complete step."""
        return self._checkpointer.steps.step

    @property
    def last_captured_step(self) -> int | None:
        """Return the newest step whose copies have all left the live tensors.

        It is not durable yet.
        """
        return self._checkpointer.pipeline.counters.last_captured_step

    @property
    def last_committed_step(self) -> int | None:
        """Return the newest step whose commit record is durable as far as the medium can make it.

        With several ranks it is durable on every one of them, as far as this rank knows.
        """
        if not self._inherited:
            self._checkpointer.poll()
        return self._checkpointer.pipeline.counters.last_committed_step

    @property
    def survives(self) -> str:
        """Return what a committed snapshot survives: "power loss" or "process death"."""
        return self.region.survives

    def stats(self) -> Stats:
        """Return the counters since attach.

        In a forked child they are those that the parent last asked for.

        Thread: any. On the training thread they are current, on others as of the end of the last
            step;
        that neither waits for the training nor delays it.
        """
        if not self._inherited:
            if threading.get_ident() == self._checkpointer.thread:
                self._checkpointer.poll()
            count, seconds, _ = runtime.stats()
            found = self._checkpointer.publisher.collect()
            self._stats = replace(found, recoveries=count, recovering_s=seconds)
        return self._stats

    def trace(self, path: str | os.PathLike[str]) -> Path:
        """Write a trace of what every thread did in the last steps, and return the path.

        The file is for https://ui.perfetto.dev and `lightck timeline`. It can be written after
        `close`, too. This needs `trace=True` at attach, or a file for `close` to write.
        """
        self._require_own()
        return perfetto.save(self._checkpointer.pipeline.trace, Path(path))

    # ---- calls for the loop ----------------------------------------------------------------

    def snapshot(self) -> Future[int]:
        """Take a snapshot of the current state, copied before this returns.

        Between micro-batches, or inside an update, it is taken at the next boundary. The future
        gives the step once the snapshot is committed, or the error. It may be waited for on any
        thread, but on the training thread not before the boundary, which would never come. Where
        readers hold what is free, the error is a RegionBusyError.

        With several ranks every rank calls it at the same step, as with a collective. On a step
        that has a snapshot already, the future is that snapshot's.
        """
        self._require_open()
        self._reporter.surface()
        checkpointer = self._checkpointer
        future: Future[int] = Future()
        future.set_running_or_notify_cancel()  # its snapshot cannot be called back
        checkpointer.outcomes.wanted.append(future)
        if checkpointer.can_open_now():
            self._requests.open_now()
        threading.Thread(
            target=self._await, args=(future,), name="lightck-wait", daemon=True
        ).start()
        return future

    def _await(self, future: Future[int]) -> None:
        while not future.done() and not self._closed:
            self._checkpointer.poll()
            time.sleep(POLL_S)

    def snapshot_now(self, reason: str) -> Saved:
        """Commit the last complete step just in time, wherever the training is.

        Any thread may call it. Inside an update it waits for the update's end, which the training
        thread itself cannot do; other ranks are not asked, and a restart takes the newest step that
        all of them hold. It returns after `close_timeout_s` at the latest; what could not be saved
        is in the result, and not raised.

        Raises:
            LightckError: the handle is closed, or `failure` is off.
        """
        self._require_open()
        if self._rescue is None:
            raise LightckError('snapshot_now needs the failure path: attach with failure="jit"')
        return self._save(reason)

    def wait(self, step: int | None = None, timeout: float | None = None) -> None:
        """Return when every opened snapshot, or one of `step` or newer, is committed.

        Copies that are still held back are made now. If the last step is due, and no snapshot of
        `step` or newer is open, one is opened before the next forward and marked early: restore
        prefers an exact one that is a step older. If it slipped it is taken now, as it was at its
        forward; not with several ranks, where the step cannot commit any more.

        Raises:
            WaitTimeoutError: the time ran out; the commit goes on. Or no such snapshot is open.
            PersistError: no snapshot of `step` or newer is committed, because it failed.
            LightckError: a background failure (with `on_error="raise"`).
        """
        self._require_own()
        self._requests.wait(step, timeout)

    def fence(self) -> None:
        """Return when live tensors may be changed; the engine does this before each update."""
        self._require_open()
        self._checkpointer.fence(None)

    def before_update(self) -> None:
        """Mark the start of an update where no optimizer hook can fire (CUDA graph replay)."""
        self._require_open()
        self._hooks.listener.mark_begin()

    def after_update(self) -> None:
        """Mark the end of an update, which completes a step."""
        self._require_own()
        self._hooks.listener.mark_end()

    def replaced(self, step: int) -> None:
        """Declare that the state was replaced from outside, and is that of `step` now.

        It is for `load_state_dict` in mid-run, or healing from a peer. Open snapshots of the state
        before are given up; later snapshots count from `step`. Between two steps `step` itself can
        be saved; between a forward and its update the next step is the first that can. The snapshot
        that was committed last is kept until a newer one is committed, also when `step` is older.

        With several ranks every rank calls it, before the same forward or update, and `step` is
        newer than what they have.

        Raises:
            ConfigError: `step` is not a number of steps.
            LightckError: an update is half done, or several ranks would go back. PersistError.
        """
        self._require_open()
        self._requests.replaced(step)

    def epoch(self) -> None:
        """Mark the end of an epoch, for policies that count epochs."""
        self._require_own()
        self._checkpointer.due_check.epochs.mark()

    def report(self, **metrics: Any) -> None:
        """Give metrics of the last complete step to the history, such as a validation's loss.

        They belong to the step whose state the model has at the call: call it before the next
        forward of the training begins. If `keep` looks at one of them (`best val_loss`), that
        step is kept, due or not, as soon as it is better: its snapshot is taken at the next
        forward, for which this waits until a slot is free. What is reported twice counts last.

        With several ranks every rank calls it at the same step with the same values.

        Args:
            **metrics: numbers, or tensors of one element; nan is kept, and is no best one.

        Raises:
            ConfigError: a value is no number.
            LightckError: the handle is closed.
        """
        self._require_open()
        self._requests.report(checked_metrics(metrics))

    def detach(self) -> None:
        """Stop: commit opened snapshots, remove the hooks, release the region. Idempotent."""
        if not self._inherited:
            self._shut(last_step=False)
            self._reporter.surface()

    def close(self) -> None:
        """Commit the last complete step, due or not, and detach. Idempotent.

        A snapshot whose copies are made is always finished: this takes as long as the medium's
        sync does, `close_timeout_s` or not. With several ranks every rank calls it, at the same
        step; they wait for each other, `close_timeout_s` at most.

        Raises:
            LightckError: the first background error since attach, once. CoordinationError: the
                last step is not committed on every rank; the message says why.
        """
        if self._inherited:
            return
        closed, region = self._closed, self.region
        self._shut(last_step=True)
        error = self._reporter.take()
        if error is not None:
            raise error
        if not closed:  # the last step is whole on every rank
            failure_region.remove(region)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        signalled = (
            error is not None and self._guard is not None and self._guard.is_from_signal(error)
        )
        if error is None or (triggers.is_success(error) and not signalled):
            self.close()
            return
        self._failed(error)
        try:
            if not self._inherited:
                self._shut(last_step=False, failed=True)
                self._reporter.surface()
        except Exception as ours:  # noqa: BLE001
            error.add_note(f"lightck, while closing: {ours}")

    # ---- failures --------------------------------------------------------------------------

    def _watch(self, rescue: JitSaver) -> None:
        """Begin to listen for signals, hangs and notices."""
        assert rescue.hang is not None
        self._guard = HandleGuard(rescue, rescue.hang, self._reporter, self.region.world)
        WATCHDOG.watch(self._guard)

    def _failed(self, error: BaseException) -> None:
        """Save the last step for an exception that leaves the training; the exception goes on."""
        if self._closed or self._inherited:
            return
        self._checkpointer.publisher.failed(error)
        if self._rescue is None:
            return
        self._failed_at = self.step
        saved = self._save(type(error).__name__)
        try:
            self._checkpointer.iteration_left(error)
        except LightckError as theirs:  # `on_error` raises: the training's exception counts
            error.add_note(f"lightck: {theirs}")
        if self._guard is not None:
            WATCHDOG.await_peers(self._guard)
        if not saved.fresh and not isinstance(error, LightckError):
            error.add_note(f"lightck: the last step is not saved: {saved.why}")
        failure = self.config.failure
        asked = self._guard is not None and self._guard.has_asked_about(error)
        if isinstance(failure, Failure) and failure.on_failure is not None and not asked:
            try:
                failure.on_failure(saved)
            except Exception as theirs:  # noqa: BLE001 - the training's exception counts
                error.add_note(f"lightck: on_failure failed: {theirs!r}")

    def _save(self, reason: str) -> Saved:
        assert self._rescue is not None
        saved = self._rescue.save(reason, time.monotonic() + self.config.close_timeout_s)
        event("saved", logging.WARNING, **asdict(saved))
        return saved

    # ---- inside ----------------------------------------------------------------------------

    @property
    def _inherited(self) -> bool:
        """Return whether this is a forked child: the engine stayed with its parent."""
        return os.getpid() != self._pid

    def _require_own(self) -> None:
        if self._inherited:
            raise LightckError(
                f"the handle belongs to process {self._pid}, its parent: a forked child must not"
                " write"
            )

    def _require_open(self) -> None:
        self._require_own()
        if self._closed:
            raise LightckError(f"the handle on {self.region.place.path} is closed")

    def _shut(self, *, last_step: bool, failed: bool = False) -> None:
        """Stop the engine and undo attach.

        Where the training has failed, other ranks are waited for `FAILED_S` at most, and are told
        nothing if another process goes on in this one's place.
        """
        if self._closed:
            return
        if self._rescue is not None:
            self._rescue.begin_close()
        if last_step:
            runtime.closing()
        checkpointer, deadline = self._checkpointer, time.monotonic() + self.config.close_timeout_s
        parted = min(deadline, time.monotonic() + FAILED_S) if failed else deadline
        replaced = failed and runtime.replaces()
        self._reporter.begin_close()
        requests = self._requests
        if replaced:
            self._undo.append(requests.give_up_for_close)
        else:
            self._undo.append(lambda: requests.settle_for_close(parted, last_step=last_step))
        self._undo.append(lambda: requests.drain_for_close(deadline))
        self._undo.append(requests.finish_last_step if last_step else checkpointer.finish_window)
        if self._guard is not None:
            self._undo.append(partial(WATCHDOG.release, self._guard))
        release(self._undo)

    def _leave(self) -> None:
        self._closed = True
        path, held = self.region.place.path, self.region.memory_bytes
        said: dict[str, Any] = {}
        if held:
            said = {"memory_bytes": held, "until": f"lightck rm {path}"}
        event("closed", path=path, step=self.step, **said)
        triggers.unregister(self._failed)
        self._checkpointer.stop()
        learned = self._learned.text if self._learned is not None else None
        epochs = self._checkpointer.due_check.epochs.marked
        self._progress.left_at(self.step, self._checkpointer.steps, learned, epochs)
        atexit.unregister(self._at_exit)
        _handles.discard(self)

    def _at_exit(self) -> None:
        """Commit what is open when the interpreter exits without close(); begin nothing new.

        With the failure path armed, the last step is saved. If an exception ends the interpreter,
        the step was saved already, and other ranks are waited for no longer than at any failure.
        """
        if self._closed or self._inherited:
            return
        event("exit_without_close", logging.WARNING, step=self.step)
        if self._failed_at == self.step:
            self._shut(last_step=False, failed=True)
            return
        if self._rescue is not None:
            self._save("exit without close")
        self._shut(last_step=False)


def _in_child() -> None:
    """Disable the handles in a forked child, which must not write: its hooks do nothing."""
    for handle in list(_handles):
        handle._checkpointer.stop()
        handle._checkpointer.pipeline.after_fork()
        handle._hooks.disarm_forward()
        handle._progress.attached.clear()


os.register_at_fork(after_in_child=_in_child)
