"""The collectives of a script's set-up, by which a replacement sets itself up alone.

Behind `init_process_group` a script makes collectives of its own until it trains: DDP compares
shapes and sends the first parameters, a seed is drawn on rank 0 and sent to all. A replacement
makes them when nobody else does. What the first life of the job got is kept, up to a limit, and
given to it in the same order. What a library sends and is too large is answered with what is there:
it is a model, which is restored afterwards. Behind the limit a small result, which may be a seed or
a size, is known to nobody, nor is a large one of the program's own: then all ranks are restarted.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from lightck.errors import CoordinationError
from lightck.inplace.communicator import SETUP_MOST
from lightck.inplace.operations import SMALL_BYTES, Operation, State
from lightck.inplace.plan import PROGRAM, TORCH, Description

MOST_BYTES = 1 << 20
"""Bytes of results of a set-up that are kept at most."""


@dataclass(eq=False)
class SetupRecord:
    """The small results of a set-up, in order. Collectives end on any thread."""

    until: int | None = None
    """The number of the first result that should be kept and is not, as none behind it is.

    None: all are. With a gap a later one of the same form would be taken for the missing one.
    """
    bytes: int = 0
    _operations: dict[int, Operation] = field(default_factory=dict)

    def add(self, operation: Operation) -> None:
        """Keep a collective whose result is small; call it in the order of their numbers."""
        number, size = operation.number, _bytes(operation.results)
        if size > SMALL_BYTES or not operation.form.shared:
            return
        if self.until is not None and number >= self.until:
            return
        if operation.state is not State.COMPLETE or self.bytes + size > MOST_BYTES:
            self.until = number
            return
        self.bytes += size
        self._operations[number] = operation

    def to_text(self) -> str:
        """Return it as text, for the job's store."""
        rows = [
            [each.form.to_message(), [_encoded(result) for result in each.result()]]
            for _, each in sorted(self._operations.items())
            if each.is_intact
        ]
        return json.dumps({"rows": rows, "truncated": self.until is not None})


@dataclass(eq=False)
class SetupAnswers:
    """Answers the collectives of a replacement until it joins the others. One thread at a time."""

    rank: int
    kept: list[tuple[Description, list[torch.Tensor]]] = field(default_factory=list)
    """The results of the first life's set-up that have not been given yet, in order."""
    truncated: bool = False
    """True if that set-up had more small results than are kept."""

    @staticmethod
    def from_text(rank: int, text: str) -> SetupAnswers:
        """Return what `SetupRecord.to_text` has told."""
        found = json.loads(text)
        return SetupAnswers(
            rank,
            [
                (Description.from_message(form), [_decoded(each) for each in told])
                for form, told in found["rows"]
            ],
            found["truncated"],
        )

    def answer(
        self,
        form: Description,
        results: Sequence[torch.Tensor],
        own: Sequence[torch.Tensor],
        *,
        is_whole: bool = False,
    ) -> None:
        """Put into the results what the collective gave, or would give to ranks that are alike.

        Args:
            form: of the collective.
            results: the tensors that hold its result.
            own: what this rank gives to a gathering.
            is_whole: the model is the job's by now: what DDP sends of it, this rank has.

        Raises:
            CoordinationError: its result differs by rank, and nobody knows this one's; or it is
                small, and not all such results were kept.
        """
        if not form.shared:
            raise CoordinationError(
                f"rank {self.rank} replaces one that was lost, and its set-up makes a {form.kind}"
                f" ({form.site}), whose result differs by rank: restart all ranks"
            )
        of_model = is_whole and form.maker == TORCH
        for position, (known, given) in enumerate(self.kept):
            if known == form:
                del self.kept[: position + 1]
                if not of_model:
                    _copy(results, given)
                    return
                break
        size = _bytes(results)
        if (
            self.truncated
            and size
            and not of_model
            and (size <= SMALL_BYTES or form.maker == PROGRAM)
        ):
            raise CoordinationError(
                f"rank {self.rank} replaces one that was lost, and its set-up makes a {form.kind}"
                f" {form.tensors} ({form.site}), whose result is not kept: of a set-up {SETUP_MOST}"
                f" results of at most {SMALL_BYTES} bytes are, and {MOST_BYTES} bytes of them;"
                " send many small tensors as one, draw seeds before them, and send a seed in place"
                " of what is drawn with it"
            )
        if own:  # a gathering: every rank's place gets what this one gives
            each = len(results) // len(own)
            if each <= 1:
                _copy_rows(results, own)
            else:
                _copy(results, [mine for mine in own for _ in range(each)])


def _bytes(tensors: Sequence[torch.Tensor]) -> int:
    return sum(each.numel() * each.element_size() for each in tensors)


def _copy(results: Sequence[torch.Tensor], given: Sequence[torch.Tensor]) -> None:
    with torch.no_grad():
        for mine, theirs in zip(results, given, strict=True):
            mine.detach().copy_(theirs.view(mine.shape))


def _copy_rows(results: Sequence[torch.Tensor], own: Sequence[torch.Tensor]) -> None:
    with torch.no_grad():
        for mine, theirs in zip(results, own, strict=True):
            count = mine.numel() // max(1, theirs.numel())
            mine.detach().view(-1).copy_(theirs.reshape(-1).repeat(count))


def _encoded(tensor: torch.Tensor) -> list[Any]:
    raw = tensor.detach().contiguous().view(-1).view(torch.uint8)
    text = base64.b64encode(bytes(raw.tolist())).decode()
    return [str(tensor.dtype).removeprefix("torch."), [*tensor.shape], text]


def _decoded(told: Sequence[Any]) -> torch.Tensor:
    dtype, shape, text = told
    raw = base64.b64decode(text)
    flat = torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else torch.empty(0)
    kind: torch.dtype = getattr(torch, dtype)
    return flat.view(kind).view(shape) if raw else torch.empty(shape, dtype=kind)
