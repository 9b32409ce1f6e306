"""A snapshot's content belongs to its step, wherever in an iteration it is asked for."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.utils.parametrizations import weight_norm

import lightck

STEPS = 8


def batch(i: int) -> torch.Tensor:
    """The batch of step i + 1: a function of the step alone."""
    return torch.randn(16, 8, generator=torch.Generator().manual_seed(i))


def normalized() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model whose forward changes buffers and draws random numbers."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 8),
        torch.nn.BatchNorm1d(8),
        torch.nn.Dropout(0.5),
        torch.nn.Linear(8, 1),
    )
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def loss_of(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The loss of one batch."""
    return model(x).pow(2).mean()


def train(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    begin: int,
    end: int,
    loss: Callable[..., Any] = loss_of,
) -> list[torch.Tensor]:
    """Steps begin + 1 to end; the state after them."""
    for i in range(begin, end):
        loss(model, batch(i)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [tensor.clone() for tensor in model.state_dict().values()]


def resumed(path: Path, loss: Callable[..., Any] = loss_of) -> tuple[int, list[torch.Tensor]]:
    """The step that restore finds, and the state at the end of the run from there."""
    model, optimizer = normalized()
    info = lightck.restore(model, optimizer, path)
    assert info is not None
    return info.step, train(model, optimizer, info.step, STEPS, loss)


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, a, b))


@pytest.mark.parametrize("policy", [1, 1000])
@pytest.mark.parametrize("failure", ["jit", "off"])
def test_close_after_a_forward_never_takes_that_forwards_buffers(
    run_dir: Path, policy: int, failure: str
) -> None:
    reference = train(*normalized(), 0, STEPS)
    model, optimizer = normalized()
    handle = lightck.attach(model, optimizer, run_dir, policy=policy, failure=failure)
    train(model, optimizer, 0, 3)
    handle.snapshot().result(30)
    train(model, optimizer, 3, 4)
    loss_of(model, batch(4))
    handle.close()
    step, final = resumed(run_dir)
    # Armed, what the buffers were is kept.
    assert step == (4 if policy == 1 or failure == "jit" else 3)
    assert same(final, reference)


def test_close_sees_buffers_that_came_after_the_last_look_and_that_a_forward_has_changed(
    run_dir: Path,
) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = lightck.attach(model, optimizer, run_dir, policy=1000, failure="off")
    train(model, optimizer, 0, 2)
    model.append(torch.nn.BatchNorm1d(8, affine=False))
    loss_of(model, batch(2))
    handle.close()
    assert handle.last_committed_step is None


def test_a_snapshot_asked_for_inside_an_iteration_waits_for_its_end(run_dir: Path) -> None:
    reference = train(*normalized(), 0, STEPS)
    model, optimizer = normalized()
    with lightck.attach(model, optimizer, run_dir, policy=1000) as handle:
        train(model, optimizer, 0, 3)
        loss = loss_of(model, batch(3))
        future = handle.snapshot()
        assert handle.last_captured_step is None
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        train(model, optimizer, 4, 5)
        assert future.result(30) == 4
        handle.detach()
    step, final = resumed(run_dir)
    assert step == 4
    assert same(final, reference)


@pytest.mark.parametrize("stop", [2, 3])
def test_loops_with_unseen_forwards_never_hold_the_next_steps_buffers(
    run_dir: Path, stop: int
) -> None:
    def unseen(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        for module in model:  # the hook sees modules that hold parameters: go around all of them
            x = module.forward(x)
        return x.pow(2).mean()

    def job() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model, optimizer = normalized()
        model[2].p = 0.0  # generators of an unseen forward are those at the step's end
        return model, optimizer

    reference = train(*job(), 0, STEPS, unseen)
    model, optimizer = job()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "lightck saw no forward")
        handle = lightck.attach(model, optimizer, run_dir)
        train(model, optimizer, 0, stop, unseen)
        handle.wait()
        handle.detach()
    model, optimizer = job()
    info = lightck.restore(model, optimizer, run_dir)
    assert info is not None and info.step == stop - 1
    assert same(train(model, optimizer, info.step, STEPS, unseen), reference)


def test_reading_a_parametrized_weight_is_no_forward(run_dir: Path) -> None:
    model = torch.nn.Sequential(weight_norm(torch.nn.Linear(4, 4)), torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    handle = lightck.attach(model, optimizer, run_dir, extras={"scheduler": scheduler})
    for _ in range(3):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        model[0].weight.norm().item()
        scheduler.step()
    handle.wait()
    handle.detach()
    state = lightck.load(run_dir)
    assert (state["step"], state["extras"]["scheduler"]["last_epoch"]) == (2, 2)


def test_an_update_that_raised_does_not_hide_the_updates_of_a_deeper_loop(run_dir: Path) -> None:
    model, optimizer = normalized()
    handle = lightck.attach(model, optimizer, run_dir)
    train(model, optimizer, 0, 2)
    failing = optimizer.register_step_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train(model, optimizer, 2, 3)
    failing.remove()

    def deeper() -> None:
        train(model, optimizer, 2, 6)

    deeper()
    assert handle.step == 6
    handle.close()
    assert lightck.load(run_dir)["step"] == 6


def test_a_second_optimizer_beside_a_given_one_ends_the_step_with_it(run_dir: Path) -> None:
    def job() -> tuple[torch.nn.ModuleDict, torch.optim.Optimizer, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = torch.nn.ModuleDict({"g": torch.nn.Linear(8, 8), "d": torch.nn.Linear(8, 1)})
        adam = torch.optim.Adam
        return model, adam(model["g"].parameters()), adam(model["d"].parameters())

    def loop(job: Any, begin: int, end: int) -> list[torch.Tensor]:
        model, first, second = job
        for i in range(begin, end):
            first.zero_grad()
            model["d"](model["g"](batch(i))).mean().backward()
            first.step()
            second.zero_grad()
            model["d"](model["g"](batch(i)).detach()).pow(2).mean().backward()
            second.step()
        return [parameter.detach().clone() for parameter in model.parameters()]

    reference = loop(job(), 0, STEPS)
    running = job()
    handle = lightck.attach(running[0], running[1], run_dir)
    for i in range(5):
        loop(running, i, i + 1)
        handle.wait()  # or a busy machine makes the last steps slip
    handle.detach()
    model, first, second = job()
    info = lightck.restore(model, [first, second], run_dir)
    assert info is not None and info.step >= 3
    assert same(loop((model, first, second), info.step, STEPS), reference)


def test_parameters_added_to_a_group_later_are_saved(run_dir: Path) -> None:
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    temperature = torch.nn.Parameter(torch.tensor(1.5))
    with lightck.attach(model, optimizer, run_dir) as handle:
        for i in range(4):
            if i == 2:
                optimizer.add_param_group({"params": [temperature]})
            (model(torch.ones(2, 4)).sum() * temperature).backward()
            optimizer.step()
        assert handle.step == 4
    model = torch.nn.Linear(4, 4)
    again = torch.nn.Parameter(torch.tensor(0.0))
    optimizer = torch.optim.SGD([{"params": model.parameters()}, {"params": [again]}], lr=0.1)
    assert lightck.restore(model, optimizer, run_dir) is not None
    assert torch.equal(again, temperature)


def test_errors_of_the_users_state_are_reported_and_training_goes_on(run_dir: Path) -> None:
    class Moody:
        bad = False

        def state_dict(self) -> dict[str, int]:
            if self.bad:
                raise KeyError("user bug")
            return {"fine": 1}

        def load_state_dict(self, state: dict[str, int]) -> None:
            """Nothing to load."""

    seen: list[BaseException] = []
    model, optimizer = normalized()
    moody = Moody()
    extras = {"moody": lightck.at_forward(moody)}
    handle = lightck.attach(model, optimizer, run_dir, extras=extras, on_error=seen.append, slots=8)
    train(model, optimizer, 0, 3)
    moody.bad = True
    train(model, optimizer, 3, 5)
    moody.bad = False
    train(model, optimizer, 5, 7)
    assert seen and all(isinstance(error, lightck.StateError) for error in seen)
    assert "user bug" in str(seen[0])
    handle.wait(6)
    handle.detach()
    assert lightck.load(run_dir)["step"] == 6


@pytest.mark.parametrize("kind", ["sparse", "quantized", "lazy"])
def test_state_without_plain_bytes_is_refused_at_attach(run_dir: Path, kind: str) -> None:
    model: torch.nn.Module = torch.nn.Linear(4, 4)
    if kind == "lazy":
        model = torch.nn.LazyLinear(4)
    elif kind == "sparse":
        model.register_buffer("odd", torch.eye(4).to_sparse())
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model.register_buffer(
                "odd", torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.quint8)
            )
    with pytest.raises(lightck.StateError, match="model/"):
        lightck.attach(model, path=run_dir)
