"""Observe the losses that a training calls backward on, without a wait for a device."""

from __future__ import annotations

import ctypes
import logging
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import wraps
from threading import get_ident
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from lightck.device import lookup
from lightck.device.base import Device, DeviceEvent
from lightck.events import event
from lightck.loop import hooks
from lightck.loop.hooks import untraced

MOST_WAITING = 8
"""Steps whose losses a device has yet to give; the loss of a further one is not waited for."""
_SLOTS, _BYTES = 64, 8
"""Losses that may be on their way from a device, and the bytes of one."""
_PLAIN = (torch.Tensor, torch.nn.Parameter)


@dataclass(eq=False)
class _Loss:
    """A loss, or a part of a step's; None: its device has yet to give it."""

    value: float | None = None


@dataclass(eq=False)
class _Ring:
    """Pinned DRAM for losses on their way from one device, in the order of their copies.

    It serves one observer after the other and is never freed: torch ends the process that frees
    such memory when the device has failed.
    """

    slots: deque[torch.Tensor]
    under_way: deque[tuple[_Loss, torch.Tensor, DeviceEvent]] = field(default_factory=deque)

    @classmethod
    def made(cls, device: Device) -> _Ring:
        """Pin a ring's memory for good."""
        place = device.pinned(_SLOTS * _BYTES)
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(place))
        return cls(deque(place.split(_BYTES)))

    def fetch(self, device: Device, tensor: torch.Tensor) -> _Loss | None:
        """Queue the copy of one number; None: no slot is free."""
        self.settle()
        if len(self.under_way) == len(self.slots):
            return None
        target = self.slots[0][: tensor.element_size()].view(tensor.dtype)
        self.slots.rotate(-1)
        loss, there = _Loss(), device.fetch(target, tensor.reshape(1))
        self.under_way.append((loss, target, there))
        return loss

    def settle(self) -> None:
        """Read the losses that have arrived."""
        while self.under_way and self.under_way[0][2].query():
            loss, target, _ = self.under_way.popleft()
            loss.value = target.item()


_rings: weakref.WeakKeyDictionary[Device, list[_Ring]] = weakref.WeakKeyDictionary()
"""Rings of each device that no observer has now."""


class LossObserver:
    """Observes the losses of a training from when it is made until `stop`. On one thread.

    A loss is a tensor of one floating-point element that `Tensor.backward` or
    `torch.autograd.backward`, which raises nothing, is called on: alone, or in a list or tuple. Of
    several in a step the sum counts. What does not count:

    - what other threads do: the thread is the one that made this, and then the one that takes;
    - calls with `create_graph`, and calls inside of another (reentrant activation checkpoints);
    - inside of one `optimizer.step(closure)` all calls but the first, for LBFGS makes many;
    - in a step with a `GradScaler` all but what it has scaled, which counts as it was before;
    - subclasses of Tensor (DTensor), other devices than the ones that lightck knows, and calls
      that a CUDA graph records.

    The graph is not searched for the model: a loss of any model that is trained on this thread
    counts, and of two trainings that take turns on it each is given both's.

    An error in here is told once, as the event `losses_unseen`, and ends it; it never reaches the
    training.
    """

    def __init__(self) -> None:
        """Start to observe, on the calling thread."""
        self._thread = get_ident()
        self._in_backward = self._in_update = self._has_first = False
        self._scaling = False
        self._unscaled = WeakTensorKeyDictionary()
        """For each tensor that a scaler has made, and that lives, what it was made of."""
        self._losses: list[_Loss] = []
        """Losses of the step that is under way."""
        self._incomplete = False
        """True if a loss of this step was left out, so that there is no sum."""
        self._own: dict[Device, _Ring] = {}
        self._waiting: deque[list[_Loss]] = deque()
        self._reports = False
        self._reported: float | None = None
        self._handles: list[RemovableHandle] = []
        self._watch_updates()
        hooks.observe(torch.autograd, "backward", self, _backward)
        for kind in (torch.amp.GradScaler, *torch.amp.GradScaler.__subclasses__()):
            if "scale" in vars(kind):
                hooks.observe(kind, "scale", self, _scale)

    def _watch_updates(self) -> None:
        @untraced
        def begins(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            if get_ident() == self._thread:
                self._in_update, self._has_first = True, False

        @untraced
        def ends(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            if get_ident() == self._thread:
                self._in_update = False

        hooks.OURS.add(begins)
        self._handles += [
            register_optimizer_step_pre_hook(begins),
            register_optimizer_step_post_hook(ends),
        ]

    def take(self) -> list[float]:
        """End a step, and return the losses that have become known: one for a step, oldest first.

        A step without a loss gives none. On the CPU that is the loss of the step that ends; a
        device's is known some steps later, and not at all for a step that ends while `MOST_WAITING`
        others wait, or that has very many losses. Nothing is waited for.
        """
        # What was left by an exception, or interrupted, has not ended: it must not count for good.
        self._has_first = self._in_backward = self._scaling = False
        self._thread = get_ident()
        if self._reports:
            value, self._reported = self._reported, None
            return [] if value is None else [value]
        if self._losses:
            losses, self._losses = self._losses, []
            if len(self._waiting) < MOST_WAITING and not self._incomplete:
                self._waiting.append(losses)
        self._incomplete = False
        try:
            return [*self._known()]
        except Exception as error:  # noqa: BLE001 - the training hears of it from the device
            self.fail(error)
            return []

    def _known(self) -> Iterator[float]:
        for ring in self._own.values():
            ring.settle()
        while self._waiting:
            values = [loss.value for loss in self._waiting[0]]
            known = [value for value in values if value is not None]
            if len(known) < len(values):
                return
            self._waiting.popleft()
            yield sum(known)

    def report(self, value: float) -> None:
        """Give the loss of the step that is under way; from now on only such losses are taken.

        Of several in one step the last counts. Nothing is observed any more, which costs nothing.
        """
        if not self._reports:
            self._reports = True
            self.stop()
        self._reported = float(value)

    def stop(self) -> None:
        """Observe no more, and forget what was observed; idempotent."""
        hooks.ignore(self)
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._losses.clear()
        self._waiting.clear()
        self._unscaled.clear()
        while self._own:
            device, ring = self._own.popitem()
            _rings.setdefault(device, []).append(ring)

    def fail(self, error: Exception) -> None:
        """Tell of an error, and stop."""
        self.stop()
        event("losses_unseen", logging.WARNING, error=repr(error))

    # ---- what the wrappers call --------------------------------------------------------------

    def backward_begins(self, tensors: object, create_graph: object) -> list[_Loss]:
        """Return the losses among what backward is called on, which is not nested in another."""
        self._in_backward = True
        if create_graph or (self._in_update and self._has_first):
            return []
        return [*self._read(tensors)]

    def backward_ends(self, losses: list[_Loss]) -> None:
        """Count the losses of a backward that has raised nothing."""
        if losses:
            self._has_first = True
            self._losses += losses

    def backward_left(self) -> None:
        """Note that backward returns or raises."""
        self._in_backward = False

    @property
    def listens(self) -> bool:
        """Tell whether a backward that begins now, on this thread, may count."""
        return not self._in_backward and get_ident() == self._thread

    def _read(self, tensors: object) -> Iterator[_Loss]:
        for tensor in _tensors(tensors):
            if self._scaling:
                tensor = self._unscaled.get(tensor)  # noqa: PLW2901
            if type(tensor) not in _PLAIN or tensor.numel() != 1 or not tensor.is_floating_point():
                continue
            device = lookup.holder(tensor)
            if device is None:
                if tensor.is_cpu:
                    yield _Loss(tensor.item())
            elif not device.recording():
                loss = self._ring(device).fetch(device, tensor.detach())
                if loss is None:
                    self._incomplete = True
                else:
                    yield loss

    def _ring(self, device: Device) -> _Ring:
        if device not in self._own:
            free = _rings.get(device)
            self._own[device] = free.pop() if free else _Ring.made(device)
        return self._own[device]

    def scaled(self, outputs: object, results: object) -> None:
        """Note what a scaler has made of which tensors."""
        self._scaling = True
        for plain, result in zip(_tensors(outputs), _tensors(results), strict=False):
            self._unscaled[result] = plain.detach()


def _tensors(given: object) -> Sequence[Any]:
    """Return the tensors among these; none of an iterator, which can be gone through only once."""
    if isinstance(given, torch.Tensor):
        return (given,)
    if isinstance(given, list | tuple):
        return [each for each in given if isinstance(each, torch.Tensor)]
    return ()


def _backward(
    original: Callable[..., Any], observers: weakref.WeakSet[LossObserver]
) -> Callable[..., Any]:
    """Wrap `torch.autograd.backward`, which `Tensor.backward` calls."""

    @untraced
    def begin(
        tensors: object = None,
        grad_tensors: object = None,
        retain_graph: object = None,
        create_graph: object = False,
        *args: Any,
        **kwargs: Any,
    ) -> list[tuple[LossObserver, list[_Loss]]]:
        begun = []
        for each in list(observers):
            if each.listens:
                try:
                    begun.append((each, each.backward_begins(tensors, create_graph)))
                except Exception as error:  # noqa: BLE001 - never the training's
                    each.backward_left()
                    each.fail(error)
        return begun

    @wraps(original)
    def backward(*args: Any, **kwargs: Any) -> Any:
        if not observers:
            return original(*args, **kwargs)
        begun = begin(*args, **kwargs)
        try:
            result = original(*args, **kwargs)
            for each, losses in begun:
                each.backward_ends(losses)
        finally:
            for each, _ in begun:
                each.backward_left()
        return result

    return backward


def _scale(
    original: Callable[..., Any], observers: weakref.WeakSet[LossObserver]
) -> Callable[..., Any]:
    """Wrap `GradScaler.scale`: what it returns is many times the loss."""

    @untraced
    def tell(outputs: object, results: object) -> None:
        for each in list(observers):
            if each.listens:
                try:
                    each.scaled(outputs, results)
                except Exception as error:  # noqa: BLE001 - never the training's
                    each.fail(error)

    @wraps(original)
    def scale(scaler: Any, outputs: Any) -> Any:
        results = original(scaler, outputs)
        if observers and results is not outputs:  # else it is not enabled
            tell(outputs, results)
        return results

    return scale
