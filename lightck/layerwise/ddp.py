"""Gradients under DDP, each final as soon as its bucket is reduced, while others are in transit.

DDP takes one comm hook for its life and calls it with undivided gradients. Layer-wise update needs
to see when buckets are reduced, so it registers a hook that does what DDP does without one, bit for
bit; a hook that the user registers later replaces it (`distributed/ddp_communication.py`). Updates
never run inside the hook, which DDP calls under its lock: they run at later gradients, and at the
end of the backward, on the thread that runs it. Errors are raised after DDP has ended the backward,
so that other ranks are not left in a reduction.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from lightck.distributed.ddp_communication import (
    after_backward,
    attach,
    current_backward,
    ddp_modules,
    detach,
    is_observable,
    reduced_parameters,
)
from lightck.errors import ConfigError
from lightck.layerwise.gradients import FinalGradients, GradientListener, LocalGradients
from lightck.loop.hooks import untraced
from lightck.state import tensor_layout

_JOINED = "DDP's join() with divide_by_initial_world_size=False"


@dataclass(eq=False)
class DefaultReduction:
    """A comm hook that does what DDP does without one: the same operations on the same values.

    DDP multiplies by 1/world while it copies a gradient into its bucket, but divides by world what
    is in its bucket already (gradient_as_bucket_view, from the second gradient on), or the whole
    bucket at once (batched_grad_copy).
    """

    reference: weakref.ref[DistributedDataParallel]
    """A weak reference to the module, because DDP's reducer holds this hook for good."""
    _addresses: dict[int, int] = field(default_factory=dict)
    """The gradient's address before DDP looked at it, by parameter id; empty between reductions."""

    def listen(self) -> None:
        """Hook every parameter, to note where its gradient is before DDP moves it to its bucket."""
        module = self.reference()
        assert module is not None
        if not module.gradient_as_bucket_view or module.batched_grad_copy:
            return
        every = [weakref.ref(p) for p in reduced_parameters(module)]

        @untraced
        def note(parameter: torch.Tensor) -> None:
            if not self._addresses:
                for each in every:  # parameters that get no gradient now are in a bucket, too
                    self._note_address(each())
            self._note_address(parameter)

        for each in every:
            parameter = each()
            assert parameter is not None
            parameter.register_post_accumulate_grad_hook(note)

    def _note_address(self, parameter: torch.Tensor | None) -> None:
        if parameter is not None:
            gradient = parameter.grad
            self._addresses[id(parameter)] = 0 if gradient is None else gradient.data_ptr()

    def __call__(self, _: Any, bucket: Any) -> Future[Any]:
        """Reduce a bucket, as a comm hook of DDP."""
        module = self.reference()
        assert module is not None, "the module calls, and is gone"
        if module._join_config.enable and not module._divide_by_initial_world_size:
            raise ConfigError(f'update="layerwise" was asked for, but {_JOINED} is used')
        world = module.process_group.size()
        buffer = bucket.buffer()
        if module.batched_grad_copy:
            buffer.div_(world)
        elif not module.gradient_as_bucket_view:
            buffer.mul_(1.0 / world)
        else:
            for parameter, part in zip(bucket.parameters(), bucket.gradients(), strict=True):
                if self._addresses.get(id(parameter)) == part.data_ptr():
                    part.div_(world)
                else:
                    part.mul_(1.0 / world)
        if bucket.is_last():
            self._addresses.clear()
        reducer: Any = module.reducer
        summed: Future[Any] = reducer._run_allreduce_hook(bucket)
        return summed.then(_first)  # DDP accepts only a single tensor from Python


def _first(summed: Future[Any]) -> torch.Tensor:
    value = summed.value()
    tensor: torch.Tensor = value[0] if isinstance(value, list | tuple) else value
    return tensor


@dataclass(eq=False)
class LaunchedBucket:
    """A bucket whose reduction has been launched."""

    future: Future[Any]
    last: bool
    parts: list[tuple[nn.Parameter, int]]
    """The bucket's parameters, and where in it their gradients begin, in elements."""

    @classmethod
    def of(cls, bucket: Any, future: Future[Any]) -> LaunchedBucket:
        """Record a bucket and the future that DDP's hook returned for it."""
        start = bucket.buffer().storage_offset()
        starts = [part.storage_offset() - start for part in bucket.gradients()]
        parts = list(zip(bucket.parameters(), starts, strict=True))
        return cls(future, bucket.is_last(), parts)

    def reduced(self) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        """Wait for the reduction; yield parameters and gradients in the layout of DDP.

        Raises:
            RuntimeError: the reduction failed.
        """
        self.future.wait()
        whole: torch.Tensor = self.future.value()
        for p, start in self.parts:
            at = whole.storage_offset() + start
            strides = (
                p.stride() if tensor_layout.is_dense(p) else tensor_layout.row_major(tuple(p.shape))
            )
            yield p, whole.as_strided(p.shape, strides, at)


@dataclass(eq=False)
class ReducedGradients:
    """`FinalGradients` of one model with DDP modules in it."""

    modules: list[DistributedDataParallel]
    _attached: bool = False
    _listener: GradientListener | None = None
    _pending: dict[int, torch.Tensor] = field(default_factory=dict)
    """Parameters whose gradient was added to here and has not been reduced, by id."""
    _launched: deque[LaunchedBucket] = field(default_factory=deque)
    _final: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    """Parameters and their reduced gradients, by id, until DDP has ended the backward."""
    _backward: int = -1
    _ending: bool = False
    """True if a module's last bucket is launched: DDP ends this backward with a reduction."""
    _error: Exception | None = None

    def refusal(self) -> str | None:
        """Return why this model cannot be updated layer-wise under DDP; None if it can.

        Comm hooks registered before attach cannot be wrapped, and some of DDP's modes update by
        themselves.
        """
        for module in self.modules:
            if module.mixed_precision is not None:
                return "DDP's mixed_precision reduces with a hook of its own"
            if not is_observable(module) and _has_hook(module):
                return (
                    "a communication hook was registered before attach, and DDP cannot let go of"
                    " it: register it afterwards"
                )
            if any(getattr(m, "sparse", False) is True for m in module.modules()):
                return "DDP reduces the sparse gradients of an embedding by themselves"
            if any(hasattr(p, "_in_backward_optimizers") for p in module.parameters()):
                return "DDP itself updates in its backward (_apply_optimizer_in_backward)"
            if module._use_python_reducer or module._delay_all_reduce_params:
                return "this DDP module does not reduce in buckets"
        return None

    def listen(
        self, parameters: Iterable[torch.Tensor], listener: GradientListener
    ) -> list[RemovableHandle]:
        """Hook the parameters; those that no DDP module reduces are final when accumulated."""
        self._listener = listener
        if not self._attached:
            self._attached = True
            for module in self.modules:
                self._attach(module)
        shared = {id(p) for module in self.modules for p in reduced_parameters(module)}
        every = list(parameters)
        local = [p for p in every if id(p) not in shared]

        @untraced
        def hook(parameter: torch.Tensor) -> None:
            self._gradient_added(parameter)

        handles = [p.register_post_accumulate_grad_hook(hook) for p in every if id(p) in shared]
        return handles + LocalGradients().listen(local, listener)

    def _attach(self, module: DistributedDataParallel) -> None:
        proxy = attach(module, self)
        if not proxy.registered:
            reduction = DefaultReduction(weakref.ref(module))
            proxy.register_default(reduction)
            reduction.listen()

    def bucket(self, bucket: Any, begin_ns: int, future: Future[Any]) -> None:
        """Record a launched bucket.

        It is ignored on a rank that has joined early: nothing is pending there.
        """
        if self._pending:
            self._launched.append(LaunchedBucket.of(bucket, future))
            self._ending = self._ending or self._launched[-1].last

    def _gradient_added(self, parameter: torch.Tensor) -> None:
        backward = current_backward()
        if backward != self._backward:
            self._backward = backward
            after_backward(self._gradients_complete)
        self._unless_failed(lambda: self._add_pending(parameter))

    def _add_pending(self, parameter: torch.Tensor) -> None:
        if id(parameter) in self._pending:
            self._report(self._pending.pop(id(parameter)), final=False)
        self._pending[id(parameter)] = parameter
        while self._launched and self._launched[0].future.done():
            self._report_oldest()

    def _report_oldest(self) -> None:
        """Wait for the oldest launched bucket, and report its gradients as final."""
        launched = self._launched.popleft()
        mine = [(p, final) for p, final in launched.reduced() if id(p) in self._pending]
        self._final |= {id(p): (p, final) for p, final in mine}
        for p, _ in mine:
            del self._pending[id(p)]
            self._report(p, final=True)

    def _report(self, parameter: torch.Tensor, *, final: bool) -> None:
        assert self._listener is not None
        self._listener.gradient_added(parameter, final=final)

    def _unless_failed(self, action: Callable[[], None]) -> None:
        """Run the action unless one has failed in this backward; keep its error for the end."""
        if self._error is None:
            try:
                action()
            except Exception as error:  # noqa: BLE001
                self._error = error

    def _gradients_complete(self) -> None:
        """Note the end of a backward: every gradient is accumulated.

        DDP's own callback runs after this one.
        """
        if not self._ending:
            self._raise()
            return
        after_backward(self._reduction_ended)
        self._unless_failed(self._report_all)

    def _report_all(self) -> None:
        while self._launched:
            self._report_oldest()

    def _reduction_ended(self) -> None:
        """Check the reduced gradients that DDP has put in place; raise the backward's error."""
        self._ending = False
        self._launched.clear()
        self._unless_failed(self._compare)
        self._final.clear()
        self._raise()

    def _compare(self) -> None:
        assert self._listener is not None
        for parameter, gradient in self._final.values():
            self._listener.gradient_placed(parameter, gradient)

    def _raise(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            self._pending.clear()
            raise error

    @contextmanager
    def in_place(self, parameters: Iterable[torch.Tensor]) -> Iterator[None]:
        """Put reduced gradients in `p.grad` for the context: DDP itself does so only at the end."""
        swapped: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        try:
            for p in parameters:
                final = self._final.get(id(p))
                if final is not None:
                    swapped.append((p, p.grad))
                    p.grad = final[1]
            yield
        finally:
            for p, gradient in swapped:
                p.grad = gradient

    def step_begins(self) -> None:
        """Report pending gradients as not final: they were accumulated under no_sync."""
        while self._pending:
            _, parameter = self._pending.popitem()
            self._report(parameter, final=False)

    def stop(self) -> None:
        """Stop observing the buckets; a hook of ours that DDP holds goes on as DDP would."""
        for module in self.modules:
            detach(module, self)
        self._attached = False


def _has_hook(module: DistributedDataParallel) -> bool:
    """Tell whether a comm hook is registered; built-in ones are only in DDP's logging data."""
    return bool(module._comm_hooks) or "comm_hook" in module._get_ddp_logging_data()


def final_gradients(model: nn.Module) -> FinalGradients:
    """Return the object that tells when gradients of this model are final."""
    modules = ddp_modules(model)
    return ReducedGradients(modules) if modules else LocalGradients()
