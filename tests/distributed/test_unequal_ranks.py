"""Parameters that ranks do not hold alike: they come back to as many ranks, and to no other number
of them without a word."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lightck
from lightck.region import location
from support.distributed import ranks

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, of its own
    from torch.distributed.optim import ZeroRedundancyOptimizer

EXPERT = ("model/expert.weight", "model/expert.bias")
MOMENTUM = tuple(f"optim/0/expert.{name}/momentum_buffer" for name in ("weight", "bias"))


class Mixture(nn.Module):
    """A layer that data parallelism keeps alike, and an expert that is each rank's own."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.shared: nn.Module = nn.Linear(4, 4)
        torch.manual_seed(30 + rank)
        self.expert = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> Any:
        return self.expert(self.shared(x))


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def mixture(rank: int) -> tuple[Mixture, torch.optim.Optimizer]:
    model = Mixture(rank)
    if dist.is_initialized() and dist.get_world_size() > 1:
        model.shared = DistributedDataParallel(model.shared)
    return model, momentum(model)


def reduced(model: nn.Module) -> None:
    """Sum all gradients over the ranks: data parallelism by hand."""
    for p in model.parameters():
        assert p.grad is not None
        dist.all_reduce(p.grad)


def record(
    path: Path,
    make: Callable[[int], tuple[nn.Module, torch.optim.Optimizer]],
    between: Callable[[nn.Module], None] = lambda model: None,
) -> Callable[[ranks.Me], dict[str, torch.Tensor]]:
    """Return what each rank runs: three steps; it returns what it held."""

    def run(me: ranks.Me) -> dict[str, torch.Tensor]:
        model, optimizer = make(me.rank)
        torch.manual_seed(me.rank)
        with lightck.attach(model, optimizer, path, threads=1):
            for _ in range(3):
                optimizer.zero_grad()
                model(torch.randn(2, 4)).square().mean().backward()
                between(model)
                optimizer.step()
        return {n.replace(".module", ""): p.detach() for n, p in model.named_parameters()}

    return run


@pytest.fixture
def written(region_dir: Path) -> tuple[Path, list[dict[str, torch.Tensor]]]:
    """Train two ranks with an expert each; give the path, and what each rank held."""
    with ranks.started(2, record(region_dir, mixture)) as job:
        return region_dir, job.results()


def test_experts_of_two_ranks_are_refused_by_name_on_one(written: Any) -> None:
    path, _ = written
    model, optimizer = mixture(7)
    before = {n: p.clone() for n, p in model.named_parameters()}
    with pytest.raises(lightck.RestoreMismatchError, match="as many ranks as wrote it") as caught:
        lightck.restore(model, optimizer, path)
    assert set(caught.value.different) == {*EXPERT, *MOMENTUM}
    assert all("ranks 0 and 1 of the 2" in why for why in caught.value.different.values())
    assert (caught.value.missing, caught.value.unexpected) == ((), ())
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
    assert not optimizer.state


@pytest.mark.parametrize("with_optimizer", [True, False], ids=["optimizer", "optimizer later"])
def test_without_strict_they_are_left_alone_and_named(written: Any, with_optimizer: bool) -> None:
    path, held = written
    model, optimizer = mixture(7)
    expert = {n: p.clone() for n, p in model.expert.named_parameters()}
    given = optimizer if with_optimizer else None
    info = lightck.restore(model, given, path, strict=False)
    assert info is not None
    assert {*EXPERT, *MOMENTUM} <= set(info.skipped)
    assert all(torch.equal(p, expert[n]) for n, p in model.expert.named_parameters())
    for name, p in model.shared.named_parameters():
        assert torch.equal(p, held[0][f"shared.{name}"])
    with lightck.attach(model, optimizer, path, threads=1) as handle:
        assert handle.step == 3
        model(torch.ones(2, 4)).sum().backward()
        if with_optimizer:
            assert {*optimizer.state} == {*model.shared.parameters()}
        optimizer.step()
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_they_come_back_to_as_many_ranks(written: Any) -> None:
    path, held = written

    def run(me: ranks.Me) -> dict[str, torch.Tensor]:
        model, optimizer = mixture(9)
        info = lightck.restore(model, optimizer, path)
        assert info is not None and info.step == 3 and info.skipped == {}
        return {n.replace(".module", ""): p.detach() for n, p in model.named_parameters()}

    with ranks.started(2, run) as job:
        for rank, found in enumerate(job.results()):
            assert all(torch.equal(found[name], held[rank][name]) for name in found)


def test_more_ranks_than_wrote_them_refuse_them_too(written: Any) -> None:
    path, _ = written

    def run(me: ranks.Me) -> str:
        model, optimizer = mixture(me.rank)
        with pytest.raises(lightck.LightckError) as caught:
            lightck.restore(model, optimizer, path)
        return str(caught.value)

    with ranks.started(3, run) as job:
        said = job.results()
    assert all("expert.weight" in text for text in said), said


def test_what_another_rank_held_is_not_taken_for_alike_when_its_region_is_gone(
    region_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank on a node of its own: rank 0's region is whole, and proves nothing of others'."""
    monkeypatch.setattr(location.Location, "reach", "")
    with ranks.started(2, record(region_dir, mixture)) as job:
        job.results()
    model, optimizer = mixture(7)
    with pytest.raises(lightck.RestoreMismatchError) as caught:
        lightck.restore(model, optimizer, region_dir)
    assert set(caught.value.different) == {*EXPERT, *MOMENTUM}
    (region_dir / "region-00001.lck").unlink()
    with pytest.raises(lightck.RestoreMismatchError) as caught:
        lightck.restore(model, optimizer, region_dir)
    assert {*EXPERT, *MOMENTUM} <= set(caught.value.different)
    assert "rank 1 of 2 held of it is not there" in caught.value.different[EXPERT[0]]


def test_what_ranks_hold_alike_without_being_told_to_goes_to_any_number(region_dir: Path) -> None:
    """Gradients reduced by hand: that the parameters are the same is seen from their checksums."""

    def make(rank: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(3)
        model = nn.Linear(4, 4)
        return model, momentum(model)

    with ranks.started(2, record(region_dir, make, reduced)) as job:
        held = job.results()
    model, optimizer = make(0)
    info = lightck.restore(model, optimizer, region_dir)
    assert info is not None and info.skipped == {}
    assert all(torch.equal(p, held[0][name]) for name, p in model.named_parameters())
    assert len(optimizer.state) == 2


def test_state_that_an_optimizer_divides_among_ranks_is_refused_on_one(region_dir: Path) -> None:
    """ZeroRedundancyOptimizer: each rank has state of some of the parameters, which are alike."""

    def make(rank: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(3)
        model = DistributedDataParallel(nn.Linear(4, 4))
        kind = torch.optim.SGD
        optimizer = ZeroRedundancyOptimizer(model.parameters(), kind, lr=0.1, momentum=0.9)
        return model, optimizer

    with ranks.started(2, record(region_dir, make)) as job:
        job.results()

    def restore() -> None:
        model = nn.Linear(4, 4)
        lightck.restore(model, momentum(model), region_dir)

    with pytest.raises(lightck.RestoreMismatchError) as caught:
        restore()
    names = [name for name in caught.value.different if name.startswith("optim/")]
    assert {name.rpartition("/")[2] for name in names} == {"momentum_buffer"}
    assert not any(name.startswith("model/") for name in caught.value.different)


def test_reading_names_what_other_ranks_hold_of_their_own(
    written: Any, caplog: pytest.LogCaptureFixture
) -> None:
    path, held = written
    state = lightck.load(path, rank=1)
    assert torch.equal(state["model"]["expert.weight"], held[1]["expert.weight"])
    assert "model/expert.weight" in caplog.text and "rank 1" in caplog.text
