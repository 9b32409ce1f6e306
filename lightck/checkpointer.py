"""The composition root: `attach` wires state, region, pipeline and hooks, and gives the handle."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from torch import nn
from torch.optim import Optimizer

from lightck.capture import predict
from lightck.capture.counted import stats_of
from lightck.capture.extras import is_loader, parse
from lightck.capture.hooks import Hooks, Watched
from lightck.capture.instants import Instants
from lightck.capture.layer_recorder import Kinds
from lightck.capture.optimizer import install_pending, tell_unfilled
from lightck.capture.pipeline import layer_count
from lightck.capture.release import schedule
from lightck.capture.report import Reporter
from lightck.capture.sight import Sight
from lightck.capture.staging import tell_synchronous
from lightck.capture.state import Inventory
from lightck.capture.steps import Steps
from lightck.capture.waiting import POLL_S, drain_for_close, wait
from lightck.config import Config
from lightck.errors import LightckError, WaitTimeoutError
from lightck.events import event
from lightck.region.claim import claim
from lightck.restore import as_list, as_module, progress
from lightck.types import Policy, Stats


class _EveryStep(int):
    """The default policy, told apart from a given 1 so that a config file can say otherwise."""


EVERY_STEP = _EveryStep(1)
_handles: weakref.WeakSet[Handle] = weakref.WeakSet()


def attach(
    model: nn.Module | Sequence[nn.Module],
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    path: str | os.PathLike[str] | None = None,
    *,
    policy: int | Policy = EVERY_STEP,
    extras: Mapping[str, Any] | None = None,
    boundary: Optimizer | None = None,
    config: Config | str | Path | None = None,
    **settings: Any,
) -> Handle:
    """Checkpoint a training job from now on, in the background, layer by layer.

    On return the region is allocated and owned, a new timeline is durable, and hooks are installed;
    nothing is captured yet. The model, its optimizers (found when they first step, unless given),
    the random generators and `extras` make up a snapshot.

    Args:
        model: a module, or several.
        optimizer: one or several.
        path: folder for the region (made if only its last part is missing), a libpmemobj pool
            or a devdax device; default `$LIGHTCK_PATH`, else `./lightck-run`.
        policy: a snapshot every so many steps, or a policy object.
        extras: name to object: state_dict/load_state_dict, generators, dicts of counters.
        boundary: the optimizer that ends a step, when several step at different rates.
        config: a `Config`, a TOML file or the name of a preset.
        **settings: any field of `Config`; they take precedence.

    Returns:
        The handle; a context manager.

    Raises:
        ConfigError, StateError: a setting or some state that could not be restored; its name.
        UnrestoredError: snapshots are there that were not restored; nothing was overwritten.
        RegionFullError: bytes needed and free. RegionBusyError: another process owns the region.
        RegionError: the place is not safe, not writable or not a region.

    Thread: the training thread; may block on the medium.
    """
    given = {} if policy is EVERY_STEP else {"policy": policy}
    resolved = Config.resolve(config, path=path, **given, **settings)
    root = as_module(model)
    return Handle(root, as_list(optimizer), resolved, extras, boundary)


class Handle:
    """A running engine. Methods are for the training thread unless they say otherwise."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: list[Optimizer],
        config: Config,
        extras: Mapping[str, Any] | None,
        ends_step: Optimizer | None,
    ) -> None:
        """See `attach`."""
        self.config = config
        self._closed = False
        self._undo: list[Callable[[], object]] = []
        self._pid = os.getpid()
        self._reporter = Reporter(config.on_error)
        self._progress = progress(model)
        if ends_step is not None and not any(ends_step is o for o in optimizers):
            optimizers = [*optimizers, ends_step]
        inventory = Inventory(model, [], parse(extras))
        watched = Watched(model)
        watched.refresh()
        now = max((s.step for s in self._progress.attached), default=self._progress.step)
        steps = Steps(step=now, settled=bool(optimizers))
        for each in optimizers:
            inventory.optimizers.append(each)
            steps.add()
        steps.boundary = optimizers.index(ends_step) if ends_step is not None else None
        # A parameter that no given optimizer holds may have one of its own, found when it steps.
        steps.settled = ends_step is not None or inventory.covered()
        for i, each in enumerate(optimizers):
            install_pending(self._progress.pending, i, each, inventory.names())
        tell_unfilled(self._progress.pending)
        kinds = Kinds.of(config.update, model, inventory, ends_step is not None)
        tell_synchronous(inventory.collect().lives, config.sync_warn_bytes)
        entries, manifest_bytes = predict.expected(inventory)
        self.region = claim(config, entries, manifest_bytes)
        self._undo.append(self.region.close)
        try:
            self._wire(inventory, watched, steps, kinds)
        except BaseException as error:
            self._release(error)

    def _wire(self, inventory: Inventory, watched: Watched, steps: Steps, kinds: Kinds) -> None:
        config, region = self.config, self.region
        collected = inventory.collect()
        release = schedule(config.schedule, layer_count(inventory.everything()))
        pipeline = kinds.pipeline.start(region, release, config)
        self._recorder = recorder = kinds.recorder(
            inventory=inventory,
            instants=Instants(inventory),
            pipeline=pipeline,
            steps=steps,
            cadence=kinds.due(config.policy),
            watched=watched,
            report=self._reporter,
            settled=steps.settled,
            on_found=lambda i, new: install_pending(
                self._progress.pending, i, new, inventory.names()
            ),
            surface=self._reporter.surface,
        )
        self._sight = sight = Sight(config, recorder, self._reporter, watched)
        self._undo += [sight.write_wanted, self._stop, sight.ended]
        pipeline.on_torn = sight.torn
        loaders = tuple(e.subject for e in inventory.extras if is_loader(e.subject))
        self._hooks = Hooks(sight.listener, watched, loaders)
        recorder.arm = lambda on: self._hooks.arm_forward() if on else self._hooks.disarm_forward()
        self._undo += [kinds.stop, self._hooks.remove, sight.remove]
        recorder.start()
        recorder.check_state(collected)
        region.begin_timeline(region.continued)
        self._hooks.install()
        sight.install()
        self._undo.append(self._leave)
        self._progress.attached.append(steps)
        self.stats()
        _handles.add(self)
        atexit.register(self._at_exit)
        event("attached", path=region.place.path, step=self.step, survives=self.survives)

    # ---- what it says ----------------------------------------------------------------------

    @property
    def step(self) -> int:
        """The last complete step."""
        return self._recorder.steps.step

    @property
    def last_captured_step(self) -> int | None:
        """Newest step whose copies have all left the live tensors; not durable yet."""
        return self._recorder.pipeline.counters.last_captured_step

    @property
    def last_committed_step(self) -> int | None:
        """Newest step whose commit record is durable on the medium's own terms."""
        if not self._inherited:
            self._recorder.poll()
        return self._recorder.pipeline.counters.last_committed_step

    @property
    def survives(self) -> str:
        """What a committed snapshot outlives: "power loss" or "process death"."""
        return self.region.survives

    def stats(self) -> Stats:
        """Counters since attach, as of now; in a forked child, what the parent last asked for."""
        if not self._inherited:
            self._recorder.poll()
            self._stats = stats_of(self._recorder)
        return self._stats

    def trace(self, path: str | os.PathLike[str]) -> Path:
        """Write what every thread did in the last steps; returns the path.

        For https://ui.perfetto.dev and `lightck timeline`; also after `close`. Needs `trace=True`,
        or a file for `close` to write, at attach.
        """
        self._require_own()
        return self._sight.write(Path(path))

    # ---- what the loop may call ------------------------------------------------------------

    def snapshot(self) -> Future[int]:
        """A snapshot of the current state, copied before this returns.

        Between micro-batches, or inside an update, it waits for the next boundary. The future gives
        the step once the snapshot is committed, or the error. It may be waited for on any thread,
        but on the training thread not before the boundary: that would never come.
        """
        self._require_open()
        self._reporter.surface()
        recorder = self._recorder
        future: Future[int] = Future()
        future.set_running_or_notify_cancel()  # its snapshot cannot be called back
        recorder.wanted.append(future)
        if recorder.can_open_now():
            recorder.open_now()
        threading.Thread(
            target=self._await, args=(future,), name="lightck-wait", daemon=True
        ).start()
        return future

    def _await(self, future: Future[int]) -> None:
        while not future.done() and not self._closed:
            self._recorder.poll()
            time.sleep(POLL_S)

    def wait(self, step: int | None = None, timeout: float | None = None) -> None:
        """Return when every opened snapshot, or one of `step` or newer, is committed.

        Copies that are still held back are made now. If the last step is due, and none of `step` or
        newer is open, it is opened before its forward and marked early: restore prefers an exact
        one that is a step older.

        Raises:
            WaitTimeoutError: the time ran out; the commit goes on. Or no such snapshot is open.
            PersistError: none of `step` or newer is committed, because it failed.
            LightckError: a background failure (with `on_error="raise"`).
        """
        self._require_own()
        wait(self._recorder, self._reporter, step, timeout)

    def fence(self) -> None:
        """Return when live tensors may be changed; the engine does this before each update."""
        self._require_open()
        self._recorder.fence(None)

    def before_update(self) -> None:
        """Mark the start of an update where no optimizer hook can fire (CUDA graph replay)."""
        self._require_open()
        self._sight.listener.mark_begin()

    def after_update(self) -> None:
        """Mark the end of an update: it completes a step."""
        self._require_own()
        self._sight.listener.mark_end()

    def epoch(self) -> None:
        """Mark the end of an epoch, for policies that count epochs."""
        self._require_own()
        self._recorder.cadence.epoch += 1

    def detach(self) -> None:
        """Stop: opened snapshots are committed, hooks removed, the region released. Idempotent."""
        if not self._inherited:
            self._shut(last_step=False)
            self._reporter.surface()

    def close(self) -> None:
        """Commit the last complete step, due or not, and detach. Idempotent.

        A snapshot whose copies are made is always finished: this takes as long as the medium's
        sync does, `close_timeout_s` or not.

        Raises:
            LightckError: the first background error since attach, once.
        """
        if self._inherited:
            return
        self._shut(last_step=True)
        error = self._reporter.take()
        if error is not None:
            raise error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
            return
        try:
            self.detach()
        except Exception as ours:  # noqa: BLE001
            error.add_note(f"lightck, while closing: {ours}")

    # ---- inside ----------------------------------------------------------------------------

    @property
    def _inherited(self) -> bool:
        """This is a forked child: the engine stayed with its parent."""
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

    def _shut(self, *, last_step: bool) -> None:
        if self._closed:
            return
        recorder, deadline = self._recorder, time.monotonic() + self.config.close_timeout_s
        self._reporter.closing = True
        self._undo.append(lambda: drain_for_close(recorder, deadline))
        self._undo.append(recorder.finish_last_step if last_step else recorder.finish_window)
        self._release()

    def _release(self, first: BaseException | None = None) -> None:
        """Undo attach, newest part first, whatever a part raises; the first error is raised."""
        while self._undo:
            try:
                self._undo.pop()()
            except BaseException as error:  # noqa: BLE001
                first = first or error
        if first is not None:
            raise first

    def _leave(self) -> None:
        self._closed = True
        self._recorder.enabled = False
        self._progress.step = self.step
        self._progress.attached.remove(self._recorder.steps)
        atexit.unregister(self._at_exit)
        _handles.discard(self)

    def _stop(self) -> None:
        pipeline, closed = self._recorder.pipeline, WaitTimeoutError("the handle was closed")
        with self._recorder.lock:  # the thread of a future may be polling
            flights = [*pipeline.persisting, *filter(None, [pipeline.window])]
            try:
                pipeline.close()
            finally:
                for flight in flights:
                    flight.fail(closed)
                self._recorder.fail_wanted(closed)

    def _at_exit(self) -> None:
        """The interpreter exits without close(): commit what is open, begin nothing new."""
        if not self._closed and not self._inherited:
            event("exit_without_close", logging.WARNING, step=self.step)
            self._shut(last_step=False)


def _in_child() -> None:
    """A forked child must not write: its handles are dead, its hooks do nothing."""
    for handle in list(_handles):
        handle._recorder.enabled = False
        handle._recorder.lock = threading.RLock()  # another thread of the parent may hold the old
        handle._hooks.disarm_forward()
        handle._progress.attached.clear()


os.register_at_fork(after_in_child=_in_child)
