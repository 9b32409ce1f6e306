"""Follow optimizers that are given a closure: forward and backward run inside `step(closure)`.

An optimizer that calls its closure once, before it changes anything, updates from there on: its
update begins where the closure returns, and what runs inside is an ordinary iteration. torch's own
optimizers but LBFGS do that, and only they are trusted to. For all others an update begins with
`step`, as without a closure, and inside it the state is mixed. So it is, too, where others' hooks
come between: they may change parameters, or put another closure in the place of this one.

An optimizer that is seen to do otherwise is not trusted again. Fused updates move no version
counter: what is seen can prove that an optimizer does otherwise, never that it does not.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Protocol

import torch
from torch.optim import Optimizer
from torch.optim import optimizer as hooked

from lightck.events import event
from lightck.loop.steps import stack
from lightck.pipeline.copy_plan import versions_of
from lightck.state.inventory import held_parameters

_NAMES = (
    *("ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "Muon", "NAdam"),
    *("RAdam", "RMSprop", "Rprop", "SGD", "SparseAdam"),
)
CALL_FIRST = frozenset(getattr(torch.optim, name) for name in _NAMES if hasattr(torch.optim, name))
"""Classes, without subclasses, that call their closure once, before they change anything."""
OURS: weakref.WeakSet[Callable[..., Any]] = weakref.WeakSet()
"""Global pre-hooks of lightck's handles, which leave optimizers that they do not know alone."""


class Begins(Protocol):
    """Signature of `hooks.Listener.update_begins`."""

    def __call__(
        self, optimizer: Optimizer, frame: FrameType | None = None, *, unseen: bool = False
    ) -> None:
        """Note that an update begins; see `hooks.Listener.update_begins`."""


@dataclass(eq=False)
class Call:
    """Takes the closure's place in one step, to see where it is called and where it returns."""

    closures: Closures
    closure: Callable[..., Any]
    optimizer: Optimizer
    frame: FrameType | None
    """Frame that runs the step; it holds this object, so it is dropped when the closure ends."""
    versions: list[int]
    """Versions of the parameters where the step begins."""
    begun: bool = False
    """True once the update has begun."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the closure; the update begins where it returns."""
        self.closures.before(self)
        try:
            result = self.closure(*args, **kwargs)
        except BaseException:
            self.closures.left(self)
            raise
        self.closures.after(self)
        return result


@dataclass(eq=False)
class Closures:
    """Finds where updates with a closure begin, for one handle. On the training thread.

    What `Call` calls is kept out of dynamo's tracing.
    """

    begins: Begins
    owns: Callable[[Optimizer], bool]
    """Tells whether an optimizer is one of the job's, or changes one of its parameters."""
    untraced: Callable[[Any], Any]
    defers: bool = True
    """True if updates may begin where the closure returns; else each begins with its `step`."""
    _running: list[Call] = field(default_factory=list)
    """Closures that run, and whose updates have not begun; the outermost first."""
    _disbelieved: weakref.WeakSet[Optimizer] = field(default_factory=weakref.WeakSet)
    _told: weakref.WeakSet[Optimizer] = field(default_factory=weakref.WeakSet)

    def __post_init__(self) -> None:
        """Keep dynamo out of what is called around a closure; what runs inside may be compiled."""
        self.before = self.untraced(self._before)
        self.after = self.untraced(self._after)
        self.left = self.untraced(self._left)

    def stepping(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """Note that `step` is called: the update begins now, or where the closure returns.

        Args:
            optimizer: the optimizer whose `step` is called.
            args: positional arguments of `step`, the optimizer first.
            kwargs: keyword arguments of `step`.

        Returns:
            Arguments to call `step` with instead, as a pre-hook returns them; None: these.
        """
        closure = _closure_of(args, kwargs)
        if not callable(closure) or not self._is_believed(optimizer):
            self._begin(optimizer)
            return None
        versions = versions_of([*held_parameters(optimizer)])
        call = Call(self, closure, optimizer, stack()[0], versions)
        if "closure" in kwargs:
            return args, {**kwargs, "closure": call}
        return (args[0], call, *args[2:]), kwargs

    def stepped(self, args: Any, kwargs: Any) -> None:
        """Note that `step` returns, which had these arguments: its update has begun by then."""
        closure = _closure_of(args, kwargs)
        while isinstance(closure, Call):
            if closure.closures is self and not closure.begun:
                self._has_begun(closure, "has not called its closure")
            closure = closure.closure  # each handle that knows the optimizer has its own

    def _is_believed(self, optimizer: Optimizer) -> bool:
        if not self.defers or optimizer in self._disbelieved or not self.owns(optimizer):
            return False
        if type(optimizer) not in CALL_FIRST:
            self._tell(optimizer, "is not known to call its closure first, and once")
            return False
        hooks = *hooked._global_optimizer_pre_hooks.values(), *_own_hooks(optimizer)
        if all(any(hook is ours for ours in OURS) for hook in hooks):  # others' may not be hashable
            return True
        self._tell(optimizer, "has hooks of others before its step")
        return False

    def _tell(self, optimizer: Optimizer, why: str) -> None:
        if optimizer not in self._told:
            self._told.add(optimizer)
            event("closure_mixed", optimizer=type(optimizer).__name__, why=why)

    def _begin(
        self, optimizer: Optimizer, frame: FrameType | None = None, *, unseen: bool = False
    ) -> None:
        """Report that an update begins; inside another's closure that other's begins, too."""
        if self._running and self.owns(optimizer):
            outer, self._running = self._running, []
            for call in outer:
                self._begin_of(call)
        self.begins(optimizer, frame, unseen=unseen)

    def _begin_of(self, call: Call, *, unseen: bool = False) -> None:
        if not call.begun:
            call.begun = True
            frame, call.frame = call.frame, None
            self._begin(call.optimizer, frame, unseen=unseen)

    def _has_begun(self, call: Call, why: str) -> None:
        """Report an update that may have changed something already; trust its optimizer no more."""
        self._disbelieved.add(call.optimizer)
        self._tell(call.optimizer, why)
        self._begin_of(call, unseen=True)

    # ---- around the closure ----------------------------------------------------------------

    def _before(self, call: Call) -> None:
        if call.begun:
            self._disbelieved.add(call.optimizer)
            self._tell(call.optimizer, "calls its closure again")
        elif versions_of([*held_parameters(call.optimizer)]) != call.versions:
            self._has_begun(call, "changes parameters before it calls its closure")
        else:
            self._running.append(call)

    def _after(self, call: Call) -> None:
        if call in self._running:
            self._running.remove(call)
        self._begin_of(call)

    def _left(self, call: Call) -> None:
        """Forget a closure that was left by an exception: no update has begun."""
        call.frame = None
        if call in self._running:
            self._running.remove(call)


def _closure_of(args: Any, kwargs: Any) -> Any:
    return kwargs.get("closure", args[1] if len(args) > 1 else None)


def _own_hooks(optimizer: Optimizer) -> tuple[Any, ...]:
    return tuple(optimizer._optimizer_step_pre_hooks.values())
