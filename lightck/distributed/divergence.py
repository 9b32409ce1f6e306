"""Replicas that no longer hold the same bytes: noticed, named, and marked.

At forward start every rank digests the same sample of what all of them hold (`sample.py`). The
ledger holds the digest against the first one said before it counts the step; the fate tells every
rank. Each then marks its own region, durably, and only now, when something is known to differ, they
say more: one checksum per tensor of that sample. Whoever comes last finds out who differs.

A rank without a digest, or with one of something else, is not compared, and that is counted:
nobody takes it for equal.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightck.capture import staging
from lightck.capture.state import Live
from lightck.distributed.sample import Rotation
from lightck.distributed.store import Store
from lightck.errors import CoordinationError, DivergenceError, LightckError
from lightck.region.native import crc32c, crc32c_at
from lightck.region.region import Region

ROLES = frozenset({"parameter", "optimizer"})
"""Of what is compared: buffers, extras and boundary state are every rank's own."""
_KEPT = 16  # newest samples, until it is known whether they differ
_REMEMBERED = 256  # committed steps
_NAMED = 8
_NOTHING = "-"  # said by a rank that has no sample of the step


@dataclass(frozen=True, slots=True)
class Sample:
    """What this rank saw of replicated state at a step.

    Attributes:
        what: stands for the tensors' names and forms, and for the turn; the same on ranks whose
            samples can be compared.
        names: of the tensors.
        crcs: of the bytes of each that have their turn.
    """

    what: str
    names: tuple[str, ...]
    crcs: tuple[int, ...]

    @property
    def digest(self) -> bytes:
        """For `Ledger.committed`."""
        return f"{self.what}:{crc32c(self._sums().encode()):08x}".encode()

    def said(self) -> str:
        """The checksum of every tensor."""
        return f"{self.what}:{self._sums()}"

    def _sums(self) -> str:
        return "".join(f"{crc:08x}" for crc in self.crcs)


@dataclass(eq=False)
class Samples:
    """Takes this rank's samples.

    Thread: `take` is the training thread's, `of` is anybody's.
    """

    everything: Callable[[], Sequence[Live]]
    """What there is on this rank, other ranks' shares included; the same object while it is."""
    replicated: Callable[[Sequence[Live]], set[str]]
    """Names of the tensors that all ranks hold alike."""
    skipped: int = 0
    """Turns without a sample: there was nothing here that could be digested."""
    _found: Sequence[Live] | None = None
    """What the rotation was made for."""
    _lives: list[Live] = field(default_factory=list)
    _what: str = ""
    _rotation: Rotation | None = None
    _taken: deque[tuple[int, Sample]] = field(default_factory=lambda: deque(maxlen=_KEPT))

    def take(self, step: int, turn: int) -> None:
        """Digest what has its turn.

        Runs at forward start, on the training thread: at this instant nothing changes it, so that
        there is no window to watch, and what is digested is what the snapshot holds.
        """
        if self._rotation is not None and turn % self._rotation.pause:
            return
        found = self.everything()
        if found is not self._found or self._rotation is None:
            self._rotation, self._found = self._arrange(found), found
        pieces = self._rotation.pieces(turn)
        chosen = [self._lives[p.tensor] for p in pieces]
        # `p.data = ...` may have changed a form without anybody being told.
        lacking = any(v.tensor.nbytes < p.end for v, p in zip(chosen, pieces, strict=True))
        if lacking or not self._lives:
            self.skipped += 1
        elif pieces:
            crcs = [
                crc32c_at(live.tensor.data_ptr() + p.begin, p.end - p.begin)
                for live, p in zip(chosen, pieces, strict=True)
            ]
            names = tuple(live.name for live in chosen)
            self._taken.append((step, Sample(f"{self._what}.{turn}", names, tuple(crcs))))

    def of(self, step: int) -> Sample | None:
        """The sample of a recent step; None if there was none to take."""
        taken = reversed(list(self._taken))
        return next((sample for at, sample in taken if at == step), None)

    def _arrange(self, lives: Sequence[Live]) -> Rotation:
        alike = self.replicated(lives)
        self._lives = sorted(
            (live for live in lives if live.name in alike and _has_plain_bytes(live)),
            key=lambda live: live.name,
        )
        forms = [
            [v.name, str(v.tensor.dtype), list(v.tensor.shape), list(v.tensor.stride())]
            for v in self._lives
        ]
        self._what = hashlib.blake2b(json.dumps(forms).encode(), digest_size=8).hexdigest()
        return Rotation([live.tensor.nbytes for live in self._lives])


def _has_plain_bytes(live: Live) -> bool:
    tensor = live.tensor
    return (
        live.role in ROLES
        and live.alias_of is None
        and tensor.is_cpu
        and tensor.nbytes > 0
        and staging.is_dense(tensor)
    )


@dataclass(frozen=True, slots=True)
class Verdict:
    """What differs, as the ranks found together.

    Attributes:
        what: of the samples that were compared.
        odd: per tensor of the sample, by index, the ranks that differ from most; None where no
            value is most ranks'.
        silent: ranks without such a sample.
    """

    what: str
    odd: dict[int, list[int] | None]
    silent: list[int]

    def encode(self) -> bytes:
        """As a value of the store."""
        rows = [[i, ranks] for i, ranks in self.odd.items()]
        return json.dumps([self.what, rows, self.silent], separators=(",", ":")).encode()

    @staticmethod
    def decode(value: bytes) -> Verdict:
        """Read it."""
        what, rows, silent = json.loads(value)
        return Verdict(what, dict(rows), silent)


def decide(said: Sequence[str]) -> Verdict:
    """Find who differs in what: a pure function of what every rank said, in their order."""
    parts = [each.partition(":") for each in said]
    kinds = Counter(what for what, _, _ in parts if what != _NOTHING)
    what = max(kinds, key=lambda kind: kinds[kind], default=_NOTHING)
    sums = {r: sums for r, (kind, _, sums) in enumerate(parts) if kind == what != _NOTHING}
    odd: dict[int, list[int] | None] = {}
    for i in range(max(map(len, sums.values()), default=0) // 8):
        values = {rank: each[8 * i : 8 * i + 8] for rank, each in sums.items()}
        (most, count), *others = Counter(values.values()).most_common()
        if others:
            differ = [rank for rank, value in values.items() if value != most]
            odd[i] = differ if 2 * count > len(values) else None
    return Verdict(what, odd, [r for r in range(len(said)) if r not in sums])


def inquire(store: Store, rank: int, world: int, step: int, said: str, seconds: float) -> Verdict:
    """Say what this rank's sample of `step` was; return what all ranks' together show.

    Six messages per rank; only who comes last reads what all said. The keys are gone when every
    rank has been here. Blocks.

    Raises:
        CoordinationError: not every rank came in time.
        StoreError: the store does not answer.
    """
    count, verdict = f"e/{step}/n", f"e/{step}/v"
    store.claim(f"e/{step}/{rank}", said.encode())
    if store.add(count) == world:
        every = store.read_many([f"e/{step}/{r}" for r in range(world)])
        store.claim(verdict, decide([each.decode() for each in every]).encode())
    began = time.monotonic()
    told = None
    # A wait may end with nothing there: torch's server wakes all when one of them gives up.
    while told is None and (left := began + seconds - time.monotonic()) > 0:
        told = store.read(verdict) if store.wait(verdict, left) else None
    if told is None:
        missing = [r for r in range(world) if store.read(f"e/{step}/{r}") is None]
        raise CoordinationError(
            f"rank(s) {_listed(missing)} of {world} did not say in {time.monotonic() - began:.0f} s"
            f" what they hold (key e/{step})"
        )
    found = Verdict.decode(told)
    store.delete([f"e/{step}/{rank}"])
    if store.add(count) == 2 * world:
        store.delete([verdict, count])
    return found


@dataclass(eq=False)
class Marks:
    """Marks this rank's region.

    Thread: `note` is called when a snapshot has been committed here, a mark is made by any thread.
    """

    region: Region
    _sequences: dict[int, int] = field(default_factory=dict)

    def note(self, step: int) -> None:
        """Remember which snapshot is that of the step, until its fate is known."""
        for slot in self.region.slots:
            record = slot.record
            if record is not None and (record.timeline, record.step) == (
                self.region.timeline,
                step,
            ):
                self._sequences[step] = record.sequence
        while len(self._sequences) > _REMEMBERED:
            del self._sequences[next(iter(self._sequences))]

    def __call__(self, step: int) -> None:
        """Durably mark the snapshot of the step, and all later ones of the timeline."""
        later = [number for at, number in [*self._sequences.items()] if at >= step]
        self.region.native.suspect(min(later, default=self.region.next_sequence))


@dataclass(eq=False)
class Divergence:
    """What follows on this rank when replicas differ.

    Thread: `suspect` is called by the global commit's, `close` by the training thread.
    """

    store: Store
    rank: int
    world: int
    samples: Samples
    mark: Callable[[int], None]
    """See `Marks`."""
    report: Callable[[LightckError], None]
    """Hears what is found; on a background thread."""
    patience_s: float = 60.0
    _asked: set[int] = field(default_factory=set)
    _named: set[str] = field(default_factory=set)
    _naming: threading.Lock = field(default_factory=threading.Lock)
    """Guards `_named`: what differs at several steps is found out at the same time."""
    _threads: list[threading.Thread] = field(default_factory=list)

    def suspect(self, step: int, differed: int) -> None:
        """Learn that the snapshot of `step` is suspect, since digests differed at `differed`."""
        try:
            self.mark(step)
        except LightckError as error:
            self.report(error)
        if differed in self._asked:
            return
        self._asked.add(differed)
        # The answers of other ranks may take long; fates do not wait for them.
        thread = threading.Thread(
            target=self._name, args=(step, differed), name="lightck-differ", daemon=True
        )
        self._threads.append(thread)
        thread.start()

    def close(self, seconds: float) -> None:
        """Wait for what is being found out."""
        deadline = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _name(self, step: int, differed: int) -> None:
        sample = self.samples.of(differed)
        said = sample.said() if sample else _NOTHING
        try:
            store = self.store.clone()
            found = inquire(store, self.rank, self.world, differed, said, self.patience_s)
        except CoordinationError as error:
            text = f"step {differed}: replicas differ; in what is not known: {error}. "
            self.report(DivergenceError(text + _suspect(step), step=differed))
            return
        told = self._error(step, differed, found, sample)
        if told is not None:
            self.report(told)

    def _error(
        self, step: int, differed: int, found: Verdict, sample: Sample | None
    ) -> DivergenceError | None:
        same = sample is not None and sample.what == found.what
        names = {i: sample.names[i] if sample and same else f"#{i}" for i in found.odd}
        with self._naming:
            new = {name: found.odd[i] for i, name in names.items() if name not in self._named}
            self._named.update(new)
        if not new and found.odd:
            return None
        odd = sorted({rank for ranks in new.values() for rank in ranks or range(self.world)})
        text = f"step {differed}: replicas differ in {_each(new, self.world)}. "
        if found.silent:
            text += f"Not compared: rank(s) {_listed(found.silent)}. "
        return DivergenceError(text + _suspect(step), step=differed, names=tuple(new), ranks=odd)


def _each(odd: dict[str, Any], world: int) -> str:
    told = []
    for name, ranks in list(odd.items())[:_NAMED]:
        if ranks is None:
            told.append(f"{name} (no value is most ranks': any of the {world} may be wrong)")
        else:
            told.append(f"{name} (rank(s) {_listed(ranks)} of {world} differ from the others)")
    more = f" and {len(odd) - _NAMED} more tensors" if len(odd) > _NAMED else ""
    return (", ".join(told) or "a tensor that cannot be named") + more


def _suspect(step: int) -> str:
    return (
        f"Snapshots from step {step} on are suspect, and restore prefers one from before. Look for "
        "code that changes a replica on one rank only, and at that rank's memory; then restore"
    )


def _listed(ranks: Sequence[int]) -> str:
    more = f" and {len(ranks) - _NAMED} more" if len(ranks) > _NAMED else ""
    return ", ".join(str(rank) for rank in ranks[:_NAMED]) + more
