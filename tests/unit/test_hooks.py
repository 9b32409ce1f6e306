"""lightck knows where an update with a closure begins, and of which optimizers it believes that."""

from __future__ import annotations

import gc
import inspect
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

import lightck
from lightck.loop import hooks as closures
from lightck.loop.hooks import CALL_FIRST, Hooks, Watched


class Noting:
    """A `Listener` that writes down what it hears, and which frame runs the step."""

    def __init__(self) -> None:
        self.heard: list[str] = []
        self.frames: list[str] = []
        self.began: list[str] = []

    def update_begins(
        self, optimizer: Optimizer, frame: FrameType | None = None, *, unseen: bool = False
    ) -> None:
        self.heard.append("begins unseen" if unseen else "begins")
        self.began.append(type(optimizer).__name__)
        self.frames.append(frame.f_code.co_name if frame else "")

    def update_ends(self, optimizer: Optimizer) -> None:
        self.heard.append("ends")

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *arguments, **options: None


class Bed:
    """A model, its optimizer, and hooks that tell of it."""

    def __init__(self) -> None:
        self.model = nn.Linear(4, 4)
        self.noting = Noting()
        self.hooks = [self.listen(self.noting)]

    def listen(self, noting: Noting) -> Hooks:
        watched = Watched(self.model)
        watched.refresh()
        hooks = Hooks(watched)
        hooks.install(noting)  # type: ignore[arg-type]
        return hooks

    def optimizer(self, kind: type[Optimizer], **options: Any) -> Optimizer:
        made: Any = kind
        optimizer: Optimizer = made(self.model.parameters(), lr=0.1, **options)
        return optimizer

    def closure(self) -> torch.Tensor:
        self.noting.heard.append("closure")
        loss: torch.Tensor = self.model(torch.ones(2, 4)).square().mean()
        self.model.zero_grad()
        loss.backward()
        return loss

    def step(self, optimizer: Optimizer) -> list[str]:
        """Make one step; return what was heard in it."""
        self.noting.heard.clear()
        optimizer.step(self.closure)
        return self.noting.heard


ORDINARY = ["closure", "begins", "ends"]
AT_ONCE = ["begins", "closure", "ends"]


@pytest.fixture
def bed() -> Iterator[Bed]:
    bed = Bed()
    yield bed
    for hooks in bed.hooks:
        hooks.remove()


class Own(Optimizer):
    """Gradient descent that does what it is told to before and after its closure."""

    def __init__(self, params: Any, lr: float, first: str = "", calls: int = 1) -> None:
        super().__init__(params, {"lr": lr})
        self.first, self.calls = first, calls

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if self.first == "moves":
            self._change()
        for _ in range(self.calls):
            closure()
            self._change()

    @torch.no_grad()
    def _change(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(1)


@pytest.fixture
def believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """`Own` is taken for one that calls its closure first, and once."""
    monkeypatch.setattr(closures, "CALL_FIRST", frozenset({*CALL_FIRST, Own}))


# ---- torch's own ---------------------------------------------------------------------------------


def variants() -> list[Any]:
    found = []
    for kind in sorted(CALL_FIRST, key=lambda kind: kind.__name__):
        accepted = inspect.signature(kind.__init__).parameters
        for how in ({}, {"foreach": True}, {"fused": True}):
            if set(how) <= set(accepted) and not (
                "fused" in how and kind.__name__ not in ("Adagrad", "Adam", "AdamW", "SGD")
            ):
                found.append(pytest.param(kind, how, id=f"{kind.__name__}-{'-'.join(how)}"))
    return found


def everything(optimizer: Optimizer) -> Any:
    """Return all that an update may change, bit by bit."""
    held = [p for group in optimizer.param_groups for p in group["params"]]
    state = [sorted(optimizer.state.get(p, {}).items()) for p in held]
    return repr([_bits(each) for each in (held, state, optimizer.state_dict())])


def _bits(tree: Any) -> Any:
    if isinstance(tree, torch.Tensor):
        return tree.detach().numpy().tobytes()
    if isinstance(tree, dict):
        return {key: _bits(value) for key, value in tree.items()}
    return [_bits(each) for each in tree] if isinstance(tree, list | tuple) else tree


@pytest.mark.parametrize(("kind", "how"), variants())
def test_torchs_own_call_their_closure_once_before_they_change_anything(
    kind: type[Optimizer], how: dict[str, Any]
) -> None:
    sparse = kind.__name__ == "SparseAdam"
    model: nn.Module = nn.Embedding(6, 4, sparse=True) if sparse else nn.Linear(4, 4, bias=False)
    given = torch.arange(6) if sparse else torch.ones(2, 4)
    made: Any = kind
    optimizer: Optimizer = made(model.parameters(), lr=0.1, **how)
    if "momentum" in optimizer.defaults:
        optimizer.param_groups[0]["momentum"] = 0.9
    seen: list[str] = []

    def closure() -> torch.Tensor:
        seen.append(everything(optimizer))
        optimizer.zero_grad()
        loss = model(given).square().mean()
        loss.backward()
        seen.append(everything(optimizer))
        return loss

    for _ in range(3):
        seen.clear()
        before = everything(optimizer)
        optimizer.step(closure)
        assert seen == [before, before]
        assert everything(optimizer) != before


def test_every_optimizer_that_torch_exports_is_known_for_what_it_does() -> None:
    every = {
        kind
        for kind in vars(torch.optim).values()
        if inspect.isclass(kind) and issubclass(kind, Optimizer) and kind is not Optimizer
    }
    assert every - CALL_FIRST == {torch.optim.LBFGS}


# ---- where the update begins ---------------------------------------------------------------------


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adafactor])
def test_an_update_begins_where_the_closure_returns(bed: Bed, kind: type[Optimizer]) -> None:
    optimizer = bed.optimizer(kind)
    assert bed.step(optimizer) == ORDINARY
    bed.noting.heard.clear()
    result = optimizer.step(closure=bed.closure)
    assert bed.noting.heard == ORDINARY
    assert isinstance(result, torch.Tensor) and result.requires_grad


def test_the_frame_of_an_update_is_that_which_runs_the_step_to_its_last_hook(bed: Bed) -> None:
    optimizer = bed.optimizer(torch.optim.AdamW)
    bed.closure()
    optimizer.step()
    bed.step(optimizer)
    found: list[str] = []

    def runs(*_: Any) -> None:
        frame: FrameType | None = sys._getframe(1)
        found.append(frame.f_code.co_name if frame else "")

    optimizer.register_step_post_hook(runs)
    bed.step(optimizer)
    assert bed.noting.frames[1:] == found * 2  # without a closure it is the hook's caller


def test_an_update_without_a_closure_begins_with_its_step(bed: Bed) -> None:
    optimizer = bed.optimizer(torch.optim.SGD)
    bed.closure()
    for call in (
        optimizer.step,
        lambda: optimizer.step(None),
        lambda: optimizer.step(closure=None),
    ):
        bed.noting.heard.clear()
        call()
        assert bed.noting.heard == ["begins", "ends"]


def test_lbfgs_and_what_is_not_torchs_own_begin_with_their_step(bed: Bed) -> None:
    class Derived(torch.optim.AdamW):
        """May change anything before it calls."""

    assert bed.step(bed.optimizer(torch.optim.LBFGS, max_iter=2))[:2] == AT_ONCE[:2]
    assert bed.step(bed.optimizer(Derived)) == AT_ONCE
    assert bed.step(bed.optimizer(Own)) == AT_ONCE


def test_where_others_hooks_come_between_an_update_begins_with_its_step(bed: Bed) -> None:
    optimizer = bed.optimizer(torch.optim.AdamW)
    for register in (optimizer.register_step_pre_hook, register_optimizer_step_pre_hook):
        handle = register(lambda *_: None)
        assert bed.step(optimizer) == AT_ONCE
        handle.remove()
        assert bed.step(optimizer) == ORDINARY


def test_an_exception_that_leaves_the_closure_leaves_no_update_behind(bed: Bed) -> None:
    optimizer = bed.optimizer(torch.optim.AdamW)

    def broken() -> None:
        raise KeyError

    with pytest.raises(KeyError):
        optimizer.step(broken)
    assert bed.noting.heard == []
    assert bed.step(optimizer) == ORDINARY


def test_two_handles_on_one_optimizer_both_hear_of_its_update_once(bed: Bed) -> None:
    other = Noting()
    bed.hooks.append(bed.listen(other))
    assert bed.step(bed.optimizer(torch.optim.AdamW)) == ORDINARY
    assert other.heard == ["begins", "ends"]


def test_an_update_inside_of_a_closure_is_nested_in_that_of_the_closure(bed: Bed) -> None:
    outer, inner = bed.optimizer(torch.optim.AdamW), bed.optimizer(torch.optim.SGD)

    def closure() -> Any:
        bed.closure()
        assert bed.noting.began == []
        return inner.step(bed.closure)

    outer.step(closure)
    assert bed.noting.began == ["AdamW", "SGD"]


def test_another_models_update_inside_of_a_closure_is_nobodys_business(bed: Bed) -> None:
    optimizer, other = bed.optimizer(torch.optim.AdamW), nn.Linear(2, 2)
    theirs = torch.optim.SGD(other.parameters(), lr=0.1)

    def closure() -> Any:
        bed.noting.heard.clear()  # a listener is told of every optimizer, and knows its own
        theirs.step()
        bed.noting.heard.clear()
        return bed.closure()

    optimizer.step(closure)
    assert bed.noting.heard == ORDINARY


def test_what_a_step_was_given_is_let_go_of_with_it(bed: Bed) -> None:
    optimizer = bed.optimizer(torch.optim.AdamW)
    gc.collect()
    gc.disable()
    try:
        kept = nn.Linear(2, 2)
        gone = weakref.ref(kept)
        optimizer.step(lambda kept=kept: bed.closure())
        with pytest.raises(TypeError):
            optimizer.step(lambda kept=kept: bed.closure() + "")
        del kept
        assert gone() is None
    finally:
        gc.enable()


# ---- who is seen to do otherwise -----------------------------------------------------------------


@pytest.mark.usefixtures("believed")
def test_a_closure_that_is_called_again_runs_inside_of_the_update_and_so_do_all_later_ones(
    bed: Bed,
) -> None:
    optimizer = bed.optimizer(Own, calls=2)
    assert bed.step(optimizer) == ["closure", "begins", "closure", "ends"]
    assert bed.step(optimizer) == ["begins", "closure", "closure", "ends"]


@pytest.mark.usefixtures("believed")
def test_who_moves_a_parameter_before_the_call_has_begun_unseen_and_is_not_believed_again(
    bed: Bed,
) -> None:
    optimizer = bed.optimizer(Own, first="moves")
    assert bed.step(optimizer) == ["begins unseen", "closure", "ends"]
    assert bed.step(optimizer) == AT_ONCE


@pytest.mark.usefixtures("believed")
def test_who_does_not_call_its_closure_has_begun_unseen_and_is_not_believed_again(bed: Bed) -> None:
    optimizer = bed.optimizer(Own, calls=0)
    assert bed.step(optimizer) == ["begins unseen", "ends"]
    assert bed.step(optimizer) == ["begins", "ends"]


def test_a_hook_of_others_that_cannot_be_hashed_is_one_of_others(bed: Bed) -> None:
    class Unhashable:
        __hash__ = None  # type: ignore[assignment]

        def __call__(self, *arguments: Any) -> None: ...

    optimizer = bed.optimizer(torch.optim.SGD)
    optimizer.register_step_pre_hook(Unhashable())
    optimizer.step(bed.closure)
    assert bed.noting.heard == ["begins", "closure", "ends"]


def test_an_update_of_the_jobs_inside_a_closure_makes_the_outer_one_begin_whatever_it_holds() -> (
    None
):
    model, temperature = nn.Linear(4, 4), nn.Parameter(torch.ones(1))
    outer = torch.optim.SGD(model.parameters(), lr=0.1)
    inner = torch.optim.SGD([temperature], lr=0.1)
    watched, noting = Watched(model), Noting()
    watched.refresh()
    hooks = Hooks(watched, optimizers=[outer, inner])
    hooks.install(noting)  # type: ignore[arg-type]
    try:
        outer.step(lambda: inner.step() or 0.0)
    finally:
        hooks.remove()
    assert noting.heard == ["begins", "begins", "ends", "ends"]


@pytest.mark.parametrize(
    ("settings", "hooked"),
    [({}, 32), ({"schedule": "backward"}, 100), ({"trace": True}, 100)],
    ids=["nobody", "a schedule", "a trace"],
)
def test_of_many_layers_all_are_hooked_where_somebody_counts_them_else_few(
    region_dir: Path, settings: dict[str, Any], hooked: int
) -> None:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(100)))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with lightck.attach(model, optimizer, region_dir, policy=1000, **settings) as handle:
        ours = [bool(layer.weight._post_accumulate_grad_hooks) for layer in model]
        handle.detach()
    assert sum(ours) == hooked
    assert ours[0] and ours[-1], "where a backward ends and begins"
    longest = max(len(run) for run in "".join(".x"[each] for each in ours).split("x"))
    assert longest <= 100 // 32, "evenly spread"


class Hearing(Noting):
    """Notes forwards, too."""

    def forward(self, training: bool) -> None:
        self.heard.append("forward")


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("wrapper_trains", [True, False])
def test_a_forward_starts_before_ddp_s_buffers_whatever_mode_ddp_s_own_flag_says(
    one_rank: None, monkeypatch: pytest.MonkeyPatch, wrapper_trains: bool
) -> None:
    """Behind a validation Lightning's DDP stays in evaluation mode; a replacement's never was."""
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    ddp.train(wrapper_trains)
    ddp.module.train()
    noting, watched = Hearing(), Watched(ddp)
    watched.refresh()
    hooks = Hooks(watched)
    hooks.install(noting)  # type: ignore[arg-type]
    hooks.arm_forward()
    monkeypatch.setattr(ddp, "_sync_buffers", lambda: noting.heard.append("buffers"))
    ddp(torch.ones(2, 4))
    hooks.remove()
    assert noting.heard[:2] == ["forward", "buffers"]


def test_a_module_that_is_replaced_is_not_kept_alive() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    watched = Watched(model)
    watched.refresh()
    gone = weakref.ref(model[0].weight)
    model[0] = nn.Linear(2, 2)
    assert gone() is None
    assert not watched.stand_ins()
