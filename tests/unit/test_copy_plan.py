"""The plan compares tensors between snapshots: any that moved is planned, held, copied."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from lightck.device.lookup import holder
from lightck.pipeline.copy_plan import _RUN as RUN
from lightck.pipeline.copy_plan import CopyPlan, CopySources, PlannedGroup
from lightck.region import allocator
from lightck.region.layout import Entry
from lightck.state import tensor_layout
from lightck.state.inventory import StateTensor

PAGE = 4096


class Medium:
    """Stands for a region that has room for anything; counts how often it was planned."""

    def __init__(self) -> None:
        self.plans = 0

    def fit(self, entries: Sequence[Entry], manifest_bytes: int) -> allocator.SlotPlan | None:
        """Plan as `Region.fit` does."""
        self.plans += 1
        return allocator.plan(entries, allocator.UNBOUNDED, manifest_bytes, PAGE)


def arrangement() -> tuple[CopyPlan, Medium]:
    medium = Medium()
    return CopyPlan(cast("Any", medium)), medium


def lives_of(tensors: Sequence[torch.Tensor], **fields: Any) -> list[StateTensor]:
    return [StateTensor(f"model/{i}", "parameter", "", t, **fields) for i, t in enumerate(tensors)]


def parameter(tensor: torch.Tensor) -> torch.Tensor:
    return torch.nn.Parameter(tensor, requires_grad=False)


def entries_now(lives: Sequence[StateTensor]) -> tuple[Entry, ...]:
    return tuple(tensor_layout.describe(live) for live in lives)


def elsewhere(device: str) -> torch.Tensor:
    """A tensor that says it is on a device this machine need not have."""
    with FakeTensorMode():
        return torch.empty(3, 3, device=device)


ONE = torch.tensor(2 + 3j)
BECOMES: dict[str, tuple[torch.Tensor, torch.Tensor]] = {
    "other strides": (torch.rand(3, 3), torch.rand(3, 3).t()),
    "another shape with these strides": (torch.rand(4, 3), torch.rand(5, 3)),
    "another dtype": (torch.rand(3, 3), torch.ones(3, 3, dtype=torch.int32)),
    "a view with gaps": (torch.rand(3, 3), torch.rand(3, 6)[:, :3]),
    "conjugated lazily": (torch.rand(3) + 1j, (torch.rand(3) + 1j).conj()),
    "negated lazily": (ONE.imag, ONE.conj().imag),
}


@pytest.mark.parametrize("case", BECOMES)
def test_a_tensor_whose_data_takes_another_form_is_described_anew(case: str) -> None:
    first, then = BECOMES[case]
    (live,) = lives_of([parameter(first.clone())])
    arranged, _ = arrangement()
    for _ in range(2):  # torch's own check is made where the form was the same once
        arranged.update([live], 0)
    live.tensor.data = then
    arranged.update([live], 0)
    assert arranged.entries == entries_now([live])
    assert [part.is_private for part in arranged.groups] == [tensor_layout.must_own(live)]


@pytest.mark.parametrize("where", ["cpu to meta", "meta to cpu", "cuda to xpu"])
def test_a_tensor_that_is_on_another_device_now_is_described_anew(where: str) -> None:
    of = {"cpu": torch.rand, "meta": lambda *shape: torch.rand(*shape, device="meta")}
    first, _, then = where.partition(" to ")
    arranged, _ = arrangement()
    for device in (first, then):
        lives = lives_of([of[device](3, 3) if device in of else elsewhere(device)])
        arranged.update(lives, 0)
        assert [entry.device for entry in arranged.entries] == [device]
        owned = tensor_layout.must_own(lives[0], holder(lives[0].local))
        assert [part.is_private for part in arranged.groups] == [owned]


def test_a_tensor_that_has_no_version_counter_any_more_is_copied_at_the_forward() -> None:
    arranged, _ = arrangement()
    for inference, owned in ((False, False), (True, True), (False, False)):
        with torch.inference_mode(inference):
            tensor = torch.ones(4)
        arranged.update(lives_of([tensor]), 0)
        assert [part.is_private for part in arranged.groups] == [owned]


@pytest.mark.parametrize("at", [0, RUN - 1, RUN, RUN + 88])
def test_one_of_many_tensors_is_enough_wherever_it_is(at: int) -> None:
    lives = lives_of([parameter(torch.zeros(3, 3)) for _ in range(RUN + 89)])
    arranged, _ = arrangement()
    arranged.update(lives, 0)
    lives[at].tensor.data = torch.zeros(5, 3)
    arranged.update(lives, 0)
    assert arranged.entries == entries_now(lives)


def test_tensors_that_moved_but_kept_their_form_keep_plan_and_parts() -> None:
    lives = lives_of([parameter(torch.zeros(3, 3)), parameter(torch.ones(2) + 1j)])
    arranged, medium = arrangement()
    plan, parts = arranged.update(lives, 0), arranged.groups
    for live in lives:
        live.tensor.data = live.tensor.data.clone()
    assert arranged.update(lives, 0) is plan
    assert arranged.groups is parts
    assert medium.plans == 1


@pytest.mark.parametrize("field", ["holders", "sync", "alias_of", "role", "name"])
def test_other_knowledge_of_a_tensor_is_arranged_anew(field: str) -> None:
    one, two = torch.ones(3), torch.ones(3)
    other = {
        "holders": frozenset((1,)), "sync": True, "alias_of": "model/0", "role": "buffer",
        "name": "model/z",
    }[field]  # fmt: skip
    before = lives_of([one, two])
    fields = {"name": "model/1", "role": "parameter", "layer": "", "tensor": two, field: other}
    after = [before[0], StateTensor(**cast("Any", fields))]
    arranged, _ = arrangement()
    arranged.update(before, 0)
    arranged.update(after, 0)
    fresh, _ = arrangement()
    fresh.update(after, 0)
    assert arranged.entries == fresh.entries == entries_now(after)

    def shape(part: PlannedGroup) -> tuple[Any, ...]:
        return part.holders, part.is_private, part.order, part.free.tolist()

    assert list(map(shape, arranged.groups)) == list(map(shape, fresh.groups))


# ---- What may be skipped as unchanged ----------------------------------------------------------


def part_of(lives: Sequence[StateTensor]) -> tuple[PlannedGroup, CopyPlan]:
    arranged, _ = arrangement()
    arranged.update(lives, 0)
    (part,) = arranged.groups
    return part, arranged


def skippable(part: PlannedGroup, arranged: CopyPlan) -> list[bool]:
    found: list[bool] = part.unmoved(arranged.sources(part).versions).tolist()
    return found


@pytest.mark.parametrize("sync", [False, True])
def test_only_what_kept_its_version_since_the_last_snapshot_may_be_skipped(sync: bool) -> None:
    lives = lives_of([torch.zeros(3) for _ in range(3)], sync=sync)
    part, arranged = part_of(lives)
    assert skippable(part, arranged) == [False, False, False]  # no snapshot to be equal to
    assert skippable(part, arranged) == [True, True, True]
    lives[1].tensor.add_(1)
    assert skippable(part, arranged) == [True, False, True]
    lives[2].tensor.add_(1)
    assert skippable(part, arranged) == [True, True, False]  # of the last snapshot, no earlier one
    assert skippable(part, arranged) == [True, True, True]


def test_what_an_optimizer_holds_is_never_skipped() -> None:
    part, arranged = part_of(lives_of([torch.zeros(3)], holders=frozenset((0,))))
    for _ in range(3):
        assert skippable(part, arranged) == [False]


def test_of_private_copies_those_of_tensors_without_optimizer_may_be_skipped() -> None:
    held = StateTensor("model/a", "parameter", "", torch.zeros(3), frozenset((0,)), sync=True)
    free = StateTensor("model/b", "buffer", "", torch.zeros(3), sync=True)
    part, arranged = part_of([held, free])
    skippable(part, arranged)
    assert skippable(part, arranged) == [False, True]


# ---- What the copies start from ----------------------------------------------------------------


def of_numpy(size: int) -> tuple[torch.Tensor, weakref.ref[Any]]:
    """A tensor, and whether its memory still lives."""
    memory = np.zeros(size, np.float32)
    return torch.from_numpy(memory), weakref.ref(memory)


def test_memory_that_a_tensor_let_go_of_lives_while_copies_may_read_it() -> None:
    tensor = parameter(torch.zeros(4))
    part, arranged = part_of(lives_of([tensor]))
    seen = []
    for _ in range(3):  # each snapshot finds the tensor at another place than the last one
        tensor.data, alive = of_numpy(4)
        taken = arranged.sources(part)
        assert taken.pointers == [tensor.data_ptr()]
        tensor.data = torch.zeros(4)
        assert alive() is not None, "the memory went although the snapshot holds its sources"
        seen.append((taken, alive))
    del taken
    arranged.sources(part)
    while seen:
        alive = seen.pop()[1]
        assert alive() is None, "a snapshot that is done holds memory"


def test_memory_that_did_not_move_is_held_from_one_snapshot_to_the_next() -> None:
    tensor = parameter(torch.zeros(4))
    tensor.data, alive = of_numpy(4)
    part, arranged = part_of(lives_of([tensor]))
    taken = arranged.sources(part)
    taken = arranged.sources(part)
    tensor.data = torch.zeros(4)
    assert taken.pointers != [tensor.data_ptr()]
    assert alive() is not None


def test_a_private_copy_holds_what_the_tensor_held() -> None:
    tensor = torch.arange(8.0)[::2]  # which nobody can copy as it lies
    part, arranged = part_of(lives_of([tensor], sync=True))
    taken = arranged.sources(part)
    tensor.zero_()
    assert taken.pointers == [copy.data_ptr() for copy in taken.tensors] != [tensor.data_ptr()]
    assert torch.equal(taken.tensors[0], torch.arange(0.0, 8.0, 2.0))


def test_what_lies_as_it_is_stored_is_copied_at_once_from_where_it_is() -> None:
    gaps, dense = torch.arange(8.0)[::2], torch.arange(4.0)
    arranged, _ = arrangement()
    arranged.update(lives_of([gaps, dense], sync=True), 0)
    kinds = {part.order: (part.is_private, part.copied_at_open) for part in arranged.groups}
    assert kinds == {(0,): (True, False), (1,): (True, True)}
    (part,) = (part for part in arranged.groups if part.copied_at_open)
    assert arranged.sources(part).pointers == [dense.data_ptr()]


def test_nothing_is_copied_at_once_where_training_must_not_wait_for_the_medium() -> None:
    arranged, _ = arrangement()
    arranged.may_block_at_boundary = False
    arranged.update(lives_of([torch.arange(4.0)], sync=True), 0)
    assert [(part.is_private, part.copied_at_open) for part in arranged.groups] == [(True, False)]


def test_of_a_tensor_that_others_hold_too_only_the_own_span_is_copied_at_once() -> None:
    tensor = torch.arange(8.0)
    part, _ = part_of(lives_of([tensor], sync=True, span=(8, 24)))
    assert part.copied_at_open and part.begins.tolist() == [8] and part.total_bytes == 16


# ---- What is found torn ------------------------------------------------------------------------


def write(tensor: torch.Tensor) -> None:
    tensor.add_(1)


def move(tensor: torch.Tensor) -> None:
    tensor.data = tensor.data.clone()


def open_window(count: int) -> tuple[list[torch.Tensor], CopySources]:
    tensors = [parameter(torch.zeros(3)) for _ in range(count)]
    part, plan = part_of(lives_of(tensors))
    return tensors, plan.sources(part)


@pytest.mark.parametrize("touch", [write, move])
@pytest.mark.parametrize("at", [0, RUN - 1, RUN, RUN + 88])
def test_a_tensor_that_was_touched_in_the_window_is_found_wherever_it_is(
    touch: Callable[[torch.Tensor], None], at: int
) -> None:
    tensors, taken = open_window(RUN + 89)
    assert taken.changed() == []
    touch(tensors[at])
    assert taken.changed() == [at]


def test_a_write_and_a_move_are_found_together_and_nothing_else_is() -> None:
    tensors, taken = open_window(5)
    write(tensors[1])
    move(tensors[3])
    assert taken.changed() == [1, 3]


def test_versions_of_tensors_without_counter_do_not_hide_those_of_others() -> None:
    with torch.inference_mode():
        uncounted = torch.zeros(3)
    lives = lives_of([torch.zeros(3), uncounted], sync=True)
    part, arranged = part_of(lives)
    skippable(part, arranged)
    lives[0].tensor.add_(1)
    assert skippable(part, arranged) == [False, True]
