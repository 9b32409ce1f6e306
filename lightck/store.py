"""Keep plain state dicts in a region, so that `torch.save(state, file)` becomes one line.

    Store.save -> state_tree.taken -> Pipeline.open, fence -> commit in the background -> future
    Store.load -> what lightck.load reads -> state_tree.joined

The second composition root beside `attach`: region, pipeline and commit are the same. There is no
loop to follow here, so that the caller says what is saved and when it may change.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, SupportsIndex

from lightck.config import Config
from lightck.errors import (
    ConfigError,
    CorruptSnapshotError,
    LightckError,
    NoSnapshotError,
    RegionBusyError,
    RegionError,
    RegionIOError,
    TornSnapshotError,
)
from lightck.events import event
from lightck.history import item
from lightck.history.history import (
    HELD_S,
    History,
    checked_metrics,
    history_of,
    leave_behind,
)
from lightck.load import load_owned
from lightck.pipeline.commit_barrier import SingleProcessBarrier
from lightck.pipeline.pipeline import InflightSnapshot, Pipeline
from lightck.pipeline.schedule import Eager
from lightck.reader.assembly import AssembledSnapshot
from lightck.region import allocator, claim, location
from lightck.region.backends.select import is_blank
from lightck.region.region import Candidate, Continuation, Recovery, Region, open_and_recover
from lightck.region.stats_page import NO_STEP, Page
from lightck.state import boundary_blob, rng, state_tree, tensor_layout
from lightck.state.arguments import refuse_unknown
from lightck.state.inventory import CollectedState
from lightck.state.state_tree import StateTree

_SETTINGS = (
    *("slots", "threads", "chunk_bytes", "priority", "placement", "write_limit", "backend"),
    *("durability", "numa_node", "proof", "keep"),
)
"""The settings that a store has; the others are about a training loop."""
_UNASKED_S = 1.0
"""Seconds after which a save is captured by who follows it: a callback, or asyncio, asks nobody."""
_POLL_S = 0.002
_MOST = 1 << 62


class SaveFuture(Future[int]):
    """The future of one save: its step once it is committed, or the error that it has met."""

    def __init__(self, writer: _Writer) -> None:
        """Begin to wait for a save of `writer`."""
        super().__init__()
        self._writer = writer
        self.asked = False
        """True once somebody has asked for the result: an error is told."""
        self.set_running_or_notify_cancel()  # its snapshot cannot be called back

    def staged(self) -> None:
        """Return when the caller may change the tensors: every copy has left them.

        What changed before makes the save fail: `result` raises it. Any thread may call it.
        """
        self._writer.fence()

    def result(self, timeout: float | None = None) -> int:
        """Return the step once it is committed: durable as far as the medium can make it.

        Raises:
            TornSnapshotError: tensors changed before `staged()`; the snapshot before is kept.
            LightckError: what else the save has met. TimeoutError: it is not committed yet.
        """
        self.staged()
        self.asked = True
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return the error that the save has met, or None once it is committed."""
        self.staged()
        self.asked = True
        return super().exception(timeout)


class Store:
    """A folder (pool, device) that keeps the newest state dicts that it is given.

    What calls `torch.save(state, file)` and `torch.load(file)` becomes `store.save(state, step)`
    and `store.load()`; the copy is made at the speed of memory, and a crash at any instant leaves
    an older state dict whole. Nothing is opened or made before the first call, and a store that
    only loads owns nothing: the first `save` owns the region until `close`, or until the store is
    gone, which finish what is under way.

    One process saves to a path, as with a file. With several ranks either one of them saves, or
    each has a path of its own (`Store(f"run/rank-{rank}")`); no rank waits for another.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        config: Config | str | os.PathLike[str] | None = None,
        **settings: Any,
    ) -> None:
        """Check the settings, and that what is at `path`, if anything, is a store's.

        Args:
            path: folder of the region (made if only its last part is missing), a libpmemobj pool or
                a devdax device; not that of a training (`attach`).
            config: a `Config`, a TOML file or the name of a preset.
            **settings: `slots` (the newest whole state dicts, and one to write: 2), `threads`,
                `chunk_bytes`, `priority`, `placement`, `write_limit`, `backend`, `durability`,
                `numa_node`, `proof` and `keep` (the history, as for `lightck.attach`) of `Config`.

        Raises:
            ConfigError: a setting is unknown or impossible.
            RegionError: the place is not safe, not a region, or a training's.
        """
        refuse_unknown("Store", settings, ("path", "config", *_SETTINGS))
        if config is not None and not isinstance(config, Config | str):
            config = os.fspath(config)
        self._config = Config.resolve(config, path=path, **settings)
        self._writer = _Writer(self._config)
        # At the interpreter's exit, too: what was saved is committed.
        self._end = weakref.finalize(self, self._writer.close)
        self._candidates()

    def save(
        self,
        state: Any,
        step: int,
        *,
        wait: bool = True,
        metrics: Mapping[str, float] | None = None,
    ) -> SaveFuture:
        """Save a state dict; on return its tensors may be changed, as after `torch.save`.

        The copies are made before this returns, by all threads of the store and this one. Checksums
        and the commit follow in the background, and the future tells of them. Until then the newest
        older state dict is protected. At most one save is under way with two slots: the next waits
        for its commit.

        A step that is not newer than the last one's replaces what came after it: `load()` gives
        what was saved last.

        Args:
            state: nested dicts, lists and tuples of tensors, numbers, strings, bytes, NumPy values,
                sets and deques. Tensors are dense, and come back on the CPU, without gradients;
                those of one memory and form come back as one tensor.
            step: its number, by which it is found again.
            wait: False returns while the copies run. The tensors must then not change before
                `staged()` has returned; if they do, this save fails and the one before is kept.
            metrics: by which `keep="best val_loss"` chooses, `{"val_loss": 0.3}`.

        Returns:
            The future of the commit.

        Raises:
            StateError: a value would not come back as it is; its path is named.
            RegionFullError: bytes needed and free; what was saved is kept.
            RegionBusyError: another process saves here, or readers hold every slot.
            ConfigError: `step` is not a number of steps. CorruptSnapshotError: nothing that is
                there is whole. LightckError: the region failed before, or the store is closed.

        Thread: any, one at a time; the copies are of the moment of the call.
        """
        number = _checked_step(step)
        measured = checked_metrics(metrics or {})
        return self._writer.save(state_tree.taken(state), number, measured, wait=wait)

    def staged(self) -> None:
        """Return when the caller may change the tensors of every save so far."""
        self._writer.fence()

    def load(self, step: int | Literal["latest"] = "latest") -> Any:
        """Return a state dict that was saved, in memory of its own, every byte checked.

        Where the newest is damaged, the older one is returned, with the event `fell_back`. It may
        be called beside a process that saves. See `lightck.load` for tensors that are mapped, not
        read: `lightck.load(path)["extras"]["state"]`.

        Raises:
            NoSnapshotError: there is none, or none is whole.
            RegionError: the place is not safe, not a region, or a training's.
        """
        wanted: int | Literal["latest"] = "latest" if step == "latest" else _checked_step(step)
        if not self._candidates() and wanted == "latest":
            wanted = next(iter(self.steps()), wanted)  # the region is lost, its history is there
        extras = load_owned(self._config.path, wanted)["extras"]
        return state_tree.joined(extras)

    def steps(self) -> list[int]:
        """Return the steps that are whole, the one that was saved last first.

        Those of the history come behind, the newest first. Checksums of payloads are checked by
        `load`.
        """
        kept = [
            each.kept.step for each in item.every_item(Path(self._config.path)) if each.is_whole
        ]
        found = [each.record.step for each in self._candidates()]
        return list(dict.fromkeys([*found, *sorted(kept, reverse=True)]))

    def hold(self, step: int) -> ExitStack:
        """Keep a state dict that was saved from being replaced, until the result is closed.

        A context manager. What is held takes a slot: with `slots=` of n, n - 1 can be held and
        saved beside. It is kept by this process only, and ends with it.

        Raises:
            NoSnapshotError: there is no such step. RegionBusyError: it is being replaced.
        """
        with ExitStack() as held:
            found = self._opened()
            if found is not None:
                held.callback(found[0].close)
                for each in found[1].candidates:
                    if each.record.step == step:
                        AssembledSnapshot.of([(found[0], each)]).lease(held)
                        return held.pop_all()
            there = [each.record.step for each in found[1].candidates] if found else "nothing"
            raise NoSnapshotError(f"{self._config.path}: no step {step} to hold; there: {there}")

    def close(self) -> None:
        """Commit what is under way and give up the region. Idempotent.

        Raises:
            LightckError: the first error of a save whose future nobody has asked.
        """
        self._end()
        self._writer.raise_untold()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except LightckError as ours:
            if error is None:
                raise
            error.add_note(f"lightck, while closing: {ours}")

    def _candidates(self) -> tuple[Candidate, ...]:
        """Return the snapshots that are there, best first; none if nothing is."""
        found = self._opened()
        if found is None:
            return ()
        found[0].close()
        return found[1].candidates

    def _opened(self) -> tuple[Region, Recovery] | None:
        """Open the region for reading, which the caller closes; None if there is none.

        Raises:
            RegionError: it is a training's.
        """
        where = location.locate(self._config.path, 0, create=False, backend=self._config.backend)
        if not where.exists or is_blank(where):
            return None
        region, recovery = open_and_recover(where)
        try:
            claim.check_kind(region, of_store=True)
        except RegionError:
            region.close()
            raise
        return region, recovery


def _checked_step(step: object) -> int:
    if isinstance(step, SupportsIndex) and not isinstance(step, bool) and 0 <= int(step) < _MOST:
        return int(step)
    raise ConfigError(f"step = {step!r}: must be the number of a step, 0 or more")


@dataclass(eq=False)
class _Writer:
    """Owns the region from the first save to the close. For any thread."""

    config: Config
    _pid: int = field(default_factory=os.getpid)
    _saving: threading.RLock = field(default_factory=threading.RLock)
    """Held by whoever saves or closes, before the pipeline's own lock."""
    _pipeline: Pipeline | None = None
    """The pipeline into the region; None before the first save and after the close."""
    _page: Page | None = None
    _history: History | None = None
    _closed: bool = False
    _last: int = -1
    """The newest step of the timeline; -1: it has none."""
    _failed: list[SaveFuture] = field(default_factory=list)

    def save(
        self, tree: StateTree, step: int, metrics: Mapping[str, float], *, wait: bool
    ) -> SaveFuture:
        """Open the snapshot of a step, and capture it if told to `wait`; see `Store.save`."""
        self._require_own()
        first = {"rng": rng.capture(), "extras": {}}
        second = {"optimizers": [], "extras": tree.extras, "step": step}
        blobs = boundary_blob.closed(first), boundary_blob.closed(second)
        with self._saving:
            if self._closed:
                raise LightckError(f"the store on {self.config.path} is closed")
            pipeline = self._pipeline or self._begin(tree, sum(map(len, blobs)))
            self.fence()
            self._make_way(pipeline, step)
            if self._history is not None and metrics:
                self._history.report(step, metrics)
            future = SaveFuture(self)
            with pipeline.lock:
                pipeline.prepare(tree.lives, sum(map(len, blobs)), step)
                opened = pipeline.open(step, CollectedState(tree.lives, second), *blobs)
                if isinstance(opened, str):
                    raise RegionBusyError(
                        f"{self.config.path}: step {step} is not saved: {opened}; readers"
                        " (lightck.load) hold what they have mapped: give the store more slots, or"
                        " let go of what was loaded"
                    )
                self._last = step
                opened.add_futures([future])
                if wait or opened.captured:
                    self.fence()
        threading.Thread(
            target=self._follow, args=(future,), name="lightck-store", daemon=True
        ).start()
        return future

    def _begin(self, tree: StateTree, boundary_bytes: int) -> Pipeline:
        """Own the region, made if it is not there, and begin a timeline that goes on from it."""
        item.require_run(self.config.path)
        found = claim.find(self.config, 0, Continuation(), of_store=True)
        try:
            if found.region is not None:
                _go_on(found.region)
            entries = tuple(map(tensor_layout.describe, tree.lives))
            room = allocator.manifest_capacity(len(entries), boundary_bytes)
            seat = claim.RankIdentity(run_id=claim.STORE_RUN)
            region = claim.take(found, self.config, seat, entries, room)
            history = history_of(region, self.config)
            self._last = -1 if region.continued is None else region.continued.step
            leave_behind(Path(self.config.path), self._last)
            region.begin_timeline(region.continued)
            pipeline = Pipeline.start(region, Eager(), SingleProcessBarrier(), self.config, 0)
        except BaseException:
            found.close()
            raise
        if history is not None:
            history.begin([slot.record for slot in region.slots if slot.record])
        self._pipeline, self._history = pipeline, history
        self._page = Page(pipeline.pool, region.native, 0)
        self._publish(pipeline)
        return pipeline

    def _make_way(self, pipeline: Pipeline, step: int) -> None:
        """Wait until a slot, and DRAM for staging, are free; begin a timeline for an older step."""
        anew = step <= self._last
        if self._history is not None:
            self._history.slot_needed(HELD_S)
        while pipeline.in_flight and (anew or pipeline.busy):
            self._poll(pipeline, _POLL_S)
        if pipeline.busy:
            pipeline.await_abandoned()
        if anew:
            with pipeline.lock:
                pipeline.begin_timeline()
            if self._history is not None:
                self._history.went_back(step - 1)
            else:
                leave_behind(Path(self.config.path), step - 1)

    def fence(self) -> None:
        """Return when no copy reads a live tensor any more; see `SaveFuture.staged`."""
        self._require_own()
        pipeline = self._pipeline
        if pipeline is None:
            return
        with pipeline.lock:
            snapshot = pipeline.window
            if snapshot is None:
                return
            try:
                whole = pipeline.fence()
            except LightckError as error:
                self._lost(pipeline, snapshot, error)
                return
            if not whole:
                pipeline.counters.count_torn()
                self._lost(pipeline, snapshot, _torn(snapshot))

    def _poll(self, pipeline: Pipeline, timeout_s: float) -> None:
        """Take note of commits; wait `timeout_s` at most for the next."""
        done: list[InflightSnapshot] = []
        with pipeline.lock:
            first = next(iter(pipeline.in_flight), None)
            try:
                done += pipeline.poll(timeout_s)
            except LightckError as error:
                assert first is not None
                self._lost(pipeline, first, error)
            for snapshot in done:  # before a slot is taken for the next
                if self._history is not None and snapshot.writer.record is not None:
                    self._history.committed(snapshot.writer.record)
        for snapshot in done:  # not under the lock: a future's callbacks are the caller's
            self._committed(pipeline, snapshot)

    def _committed(self, pipeline: Pipeline, snapshot: InflightSnapshot) -> None:
        """Tell that a snapshot is committed. This is the one place where all of them come by."""
        with suppress(LightckError):  # another thread may have closed the store meanwhile
            self._publish(pipeline)
        region = pipeline.region
        event("committed", logging.DEBUG, step=snapshot.step, survives=region.survives)
        for future in snapshot.futures:
            future.set_result(snapshot.step)

    def _lost(self, pipeline: Pipeline, snapshot: InflightSnapshot, error: LightckError) -> None:
        """Tell that a save has failed, and keep its futures until somebody asks one."""
        pipeline.counters.count_failed()
        event("save_failed", logging.ERROR, path=self.config.path, step=snapshot.step, why=error)
        snapshot.fail(error)
        self._failed += [each for each in snapshot.futures if isinstance(each, SaveFuture)]

    def _follow(self, future: SaveFuture) -> None:
        """Take note of commits until the future has its result."""
        end_s = time.monotonic() + _UNASKED_S
        while not future.done() and (pipeline := self._pipeline) is not None:
            if time.monotonic() > end_s:
                self.fence()
            self._poll(pipeline, 0.0)
            time.sleep(_POLL_S)

    def _publish(self, pipeline: Pipeline, *, ended: bool = False) -> None:
        """Publish statistics, by which others know who owns the region."""
        counters, record = pipeline.counters, pipeline.region.continued
        steps = counters.last_captured_step, counters.last_committed_step
        captured, committed = (NO_STEP if each is None else each for each in steps)
        numbers = {
            "ended": ended,
            "updated_ns": time.time_ns(),
            "step": max(self._last, 0),
            "captured_step": captured,
            "committed_step": committed,
            "payload_bytes": record.payload_bytes if record is not None else 0,
            **{name: getattr(counters, name) for name in ("captured", "committed", "torn")},
            "failed": counters.failed,
        }
        assert self._page is not None
        with suppress(RegionIOError):  # the region is latched: the next save says so
            self._page.publish(numbers, {}, None)

    def close(self) -> None:
        """Commit what is under way and give up the region; does nothing in a forked child."""
        if os.getpid() != self._pid:
            return
        with self._saving:
            pipeline, self._closed = self._pipeline, True
            if pipeline is None:
                return
            self.fence()
            while pipeline.in_flight:
                self._poll(pipeline, _POLL_S)
            if self._history is not None:
                self._history.close(self.config.close_timeout_s)
            with pipeline.lock:
                self._publish(pipeline, ended=True)
                self._pipeline = None
                try:
                    pipeline.close()
                finally:
                    pipeline.region.close()

    def raise_untold(self) -> None:
        """Raise the first error of a save whose future nobody has asked, once."""
        untold = [each for each in self._failed if not each.asked]
        self._failed.clear()
        for future in untold[:1]:
            future.result()

    def _require_own(self) -> None:
        if os.getpid() != self._pid:
            raise LightckError(
                f"the store on {self.config.path} belongs to process {self._pid}, its parent: a"
                " forked child must not write"
            )


def _torn(snapshot: InflightSnapshot) -> TornSnapshotError:
    names = [name.removeprefix("extras/") for name in snapshot.torn]
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return TornSnapshotError(
        f"step {snapshot.step} is not saved: {names[0]}{more} changed before staged() had returned;"
        " the state dict saved before is kept",
        names=names,
    )


def _go_on(region: Region) -> None:
    """Go on from the newest snapshot that is whole to the last byte, which stays protected.

    Raises:
        CorruptSnapshotError: snapshots are there, and none is whole.
    """
    recovery = region.recover()
    problems = [*recovery.problems]
    for candidate in recovery.candidates:
        try:
            AssembledSnapshot.of([(region, candidate)]).verify()
        except CorruptSnapshotError as error:
            event("fell_back", logging.WARNING, step=candidate.record.step, why=error)
            problems.append(str(error))
            continue
        region.continuation.mark_continued(region, candidate.record)
        return
    if problems:
        raise CorruptSnapshotError(
            f"{region.place.file} holds no state dict that is whole, and is left as it is: choose"
            f" another path, or give it up with `lightck rm {region.place.path}`"
            + "".join(f"\n  {problem}" for problem in problems)
        )
