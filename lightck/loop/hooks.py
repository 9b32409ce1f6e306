"""Hook into a training loop: updates, the next forward, layers' gradients, loaders started anew.

Hooks decide *when*, never *what*: they call a `Listener`. Optimizer hooks are torch's global ones,
which enclose the user's own. All are kept out of dynamo's tracing.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from types import FrameType, NoneType
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import nn
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.utils.parametrize import ParametrizationList
from torch.optim import Optimizer
from torch.optim import optimizer as hooked
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.data import DataLoader
from torch.utils.hooks import RemovableHandle

from lightck.data import lookahead
from lightck.events import event
from lightck.loop.steps import stack
from lightck.pipeline.copy_plan import versions_of
from lightck.state import data_loaders, modules
from lightck.state.inventory import held_parameters, torch_class
from lightck.state.modules import named_modules, named_parameters, trains

_COMPILED_WITH_HOOKS = r"Using `torch\.compile\(module\)` when there are global hooks"
F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")
FEW_LAYERS = 32
"""The most layers that are hooked where nobody has to know of each one's gradient: a call takes
more than a microsecond, and with 25,000 layers that is much of what a copy of them takes."""


class Listener(Protocol):
    """Receiver of the hooks' calls: on the training thread, except `gradient` (autograd's)."""

    def update_begins(
        self, optimizer: Optimizer, frame: FrameType | None = None, *, unseen: bool = False
    ) -> None:
        """Note that an optimizer is about to change its parameters.

        Args:
            optimizer: the optimizer.
            frame: the frame that runs its step; None: the caller's.
            unseen: the optimizer may have changed something already.
        """

    def update_ends(self, optimizer: Optimizer) -> None:
        """Note that an optimizer has changed its parameters."""

    def update_skipped(self, optimizer: Optimizer) -> None:
        """Note that the gradient scaler left the update out."""

    def forward(self, training: bool) -> None:
        """Note that a module with watched parameters runs next; `training`: with gradients."""

    def evaluation(self) -> None:
        """Note that a module with watched parameters runs next, and does not train."""

    def gradient(self, layer: str) -> None:
        """Note that a layer's gradient has been accumulated."""

    def iterating(self, loader: Any, drawing: bool = False) -> None:
        """Note that `iter(loader)`, or (`drawing`) an extra's next batch, is about to be made."""

    def drawn(self) -> None:
        """Note that an extra's batch has been drawn."""

    def drawing_ahead(self, iterator: lookahead.Lookahead) -> None:
        """Note that a batch is about to be drawn that the loop is given later."""

    def mark_begin(self) -> None:
        """Note that an update begins which the loop marks itself: `handle.before_update()`."""

    def mark_end(self) -> None:
        """Note that it has ended: `handle.after_update()`."""


def untraced(function: F) -> F:
    """Keep dynamo out of a hook and everything that it calls.

    Where dynamo does not trace, which is known at once, the hook is called past torch's wrapper:
    that takes longer than most hooks, and there is one for each layer's gradient.
    """
    outside = torch.compiler.disable(function)

    def quiet(*args: Any, **kwargs: Any) -> Any:
        if get_eval_frame_callback() is None:
            return function(*args, **kwargs)
        return outside(*args, **kwargs)

    hook: Any = torch._dynamo.decorators.skip(quiet)
    vars(hook).update(vars(outside))  # dynamo takes it for that where it meets the call
    return cast(F, hook)


@dataclass(eq=False)
class Watched:
    """Knows which modules, and which optimizers, have parameters of the model."""

    model: nn.Module
    _ids: set[int] = field(default_factory=set)
    _modules: list[weakref.ref[nn.Module]] = field(default_factory=list)
    """The modules with parameters of their own; one that is replaced is not kept alive."""
    _answers: weakref.WeakKeyDictionary[nn.Module, bool] = field(
        default_factory=weakref.WeakKeyDictionary
    )

    def refresh(self) -> None:
        """Look at the model's parameters again."""
        self._ids = {id(parameter) for _, parameter in named_parameters(self.model)}
        self._modules = [weakref.ref(m) for m in self.model.modules() if m._parameters]
        self._answers.clear()

    def holds(self, module: nn.Module) -> bool:
        """Tell whether a module, or one inside it, has one of the parameters."""
        answer = self._answers.get(module)
        if answer is None:
            answer = any(id(p) in self._ids for _, p in named_parameters(module))
            self._answers[module] = answer
        return answer

    def stand_ins(self) -> bool:
        """Tell whether other tensors stand in the place of parameters (`functional_call`)."""
        modules = (ref() for ref in self._modules)
        every = [*chain.from_iterable(m._parameters.values() for m in modules if m is not None)]
        kinds = set(map(type, every)) - {nn.Parameter, NoneType}
        return bool(kinds) and not all(
            each is None or isinstance(each, nn.Parameter) for each in every
        )

    def owns(self, optimizer: Optimizer) -> bool:
        """Tell whether an optimizer changes one of the parameters."""
        return any(id(p) in self._ids for g in optimizer.param_groups for p in g["params"])


@dataclass(eq=False)
class Hooks:
    """Installs and removes every hook of one handle."""

    watched: Watched
    loaders: tuple[Any, ...] = ()
    """Extras that the loop iterates over."""
    recording: Callable[[], bool] | None = None
    """Tells whether the calling thread's device records a graph: what runs then changes nothing
    and is no step. None: there is no device."""
    optimizers: Sequence[Optimizer] = ()
    """Optimizers of the job, whose parameters need not be the model's; grows as they are found."""
    _listener: Listener | None = None
    """Receiver of the calls; None before `install` and after `remove`."""
    _armed: bool = False
    """True if forwards are to be reported."""
    _handles: list[RemovableHandle] = field(default_factory=list)
    _forward: RemovableHandle | None = None
    _before: Callable[[nn.Module, Any], None] | None = None

    @property
    def listener(self) -> Listener:
        """The receiver of the calls, which are installed."""
        assert self._listener is not None
        return self._listener

    def install(
        self,
        listener: Listener,
        at_gradient: Callable[[], None] | None = None,
        *,
        every_layer: bool = True,
    ) -> None:
        """Start to call `listener`, and `at_gradient` at each layer's gradient, too.

        Keeping dynamo out of another hook costs. Unless `every_layer`, only `FEW_LAYERS` are
        hooked: enough to see that a backward runs, and that it goes on.
        """
        self._listener, recording = listener, self.recording
        closures = Closures(listener.update_begins, self._is_ours, untraced)
        # Of a compiled module only the outer call reaches the hook, and once is what we want.
        warnings.filterwarnings("ignore", _COMPILED_WITH_HOOKS, UserWarning)

        @untraced
        def begins(optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
            if recording is None or not recording():
                return closures.stepping(optimizer, args, kwargs)
            return None

        @untraced
        def ends(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            if recording is None or not recording():
                closures.stepped(args, kwargs)
                listener.update_ends(optimizer)

        OURS.add(begins)
        self._handles += [
            register_optimizer_step_pre_hook(begins),
            register_optimizer_step_post_hook(ends),
        ]
        self._install_gradients(at_gradient, every_layer)
        observe(torch.amp.GradScaler, "step", listener, _scaler_step)
        lookahead.watch()
        lookahead.listeners.add(listener)
        for loader in self.loaders:
            data_loaders.listen(loader, listener)
        kinds = {type(each) for each in self.loaders if not isinstance(each, data_loaders.Telling)}
        for kind in kinds | {DataLoader}:
            if hasattr(kind, "__iter__"):
                observe(kind, "__iter__", listener, _iterating)
        if self._armed:
            self.arm_forward()

    def _is_ours(self, optimizer: Optimizer) -> bool:
        known = any(optimizer is each for each in self.optimizers)
        return known or self.watched.owns(optimizer)

    def _install_gradients(self, also: Callable[[], None] | None, every_layer: bool) -> None:
        """Install one hook per layer, on the first parameter of a module's own that it trains."""
        listener, recording = self.listener, self.recording
        found = list(layers(self.watched.model))
        for name, parameter in found if every_layer else spread(found):

            @untraced
            def tick(_: torch.Tensor, name: str = name) -> None:
                if recording is not None and recording():
                    return
                listener.gradient(name)
                if also is not None:
                    also()

            self._handles.append(parameter.register_post_accumulate_grad_hook(tick))

    def arm_forward(self) -> None:
        """Report forwards of watched modules until disarmed."""
        self._armed = True
        if self._forward is not None or self._listener is None:
            return
        if self._before is None:
            self._before = self._reporting()
        self._forward = register_module_forward_pre_hook(self._before)

    def _reporting(self) -> Callable[[nn.Module, Any], None]:
        """Make the hook, once: keeping dynamo out of it takes longer than all the rest."""
        listener, watched, recording = self.listener, self.watched, self.recording

        @untraced
        def before(module: nn.Module, args: Any) -> None:
            if recording is not None and recording():
                return
            if trains(module):
                # A parametrized weight runs its own little forward whenever it is read. What stands
                # in for the parameters is no state: the first gradient finds these again.
                if watched.holds(module) and not is_weight(module) and not watched.stand_ins():
                    training = torch.is_grad_enabled()
                    with _outside_transforms():
                        listener.forward(training)
            # Only a write watch minds, which is a mode on torch's stack.
            elif torch._C._len_torch_dispatch_stack() and watched.holds(module):
                listener.evaluation()

        return before

    def disarm_forward(self) -> None:
        """Stop reporting forwards: an idle handle costs the forward nothing."""
        self._armed = False
        if self._forward is not None:
            self._forward.remove()
            self._forward = None

    def remove(self) -> None:
        """Stop listening; idempotent."""
        self.disarm_forward()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self._listener is None:
            return
        lookahead.listeners.discard(self._listener)
        for loader in self.loaders:
            data_loaders.ignore(loader, self._listener)
        ignore(self._listener)


@dataclass(eq=False)
class _Observed:
    """Listeners to a function that no hook of torch covers."""

    listeners: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)


_observed: dict[tuple[Any, str], _Observed] = {}
"""All that is wrapped, each once per process; without listeners a wrapper only calls through."""


def observe(
    kind: Any, name: str, listener: object, around: Callable[..., Callable[..., Any]]
) -> None:
    """Wrap a function of a class or module, once for the process, and add a listener to it.

    The wrapper stays for good, since others may have wrapped it, too.

    Args:
        kind: the class or module.
        name: the function's name there.
        listener: who is told; it is kept weakly, until `ignore`.
        around: makes the wrapper of the function and of the set of its listeners.
    """
    key = (kind, name)
    if key not in _observed:
        _observed[key] = _Observed()
        original = getattr(kind, name)
        # Not recursive: a compiled optimizer inside a scaler's step stays compiled.
        made = around(original, _observed[key].listeners)
        wrapper: Any = torch.compiler.disable(made, recursive=False)
        wrapper.__name__, wrapper.__doc__ = name, original.__doc__
        setattr(kind, name, wrapper)
    _observed[key].listeners.add(listener)


def ignore(listener: object) -> None:
    """Tell a listener no more of any function that is wrapped; idempotent."""
    for observed in _observed.values():
        observed.listeners.discard(listener)


def _scaler_step(
    original: Callable[..., Any], listeners: weakref.WeakSet[Any]
) -> Callable[..., Any]:
    """Wrap `GradScaler.step`, which may skip the optimizer without a trace, to tell listeners."""

    @untraced
    def tell(optimizer: Optimizer) -> None:
        for listener in list(listeners):
            listener.update_skipped(optimizer)

    def step(scaler: Any, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        if not listeners:
            return original(scaler, optimizer, *args, **kwargs)
        stepped: list[Optimizer] = []

        @untraced
        def ends(which: Optimizer, args: Any, kwargs: Any) -> None:
            stepped.append(which)

        with_hook = register_optimizer_step_post_hook(ends)
        try:
            result = original(scaler, optimizer, *args, **kwargs)
        finally:
            with_hook.remove()
        if not any(which is optimizer for which in stepped):
            tell(optimizer)
        return result

    return step


def _iterating(original: Callable[..., Any], listeners: weakref.WeakSet[Any]) -> Callable[..., Any]:
    @untraced
    def tell(loader: Any) -> None:
        for listener in list(listeners):
            listener.iterating(loader)

    def iterate(loader: Any) -> Any:
        tell(loader)
        return original(loader)

    return iterate


def layers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each module that owns parameters: its name, and the first parameter that it trains."""
    seen = set()
    for name, module in named_modules(model):
        if id(module) in seen:
            continue
        seen.add(id(module))
        own = [p for _, p in modules.parameters(module) if p.requires_grad]
        if own and own[0].is_leaf:
            yield name, own[0]


def spread(found: list[T]) -> list[T]:
    """Return at most `FEW_LAYERS` of these, evenly spread; the first and the last are among them.

    A backward begins at the last and ends at the first.
    """
    if len(found) <= FEW_LAYERS:
        return found
    return [found[i * (len(found) - 1) // (FEW_LAYERS - 1)] for i in range(FEW_LAYERS)]


def _outside_transforms() -> contextlib.AbstractContextManager[Any]:
    """Leave `torch.func`'s transforms for a while: inside of them new tensors have no storage."""
    if torch._C._functorch.peek_interpreter_stack() is None:
        return contextlib.nullcontext()
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    return temporarily_clear_interpreter_stack()


def is_weight(module: nn.Module) -> bool:
    """Tell whether the module is a parametrization.

    Reading `layer.weight` runs it, and that is no forward of the model.
    """
    return isinstance(module, ParametrizationList)


def before_next_forward(model: nn.Module, action: Callable[[], None]) -> RemovableHandle:
    """Run `action` once, just before the next training forward of the model or of a part of it.

    The hook keeps no reference to the model; whoever may outlive it removes the hook.
    """
    handle: RemovableHandle
    ids = {id(parameter) for _, parameter in named_parameters(model)}

    @untraced
    def before(module: nn.Module, args: Any) -> None:
        if trains(module) and any(id(p) in ids for _, p in named_parameters(module)):
            handle.remove()
            with _outside_transforms():
                action()

    handle = register_module_forward_pre_hook(before)
    return handle


# ---- optimizers given a closure: forward and backward run inside `step(closure)` -----------------
# An optimizer that calls its closure once, before it changes anything, updates from there on: its
# update begins where the closure returns, and what runs inside is an ordinary iteration. torch's
# own optimizers but LBFGS do that, and only they are trusted to. For all others an update begins
# with `step`, as without a closure, and inside it the state is mixed. So it is, too, where others'
# hooks come between: they may change parameters, or put another closure in the place of this one.
#
# An optimizer that is seen to do otherwise is not trusted again. Fused updates move no version
# counter: what is seen can prove that an optimizer does otherwise, never that it does not.

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
        if optimizer in self._disbelieved or not self.owns(optimizer):
            return False
        if torch_class(optimizer) not in CALL_FIRST:
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
