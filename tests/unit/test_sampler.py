"""`ResumableSampler`: each sample exactly once, wherever it stops and on however many ranks."""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import lightck

SMALL = settings(max_examples=150)


def made(sampler: lightck.ResumableSampler, batch: int, drop_last: bool = False) -> DataLoader[Any]:
    return DataLoader(range(sampler.length), batch_size=batch, sampler=sampler, drop_last=drop_last)  # type: ignore[arg-type]


def batches(loader: DataLoader[Any]) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


def resumed(
    old: lightck.ResumableSampler, rank: int, world: int, drop_last: bool
) -> lightck.ResumableSampler:
    """Return the sampler that a new process makes of a saved position."""
    new = lightck.ResumableSampler(
        range(old.length), seed=99, drop_last=drop_last, rank=rank, world=world
    )
    new.load_state_dict(pickle.loads(pickle.dumps(old.state_dict())))
    return new


@given(
    length=st.integers(0, 40),
    batch=st.integers(1, 9),
    world=st.integers(1, 5),
    epoch=st.integers(0, 3),
    drop_last=st.booleans(),
    drop_batch=st.booleans(),
    stop=st.integers(0, 45),
    seed=st.integers(0, 5),
)
@SMALL
def test_before_and_after_a_stop_are_what_comes_without_one(
    length: int, batch: int, world: int, epoch: int, drop_last: bool, drop_batch: bool, stop: int,
    seed: int,
) -> None:  # fmt: skip
    union = []
    for rank in range(world):
        options = {"seed": seed, "drop_last": drop_last}
        whole = lightck.ResumableSampler(range(length), rank=rank, world=world, **options)
        whole.set_epoch(epoch)
        expected = batches(made(whole, batch, drop_batch))
        following = batches(made(whole, batch, drop_batch))
        theirs = DistributedSampler(range(length), world, rank, **options)
        theirs.set_epoch(epoch)
        assert whole.indices(epoch) == list(theirs)
        assert len(whole) == len(theirs)

        first = lightck.ResumableSampler(range(length), rank=rank, world=world, **options)
        first.set_epoch(epoch)
        running = iter(made(first, batch, drop_batch))
        before = [next(running).tolist() for _ in range(min(stop, len(expected)))]
        second = resumed(first, rank, world, drop_last)
        assert second.epoch == epoch
        after = batches(made(second, batch, drop_batch))
        assert before + after == expected
        assert second.epoch == epoch + 1
        assert batches(made(second, batch, drop_batch)) == following
        union += [index for each in expected for index in each] if not drop_batch else []
    if not drop_batch and not drop_last:
        assert set(union) == set(range(length))
        assert len(union) - length < world or length == 0
    elif not drop_batch:
        assert len(union) == len(set(union)) == length // world * world


@given(
    length=st.integers(1, 40),
    batch=st.integers(1, 6),
    world=st.integers(1, 5),
    other=st.integers(1, 5),
    other_batch=st.integers(1, 6),
    stop=st.integers(0, 12),
    drop_last=st.booleans(),
)
@SMALL
def test_rest_of_an_epoch_is_shared_out_over_another_number_of_ranks(
    length: int, batch: int, world: int, other: int, other_batch: int, stop: int, drop_last: bool
) -> None:
    before: list[int] = []
    olds = []
    for rank in range(world):
        old = lightck.ResumableSampler(range(length), rank=rank, world=world, drop_last=drop_last)
        running = iter(made(old, batch))
        for _ in range(min(stop, -(-len(old) // batch))):
            before += next(running).tolist()
        olds.append(old)
    assert all(old.state_dict() == olds[0].state_dict() for old in olds)
    after: list[int] = []
    for rank in range(other):
        new = resumed(olds[rank % world], rank, other, drop_last)
        mine = [index for each in batches(made(new, other_batch)) for index in each]
        rest = max(0, length - olds[0].consumed)
        assert len(mine) == (rest // other if drop_last else -(-rest // other))
        after += mine
    come = sorted(before + after)
    if drop_last:
        assert len(come) == len(set(come))
        assert length - len(come) < max(world, other) + other
    else:
        assert set(come) == set(range(length))
        assert len(come) - length < world + other


def test_order_differs_between_epochs_and_seeds_and_not_without_shuffle() -> None:
    sampler = lightck.ResumableSampler(range(30))
    loader = made(sampler, 30)
    first, second = batches(loader), batches(loader)
    assert sorted(first[0]) == sorted(second[0]) == list(range(30))
    assert first != second
    assert batches(made(lightck.ResumableSampler(range(30), seed=5), 30)) != first
    plain = lightck.ResumableSampler(range(30), shuffle=False)
    assert batches(made(plain, 30)) == [list(range(30))]


def test_epoch_that_the_loop_leaves_is_over_when_the_loader_is_iterated_anew() -> None:
    sampler = lightck.ResumableSampler(range(20), shuffle=False)
    loader = made(sampler, 4)
    for i, _ in enumerate(loader):
        if i == 2:
            break
    assert (sampler.epoch, sampler.consumed) == (0, 12)
    iter(loader)
    assert (sampler.epoch, sampler.consumed) == (1, 0)


def test_set_epoch_goes_on_with_the_restored_epoch_and_begins_any_other() -> None:
    old = lightck.ResumableSampler(range(20))
    old.set_epoch(3)
    running = iter(made(old, 4))
    for _ in range(2):
        next(running)
    new = resumed(old, 0, 1, False)
    new.set_epoch(3)
    assert new.consumed == 8
    rest = batches(made(new, 4))
    assert sum(rest, []) == old.indices(3)[8:]
    new.set_epoch(3)
    assert sum(batches(made(new, 4)), []) == old.indices(3)
    again = resumed(old, 0, 1, False)
    again.set_epoch(5)
    assert sum(batches(made(again, 4)), []) == old.indices(5)


@pytest.mark.parametrize("iterates_first", [False, True])  # as Lightning does
def test_a_loop_that_counts_its_epochs_from_0_again_goes_on_with_the_restored_one(
    iterates_first: bool,
) -> None:
    old = lightck.ResumableSampler(range(20))
    old.set_epoch(3)
    running = iter(made(old, 4))
    for _ in range(2):
        next(running)
    new = resumed(old, 0, 1, False)
    loader = made(new, 4)
    for epoch, expected in [(0, old.indices(3)[8:]), (1, old.indices(4)), (2, old.indices(5))]:
        if iterates_first and epoch == 0:
            first = iter(loader)
            new.set_epoch(epoch)
            given = [batch.tolist() for batch in first]
        else:
            new.set_epoch(epoch)
            given = batches(loader)
        assert sum(given, []) == expected
    again = resumed(new, 0, 1, False)
    again.set_epoch(6)  # this loop counts on
    assert sum(batches(made(again, 4)), []) == old.indices(6)


def test_other_loaders_and_skipped_batches_leave_the_position_what_was_drawn() -> None:
    sampler = lightck.ResumableSampler(range(20))
    evaluation = DataLoader(range(50), batch_size=2, shuffle=True)  # type: ignore[arg-type]
    for i, _ in enumerate(made(sampler, 3)):
        assert sampler.consumed == 3 * (i + 1) if i < 6 else 20
        if i % 2:
            continue
        assert len(list(evaluation)) == 25
    assert (sampler.epoch, sampler.consumed) == (1, 0)


class Failing(TensorDataset):
    def __getitem__(self, i: int) -> Any:
        if i == 4:
            raise ValueError("sample 4")
        return super().__getitem__(i)


def test_batch_that_could_not_be_made_is_over() -> None:
    sampler = lightck.ResumableSampler(range(9), shuffle=False)
    loader = DataLoader(Failing(torch.arange(9)), batch_size=3, sampler=sampler)
    running = iter(loader)
    next(running)
    with pytest.raises(ValueError, match="sample 4"):
        next(running)
    assert sampler.consumed == 6


def test_iterating_draws_from_no_generator() -> None:
    loader = made(lightck.ResumableSampler(range(9)), 3)
    own = torch.Generator().manual_seed(3)
    other = DataLoader(
        range(9), batch_size=3, sampler=lightck.ResumableSampler(range(9)), generator=own
    )  # type: ignore[arg-type]
    stood = torch.get_rng_state(), own.get_state()
    list(loader), list(other)
    assert torch.equal(torch.get_rng_state(), stood[0])
    assert torch.equal(own.get_state(), stood[1])


def test_batch_sampler_and_single_samples_count_as_they_come() -> None:
    sampler = lightck.ResumableSampler(range(10))
    inside = BatchSampler(sampler, 4, drop_last=True)
    running = iter(DataLoader(range(10), batch_sampler=inside))  # type: ignore[arg-type]
    next(running)
    assert sampler.consumed == 4
    single = lightck.ResumableSampler(range(10))
    running = iter(DataLoader(range(10), batch_size=None, sampler=single))  # type: ignore[arg-type]
    next(running), next(running), next(running)
    assert single.consumed == 3


class Doubling(BatchSampler):
    def __iter__(self) -> Iterator[list[int]]:
        for each in super().__iter__():
            yield each + each


class Odd(Sampler[int]):
    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __iter__(self) -> Iterator[int]:
        return iter(self.inner)

    def __len__(self) -> int:
        return len(self.inner)


def test_what_cannot_be_counted_is_refused() -> None:
    sampler = lightck.ResumableSampler(range(10))
    with pytest.raises(lightck.ConfigError, match="DataLoader"):
        list(sampler)
    strange = [
        DataLoader(range(10), batch_sampler=Doubling(sampler, 2, False)),  # type: ignore[arg-type]
        DataLoader(range(10), batch_size=2, sampler=Odd(sampler)),  # type: ignore[arg-type]
    ]
    for loader in strange:
        with pytest.raises(lightck.ConfigError, match="DataLoader"):
            list(loader)
    overtaking = DataLoader(range(10), sampler=sampler, num_workers=1, in_order=False)  # type: ignore[arg-type]
    with pytest.raises(lightck.ConfigError, match="in_order"):
        iter(overtaking)


def test_iterator_that_the_sampler_has_left_behind_is_refused() -> None:
    loader = made(lightck.ResumableSampler(range(10)), 2)
    old = iter(loader)
    next(old)
    iter(loader)
    with pytest.raises(lightck.ConfigError, match="iterator of epoch 0 .* epoch 1"):
        next(old)


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))

    def __len__(self) -> int:
        return 3


class Counter:
    def __init__(self) -> None:
        self.at = 0


@pytest.mark.parametrize(
    ("data", "lacks"), [(Stream(), "indices"), (Counter(), "length"), (iter([]), "length")]
)
def test_data_without_indices_are_refused_with_the_way_out(data: Any, lacks: str) -> None:
    with pytest.raises(lightck.ConfigError, match=f"no {lacks}.*StatefulDataLoader"):
        lightck.ResumableSampler(data)


def test_position_in_other_data_or_another_order_is_refused() -> None:
    state = lightck.ResumableSampler(range(10)).state_dict()
    with pytest.raises(lightck.RestoreMismatchError, match="length: saved 10, live 11"):
        lightck.ResumableSampler(range(11)).load_state_dict(state)
    with pytest.raises(lightck.RestoreMismatchError, match="shuffle: saved True, live False"):
        lightck.ResumableSampler(range(10), shuffle=False).load_state_dict(state)
    with pytest.raises(lightck.RestoreMismatchError, match="found {'at': 3}"):
        lightck.ResumableSampler(range(10)).load_state_dict({"at": 3})


def test_rank_without_world_and_ranks_before_they_are_known_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(lightck.ConfigError, match="rank=1 and world=None"):
        lightck.ResumableSampler(range(10), rank=1)
    with pytest.raises(lightck.ConfigError, match="rank=2 is not one of world=2"):
        lightck.ResumableSampler(range(10), rank=2, world=2)
    monkeypatch.setenv("WORLD_SIZE", "4")
    sampler = lightck.ResumableSampler(range(10))
    for use in (lambda: len(sampler), lambda: sampler.rank, lambda: iter(made(sampler, 2))):
        with pytest.raises(lightck.ConfigError, match="WORLD_SIZE is 4.*init_process_group"):
            use()


def test_sampler_that_is_made_before_the_process_group_takes_its_share_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    sampler = lightck.ResumableSampler(range(10), shuffle=False)
    loader = made(sampler, 2)
    dist.init_process_group("fake", rank=1, world_size=3, store=FakeStore())
    try:
        assert batches(loader) == [[1, 4], [7, 0]]
    finally:
        dist.destroy_process_group()
    assert (sampler.rank, sampler.world, len(sampler)) == (1, 3, 4)


def test_sampler_that_was_used_alone_takes_its_share_of_a_process_group_that_comes_later() -> None:
    sampler = lightck.ResumableSampler(range(10), shuffle=False)
    assert len(sampler) == 10
    dist.init_process_group("fake", rank=2, world_size=5, store=FakeStore())
    try:
        assert batches(made(sampler, 2)) == [[2, 7]]
    finally:
        dist.destroy_process_group()


def test_set_epoch_lets_an_iterator_that_has_given_nothing_go_on() -> None:
    """Lightning makes the iterator first, then sets the epoch that it is of."""
    sampler = lightck.ResumableSampler(range(12))
    loader = made(sampler, 4)
    for epoch in range(3):
        running = iter(loader)
        sampler.set_epoch(epoch)
        assert sum((each.tolist() for each in running), []) == sampler.indices(epoch)
    middle = lightck.ResumableSampler(range(12))
    middle.load_state_dict(sampler.state_dict() | {"epoch": 2, "consumed": 4})
    running = iter(made(middle, 4))
    middle.set_epoch(2)
    assert sum((each.tolist() for each in running), []) == sampler.indices(2)[4:]
    running = iter(loader)
    next(running)
    sampler.set_epoch(3)
    with pytest.raises(lightck.ConfigError, match="iterator of epoch 3 .* epoch 3"):
        next(running)


def test_rank_and_world_are_those_of_the_process_group() -> None:
    dist.init_process_group("fake", rank=1, world_size=3, store=FakeStore())
    try:
        sampler = lightck.ResumableSampler(range(10))
    finally:
        dist.destroy_process_group()
    assert (sampler.rank, sampler.world, len(sampler)) == (1, 3, 4)


class Noise(TensorDataset):
    """Each sample is what the three global generators give, with the index."""

    def __getitem__(self, i: int) -> Any:
        assert type(i) is int
        return i, float(torch.rand(())), float(np.random.random()), random.random()


def noise(sampler: lightck.ResumableSampler, workers: int, **options: Any) -> list[Any]:
    data = Noise(torch.zeros(sampler.length))
    loader = DataLoader(data, batch_size=3, sampler=sampler, num_workers=workers, **options)
    return [[part.tolist() for part in batch] for batch in loader]


def test_what_workers_draw_is_a_function_of_the_position_not_of_their_number() -> None:
    whole = noise(lightck.ResumableSampler(range(14), seed=4), 1)
    assert len({value for batch in whole for part in batch[1:] for value in part}) == 42
    torch.manual_seed(11)
    assert noise(lightck.ResumableSampler(range(14), seed=4), 2) == whole
    new = lightck.ResumableSampler(range(14))
    state = lightck.ResumableSampler(range(14), seed=4).state_dict()
    new.load_state_dict(state | {"consumed": 6})
    assert noise(new, 2, prefetch_factor=1) == whole[2:]
    differing = noise(lightck.ResumableSampler(range(14), seed=5), 1)
    assert not {v for b in differing for v in b[1]} & {v for b in whole for v in b[1]}


def test_accelerates_dispatcher_over_several_processes_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("accelerate", reason="SKIPPED: accelerate is not installed")
    from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard

    sampler = lightck.ResumableSampler(range(10), rank=0, world=1)
    batch = BatchSampler(sampler, 2, drop_last=False)
    assert len(list(DataLoaderShard(range(10), batch_sampler=batch))) == 5
    loader = DataLoaderDispatcher(range(10), batch_sampler=batch)
    assert len(list(loader)) == 5
    monkeypatch.setattr(loader.state, "num_processes", 2)
    with pytest.raises(lightck.ConfigError, match="cannot be followed.*dispatch_batches=False"):
        next(iter(loader))


def test_what_accelerate_shards_or_skips_is_refused_with_the_way_out() -> None:
    accelerate = pytest.importorskip("accelerate", reason="SKIPPED: accelerate is not installed")
    from accelerate.data_loader import BatchSamplerShard, DataLoaderShard

    sampler = lightck.ResumableSampler(range(10), rank=0, world=2)
    batch = BatchSampler(sampler, 2, drop_last=False)
    sharded = DataLoaderShard(range(10), batch_sampler=BatchSamplerShard(batch, 2, 0))
    with pytest.raises(lightck.ConfigError, match="with several processes the loader is not given"):
        next(iter(sharded))
    skipped = accelerate.skip_first_batches(DataLoaderShard(range(10), batch_sampler=batch), 1)
    with pytest.raises(lightck.ConfigError, match="it needs no skip_first_batches"):
        next(iter(skipped))


def test_an_iterator_that_nothing_was_drawn_from_is_no_epoch() -> None:
    sampler = lightck.ResumableSampler(range(6), seed=3)
    loader = made(sampler, 2)
    iter(loader)
    iter(loader)
    assert sampler.epoch == 0
    again = resumed(sampler, 0, 1, False)
    again.load_state_dict({**sampler.state_dict(), "consumed": 4})
    loader = made(again, 2)
    iter(loader)
    assert batches(loader) == [sampler.indices(0, 4)]


def test_an_iterator_that_nothing_was_drawn_from_gives_the_epoch_that_is_set() -> None:
    """Lightning makes it before it says which epoch is the first, in a second fit, too."""
    sampler = lightck.ResumableSampler(range(6), seed=3)
    loader = made(sampler, 2)
    batches(loader)
    iterator = iter(loader)
    assert sampler.epoch == 1
    sampler.set_epoch(0)
    assert [i for batch in iterator for i in batch.tolist()] == sampler.indices(0)
    assert sampler.epoch == 1


def test_workers_that_have_drawn_of_an_epoch_give_no_other() -> None:
    sampler = lightck.ResumableSampler(range(6), seed=3)
    loader: Any = DataLoader(range(6), 2, sampler=sampler, num_workers=1)  # type: ignore[arg-type]
    for _ in loader:
        pass
    iterator = iter(loader)
    sampler.set_epoch(0)
    with pytest.raises(lightck.ConfigError, match=r"call sampler.set_epoch\(0\) before"):
        next(iterator)
