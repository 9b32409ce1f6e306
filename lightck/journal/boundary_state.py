"""Take the state at each step's two boundary instants, step end and forward start.

The next forward may begin long after the step has ended: I2 (the two instants).
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from lightck.data import lookahead
from lightck.data.batch_ahead import Draws
from lightck.data.prefetched import Prefetched
from lightck.errors import LightckError, StateError
from lightck.state import boundary_blob, boundary_codec, rng, tensor_layout
from lightck.state.extras import Extra, generators
from lightck.state.inventory import CollectedState, Inventory


@dataclass(eq=False)
class BoundaryState:
    """Takes the boundary state of each instant, and encodes both for the manifest."""

    inventory: Inventory
    step: int = -1
    """The step whose end was taken last, or could not be."""
    draws: Draws = field(init=False)
    _rng: dict[str, Any] = field(default_factory=dict)
    """States of random generators at step end, plain."""
    _extras: dict[str, Any] | None = None
    """States at step end of extras whose position the loop advances before the next forward."""
    _early: tuple[dict[str, Any] | None, dict[str, Any]] | None = None
    """Generators (None: unknown) and buffers for forward start, taken before that is seen."""
    _drawn: Any = None
    """Loader that gave the first batch since step end, while its pass goes on."""
    ended: int = -1
    """Number of steps that have ended since attach; -1 until attach takes a first step end."""
    _ahead: weakref.WeakKeyDictionary[lookahead.Lookahead, dict[str, Any]] = field(
        default_factory=weakref.WeakKeyDictionary
    )
    """States of generators, and workers' seed, with which each iterator drew its last batch."""
    _holding: weakref.WeakSet[lookahead.Lookahead] = field(default_factory=weakref.WeakSet)
    """Iterators that held a batch at step end."""
    _data: Any = None
    """Dataset that the loop learns from, where its batches are drawn ahead."""
    refused: StateError | None = None
    """Error of an extra that is taken at the wrong instant: nothing is saved any more."""
    _taken: dict[str, Any] = field(default_factory=dict)
    """State of each extra as it was last taken for step end."""

    def __post_init__(self) -> None:
        """Watch what the loop draws, unless it says that it takes batches ahead."""
        ahead = any(isinstance(each.subject, Prefetched) for each in self.inventory.extras)
        self.draws = Draws(self.inventory.model, on=not ahead)

    def step_ended(self, step: int) -> None:
        """Take the state that belongs to step end."""
        self._early, self._extras, self._drawn = None, None, None
        self.step = step
        self.ended += 1
        self._rng = rng.capture()
        if self.draws.on:
            self.draws.step_ended(self._rng)
        if lookahead.followed:
            self._holding = lookahead.holding()
            for iterator in self._held_here():
                self._data = iterator.base.dataset
        with users_code():
            for extra in self.inventory.extras if self.ended else ():
                if isinstance(extra.subject, Prefetched):
                    extra.subject.step_ended()
            self._extras = self._positions()

    def refuse(self, error: StateError) -> None:
        """Save nothing any more: an extra is taken at the wrong instant."""
        self.refused = error

    def forget(self) -> None:
        """Forget the boundary state: the live state was replaced inside an iteration."""
        self.step, self._extras, self._early = -1, None, None
        self.ended = -1  # as at attach: what is drawn next need not follow a step

    def _positions(self) -> dict[str, Any]:
        extras = (extra for extra in self.inventory.extras if extra.instant != "forward")
        return {extra.name: self._private(extra) for extra in extras} | self._held()

    def _held(self) -> dict[str, Any]:
        held = lookahead.standing(self._ahead, self.step) if lookahead.followed else None
        return {} if held is None else {lookahead.NAME: held}

    def _private(self, extra: Extra) -> Any:
        """Return the extra's state, plain, so that what the object does next cannot change it.

        It is the same object as last time, if it has not changed.
        """
        path, last = boundary_codec.join("extras", extra.name), self._taken.get(extra.name)
        taken = self._taken[extra.name] = boundary_codec.plain(extra.state(), path, last=last)
        return taken

    def standing(self) -> dict[str, Any]:
        """Return the state that step end would have if the step ended now, without keeping it."""
        with users_code():
            return {"rng": rng.capture(), "extras": self._positions()}

    def declare_forward_start(self) -> None:
        """Declare forward start here: whatever runs or is drawn next comes after the snapshot."""
        self._early = None
        self._rng = rng.capture()
        for extra in self.inventory.extras:
            if self._extras is not None and extra.instant == "both":
                self._extras[extra.name] = self._private(extra)

    def iterating(self, loader: Any, drawing: bool) -> bool:
        """Take position and generators again just before a loader starts anew after step end.

        Returns whether they have been taken again.

        `drawing`: the next batch is about to be drawn from an extra. Validation may have drawn
        since step end, and what this batch draws comes after the snapshot: generators are those of
        now.
        """
        if isinstance(loader, Prefetched):
            loader.outside(first=self.ended == 0)
        ours = [e for e in self.inventory.extras if e.subject is loader and e.instant != "forward"]
        if not drawing and self._is_next(self._drawn) and self._is_learnt(loader):
            self._drawn = None  # that batch was a look at the same data
        # Once a loader has drawn, what others draw comes after that and is drawn again with it; but
        # a pass that has ended meanwhile is not.
        if self._drawn is not None and (drawing or loader is not self._drawn):
            return False
        self._drawn = loader if drawing else None
        self._rng = rng.capture()
        moved = [e for e in self.inventory.extras if e.instant == "both"]
        with users_code():
            for extra in moved if drawing else [*moved, *ours]:
                if self._extras is not None:
                    self._extras[extra.name] = self._private(extra)
            if self._extras is not None and not drawing:
                self._extras.pop(lookahead.NAME, None)
                self._extras |= self._held()
        return True

    def goes_on(self, iterator: lookahead.Lookahead) -> bool:
        """Tell whether the iterator's next draw follows step end, as a draw of an extra does."""
        goes_on = iterator.redraw is not None or iterator in self._holding
        if goes_on:
            self._data = iterator.base.dataset
        return goes_on

    def _is_learnt(self, loader: Any) -> bool:
        return self._data is not None and getattr(loader, "dataset", None) is self._data

    def _is_next(self, iterator: Any) -> bool:
        """Tell whether it makes the pass after the one that was over, or was left, at step end."""
        if not isinstance(iterator, lookahead.Lookahead) or iterator in self._holding:
            return False
        over = not any(each.holds for each in self._held_here())
        return over and self._is_learnt(iterator.base)

    def _held_here(self) -> list[lookahead.Lookahead]:
        """Return those of `_holding` that have drawn since attach: others may be from anything."""
        return [each for each in self._holding if each in self._ahead]

    def drawing_ahead(self, iterator: lookahead.Lookahead) -> None:
        """Note generators before a batch is drawn for later: it may have to be drawn again."""
        with users_code():
            self._ahead[iterator] = {
                **generators(self.inventory.extras),
                lookahead.WORKERS: iterator.seed,
            }
        if self._drawn is None and self._is_next(iterator):
            self._drawn = iterator  # generators were taken when its pass began

    def before_forward(self, *, generators: bool) -> None:
        """Take what a training forward changes, once: forward start comes later or goes unseen."""
        if self._early is None:
            buffers = {
                live.name: tensor_layout.private(live.tensor)
                for live in self.inventory.collect().lives
                if live.role == "buffer"
            }
            self._early = (rng.capture() if generators else None, buffers)

    def forward_seen(self) -> None:
        """Forget buffers taken in case forward start goes unseen: it is seen here."""
        if self.draws.on:
            self.draws.forward_begins()
        if self._early is not None and self._early[0] is None:
            self._early = None

    def forward_missed(self, copies: Mapping[str, torch.Tensor] | None) -> None:
        """Take what a forward changes as at step end, if known, since forward start went unseen."""
        if self._early is None and copies is not None:
            self._early = (None, dict(copies))

    def collect(self, *, sure: bool = True) -> CollectedState:
        """Return the state at forward start, with buffers as they were before any training forward.

        Unless `sure`, its tensors are those that the cheaper `Inventory.collect_cached` finds.
        """
        with users_code():
            collected = self.inventory.collect() if sure else self.inventory.collect_cached()
        return collected if self._early is None else holding(collected, self._early[1])

    def encode(self, collected: CollectedState, step: int, *, seen: bool) -> tuple[bytes, bytes]:
        """Return the encoded values of step end and forward start, see `trees`."""
        return self.encoded(*self.trees(collected, step, seen=seen))

    def trees(
        self, collected: CollectedState, step: int, *, seen: bool
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the values of step end and of forward start, plain: nothing changes them later.

        Args:
            collected: the state at forward start.
            step: the last complete step.
            seen: a forward is about to run. Without one there are no generators of forward start:
                the loop may yet draw a batch, and restore must not set them back behind that.

        Raises:
            StateError: something could not be restored; its path is named.
        """
        if self._extras is None:
            raise StateError(f"step {step} has no data position: taking it failed", path="extras")
        first = {"rng": self._rng, "extras": dict(self._extras)}
        second = {**collected.tree, "step": step}
        if seen:
            known = self._early[0] if self._early else None
            second["rng"] = known or rng.capture()
        return first, second

    def encoded(self, first: dict[str, Any], second: dict[str, Any]) -> tuple[bytes, bytes]:
        """Encode both for a manifest.

        Raises:
            StateError: an extra is taken at the wrong instant.
        """
        if self.refused is not None:
            raise StateError(f"{self.refused}", path=self.refused.path)
        return boundary_blob.closed(first), boundary_blob.closed(second)


def holding(collected: CollectedState, kept: Mapping[str, torch.Tensor]) -> CollectedState:
    """Return the state with private copies of some tensors, by name, in place of the live ones."""
    lives = tuple(
        replace(live, tensor=kept[live.name], sync=True) if live.name in kept else live
        for live in collected.lives
    )
    return replace(collected, lives=lives, base=())


class _UsersCode:
    """Context of `users_code`; a class, because it is entered at every instant of every step."""

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Raise a `StateError` for an error that is not lightck's own."""
        if isinstance(error, Exception) and not isinstance(error, LightckError):
            raise StateError(f"the state cannot be taken: {error!r}") from error


_users_code = _UsersCode()


def users_code() -> _UsersCode:
    """Enclose calls of the user's `state_dict`: its errors become background errors."""
    return _users_code
