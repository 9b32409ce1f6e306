"""Collectives as this rank makes them: numbered, kept until nobody can lack them, made again.

A program makes its collectives in the same order on every rank, so that a number names one for all
of them. Of each the window keeps what a recovery may need: how to make it, its input where the
collective overwrites that, and the tensors that hold its result. They are references; only results
of at most `SMALL_BYTES` are copied, since loops change these in place (`loss /= world`). What was
changed since is found by its version counter and a checksum, and never given.
"""

from __future__ import annotations

import enum
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.futures import Future

from lightck.errors import CoordinationError
from lightck.events import event
from lightck.inplace.plan import Description
from lightck.region.native_region import crc32c_at

SMALL_BYTES = 64 << 10
"""Bytes up to which inputs and results are copied: a loop may change them at once."""
MOST = 4096
"""Complete collectives that are kept at most; behind them all are restarted, until a step later."""
MOST_BYTES = 256 << 20
"""Bytes of the results that are kept of collectives between two steps at most."""


class State(enum.Enum):
    """The state of a collective on this rank."""

    WAITING = "waits for a link"
    FLYING = "under way"
    FAILED = "has failed, and is made again"
    COMPLETE = "complete"


class FailedCollective(CoordinationError):
    """Recovery in place has ended, and with it a collective.

    It cannot be pickled. To torch's C++ a future with an exception has a value, of which DDP takes
    the tensors for its bucket, and torch takes them by pickling it: an error there is all that DDP
    notices.
    """

    def __reduce__(self) -> str:
        """Refuse to be pickled.

        Raises:
            CoordinationError: always, with this error's text.
        """
        raise CoordinationError(str(self))


class KeptInput(Protocol):
    """The input of a collective that overwrites it, kept to make it again."""

    def put_back(self) -> bool:
        """Put it back; False if it is not there any more."""
        ...

    def release(self) -> None:
        """Give up what is kept: the collective is complete. Idempotent."""
        ...

    def is_hidden(self) -> bool:
        """Tell whether torch alone changes the tensors, in sight of the version counter."""
        ...


class Unspoiled:
    """The input of a collective that does not overwrite it."""

    def put_back(self) -> bool:
        """There is nothing to put back."""
        return True

    def release(self) -> None:
        """Nothing is kept."""

    def is_hidden(self) -> bool:
        """Tell that the program has the tensors: `.data` and gloo move no version counter."""
        return False


UNSPOILED = Unspoiled()


class NotKept(Unspoiled):
    """The input of a collective that overwrites it, where none is made again."""

    def put_back(self) -> bool:
        """Tell that it is not there any more."""
        return False


NOT_KEPT = NotKept()


@dataclass(eq=False, slots=True)
class Operation:
    """One collective of this rank."""

    number: int
    form: Description
    start: Callable[[Any], Any]
    """Begins it on a torch backend, and returns the backend's work."""
    results: list[torch.Tensor]
    """The tensors that hold the result once it is complete."""
    kept: KeptInput = UNSPOILED
    state: State = State.WAITING
    attempt: int = 0
    """The number of times it was begun: the end of an earlier attempt says nothing."""
    future: Future[Any] = field(default_factory=Future)
    """Done when it is complete; open while it has to be made again."""
    work: Any = None
    """The work of the attempt that is under way."""
    error: str = ""
    """The error of the last attempt that has failed."""
    value: Any = None
    """The value of the future, in the form in which the caller expects it."""
    commits: int = 0
    """The step that it commits; 0: it is one of the program's."""
    is_sparse: bool = False
    """True once it is complete with a sparse result: never given, for ranks do not know its
    size."""
    is_small: bool = False
    """True once it is complete with a result so small that a copy of it is kept."""
    _versions: tuple[int, ...] = ()
    _copies: list[torch.Tensor] | None = None
    _digest: int | None = None
    """Checksum of a large result that the program can reach; None: not taken."""

    def wait_for_link(self) -> None:
        """Note that there is no link to begin it on."""
        self.state = State.WAITING

    def begin(self, backend: Any) -> None:
        """Begin it, once more, on a link's backend.

        Raises:
            RuntimeError: the backend refuses it.
        """
        self.state = State.FLYING
        self.attempt += 1
        self.work = self.start(backend)

    def failed(self, why: str) -> None:
        """Note that it has failed, and has to be made again."""
        self.state, self.work, self.error = State.FAILED, None, why

    def completed(self) -> None:
        """Note that the results are there, before anything can change them."""
        self.state, self.work = State.COMPLETE, None
        self.kept.release()
        self.start = _begun  # it holds what this rank gave
        self.is_small = sum(map(_bytes, self.results)) <= SMALL_BYTES
        self.is_sparse = any(each.layout != torch.strided for each in self.results)
        if self.is_sparse:
            return
        if self.is_small:
            self._copies = [each.detach().clone() for each in self.results]
        else:
            self._versions = _versions(self.results)

    def seal(self) -> None:
        """Take what later changes of a large result are found by, before anything can change it."""
        if self._copies is None and not self.is_sparse and not self.kept.is_hidden():
            self._digest = _digest(self.results)

    @property
    def is_intact(self) -> bool:
        """Tell whether the result of this complete collective is still there; slow if it is large.

        `p.grad.data /= world` moves another counter than that of `p.grad`, and gloo moves none when
        it writes the next result into the same memory: there only the checksum tells.
        """
        if self._copies is not None:
            return True
        if self.is_sparse:
            return False
        if self._versions != _versions(self.results):
            return False
        return self.kept.is_hidden() or self._digest == _digest(self.results)

    def result(self) -> list[torch.Tensor]:
        """Return the tensors to give to who lacks them; check `is_intact` before and after."""
        return self.results if self._copies is None else self._copies

    def take(self, given: Sequence[torch.Tensor]) -> None:
        """Copy a result that another rank gives into this rank's own tensors."""
        with torch.no_grad():
            for mine, theirs in zip(self.results, given, strict=True):
                mine.detach().copy_(theirs.view(mine.shape))


def _versions(tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """Return the tensors' version counters; those of inference mode have none."""
    return tuple(0 if each.is_inference() else each._version for each in tensors)


def _begun(_: Any) -> Any:
    raise AssertionError("a complete collective is begun again")


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _digest(tensors: Sequence[torch.Tensor]) -> int:
    """Return the CRC32C of the tensors' bytes, one after the other."""
    crc = 0
    for each in tensors:
        place = each.detach().cpu().contiguous()
        crc = crc32c_at(place.data_ptr(), _bytes(place), crc)
    return crc


def described(tensors: Sequence[torch.Tensor]) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Return dtype and shape of each tensor, as in a `Description`."""
    return tuple((_dtype_name(each.dtype), tuple(each.shape)) for each in tensors)


@functools.cache
def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def empty(form: Description) -> list[torch.Tensor]:
    """Return new tensors for a result of this form."""
    return [torch.empty(shape, dtype=getattr(torch, dtype)) for dtype, shape in form.tensors]


@dataclass(eq=False)
class Window:
    """The collectives that a recovery may still need, and the forward starts between them.

    The caller holds one lock around every call.
    """

    next: int = 0
    """The number of the next collective."""
    committed: int = 0
    """The newest step whose commit is complete here."""
    starts: dict[int, int] = field(default_factory=dict)
    """For the last steps the number of the first collective behind their forward start."""
    ends: dict[int, int] = field(default_factory=dict)
    """The same for their ends."""
    _operations: dict[int, Operation] = field(default_factory=dict)
    _between: bool = True
    """True from a step's end to its forward start: what comes there is bounded by no model."""
    _kept: dict[int, int] = field(default_factory=dict)
    """The complete ones among them, with the bytes that they count for."""
    _dropped: int = 0
    """The number behind the last one that had to be given up; 0: none that may be needed."""
    _bytes: int = 0
    _told: bool = False

    @property
    def overflown(self) -> bool:
        """Tell whether what was given up may be needed: more came than is kept."""
        return self._dropped > 0

    def take_number(self) -> int:
        """Return the number of the collective that comes now."""
        number, self.next = self.next, self.next + 1
        return number

    def go_on_from(self, number: int) -> None:
        """Let the next collective have this number."""
        self.next = number

    def note_commit(self, step: int) -> None:
        """Note that every rank has all results of the iteration that makes `step`."""
        self.committed = step

    def add(self, operation: Operation) -> None:
        """Keep a collective that has just got its number."""
        self._operations[operation.number] = operation

    def bound(self, operation: Operation) -> None:
        """Give up all complete collectives if with this one they are too many, or too large.

        One that is not complete is never given up: it may have to be made again.
        """
        size = sum(map(_bytes, operation.results)) if self._between else 0
        self._kept[operation.number] = size
        self._bytes += size
        if len(self._kept) <= MOST and self._bytes <= MOST_BYTES:
            return
        self._dropped = max(self._dropped, max(self._kept) + 1)
        if not self._told:
            self._told = True
            event("results_given_up", logging.INFO, count=len(self._kept), bytes=self._bytes)
        for number in [*self._kept]:
            self.forget(number)

    def forget(self, number: int) -> None:
        """Keep a collective no longer."""
        self._operations.pop(number, None)
        self._bytes -= self._kept.pop(number, 0)

    def keeps(self, operation: Operation, most: int) -> bool:
        """Tell whether a result is small, and one of at most `most` that are kept."""
        return operation.is_small and len(self._operations) <= most

    def unfinished(self) -> list[Operation]:
        """Return the collectives that are not complete, in their order."""
        return [each for each in self if each.state is not State.COMPLETE]

    def __iter__(self) -> Iterator[Operation]:
        return iter([*self._operations.values()])

    def get(self, number: int) -> Operation | None:
        """Return a collective, or None if it is not kept or was never made."""
        return self._operations.get(number)

    def joined(self, step: int, end: int) -> None:
        """Note that this rank goes on from a step's forward start; `end`: where the step ended."""
        self.starts[step], self.ends[step] = self.next, end

    def forward_started(self, step: int) -> None:
        """Note the forward start of a step."""
        self.starts.setdefault(step, self.next)
        self._between = False

    def step_ended(self, step: int) -> None:
        """Give up what nobody can lack any more, now that `step` is complete on every rank.

        Every rank has committed it: no recovery goes back behind the end of the step before.
        """
        self._between = True
        floor = self.ends.get(step - 1, self.starts.get(step - 1))
        self.ends[step] = self.next
        self.starts = {at: number for at, number in self.starts.items() if at >= step - 1}
        self.ends = {at: number for at, number in self.ends.items() if at >= step - 1}
        if floor is None:
            return
        operations = self._operations.items()
        for number in [n for n, o in operations if n < floor and o.state is State.COMPLETE]:
            self.forget(number)
        if self._dropped <= floor:
            self._dropped = 0
