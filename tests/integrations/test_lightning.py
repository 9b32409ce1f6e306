"""Lightning's `fit` is killed anywhere and goes on bit for bit, by the callback alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from lightck.history import item
from support.integrations.chain import Chain

FRAMEWORK = "lightning"
MODULES = ("lightning.pytorch", "torchmetrics", "torchdata.stateful_dataloader")

# An epoch is 11 batches on one rank, 6 on each of two; batches are counted from 0.
PLACES = ("forward 0", "forward 4", "forward 10", "validation 10.1", "forward 11", "forward 19")
OTHERS = ("forward 0", "validation 3.0", "forward 4", "forward 10", "forward 13")
OF_TWO = ("forward 0", "forward 3", "forward 5", "validation 5.1", "forward 9")


@pytest.mark.parametrize(
    ("ranks", "params", "places"),
    [
        (1, {"workers": 2, "augment": True}, PLACES),
        (1, {"augment": True, "accumulate": 2, "every": 4, "schedule": "epoch"}, OTHERS),
        (1, {"loader": "stateful", "schedule": "plateau", "patience": 1}, PLACES),
        (2, {"augment": True}, OF_TWO),
        (2, {"workers": 2, "accumulate": 2}, ("forward 0", "forward 4", *OF_TWO[2:])),
    ],
)
def test_fit_goes_on_bit_for_bit(
    chain: Callable[..., Chain], ranks: int, params: dict[str, Any], places: tuple[str, ...]
) -> None:
    chain("lightning_fit.py", params=params, ranks=ranks).check(*places)


def test_lightning_finds_the_callback_by_its_entry_point_if_the_environment_says_so(
    chain: Callable[..., Chain],
) -> None:
    run = chain("lightning_fit.py", params={"found": True})
    run.environment = {"LIGHTCK_LIGHTNING": "1", "LIGHTCK_PATH": str(run.folder / "snapshots")}
    run.check("forward 4", "validation 10.1", "forward 19")


@pytest.mark.parametrize(
    ("params", "ranks", "text"),
    [
        ({"loader": "shuffled"}, 1, "with a RandomSampler could not be found again"),
        ({"loader": "two"}, 1, "there are 2 training loaders"),
        ({"keeps": True}, 1, "Module.on_save_checkpoint keeps state in Lightning's"),
        ({"put_in": True}, 2, "use_distributed_sampler=False"),
        ({"loader": "stateful"}, 2, "use_distributed_sampler=False"),
    ],
)
def test_what_could_not_be_exact_is_refused_with_the_way_out(
    chain: Callable[..., Chain], params: dict[str, Any], ranks: int, text: str
) -> None:
    chain("lightning_fit.py", params=params, ranks=ranks).refused(text)


def test_the_history_keeps_the_step_that_modelcheckpoint_found_best(
    chain: Callable[..., Chain],
) -> None:
    run = chain("lightning_fit.py", params={"keep": "best val_epoch"})
    run.check("forward 4", "validation 10.1", "forward 19")
    kept = [each.kept.step for each in item.every_item(run.folder / "run" / "snapshots")]
    assert run.notes("best step")[-1] in kept
