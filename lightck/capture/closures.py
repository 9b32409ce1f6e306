"""Updates whose optimizer is given a closure: forward and backward run inside of `step(closure)`.

An optimizer that calls its closure once, before it changes anything, updates from there on: its
update begins where the closure returns, and what runs inside is an ordinary iteration. So do
torch's own, but for LBFGS, and only they are believed to: of all others an update begins with
`step`, as without a closure, and the state is mixed inside of it. So it is, too, where hooks of
others come between: they may change parameters, or put another closure in the place of this one.

Who is seen to do otherwise is not believed again. Fused updates move no version counter, so that
what is seen proves the worse, never the better.
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

from lightck.capture.arrange import versions_of
from lightck.capture.state import held_parameters
from lightck.capture.steps import stack
from lightck.events import event

_NAMES = (
    *("ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "Muon", "NAdam"),
    *("RAdam", "RMSprop", "Rprop", "SGD", "SparseAdam"),
)
CALL_FIRST = frozenset(getattr(torch.optim, name) for name in _NAMES if hasattr(torch.optim, name))
"""They call their closure once, before they change anything. They alone, no class made of them."""
OURS: weakref.WeakSet[Callable[..., Any]] = weakref.WeakSet()
"""Global pre-hooks of handles, which change nothing of an optimizer they do not know."""


class Begins(Protocol):
    """`Listener.update_begins`."""

    def __call__(
        self, optimizer: Optimizer, frame: FrameType | None = None, *, unseen: bool = False
    ) -> None:
        """See there."""


@dataclass(eq=False)
class Call:
    """What an optimizer calls in one step, in place of the closure that it was given."""

    closures: Closures
    closure: Callable[..., Any]
    optimizer: Optimizer
    frame: FrameType | None
    """That runs the step; it holds this, so it is let go of where the closure ends."""
    versions: list[int]
    """Of the parameters, where the step begins."""
    begun: bool = False
    """The update has."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The closure; where it returns the update begins."""
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
    """Of one handle. On the training thread; what `Call` calls is kept out of dynamo's tracing."""

    begins: Begins
    owns: Callable[[Optimizer], bool]
    """Whether an optimizer is one of the job's, or changes one of its parameters."""
    untraced: Callable[[Any], Any]
    defers: bool = True
    """False: every update begins with its `step`."""
    _running: list[Call] = field(default_factory=list)
    """Closures that run, and whose updates have not begun; the outermost first."""
    _disbelieved: weakref.WeakSet[Optimizer] = field(default_factory=weakref.WeakSet)
    _told: weakref.WeakSet[Optimizer] = field(default_factory=weakref.WeakSet)

    def __post_init__(self) -> None:
        """What is called around a closure is not compiled; what runs inside of it may be."""
        self.before = self.untraced(self._before)
        self.after = self.untraced(self._after)
        self.left = self.untraced(self._left)

    def stepping(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """An optimizer's step is called: its update begins now, or where its closure returns.

        Args:
            optimizer: whose.
            args: of its `step`, the optimizer first.
            kwargs: likewise.

        Returns:
            What `step` is to be called with instead, as a pre-hook says it; None: just these.
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
        """A step that was called with these returns: by then its update has begun."""
        closure = _closure_of(args, kwargs)
        while isinstance(closure, Call):
            if closure.closures is self and not closure.begun:
                self._has_begun(closure, "has not called its closure")
            closure = closure.closure  # of two handles that know the optimizer each has its own

    def _is_believed(self, optimizer: Optimizer) -> bool:
        if not self.defers or optimizer in self._disbelieved or not self.owns(optimizer):
            return False
        if type(optimizer) not in CALL_FIRST:
            self._tell(optimizer, "is not known to call its closure first, and once")
            return False
        hooks = *hooked._global_optimizer_pre_hooks.values(), *_own_hooks(optimizer)
        if all(any(hook is ours for ours in OURS) for hook in hooks):  # theirs may not hash
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
        """An update begins. One inside of another's closure makes that other's begin, too."""
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
        """It has changed something, perhaps, before anybody knew."""
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
        """By an exception: nothing has begun."""
        call.frame = None
        if call in self._running:
            self._running.remove(call)


def _closure_of(args: Any, kwargs: Any) -> Any:
    return kwargs.get("closure", args[1] if len(args) > 1 else None)


def _own_hooks(optimizer: Optimizer) -> tuple[Any, ...]:
    return tuple(optimizer._optimizer_step_pre_hooks.values())
