"""State that could be written and not be brought back is refused at attach.

The error says what to do instead.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch

import lightck
from support.loops import Loop, adam_loop, attach, mlp, train


class ZeroParamStatus(Enum):
    """DeepSpeed has such an enumeration."""

    NOT_AVAILABLE = 2


def partitioned(loop: Loop) -> Loop:
    """Make what `deepspeed.initialize` with stage 3 makes: empty tensors that know a number.

    DeepSpeed itself is not installed; its `_convert_to_deepspeed_param` sets these attributes.
    """
    for number, parameter in enumerate(loop.model.parameters()):
        parameter.data = torch.empty(0)
        parameter.ds_id = number  # type: ignore[attr-defined]
        parameter.ds_status = ZeroParamStatus.NOT_AVAILABLE  # type: ignore[attr-defined]
    return loop


def check(error: lightck.StateError) -> None:
    text = str(error)
    assert error.path == "model/0.weight"
    for part in ("ds_id 0", "NOT_AVAILABLE", "stage 0, 1 or 2", "fully_shard", "save_checkpoint"):
        assert part in text


def test_a_model_partitioned_by_zero_3_is_refused_before_a_region_is_made(run_dir: Path) -> None:
    with pytest.raises(lightck.StateError, match="DeepSpeed ZeRO-3") as caught:
        attach(run_dir, partitioned(adam_loop()))
    check(caught.value)
    assert not run_dir.exists()


def test_a_model_partitioned_by_zero_3_is_refused_where_its_run_was_recorded_before(
    run_dir: Path,
) -> None:
    train(run_dir, adam_loop(), 2)
    before = (run_dir / "region-00000.lck").read_bytes()
    for call in (attach, lambda path, loop: lightck.restore(loop.model, path=path)):
        with pytest.raises(lightck.StateError, match="DeepSpeed ZeRO-3") as caught:
            call(run_dir, partitioned(adam_loop()))
        check(caught.value)
    assert (run_dir / "region-00000.lck").read_bytes() == before


def test_one_placeholder_among_others_is_refused_too(run_dir: Path) -> None:
    """Part of a model may be partitioned: `zero.Init` around a part of its making."""
    model = mlp(4, 2)
    last = model[1].bias
    last.ds_id = 7
    with pytest.raises(lightck.StateError, match=r"model/1\.bias is a placeholder"):
        lightck.attach(model, path=run_dir)


class Slow(torch.optim.Optimizer):
    """Keeps an average of each parameter in an attribute of its own."""

    def __init__(self, params: Any, keep: Callable[[list[torch.Tensor]], Any]) -> None:
        super().__init__(params, {"lr": 0.1})
        self.slow = keep(self.param_groups[0]["params"])

    def step(self, closure: Any = None) -> None:
        pass


@pytest.mark.parametrize(
    "keep",
    [
        lambda params: {p: p.detach().clone() for p in params},
        lambda params: [{"of": object(), "average": [torch.zeros(2)]}],
        lambda params: {"all": {1, torch.zeros(2)}, "hook": print},
    ],
    ids=["by parameter", "beside an object", "in a set"],
)
def test_tensors_that_an_optimizer_keeps_where_they_cannot_be_named_are_refused(
    run_dir: Path, keep: Callable[[list[torch.Tensor]], Any]
) -> None:
    """They were left out, and the resumed optimizer went on with new ones."""
    model = mlp(4, 1)
    with pytest.raises(lightck.StateError, match=r"Slow\.slow holds tensors") as caught:
        lightck.attach(model, Slow(model.parameters(), keep), run_dir)
    assert caught.value.path == "optim/0/@attribute/slow"
    assert "Slow.state[parameter]" in str(caught.value)
    assert not run_dir.exists()


@pytest.mark.parametrize(
    "keep",
    [
        lambda params: {p: f"parameter {i}" for i, p in enumerate(params)},
        lambda params: [object(), [*params]],
        lambda params: {"a": torch.zeros(2), "b": [torch.zeros(1)]},
    ],
    ids=["names", "parameters", "named"],
)
def test_what_is_configuration_or_can_be_named_is_no_reason_to_refuse(
    run_dir: Path, keep: Callable[[list[torch.Tensor]], Any]
) -> None:
    model = mlp(4, 1)
    lightck.attach(model, Slow(model.parameters(), keep), run_dir).detach()
