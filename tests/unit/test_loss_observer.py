"""The loss observer gives each step's loss, and the training does not feel it."""

from __future__ import annotations

import gc
import math
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import optimizer as torch_hooks
from torch.utils.checkpoint import checkpoint

from lightck.device import lookup
from lightck.loop import hooks, loss_observer
from lightck.loop.loss_observer import MOST_WAITING, LossObserver
from support.emulated import EmulatedDevice, devices


@pytest.fixture
def observer() -> Iterator[LossObserver]:
    made = LossObserver()
    yield made
    made.stop()


def number(value: float, **options: Any) -> torch.Tensor:
    """A loss of this value, which depends on a parameter."""
    return nn.Parameter(torch.tensor(value, **options)) * 1


class Training:
    """A small model and its loop; every draw comes from one seed."""

    def __init__(self, kind: Any = torch.optim.SGD, compiled: bool = False) -> None:
        torch.manual_seed(29)
        self.plain = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 1))
        self.model: Any = torch.compile(self.plain, backend="aot_eager") if compiled else self.plain
        self.optimizer = kind(self.plain.parameters(), lr=0.05)
        self.losses: list[float] = []

    def loss(self) -> torch.Tensor:
        loss: torch.Tensor = (self.model(torch.randn(6, 4)) - 1).square().mean()
        self.losses.append(loss.item())
        return loss

    def closure(self) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = self.loss()
        loss.backward()
        return loss

    def run(self, steps: int, after: Callable[[], object] = lambda: None) -> None:
        for _ in range(steps):
            self.closure()
            self.optimizer.step()
            after()


# ---- what counts -------------------------------------------------------------------------------


def in_eager(loss: torch.Tensor) -> None:
    loss.backward()


def by_function(loss: torch.Tensor) -> None:
    torch.autograd.backward(loss)


def in_a_list(loss: torch.Tensor) -> None:
    torch.autograd.backward(tensors=[loss])


def with_a_gradient(loss: torch.Tensor) -> None:
    loss.backward(torch.tensor(8.0))


def of_one_element(loss: torch.Tensor) -> None:
    loss.reshape(1).backward()


@pytest.mark.parametrize("way", [in_eager, by_function, in_a_list, with_a_gradient, of_one_element])
def test_a_loss_that_backward_is_called_on_is_the_step_s(
    observer: LossObserver, way: Callable[[torch.Tensor], None]
) -> None:
    way(number(2.5))
    assert observer.take() == [2.5]
    assert observer.take() == [], "it was taken"


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_each_step_s_loss_is_what_the_training_had(observer: LossObserver, compiled: bool) -> None:
    training, seen = Training(compiled=compiled), list[float]()
    training.run(5, lambda: seen.extend(observer.take()))
    assert seen == training.losses and len(seen) == 5


def test_a_step_compiled_as_a_whole_shows_its_loss_with_no_more_breaks() -> None:
    def breaks() -> int:
        training = Training()

        def step(x: torch.Tensor) -> torch.Tensor:
            training.plain(x).square().mean().backward()
            return x + 1

        torch._dynamo.reset()
        found = torch._dynamo.explain(step)(torch.ones(2, 4))  # type: ignore[no-untyped-call]
        return int(found.graph_break_count)

    before, observer = breaks(), LossObserver()
    assert breaks() == before
    assert len(observer.take()) == 1
    observer.stop()


def test_micro_batches_and_losses_of_one_step_are_added_up(observer: LossObserver) -> None:
    for value in (1.0, 2.0):
        number(value).backward()
    torch.autograd.backward((number(4.0), number(8.0)))
    assert observer.take() == [15.0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_a_loss_may_be_of_any_floating_type(observer: LossObserver, dtype: torch.dtype) -> None:
    number(0.375, dtype=dtype).backward()
    assert observer.take() == [0.375]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_no_number_is_given_as_it_is(observer: LossObserver, value: float) -> None:
    number(value).backward()
    number(1.0).backward()
    assert str(observer.take()) == str([value])


def test_opposite_infinities_of_one_step_are_no_number(observer: LossObserver) -> None:
    number(math.inf).backward()
    number(-math.inf).backward()
    assert math.isnan(observer.take()[0])


def of_several_elements() -> None:
    vector = nn.Parameter(torch.ones(3)) * 1
    vector.backward(torch.ones(3))


def with_create_graph() -> None:
    weight = nn.Parameter(torch.tensor(1.0))
    (gradient,) = torch.autograd.grad(weight.square(), weight, create_graph=True)
    torch.autograd.backward([number(3.0)], None, None, True)
    torch.autograd.backward(gradient, create_graph=True)
    weight.grad = None


def complex_() -> None:
    value = nn.Parameter(torch.tensor(1 + 1j)) * 1
    value.backward(torch.tensor(1 + 0j))


def on_another_thread() -> None:
    thread = threading.Thread(target=number(3.0).backward)
    thread.start()
    thread.join()


def of_a_subclass() -> None:
    class Mine(torch.Tensor):
        pass

    number(3.0).as_subclass(Mine).backward()  # type: ignore[no-untyped-call]


def by_grad() -> None:
    weight = nn.Parameter(torch.tensor(1.0))
    torch.autograd.grad(weight.square(), weight)


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True")
@pytest.mark.parametrize(
    "way",
    [of_several_elements, with_create_graph, complex_, on_another_thread, of_a_subclass, by_grad],
)
def test_what_is_no_loss_does_not_count(observer: LossObserver, way: Callable[[], None]) -> None:
    way()
    assert observer.take() == []
    number(2.0).backward()
    assert observer.take() == [2.0]


def test_losses_of_an_iterator_are_left_to_backward(observer: LossObserver) -> None:
    weight = nn.Parameter(torch.tensor(1.0))
    torch.autograd.backward(iter([weight * 2, weight * 3]))  # type: ignore[arg-type]
    assert weight.grad is not None and weight.grad.item() == 5.0
    assert observer.take() == []


def test_a_reentrant_checkpoint_of_the_loss_does_not_count_twice(observer: LossObserver) -> None:
    weight = nn.Parameter(torch.tensor(3.0))
    loss: Any = checkpoint(lambda x: x * 2, weight, use_reentrant=True)
    (loss * 1).backward()
    assert observer.take() == [6.0]


def test_the_thread_that_takes_is_the_training_s(observer: LossObserver) -> None:
    seen: list[float] = []

    def train() -> None:
        observer.take()
        number(7.0).backward()
        seen.extend(observer.take())

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert seen == [7.0]
    number(1.0).backward()
    assert observer.take() == []


# ---- closures ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [torch.optim.LBFGS, torch.optim.SGD])
def test_of_a_closure_that_is_called_many_times_the_first_loss_counts(
    observer: LossObserver, kind: Any
) -> None:
    training, seen, first = Training(kind), list[float](), list[float]()
    for _ in range(3):
        first.append(len(training.losses))
        training.optimizer.step(training.closure)
        seen += observer.take()
    assert len(training.losses) > 3 or kind is not torch.optim.LBFGS
    assert seen == [training.losses[int(at)] for at in first]


def test_each_of_several_optimizers_has_its_first_and_what_follows_them_counts(
    observer: LossObserver,
) -> None:
    one, other = Training(torch.optim.LBFGS), Training(torch.optim.LBFGS)
    for each in (one, other):
        each.optimizer.step(each.closure)
    assert observer.take() == [one.losses[0] + other.losses[0]]
    for value in (1.0, 2.0):
        number(value).backward()
    assert observer.take() == [3.0], "no longer inside of a step"


def test_a_step_before_which_losses_are_taken_has_its_first(observer: LossObserver) -> None:
    training = Training(torch.optim.LBFGS)
    training.optimizer.register_step_pre_hook(lambda *_: observer.take().clear())
    training.optimizer.step(training.closure)
    assert observer.take() == training.losses[:1]


def test_losses_count_again_after_a_step_that_raised(observer: LossObserver) -> None:
    training = Training()

    def closure() -> torch.Tensor:
        training.closure()
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        training.optimizer.step(closure)
    observer.take()
    training.losses.clear()
    seen: list[float] = []
    training.run(3, lambda: seen.extend(observer.take()))
    assert seen == training.losses


def test_closures_of_optimizers_are_believed_as_without_an_observer(observer: LossObserver) -> None:
    newest = [*torch_hooks._global_optimizer_pre_hooks.values()][-1]
    assert newest in hooks.OURS, "others' hooks may change state, and are not believed"


# ---- gradient scalers --------------------------------------------------------------------------


class Doubling(torch.amp.GradScaler):  # as torch's ShardedGradScaler, it has a `scale` of its own
    def scale(self, outputs: Any) -> Any:
        return super().scale(super().scale(outputs))


def scaler(kind: Any = torch.amp.GradScaler, enabled: bool = True) -> Any:
    return kind("cpu", init_scale=1024.0, enabled=enabled)


@pytest.mark.parametrize("kind", [torch.amp.GradScaler, Doubling])
@pytest.mark.parametrize("enabled", [True, False])
def test_a_scaled_loss_counts_as_it_was(observer: LossObserver, kind: Any, enabled: bool) -> None:
    scaling = scaler(kind, enabled)
    for _ in range(2):
        scaling.scale(number(1.5)).backward()
    torch.autograd.backward(scaling.scale([number(2.0), number(3.0)]))
    assert observer.take() == [8.0]


def test_of_what_a_scaler_gave_only_what_is_known_counts(observer: LossObserver) -> None:
    scaling = scaler()
    (scaling.scale(number(1.5)) / 4).backward()
    assert observer.take() == []
    number(2.0).backward()  # the scaler is not used in this step
    assert observer.take() == [2.0]


def test_a_scaled_loss_is_not_kept(observer: LossObserver) -> None:
    loss = number(1.5)
    scaled = scaler().scale(loss)
    scaled.backward()
    there = weakref.ref(loss)
    del loss
    gc.collect()
    assert there() is None, "nor is its graph"
    del scaled
    gc.collect()
    assert not len(observer._unscaled)


# ---- the training feels nothing ----------------------------------------------------------------


def test_a_training_is_the_same_bit_for_bit() -> None:
    observed, alone = Training(torch.optim.AdamW), Training(torch.optim.AdamW)
    observer, seen = LossObserver(), list[float]()
    torch.manual_seed(5)
    observed.run(20, lambda: seen.extend(observer.take()))
    state = torch.get_rng_state()
    observer.stop()
    torch.manual_seed(5)
    alone.run(20)
    assert torch.equal(state, torch.get_rng_state())
    assert observed.losses == alone.losses == seen
    for one, other in zip(observed.plain.parameters(), alone.plain.parameters(), strict=True):
        assert torch.equal(one, other)


def test_an_error_of_backward_passes_and_its_loss_does_not_count(observer: LossObserver) -> None:
    loss = number(2.0)
    loss.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()
    with pytest.raises(TypeError, match="unexpected keyword"):
        torch.autograd.backward(number(1.0), unknown=1)  # type: ignore[call-arg]
    number(4.0).backward()
    assert observer.take() == [6.0]


def test_an_error_in_here_is_told_once_and_never_the_training_s(
    observer: LossObserver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(tensor: torch.Tensor) -> None:
        raise OSError("no such device")

    monkeypatch.setattr(lookup, "finders", [broken])
    weight = nn.Parameter(torch.tensor(1.0))
    for _ in range(3):
        (weight * 2).backward()
    assert weight.grad is not None and weight.grad.item() == 6.0
    told = [r.__dict__["lightck"] for r in caplog.records if hasattr(r, "lightck_event")]
    assert told == [{"error": "OSError('no such device')"}]
    assert observer.take() == []
    observer.report(3.0)
    assert observer.take() == [3.0]


# ---- reports, and the end ----------------------------------------------------------------------


def test_reported_losses_take_over_for_good(observer: LossObserver) -> None:
    watching = len(torch_hooks._global_optimizer_pre_hooks)
    number(2.0).backward()
    observer.report(5.0)
    observer.report(6.0)
    number(3.0).backward()
    assert observer.take() == [6.0], "the last that was reported"
    number(4.0).backward()
    assert observer.take() == []
    assert len(torch_hooks._global_optimizer_pre_hooks) == watching - 1, "nothing is observed"


def test_behind_stop_nothing_is_observed_and_others_wrappers_stay() -> None:
    observer, calls = LossObserver(), list[str]()
    below: Any = torch.autograd.backward

    @wraps(below)
    def others(*args: Any, **kwargs: Any) -> Any:
        calls.append("others")
        return below(*args, **kwargs)

    torch.autograd.backward = others
    try:
        number(1.0).backward()
        observer.stop()
        observer.stop()
        number(2.0).backward()
        assert calls == ["others", "others"] and observer.take() == []
        later = LossObserver()
        number(3.0).backward()
        assert later.take() == [3.0] and torch.autograd.backward is others
        later.stop()
    finally:
        torch.autograd.backward = below


def test_stop_leaves_no_hook_and_one_wrapper() -> None:
    count = len(torch_hooks._global_optimizer_pre_hooks)
    first = LossObserver()
    wrapped = torch.autograd.backward
    second = LossObserver()
    assert torch.autograd.backward is wrapped, "wrapped once for the process"
    number(1.0).backward()
    assert first.take() == second.take() == [1.0]
    first.stop()
    second.stop()
    assert len(torch_hooks._global_optimizer_pre_hooks) == count


# ---- devices: to read their memory, but by a stream, is to die of SIGSEGV ---------------------


class Loss(torch.autograd.Function):
    """A loss on a device, which computes it late."""

    @staticmethod
    def forward(
        context: Any, weight: torch.Tensor, device: EmulatedDevice, value: float, seconds: float
    ) -> torch.Tensor:
        loss = device.empty(())
        device.overwrite(loss, torch.tensor(value), seconds)
        return loss

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> Any:
        return torch.ones(()), None, None, None


def on_device(device: EmulatedDevice, value: float, seconds: float = 0.0) -> None:
    loss: Any = Loss.apply(nn.Parameter(torch.zeros(())), device, value, seconds)
    loss.backward()
    device.overwrite(loss, torch.tensor(-1.0))  # as a CUDA graph's next replay does


def test_a_device_s_loss_is_given_once_it_is_there_and_never_waited_for(
    observer: LossObserver,
) -> None:
    device, go_on = EmulatedDevice(), threading.Event()
    with devices(device):
        device.current.queue(lambda: go_on.wait(60) and None)
        for value in (1.0, 2.0):
            on_device(device, value)
            on_device(device, 10.0)
            assert observer.take() == [], "the device has not come to it"
        number(5.0).backward()
        assert observer.take() == [], "oldest first"
        go_on.set()
        device.compute.finish()
        assert observer.take() == [11.0, 12.0, 5.0]


def test_not_more_than_a_few_steps_wait_for_a_device(observer: LossObserver) -> None:
    device, go_on = EmulatedDevice(), threading.Event()
    with devices(device):
        device.current.queue(lambda: go_on.wait(60) and None)
        for step in range(MOST_WAITING + 3):
            on_device(device, float(step))
            assert observer.take() == []
        go_on.set()
        device.compute.finish()
        assert observer.take() == [float(step) for step in range(MOST_WAITING)]
        on_device(device, 50.0)
        device.compute.finish()
        assert observer.take() == [50.0]


def test_a_step_of_which_a_loss_finds_no_slot_is_not_given(observer: LossObserver) -> None:
    device, go_on = EmulatedDevice(), threading.Event()
    with devices(device):
        device.current.queue(lambda: go_on.wait(60) and None)
        on_device(device, 9.0)
        observer.take()
        for _ in range(100):
            on_device(device, 1.0)
        observer.take()
        go_on.set()
        device.compute.finish()
        for _ in range(40):  # places are written again
            on_device(device, 1.0)
        seen = observer.take()
        device.compute.finish()
        assert seen + observer.take() == [9.0, 40.0]


def test_an_observer_goes_on_with_the_memory_of_one_that_has_ended() -> None:
    device, go_on = EmulatedDevice(), threading.Event()
    with devices(device):
        device.current.queue(lambda: go_on.wait(60) and None)
        observer = LossObserver()
        on_device(device, 1.0)
        observer.stop()  # its copy comes later
        device.hangs = True  # and a driver is asked for no more memory
        observer = LossObserver()
        on_device(device, 2.0)
        observer.take()
        go_on.set()
        device.compute.finish()
        assert observer.take() == [2.0]
        observer.stop()
        device.hangs = False


def test_pinned_memory_is_never_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    device, made = EmulatedDevice(), list[weakref.ref[torch.Tensor]]()

    def pinned(size: int) -> torch.Tensor:
        place = EmulatedDevice.pinned(device, size)
        made.append(weakref.ref(place))
        return place

    monkeypatch.setattr(device, "pinned", pinned)
    with devices(device):
        observer = LossObserver()
        on_device(device, 1.0)
        observer.stop()
    loss_observer._rings.clear()
    del observer
    gc.collect()
    assert [each() is not None for each in made] == [True]


def test_of_a_recorded_graph_and_of_an_unknown_device_nothing_counts(
    observer: LossObserver,
) -> None:
    device = EmulatedDevice()
    with devices(device):
        device.in_graph = True
        on_device(device, 1.0)
    number(1.0, device="meta").backward()
    assert observer.take() == []
    number(2.0).backward()
    assert observer.take() == [2.0], "and it goes on"


@pytest.mark.parametrize("when", ["at backward", "later"])
def test_a_device_that_fails_ends_it_and_the_training_hears_nothing(
    observer: LossObserver, caplog: pytest.LogCaptureFixture, when: str
) -> None:
    device = EmulatedDevice()
    with devices(device):
        if when == "later":
            device.compute.failure = OSError("an illegal access")
        else:
            device.broken = "an illegal access"
        on_device(device, 1.0)
        assert observer.take() == []
        device.compute.failure, device.broken = None, ""
    assert [r.__dict__.get("lightck_event") for r in caplog.records] == ["losses_unseen"]
