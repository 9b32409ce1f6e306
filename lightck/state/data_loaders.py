"""Data loaders, followed on the thread that consumes: a pass begins, a batch is drawn, it ends.

Knows torch's `DataLoader` and torchdata's `StatefulDataLoader`, without importing the latter. One
method of the iterators' classes is wrapped, once per process and only when somebody listens:
workers run ahead, so that neither sampler nor dataset can tell what was consumed. Iterators of
other kinds (generators) are replaced by a `Given`, which is followed. Loaders that draw ahead of
the loop are for `data/lookahead.py`.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.utils.data import dataloader

from lightck.errors import ConfigError, RestoreMismatchError


class PositionListener(Protocol):
    """Is told when a source of batches begins a pass, or draws."""

    def iterating(self, loader: Any, drawing: bool = False) -> None:
        """Take note that a pass begins or has ended; or (`drawing`) that a batch is drawn now."""

    def drawn(self) -> None:
        """Take note that the draw is over."""


class Pass(Protocol):
    """Follows one pass through the data. Called on the thread that consumes it."""

    def drawing(self) -> None:
        """Take note that the loop asks for the next batch."""

    def drawn(self) -> None:
        """Take note that the draw is over: the loop has the batch, or the error it raised."""

    def ended(self) -> None:
        """Take note that there was no batch left."""


class Telling:
    """Base of sources that say themselves, through `tell`, when their position moves."""

    draws_from: tuple[Any, ...] = ()
    """The generators among the extras that are given beside this source."""

    def draw_from(self, generators: tuple[Any, ...]) -> None:
        """Note the generators among the extras that are given beside this source."""
        self.draws_from = generators


_listeners: weakref.WeakKeyDictionary[Any, weakref.WeakSet[Any]] = weakref.WeakKeyDictionary()
"""The listeners of each source (a `Telling`, a stateful loader)."""
_passes: weakref.WeakKeyDictionary[Any, Callable[[], Pass | None]] = weakref.WeakKeyDictionary()
"""The pass that each iterator is in; with persistent workers one iterator makes many in turn."""
_wrapped: set[tuple[type, str, Callable[..., Any]]] = set()
_begun: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
"""The number, as Accelerate counts, of the last pass that each of its loaders has begun."""
_running = threading.local()
"""Per thread: `top` is the `Ahead` that draws from its own loader now, ahead of what it gives."""


class Given:
    """Wraps an iterator that cannot be patched (a generator), and gives the loop its batches."""

    def __init__(self, inner: Iterator[Any]) -> None:
        """Wrap an iterator that no pass follows yet."""
        self.inner = inner
        self.passes: list[Pass] = []

    def __iter__(self) -> Iterator[Any]:
        """Return itself."""
        return self

    def __next__(self) -> Any:
        """Return the next batch, and tell the passes that follow."""
        return _told(self.passes, lambda: next(self.inner))


class Ahead(Given):
    """Wraps a generator that draws from a loader before the loop gets what was drawn."""

    base: Any
    """The loader that it draws from."""

    @contextmanager
    def running(self) -> Iterator[None]:
        """Be the innermost `Ahead` of this thread while the body runs."""
        before, _running.top = running(), self
        try:
            yield
        finally:
            _running.top = before


def running() -> Any:
    """Return the `Ahead` that draws on this thread now, else None."""
    return getattr(_running, "top", None)


def ahead_of(loader: Any) -> Any:
    """Return the `Ahead` that draws from `loader` now, else None."""
    top = running()
    return top if top is not None and top.base is loader else None


def is_stateful(loader: Any) -> bool:
    """Tell whether a loader keeps its own position, as torchdata's does."""
    return isinstance(loader, dataloader.DataLoader) and hasattr(loader, "next_iter_state")


def _base(loader: Any) -> Any:
    """Return the loader inside one of Accelerate's, which reports the inner state; else itself."""
    return getattr(loader, "base_dataloader", loader)


def refusal(loader: Any) -> str:
    """Say why a loader's position cannot be restored, and what to write; empty if it can."""
    if _base(loader) is loader:
        return ""
    kind = type(loader).__name__
    instead = (
        "give a DataLoader with sampler=lightck.ResumableSampler(...) to accelerator.prepare, and"
        ' extras={"data": sampler}'
    )
    if not is_stateful(loader):
        return f"is Accelerate's {kind} over a DataLoader that has no position: {instead}"
    if loader.num_workers:
        return (
            f"is Accelerate's {kind} over a StatefulDataLoader with num_workers="
            f"{loader.num_workers}, whose position Accelerate does not keep rightly: {instead}, or"
            " take num_workers=0"
        )
    return ""


def not_begun(loader: Any) -> bool:
    """Tell whether a stateful loader has not been iterated yet.

    Its `state_dict` would start its workers and draw from the global generator: then a loop that
    lightck watches would go on with other numbers than one that it does not.
    """
    unmade = getattr(loader, "_iterator", loader) is None
    return unmade and is_stateful(loader) and loader.next_iter_state is None


def position(source: Any) -> dict[str, Any]:
    """Return the state of something that the loop iterates over, or of any other extra."""
    state: dict[str, Any] = source.state_dict()
    if _base(source) is source:
        return state
    begun, iteration = _begun.get(source), source.iteration
    if state.get("_iterator_finished") and iteration == begun:
        iteration += 1  # the last batch is given, the loop has not asked for one more
    return {"loader": state, "iteration": iteration}


def load(source: Any, state: dict[str, Any]) -> None:
    """Load what `position` returned.

    Raises:
        RestoreMismatchError: the loader was built otherwise when the position was saved.
    """
    if _base(source) is source:
        source.load_state_dict(state)
    else:
        source.set_epoch(state["iteration"])  # Accelerate's state does not have it
        source.load_state_dict(state["loader"])
        source.dl_state_dict = state["loader"]
    settle(_base(source))


def settle(loader: Any) -> None:
    """Make a stateful loader take its restored position now, not when it is iterated.

    Taking it draws random numbers, and the interrupted run did not draw there.

    Raises:
        RestoreMismatchError: the loader was built otherwise when the position was saved.
    """
    if not is_stateful(loader) or loader.next_iter_state is None:
        return
    try:
        with undrawn(loader.generator):
            loader.state_dict()
    except Exception as error:
        raise RestoreMismatchError(
            f"the loader with num_workers={loader.num_workers} does not take its saved position"
            f" ({type(error).__name__}: {error}): workers, sampler and dataset must be as saved"
        ) from error


@contextmanager
def undrawn(generator: torch.Generator | None) -> Iterator[None]:
    """Leave the generator that a loader draws from (None: the global one) as it was."""
    drawn_from = torch.default_generator if generator is None else generator
    state = drawn_from.get_state()
    try:
        yield
    finally:
        drawn_from.set_state(state)


def listen(source: Any, listener: PositionListener) -> None:
    """Tell `listener` about a source, while both live; other objects have nothing to tell."""
    if is_stateful(source):
        wrap(type(source), "__iter__", _followed)
    elif not isinstance(source, Telling):
        return
    _listeners.setdefault(source, weakref.WeakSet()).add(listener)


def ignore(source: Any, listener: PositionListener) -> None:
    """Undo `listen`."""
    if is_stateful(source) or isinstance(source, Telling):
        _listeners.get(source, weakref.WeakSet()).discard(listener)


def is_heard(source: Any) -> bool:
    """Tell whether a source has listeners."""
    return bool(_listeners.get(source))


def tell(source: Any, *, drawing: bool) -> None:
    """Tell a source's listeners that a pass begins or a batch is drawn; errors reach the loop."""
    for listener in list(_listeners.get(source, ())):
        listener.iterating(source, drawing)


def tell_drawn(source: Any) -> None:
    """Tell the listeners of a source that a batch has been drawn."""
    for listener in list(_listeners.get(source, ())):
        listener.drawn()


def follow(loader: Any, iterator: Any, made: Pass) -> Any:
    """Follow a loader's iterator with the pass `made`; return the iterator that the loop gets."""
    ahead = ahead_of(loader)
    if ahead is not None and made is not ahead:
        ahead.passes.append(made)
        return iterator
    if isinstance(iterator, dataloader._BaseDataLoaderIter):
        wrap(type(iterator), "__next__", _counted)  # the outermost: others have run by its end
        # An `Ahead` holds its iterator: here it must not be held, lest a pass that the loop leaves
        # stays open.
        _passes[iterator] = weakref.ref(made) if made is ahead else lambda: made
        return iterator
    given = iterator if isinstance(iterator, Given) else Given(iterator)
    given.passes.append(made)
    return given


def wrap(kind: type, name: str, around: Callable[..., Callable[..., Any]]) -> None:
    """Replace a method by `around(original)`, once per process."""
    if (kind, name, around) in _wrapped:
        return
    _wrapped.add((kind, name, around))
    original = getattr(kind, name)
    wrapper: Any = around(original)
    wrapper.__name__, wrapper.__doc__ = name, original.__doc__
    setattr(kind, name, wrapper)


def _counted(original: Callable[..., Any]) -> Callable[..., Any]:
    def __next__(iterator: Any) -> Any:
        made = _passes.get(iterator, _nobody)()
        if made is None:
            return original(iterator)
        return _told([made], lambda: original(iterator))

    return __next__


def _nobody() -> None:
    """Return None, as the pass of an iterator that no pass follows."""


def _told(passes: list[Any], draw: Callable[[], Any]) -> Any:
    """Draw the next batch and return it, telling the passes before and after."""
    for made in passes:
        made.drawing()
    try:
        batch = draw()
    except StopIteration:
        for made in passes:
            made.ended()
        raise
    except Exception:
        for made in passes:
            made.drawn()  # the iterator goes on behind a batch that could not be made
        raise
    for made in passes:
        made.drawn()
    return batch


def _followed(original: Callable[..., Any]) -> Callable[..., Any]:
    def __iter__(loader: Any) -> Any:
        iterator = original(loader)
        if not is_heard(loader):
            return iterator
        if ahead_of(loader) is not None:
            raise ConfigError(
                f"an extra is the {type(loader).__name__} that Accelerate draws ahead from: its"
                " position is a batch too far; give the loader that accelerator.prepare returns"
            )
        made = _Stateful(weakref.ref(loader), begins=isinstance(iterator, Ahead))
        if not made.begins:
            # Told after the iterator is made: before, a pass that the loop has left is still there.
            tell(loader, drawing=False)
        return follow(loader, iterator, made)

    return __iter__


@dataclass(eq=False)
class _Stateful:
    """Follows a pass of a stateful loader, which counts for itself."""

    loader: Callable[[], Any]
    begins: bool = False
    """True if the pass begins when its first batch is drawn, not when its iterator is made."""

    def drawing(self) -> None:
        """Tell the listeners that a batch is drawn now.

        The generators are as the interrupted run's were when it drew here.
        """
        loader = self.loader()
        if self.begins:
            self.begins = False
            _begun[loader] = loader.iteration
            loader.dl_state_dict = loader.base_dataloader.state_dict()
            tell(loader, drawing=False)
        tell(loader, drawing=True)

    def drawn(self) -> None:
        """Tell the listeners that a batch has been drawn; the loader has counted it."""
        tell_drawn(self.loader())

    def ended(self) -> None:
        """Tell the listeners that the pass is over: a restore begins the next epoch now."""
        tell(self.loader(), drawing=False)
