"""Collects all that policies learn from while a run goes on: failures, symptoms, losses, metrics.

It travels in every snapshot, as the extra `@policy`, so that a run that is started again goes on
with it. What ended the life before stands on the region's statistics page, which that life wrote
last.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Mapping
from typing import Any, Protocol

from lightck.events import event
from lightck.loop.loss_observer import LossObserver
from lightck.policy import Auto, Quality
from lightck.policy.best import OnBest
from lightck.policy.combination import needs_of, single_policies
from lightck.policy.failure_record import FailureRecord
from lightck.policy.loss_curve import LossCurve
from lightck.policy.quantities import in_units
from lightck.region import stats_page
from lightck.state.extras import POLICY, Extra
from lightck.types import Hazard, Policy

_VERSION = 1
_RENEWED_S = 1.0
_EVERY_LOSS = 64  # the first ones, which set what later ones are compared with
_LOOK_S = 0.1  # then losses of quick steps are left out: each takes 10 us
_LONGEST_BYTES = 4096
_ROUND_BYTES = 2048  # the text is that long, or twice, so that it seldom needs more room
_LEAST_STEPS = 2  # a life that ended before was no failure of machines: a mistake in the script
_LONGEST_NAME = 64
_MOST_METRICS = 16
_LONGEST_STEPS = 10  # medians of a step: what one step counts at most, should a clock jump


def learns(policy: Policy) -> bool:
    """Tell whether a policy decides by what is learned, so that snapshots have it."""
    return bool(needs_of(policy)) or any(isinstance(p, OnBest) for p in single_policies(policy))


class Symptoms(Protocol):
    """The symptoms of failures to come, of all ranks as far as this one knows."""

    @property
    def risk(self) -> str:
        """Say what threatens the region's medium; empty: nothing."""
        ...

    def active(self) -> Mapping[str, float]:
        """Return the symptoms that count now, by name, with how often."""
        ...


class SavedPolicyState:
    """The policies' state as it is in the next snapshot: text, the same object until it changes."""

    def __init__(self, text: str | None) -> None:
        """Begin with what a snapshot had, or an earlier handle left; None: with nothing."""
        # Blanks in its place: attach plans the room for what is saved later.
        self.state = {"json": " " * _ROUND_BYTES if text is None else text}

    @property
    def text(self) -> str | None:
        """Return the text; None: nothing is known yet."""
        return None if self.state["json"].isspace() else self.state["json"]

    @property
    def extra(self) -> Extra:
        """Return the extra that it is in a snapshot."""
        return Extra(POLICY, self.state, "step")

    def renew(self, values: Mapping[str, Any]) -> None:
        """Replace it; what is too long, which a sane state never is, is left out."""
        text = json.dumps(values, separators=(",", ":"))
        if len(text) <= _LONGEST_BYTES:
            self.state["json"] = text.ljust(-(-len(text) // _ROUND_BYTES) * _ROUND_BYTES)


def text_of(extras: Mapping[str, Any]) -> str | None:
    """Return the text that a snapshot's extras have; None: none, empty if it is damaged."""
    held = extras.get(POLICY)
    text = held.get("json") if isinstance(held, dict) else None
    return None if held is None else text if isinstance(text, str) else ""


def parsed(text: object) -> dict[str, Any] | None:
    """Return the values of a saved state; None if it is damaged, or a newer version's."""
    try:
        values = json.loads(text) if isinstance(text, str) else None
    except (ValueError, RecursionError):
        return None
    known = isinstance(values, dict) and values.get("version") == _VERSION
    return values if known else None


def described(text: str) -> str:
    """Return in words what policies had learned when a snapshot was taken."""
    values = parsed(text)
    if values is None:
        return "damaged, or a newer version's"
    record = FailureRecord.from_plain(values.get("failures"))
    exposure = record.exposure + sum(each.exposure for each in record.failures)
    said = [f"{len(record.failures)} failures in {in_units(exposure)} of all ranks"]
    if record.failures:
        lost = sum(not each.recovered for each in record.failures)
        said.append(f"{lost} of them not saved just in time")
    names = {"quiet_s": "a step", "cost_s": "a snapshot", "persist_s": "its commit"}
    known = ((what, _seconds(values.get(name))) for name, what in names.items())
    return ", ".join([*said, *(f"{what} {in_units(s)}" for what, s in known if s)])


class PolicyState:
    """The state that policies learn from, as of the last step. Used by the training thread."""

    def __init__(
        self,
        policy: Policy,
        saved: SavedPolicyState,
        *,
        world: int,
        jit: bool,
        losses: LossObserver | None,
    ) -> None:
        """Go on from what was saved.

        Args:
            policy: the policy that decides.
            saved: what the snapshots have; renewed once a second.
            world: number of ranks.
            jit: whether failures are saved just in time.
            losses: what sees the loss; None: no policy needs it.
        """
        self._saved, self._world, self._jit, self._losses = saved, world, jit, losses
        parts = [*single_policies(policy)]
        self._needs = needs_of(policy)
        believed = [p.mtbf_s for p in parts if isinstance(p, Auto) and p.mtbf_s is not None]
        self._mtbf_s = min(believed, default=None)
        self._decisive = {p.metric for p in parts if isinstance(p, OnBest)}
        self.began_ns = time.time_ns()
        """When this life began: it names the life on the statistics page and in snapshots."""
        values = self._read(saved.text)
        self._record = FailureRecord.from_plain(values.get("failures"))
        follows = any(isinstance(p, Quality) for p in parts)
        self._curve = LossCurve.from_plain(values.get("curve")) if follows else None
        self.metrics: dict[str, float] = {}
        self._asked = True
        self.extremes = _extremes(values.get("extremes"))
        self.finite, self._told_not_finite = True, False
        self.hazard: Hazard | None = None
        self.progress: float | None = None
        self.known_cost_s = _seconds(values.get("cost_s"))
        self.known_persist_s = _seconds(values.get("persist_s"))
        self._active_s = _seconds(values.get("active_s")) or 0.0
        """Seconds of training since the run began, over all lives."""
        self._life, self._ran_s = values.get("life"), _seconds(values.get("ran_s")) or 0.0
        """The life that saved this, and how much of it is in the record."""
        self._were_active = _counts(values.get("active"))
        """The symptoms that were there then: they may have caused the failure that followed."""
        self._active: Mapping[str, float] = {}
        self._quiet_s = _seconds(values.get("quiet_s"))
        self._began_s = self._active_s
        self._recorded_s = self._active_s
        self._renew_at_s = self._look_at_s = -math.inf
        self._symptoms: Symptoms | None = None
        self._goes_on = saved.text is not None
        self._save()

    def _read(self, text: str | None) -> dict[str, Any]:
        values = parsed(text)
        if text is not None and values is None:
            event(
                "policy_state_lost",
                logging.WARNING,
                why="what earlier lives have shown of failures is damaged, or a newer version's",
                remedy="none is needed: it is learned anew",
            )
        return values or {}

    # ---- what attach tells -----------------------------------------------------------------------

    def follows(
        self,
        page: stats_page.Reading,
        restored_step: int,
        *,
        just_in_time: bool,
        in_place: bool,
    ) -> None:
        """Count the life before this one, and the failure that ended it, if one did.

        Args:
            page: the region's statistics page, as that life left it.
            restored_step: the step that this life goes on from.
            just_in_time: whether that was saved at the failure.
            in_place: the state was restored, and from this very place. Else the run goes on from
                what it has in memory, or somewhere else: a region without a page is a new one.
        """
        said = page.numbers
        if page.process is None:
            if self._goes_on and in_place:  # the region went with its host
                self._fail(recovered=False, active=self._were_active)
                self._save()
            return
        ran_s = (said["updated_ns"] - said["began_ns"]) / 1e9
        active: Mapping[str, float] = {}
        if said["began_ns"] == self._life:
            ran_s -= self._ran_s
            active = self._were_active
        self._record = self._record.ran(ran_s, self._world)
        steps, error = said["step"] - said["began_step"], said["ended"] == stats_page.FAILED
        another = in_place or page.process != stats_page.Process.this()
        if (error or said["ended"] == stats_page.GONE) and another and steps >= _LEAST_STEPS:
            recovered = (just_in_time or error) and said["step"] - restored_step <= 1
            self._fail(recovered=recovered, active=active)
        self._save()  # before the first step: a life that ends soon has told of the one before

    def _fail(self, *, recovered: bool, active: Mapping[str, float]) -> None:
        self._record = self._record.failed(recovered=recovered, world=self._world, active=active)

    def watch(self, symptoms: Symptoms) -> None:
        """Look at these symptoms from now on."""
        self._symptoms = symptoms

    # ---- at each step's end ----------------------------------------------------------------------

    def step_ended(self, step: int, step_s: float | None, usual_s: float | None) -> None:
        """Take note of a step, of the losses that were seen since, and of what time has brought.

        Args:
            step: its number.
            step_s: its seconds; None: not known.
            usual_s: the median of the last ones.
        """
        self._active_s += min(step_s or 0.0, _LONGEST_STEPS * (usual_s or 0.0))
        for loss in self._losses.take() if self._losses is not None else ():
            self._see(step, loss)
        if self._active_s >= self._renew_at_s:
            self._renew_at_s = self._active_s + _RENEWED_S
            self._learn()

    def _see(self, step: int, loss: float) -> None:
        self.finite = math.isfinite(loss)
        if not self.finite and not self._told_not_finite:
            self._told_not_finite = True
            event(
                "loss_not_finite",
                logging.WARNING,
                step=step,
                loss=loss,
                why="until it is a number again, no snapshot replaces the last good ones",
            )
        if self._curve is not None and self._active_s >= self._look_at_s:
            self._curve = self._curve.observed(self._active_s, loss)
            if self._curve.count >= _EVERY_LOSS:
                self._look_at_s = self._active_s + _LOOK_S

    def _learn(self) -> None:
        """Say anew what is to be expected; takes about 50 us, once a second."""
        active = self._active = self._symptoms.active() if self._symptoms is not None else {}
        self._record = self._record.ran(self._active_s - self._recorded_s, self._world, active)
        self._recorded_s = self._active_s
        if "hazard" in self._needs:
            self.hazard = self._record.hazard(
                self._world, active, mtbf_s=self._mtbf_s, jit=self._jit
            )
        if self._curve is not None:
            self.progress = self._curve.progress
        self._save()

    def cost_known(
        self, cost_s: float | None, persist_s: float | None, quiet_s: float | None
    ) -> None:
        """Note what a snapshot costs, and a quiet step, for the run's next life."""
        self._quiet_s = self._quiet_s if quiet_s is None else quiet_s
        self.known_cost_s = self.known_cost_s if cost_s is None else cost_s
        self.known_persist_s = self.known_persist_s if persist_s is None else persist_s

    def _save(self) -> None:
        self._saved.renew(
            {
                "version": _VERSION,
                "failures": self._record.to_plain(),
                "curve": None if self._curve is None else self._curve.to_plain(),
                "extremes": self._kept_extremes(),
                "cost_s": self.known_cost_s,
                "persist_s": self.known_persist_s,
                "quiet_s": self._quiet_s,
                "active": dict(self._active),
                "active_s": self._active_s,
                "life": self.began_ns,
                "ran_s": self._recorded_s - self._began_s,
            }
        )

    # ---- metrics ---------------------------------------------------------------------------------

    def report(self, metrics: Mapping[str, float]) -> None:
        """Take note of metrics that the loop has reported; `loss` is the loss from now on."""
        self.metrics = {**self.metrics, **metrics}  # anew: moments have those of their time
        self._asked = False
        if "loss" in metrics and self._losses is not None:
            self._losses.report(metrics["loss"])

    def metrics_asked(self) -> None:
        """Note that the policy has been asked about the metrics: they are among the others now."""
        if self._asked:
            return
        self._asked, self.extremes = True, {**self.extremes}
        for name, value in self.metrics.items():
            if value == value:
                before = self.extremes.get(name)
                least, most = before or (value, value)
                self.extremes[name] = min(least, value), max(most, value)
                if name in self._decisive and self.extremes[name] != before:
                    self._renew_at_s = -math.inf  # a life that ends soon has told of it

    def _kept_extremes(self) -> dict[str, list[float]]:
        """Return the extremes that a snapshot has: first those that the policy goes by."""
        short = [name for name in self.extremes if len(name) <= _LONGEST_NAME]
        names = sorted(short, key=lambda name: name not in self._decisive)[:_MOST_METRICS]
        return {name: list(self.extremes[name]) for name in names}

    @property
    def risk(self) -> str:
        """Return what threatens the region's medium; empty: nothing that is known."""
        return self._symptoms.risk if self._symptoms is not None else ""


# What a snapshot has may be damaged or made to harm: no value of it may raise.


def _number(value: object) -> float | None:
    """Return a float; None for what is none, nan, or an integer that no float can hold."""
    if type(value) not in (int, float) or value != value:
        return None
    try:
        return float(value)  # type: ignore[arg-type]
    except OverflowError:
        return None


def _seconds(value: object) -> float | None:
    found = _number(value)
    return found if found is not None and 0 <= found < 1e12 else None


def _counts(value: object) -> dict[str, float]:
    found = value.items() if isinstance(value, dict) else ()
    return {name: n for name, each in found if (n := _number(each)) is not None}


def _extremes(value: object) -> dict[str, tuple[float, float]]:
    found: dict[str, tuple[float, float]] = {}
    for name, both in value.items() if isinstance(value, dict) else ():
        if len(name) <= _LONGEST_NAME and isinstance(both, list) and len(both) == 2:
            least, most = map(_number, both)
            if least is not None and most is not None:
                found[name] = least, most
    return found
