from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightck.errors import CorruptSnapshotError
from lightck.region.layout import Entry
from lightck.state import tensor_layout
from lightck.state.inventory import StateTensor

DTYPES = [torch.float32, torch.bfloat16, torch.bool, torch.complex64, torch.int64]


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Tensors of every kind of stride: permuted, expanded, with gaps, empty, conjugated."""
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    tensor = torch.arange(max(1, torch.Size(shape).numel())).to(draw(st.sampled_from(DTYPES)))
    tensor = tensor[: torch.Size(shape).numel()].reshape(shape)
    if draw(st.booleans()):
        tensor = tensor.permute(draw(st.permutations(range(len(shape)))))
    if draw(st.booleans()) and shape:
        tensor = tensor[..., :: draw(st.integers(1, 3))]
    if draw(st.booleans()):
        tensor = tensor.unsqueeze(0).expand(draw(st.integers(0, 3)), *tensor.shape)
    if draw(st.booleans()) and tensor.is_complex():
        tensor = tensor.conj()
    return tensor


@given(tensors())
@settings(max_examples=300)
def test_what_is_described_is_the_copy_that_is_owned_and_holds_the_same(
    tensor: torch.Tensor,
) -> None:
    live = StateTensor("model/a", "parameter", "", tensor)
    entry = tensor_layout.describe(live)
    tensor_layout.check([entry], context="")
    copy = tensor_layout.owned(live, entry)
    assert copy.untyped_storage().nbytes() == entry.length or entry.length == 0
    assert tensor_layout.is_dense(copy)
    assert tuple(copy.stride()) == entry.strides
    assert torch.equal(copy, tensor.resolve_conj())
    if not tensor_layout.must_own(live):
        assert tuple(tensor.stride()) == entry.strides


def test_a_buffer_is_owned_and_a_dense_parameter_is_not() -> None:
    tensor = torch.ones(3)
    assert tensor_layout.must_own(StateTensor("model/a", "buffer", "", tensor, sync=True))
    assert not tensor_layout.must_own(StateTensor("model/a", "parameter", "", tensor))
    assert not tensor_layout.must_own(StateTensor("model/a", "parameter", "", torch.ones(3, 4).t()))
    assert tensor_layout.must_own(StateTensor("model/a", "parameter", "", torch.ones(3, 4)[:, :2]))
    assert tensor_layout.must_own(
        StateTensor("model/a", "parameter", "", torch.ones(3).expand(2, 3))
    )


GOOD = Entry("model/a", "parameter", "float32", (3, 4), (4, 1), 48)


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "load"},
        {"dtype": "float33"},
        {"dtype": "float64"},
        {"length": 44},
        {"length": 0},
        {"length": 1 << 60},
        {"shape": (3, 5)},
        {"shape": (1 << 40, 1 << 40)},
        {"strides": (1, 1)},
        {"strides": (0, 1)},
        {"strides": (8, 1)},
    ],
)
def test_entries_that_would_be_read_past_their_tensor_are_corrupt(
    change: dict[str, object],
) -> None:
    tensor_layout.check([GOOD], context="")
    with pytest.raises(CorruptSnapshotError, match="slot 3: model/a"):
        tensor_layout.check([dataclasses.replace(GOOD, **change)], context="slot 3")  # type: ignore[arg-type]
