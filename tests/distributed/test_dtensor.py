"""DTensors: each rank's part is described, watched, and made into a DTensor again."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from lightck.errors import StateError
from lightck.pipeline.copy_plan import CopyPlan, versions_of
from lightck.region import allocator
from lightck.region.layout import Entry
from lightck.state import tensor_layout, tensor_support
from lightck.state.inventory import Inventory, StateTensor
from support.distributed.ranks import Me, started
from support.distributed.sharded import held, mesh_of

SHAPE = (7, 5)
PLACED: dict[str, tuple[tuple[int, ...], Any, tuple[int, ...]]] = {
    "rows that divide": ((2,), [Shard(0)], (4, 3)),
    "rows that do not": ((3,), [Shard(0)], SHAPE),
    "columns that do not": ((4,), [Shard(1)], SHAPE),
    "fewer rows than ranks": ((4,), [Shard(0)], (2, 3)),
    "rows, and columns of these": ((2, 2), [Shard(0), Shard(1)], SHAPE),
    "rows twice": ((2, 2), [Shard(0), Shard(0)], SHAPE),
    "rows, replicated": ((2, 2), [Replicate(), Shard(0)], SHAPE),
    "replicated": ((2,), [Replicate()], SHAPE),
    "no dimensions": ((2,), [Replicate()], ()),
}


class Medium:
    """Stands for a region that has room for anything."""

    def fit(self, entries: Sequence[Entry], manifest_bytes: int) -> allocator.SlotPlan | None:
        """Plan as `Region.fit` does."""
        return allocator.plan(entries, allocator.UNBOUNDED, manifest_bytes, 4096)


def arrangement() -> CopyPlan:
    medium: Any = Medium()
    return CopyPlan(medium)


def numbers(*shape: int) -> torch.Tensor:
    return torch.arange(1.0, 1 + math.prod(shape)).reshape(shape)


def of(tensor: torch.Tensor) -> StateTensor:
    return StateTensor("model/x", "parameter", "", tensor)


def on_ranks(world: int, code: Callable[[Me], Any]) -> list[Any]:
    with started(world, code) as job:
        return job.results()


@pytest.mark.parametrize("case", PLACED)
def test_the_parts_of_all_ranks_lie_where_they_say_in_the_whole(case: str) -> None:
    sizes, placements, shape = PLACED[case]

    def part(me: Me) -> tuple[Entry, torch.Tensor]:
        whole = distribute_tensor(numbers(*shape), mesh_of(*sizes), placements)
        return tensor_layout.describe(of(whole)), held(whole)

    found = torch.zeros(shape)
    for entry, values in on_ranks(math.prod(sizes), part):
        assert entry.shard is not None and entry.shard.shape == shape
        assert entry.shape == tuple(values.shape) and entry.length == values.nbytes
        pairs = zip(entry.shard.offset, entry.shape, strict=True)
        found[tuple(slice(at, at + size) for at, size in pairs)] = values
    assert torch.equal(found, numbers(*shape))


def test_words_name_mesh_place_and_placements() -> None:
    def words(me: Me) -> str:
        whole = distribute_tensor(numbers(4, 4), mesh_of(2, 2), [Replicate(), Shard(1)])
        return tensor_support.shard_of(whole).placements  # type: ignore[union-attr]

    assert on_ranks(4, words) == [
        f"mesh dp=2 x tp=2 at ({dp}, {tp}): Replicate(), Shard(1)" for dp in (0, 1) for tp in (0, 1)
    ]


def test_a_part_becomes_the_same_dtensor_again_over_its_own_memory() -> None:
    def again(me: Me) -> None:
        mesh = mesh_of(2, 2)
        for placements in ([Shard(0), Replicate()], [Shard(1), Shard(0)], [Shard(0), Shard(0)]):
            straight = distribute_tensor(numbers(*SHAPE), mesh, placements)
            for whole in (straight, straight.t()):
                entry = tensor_layout.describe(of(whole))
                memory = held(whole).clone(memory_format=torch.preserve_format)
                made = tensor_support.whole(entry, memory, tensor_support.meshes([whole]))
                assert isinstance(made, DTensor)
                assert made._spec == whole._spec and made.stride() == whole.stride()
                assert held(made).data_ptr() == memory.data_ptr()
                assert torch.equal(made.full_tensor(), whole.full_tensor())

    on_ranks(4, again)


def test_a_sum_over_ranks_is_refused_by_name() -> None:
    def refused(me: Me) -> str:
        model = nn.Module()
        part = DTensor.from_local(torch.ones(3), mesh_of(2), [Partial()])
        model.register_buffer("total", part)
        with pytest.raises(StateError, match="model/total is a DTensor placed Partial") as caught:
            Inventory(model).collect()
        return str(caught.value)

    assert all("no rank holds its values" in text for text in on_ranks(2, refused))


def test_a_part_of_another_size_than_its_placement_gives_is_refused() -> None:
    def refused(me: Me) -> None:
        rows = 3 - 2 * me.rank  # 3 and 1 of 4: not what torch would give
        part = DTensor.from_local(
            torch.ones(rows, 2), mesh_of(2), [Shard(0)], shape=torch.Size((4, 2)), stride=(2, 1)
        )
        with pytest.raises(StateError, match=rf"local tensor has shape \[{rows}, 2\], where Shard"):
            tensor_layout.describe(of(part))

    on_ranks(2, refused)


def test_a_rank_outside_of_the_mesh_is_told_so() -> None:
    def refused(me: Me) -> None:
        from torch.distributed.device_mesh import DeviceMesh

        whole = distribute_tensor(numbers(4), DeviceMesh("cpu", [0]), [Shard(0)])
        if me.rank:
            assert "which this rank is not part of" in str(tensor_support.refusal(whole))

    on_ranks(2, refused)


# ---- A write between the forward and the update ------------------------------------------------


def through_the_dtensor(tensor: Any) -> None:
    tensor.add_(1)


def through_its_part(tensor: Any) -> None:
    tensor.to_local().add_(1)


def through_the_very_part(tensor: Any) -> None:
    tensor._local_tensor.mul_(2)


def to_another_part(tensor: Any) -> None:
    tensor._local_tensor = tensor._local_tensor.clone()


@pytest.mark.parametrize(
    "write", [through_the_dtensor, through_its_part, through_the_very_part, to_another_part]
)
def test_a_write_is_seen_whichever_way_it_goes(write: Callable[[Any], None]) -> None:
    def seen(me: Me) -> list[list[int]]:
        mesh = mesh_of(1)
        tensors = [torch.ones(3), distribute_tensor(torch.ones(4, 3), mesh, [Shard(0)])]
        arranged = arrangement()
        arranged.update(
            [StateTensor(f"model/{i}", "parameter", "", t) for i, t in enumerate(tensors)], 0
        )
        (part,) = arranged.groups
        taken = arranged.sources(part)
        before = taken.changed()
        write(tensors[1])
        return [before, [part.order[i] for i in taken.changed()]]

    assert on_ranks(1, seen) == [[[], [1]]]


def test_a_tensor_read_with_dtensors_has_the_version_that_it_has_alone() -> None:
    """AdamW's counts of steps, in DRAM, are read without the DTensors if these are on a GPU."""

    def same(me: Me) -> None:
        count, whole = torch.zeros(()), distribute_tensor(numbers(4, 2), mesh_of(1), [Shard(0)])
        count += 1
        whole.mul_(2)
        together = versions_of([count, whole])
        assert together == [*versions_of([count]), *versions_of([whole])]
        assert min(together) > 0

    on_ranks(1, same)


def test_another_mesh_or_placement_is_arranged_anew_though_the_part_looks_the_same() -> None:
    def anew(me: Me) -> None:
        mesh, arranged = mesh_of(1), arrangement()
        for placement in (Shard(0), Shard(1), Replicate()):
            live = of(distribute_tensor(numbers(3, 3), mesh, [placement]))
            arranged.update([live], 0)
            assert arranged.entries == (tensor_layout.describe(live),)
        plain = of(numbers(3, 3))
        arranged.update([plain], 0)
        assert arranged.entries == (tensor_layout.describe(plain),)

    on_ranks(1, anew)


def test_without_dtensors_no_tensor_is_looked_at() -> None:
    tensors = [torch.ones(3), nn.Parameter(torch.ones(3))]
    assert tensor_support.locals_of(tensors) is tensors


# ---- What does not fit -------------------------------------------------------------------------


def test_each_way_to_differ_is_told_with_both_sides() -> None:
    def told(me: Me) -> list[str]:
        mesh = mesh_of(2)
        rows = distribute_tensor(numbers(4, 4), mesh, [Shard(0)])
        others = [
            distribute_tensor(numbers(4, 4), mesh, [Shard(1)]),
            distribute_tensor(numbers(6, 4), mesh, [Shard(0)]),
            numbers(2, 4),
            distribute_tensor(numbers(4, 4), mesh_of(2, 1), [Shard(0), Shard(0)]),
        ]
        entry = tensor_layout.describe(of(rows))
        assert tensor_support.difference(entry, rows) == ""
        assert tensor_support.difference(tensor_layout.describe(of(others[2])), others[2]) == ""
        return [tensor_support.difference(entry, other) for other in others]

    for rank, (placed, shape, plain, mesh) in enumerate(on_ranks(2, told)):
        here = f"saved mesh dp=2 at ({rank}): Shard(0)"
        assert f"{here}; live mesh dp=2 at ({rank}): Shard(1)" in placed
        saved, live = f"float32[2, 4] of [4, 4] at [{2 * rank}, 0]", "float32[3, 4] of [6, 4]"
        assert shape == f"saved {saved}, live {live} at [{3 * rank}, 0]"
        assert f"{here}; live whole, no DTensor" in plain
        assert f"{here}; live mesh dp=2 x tp=1 at ({rank}, 0): Shard(0), Shard(0)" in mesh
        assert "not supported yet" in placed and "not supported yet" in mesh


def test_a_mesh_whose_dimensions_have_other_names_is_the_same() -> None:
    def same(me: Me) -> None:
        renamed = init_device_mesh("cpu", (2,), mesh_dim_names=("shards",))
        one, other = (distribute_tensor(numbers(4), m, [Shard(0)]) for m in (mesh_of(2), renamed))
        entry = tensor_layout.describe(of(one))
        assert tensor_support.difference(entry, other) == ""
        known = tensor_support.meshes([other])
        assert tensor_support.homeless([entry], known) == {}
        assert tensor_support.whole(entry, held(one), known)._spec == other._spec  # type: ignore[attr-defined]

    on_ranks(2, same)


def test_a_part_that_no_live_mesh_can_take_is_named() -> None:
    def named(me: Me) -> dict[str, str]:
        entry = tensor_layout.describe(of(distribute_tensor(numbers(4), mesh_of(2), [Shard(0)])))
        assert tensor_support.homeless([entry], {"mesh 2 at (%d)" % me.rank: None}) == {}
        return tensor_support.homeless([entry], {})

    for rank, found in enumerate(on_ranks(2, named)):
        (why,) = found.values()
        assert f"saved mesh dp=2 at ({rank}): Shard(0); live no DTensor" in why
