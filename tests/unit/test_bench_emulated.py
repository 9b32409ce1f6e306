"""The emulated accelerator takes the time that is asked for, and training on it is a training."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from bench import bus, emulated
from bench.bus import Bus, behind_bus
from bench.definition import Contender, Method
from bench.emulated import DEVICES
from bench.engines.blocking import Blocking
from bench.engines.none import Nothing
from bench.errors import BenchError
from bench.measures import Job
from bench.measures.loop import Loop
from bench.work import Training, Work, copied, state_bytes, tensors

_STEP_S = 2.0
_WORK = Work("tiny", emulated="v100", step_ms=1e3 * _STEP_S)


class _Time:
    """Passes only while something sleeps, a little longer than it asked for."""

    LONGER = 0.0001

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.slept = 0.0, 0
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(time, "sleep", self._sleep)

    def _sleep(self, seconds: float) -> None:
        self.now += seconds + self.LONGER
        self.slept += 1


def test_a_step_takes_the_device_s_time_and_sleeps_through_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = _Time(monkeypatch)
    training = Training(_WORK)
    for _ in range(10):
        training.steps(1)
    assert clock.now == pytest.approx(10 * _STEP_S, abs=emulated._SLACK_S)
    assert clock.slept == 10 * 2 * 3, "three layers, forward and back; so small an update is over"


def test_what_hooks_take_is_not_made_up_for(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = _Time(monkeypatch)
    training = Training(_WORK)

    def hook(*_: object) -> None:
        clock.now += 0.5

    training.plain.get_submodule("layers.0").register_forward_pre_hook(hook)
    training.steps(1)
    assert clock.now == pytest.approx(_STEP_S + 0.5, abs=emulated._SLACK_S)


@pytest.mark.parametrize("model", ["tiny", "resnet18-thin", "vgg16-thin", "bag"])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_every_tensor_changes_in_a_step_and_its_state_has_the_real_one_s_size(
    model: str, optimizer: str
) -> None:
    work = Work(model, optimizer, tensors=16, emulated="v100", step_ms=1)
    training = Training(work)
    training.steps(1)
    before = [t.clone() for t in tensors(copied(training.state()))]
    training.steps(1)
    after = tensors(training.state())
    assert all(not torch.equal(old, new) for old, new in zip(before, after, strict=True))
    assert training.bytes() == state_bytes(work)


def test_gradients_come_layer_by_layer_from_the_last_to_the_first() -> None:
    training = Training(Work("vgg16-thin", "sgd", emulated="v100", step_ms=1))
    order: list[str] = []
    for name, parameter in training.plain.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda p, n=name: order.append(n))
    training.compute()
    layers = list(dict.fromkeys(name.rpartition(".")[0] for name in order))
    forward = [n for n, m in training.plain.named_modules() if list(m.parameters(recurse=False))]
    assert layers == forward[::-1]


def test_no_byte_of_a_gradient_is_touched_or_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    empty = torch.empty_like

    def watched(tensor: torch.Tensor) -> torch.Tensor:
        found = empty(tensor)
        made.append(found.data_ptr())
        return found

    monkeypatch.setattr(torch, "empty_like", watched)
    training = Training(Work("tiny", emulated="v100", step_ms=1))
    training.compute()
    gradients = [p.grad for p in training.plain.parameters()]
    assert sorted(g.data_ptr() for g in gradients if g is not None) == sorted(made)


class _Copies(Nothing):
    """Takes half a second in `begin`."""

    def __init__(self, clock: _Time) -> None:
        self.clock = clock

    def begin(self, step: int) -> None:
        """See `Engine`."""
        super().begin(step)
        self.clock.now += 0.5


@pytest.mark.parametrize(("behind", "held"), [(False, "begin"), (True, "before_update")])
def test_no_engine_copies_faster_than_the_bus(
    behind: bool, held: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = _Time(monkeypatch)
    engine = Bus(_Copies(clock), "v100", behind=behind)
    training = Training(_WORK)
    monkeypatch.setattr(training, "bytes", lambda: 2 * DEVICES["v100"].bus)  # two seconds' worth
    engine.attach(training, Path(), Loop(training, engine).plan)
    took = {}
    for call in ("begin", "before_update", "before_update"):
        begin = clock.now
        engine.begin(1) if call == "begin" else engine.before_update()
        took.setdefault(call, clock.now - begin)
    if held == "begin":
        assert took == pytest.approx({"begin": 2.0, "before_update": 0.0}, abs=0.001)
    else:
        assert took == pytest.approx({"begin": 0.5, "before_update": 2.0}, abs=0.001)


def test_lightck_is_held_to_the_bus_by_its_own_limit() -> None:
    rate = DEVICES["h100"].bus
    engine = Nothing()
    good = {"write_limit": rate, "placement": "direct"}
    assert behind_bus(engine, "lightck", good, "h100") is engine
    for wrong in ({**good, "placement": "staged"}, {**good, "write_limit": 0}, {}):
        with pytest.raises(BenchError, match=f"lightck needs write_limit = {rate}"):
            behind_bus(engine, "lightck", wrong, "h100")


def test_an_engine_whose_copies_cannot_be_held_back_is_refused() -> None:
    with pytest.raises(BenchError, match="when torchsnapshot copies the state is not known"):
        behind_bus(Nothing(), "torchsnapshot", {}, "v100")


def test_jobs_on_an_emulated_device_put_their_engine_behind_its_bus(tmp_path: Path) -> None:
    contender = Contender("x emulated", "blocking")
    job = Job("training", contender, _WORK, Method(), {}, tmp_path, lambda text: None)
    assert isinstance(Loop.of(job, Training(_WORK)).engine, bus.Bus)
    assert isinstance(Loop.of(job, Training(_WORK), Blocking()).engine, bus.Bus)
