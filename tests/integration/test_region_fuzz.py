"""Any bytes at all as a region: a snapshot that is right, or a typed error; in bounded time and
memory, and never a crash; also when the checksums are right and what they cover is not."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from support import forge, proof
from support.forge import Image
from support.judge import Judge, train
from support.loops import Digests

EXAMPLES = int(os.environ.get("LIGHTCK_FUZZ_EXAMPLES") or 25)
PARTS = [f"{part}{i}" for i in (0, 1) for part in ("super", "record", "layout", "manifest")]
EDGES = [
    0, 1, 2, 15, 16, 17, 4095, 4096, 1 << 21, 1 << 22, 1 << 30, 1 << 31, 1 << 32,
    1 << 45, (1 << 62) - 1, 1 << 62, 1 << 63, (1 << 63) + 3, (1 << 64) - 4096, (1 << 64) - 1,
]  # fmt: skip
Change = tuple[Any, ...]

numbers = st.one_of(st.sampled_from(EDGES), st.integers(0, (1 << 64) - 1))
fields = st.one_of(
    st.tuples(
        st.just("field"),
        st.sampled_from(["super0", "super1", "both"]),
        st.sampled_from(sorted(forge.SUPER_FIELDS)),
        numbers,
    ),
    st.tuples(
        st.just("field"),
        st.sampled_from(["record0", "record1"]),
        st.sampled_from(sorted(forge.RECORD_FIELDS)),
        numbers,
    ),
)
changes = st.one_of(
    fields,
    st.tuples(st.just("flip"), st.sampled_from(PARTS), st.integers(0, 1 << 16)),
    st.tuples(
        st.just("bytes"),
        st.sampled_from(PARTS),
        st.integers(0, 1 << 13),
        st.binary(min_size=1, max_size=40),
    ),
    st.tuples(st.just("anywhere"), st.integers(0, 1 << 23), st.binary(min_size=1, max_size=300)),
    st.tuples(st.just("splice"), st.sampled_from(PARTS), st.sampled_from(PARTS)),
    st.tuples(st.just("other"), st.sampled_from(PARTS)),
    st.tuples(st.just("length"), st.integers(-(1 << 23), 1 << 23)),
)


def change(image: Image, other: Image, what: Change) -> None:
    """Apply one change; what lies beyond a file that was cut is left out."""
    kind, *rest = what
    if kind == "length":
        size = max(0, len(image.raw) + rest[0])
        image.raw = image.raw[:size] + bytearray(max(0, size - len(image.raw)))
    elif len(image.raw) < 4 * forge.PAGE:
        return
    elif kind == "field":
        names = ["super0", "super1"] if rest[0] == "both" else [rest[0]]
        for name in names:
            image.put(name, rest[1], rest[2])
    elif kind == "flip":
        at, length = image.part(rest[0])
        if length:
            image.raw[at + rest[1] // 8 % length] ^= 1 << rest[1] % 8
    elif kind == "bytes":
        at, length = image.part(rest[0])
        if length > len(rest[2]):
            begin = at + rest[1] % (length - len(rest[2]))
            image.raw[begin : begin + len(rest[2])] = rest[2]
    elif kind == "anywhere":
        at = rest[0] % len(image.raw)
        data = rest[1][: len(image.raw) - at]
        image.raw[at : at + len(data)] = data
    elif kind == "splice":
        data = image.bytes_of(rest[0])
        at = image.part(rest[1])[0]
        image.raw[at : at + len(data)] = data[: len(image.raw) - at]
    elif kind == "other":
        at, length = image.part(rest[0])
        image.raw[at : at + length] = other.raw[at : at + length].ljust(length, b"\0")


@dataclass
class Bench:
    """A sound region, another one of the same job, and who judges what is made of them."""

    file: Path
    sound: bytes
    other: bytes
    seen: dict[int, Digests]
    judge: Judge
    tried: int = 0

    def verdicts(self, image: Image) -> dict[str, dict[str, Any]]:
        """Store the image and let it be judged: nothing but answers and typed errors."""
        self.tried += 1
        self.file.write_bytes(image.raw)
        found = self.judge.verdicts()
        for reader, verdict in found.items():
            assert "untyped" not in verdict, f"{reader}: {verdict['untyped']}"
        return found

    def sound_image(self) -> Image:
        return Image(bytearray(self.sound))


@pytest.fixture(scope="module")
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    import shutil
    import tempfile

    folder = Path(tempfile.mkdtemp(prefix="lightck-test-", dir="/dev/shm"))
    seen = train(folder / "run")
    train(folder / "other")
    file = folder / "run" / "region-00000.lck"
    other = (folder / "other" / "region-00000.lck").read_bytes()
    judge = Judge(folder / "run")
    made = Bench(file, file.read_bytes(), other, seen, judge)
    yield made
    judge.close()
    shutil.rmtree(folder)
    proof.record_whole(request, "fuzz", {"hypothesis_examples": made.tried, "crashes": 0})


def sound_settings(examples: int) -> Any:
    return settings(
        max_examples=examples,
        suppress_health_check=[HealthCheck.function_scoped_fixture],
    )


def check_damaged(bench: Bench, what: list[Change]) -> None:
    image = bench.sound_image()
    for each in what:
        change(image, Image(bytearray(bench.other)), each)
    found = bench.verdicts(image)
    restored = found["restore"]
    if "error" in restored:
        return
    step = restored["step"]
    if step is None:  # as it is before the first commit
        assert not any(image.get(f"record{slot}", "sequence") for slot in (0, 1))
        return
    assert restored["digests"] == bench.seen[step]
    assert found["load"] == {"step": step}


def check_forged(bench: Bench, what: list[Change]) -> None:
    image = bench.sound_image()
    for each in what:
        change(image, Image(bytearray(bench.other)), each)
    image.seal()
    bench.verdicts(image)


def test_the_sound_region_is_read_by_everything(bench: Bench) -> None:
    found = bench.verdicts(bench.sound_image())
    assert found["restore"] == {"step": 3, "digests": bench.seen[3]}
    assert found["load"] == {"step": 3}
    assert found["snapshots"]["rows"] == found["verify"]["checked"] == 2
    assert found["commands"]["codes"] in ([], [0] * 5)
    assert found["attach"] == {"step": 4}
    image = bench.sound_image()
    image.seal()
    assert image.raw == bench.sound, "sealing a sound region changes nothing"


@given(st.lists(changes, min_size=1, max_size=4))
@sound_settings(EXAMPLES)
def test_damage_gives_a_right_snapshot_or_a_typed_error(bench: Bench, what: list[Change]) -> None:
    check_damaged(bench, what)


@given(st.lists(changes, min_size=1, max_size=4))
@example([("field", "record1", "sequence", (1 << 63) + (1 << 62))])
@example(
    [("field", "both", "lineage0.sequence", (1 << 64) - 1), ("field", "both", "lineage_count", 1)]
)
@example([("field", "record0", "world", 1 << 30), ("field", "record1", "world", 1 << 30)])
@sound_settings(EXAMPLES)
def test_forged_regions_give_answers_or_typed_errors(bench: Bench, what: list[Change]) -> None:
    check_forged(bench, what)


@pytest.mark.soak
@given(st.lists(changes, min_size=1, max_size=6), st.booleans())
@sound_settings(50 * EXAMPLES)
def test_thousands_of_damaged_and_forged_regions(
    bench: Bench, what: list[Change], sealed: bool
) -> None:
    (check_forged if sealed else check_damaged)(bench, what)
