"""Log structured events: one logger, one form, readable by people and by programs."""

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
"""How many events may wait for a slow `on_event`; further ones are dropped and counted."""
PATIENCE_S = 5.0
"""Seconds that a close waits for `on_event` to be called with the remaining events."""


def event(
    name: str, /, level: int = logging.INFO, *, sentence: str | None = None, **fields: Any
) -> None:
    """Log `lightck: name key=value ...`, or a sentence, and tell all subscribers of the event.

    A handler finds the parts on the record: `record.lightck_event` and `record.lightck`, a dict
    that `json.dumps` takes (see `as_plain`). Nothing is formatted unless somebody listens.
    """
    logged, subscribers = log.isEnabledFor(level), _subscribers
    if not logged and not subscribers:
        return
    plain = {key: as_plain(value) for key, value in fields.items()}
    if logged:
        text = sentence or f"{name} " + " ".join(f"{key}={value}" for key, value in plain.items())
        # Where no handler is configured, Python prints the text alone: it says whose it is.
        text = f"lightck: {text}"
        extra = {"lightck_event": name, "lightck": plain}
        log.log(level, "%s", text, extra=extra, stacklevel=2)
    for each in subscribers:
        each.put(name, plain)


def event_aside(
    name: str, /, level: int = logging.INFO, *, wait_s: float = 0.0, **fields: Any
) -> None:
    """Log an event on a thread of its own: a full pipe behind stderr must not block this one.

    The arguments are those of `event`; with `wait_s` it waits that long for the log and the
    subscribers.
    """
    work = threading.Thread(target=event, args=(name, level), kwargs=fields, daemon=True)
    try:
        work.start()
    except RuntimeError:  # no thread is left, or the interpreter exits: log on this one
        event(name, level, **fields)
    else:
        work.join(wait_s)
        if wait_s:
            deliver(wait_s)


def as_plain(value: Any) -> Any:
    """Return a value as JSON can hold it: str, int, float, bool, None, list or dict, nested too.

    Paths and errors become their text, numbers of NumPy and torch become Python's, and numbers
    that JSON lacks (nan, inf) become their text, too.
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
    """Return whether the value is an array of NumPy or torch, or a scalar of NumPy."""
    return callable(getattr(value, "tolist", None))


# ---- Subscribers to events --------------------------------------------------------------------


class Subscriber:
    """A subscription that calls a function for every event of this process, in order.

    It lasts until it is stopped. Events of single steps are among them, whatever the log's level.
    The function is called on a
    thread of its own, so that it neither delays the training nor is called under a lock; when
    `MOST_UNTOLD` events wait, further ones are dropped, with a warning. What it raises ends
    nothing: the first exception is reported, and the function is still called. The end of the
    process by a signal waits a second for the last event, a close waits `PATIENCE_S`.
    """

    def __init__(
        self,
        function: Callable[[str, dict[str, Any]], object],
        report: Callable[[BaseException, str], object],
    ) -> None:
        """Start the thread and subscribe.

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
        """Queue an event for the function. Any thread; never waits."""
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
        """Wait until the function was called for all events so far.

        Return False if that took too long.
        """
        if threading.current_thread() is self._thread:
            return True  # it would wait for itself
        told = threading.Event()
        self._queue.put(told)
        return told.wait(timeout_s)

    def stop(self) -> None:
        """Deliver the events that are queued, for `PATIENCE_S` at most, and end; idempotent."""
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
        except BaseException as second:  # noqa: BLE001 - e.g. a warnings filter or `on_error`
            log.error("on_error failed as well: %r", second)


def deliver(timeout_s: float) -> None:
    """Wait until all events so far were delivered, for `timeout_s` per subscriber.

    It is for the end of a process.
    """
    for each in _subscribers:
        each.deliver(timeout_s)


_lock = threading.Lock()
"""Guards changes of `_subscribers`; readers read the tuple without it."""
_subscribers: tuple[Subscriber, ...] = ()


def _in_child() -> None:
    """Reset the subscribers in a forked child: their threads stayed with the parent."""
    global _subscribers, _lock
    _subscribers, _lock = (), threading.Lock()


os.register_at_fork(after_in_child=_in_child)
