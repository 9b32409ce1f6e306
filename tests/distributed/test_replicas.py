"""lightck knows which state ranks hold alike: under real DDP, ranks forked, over gloo."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn.parallel import DistributedDataParallel
from torch.optim import LBFGS, SGD, Adam, Optimizer

from lightck.distributed.sharding import ReplicatedTensors, SharePartitioner
from lightck.distributed.topology import Topology
from lightck.state.inventory import Inventory, RankShare
from support.distributed import ranks
from support.distributed.ranks import Me

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, of torch.jit
    from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer


@dataclass(frozen=True)
class View:
    """A view says what one rank makes of its state at one instant."""

    digest: bytes
    form: bytes
    spans: dict[str, tuple[int, int] | None]
    """Every tensor that the rank captures is here; aliases are left out."""
    sizes: dict[str, int]
    """Every tensor that there is has its size here."""

    @property
    def own(self) -> set[str]:
        return {name for name, span in self.spans.items() if span is None}


def view(me: Me, model: nn.Module, *optimizers: Optimizer) -> View:
    node = Topology(me.rank, me.world, me.rank, me.world, 0, tuple(range(me.world)), bytes(16))
    replicas = ReplicatedTensors(model, list(optimizers), me.world)
    inventory = Inventory(model, list(optimizers), division=SharePartitioner(node, replicas))
    inventory.collect()
    shared: RankShare = inventory.share(inventory.everything())
    return View(
        shared.digest,
        shared.form,
        {live.name: live.span for live in shared.lives if not live.alias_of},
        {live.name: live.tensor.nbytes for live in inventory.everything() if not live.alias_of},
    )


SCENES: dict[str, Callable[[Me], Any]] = {}


def scene(code: Callable[[Me], Any]) -> Callable[[Me], Any]:
    """Something that every rank of one job does, before the next one."""
    SCENES[code.__name__] = code
    return code


@cache
def played(world: int) -> dict[str, list[Any]]:
    """Play each scene on every rank; return what each rank returned from each scene."""
    with ranks.started(world, lambda me: {n: c(me) for n, c in SCENES.items()}) as job:
        found = job.results()
    return {name: [each[name] for each in found] for name in SCENES}


def replicated(seen: Sequence[View]) -> set[str]:
    """Names of what is shared; every byte of it is one rank's, and all agree on whose."""
    assert len({v.digest for v in seen}) == len({v.form for v in seen}) == 1
    shared = {name for v in seen for name, span in v.spans.items() if span is not None}
    for name in shared:
        spans = sorted(v.spans[name] for v in seen if v.spans.get(name) is not None)  # type: ignore[type-var]
        ends = [0, *(span[1] for span in spans if span)]
        assert [span[0] for span in spans if span] == ends[:-1]
        assert ends[-1] == seen[0].sizes[name]
    for v in seen:
        assert v.own == v.sizes.keys() - shared
    return shared


class Net(nn.Module):
    """Batch statistics, tied weights, a frozen layer, and a branch that not every rank takes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Linear(16, 32)
        self.norm = nn.BatchNorm1d(32)
        self.frozen = nn.Linear(32, 32)
        self.frozen.requires_grad_(False)
        self.branch = nn.Linear(32, 32)
        self.unused = nn.Linear(3, 3)
        self.last = nn.Linear(32, 16)
        self.tied = self.last

    def forward(self, x: torch.Tensor, branch: bool) -> torch.Tensor:
        x = self.frozen(self.norm(self.first(x)))
        x = self.branch(x) if branch else x
        return self.last(x).sum()


TRAINED = {
    f"model/{n}.{k}" for n in ("first", "norm", "branch", "last") for k in ("weight", "bias")
}
REST = {f"model/{n}.{k}" for n in ("frozen", "unused") for k in ("weight", "bias")}


def wrapped(**options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(Net(), find_unused_parameters=True, **options)


def train(me: Me, model: nn.Module, optimizer: Optimizer, *, branch: bool = True) -> None:
    torch.manual_seed(me.rank)
    optimizer.zero_grad()
    model(torch.randn(8, 16), branch).backward()
    optimizer.step()


@scene
def steps(me: Me) -> list[View]:
    model = wrapped()
    optimizer = Adam(model.parameters())
    seen = [view(me, model, optimizer)]
    for branch in (False, me.rank == 1, True):  # at first nobody takes it, then one rank does
        train(me, model, optimizer, branch=branch)
        seen.append(view(me, model, optimizer))
    return seen


@pytest.mark.parametrize("world", [2, 3])
def test_parameters_and_their_optimizer_state_are_replicated_as_they_appear(world: int) -> None:
    before, first, second, third = zip(*played(world)["steps"], strict=True)
    branch = {"model/branch.weight", "model/branch.bias"}
    assert replicated(before) == TRAINED | REST

    def with_state(names: set[str]) -> set[str]:
        keys = ("step", "exp_avg", "exp_avg_sq")
        state = {f"optim/0/{n.removeprefix('model/')}/{k}" for n in names for k in keys}
        return TRAINED | REST | state

    assert replicated(first) == with_state(TRAINED - branch)
    assert replicated(second) == replicated(third) == with_state(TRAINED)
    statistics = ("running_mean", "running_var", "num_batches_tracked")
    assert first[0].own == {f"model/norm.{name}" for name in statistics}


@scene
def ignored(me: Me) -> View:
    inner = Net()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(inner, ["first.weight"])
    model = DistributedDataParallel(inner, find_unused_parameters=True)
    outside = nn.Linear(4, 4)
    both = nn.ModuleList([model, outside])
    optimizer = Adam(both.parameters())
    train(me, model, optimizer)
    outside(torch.ones(4)).sum().backward()
    optimizer.step()
    return view(me, both, optimizer)


def test_what_is_outside_of_ddp_or_ignored_by_it_is_each_ranks_own() -> None:
    seen = played(3)["ignored"]
    state = ("step", "exp_avg", "exp_avg_sq")
    own = {"model/0.first.weight", "model/1.weight", "model/1.bias"}
    own |= {f"optim/0/{n.removeprefix('model/')}/{k}" for n in own for k in state}
    assert own == {n for n in seen[0].own if "norm.running" not in n and "batches" not in n}
    assert not own & replicated(seen)


@scene
def subgroups(me: Me) -> View:
    groups = [dist.new_group([0]), dist.new_group(list(range(1, me.world)))]
    return view(me, wrapped(process_group=groups[min(me.rank, 1)]))


def test_a_process_group_of_some_ranks_replicates_nothing_for_all() -> None:
    assert [v.digest for v in played(3)["subgroups"]] == [bytes(16)] * 3


@scene
def divided(me: Me) -> View:
    model = wrapped()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=Adam)
    train(me, model, optimizer)
    return view(me, model, optimizer, optimizer.optim)


def test_an_optimizer_that_divides_its_state_keeps_it_each_ranks_own() -> None:
    seen = played(2)["divided"]
    assert replicated(seen) == TRAINED | REST
    first, second = ({n for n in v.own if n.startswith("optim/1/")} for v in seen)
    assert first
    assert second
    assert not first & second


class Divides(SGD):
    """Somebody's own optimizer: who knows what it holds where."""


@scene
def foreign(me: Me) -> View:
    model = wrapped()
    optimizer = Divides(model.parameters(), lr=0.1, momentum=0.9)
    train(me, model, optimizer)
    return view(me, model, optimizer)


def test_state_of_optimizers_that_are_not_torchs_own_is_each_ranks_own() -> None:
    seen = played(3)["foreign"]
    assert replicated(seen) == TRAINED | REST
    assert any(name.startswith("optim/0/") for name in seen[0].own)


@scene
def averaging_optimizer(me: Me) -> View:
    model = wrapped()
    plain = SGD(model.parameters(), lr=0.1)
    return view(me, model, PostLocalSGDOptimizer(plain, PeriodicModelAverager(period=4)))


@scene
def averaging_hook(me: Me) -> View:
    model = wrapped()
    state = post_localSGD_hook.PostLocalSGDState(None, None, 100)
    model.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
    return view(me, model, SGD(model.parameters(), lr=0.1))


@scene
def nothing_reduced(me: Me) -> View:
    model = wrapped()
    model.register_comm_hook(None, noop_hook)
    return view(me, model, SGD(model.parameters(), lr=0.1))


@scene
def own_losses(me: Me) -> View:
    model = wrapped()
    return view(me, model, LBFGS(model.parameters()))


@pytest.mark.parametrize(
    "case", ["averaging_optimizer", "averaging_hook", "nothing_reduced", "own_losses"]
)
def test_parameters_that_ranks_move_apart_are_each_ranks_own(case: str) -> None:
    assert [v.digest for v in played(3)[case]] == [bytes(16)] * 3


@scene
def compressed(me: Me) -> View:
    model = wrapped()
    model.register_comm_hook(None, fp16_compress_hook)
    return view(me, model)


def test_compressed_gradients_are_the_same_on_all_ranks() -> None:
    assert replicated(played(3)["compressed"]) == TRAINED | REST


@scene
def hooked_late(me: Me) -> list[bytes]:
    model = wrapped()
    optimizers: list[Optimizer] = [SGD(model.parameters(), lr=0.1)]
    node = Topology(me.rank, me.world, me.rank, me.world, 0, tuple(range(me.world)), bytes(16))
    replicas = ReplicatedTensors(model, optimizers, me.world)
    inventory = Inventory(model, optimizers, division=SharePartitioner(node, replicas))
    before = inventory.collect().share_digest
    model.register_comm_hook(None, noop_hook)
    return [before, inventory.collect().share_digest]


def test_a_hook_that_comes_later_counts_from_then_on() -> None:
    for before, after in played(3)["hooked_late"]:
        assert before != bytes(16)
        assert after == bytes(16)


@scene
def one_has_more(me: Me) -> View:
    model = wrapped()
    optimizer = Adam(model.parameters())
    train(me, model, optimizer)
    if me.rank == 1:
        optimizer.state[model.module.unused.weight]["exp_avg"] = torch.zeros(3, 3)
    return view(me, model, optimizer)


def test_optimizer_state_of_one_rank_only_is_found_out() -> None:
    seen = played(3)["one_has_more"]
    assert seen[0].digest == seen[2].digest != seen[1].digest
    assert seen[0].form == seen[2].form != seen[1].form
