"""`Prefetched`: gives the batch that a loop takes by hand before the step that it is for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from lightck.errors import RestoreMismatchError, StateError
from lightck.state import boundary_codec, data_loaders
from lightck.state.extras import generators, stand


class Prefetched(data_loaders.Telling):
    """Give a loop its batches from `fn()`, and after a resume the one that it had in hand.

        batches = lightck.Prefetched(lambda: get_batch("train"))
        extras = {"data": batches}
        lightck.restore(model, optimizer, path, extras=extras)
        with lightck.attach(model, optimizer, path, extras=extras):
            x, y = next(batches)
            for _ in range(10):
                loss = model(x, y)
                x, y = next(batches)  # for the next step, while this one is computed
                loss.backward()
                optimizer.step()

    That is nanoGPT's loop. What it takes from `batches` last, during a step, is the batch of the
    next one. A snapshot holds how the generators stood when `fn` made it; the first batch after a
    restore is made with them again, and the generators go on from where the step ended.

    `fn` draws from torch's, NumPy's and Python's global generators, and from those that are extras;
    whatever else it makes a batch from must not change.

    A loop that asks for its batch before the forward that it is for needs no `Prefetched`: it is
    refused in its second step.

    Thread: the training thread.
    """

    def __init__(self, fn: Callable[[], Any]) -> None:
        """Draw nothing yet.

        Args:
            fn: makes the next batch.
        """
        self.fn = fn
        self._last: dict[str, Any] | None = None
        """The states of the generators from before the batch that was given last."""
        self._again: dict[str, Any] | None = None
        """The states of the generators from before the batch that the interrupted run had in hand,
        until that batch is given again."""
        self._is_outside = False

    def __iter__(self) -> Iterator[Any]:
        """Return itself."""
        return self

    def __next__(self) -> Any:
        """Make the next batch and return it.

        Raises:
            StateError: it is not the batch of the next step that the loop takes here.
        """
        self._is_outside = not data_loaders.is_heard(self)
        data_loaders.tell(self, drawing=True)  # which calls `outside`
        if self._again is None:
            self._last = boundary_codec.rebuild(generators(self.draws_from))
            return self._made()
        if not self._is_outside:
            raise StateError(
                "the first batch behind a restore is asked for when an iteration has begun with"
                " another: restore before the first next(batches)"
            )
        here = generators(self.draws_from)
        self._last, self._again = self._again, None
        stand(self._last, self.draws_from)
        try:
            return self._made()
        finally:
            stand(boundary_codec.rebuild(here), self.draws_from)

    def _made(self) -> Any:
        try:
            return self.fn()
        finally:
            data_loaders.tell_drawn(self)

    def outside(self, *, first: bool) -> None:
        """Take note that a batch is asked for outside an iteration; `first`: before the first one.

        Raises:
            StateError: the loop holds no batch while a step ends.
        """
        self._is_outside = True
        if not first:
            raise StateError(
                "a Prefetched is for a loop that takes the batch of the next step during a step,"
                " and this loop takes it between the end of a step and the next forward: leave"
                " Prefetched out and call its function there; the generators are in a snapshot"
                " by themselves"
            )

    def step_ended(self) -> None:
        """Take note that a step of this process has ended.

        Raises:
            StateError: the step was made from another batch than the restored one.
        """
        if self._again is not None:
            raise StateError(
                "a step was made from another batch than the one that the interrupted run had in"
                " hand: take the first batch with next(batches), after restore"
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the generators' states from before the batch in hand; None: there is none."""
        return {"before": self._again or self._last}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Make the next batch the one that was in hand.

        Raises:
            RestoreMismatchError: that is no state of a `Prefetched`.
        """
        if not isinstance(state, dict) or state.keys() != {"before"}:
            raise RestoreMismatchError(f"a Prefetched's state has ['before'], found {state!r}")
        self._last, self._again = None, state["before"]
