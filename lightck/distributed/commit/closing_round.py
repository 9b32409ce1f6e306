"""The round at close, in which the ranks agree on the last step.

The last step counts if every rank holds it, whatever its outcome was before: restore counts the
content of the regions. So a step that one rank lost while training went on, and has copied again at
its close, counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from lightck.distributed.commit.protocol import UNLIKE
from lightck.distributed.rounds import AgreementRounds, Message
from lightck.distributed.store import KeyValueStore, bounded
from lightck.errors import CoordinationError, StoreError

_SHORT_S = 5.0


class ClosingRound:
    """The closing round of one attach. Used on the training thread."""

    def __init__(self, store: KeyValueStore, rank: int, world: int) -> None:
        """Use `store`, which must be below a prefix of its own."""
        self._store = store
        self._rounds = AgreementRounds(store, rank, world)

    def agree(self, last: int | None, form: bytes, why: str, seconds: float) -> int | None:
        """Agree on the last step with all ranks.

        Args:
            last: the step that this rank holds a durable snapshot of; None if it holds none.
            form: a digest of the state's form, which must be the same on every rank.
            why: why this rank holds no snapshot; empty if there was nothing to copy.
            seconds: how long to wait for the other ranks, about.

        Returns:
            The step that every rank holds; None if no rank had anything to copy.

        Raises:
            CoordinationError: a rank lacks the step, has other state, has left or did not come; on
                every rank.
        """
        limit_s = seconds / 1.5  # the others wait half as long again as rank 0
        message = {
            "step": last,
            "form": form.hex() if last is not None else "",
            "why": why.encode("ascii", "replace").decode()[:1000],
        }
        decision = bounded(
            "close",
            seconds + _SHORT_S,
            lambda: self._rounds.agree("close", message, decide_close, timeout_s=limit_s),
        )
        step = decision["step"]
        return None if step is None else int(step)

    def leave(self, why: str, seconds: float) -> None:
        """Tell the other ranks that this one takes no part in the round; waits for none."""
        # A store that is away cannot be reached; the others find out by their time-out.
        with suppress(CoordinationError):
            bounded("leave", min(seconds, _SHORT_S), lambda: self._rounds.fail("close", why))

    def await_readers(self) -> None:
        """Count this rank as gone.

        Rank 0, whose process may serve the store, waits up to 5 s until all have read the decision.
        """
        with suppress(StoreError):
            bounded("close", _SHORT_S + 1, self._count_gone)

    def _count_gone(self) -> None:
        if self._store.add("gone") == self._rounds.world:
            self._store.set("empty", b"1")
        elif self._rounds.rank == 0:
            self._store.wait("empty", _SHORT_S)


def decide_close(messages: Sequence[Message]) -> Message:
    """Decide the closing round on rank 0: the common step, or an error that names the ranks."""
    steps = {each["step"] for each in messages}
    if len(steps) == 1 and not any(each["why"] for each in messages):
        if len({each["form"] for each in messages}) > 1:
            raise CoordinationError(UNLIKE)
        return {"step": steps.pop()}
    found = [
        f"rank {rank}: {each['why'] or 'nothing to copy'}"
        if each["step"] is None
        else f"rank {rank} holds step {each['step']}"
        for rank, each in enumerate(messages)
    ]
    more = f" and {len(found) - 16} more" if len(found) > 16 else ""
    raise CoordinationError("; ".join(found[:16]) + more)
