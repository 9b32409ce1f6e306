"""DDP's communication, observed without owning its comm hook: when gradients go to other ranks.

Where the user has registered a comm hook since attach, its buckets are observed. Otherwise a
bucket's launch is inferred from the gradient that completes it. The end of a backward is found by a
final callback of autograd: queued at the first gradient, it runs before the callback in which DDP
waits for its buckets. FSDP2 has no buckets: nothing is reported there, and the schedule `comm`
paces as `backward` does.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from lightck.loop.checkpointer import Checkpointer
from lightck.loop.hooks import untraced
from lightck.tracing.trace import Trace, now_ns

# ---- what is made of it: copies are paced, and a trace notes it ----------------------------------


@dataclass(eq=False)
class CommObserver:
    """Is told of gradient communication, paces copies by it, and notes it for the trace.

    Called by the thread that runs the backward, except `landed`: any thread. Never raises.
    """

    checkpointer: Checkpointer

    @property
    def trace(self) -> Trace | None:
        """The trace that communication is noted in; None while nobody wants it."""
        return self.checkpointer.pipeline.trace if self.checkpointer.enabled else None

    def launched(self, bucket: int, size: int, share: float, *, seen: bool) -> None:
        """Take note that a bucket's gradients are on their way, and let copies run.

        Args:
            bucket: its number.
            size: its bytes.
            share: of this backward's gradient bytes, how much is under way or done, 0 to 1.
            seen: `landed` will be told of it.
        """
        if not self.checkpointer.enabled:
            return
        pipeline = self.checkpointer.pipeline
        if pipeline.trace is not None and not seen:
            pipeline.trace.bucket(bucket, size, now_ns())
        pipeline.pace(lambda: pipeline.schedule.communicates(share))

    def landed(self, bucket: int, size: int, begin_ns: int) -> None:
        """Note that a bucket that was launched at `begin_ns` is reduced."""
        trace = self.trace
        if trace is not None:
            trace.bucket(bucket, size, begin_ns, now_ns())

    def waits(self) -> None:
        """Let copies run as the schedule says when the backward only waits for other ranks."""
        if self.checkpointer.enabled:
            self.checkpointer.pipeline.pace(self.checkpointer.pipeline.schedule.training_waits)

    def waited(self, begin_ns: int) -> None:
        """Note that the backward has waited for other ranks since `begin_ns`."""
        trace = self.trace
        if trace is not None:
            trace.note("wait", "wait", begin_ns, now_ns())


# ---- the single comm hook of a DDP module, shared by the user's and observers --------------------
# `register_comm_hook` can be called once per module, and never be undone. So lightck puts a method
# of the same name on the *instance*: a hook that the user registers later is registered under its
# own name, wrapped. A bound method is deep-copied and pickled as the copy's own; no wrapper is in
# the module's state.

Hook = Callable[[Any, Any], "Future[Any]"]


class BucketObserver(Protocol):
    """An observer of buckets.

    It is called on the backward's thread, inside DDP's lock, and must not wait.
    """

    def bucket(self, bucket: Any, begin_ns: int, future: Future[Any]) -> None:
        """Observe that a hook was given `bucket` at `begin_ns`, and has launched its reduction."""


@dataclass(eq=False)
class CommHookProxy:
    """The proxy that a DDP module calls as its comm hook."""

    module: weakref.ref[DistributedDataParallel]
    """A weak reference to the module, because the module's reducer holds this for good."""
    watchers: list[BucketObserver] = field(default_factory=list)
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


_seats: weakref.WeakKeyDictionary[DistributedDataParallel, CommHookProxy] = (
    weakref.WeakKeyDictionary()
)


def register_comm_hook(self: DistributedDataParallel, state: object, hook: Hook) -> None:
    """Replace the method of the same name on one instance; a copy of the instance has no proxy."""
    seat = _seats.get(self)
    if seat is None:
        type(self).register_comm_hook(self, state, hook)
    else:
        seat.register(state, hook)


register_comm_hook.__doc__ = DistributedDataParallel.register_comm_hook.__doc__


def sit(
    module: DistributedDataParallel, watcher: BucketObserver, clock: Callable[[], int]
) -> CommHookProxy:
    """Let the watcher observe the hook that the module has or will get; return the proxy."""
    seat = _seats.get(module)
    if seat is None:
        seat = _seats[module] = CommHookProxy(weakref.ref(module))
    seat.clock = clock
    seat.watchers.append(watcher)
    module.__dict__["register_comm_hook"] = types.MethodType(register_comm_hook, module)
    return seat


def seated(module: DistributedDataParallel) -> bool:
    """Tell whether the hook that torch calls can be observed."""
    seat = _seats.get(module)
    return seat is not None and seat.taken


def leave(module: DistributedDataParallel, watcher: BucketObserver) -> None:
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


# ---- what is seen: a bucket's launch, the wait at the end of the backward ------------------------

TRIES = 4
"""Number of tries to read DDP's bucket sizes: DDP logs new ones two forwards after it made them."""


def replicated(model: nn.Module) -> list[DistributedDataParallel]:
    """Return the DDP modules in the model, wherever they are in the module tree."""
    return [module for module in model.modules() if isinstance(module, DistributedDataParallel)]


def reduced_parameters(module: DistributedDataParallel) -> list[nn.Parameter]:
    """Return the parameters whose gradients a DDP module reduces, in its reducer's order."""
    every = module.module.parameters()
    return [p for p in every if p.requires_grad and not hasattr(p, "_ddp_ignored")]


def after_backward(action: Callable[[], None]) -> None:
    """Run `action` when the backward that is running ends, after the callbacks queued before it."""
    torch.autograd.Variable._execution_engine.queue_callback(action)


def backward_now() -> int:
    """Return the number of the backward that this thread runs; -1 outside of one."""
    number: int = torch._C._current_graph_task_id()
    return number


@dataclass(eq=False)
class Buckets:
    """The gradient buckets of one DDP module, as a `BucketObserver` of its proxy sees them."""

    module: DistributedDataParallel
    traffic: CommObserver | None = None
    sizes: Sequence[int] = ()
    """The size of each bucket in bytes; empty while the sizes are not known."""
    came: Callable[[], None] = lambda: None
    """Callback, run at each gradient that completes a bucket."""
    flying: int = 0
    """Bytes launched in this backward."""
    _rebuilt: bool | None = None
    """The value of DDP's `_has_rebuilt_buckets` to which `sizes` belong."""
    _tries: int = 0
    _watching: bool = False
    """True if the user's hook reports the buckets, so that launches need not be inferred."""
    _closing: list[RemovableHandle] = field(default_factory=list)

    @property
    def reduces(self) -> bool:
        """Tell whether the last forward was outside of `no_sync`: its backward communicates."""
        return bool(self.module.require_forward_param_sync)

    def begin(self) -> None:
        """Start a new backward, at its first gradient: no bytes are launched yet."""
        self.flying = 0

    def bucket(self, bucket: Any, begin_ns: int, future: Future[Any]) -> None:
        """Record the launch of a bucket, observed in the comm hook that the user registered."""
        self._watching = True
        number, buffer = bucket.index(), bucket.buffer()
        size = buffer.numel() * buffer.element_size()
        traffic = self.traffic
        if traffic is not None and traffic.trace is not None:
            future.add_done_callback(lambda _: traffic.landed(number, size, begin_ns))
        self._launched(number, size, seen=True)

    def _launched(self, number: int, size: int, *, seen: bool) -> None:
        self.flying += size
        every = sum(self.sizes)
        share = self.flying / every if every else 0.0
        if self.traffic is not None:
            self.traffic.launched(number, size, share, seen=seen)

    def learn(self) -> None:
        """Look up the sizes of DDP's buckets, again after DDP has rebuilt them.

        DDP rebuilds its buckets once, in the order of the first backward's gradients.
        """
        rebuilt = bool(self.module._has_rebuilt_buckets)
        if rebuilt is not self._rebuilt:
            self._rebuilt, self.sizes, self._tries = rebuilt, (), TRIES
            self._forget()
        if self.sizes or not self._tries:
            return
        self._tries -= 1
        self.sizes, last = arrangement(self.module)
        for number, parameter in enumerate(last):
            self._closing.append(self._listen(number, parameter))

    def _listen(self, number: int, parameter: nn.Parameter) -> RemovableHandle:
        @untraced
        def complete(_: torch.Tensor) -> None:
            self.came()
            if self.reduces and not self._watching and number < len(self.sizes):
                self._launched(number, self.sizes[number], seen=False)

        handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(complete)
        return handle

    def _forget(self) -> None:
        while self._closing:
            self._closing.pop().remove()

    def stop(self) -> None:
        """Stop observing; the module is as it was before."""
        leave(self.module, self)
        self.traffic = None
        self._forget()


def arrangement(module: DistributedDataParallel) -> tuple[list[int], list[nn.Parameter]]:
    """Return the bytes of each bucket, and the parameter whose gradient should complete it.

    They come from DDP's logging data; both lists are empty if that does not fit the parameters.
    """
    said = module._get_ddp_logging_data()
    parameters = reduced_parameters(module)
    rebuilt = "rebuilt_" if module._has_rebuilt_buckets else ""
    sizes = _numbers(said.get(f"{rebuilt}bucket_sizes", ""), ",")
    if rebuilt:
        told = said.get("rebuilt_per_bucket_param_indices", "").split(",")
        members = [_numbers(each, " ") for each in told]
    else:
        members = list(_from_the_end(parameters, sizes))
    chosen = [[parameters[i] for i in bucket if i < len(parameters)] for bucket in members]
    found = [sum(p.numel() * p.element_size() for p in bucket) for bucket in chosen]
    if not sizes or found != sizes:
        return [], []
    return sizes, [bucket[-1] for bucket in chosen]


def _numbers(text: str, separator: str) -> list[int]:
    return [int(each) for each in text.split(separator) if each.strip()]


def _from_the_end(parameters: Sequence[nn.Parameter], sizes: Sequence[int]) -> Iterator[list[int]]:
    """Yield the parameter indices of each bucket as DDP fills them before its first backward.

    DDP fills buckets from the last parameter to the first.
    """
    left = list(range(len(parameters)))
    for size in sizes:
        bucket: list[int] = []
        while left and size > 0:
            bucket.append(left.pop())
            size -= parameters[bucket[-1]].numel() * parameters[bucket[-1]].element_size()
        yield bucket


@dataclass(eq=False)
class Communication:
    """Observer of all gradient communication of a model. Used by the training's threads."""

    model: nn.Module
    buckets: list[Buckets] = field(init=False)
    _traffic: CommObserver | None = None
    _backward: int = -1
    _began_ns: int = 0

    def __post_init__(self) -> None:
        """Find the DDP modules."""
        self.buckets = [Buckets(module) for module in replicated(self.model)]

    def install(self, traffic: CommObserver) -> None:
        """Start to report to `traffic`; without DDP there is nothing to observe."""
        self._traffic = traffic
        for each in self.buckets:
            sit(each.module, each, now_ns)
            each.came, each.traffic = self.came, traffic
            each.learn()

    def came(self) -> None:
        """Note a gradient; at the first one of a backward, queue a callback for its end."""
        backward = backward_now()
        if backward == self._backward or backward < 0 or self._traffic is None:
            return
        self._backward = backward
        for each in self.buckets:
            each.begin()
        if any(each.reduces for each in self.buckets):
            after_backward(self._over)

    def _over(self) -> None:
        """Note the end of a backward: every gradient is there.

        DDP's own callback, which runs after this one, waits for the other ranks.
        """
        self._began_ns = now_ns()
        if self._traffic is not None:
            self._traffic.waits()
            after_backward(self._waited)

    def _waited(self) -> None:
        if self._traffic is not None:
            self._traffic.waited(self._began_ns)
        for each in self.buckets:
            each.learn()

    def remove(self) -> None:
        """Stop observing; the modules are as they were before. Idempotent."""
        self._traffic = None
        for each in self.buckets:
            each.stop()
