"""The times at which gradients are sent to other ranks, observed without owning DDP's comm hook.

Where the user has registered a comm hook since attach, its buckets are observed. Otherwise a
bucket's launch is inferred from the gradient that completes it. The end of a backward is found by a
final callback of autograd: queued at the first gradient, it runs before the callback in which DDP
waits for its buckets. FSDP2 has no buckets: nothing is reported there, and the schedule `comm`
paces as `backward` does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from lightck.distributed.seat import leave, sit
from lightck.distributed.traffic import Traffic
from lightck.loop.hooks import untraced
from lightck.tracing.trace import now_ns

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
    """Observer of the gradient buckets of one DDP module; a `Watcher` of the module's seat."""

    module: DistributedDataParallel
    traffic: Traffic | None = None
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
    _traffic: Traffic | None = None
    _backward: int = -1
    _began_ns: int = 0

    def __post_init__(self) -> None:
        """Find the DDP modules."""
        self.buckets = [Buckets(module) for module in replicated(self.model)]

    def install(self, traffic: Traffic) -> None:
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
