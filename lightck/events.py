"""Structured log events: one logger, one shape, readable by people and by programs."""

from __future__ import annotations

import enum
import logging
import math
import os
import queue
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

log = logging.getLogger("lightck")

MOST_UNTOLD = 1000
"""Events that may wait for a slow `on_event`; more are left out, and counted."""
PATIENCE_S = 5.0
"""How long a close waits for an `on_event` to be told what is left."""


def event(
    name: str, /, level: int = logging.INFO, *, sentence: str | None = None, **fields: Any
) -> None:
    """Log an event as `name key=value ...`, or as a sentence, and tell all subscribers of it.

    A handler finds the parts on the record: `record.lightck_event` and `record.lightck`, a dict
    that `json.dumps` takes (see `as_plain`). Nothing is formatted unless somebody listens.
    """
    logged, subscribers = log.isEnabledFor(level), _subscribers
    if not logged and not subscribers:
        return
    plain = {key: as_plain(value) for key, value in fields.items()}
    if logged:
        text = sentence or f"{name} " + " ".join(f"{key}={value}" for key, value in plain.items())
        extra = {"lightck_event": name, "lightck": plain}
        log.log(level, "%s", text, extra=extra, stacklevel=2)
    for each in subscribers:
        each.put(name, plain)


def event_aside(
    name: str, /, level: int = logging.INFO, *, wait_s: float = 0.0, **fields: Any
) -> None:
    """The same on a thread of its own: for threads that a full pipe behind stderr must not hold."""
    work = threading.Thread(target=event, args=(name, level), kwargs=fields, daemon=True)
    try:
        work.start()
    except RuntimeError:  # none is left, or the interpreter exits: then on this one
        event(name, level, **fields)
    else:
        work.join(wait_s)
        if wait_s:
            deliver(wait_s)


def as_plain(value: Any) -> Any:
    """Return a value as JSON has it: str, int, float, bool, None, list or dict, all the way down.

    Paths and errors become their text, numbers of NumPy and torch Python's, and so do numbers that
    JSON has not (nan, inf) their text.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, enum.Enum):
        return as_plain(value.value)
    if isinstance(value, str):
        return str(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(float(value))
    if isinstance(value, os.PathLike):
        return os.fsdecode(value)
    if isinstance(value, Mapping):
        return {str(as_plain(key)): as_plain(each) for key, each in value.items()}
    if isinstance(value, Iterable) and not isinstance(value, bytes) and not _is_array(value):
        return [as_plain(each) for each in value]
    return as_plain(value.tolist()) if _is_array(value) else str(value)


def _is_array(value: Any) -> bool:
    """One of NumPy or torch, or a scalar of NumPy."""
    return callable(getattr(value, "tolist", None))


# ---- Who else hears of events ----------------------------------------------------------------


class Subscriber:
    """Tells a function of every event of this process, one after the other, until it is stopped.

    Those of single steps are among them, whatever the log's level. It is called on a thread of its
    own, so that it neither holds up the training nor is called under a lock; when `MOST_UNTOLD`
    wait, further ones are left out, with a warning. What it raises ends nothing: the first time it
    is reported, and the function goes on being told. The end of the process by a signal waits a
    second for the last event, a close `PATIENCE_S`.
    """

    def __init__(
        self,
        function: Callable[[str, dict[str, Any]], object],
        report: Callable[[BaseException, str], object],
    ) -> None:
        """Begin.

        Args:
            function: called with the name of an event and its fields.
            report: called on that thread with the first exception and the name of its event.
        """
        global _subscribers
        self._function, self._report = function, report
        self._queue: queue.SimpleQueue[tuple[str, dict[str, Any]] | threading.Event | None] = (
            queue.SimpleQueue()
        )
        self._left_out = 0
        self._thread = threading.Thread(target=self._run, name="lightck-events", daemon=True)
        self._thread.start()
        with _lock:
            _subscribers = (*_subscribers, self)

    def put(self, name: str, fields: dict[str, Any]) -> None:
        """Tell of an event soon. Any thread; never waits."""
        if self._queue.qsize() < MOST_UNTOLD:
            self._queue.put((name, dict(fields)))
            return
        self._left_out += 1
        if self._left_out == 1:
            log.warning(
                "on_event is slower than events come: %d wait, further ones are not told",
                MOST_UNTOLD,
            )

    def deliver(self, timeout_s: float) -> bool:
        """Wait until all events so far are told; False if they are not in time."""
        if threading.current_thread() is self._thread:
            return True  # it waits for itself
        told = threading.Event()
        self._queue.put(told)
        return told.wait(timeout_s)

    def stop(self) -> None:
        """Tell what is left, and no more; idempotent."""
        global _subscribers
        with _lock:
            _subscribers = tuple(each for each in _subscribers if each is not self)
        if not self.deliver(PATIENCE_S):
            log.warning("on_event has not returned for %g s: it is told no more", PATIENCE_S)
        self._queue.put(None)

    def _run(self) -> None:
        failed = False
        while (item := self._queue.get()) is not None:
            if isinstance(item, threading.Event):
                item.set()
                continue
            try:
                self._function(*item)
            except BaseException as error:  # noqa: BLE001 - the user's; the training goes on
                if not failed:
                    failed = True
                    self._tell(error, item[0])

    def _tell(self, error: BaseException, name: str) -> None:
        log.error("on_event failed at the event %s: %r", name, error, exc_info=error)
        try:
            self._report(error, name)
        except BaseException as second:  # noqa: BLE001 - a filter on warnings, `on_error`
            log.error("on_error failed as well: %r", second)


def deliver(timeout_s: float) -> None:
    """Wait until every subscriber has been told of all events so far; before a process ends."""
    for each in _subscribers:
        each.deliver(timeout_s)


_lock = threading.Lock()
"""Guards changes of `_subscribers`; readers take it as it is."""
_subscribers: tuple[Subscriber, ...] = ()


def _in_child() -> None:
    """The subscribers' threads stayed with the parent."""
    global _subscribers, _lock
    _subscribers, _lock = (), threading.Lock()


os.register_at_fork(after_in_child=_in_child)
