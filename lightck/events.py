"""Structured log events: one logger, one shape, readable by people and by programs."""

from __future__ import annotations

import logging
import threading
from typing import Any

log = logging.getLogger("lightck")


def event(name: str, /, level: int = logging.INFO, **fields: Any) -> None:
    """Log an event as `name key=value ...`.

    A handler finds the parts on the record: `record.lightck_event` and `record.lightck` (a dict).
    Nothing is formatted unless somebody listens.
    """
    if log.isEnabledFor(level):
        text = " ".join(f"{key}={value}" for key, value in fields.items())
        extra = {"lightck_event": name, "lightck": fields}
        log.log(level, "%s %s", name, text, extra=extra, stacklevel=2)


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
