"""The monitor that runs a rank's probes and knows which symptoms are active."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from lightck.errors import LightckError
from lightck.events import event, event_aside
from lightck.policy.symptoms import symptom
from lightck.types import Probe

HANG_S = 60.0
"""A reading that takes longer is told as one that hangs."""
_MISSED = 2.5  # periods after which a symptom that no reading has confirmed is over
_MOST = 32  # symptoms in one reading
_LONGEST = 40  # characters of a symptom's name
_ADVICE = (
    "copy the newest snapshot to another device (`lightck export`), move the run there, and have"
    " this one replaced"
)


class UnavailableError(LightckError):
    """A probe has nothing to read on this machine; the message says why."""


@dataclass(eq=False)
class _ProbeState:
    """The state of one probe; its own thread writes it."""

    probe: Probe
    began_s: float | None = None
    """When the reading that runs now began; None: none runs."""
    hang_told: bool = False
    error_told: bool = False
    active: dict[str, tuple[float, float]] = field(default_factory=dict)
    """How often each symptom is there, and until when it counts; replaced, never changed."""


class HealthMonitor:
    """The symptoms of this rank, read on a daemon thread per probe.

    A probe that raises is told once, until it succeeds again, and read on; one whose reading hangs
    is told once and left alone; one that is not available here is told at level DEBUG and not read
    again. None of them ever delays or ends the training.
    """

    def __init__(
        self, probes: Iterable[Probe], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Start to read.

        Args:
            probes: what to read; each belongs to this monitor from now on.
            clock: seconds of a monotonic clock.
        """
        self._clock = clock
        self._stop = threading.Event()
        self._risk = ""
        self._watched = [_ProbeState(probe) for probe in probes]
        for watched in self._watched:
            name = f"lightck-{str(watched.probe.name)[:7]}"
            threading.Thread(target=self._run, args=(watched,), name=name, daemon=True).start()

    def active(self) -> Mapping[str, float]:
        """Return the symptoms that count now, by name, with how often. Any thread; never blocks."""
        now, found = self._clock(), dict[str, float]()
        for watched in self._watched:
            self._tell_hang(watched, now)
            for name, (count, until_s) in watched.active.items():
                if now < until_s:
                    found[name] = found.get(name, 0.0) + count
        return found

    @property
    def risk(self) -> str:
        """Return what threatens the medium of the region, with the device; empty: nothing."""
        return self._risk

    def stop(self) -> None:
        """Begin no further reading. Does not wait for one that is under way; idempotent."""
        self._stop.set()

    # ---- on the probes' threads -----------------------------------------------------------------

    def _run(self, watched: _ProbeState) -> None:
        probe = watched.probe
        while not self._stop.is_set():
            watched.began_s = self._clock()
            try:
                found = checked(probe.read())
            except UnavailableError as why:
                event("probe_unavailable", logging.DEBUG, probe=probe.name, why=why)
                return
            except Exception as error:  # noqa: BLE001 - it may be the user's probe
                if not watched.error_told:
                    watched.error_told = True
                    event("probe_failed", logging.WARNING, probe=probe.name, error=repr(error))
            else:
                watched.error_told = False
                if not self._stop.is_set():
                    self._note(watched, found)
            finally:
                watched.began_s = None
            watched.hang_told = False
            self._stop.wait(probe.period_s)

    def _note(self, watched: _ProbeState, found: Mapping[str, float]) -> None:
        now, probe = self._clock(), watched.probe
        before = {name: kept for name, kept in watched.active.items() if now < kept[1]}
        seen = {
            name: (count, now + max(symptom(name).holds_s, _MISSED * probe.period_s))
            for name, count in found.items()
        }
        # A symptom that lasts while it is seen is over at the first reading that does not see it.
        held = {name: kept for name, kept in before.items() if symptom(name).holds_s}
        watched.active = held | seen
        for name, count in found.items():
            if name in before:
                continue
            detail = str(getattr(probe, "detail", "")) or probe.name
            event("symptom", name=name, count=count, probe=probe.name, detail=detail)
            if symptom(name).medium:
                self._risk = detail
                event("medium_at_risk", logging.WARNING, device=detail, advice=_ADVICE)

    def _tell_hang(self, watched: _ProbeState, now: float) -> None:
        began_s = watched.began_s
        if began_s is None or watched.hang_told or now - began_s < HANG_S:
            return
        watched.hang_told = True
        # The training thread may be here: it must not wait for a log's pipe.
        event_aside(
            "probe_hangs", logging.WARNING, probe=watched.probe.name, seconds=round(now - began_s)
        )


def checked(found: object) -> dict[str, float]:
    """Return a probe's reading if it is one.

    Raises:
        LightckError: it is no mapping of names to positive numbers.
    """
    if isinstance(found, Mapping) and len(found) <= _MOST:
        good = {
            name: float(count)
            for name, count in found.items()
            if isinstance(name, str)
            and 0 < len(name) <= _LONGEST
            and isinstance(count, int | float)
            and math.isfinite(count)
            and count >= 0
        }
        if len(good) == len(found):
            return {name: count for name, count in good.items() if count}
    raise LightckError(
        f"a probe's read() returned {str(found)[:200]}; expected a dict of at most {_MOST} names"
        f" (1 to {_LONGEST} characters) to finite numbers that are not negative"
    )
