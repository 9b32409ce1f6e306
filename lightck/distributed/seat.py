"""Sharing of the single comm hook that a DDP module takes, by the user's hook and observers.

`register_comm_hook` can be called once per module, and never be undone. So lightck puts a method of
the same name on the *instance*: a hook that the user registers later is registered under its own
name, wrapped. A bound method is deep-copied and pickled as the copy's own; no wrapper is in the
module's state.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

Hook = Callable[[Any, Any], "Future[Any]"]


class Watcher(Protocol):
    """An observer of buckets.

    It is called on the backward's thread, inside DDP's lock, and must not wait.
    """

    def bucket(self, bucket: Any, begin_ns: int, future: Future[Any]) -> None:
        """Observe that a hook was given `bucket` at `begin_ns`, and has launched its reduction."""


@dataclass(eq=False)
class Seat:
    """The proxy that a DDP module calls as its comm hook."""

    module: weakref.ref[DistributedDataParallel]
    """A weak reference to the module, because the module's reducer holds this for good."""
    watchers: list[Watcher] = field(default_factory=list)
    clock: Callable[[], int] = lambda: 0
    taken: bool = False
    """True if torch calls this proxy."""
    own: Hook | None = None
    """The hook of lightck, used until the user registers one."""
    _users: tuple[Hook, Any] | None = None
    """The user's hook and its state, where torch holds lightck's hook."""

    def register(self, state: object, hook: Hook) -> None:
        """Register the user's hook, in place of the module's `register_comm_hook`."""
        module = self._module()
        module._check_comm_hook(hook)
        if self.own is not None and self._users is None:
            self._users = (hook, state)
            assert module.logger is not None
            module.logger._set_comm_hook_name(hook.__qualname__)
            module._comm_hooks.append((hook, state))
            return

        @functools.wraps(hook)
        def watched(state: Any, bucket: Any) -> Future[Any]:
            return self._tell(hook, state, bucket)

        try:
            type(module).register_comm_hook(module, state, watched)
            self.taken = True
        finally:  # torch lists even one that it refuses
            module._comm_hooks[-1] = (hook, state)

    def occupy(self, hook: Hook) -> None:
        """Register a hook of lightck's, which the user can still replace.

        Raises:
            RuntimeError: there is one already.
        """
        private: Any = dist
        private._register_comm_hook(self._module().reducer, None, self._delegate)
        self.own, self.taken = hook, True

    def _delegate(self, _: None, bucket: Any) -> Future[Any]:
        assert self.own is not None
        hook, state = self._users or (self.own, None)
        return self._tell(hook, state, bucket)

    def _tell(self, hook: Hook, state: Any, bucket: Any) -> Future[Any]:
        begin_ns = self.clock() if self.watchers else 0
        future = hook(state, bucket)
        if isinstance(future, torch._C.Future):  # else DDP says what is wrong
            for watcher in tuple(self.watchers):
                watcher.bucket(bucket, begin_ns, future)
        return future

    def _module(self) -> DistributedDataParallel:
        module = self.module()
        assert module is not None, "the module calls, and is gone"
        return module


_seats: weakref.WeakKeyDictionary[DistributedDataParallel, Seat] = weakref.WeakKeyDictionary()


def register_comm_hook(self: DistributedDataParallel, state: object, hook: Hook) -> None:
    """Replace the method of the same name on one instance; a copy of the instance has no proxy."""
    seat = _seats.get(self)
    if seat is None:
        type(self).register_comm_hook(self, state, hook)
    else:
        seat.register(state, hook)


register_comm_hook.__doc__ = DistributedDataParallel.register_comm_hook.__doc__


def sit(module: DistributedDataParallel, watcher: Watcher, clock: Callable[[], int]) -> Seat:
    """Let the watcher observe the hook that the module has or will get; return the proxy."""
    seat = _seats.get(module)
    if seat is None:
        seat = _seats[module] = Seat(weakref.ref(module))
    seat.clock = clock
    seat.watchers.append(watcher)
    module.__dict__["register_comm_hook"] = types.MethodType(register_comm_hook, module)
    return seat


def seated(module: DistributedDataParallel) -> bool:
    """Tell whether the hook that torch calls can be observed."""
    seat = _seats.get(module)
    return seat is not None and seat.taken


def leave(module: DistributedDataParallel, watcher: Watcher) -> None:
    """Stop observing, and leave the module as it was; idempotent.

    Where lightck's hook is registered, the method stays: torch cannot let go of a hook, and the
    user's hook must still be registered with the proxy.
    """
    seat = _seats.get(module)
    if seat is None or watcher not in seat.watchers:
        return
    seat.watchers.remove(watcher)
    if not seat.watchers and seat.own is None:
        module.__dict__.pop("register_comm_hook", None)
    if not seat.watchers and not seat.taken:
        del _seats[module]
