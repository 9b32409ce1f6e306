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
from typing import Any

import torch
from torch import nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from lightck.loop.checkpointer import Checkpointer
from lightck.loop.hooks import untraced
from lightck.tracing.trace import Trace, now_ns

# ---- the single comm hook of a DDP module, shared by the user's and observers --------------------
# `register_comm_hook` can be called once per module, and never be undone. So lightck puts a method
# of the same name on the *instance*: a hook that the user registers later is registered under its
# own name, wrapped. A bound method is deep-copied and pickled as the copy's own; no wrapper is in
# the module's state.

Hook = Callable[[Any, Any], "Future[Any]"]


@dataclass(eq=False)
class CommHookProxy:
    """Registers the user's comm hook for a DDP module, wrapped so that its buckets are seen.

    The module's reducer holds this for good; it holds no module.
    """

    observers: list[ModuleBuckets] = field(default_factory=list)
    registered: bool = False
    """True if torch calls this proxy, for good."""

    def register(self, module: DistributedDataParallel, state: object, hook: Hook) -> None:
        """Register the user's hook, in place of the module's `register_comm_hook`."""
        module._check_comm_hook(hook)

        @functools.wraps(hook)
        def observed(state: Any, bucket: Any) -> Future[Any]:
            return self._run(hook, state, bucket)

        try:
            type(module).register_comm_hook(module, state, observed)
            self.registered = True
        finally:  # torch lists even one that it refuses
            module._comm_hooks[-1] = (hook, state)

    def _run(self, hook: Hook, state: Any, bucket: Any) -> Future[Any]:
        begin_ns = now_ns()
        future = hook(state, bucket)
        if isinstance(future, torch._C.Future):  # else DDP says what is wrong
            for observer in tuple(self.observers):
                observer.bucket(bucket, begin_ns, future)
        return future


_proxies: weakref.WeakKeyDictionary[DistributedDataParallel, CommHookProxy] = (
    weakref.WeakKeyDictionary()
)


def register_comm_hook(self: DistributedDataParallel, state: object, hook: Hook) -> None:
    """Replace the method of the same name on one instance; a copy of the instance has no proxy."""
    proxy = _proxies.get(self)
    if proxy is None:
        type(self).register_comm_hook(self, state, hook)
    else:
        proxy.register(self, state, hook)


register_comm_hook.__doc__ = DistributedDataParallel.register_comm_hook.__doc__


def attach(module: DistributedDataParallel, observer: ModuleBuckets) -> None:
    """Let the observer see the hook that the module has from an earlier attach, or will get."""
    proxy = _proxies.setdefault(module, CommHookProxy())
    proxy.observers.append(observer)
    module.__dict__["register_comm_hook"] = types.MethodType(register_comm_hook, module)


def detach(module: DistributedDataParallel, observer: ModuleBuckets) -> None:
    """Stop observing, and leave the module as it was; idempotent."""
    proxy = _proxies.get(module)
    if proxy is None or observer not in proxy.observers:
        return
    proxy.observers.remove(observer)
    if not proxy.observers:
        module.__dict__.pop("register_comm_hook", None)
        if not proxy.registered:
            del _proxies[module]


# ---- the modules and the backward ----------------------------------------------------------------


def ddp_modules(model: nn.Module) -> list[DistributedDataParallel]:
    """Return the DDP modules in the model, wherever they are in the module tree."""
    return [module for module in model.modules() if isinstance(module, DistributedDataParallel)]


def reduced_parameters(module: DistributedDataParallel) -> list[nn.Parameter]:
    """Return the parameters whose gradients a DDP module reduces, in its reducer's order."""
    every = module.module.parameters()
    return [p for p in every if p.requires_grad and not hasattr(p, "_ddp_ignored")]


def after_backward(action: Callable[[], None]) -> None:
    """Run `action` when the backward that is running ends, after the callbacks queued before it."""
    torch.autograd.Variable._execution_engine.queue_callback(action)


def current_backward() -> int:
    """Return the number of the backward that this thread runs; -1 outside of one."""
    number: int = torch._C._current_graph_task_id()
    return number


# ---- what is observed: a bucket's launch, the wait at the end of the backward --------------------

TRIES = 4
"""Number of tries to read DDP's bucket sizes: DDP logs new ones two forwards after it made them."""


class DdpCommunication:
    """Observes all gradient communication of a model, paces copies by it, and traces it.

    Called by the thread that runs the backward, except `reduced`: any thread. Never raises.
    """

    def __init__(
        self, modules: Sequence[DistributedDataParallel], checkpointer: Checkpointer
    ) -> None:
        """Start to observe; without DDP modules there is nothing to observe."""
        self._checkpointer = checkpointer
        self._backward = -1
        self._wait_began_ns = 0
        self._buckets = [ModuleBuckets(module, self) for module in modules]

    @property
    def trace(self) -> Trace | None:
        """The trace that communication is noted in; None if there is none to be made."""
        return self._checkpointer.pipeline.trace if self._checkpointer.enabled else None

    def gradient(self) -> None:
        """Note a gradient; at the first one of a backward, queue a callback for its end."""
        backward = current_backward()
        if backward == self._backward or backward < 0:
            return
        self._backward = backward
        for each in self._buckets:
            each.launched_bytes = 0
        if any(each.communicates for each in self._buckets):
            after_backward(self.gradients_complete)

    def launched(self, bucket: int, size: int, share: float, *, observed: bool) -> None:
        """Note that a bucket's gradients are on their way, and let copies run.

        Args:
            bucket: its number.
            size: its bytes.
            share: of this backward's gradient bytes, how much is under way or done, 0 to 1.
            observed: `reduced` will be called for it.
        """
        if not self._checkpointer.enabled:
            return
        pipeline = self._checkpointer.pipeline
        if pipeline.trace is not None and not observed:
            pipeline.trace.bucket(bucket, size, now_ns())
        pipeline.pace(lambda: pipeline.schedule.communicates(share))

    def reduced(self, bucket: int, size: int, begin_ns: int) -> None:
        """Note that a bucket that was launched at `begin_ns` is reduced."""
        trace = self.trace
        if trace is not None:
            trace.bucket(bucket, size, begin_ns, now_ns())

    def gradients_complete(self) -> None:
        """Let copies run as the schedule says when the backward only waits for other ranks.

        DDP's own callback, which runs after this one, does that.
        """
        self._wait_began_ns = now_ns()
        if self._checkpointer.enabled:
            pipeline = self._checkpointer.pipeline
            pipeline.pace(pipeline.schedule.training_waits)
        after_backward(self._waited)

    def _waited(self) -> None:
        trace = self.trace
        if trace is not None:
            trace.note("wait", "wait", self._wait_began_ns, now_ns())
        for each in self._buckets:
            each.learn_sizes()

    def remove(self) -> None:
        """Stop observing; the modules are as they were before. Idempotent."""
        for each in self._buckets:
            each.remove()
        self._buckets.clear()


class ModuleBuckets:
    """The gradient buckets of one DDP module, as its proxy and gradient hooks see them."""

    def __init__(self, module: DistributedDataParallel, communication: DdpCommunication) -> None:
        """Start to observe the module."""
        self.launched_bytes = 0
        """Bytes launched in this backward."""
        self._module, self._communication = module, communication
        self._sizes: Sequence[int] = ()  # of each bucket in bytes; empty while not known
        self._rebuilt: bool | None = None  # DDP's `_has_rebuilt_buckets` that `_sizes` belong to
        self._tries = 0
        self._hooked = False  # the user's hook reports launches: none is inferred
        self._completions: list[RemovableHandle] = []
        attach(module, self)
        self.learn_sizes()

    @property
    def communicates(self) -> bool:
        """Tell whether the last forward was outside of `no_sync`: its backward communicates."""
        return bool(self._module.require_forward_param_sync)

    def bucket(self, bucket: Any, begin_ns: int, future: Future[Any]) -> None:
        """Record that the user's comm hook was given `bucket`, and has launched its reduction.

        Called inside DDP's lock: it must not wait.
        """
        self._hooked = True
        number, buffer = bucket.index(), bucket.buffer()
        size = buffer.numel() * buffer.element_size()
        communication = self._communication
        if communication.trace is not None:
            future.add_done_callback(lambda _: communication.reduced(number, size, begin_ns))
        self._launched(number, size, observed=True)

    def _launched(self, number: int, size: int, *, observed: bool) -> None:
        self.launched_bytes += size
        every = sum(self._sizes)
        share = self.launched_bytes / every if every else 0.0
        self._communication.launched(number, size, share, observed=observed)

    def learn_sizes(self) -> None:
        """Look up the sizes of DDP's buckets, again after DDP has rebuilt them.

        DDP rebuilds its buckets once, in the order of the first backward's gradients.
        """
        rebuilt = bool(self._module._has_rebuilt_buckets)
        if rebuilt is not self._rebuilt:
            self._rebuilt, self._sizes, self._tries = rebuilt, (), TRIES
            self._remove_hooks()
        if self._sizes or not self._tries:
            return
        self._tries -= 1
        self._sizes, last = bucket_layout(self._module)
        for number, parameter in enumerate(last):
            self._completions.append(self._completion_hook(number, parameter))

    def _completion_hook(self, number: int, parameter: nn.Parameter) -> RemovableHandle:
        @untraced
        def complete(_: torch.Tensor) -> None:
            self._communication.gradient()
            if self.communicates and not self._hooked and number < len(self._sizes):
                self._launched(number, self._sizes[number], observed=False)

        handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(complete)
        return handle

    def _remove_hooks(self) -> None:
        while self._completions:
            self._completions.pop().remove()

    def remove(self) -> None:
        """Stop observing; the module is as it was before."""
        detach(self._module, self)
        self._remove_hooks()


def bucket_layout(module: DistributedDataParallel) -> tuple[list[int], list[nn.Parameter]]:
    """Return the bytes of each bucket, and the parameter whose gradient should complete it.

    They come from DDP's logging data; both lists are empty if that does not fit the parameters.
    """
    logged = module._get_ddp_logging_data()
    parameters = reduced_parameters(module)
    rebuilt = "rebuilt_" if module._has_rebuilt_buckets else ""
    sizes = _numbers(logged.get(f"{rebuilt}bucket_sizes", ""), ",")
    if rebuilt:
        members = _rebuilt_buckets(logged)
    else:
        members = list(_initial_buckets(parameters, sizes))
    chosen = [[parameters[i] for i in bucket if i < len(parameters)] for bucket in members]
    found = [sum(p.numel() * p.element_size() for p in bucket) for bucket in chosen]
    if not sizes or found != sizes:
        return [], []
    return sizes, [bucket[-1] for bucket in chosen]


def logged_buckets(module: DistributedDataParallel) -> list[list[int]]:
    """Return the parameter indices of each rebuilt bucket; empty while DDP has not logged them."""
    found = _rebuilt_buckets(module._get_ddp_logging_data())
    every = sorted(index for bucket in found for index in bucket)
    return found if every == [*range(len(reduced_parameters(module)))] else []


def _rebuilt_buckets(logged: dict[str, Any]) -> list[list[int]]:
    texts = logged.get("rebuilt_per_bucket_param_indices", "").split(",")
    return [_numbers(each, " ") for each in texts]


def _numbers(text: str, separator: str) -> list[int]:
    return [int(each) for each in text.split(separator) if each.strip()]


def _initial_buckets(
    parameters: Sequence[nn.Parameter], sizes: Sequence[int]
) -> Iterator[list[int]]:
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
