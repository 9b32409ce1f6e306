"""The order of keys in optimizer state: said in few words, given back, and not believed blindly."""

from __future__ import annotations

from typing import Any

import pytest

from lightck.errors import CorruptSnapshotError
from lightck.state import key_order

USUAL = ["a", "b", "c", "d"]


def test_what_all_have_alike_is_said_once() -> None:
    said = key_order.noted({name: ["step", "exp_avg"] for name in USUAL}, USUAL)
    assert said == {"keys": [["step", "exp_avg"]], "others": {}}
    assert key_order.outer(said, USUAL) == USUAL


@pytest.mark.parametrize("labels", [["a", "b", "c", "d"], ["d", "b"], ["@x", "c", "a"], []])
def test_every_order_comes_back(labels: list[str]) -> None:
    states = {name: [name, "z", 7, "k"] if name in "bc" else ["k", "z"] for name in labels}
    said = key_order.noted(states, USUAL)
    key_order.check(said, "optimizer 0")
    assert [each for each in key_order.outer(said, USUAL) if each in states] == labels
    for name, keys in states.items():
        mixed = dict.fromkeys(sorted(keys, key=str))
        assert list(key_order.arranged(said, name, mixed)) == keys


def test_keys_that_nothing_is_said_of_come_last_and_missing_ones_are_left_out() -> None:
    said = key_order.noted({"a": ["x", "y", "z"]}, USUAL)
    assert list(key_order.arranged(said, "a", {"new": 0, "z": 1, "x": 2})) == ["x", "z", "new"]
    assert list(key_order.arranged({}, "a", {"z": 1, "x": 2})) == ["z", "x"]


@pytest.mark.parametrize(
    "said",
    [
        None,
        [],
        {},
        {"keys": [["a"]], "others": {"b": 1}},
        {"keys": [["a"]], "others": {"b": -1}},
        {"keys": [["a"]], "others": {"b": "0"}},
        {"keys": [["a"]], "others": ["b"]},
        {"keys": ["ab"], "others": {}},
        {"keys": [[["a"]]], "others": {}},
        {"keys": {"a": 1}, "others": {}},
        {"keys": [["a"]], "others": {}, "labels": "ab"},
        {"keys": [["a"]], "others": {}, "labels": [1]},
    ],
)
def test_what_has_not_the_form_is_damage(said: Any) -> None:
    with pytest.raises(CorruptSnapshotError, match="optimizer 3"):
        key_order.check(said, "optimizer 3")
