"""When gradients are on their way to other ranks, seen without owning DDP's communication.

Where the user has registered a hook since attach, his buckets are seen. Else a bucket's launch is
taken from the gradient that completes it. The end of a backward is a final callback of autograd:
queued at the first gradient, it runs before the one in which DDP waits for its buckets. FSDP2 has
no buckets: there nothing is told, and the schedule `comm` paces as `backward` does.
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

from lightck.capture.hooks import untraced
from lightck.capture.trace import now_ns
from lightck.capture.traffic import Traffic
from lightck.distributed.seat import leave, sit

TRIES = 4
"""DDP logs a new arrangement two forwards after it has made it."""


def replicated(model: nn.Module) -> list[DistributedDataParallel]:
    """DDP modules, wherever they are in the tree."""
    return [module for module in model.modules() if isinstance(module, DistributedDataParallel)]


def reduced_parameters(module: DistributedDataParallel) -> list[nn.Parameter]:
    """Whose gradients it reduces, in its reducer's order."""
    every = module.module.parameters()
    return [p for p in every if p.requires_grad and not hasattr(p, "_ddp_ignored")]


def after_backward(action: Callable[[], None]) -> None:
    """Run `action` when the backward that is running is over, behind what asked for it before."""
    torch.autograd.Variable._execution_engine.queue_callback(action)


def backward_now() -> int:
    """The number of the backward that this thread runs; -1 outside of one."""
    number: int = torch._C._current_graph_task_id()
    return number


@dataclass(eq=False)
class Buckets:
    """The gradients of one DDP module on their way; a `Watcher` of its seat."""

    module: DistributedDataParallel
    traffic: Traffic | None = None
    sizes: Sequence[int] = ()
    """Bytes of each bucket; empty while they are not known."""
    came: Callable[[], None] = lambda: None
    """Called at each gradient that is listened to."""
    flying: int = 0
    """Bytes launched in this backward."""
    _rebuilt: bool | None = None
    """What `sizes` are of."""
    _tries: int = 0
    _watching: bool = False
    """A hook tells the buckets, exactly."""
    _closing: list[RemovableHandle] = field(default_factory=list)

    @property
    def reduces(self) -> bool:
        """The last forward was outside of `no_sync`: its backward communicates."""
        return bool(self.module.require_forward_param_sync)

    def begin(self) -> None:
        """The first gradient of a backward."""
        self.flying = 0

    def bucket(self, bucket: Any, begin_ns: int, future: Future[Any]) -> None:
        """The hook that the user registered has launched one."""
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
        """DDP arranges its buckets once more, in the order of the first backward's gradients."""
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
        """Leave the module as it was."""
        leave(self.module, self)
        self.traffic = None
        self._forget()


def arrangement(module: DistributedDataParallel) -> tuple[list[int], list[nn.Parameter]]:
    """Bytes of each bucket, and the parameter whose gradient should be its last to come.

    DDP says it in what it logs; nothing is known where that does not fit the parameters.
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
    """Before its first backward DDP fills buckets from the last parameter to the first."""
    left = list(range(len(parameters)))
    for size in sizes:
        bucket: list[int] = []
        while left and size > 0:
            bucket.append(left.pop())
            size -= parameters[bucket[-1]].numel() * parameters[bucket[-1]].element_size()
        yield bucket


@dataclass(eq=False)
class Communication:
    """All of a model's communication. Used by the threads of the training."""

    model: nn.Module
    buckets: list[Buckets] = field(init=False)
    _traffic: Traffic | None = None
    _backward: int = -1
    _began_ns: int = 0

    def __post_init__(self) -> None:
        """Find it."""
        self.buckets = [Buckets(module) for module in replicated(self.model)]

    def install(self, traffic: Traffic) -> None:
        """Begin to tell; without data parallel there is nothing to look at."""
        self._traffic = traffic
        for each in self.buckets:
            sit(each.module, each, now_ns)
            each.came, each.traffic = self.came, traffic
            each.learn()

    def came(self) -> None:
        """A gradient; the first of a backward asks for the end of it."""
        backward = backward_now()
        if backward == self._backward or backward < 0 or self._traffic is None:
            return
        self._backward = backward
        for each in self.buckets:
            each.begin()
        if any(each.reduces for each in self.buckets):
            after_backward(self._over)

    def _over(self) -> None:
        """Every gradient has come; DDP's own callback, behind this one, waits for the others."""
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
        """Leave the modules as they were; idempotent."""
        self._traffic = None
        for each in self.buckets:
            each.stop()
