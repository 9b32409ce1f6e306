"""The two boundary instants (I2): (a), where a step ended, and (b), where a forward begins."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from lightck.capture import boundary, lookahead, parcel, rng, staging
from lightck.capture.draws import Draws
from lightck.capture.extras import Extra, generators
from lightck.capture.prefetched import Prefetched
from lightck.capture.state import Collected, Inventory
from lightck.errors import LightckError, StateError


@dataclass(eq=False)
class Instants:
    """Takes what belongs to each instant, and encodes both for the manifest."""

    inventory: Inventory
    step: int = -1
    """Whose (a) was taken last, or could not be."""
    draws: Draws = field(init=False)
    _rng: dict[str, Any] = field(default_factory=dict)
    """(a): random generators, plain."""
    _extras: dict[str, Any] | None = None
    """(a): extras whose position the loop advances before the next forward."""
    _early: tuple[dict[str, Any] | None, dict[str, Any]] | None = None
    """Generators (None: unknown) and buffers of (b), taken before (b) is seen."""
    _drawn: Any = None
    """What a batch was drawn from first since the step end, and whose pass goes on."""
    ended: int = -1
    """Steps that have ended since attach, which takes a step end before any has."""
    _ahead: weakref.WeakKeyDictionary[lookahead.Lookahead, dict[str, Any]] = field(
        default_factory=weakref.WeakKeyDictionary
    )
    """What the last batch of each iterator was drawn with."""
    _holding: weakref.WeakSet[lookahead.Lookahead] = field(default_factory=weakref.WeakSet)
    """Those that held a batch at the step end."""
    _data: Any = None
    """What the loop learns from, where its batches are drawn ahead: a dataset."""
    refused: StateError | None = None
    """An extra was found to be taken at the wrong instant: nothing is saved any more."""
    _types: Any = None
    _taken: dict[str, Any] = field(default_factory=dict)
    """What was said of each extra of (a) last."""

    def __post_init__(self) -> None:
        """Look at what the loop draws, unless it says that it takes batches ahead."""
        ahead = any(isinstance(each.subject, Prefetched) for each in self.inventory.extras)
        self.draws = Draws(self.inventory.model, on=not ahead)

    def step_ended(self, step: int) -> None:
        """Take (a)."""
        self._early, self._extras, self._drawn = None, None, None
        self.step = step
        self.ended += 1
        self._rng = rng.capture()
        self.draws.step_ended(self._rng)
        self._holding = lookahead.holding()
        for iterator in self._held_here():
            self._data = iterator.base.dataset
        with users_code():
            for extra in self.inventory.extras if self.ended else ():
                if isinstance(extra.subject, Prefetched):
                    extra.subject.step_ended()
            self._extras = self._positions()

    def forget(self) -> None:
        """The state was replaced inside an iteration: nothing is known of its boundary."""
        self.step, self._extras, self._early = -1, None, None
        self.ended = -1  # as at attach: what is drawn next need not follow a step

    def _positions(self) -> dict[str, Any]:
        extras = (extra for extra in self.inventory.extras if extra.instant != "forward")
        return {extra.name: self._private(extra) for extra in extras} | self._held()

    def _held(self) -> dict[str, Any]:
        held = lookahead.standing(self._ahead, self.step)
        return {} if held is None else {lookahead.NAME: held}

    def _private(self, extra: Extra) -> Any:
        """Its state, plain: what the subject does next cannot change it.

        The same object as last time, if it has not changed.
        """
        path, last = boundary.join("extras", extra.name), self._taken.get(extra.name)
        taken = self._taken[extra.name] = boundary.plain(extra.state(), path, last=last)
        return taken

    def standing(self) -> dict[str, Any]:
        """What (a) would be if the step ended now; keeps nothing."""
        with users_code():
            return {"rng": rng.capture(), "extras": self._positions()}

    def generators_stand(self) -> None:
        """(b) is declared here: whatever runs or is drawn next comes after the snapshot."""
        self._early = None
        self._rng = rng.capture()
        for extra in self.inventory.extras:
            if self._extras is not None and extra.instant == "both":
                self._extras[extra.name] = self._private(extra)

    def iterating(self, loader: Any, drawing: bool) -> bool:
        """A loader starts anew after (a): position and generators are those just before.

        Returns whether they have been taken again.

        `drawing`: the next batch is about to be drawn from an extra. Validation may have drawn
        since (a), and what this batch draws comes after the snapshot: generators are those of now.
        """
        if isinstance(loader, Prefetched):
            loader.outside(first=self.ended == 0)
        ours = [e for e in self.inventory.extras if e.subject is loader and e.instant != "forward"]
        if not drawing and self._is_next(self._drawn) and self._is_learnt(loader):
            self._drawn = None  # what drew was a look at the same data
        # Once a loader has drawn, what others do comes behind that, and is done again with it; but
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
        """What it draws next follows the step end, as what an extra draws does."""
        goes_on = iterator.redraw is not None or iterator in self._holding
        if goes_on:
            self._data = iterator.base.dataset
        return goes_on

    def _is_learnt(self, loader: Any) -> bool:
        return self._data is not None and getattr(loader, "dataset", None) is self._data

    def _is_next(self, iterator: Any) -> bool:
        """It makes the pass behind the one that was over at the step end, or was left then."""
        if not isinstance(iterator, lookahead.Lookahead) or iterator in self._holding:
            return False
        over = not any(each.holds for each in self._held_here())
        return over and self._is_learnt(iterator.base)

    def _held_here(self) -> list[lookahead.Lookahead]:
        """Those that have drawn since attach: others may be left over from anything."""
        return [each for each in self._holding if each in self._ahead]

    def drawing_ahead(self, iterator: lookahead.Lookahead) -> None:
        """A batch is drawn that the loop is given later: it may have to be drawn again."""
        with users_code():
            self._ahead[iterator] = {
                **generators(self.inventory.extras),
                lookahead.WORKERS: iterator.seed,
            }
        if self._drawn is None and self._is_next(iterator):
            self._drawn = iterator  # generators were taken when its pass began

    def before_forward(self, *, generators: bool) -> None:
        """Take what a training forward changes, once: (b) itself comes later or goes unseen."""
        if self._early is None:
            buffers = {
                live.name: staging.private(live.tensor)
                for live in self.inventory.collect().lives
                if live.role == "buffer"
            }
            self._early = (rng.capture() if generators else None, buffers)

    def forward_seen(self) -> None:
        """(b) is here: buffers that were taken because it might go unseen do not count."""
        self.draws.forward_begins()
        if self._early is not None and self._early[0] is None:
            self._early = None

    def forward_missed(self, copies: Mapping[str, torch.Tensor] | None) -> None:
        """(b) went by unseen: what a forward changes is as it was at (a), where that is known."""
        if self._early is None and copies is not None:
            self._early = (None, dict(copies))

    def collect(self, *, sure: bool = True) -> Collected:
        """The state at (b), with buffers as they were before any training forward.

        Unless `sure`, with such tensors as a glance tells.
        """
        with users_code():
            collected = self.inventory.collect() if sure else self.inventory.glance()
        return collected if self._early is None else holding(collected, self._early[1])

    def encode(self, collected: Collected, step: int, *, seen: bool) -> tuple[bytes, bytes]:
        """The blobs of `trees`."""
        return self.encoded(*self.trees(collected, step, seen=seen))

    def trees(
        self, collected: Collected, step: int, *, seen: bool
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """The values of (a) and (b), plain: nothing that is done later changes them.

        Args:
            collected: the state at (b).
            step: the last complete step.
            seen: a forward is about to run. Without one there are no generators of (b): the loop
                may yet draw a batch, and restore must not set them back behind that.

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
        """As a manifest has them; proved to come back whenever their types have changed.

        Raises:
            StateError: they do not; its path is named. Or an extra's instant is wrong.
        """
        if self.refused is not None:
            raise StateError(f"{self.refused}", path=self.refused.path)
        types = (boundary.types_of(first), boundary.types_of(second))
        if types != self._types:
            parcel.prove(first, "at_step")
            parcel.prove(second, "at_forward")
            self._types = types
        return parcel.closed(first), parcel.closed(second)


def holding(collected: Collected, kept: Mapping[str, torch.Tensor]) -> Collected:
    """The same state with private copies of some tensors, by name, in place of the live ones."""
    lives = tuple(
        replace(live, tensor=kept[live.name], sync=True) if live.name in kept else live
        for live in collected.lives
    )
    return replace(collected, lives=lives, base=())


class _UsersCode:
    """See `users_code`; a class, because it comes at every instant of every step."""

    def __enter__(self) -> None:
        """Begin."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """End, with the error."""
        if isinstance(error, Exception) and not isinstance(error, LightckError):
            raise StateError(f"the state cannot be taken: {error!r}") from error


_users_code = _UsersCode()


def users_code() -> _UsersCode:
    """What calls the user's `state_dict`: its errors become background errors like all others."""
    return _users_code
