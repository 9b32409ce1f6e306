"""A loop of Accelerate's is killed anywhere and goes on bit for bit, its body as it was."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from support.integrations.chain import Chain

FRAMEWORK = "accelerate"
MODULES = ("accelerate",)

# An epoch is 11 batches on one rank, 6 on each of two; batches are counted from 0.
PLACES = ("forward 0", "forward 5", "forward 10", "validation 0.1", "forward 15")
OF_TWO = ("forward 0", "forward 4", "forward 5", "validation 0.1", "forward 10")


@pytest.mark.parametrize(
    ("ranks", "seeded", "params", "places"),
    [
        (1, False, {"augment": True}, PLACES),
        (1, False, {"augment": True, "seedable": True, "accumulate": 2}, PLACES),
        (1, True, {"augment": True, "workers": 2, "accumulate": 2}, PLACES),
        (1, False, {"augment": True, "sampler": True, "workers": 2}, PLACES),
        (2, False, {"augment": True, "accumulate": 2}, OF_TWO),
    ],
)
def test_the_loop_goes_on_bit_for_bit(
    chain: Callable[..., Chain],
    ranks: int,
    seeded: bool,
    params: dict[str, Any],
    places: tuple[str, ...],
) -> None:
    chain("accelerate_loop.py", params=params, ranks=ranks, seeded=seeded).check(*places)


@pytest.mark.parametrize(
    ("params", "text"),
    [
        ({"stateful": True}, "prepared with use_stateful_dataloader=True"),
        ({"unprepared": True}, "that accelerator.prepare has not returned: prepare it"),
    ],
)
def test_what_could_not_be_exact_is_refused_with_the_way_out(
    chain: Callable[..., Chain], params: dict[str, Any], text: str
) -> None:
    chain("accelerate_loop.py", params=params).refused(text)


def test_each_run_over_one_loader_draws_its_own_orders_and_so_do_passes_behind_them(
    tmp_path: Path,
) -> None:
    """A notebook's cell that is run again: its `Lightck` is another, the prepared loader is not."""
    from accelerate import Accelerator

    from lightck.integrations.accelerate import Lightck

    torch.manual_seed(5)
    accelerator, net = Accelerator(cpu=True), torch.nn.Linear(1, 1)
    data = DataLoader(TensorDataset(torch.arange(9.0)[:, None]), shuffle=True)
    model, optimizer, loader = accelerator.prepare(net, torch.optim.SGD(net.parameters()), data)
    orders = []
    for name in ("first", "second"):
        ck = Lightck(accelerator, tmp_path / name)
        for _ in ck.epochs(3):
            orders.append([])
            for (x,) in ck.batches(loader):
                orders[-1].append(int(x))
                accelerator.backward(model(x).sum())
                optimizer.step()
                optimizer.zero_grad()
        (ck.handle if name == "first" else ck).close()  # whoever closes, and whatever
    orders += [[int(x) for (x,) in loader] for _ in range(3)]
    assert len({tuple(each) for each in orders}) == 9
    assert all(sorted(each) == [*range(9)] for each in orders)
