"""The bytes of weights that are looked at: those that are there now, wherever that is."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
import torch
from torch import nn

from lightck.journal.weight_guard import MAX_PROBES, PROBE_BYTES, WatchedWeights
from lightck.state.inventory import StateTensor

_ELEMENTS = 64


def held_of(weights: list[nn.Parameter]) -> WatchedWeights:
    rows = enumerate(weights)
    held = WatchedWeights(
        [StateTensor(f"model/{i}", "parameter", "", w, frozenset((0,))) for i, w in rows]
    )
    assert len(held.probe_values()) == min(len(weights), MAX_PROBES)
    return held


def weights_of(count: int) -> list[nn.Parameter]:
    return [nn.Parameter(torch.full((_ELEMENTS,), float(i))) for i in range(count)]


def bytes_of(value: float) -> bytes:
    return np.full(PROBE_BYTES // 4, value, np.float32).tobytes()


def test_what_is_written_around_the_counter_is_seen() -> None:
    weights = weights_of(3)
    held = held_of(weights)
    before = held.probe_values()
    assert before[0] == bytes_of(0.0) and len(before) == 3
    weights[2].data.fill_(7.0)
    assert held.changed_since(before) == "model/2"
    weights[2].data.fill_(2.0)
    assert held.changed_since(before) == ""


def test_a_weight_that_is_elsewhere_is_looked_at_there_and_back_again() -> None:
    weights = weights_of(2)
    held = held_of(weights)
    home, before = weights[0].data, held.probe_values()
    weights[0].data = torch.full((_ELEMENTS,), 5.0)
    assert held.probe_values()[0] == bytes_of(5.0) and held.changed_since(before) == "model/0"
    weights[0].data = home
    assert held.probe_values() == before
    home.fill_(6.0)
    assert held.probe_values()[0] == bytes_of(6.0)


def test_memory_that_is_gone_or_smaller_is_not_looked_at() -> None:
    weights = weights_of(3)
    held = held_of(weights)
    weights[0].untyped_storage().resize_(0)
    weights[1].data = torch.empty(0)
    weights[2].untyped_storage().resize_(16)
    assert held.probe_values() == [b"", b"", b""]
    weights[0].untyped_storage().resize_(4 * _ELEMENTS)
    weights[0].data.fill_(1.0)
    assert held.probe_values() == [bytes_of(1.0), b"", b""]


@pytest.mark.parametrize("size", [_ELEMENTS, 0])
def test_memory_that_a_weight_has_left_is_let_go_with_the_next_look(size: int) -> None:
    weight = nn.Parameter(torch.zeros(1))
    memory = np.zeros(_ELEMENTS, np.float32)
    alive = weakref.ref(memory)
    weight.data = torch.from_numpy(memory)
    del memory
    held = held_of([weight])
    weight.data = torch.zeros(size)
    held.probe_values()
    gc.collect()
    assert alive() is None
