"""Replicas that no longer hold the same bytes: detection, naming, and marking as suspect.

At forward start every rank digests the same sample of the replicated state. The commit protocol
compares each digest with the first one reported before it counts the step, and the step's outcome
tells every rank. Each rank then marks its own region durably. Only then, when something is known to
differ, do the ranks exchange one checksum per tensor of that sample, and the last rank to report
finds out which ranks differ.

A rank without a digest, or with one of another sample, is not compared, and that is counted: it is
never taken for equal.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from lightck.distributed.rounds import named
from lightck.distributed.store import KeyValueStore
from lightck.errors import CoordinationError, DivergenceError, LightckError
from lightck.region.native_region import crc32c, crc32c_at
from lightck.region.region import Region
from lightck.state import tensor_layout
from lightck.state.inventory import StateTensor

# ---- the bytes compared at each snapshot ---------------------------------------------------------
# Which they are is a pure function of the tensors' lengths. The tensors are laid end to end and cut
# into windows, and each turn takes the next one. If the state is so small that even a small window
# would cost too much every time, only every so many turns take one. Every byte has its turn within
# `ROTATION` turns, up to 8 GiB; beyond, a window is `MOST_BYTES`.

ROTATION = 1024
"""Turns within which every byte is compared. A digest costs about 1/1024 of a plain copy."""
LEAST_BYTES = 256 << 10
"""The least size of a window, if there is so much state.

In a smaller window the work around the digest would cost more than the digest.
"""
MOST_BYTES = 8 << 20
"""The greatest size of a window, however large the state: the training thread digests it."""
PIECE_BYTES = 16 << 10
"""The bytes that a tensor in a window counts for, in addition to its own."""


@dataclass(frozen=True, slots=True)
class SamplePiece:
    """Bytes [begin, end) of a tensor, given by its index."""

    tensor: int
    begin: int
    end: int


class SampleRotation:
    """The windows over tensors of given lengths."""

    def __init__(self, lengths: Sequence[int]) -> None:
        """Divide the tensors into windows."""
        self._lengths = lengths
        self._starts = [0, *accumulate(length + PIECE_BYTES for length in lengths)]
        size = self._starts[-1]
        self.windows = max(1, min(ROTATION, size // LEAST_BYTES), -(-size // MOST_BYTES))
        self.pause = max(1, ROTATION // self.windows)
        """Number of turns per window: a window is due when the turn is a multiple of it."""

    @property
    def turns(self) -> int:
        """Return in how many consecutive turns every byte is compared once."""
        return self.windows * self.pause

    def pieces(self, turn: int) -> list[SamplePiece]:
        """Return the bytes to compare at this turn; most often none where `pause` is above 1."""
        if turn % self.pause or not self._lengths:
            return []
        window, size = turn // self.pause % self.windows, self._starts[-1]
        begin, end = (size * w // self.windows for w in (window, window + 1))
        found, i = [], bisect_right(self._starts, begin) - 1
        while i < len(self._lengths) and self._starts[i] < end:
            start = self._starts[i]
            # The extra bytes that a piece counts for, after its own, are not compared.
            piece = SamplePiece(i, max(begin - start, 0), min(end - start, self._lengths[i]))
            if piece.begin < piece.end:
                found.append(piece)
            i += 1
        return found


ROLES = frozenset({"parameter", "optimizer"})
"""The roles of the tensors that are compared: buffers, extras and boundary state are rank-local."""
_KEPT = 16  # newest samples kept, until it is known whether they differ
_REMEMBERED = 256  # committed steps whose record is remembered
_NAMED = 8
_NOTHING = "-"  # reported by a rank that has no sample of the step


@dataclass(frozen=True, slots=True)
class ReplicaSample:
    """The checksums that this rank computed of replicated state at a step.

    Attributes:
        form: identifies the tensors' names and forms, and the turn; the same on ranks whose samples
            can be compared.
        names: the names of the sampled tensors.
        crcs: the CRC32C of the sampled bytes of each tensor.
    """

    form: str
    names: tuple[str, ...]
    crcs: tuple[int, ...]

    @property
    def digest(self) -> bytes:
        """Return the digest of the whole sample, for `CommitProtocol.committed`."""
        return f"{self.form}:{crc32c(self._sums().encode()):08x}".encode()

    def to_message(self) -> str:
        """Return the message that carries the checksum of every sampled tensor."""
        return f"{self.form}:{self._sums()}"

    def _sums(self) -> str:
        return "".join(f"{crc:08x}" for crc in self.crcs)


@dataclass(eq=False)
class ReplicaSamples:
    """The sampling of replicated state on this rank.

    Threads: `take` runs on the training thread, `sample` on any.
    """

    everything: Callable[[], Sequence[StateTensor]]
    """Returns this rank's tensors, with other ranks' shares; the same object while unchanged."""
    replicated: Callable[[Sequence[StateTensor]], set[str]]
    """Returns the names of the tensors that all ranks hold alike."""
    skipped: int = 0
    """Number of turns without a sample, for nothing here could be digested."""
    _found: Sequence[StateTensor] | None = None
    """The tensors that the rotation was made for."""
    _lives: list[StateTensor] = field(default_factory=list)
    _form: str = ""
    _rotation: SampleRotation | None = None
    _taken: deque[tuple[int, ReplicaSample]] = field(default_factory=lambda: deque(maxlen=_KEPT))

    def take(self, step: int, turn: int) -> None:
        """Digest the bytes whose turn it is.

        Runs at forward start, on the training thread. Nothing changes the state at this instant, so
        that no window has to be watched, and the digest is of the bytes that the snapshot holds.
        """
        if self._rotation is not None and turn % self._rotation.pause:
            return
        found = self.everything()
        if found is not self._found or self._rotation is None:
            self._rotation, self._found = self._arrange(found), found
        pieces = self._rotation.pieces(turn)
        chosen = [self._lives[p.tensor] for p in pieces]
        # `p.data = ...` may have changed a form without any notice.
        lacking = any(v.tensor.nbytes < p.end for v, p in zip(chosen, pieces, strict=True))
        if lacking or not self._lives:
            self.skipped += 1
        elif pieces:
            crcs = [
                crc32c_at(live.tensor.data_ptr() + p.begin, p.end - p.begin)
                for live, p in zip(chosen, pieces, strict=True)
            ]
            names = tuple(live.name for live in chosen)
            self._taken.append((step, ReplicaSample(f"{self._form}.{turn}", names, tuple(crcs))))

    def sample(self, step: int) -> ReplicaSample | None:
        """Return the sample of a recent step; None if none was taken."""
        taken = reversed(list(self._taken))
        return next((sample for at, sample in taken if at == step), None)

    def _arrange(self, lives: Sequence[StateTensor]) -> SampleRotation:
        alike = self.replicated(lives)
        self._lives = sorted(
            (live for live in lives if live.name in alike and _has_plain_bytes(live)),
            key=lambda live: live.name,
        )
        forms = [
            [v.name, str(v.tensor.dtype), list(v.tensor.shape), list(v.tensor.stride())]
            for v in self._lives
        ]
        self._form = hashlib.blake2b(json.dumps(forms).encode(), digest_size=8).hexdigest()
        return SampleRotation([live.tensor.nbytes for live in self._lives])


def _has_plain_bytes(live: StateTensor) -> bool:
    tensor = live.tensor
    return (
        live.role in ROLES
        and live.alias_of is None
        and tensor.is_cpu
        and tensor.nbytes > 0
        and tensor_layout.is_dense(tensor)
    )


# ---- what differs, and who says so ---------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Verdict:
    """The differences that the ranks found together.

    Attributes:
        form: identifies the samples that were compared, as in `ReplicaSample`.
        differing: per tensor of the sample, by index, the ranks that differ from the majority; None
            where no value has a majority.
        unsampled: ranks without such a sample.
    """

    form: str
    differing: dict[int, list[int] | None]
    unsampled: list[int]

    def encode(self) -> bytes:
        """Encode it as a value of the store."""
        rows = [[i, ranks] for i, ranks in self.differing.items()]
        return json.dumps([self.form, rows, self.unsampled], separators=(",", ":")).encode()

    @staticmethod
    def decode(value: bytes) -> Verdict:
        """Decode a value of the store."""
        form, rows, unsampled = json.loads(value)
        return Verdict(form, dict(rows), unsampled)


def decide_verdict(messages: Sequence[str]) -> Verdict:
    """Find which ranks differ in which tensors: a pure function of the messages, in rank order."""
    parts = [each.partition(":") for each in messages]
    kinds = Counter(what for what, _, _ in parts if what != _NOTHING)
    what = max(kinds, key=lambda kind: kinds[kind], default=_NOTHING)
    sums = {r: sums for r, (kind, _, sums) in enumerate(parts) if kind == what != _NOTHING}
    differing: dict[int, list[int] | None] = {}
    for i in range(max(map(len, sums.values()), default=0) // 8):
        values = {rank: each[8 * i : 8 * i + 8] for rank, each in sums.items()}
        (most, count), *others = Counter(values.values()).most_common()
        if others:
            differ = [rank for rank, value in values.items() if value != most]
            differing[i] = differ if 2 * count > len(values) else None
    return Verdict(what, differing, [r for r in range(len(messages)) if r not in sums])


def exchange_samples(
    store: KeyValueStore, rank: int, world: int, step: int, message: str, seconds: float
) -> Verdict:
    """Report this rank's sample of `step`; return the verdict on all ranks' samples. Blocks.

    It takes six messages per rank; only the last rank to report reads all samples. The keys are
    deleted when every rank has been here.

    Raises:
        CoordinationError: not every rank came in time.
        StoreError: the store does not answer.
    """
    count, verdict = f"e/{step}/n", f"e/{step}/v"
    store.claim(f"e/{step}/{rank}", message.encode())
    if store.add(count) == world:
        every = store.read_many([f"e/{step}/{r}" for r in range(world)])
        store.claim(verdict, decide_verdict([each.decode() for each in every]).encode())
    began = time.monotonic()
    decided = None
    # A wait may end without the key: torch's server wakes all waiters when one of them gives up.
    while decided is None and (left := began + seconds - time.monotonic()) > 0:
        decided = store.read(verdict) if store.wait(verdict, left) else None
    if decided is None:
        missing = [r for r in range(world) if store.read(f"e/{step}/{r}") is None]
        raise CoordinationError(
            f"rank(s) {named(missing)} of {world} did not say in {time.monotonic() - began:.0f} s"
            f" what they hold (key e/{step})"
        )
    found = Verdict.decode(decided)
    store.delete([f"e/{step}/{rank}"])
    if store.add(count) == 2 * world:
        store.delete([verdict, count])
    return found


@dataclass(eq=False)
class SuspectMarks:
    """The suspect marks in this rank's region.

    Threads: `note` is called when a snapshot has been committed here; any thread may make a mark.
    """

    region: Region
    _sequences: dict[int, int] = field(default_factory=dict)

    def note(self, step: int) -> None:
        """Remember which snapshot is that of `step`, until its outcome is known."""
        for slot in self.region.slots:
            record = slot.record
            if record is not None and (record.timeline, record.step) == (
                self.region.timeline,
                step,
            ):
                self._sequences[step] = record.sequence
        while len(self._sequences) > _REMEMBERED:
            del self._sequences[next(iter(self._sequences))]

    def mark(self, step: int) -> None:
        """Durably mark the snapshot of `step`, and all later ones of the timeline, as suspect."""
        later = [number for at, number in [*self._sequences.items()] if at >= step]
        self.region.native.suspect(min(later, default=self.region.next_sequence))


@dataclass(eq=False)
class Divergence:
    """The reaction of this rank when replicas differ.

    Threads: `suspect` is called on a thread of the global commit, `close` on the training thread.
    """

    store: KeyValueStore
    rank: int
    world: int
    samples: ReplicaSamples
    mark: Callable[[int], None]
    """Marks the snapshots from a step on as suspect; see `SuspectMarks.mark`."""
    report: Callable[[LightckError], None]
    """Receives the errors that are found; called on a background thread."""
    patience_s: float = 60.0
    _looked_into: set[int] = field(default_factory=set)
    _named: set[str] = field(default_factory=set)
    _naming: threading.Lock = field(default_factory=threading.Lock)
    """Guards `_named`: differences at several steps are looked into at the same time."""
    _threads: list[threading.Thread] = field(default_factory=list)

    def suspect(self, step: int, differed: int) -> None:
        """Mark the snapshot of `step` as suspect, and find out in the background what differs.

        The digests differed at step `differed`. Each such step is looked into once.
        """
        try:
            self.mark(step)
        except LightckError as error:
            self.report(error)
        if differed in self._looked_into:
            return
        self._looked_into.add(differed)
        # The answers of other ranks may take long; outcomes of other steps do not wait for them.
        thread = threading.Thread(
            target=self._look_into, args=(step, differed), name="lightck-differ", daemon=True
        )
        self._threads.append(thread)
        thread.start()

    def close(self, seconds: float) -> None:
        """Wait, up to `seconds`, for the threads that look into differences."""
        deadline = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _look_into(self, step: int, differed: int) -> None:
        sample = self.samples.sample(differed)
        message = sample.to_message() if sample else _NOTHING
        try:
            store = self.store.clone()
            found = exchange_samples(
                store, self.rank, self.world, differed, message, self.patience_s
            )
        except CoordinationError as failure:
            text = f"step {differed}: replicas differ; in what is not known: {failure}. "
            self.report(DivergenceError(text + _suspect(step), step=differed))
            return
        error = self._error(step, differed, found, sample)
        if error is not None:
            self.report(error)

    def _error(
        self, step: int, differed: int, found: Verdict, sample: ReplicaSample | None
    ) -> DivergenceError | None:
        same = sample is not None and sample.form == found.form
        names = {i: sample.names[i] if sample and same else f"#{i}" for i in found.differing}
        with self._naming:
            new = {name: found.differing[i] for i, name in names.items() if name not in self._named}
            self._named.update(new)
        if not new and found.differing:
            return None
        differing = sorted({rank for ranks in new.values() for rank in ranks or range(self.world)})
        text = f"step {differed}: replicas differ in {_each(new, self.world)}. "
        if found.unsampled:
            text += f"Not compared: rank(s) {named(found.unsampled)}. "
        names_new = tuple(new)
        return DivergenceError(
            text + _suspect(step), step=differed, names=names_new, ranks=differing
        )


def _each(differing: dict[str, Any], world: int) -> str:
    parts = []
    for name, ranks in list(differing.items())[:_NAMED]:
        if ranks is None:
            parts.append(f"{name} (no value is most ranks': any of the {world} may be wrong)")
        else:
            parts.append(f"{name} (rank(s) {named(ranks)} of {world} differ from the others)")
    more = f" and {len(differing) - _NAMED} more tensors" if len(differing) > _NAMED else ""
    return (", ".join(parts) or "a tensor that cannot be named") + more


def _suspect(step: int) -> str:
    return (
        f"Snapshots from step {step} on are suspect, and restore prefers one from before. Look for "
        "code that changes a replica on one rank only, and at that rank's memory; then restore"
    )
