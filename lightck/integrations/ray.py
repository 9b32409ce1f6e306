"""Checkpoint a train function of Ray Train, and go on where it was when Ray starts it again.

    run = lightck.integrations.ray.attach(model, optimizer, path, extras={"data": sampler})

Ray calls the function on a thread of its own, where no signal is heard; what announces the end of
a node there is asked for instead. Tried with Ray 2.60.
"""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

import lightck
from lightck.config import Config
from lightck.errors import ConfigError
from lightck.handle import Handle
from lightck.integrations.resumed import Resumed
from lightck.types import Failure

try:
    import ray.train as ray_train
    from ray.train.collective import broadcast_from_rank_zero
except ImportError as error:
    raise ImportError(
        "lightck.integrations.ray needs Ray Train 2.50 or newer: pip install 'lightck[ray]'"
    ) from error

POLL_S = 5.0
"""Seconds, about, between two questions for a preemption, each of which all workers wait for."""
_MOST_STEPS = 1000


class RayRun(Resumed):
    """A handle inside of a train function, what was restored, and Ray's report."""

    def report(self, metrics: Mapping[str, Any], **others: Any) -> None:
        """Give metrics to Ray, as `ray.train.report` does, which takes `others`.

        It is a barrier: every worker calls it as often as the others.
        """
        ray_train.report(dict(metrics), **others)


def attach(
    model: nn.Module | Sequence[nn.Module],
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    path: str | os.PathLike[str] | None = None,
    *,
    extras: Mapping[str, Any] | None = None,
    step: int | Literal["latest", "exact"] = "latest",
    **settings: Any,
) -> RayRun:
    """Restore what is at `path`, and checkpoint the training from now on.

    When Ray announces that a node with one of the workers ends, the last complete step is saved
    on every rank, and training goes on. All workers ask for that together, about every `POLL_S`
    seconds, where a forward of `model` begins.

    Args:
        model: as for `lightck.attach`; behind `prepare_model`.
        optimizer: as for `lightck.attach`.
        path: as for `lightck.attach`. All workers are given the same path; where the group is
            started again on other nodes, it must be there as well.
        extras: as for `lightck.attach`.
        step: as for `lightck.restore`.
        **settings: as for `lightck.attach`. The signals of `failure` are heard on the main thread
            only.

    Raises:
        ConfigError: this is not a worker of Ray Train.
        LightckError: as `lightck.restore` and `lightck.attach` raise.

    Thread: the thread that the train function runs on.
    """
    _require_worker()
    notice = _Preemption()
    given = settings.pop("failure", None)
    failure = Config.resolve(settings.get("config"), failure=given).failure
    failure = Failure() if failure == "jit" else failure
    if isinstance(failure, Failure):
        settings["failure"] = _told_by(failure, notice)
    info = lightck.restore(model, optimizer, path, extras=extras, step=step)
    handle = lightck.attach(model, optimizer, path, extras=extras, **settings)
    asked: Callable[[], object] | None = None
    if isinstance(failure, Failure):
        asked = notice.ask(model if isinstance(model, nn.Module) else model[0], handle)
    return RayRun(handle, info, asked)


def _require_worker() -> None:
    try:
        ray_train.get_context().get_world_size()
    except Exception as error:
        raise ConfigError(
            "lightck.integrations.ray is for the function that a TorchTrainer runs on its workers;"
            f" here Ray says: {error}. Elsewhere take lightck.restore and lightck.attach"
        ) from error


def _told_by(failure: Failure, notice: _Preemption) -> Failure:
    """Return the user's settings of the failure path, with Ray's announcement beside theirs."""
    others = failure.notice
    if threading.current_thread() is not threading.main_thread():
        failure = dataclasses.replace(failure, signals=())

    def announced() -> bool:
        if notice.came or others is None:
            return notice.came
        return others.exists() if isinstance(others, Path) else bool(others())

    return dataclasses.replace(failure, notice=announced)


class _Preemption:
    """Asks Ray, on all workers at the same step, whether a node of theirs is to end."""

    def __init__(self) -> None:
        """Begin with no announcement."""
        self.came = False
        """True once there is one. Read by the thread that polls notices."""
        self._due: int | None = None
        """The step from which on the next question is asked; the same on all workers."""
        self._at_s, self._step = 0.0, 0

    def ask(self, model: nn.Module, handle: Handle) -> Callable[[], object]:
        """Ask from now on where a forward begins; return what ends that."""

        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def before(module: nn.Module, args: Any) -> None:
            if module.training and torch.is_grad_enabled():
                step = handle.step
                if self._due is None:
                    self._begin(step, step + 1)
                elif step >= self._due:
                    self._poll(step)

        return model.register_forward_pre_hook(before).remove

    def _begin(self, step: int, due: int) -> None:
        self._at_s, self._step, self._due = time.monotonic(), step, due

    def _poll(self, step: int) -> None:
        """Ask, and agree on when to ask next: by rank 0's clock, for every worker must ask."""
        self.came = ray_train.get_preemption_info() is not None
        step_s = (time.monotonic() - self._at_s) / max(1, step - self._step)
        steps = min(_MOST_STEPS, max(1, round(POLL_S / max(step_s, 1e-6))))
        self._begin(step, step + int(broadcast_from_rank_zero(steps)))
