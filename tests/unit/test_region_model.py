"""Random sequences of what can happen to a region, against a dict of what was committed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from lightck.errors import PersistError, RegionIOError
from lightck.region.region import Candidate, open_and_recover
from lightck.region.slot_writer import SlotWriter
from support import faults
from support.regions import Book, Bytes, contents_of, random_contents, same

OPERATIONS = 120


@pytest.fixture(autouse=True)
def no_faults_left() -> Iterator[None]:
    yield
    faults.clear()


Key = tuple[int, int]
"""Timeline and sequence: what names a snapshot."""


def key_of(candidate: Candidate) -> Key:
    return candidate.record.timeline, candidate.record.sequence


@dataclass
class Model:
    """The model holds what must be true of the region at `folder`."""

    folder: Path
    dice: np.random.Generator
    slots: int
    committed: dict[Key, tuple[int, dict[str, Bytes]]] = field(default_factory=dict)
    """Step and contents of everything that was ever committed."""
    lineage: list[Key] = field(default_factory=list)
    """The present timeline continues or made these, oldest first."""
    opened: list[tuple[SlotWriter, dict[str, Bytes]]] = field(default_factory=list)
    names: int = 3
    log: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.book = Book(self.folder, slots=self.slots)
        self.book.region.begin_timeline(None)

    @property
    def step(self) -> int:
        return self.committed[self.lineage[-1]][0] if self.lineage else 0

    def contents(self) -> dict[str, Bytes]:
        sizes = {f"t{i}": int(self.dice.integers(0, 9000)) for i in range(self.names)}
        return random_contents(self.dice, sizes)

    def do(self) -> None:
        choice = self.dice.choice(
            ["commit", "open", "seal", "abandon", "fail", "reopen", "branch", "grow"],
            p=[0.3, 0.1, 0.15, 0.1, 0.1, 0.1, 0.1, 0.05],
        )
        self.log.append(str(choice))
        getattr(self, str(choice))()

    def commit(self) -> None:
        contents = self.contents()
        writer = self.book.open(contents)
        if writer is None:
            assert len(self.opened) >= self.slots - 1, "no slot was given, but one is free"
            return
        self._seal(writer, contents)

    def _seal(self, writer: SlotWriter, contents: dict[str, Bytes]) -> None:
        step = self.step + 1
        self.book.seal(writer, step)
        assert writer.wait(None) and writer.record is not None
        key = writer.record.timeline, writer.record.sequence
        assert key not in self.committed
        assert all(key[1] > sequence for _, sequence in self.lineage)
        self.committed[key] = (step, contents)
        self.lineage.append(key)

    def open(self) -> None:
        contents = self.contents()
        writer = self.book.open(contents)
        if writer is not None:
            self.opened.append((writer, contents))

    def seal(self) -> None:
        if self.opened:
            self._seal(*self.opened.pop(int(self.dice.integers(len(self.opened)))))

    def abandon(self) -> None:
        if self.opened:
            self.opened.pop(int(self.dice.integers(len(self.opened))))[0].abandon()

    def fail(self) -> None:
        """Somewhere in a commit; then the region is latched until it is opened again."""
        point = [faults.COPY, faults.COMMIT, faults.RECORD, faults.INVALIDATE]
        faults.arm(int(self.dice.choice(point)), after=int(self.dice.integers(0, 2)))
        contents = self.contents()
        try:
            writer = self.book.open(contents)
            if writer is not None:
                self._seal(writer, contents)
        except (RegionIOError, PersistError):
            faults.clear()
            # Refused as latched; where no slot is free the region is not even asked.
            with contextlib.suppress(PersistError):
                assert self.book.open(self.contents()) is None, "the region is not latched"
            self.reopen()
        faults.clear()

    def reopen(self) -> None:
        """A restart that goes on from the newest."""
        self._restart(0)

    def branch(self) -> None:
        """A restart that goes on from an older one, if one is still there."""
        self._restart(int(self.dice.integers(0, 3)))

    def _restart(self, back: int) -> None:
        self.opened.clear()
        self.book.close()
        self.book = Book(self.folder)
        found = self.book.region.recover().candidates
        if not found:
            assert not self.lineage
            self.book.region.begin_timeline(None)
            return
        chosen = found[min(back, len(found) - 1)]
        self.lineage = self.lineage[: self.lineage.index(key_of(chosen)) + 1]
        self.book.region.begin_timeline(chosen.record)

    def grow(self) -> None:
        self.names = min(12, self.names + 1)
        self.commit()

    def check(self) -> None:
        """A reader sees the newest of the lineage, and nothing that was not committed."""
        region, recovery = open_and_recover(self.book.where)
        try:
            assert not recovery.problems
            found = [key_of(candidate) for candidate in recovery.candidates]
            assert found == [key for key in reversed(self.lineage) if key in found]
            assert found[:1] == self.lineage[-1:]
            for candidate in (*recovery.candidates, *recovery.abandoned):
                step, contents = self.committed[key_of(candidate)]
                assert candidate.record.step == candidate.manifest.step == step
                assert same(contents_of(region, candidate), contents)
            for candidate in recovery.abandoned:
                assert key_of(candidate) not in self.lineage
        finally:
            region.close()


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("slots", [2, 3, 5])
def test_any_sequence_of_operations_keeps_the_newest_and_invents_nothing(
    region_dir: Path, seed: int, slots: int
) -> None:
    model = Model(region_dir / "run", np.random.default_rng(seed), slots)
    try:
        for _ in range(OPERATIONS):
            model.do()
            model.check()
    except BaseException:
        print(f"seed={seed} slots={slots} after: {' '.join(model.log)}")
        raise
    finally:
        model.book.close()
    assert len(model.committed) > 10
