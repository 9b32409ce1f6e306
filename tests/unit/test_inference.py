"""lightck infers what a rank that was killed inside its update would have had, or nothing."""

from __future__ import annotations

import math
import random
from collections import OrderedDict
from typing import Any

import pytest
import torch

from lightck.failure.takeover.inference import CannotInfer, RankLocalState, infer_step_end
from lightck.state import boundary_blob
from lightck.state.boundary_codec import TAG
from lightck.state.inventory import StateTensor


def own(first: Any, second: Any = None, **tensors: torch.Tensor) -> RankLocalState:
    lives = tuple(
        StateTensor(name, "buffer", "", tensor, sync=True) for name, tensor in tensors.items()
    )
    return RankLocalState(boundary_blob.closed(first), boundary_blob.closed(second), lives)


def told(dead: Any, before: Any, after: Any) -> Any:
    """Tell what an update leaves, of plain trees."""
    found = infer_step_end(own(dead), own(before), own(after))
    return boundary_blob.opened(found.at_step, context="test")


def test_what_the_update_leaves_alone_stays_the_dead_rank_s_own() -> None:
    dead = {"position": 7, "rng": torch.arange(4), "name": "dead"}
    same = {"position": 3, "rng": torch.arange(5), "name": "living"}
    found = told({**dead, "count": 1}, {**same, "count": 1}, {**same, "count": 2})
    assert torch.equal(found.pop("rng"), dead.pop("rng"))
    assert found == {**dead, "count": 2}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (1, 2),
        (0.0, -0.0),
        (math.nan, 1.0),
        (1, True),
        ([1, 2], [1, 3]),
        ([1], [1, 2]),
        ((1, 2), (1, 3)),
        ({"a": 1}, {"a": 1, "b": 2}),
        ({"a": 1, "b": 2}, {"b": 2}),
        ({TAG: "deque", "items": [1], "maxlen": 3}, {TAG: "deque", "items": [1, 2], "maxlen": 3}),
        (None, OrderedDict(a=1)),
    ],
    ids=repr,
)
def test_what_it_changes_and_was_alike_before_is_alike_behind_it(before: Any, after: Any) -> None:
    found = told({"own": 1, "at": before}, {"own": 2, "at": before}, {"own": 2, "at": after})
    assert found["own"] == 1 and repr(found["at"]) == repr(after)
    assert type(found["at"]) is type(after)


@pytest.mark.parametrize(
    ("dead", "before", "after"),
    [
        (1, 2, 3),
        (0.0, -0.0, 1.0),
        (True, 1, 2),
        (torch.zeros(2), torch.ones(2), torch.arange(2)),
        ([1, 2], [1], [1, 3]),
        ({TAG: "set", "items": [1]}, {TAG: "set", "items": [2]}, {TAG: "set", "items": [2, 3]}),
        (
            {TAG: "set", "items": [1, 5]},
            {TAG: "set", "items": [2, 5]},
            {TAG: "set", "items": [2, 6]},
        ),
        ({}, {"x": 1}, {"x": 2}),
        ({"x": 1}, {}, {"x": 2}),
    ],
    ids=repr,
)
def test_what_it_changes_and_was_another_before_is_refused_by_name(
    dead: Any, before: Any, after: Any
) -> None:
    with pytest.raises(CannotInfer, match=r"the update changes at_step/options/0/lr"):
        told(*({"options": [{"lr": value}]} for value in (dead, before, after)))


def test_what_only_the_dead_rank_has_stays_and_what_the_update_makes_or_drops_is_followed() -> None:
    found = told({"mine": 1, "gone": 5}, {"yours": 2, "gone": 5}, {"yours": 2, "new": 3})
    assert found == {"mine": 1, "new": 3}


def test_tensors_follow_the_same_rule_and_are_named() -> None:
    seen = [torch.full((2,), float(i)) for i in range(6)]
    found = infer_step_end(
        own({}, a=seen[0], b=seen[1]), own({}, a=seen[0], b=seen[2]), own({}, a=seen[3], b=seen[2])
    )
    assert [(live.name, live.tensor.tolist()) for live in found.lives] == [
        ("a", [3.0, 3.0]),
        ("b", [1.0, 1.0]),
    ]
    with pytest.raises(CannotInfer, match=r"changes model/mean,"):
        infer_step_end(*(own({}, **{"model/mean": tensor}) for tensor in seen[:3]))


@pytest.mark.parametrize(
    "other",
    [
        torch.zeros(4, dtype=torch.int32),
        torch.zeros(2, 2),
        torch.zeros(2, 2).t()[:1],
        torch.tensor([0.0, 0.0, 0.0, -0.0]),
    ],
    ids=["dtype", "shape", "strides", "negative zero"],
)
def test_a_tensor_of_another_form_or_bit_is_another(other: torch.Tensor) -> None:
    with pytest.raises(CannotInfer):
        infer_step_end(own({}, a=torch.zeros(4)), own({}, a=other), own({}, a=torch.ones(4)))


def test_the_values_of_the_next_forward_are_told_as_well() -> None:
    found = infer_step_end(
        own({}, {"step": 4, "k": 1}), own({}, {"step": 4, "k": 1}), own({}, {"k": 2})
    )
    assert boundary_blob.opened(found.at_forward, context="test") == {"k": 2}


def test_it_agrees_with_any_update_that_is_the_same_on_both_ranks() -> None:
    """Trees of both ranks, alike in part, changed in part: the dead rank's own end is told."""
    for seed in range(300):
        dice = random.Random(seed)
        alike = {k: dice.randrange(9) for k in "abcdef"}
        ends: dict[str, Any] = {k: dice.randrange(9) for k in alike if dice.random() < 0.5}
        dead, before = ({"rank": rank, "rng": [rank, 0.5], **alike} for rank in (0, 1))
        for gone in [k for k in alike if k not in ends and dice.random() < 0.3]:
            ends[gone] = None
        after, expected = (_changed(tree, ends) for tree in (before, dead))
        assert told(dead, before, after) == expected, f"seed {seed}"


def _changed(tree: dict[str, Any], ends: dict[str, Any]) -> dict[str, Any]:
    changed = {**tree, **ends, "made": len(ends)}
    return {k: v for k, v in changed.items() if v is not None}
