"""Data loaders seen from the thread that consumes: a pass begins, a batch is asked for, it ends.

Knows torch's `DataLoader` and torchdata's `StatefulDataLoader`, without importing the latter. One
method of the iterators' classes is wrapped, once per process and only when somebody wants to know:
workers run ahead, so that neither sampler nor dataset can tell what was consumed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.utils.data import dataloader

from lightck.errors import RestoreMismatchError


class Listener(Protocol):
    """Who wants to know of a source of batches."""

    def iterating(self, loader: Any, drawing: bool = False) -> None:
        """A pass begins or has ended; or (`drawing`) the next batch is about to be drawn."""

    def drawn(self) -> None:
        """That batch is over."""


class Pass(Protocol):
    """One way through the data. Called on the thread that consumes it."""

    def drawing(self) -> None:
        """The loop asks for the next batch."""

    def drawn(self) -> None:
        """That batch is over: the loop has it, or the error that making it raised."""

    def ended(self) -> None:
        """There was none left."""


class Telling:
    """Base of sources that say themselves when their position moves, through `tell`."""


_listeners: weakref.WeakKeyDictionary[Any, weakref.WeakSet[Any]] = weakref.WeakKeyDictionary()
"""Per source (a `Telling`, a stateful loader): who wants to know."""
_passes: weakref.WeakKeyDictionary[Any, Pass] = weakref.WeakKeyDictionary()
"""By the iterator that makes it; with persistent workers one iterator makes many in turn."""
_wrapped: set[tuple[type, str]] = set()


def is_stateful(loader: Any) -> bool:
    """A loader that keeps its own position as torchdata's does."""
    return isinstance(loader, dataloader.DataLoader) and hasattr(loader, "next_iter_state")


def not_begun(loader: Any) -> bool:
    """A stateful loader that nobody has iterated.

    Its `state_dict` would start its workers and draw from the global generator: then a loop that
    lightck watches would go on with other numbers than one that it does not.
    """
    unmade = getattr(loader, "_iterator", loader) is None
    return unmade and is_stateful(loader) and loader.next_iter_state is None


def settle(loader: Any) -> None:
    """Make a stateful loader take the position it was given now, not when it is iterated.

    It draws while it does, and the interrupted run did not draw there.

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


def listen(source: Any, listener: Listener) -> None:
    """Tell `listener` of a source, for as long as both live; nothing to tell of other objects."""
    if is_stateful(source):
        wrap(type(source), "__iter__", _followed)
    elif not isinstance(source, Telling):
        return
    _listeners.setdefault(source, weakref.WeakSet()).add(listener)


def ignore(source: Any, listener: Listener) -> None:
    """The opposite of `listen`."""
    if is_stateful(source) or isinstance(source, Telling):
        _listeners.get(source, weakref.WeakSet()).discard(listener)


def tell(source: Any, *, drawing: bool) -> None:
    """Tell who listens; its errors reach the loop."""
    for listener in list(_listeners.get(source, ())):
        listener.iterating(source, drawing)


def tell_drawn(source: Any) -> None:
    """The same, of a batch that has been drawn."""
    for listener in list(_listeners.get(source, ())):
        listener.drawn()


def follow(iterator: Any, made: Pass) -> None:
    """Call `made` for what happens to a loader's iterator from now on."""
    wrap(type(iterator), "__next__", _counted)  # the outermost: the others have run by its end
    _passes[iterator] = made


def wrap(kind: type, name: str, around: Callable[..., Callable[..., Any]]) -> None:
    """Put `around(original)` in the place of a method, once per process."""
    if (kind, name) in _wrapped:
        return
    _wrapped.add((kind, name))
    original = getattr(kind, name)
    wrapper: Any = around(original)
    wrapper.__name__, wrapper.__doc__ = name, original.__doc__
    setattr(kind, name, wrapper)


def _counted(original: Callable[..., Any]) -> Callable[..., Any]:
    def __next__(iterator: Any) -> Any:
        made = _passes.get(iterator)
        if made is None:
            return original(iterator)
        made.drawing()
        try:
            batch = original(iterator)
        except StopIteration:
            made.ended()
            raise
        except Exception:
            made.drawn()  # the iterator goes on behind a batch that could not be made
            raise
        made.drawn()
        return batch

    return __next__


def _followed(original: Callable[..., Any]) -> Callable[..., Any]:
    def __iter__(loader: Any) -> Any:
        iterator = original(loader)
        if _listeners.get(loader):
            # After it was made: a pass that the loop has left is still there before.
            tell(loader, drawing=False)
            follow(iterator, _Stateful(weakref.ref(loader)))
        return iterator

    return __iter__


@dataclass(eq=False)
class _Stateful:
    """A pass of a loader that counts for itself."""

    loader: Callable[[], Any]

    def drawing(self) -> None:
        """The generators stand where the interrupted run's did when it drew here."""
        tell(self.loader(), drawing=True)

    def drawn(self) -> None:
        """The loader has counted it."""
        tell_drawn(self.loader())

    def ended(self) -> None:
        """From here on restoring begins the next epoch."""
        tell(self.loader(), drawing=False)
