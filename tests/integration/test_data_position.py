"""Data positions through attach and restore, in one process: the example, epochs, wrong use."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import lightck

TORCHDATA = "torchdata.stateful_dataloader"
# torchdata's own, with new versions of torch.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")


def fresh() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Linear(4, 3)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def data(length: int = 40) -> TensorDataset:
    return TensorDataset(torch.randn(length, 4), torch.arange(length) % 3)


def learn(model: torch.nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    optimizer.zero_grad()
    model(x).sum().backward()
    optimizer.step()


def test_example_of_the_docstring_runs_and_goes_on_where_it_was_closed(run_dir: Path) -> None:
    lines = inspect.getdoc(lightck.ResumableSampler).splitlines()  # type: ignore[union-attr]
    code = "\n".join(line[4:] for line in lines if line.startswith("    "))
    seen: list[int] = []

    def run(text: str) -> dict[str, Any]:
        model, optimizer = fresh()
        names = {
            "lightck": lightck, "DataLoader": DataLoader, "F": F, "data": data(), "model": model,
            "optimizer": optimizer, "path": run_dir, "seen": seen,
        }  # fmt: skip
        exec(
            text.replace("optimizer.zero_grad()", "optimizer.zero_grad(); seen.append(epoch)"),
            names,
        )
        return names

    run(code.replace("10", "2"))
    sampler = run(code.replace("10", "3"))["sampler"]
    assert seen == [0, 0, 1, 1, 2, 2]
    assert sampler.epoch == 3


def test_sampler_of_other_data_is_refused_by_restore(run_dir: Path) -> None:
    model, optimizer = fresh()
    sampler = lightck.ResumableSampler(data())
    with lightck.attach(model, optimizer, run_dir, extras={"data": sampler}):
        for x, _ in DataLoader(data(), batch_size=8, sampler=sampler):
            learn(model, optimizer, x)
    shorter = lightck.ResumableSampler(data(39))
    with pytest.raises(lightck.RestoreMismatchError, match="length: saved 40, live 39"):
        lightck.restore(*fresh(), run_dir, extras={"data": shorter})


def test_sampler_in_a_stateful_loader_is_refused() -> None:
    torchdata = pytest.importorskip(TORCHDATA, reason="SKIPPED: torchdata is not installed")
    sampler = lightck.ResumableSampler(data())
    loader = torchdata.StatefulDataLoader(data(), batch_size=8, sampler=sampler)
    with pytest.raises(lightck.ConfigError, match="StatefulDataLoader keeps its own position"):
        next(iter(loader))


def test_stateful_loader_with_other_workers_is_refused_by_restore(run_dir: Path) -> None:
    torchdata = pytest.importorskip(TORCHDATA, reason="SKIPPED: torchdata is not installed")

    def loader(workers: int) -> Any:
        return torchdata.StatefulDataLoader(data(), batch_size=8, num_workers=workers)

    model, optimizer = fresh()
    saved = loader(0)
    with lightck.attach(model, optimizer, run_dir, extras={"data": saved}):
        for x, _ in saved:
            learn(model, optimizer, x)
            break
    with pytest.raises(lightck.RestoreMismatchError, match="num_workers=1 does not take"):
        lightck.restore(*fresh(), run_dir, extras={"data": loader(1)})


def test_attaching_to_a_stateful_loader_that_nobody_has_iterated_starts_nothing(
    run_dir: Path,
) -> None:
    torchdata = pytest.importorskip(TORCHDATA, reason="SKIPPED: torchdata is not installed")
    loader = torchdata.StatefulDataLoader(data(), batch_size=8, num_workers=1)
    stood = torch.get_rng_state()
    model, optimizer = fresh()
    torch.set_rng_state(stood)
    with lightck.attach(model, optimizer, run_dir, extras={"data": loader}) as handle:
        handle.snapshot().result(30)
        assert loader._iterator is None
        assert torch.equal(torch.get_rng_state(), stood)
    model, optimizer = fresh()
    info = lightck.restore(model, optimizer, run_dir, extras={"data": loader})
    assert info is not None and info.step == 0
    assert len(list(loader)) == 5
