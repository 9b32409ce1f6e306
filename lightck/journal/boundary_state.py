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
from lightck.state import boundary_codec, rng, tensor_layout
from lightck.state.boundary_blob import BlobEncoder
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
    _captured_before_forward: tuple[dict[str, Any] | None, dict[str, Any]] | None = None
    """Generators (None: unknown) and buffers for forward start, taken before that is seen."""
    _drawing_loader: Any = None
    """Loader that gave the first batch since step end, while its pass goes on."""
    steps_ended: int = -1
    """Number of steps that have ended since attach; -1 until attach takes a first step end."""
    _states_at_draw: weakref.WeakKeyDictionary[lookahead.Lookahead, dict[str, Any]] = field(
        default_factory=weakref.WeakKeyDictionary
    )
    """States of generators, and workers' seed, with which each iterator drew its last batch."""
    _iterators_with_batch: weakref.WeakSet[lookahead.Lookahead] = field(
        default_factory=weakref.WeakSet
    )
    """Iterators that held a batch at step end."""
    _dataset: Any = None
    """Dataset that the loop learns from, where its batches are drawn ahead."""
    refusal: StateError | None = None
    """Error of an extra that is taken at the wrong instant: nothing is saved any more."""
    _step_end_encoder: BlobEncoder = field(default_factory=BlobEncoder)
    _forward_encoder: BlobEncoder = field(default_factory=BlobEncoder)
    _last_states: dict[str, Any] = field(default_factory=dict)
    """State of each extra as it was last taken for step end."""

    def __post_init__(self) -> None:
        """Watch what the loop draws, unless it says that it takes batches ahead."""
        ahead = any(isinstance(each.subject, Prefetched) for each in self.inventory.extras)
        self.draws = Draws(self.inventory.model, on=not ahead)

    def step_ended(self, step: int) -> None:
        """Take the state that belongs to step end."""
        self._captured_before_forward, self._extras, self._drawing_loader = None, None, None
        self.step = step
        self.steps_ended += 1
        self._rng = rng.capture()
        if self.draws.on:
            self.draws.step_ended(self._rng)
        if lookahead.followed:
            self._iterators_with_batch = lookahead.holding()
            for iterator in self._iterators_here():
                self._dataset = iterator.base.dataset
        with user_code():
            for extra in self.inventory.extras if self.steps_ended else ():
                if isinstance(extra.subject, Prefetched):
                    extra.subject.step_ended()
            self._extras = self._positions()

    def refuse(self, error: StateError) -> None:
        """Save nothing any more: an extra is taken at the wrong instant."""
        self.refusal = error

    def forget(self) -> None:
        """Forget the boundary state: the live state was replaced inside an iteration."""
        self.step, self._extras, self._captured_before_forward = -1, None, None
        self.steps_ended = -1  # as at attach: what is drawn next need not follow a step

    def _positions(self) -> dict[str, Any]:
        extras = (extra for extra in self.inventory.extras if extra.instant != "forward")
        return {extra.name: self._extra_state(extra) for extra in extras} | self._batches_ahead()

    def _batches_ahead(self) -> dict[str, Any]:
        held = lookahead.standing(self._states_at_draw, self.step) if lookahead.followed else None
        return {} if held is None else {lookahead.NAME: held}

    def _extra_state(self, extra: Extra) -> Any:
        """Return the extra's state, plain, so that what the object does next cannot change it.

        It is the same object as last time, if it has not changed.
        """
        path, last = boundary_codec.join("extras", extra.name), self._last_states.get(extra.name)
        taken = self._last_states[extra.name] = boundary_codec.plain(extra.state(), path, last=last)
        return taken

    def step_end_now(self) -> dict[str, Any]:
        """Return the state that step end would have if the step ended now, without keeping it."""
        with user_code():
            return {"rng": rng.capture(), "extras": self._positions()}

    def forward_starts_here(self) -> None:
        """Declare forward start here: whatever runs or is drawn next comes after the snapshot."""
        self._captured_before_forward = None
        self._rng = rng.capture()
        for extra in self.inventory.extras:
            if self._extras is not None and extra.instant == "both":
                self._extras[extra.name] = self._extra_state(extra)

    def iterating(self, loader: Any, drawing: bool) -> bool:
        """Take position and generators again just before a loader starts anew after step end.

        Returns whether they have been taken again.

        `drawing`: the next batch is about to be drawn from an extra. Validation may have drawn
        since step end, and what this batch draws comes after the snapshot: generators are those of
        now.
        """
        if isinstance(loader, Prefetched):
            loader.outside(first=self.steps_ended == 0)
        ours = [e for e in self.inventory.extras if e.subject is loader and e.instant != "forward"]
        if not drawing and self._is_next(self._drawing_loader) and self._is_dataset_of(loader):
            self._drawing_loader = None  # that batch was a look at the same data
        # Once a loader has drawn, what others draw comes after that and is drawn again with it; but
        # a pass that has ended meanwhile is not.
        if self._drawing_loader is not None and (drawing or loader is not self._drawing_loader):
            return False
        self._drawing_loader = loader if drawing else None
        self._rng = rng.capture()
        moved = [e for e in self.inventory.extras if e.instant == "both"]
        with user_code():
            for extra in moved if drawing else [*moved, *ours]:
                if self._extras is not None:
                    self._extras[extra.name] = self._extra_state(extra)
            if self._extras is not None and not drawing:
                self._extras.pop(lookahead.NAME, None)
                self._extras |= self._batches_ahead()
        return True

    def follows_step_end(self, iterator: lookahead.Lookahead) -> bool:
        """Tell whether the iterator's next draw follows step end, as a draw of an extra does."""
        follows = iterator.redraw is not None or iterator in self._iterators_with_batch
        if follows:
            self._dataset = iterator.base.dataset
        return follows

    def _is_dataset_of(self, loader: Any) -> bool:
        return self._dataset is not None and getattr(loader, "dataset", None) is self._dataset

    def _is_next(self, iterator: Any) -> bool:
        """Tell whether it makes the pass after the one that was over, or was left, at step end."""
        if not isinstance(iterator, lookahead.Lookahead) or iterator in self._iterators_with_batch:
            return False
        over = not any(each.holds for each in self._iterators_here())
        return over and self._is_dataset_of(iterator.base)

    def _iterators_here(self) -> list[lookahead.Lookahead]:
        """Return the iterators with a batch that have drawn since attach, not any others."""
        return [each for each in self._iterators_with_batch if each in self._states_at_draw]

    def note_draw_ahead(self, iterator: lookahead.Lookahead) -> None:
        """Note generators before a batch is drawn for later: it may have to be drawn again."""
        with user_code():
            self._states_at_draw[iterator] = {
                **generators(self.inventory.extras),
                lookahead.WORKERS: iterator.seed,
            }
        if self._drawing_loader is None and self._is_next(iterator):
            self._drawing_loader = iterator  # generators were taken when its pass began

    def capture_before_forward(self, *, generators: bool) -> None:
        """Take what a training forward changes, once: forward start comes later or goes unseen."""
        if self._captured_before_forward is None:
            buffers = {
                live.name: tensor_layout.private(live.tensor)
                for live in self.inventory.collect().lives
                if live.role == "buffer"
            }
            self._captured_before_forward = (rng.capture() if generators else None, buffers)

    def forward_seen(self) -> None:
        """Forget buffers taken in case forward start goes unseen: it is seen here."""
        if self.draws.on:
            self.draws.forward_begins()
        if self._captured_before_forward is not None and self._captured_before_forward[0] is None:
            self._captured_before_forward = None

    def forward_missed(self, copies: Mapping[str, torch.Tensor] | None) -> None:
        """Take what a forward changes as at step end, if known, since forward start went unseen."""
        if self._captured_before_forward is None and copies is not None:
            self._captured_before_forward = (None, dict(copies))

    def collect(self, *, full: bool = True) -> CollectedState:
        """Return the state at forward start, with buffers as they were before any training forward.

        Unless `full`, its tensors are those that the cheaper `Inventory.collect_cached` finds.
        """
        with user_code():
            collected = self.inventory.collect() if full else self.inventory.collect_cached()
        return (
            collected
            if self._captured_before_forward is None
            else with_copies(collected, self._captured_before_forward[1])
        )

    def encode(self, collected: CollectedState, step: int, *, seen: bool) -> tuple[bytes, bytes]:
        """Return the encoded values of step end and forward start, see `trees`."""
        return self.encode_trees(*self.trees(collected, step, seen=seen))

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
            known = self._captured_before_forward[0] if self._captured_before_forward else None
            second["rng"] = known or rng.capture()
        return first, second

    def encode_trees(self, first: dict[str, Any], second: dict[str, Any]) -> tuple[bytes, bytes]:
        """Encode both for a manifest.

        Raises:
            StateError: an extra is taken at the wrong instant.
        """
        if self.refusal is not None:
            raise StateError(f"{self.refusal}", path=self.refusal.path)
        return self._step_end_encoder.closed(first), self._forward_encoder.closed(second)


def with_copies(collected: CollectedState, copies: Mapping[str, torch.Tensor]) -> CollectedState:
    """Return the state with private copies of some tensors, by name, in place of the live ones."""
    lives = tuple(
        replace(live, tensor=copies[live.name], sync=True) if live.name in copies else live
        for live in collected.lives
    )
    return replace(collected, lives=lives, base=())


class _UserCode:
    """Context of `user_code`; a class, because it is entered at every instant of every step."""

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Raise a `StateError` for an error that is not lightck's own."""
        if isinstance(error, Exception) and not isinstance(error, LightckError):
            raise StateError(f"the state cannot be taken: {error!r}") from error


_user_code = _UserCode()


def user_code() -> _UserCode:
    """Enclose calls of the user's `state_dict`: its errors become background errors."""
    return _user_code
