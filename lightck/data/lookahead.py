"""Loaders that draw a batch ahead of the one that they give: Accelerate's `DataLoaderShard`.

Their iterators are generators that hold a batch which the loop has not got when a step ends. The
position is what the loop was given. A resumed run draws the held batch once more, with the
generators as they stood when it was drawn, and goes on with those of the step's end.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any, Protocol

import torch

from lightck.data.worker_seeds import SeedingBatch
from lightck.errors import ConfigError, StateError
from lightck.events import event
from lightck.state import boundary_codec, data_loaders
from lightck.state.extras import Extra, generators, stand

NAME = "@ahead"
"""The name, among the extras of the step's end, of the state that held batches were drawn with."""
WORKERS = "workers"
"""The key, in the state under `NAME`, of the seed that the pass's workers draw from, or None."""
_MODULE = "accelerate.data_loader"
_KINDS = ("DataLoaderShard", "DataLoaderDispatcher")


class DrawListener(Protocol):
    """Keeps the generator states that batches are drawn with."""

    def drawing_ahead(self, iterator: Lookahead) -> None:
        """Take note that a batch is about to be drawn which the loop is given later."""

    def drawn(self) -> None:
        """Take note that the batch has been drawn."""


@dataclass(eq=False)
class Redraw:
    """Describes a batch that a restored run must draw again.

    Restore asks for it; it is done when the loader goes on.
    """

    step: int
    held: dict[str, Any] | None
    """The states that `generators` returned before that draw; None: no batch was held."""
    extras: tuple[Extra, ...]


followed = False
"""True once a loader draws ahead in this process, or a restored one may: else nothing is held."""
listeners: weakref.WeakSet[Any] = weakref.WeakSet()
_open: weakref.WeakSet[Lookahead] = weakref.WeakSet()
_expected: Redraw | None = None
_told: set[str] = set()
"""Names of the events that were told; each is told once in a process."""


def watch() -> None:
    """Follow Accelerate's loaders, if the process has imported it.

    Raises:
        ConfigError: it is too old for that.
    """
    module = sys.modules.get(_MODULE)
    if module is not None and not hasattr(module, "DataLoaderAdapter"):
        version = getattr(sys.modules.get("accelerate"), "__version__", "")
        raise ConfigError(
            f"accelerate {version} draws batches ahead of what it gives, and lightck follows that"
            " from accelerate 1.0 on: install a newer one, or do not import it"
        )
    for name in _KINDS if module is not None else ():
        data_loaders.wrap(getattr(module, name), "__iter__", _given)


def expect(redraw: Redraw) -> None:
    """Ask the loader that goes on in the middle of its data to draw its held batch again."""
    global _expected, followed
    watch()
    _expected, followed = redraw, True


def standing(known: Mapping[Lookahead, dict[str, Any]], step: int) -> dict[str, Any] | None:
    """Return the states that the loop's next batch was drawn with, if the step ended now.

    Args:
        known: what each iterator's last draw was made with.
        step: the last complete step.

    Raises:
        StateError: several loaders hold one.
    """
    global _expected
    every = [it for it in list(_open) if it.standing(known) is not None]
    if len(every) > 1:
        names = ", ".join(sorted(type(it.base.dataset).__name__ for it in every))
        raise StateError(
            f"step {step}: {len(every)} loaders of Accelerate's hold a batch that they have drawn"
            f" ahead (over {names}), and which of them goes on after a resume cannot be known: let"
            " accelerator.prepare have one of them only",
            path=NAME,
        )
    if _expected is not None and step > _expected.step:
        if _expected.held is not None:
            event(
                "not_redrawn",
                logging.WARNING,
                step=step,
                why=f"when step {_expected.step} ended, a batch was drawn ahead, and no loader has"
                " gone on in the middle of its data since: what that batch drew at random may"
                " differ (give a ResumableSampler, or begin with accelerator.skip_first_batches)",
            )
        _expected = None
    if every:
        return every[0].standing(known)
    return _expected.held if _expected is not None else None


def holding() -> weakref.WeakSet[Lookahead]:
    """Return the iterators that hold a batch now which the loop is given next."""
    return weakref.WeakSet(it for it in list(_open) if it.holds and it.given)


class Lookahead(data_loaders.Ahead):
    """Wraps the iterator of a loader that draws ahead; the loop gets this one."""

    def __init__(self, loader: Any, inner: Any) -> None:
        global followed
        super().__init__(inner)
        followed = True
        self.loader = loader
        self.base = loader.base_dataloader
        self.given = 0
        self.holds = False
        """True if a batch is drawn that the loop has not got."""
        self.redraw: Redraw | None = None
        """The redraw that this iterator goes on from and has still to make."""
        self._drawn = 0
        self._asked = False
        """True if the loop has asked for a batch, and this iterator has begun to draw one."""
        self._back: dict[str, Any] | None = None
        """The states of the generators from before a redraw that is under way."""
        self.seeds = False
        """True if a pass is beginning whose workers are seeded for each batch."""
        self.seed: int | None = None
        """The seed that the workers of this pass draw from; None: they are not seeded."""
        self._draws_from: torch.Generator | None = None
        data_loaders.wrap(type(self.base), "__iter__", _inside)
        for other in list(_open):
            other.holds = other.holds and other.loader is not loader  # the loop has left that pass
        _open.add(self)

    def __next__(self) -> Any:
        self._asked = False
        if self.given == self._drawn == 0:
            self._claim()
        try:
            with self.running():
                batch = next(self.inner)
        except StopIteration:
            self.holds = False
            if self.redraw is not None and self.given == 0:
                self.loader.iteration += 1  # Accelerate does not count a pass without a batch
            self.redraw = None
            for made in self.passes:
                made.ended()
            raise
        except BaseException:
            self.holds, self.redraw = False, None  # a generator that raised is at its end
            raise
        self.given += 1
        self.redraw = None
        for made in self.passes:
            made.drawn()
        return batch

    def standing(self, known: Mapping[Lookahead, dict[str, Any]]) -> dict[str, Any] | None:
        """Return the states that the loop's next batch was drawn with; None if no batch is held."""
        if self.redraw is not None:
            return self.redraw.held
        return known.get(self) if self.holds and self.given else None

    @contextlib.contextmanager
    def seeding(self) -> Iterator[None]:
        """Seed the workers' generators for each batch in the pass that begins in the body."""
        base = self.base
        before, base.generator = base.generator, torch.Generator()
        self._draws_from, self.seeds = before, True
        data_loaders.wrap(type(base.batch_sampler), "__iter__", _seeded)
        try:
            yield
        finally:
            base.generator, self.seeds = before, False

    def draw_seed(self) -> int:
        """Draw the seed that torch draws for its workers, in its place, or take the restored one.

        This is done here and not before: the generators of the step's end are taken anew when a
        pass begins.
        """
        held = self.redraw.held if self.redraw is not None else None
        seed: int | None = held[WORKERS] if held is not None else None
        if seed is None:
            drawn = torch.empty((), dtype=torch.int64).random_(generator=self._draws_from)
            seed = int(drawn.item())
        self.base.generator.manual_seed(seed)
        self.seed = seed
        return seed

    def _claim(self) -> None:
        global _expected
        if _expected is not None and _begins_in_the_middle(self.loader):
            self.redraw, _expected = _expected, None

    # ---- the loader's own iterator, see `data_loaders.Pass` ---------------------------------

    def drawing(self) -> None:
        """Take note that a batch is about to be drawn; for a redraw, set the generators first."""
        if not self._asked:
            self._asked = True
            for made in self.passes:
                made.drawing()
        for listener in list(listeners):
            listener.drawing_ahead(self)
        redraw = self.redraw
        if redraw is not None and redraw.held and self._drawn == self.loader.skip_batches:
            self._back = generators(redraw.extras)
            stand(boundary_codec.rebuild(redraw.held), redraw.extras)
        self.holds = True

    def drawn(self) -> None:
        """Take note that the batch has been drawn, or that drawing it has failed."""
        self._drawn += 1
        self._stand_back()
        for listener in list(listeners):
            listener.drawn()

    def ended(self) -> None:
        """Take note that there was no batch left: the loop gets the last one, or has it."""
        self.holds = False
        self._stand_back()

    def _stand_back(self) -> None:
        back, self._back = self._back, None
        if back is not None and self.redraw is not None:
            stand(boundary_codec.rebuild(back), self.redraw.extras)


def _given(original: Callable[..., Any]) -> Callable[..., Any]:
    def __iter__(loader: Any) -> Any:
        iterator = original(loader)
        if getattr(loader, "split_batches", None) is not None and loader.state.num_processes > 1:
            return iterator  # a dispatcher: one rank draws for all of them
        if listeners and data_loaders.is_stateful(loader) and not data_loaders.is_heard(loader):
            _tell_once(
                "loader_not_kept",
                f"a stateful loader of Accelerate's (over a {type(loader.dataset).__name__}) is"
                " iterated and is no extra: accelerator.prepare has begun its first pass, so that a"
                " resume draws other random numbers; give it in extras beside the others",
            )
        return Lookahead(loader, iterator)

    return __iter__


def _inside(original: Callable[..., Any]) -> Callable[..., Any]:
    """Follow the loader that an `Ahead` draws from."""

    def __iter__(loader: Any) -> Any:
        outer = data_loaders.ahead_of(loader)
        if outer is None:
            return original(loader)
        with contextlib.ExitStack() as around:
            if outer.redraw is not None:  # the interrupted run began this pass before
                around.enter_context(data_loaders.undrawn(loader.generator))
            outer.seed = None
            if (listeners or outer.redraw is not None) and _draws_in_workers(loader):
                around.enter_context(outer.seeding())
            iterator = original(loader)
        return data_loaders.follow(loader, iterator, outer)

    return __iter__


def _draws_in_workers(loader: Any) -> bool:
    """Tell whether its workers' random numbers are not already a function of the position."""
    batches = loader.batch_sampler
    return (
        loader.num_workers > 0
        and batches is not None
        and not isinstance(getattr(batches, "sampler", None), data_loaders.Telling)
    )


def _seeded(original: Callable[..., Any]) -> Callable[..., Any]:
    """Make the batches of a loader that is drawn from ahead seed the workers, each by its place."""

    def __iter__(batches: Any) -> Any:
        outer, indices = data_loaders.running(), original(batches)
        if outer is None or not outer.seeds or outer.base.batch_sampler is not batches:
            return indices
        seed = outer.draw_seed() if outer.seed is None else outer.seed  # torch iterates it twice
        return _seeding(indices, seed, getattr(batches, "skip_batches", 0))

    return __iter__


def _seeding(indices: Any, seed: int, first: int) -> Iterator[SeedingBatch]:
    for place, batch in enumerate(indices, first):
        yield SeedingBatch(batch, f"{seed} {place}")


def unfollowed(loader: Any) -> str:
    """Say why what Accelerate's loader gives cannot be followed, and what to write.

    Empty if it can be followed. Call it where a loader is iterated.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _room(frame) in ("lightck", "torch"):
        frame = frame.f_back
    if frame is None or _room(frame) != "accelerate" or data_loaders.ahead_of(loader) is not None:
        return ""
    return (
        "Accelerate's loader draws from this one ahead of what it gives, and cannot be followed:"
        " import accelerate before the sampler is made, and take dispatch_batches=False"
    )


def _tell_once(name: str, why: str) -> None:
    if name not in _told:
        _told.add(name)
        event(name, logging.WARNING, why=why)


def _room(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def _begins_in_the_middle(loader: Any) -> bool:
    """Tell whether the next pass of a loader leaves out batches that the loop was given before."""
    batches = loader.batch_sampler
    sampler = getattr(batches, "sampler", loader.sampler)
    iterator = getattr(loader.base_dataloader, "_iterator", None)
    begun = getattr(iterator, "_num_yielded", 0) and not getattr(iterator, "_finished", False)
    return bool(
        loader.skip_batches
        or getattr(batches, "skip_batches", 0)
        or getattr(sampler, "consumed", 0)
        or data_loaders.is_stateful(loader)
        and begun
    )
