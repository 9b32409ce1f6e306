"""Shares in the regions of several ranks, put together: byte for byte the state, nothing twice."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightck.errors import CorruptSnapshotError
from lightck.pipeline.placement import Mode
from lightck.reader.assembly import assemble
from lightck.state.inventory import StateTensor
from support.distributed.shared import Readers, sharing, whole, writers

DTYPES = [
    torch.float32, torch.float64, torch.bfloat16, torch.uint8, torch.bool, torch.complex64,
    torch.complex128, torch.int64,
]  # fmt: skip
HELD = frozenset({0})
PAGE = 4096


@pytest.fixture
def folder(region_dir: Path) -> Iterator[Path]:
    yield region_dir / "run"


def filled(shape: Sequence[int], dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    size = torch.empty(0, dtype=dtype).element_size()
    count = int(torch.Size(shape).numel())
    data = torch.randint(0, 2 if dtype is torch.bool else 256, (count * size,), generator=generator)
    return data.to(torch.uint8).view(dtype).reshape(tuple(shape))


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Draw dense tensors in several orders of dimensions, others, empty ones, single elements."""
    shape = draw(
        st.sampled_from([(), (0,), (1,), (3, 0), (7,), (1024,), (33, 65), (3000, 5), (20000,)])
    )
    made = filled(shape, draw(st.sampled_from(DTYPES)), draw(st.integers(0, 1000)))
    if made.dim() == 2 and draw(st.booleans()):
        made = made.t()  # dense, and not contiguous
    form = draw(st.sampled_from(["as it is", "part", "expanded", "conjugate"]))
    if form == "part" and made.dim() and made.shape[0] > 2:
        return made[1:-1]
    if form == "expanded" and made.dim():
        return made.unsqueeze(0).expand(2, *made.shape)
    return made.conj() if form == "conjugate" and made.is_complex() else made


@st.composite
def replicas(draw: st.DrawFn) -> list[StateTensor]:
    lives: list[StateTensor] = []
    for i, tensor in enumerate(draw(st.lists(tensors(), max_size=8))):
        role = draw(st.sampled_from(["parameter", "optimizer"]))
        holders = draw(st.sampled_from([HELD, frozenset(), frozenset({1})]))
        torn = draw(st.booleans())  # twice before: copied at forward start
        live = StateTensor(f"model/{i}", role, "", tensor, holders, torn)
        lives.append(live)
        if draw(st.integers(0, 4)) == 0:
            lives.append(replace(live, name=f"model/{i}.tied", alias_of=live.name))
    return lives


def own_of(rank: int) -> list[StateTensor]:
    """Make what differs by rank, under the same names."""
    return [
        StateTensor("model/bn", "buffer", "", torch.full((5,), float(rank)), frozenset(), True),
        StateTensor("optim/0/@group/0/lr", "extra", "", torch.tensor(rank)),
    ]


@settings(max_examples=40)
@given(replicas(), st.integers(1, 8))
def test_the_shares_of_all_ranks_are_the_whole_byte_for_byte(
    lives: list[StateTensor], world: int
) -> None:
    folder = Path(tempfile.mkdtemp(prefix="lightck-test-", dir="/dev/shm"))
    try:
        with writers(folder / "run", world) as ranks:
            for rank, writer in enumerate(ranks):
                writer.write(3, [*lives, *own_of(rank)])
        with Readers(folder / "run", world) as readers:
            for rank in range(world):
                expected = whole([*lives, *own_of(rank)])
                assert readers.contents(rank, 3) == expected
    finally:
        shutil.rmtree(folder)


WEIGHT = torch.arange(11 * 1024, dtype=torch.float32)  # eleven pages


def live(name: str = "model/w", tensor: torch.Tensor = WEIGHT, **fields: object) -> StateTensor:
    return StateTensor(name, "parameter", "", tensor, **{"holders": HELD, **fields})  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", ["direct", "staged"])
@pytest.mark.parametrize("sync", [False, True], ids=["live", "copied at forward start"])
def test_a_cut_tensor_is_written_from_where_each_part_begins(
    folder: Path, mode: Mode, sync: bool
) -> None:
    lives = [live(sync=sync)]
    with writers(folder, 3, mode) as ranks:
        for writer in ranks:
            writer.write(1, lives)
        sizes = [w.region.recover().candidates[0].layout.payload_bytes for w in ranks]
        assert sizes == [4 * PAGE, 3 * PAGE, 4 * PAGE]
    with Readers(folder, 3) as readers:
        pieces = readers.assembled(2, 1).pieces["model/w"]
        assert [(p.begin, p.length) for p in pieces] == [
            (0, 4 * PAGE), (4 * PAGE, 3 * PAGE), (7 * PAGE, 4 * PAGE)
        ]  # fmt: skip
        assert readers.contents(1, 1) == whole(lives)


def test_what_is_copied_at_the_boundary_may_change_at_once(folder: Path) -> None:
    tensor = WEIGHT.clone()
    lives = [live(tensor=tensor, sync=True)]
    expected = whole(lives)
    with writers(folder, 2) as ranks:
        for writer in ranks:
            writer.open(1, lives)
        tensor += 1
        assert all(writer.commit() for writer in ranks)
    with Readers(folder, 2) as readers:
        assert readers.contents(0, 1) == expected


def test_the_audit_looks_where_the_part_begins(folder: Path) -> None:
    tensor = WEIGHT.clone()
    with writers(folder, 2) as ranks:
        for writer in ranks:
            writer.open(1, [live(tensor=tensor)])
            writer.pipeline.window.writer.finish_copies(writer.pipeline.window.groups[0].batch)
        tensor.numpy()[-1] += 1  # unseen by the version counter; a byte of the second share
        assert [writer.commit() for writer in ranks] == [True, False]


def test_an_update_of_any_part_tears_every_share(folder: Path) -> None:
    tensor = WEIGHT.clone()
    with writers(folder, 2) as ranks:
        for writer in ranks:
            writer.open(1, [live(tensor=tensor)])
        tensor[0] += 1
        assert [writer.commit() for writer in ranks] == [False, False]


def test_a_frozen_tensor_is_written_once_by_each_rank_and_then_skipped(folder: Path) -> None:
    lives = [live(holders=frozenset()), live("model/trained", WEIGHT.clone())]
    with writers(folder, 2) as ranks:
        for step in range(1, 7):  # three slots, twice
            lives[1].tensor.add_(1)
            for writer in ranks:
                writer.write(step, lives)
        skipped = [writer.pool.stats()["bytes_skipped"] for writer in ranks]
        assert skipped == [3 * 5 * PAGE, 3 * 6 * PAGE] or skipped == [3 * 6 * PAGE, 3 * 5 * PAGE]
    with Readers(folder, 2) as readers:
        assert readers.contents(1, 6) == whole(lives)


def test_a_region_grows_by_its_share_of_what_comes_later(folder: Path) -> None:
    first = [live()]
    more = [live(f"optim/0/w/{k}", torch.rand(300_000)) for k in range(3)]
    with writers(folder, 2) as ranks:
        for writer in ranks:
            writer.write(1, first)
            writer.write(2, [*first, *more])
        assert [len(w.region.info.segments) for w in ranks] == [2, 2]
    with Readers(folder, 2) as readers:
        assert readers.contents(0, 1) == whole(first)
        assert readers.contents(1, 2) == whole([*first, *more])


def test_a_rank_that_died_before_its_commit_leaves_no_whole_snapshot_of_that_step(
    folder: Path,
) -> None:
    lives = [live()]
    with writers(folder, 2) as ranks:
        for writer in ranks:
            writer.write(1, lives)
        ranks[0].write(2, lives)
        ranks[1].open(2, lives)  # and no commit
    with Readers(folder, 2) as readers:
        assert readers.assembled(0, 2).missing == (f"model/w: bytes [{5 * PAGE}, {11 * PAGE}) of"
                                                   f" {11 * PAGE}",)  # fmt: skip
        assert readers.found(1, 2) == []
        assert readers.contents(0, 1) == readers.contents(1, 1) == whole(lives)


def test_two_steps_and_two_maps_are_never_mixed(folder: Path) -> None:
    lives = [live()]
    with writers(folder, 2) as ranks:
        ranks[0].write(1, lives)
        ranks[1].write(2, lives)
        ranks[0].write(3, lives)
        ranks[1].write(3, [*lives, live("optim/0/w/only_here", torch.rand(4))])
    with Readers(folder, 2) as readers:
        for rank, step in [(0, 1), (1, 2), (0, 3), (1, 3)]:
            assert len(readers.found(rank, step)) == 1
            assert readers.assembled(rank, step).missing
        (first,), (second,) = readers.found(0, 3), readers.found(1, 3)
        with pytest.raises(CorruptSnapshotError, match="no one snapshot"):
            assemble([first, second])


def variants() -> dict[str, list[StateTensor]]:
    a, b = live("model/a", torch.rand(3000)), live("model/b", torch.rand(50, 60))
    state = StateTensor("optim/0/a/step", "optimizer", "a", torch.tensor(1.0), HELD)
    return {
        "the same": [a, b],
        "another name": [a, replace(b, name="model/c")],
        "another shape": [a, replace(b, tensor=torch.rand(60, 50))],
        "other strides": [a, replace(b, tensor=torch.rand(60, 50).t())],
        "another dtype": [a, replace(b, tensor=torch.rand(50, 60).int())],
        "one more": [a, b, live("model/c", torch.rand(3))],
        "an empty one more": [a, b, live("model/c", torch.rand(0))],
        "state of one rank only": [a, b, state],
        "tied": [a, b, live("model/c", a.tensor, alias_of="model/a")],
        "another role": [a, replace(b, role="optimizer")],
        "no optimizer holds it": [a, replace(b, holders=frozenset())],
        "not dense": [a, replace(b, tensor=torch.rand(60).expand(50, 60))],
    }


def test_ranks_whose_state_differs_in_anything_have_other_digests() -> None:
    digests = {name: sharing(0, 2)(lives).digest for name, lives in variants().items()}
    assert len(set(digests.values())) == len(digests)
    assert sharing(0, 3)(variants()["the same"]).digest != digests["the same"]


def test_what_one_rank_saw_torn_changes_nothing_that_ranks_must_agree_on() -> None:
    lives = variants()["the same"]
    torn = [replace(v, sync=True) for v in lives]
    shares = [sharing(rank, 2)(held) for rank, held in enumerate([lives, torn])]
    assert shares[0].digest == shares[1].digest
    assert shares[0].form == shares[1].form


def test_equal_states_have_equal_digests_on_every_rank_whatever_their_order() -> None:
    lives = variants()["state of one rank only"]
    shares = [sharing(rank, 4)(lives[:: 1 if rank % 2 else -1]) for rank in range(4)]
    assert len({share.digest for share in shares}) == 1
    assert len({share.form for share in shares}) == 1


def test_the_form_is_the_same_on_every_node_and_differs_with_the_state() -> None:
    first, second = sharing(0, 4), sharing(2, 4)
    first.topology = replace(first.topology, peers=(0, 1))
    second.topology = replace(second.topology, peers=(2, 3))
    lives = variants()["the same"]
    assert first(lives).digest != second(lives).digest
    assert first(lives).form == second(lives).form
    others = {sharing(0, 4)(each).form for each in variants().values()}
    assert len(others) == len(variants())


def test_one_rank_on_its_node_holds_all() -> None:
    alone = sharing(0, 1)([live(), *own_of(0)])
    assert alone.lives == (live(), *own_of(0))
    assert (alone.digest, alone.told) == (bytes(16), None)
