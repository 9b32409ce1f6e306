"""State dicts taken apart and joined again, and what a snapshot that lies is told."""

from __future__ import annotations

import collections
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightck.errors import CorruptSnapshotError, StateError
from lightck.state import boundary_blob, boundary_codec, state_tree

keys = st.one_of(st.text(max_size=3), st.integers(-3, 3), st.sampled_from(["/", "%", "1%2", "1"]))
_shared = [torch.arange(6), torch.zeros(2, 3), torch.ones(2, 3).t(), torch.tensor(1.5)]
leaves = st.one_of(
    st.sampled_from(_shared),
    st.integers(0, 5).map(lambda n: torch.full((n,), n)),
    *(st.none(), st.integers(), st.text(max_size=3), st.binary(max_size=3)),
)
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(keys, inner, max_size=4),
        st.dictionaries(keys, inner, max_size=4).map(collections.OrderedDict),
    ),
    max_leaves=20,
)


def same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def through_bytes(tree: state_tree.StateTree) -> dict[str, Any]:
    kept = {live.name: live.tensor.clone() for live in tree.lives}
    opened = boundary_blob.opened(boundary_blob.closed(tree.extras), context="")
    found = boundary_codec.rebuild(opened, kept.__getitem__)
    assert isinstance(found, dict)
    return found


@given(trees)
def test_every_tree_comes_back_and_no_two_tensors_have_one_name(tree: Any) -> None:
    taken = state_tree.taken(tree)
    names = [live.name for live in taken.lives]
    assert len(names) == len(set(names)) and all(n.startswith("extras/state") for n in names)
    assert same(state_tree.joined(through_bytes(taken)), tree)


def test_tensors_of_one_memory_and_form_are_kept_once() -> None:
    one = torch.arange(6)
    taken = state_tree.taken([one, one.view(6), one.view(2, 3), one[1:], one.detach(), one.int()])
    assert len(taken.lives) == 4


def test_versions_of_modules_come_back_in_their_ordered_dicts() -> None:
    net = torch.nn.BatchNorm1d(3)
    state = [{"a": net.state_dict()}, collections.OrderedDict(), (net.state_dict(),)]
    found = state_tree.joined(through_bytes(state_tree.taken(state)))
    assert found[0]["a"]._metadata == found[2][0]._metadata == net.state_dict()._metadata
    assert not hasattr(found[1], "_metadata")


def test_values_are_private_copies_and_tensors_are_the_caller_s() -> None:
    held, tensor = [1, 2], torch.ones(2)
    taken = state_tree.taken({"held": held, "array": np.ones(2), "tensor": tensor})
    held.append(3)
    assert taken.extras["state"]["held"] == [1, 2] and taken.lives[0].tensor is tensor


@pytest.mark.parametrize(
    "extras", [{}, {"other": 1}, {"state": {}, "versions": [1]}, {"state": {}, "versions": 3}]
)
def test_extras_of_something_else_are_no_state_dict(extras: dict[str, Any]) -> None:
    with pytest.raises(CorruptSnapshotError):
        state_tree.joined(extras)


class Subclass(torch.Tensor):
    pass


def test_a_subclass_of_tensor_is_refused_and_a_parameter_is_a_tensor() -> None:
    with pytest.raises(StateError, match="state/x is a Subclass and would come back as a plain"):
        state_tree.taken({"x": torch.ones(2).as_subclass(Subclass)})
    assert len(state_tree.taken({"x": torch.nn.Parameter(torch.ones(2))}).lives) == 1
