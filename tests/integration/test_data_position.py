"""Data positions through attach and restore, in one process: the example, epochs, wrong use."""

from __future__ import annotations

import inspect
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import lightck
from lightck.data import lookahead

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


class Learner:
    """A plain loop over whatever gives batches."""

    def __init__(self) -> None:
        self.model, self.optimizer = fresh()

    def run(self, batches: Any, steps: int) -> list[list[float]]:
        seen = []
        for x, _ in batches:
            learn(self.model, self.optimizer, x)
            seen.append(x[:, 0].tolist())
            if len(seen) == steps:
                break
        return seen


def test_stateful_loader_whose_iterator_is_a_generator_is_followed(run_dir: Path) -> None:
    torchdata = pytest.importorskip(TORCHDATA, reason="SKIPPED: torchdata is not installed")

    class Scaling(torchdata.StatefulDataLoader):  # type: ignore[name-defined,misc]
        def __iter__(self) -> Any:
            for x, y in super().__iter__():
                yield 2 * x, y

    held = data()
    whole = Learner().run(Scaling(held, batch_size=8), 5)
    first, loader = Learner(), Scaling(held, batch_size=8)
    with lightck.attach(first.model, first.optimizer, run_dir, extras={"data": loader}):
        assert first.run(loader, 2) == whole[:2]
    second, loader = Learner(), Scaling(held, batch_size=8)
    lightck.restore(second.model, second.optimizer, run_dir, extras={"data": loader})
    with lightck.attach(second.model, second.optimizer, run_dir, extras={"data": loader}):
        assert second.run(loader, 5) == whole[2:]


def prepared(loader: DataLoader[Any], *, stateful: bool) -> Any:
    accelerate = pytest.importorskip("accelerate", reason="SKIPPED: accelerate is not installed")
    kept = accelerate.utils.DataLoaderConfiguration(use_stateful_dataloader=stateful)
    return accelerate.Accelerator(cpu=True, dataloader_config=kept).prepare(loader)


@pytest.mark.parametrize(
    ("stateful", "workers", "why"),
    [
        (True, 1, "num_workers=1.*sampler=lightck.ResumableSampler.*or take num_workers=0"),
        (False, 0, "has no position: .*sampler=lightck.ResumableSampler"),
    ],
)
def test_loader_of_accelerates_whose_position_is_not_known_is_refused_with_the_way_out(
    run_dir: Path, stateful: bool, workers: int, why: str
) -> None:
    loader = prepared(DataLoader(data(), batch_size=8, num_workers=workers), stateful=stateful)
    for use in (lightck.restore, lightck.attach):
        with pytest.raises(lightck.StateError, match=rf"extras\['data'\] is Accelerate's.*{why}"):
            use(*fresh(), run_dir, extras={"data": loader})


def test_an_optimizer_that_accelerate_has_prepared_is_the_one_inside_of_it(run_dir: Path) -> None:
    accelerate = pytest.importorskip("accelerate", reason="SKIPPED: accelerate is not installed")
    model, inner = fresh()
    optimizer = accelerate.Accelerator(cpu=True).prepare(inner)
    with lightck.attach(model, optimizer, run_dir, boundary=optimizer) as handle:
        for _ in range(3):
            learn(model, optimizer, torch.ones(1, 4))
        assert handle.step == 3
    for given in (inner, optimizer):
        info = lightck.restore(model, [given], run_dir)
        assert info is not None and info.step >= 2


def test_stateful_loader_inside_accelerates_is_refused(run_dir: Path) -> None:
    loader = prepared(DataLoader(data(), batch_size=8), stateful=True)
    with lightck.attach(*fresh(), run_dir, extras={"data": loader.base_dataloader}):
        with pytest.raises(lightck.ConfigError, match="a batch too far; give the loader that"):
            next(iter(loader))


def test_two_loaders_that_hold_a_batch_when_a_step_ends_are_refused(run_dir: Path) -> None:
    one = prepared(DataLoader(data(), batch_size=8), stateful=False)
    other = prepared(DataLoader(data(), batch_size=8), stateful=False)
    model, optimizer = fresh()
    with pytest.raises(lightck.StateError, match="2 loaders of Accelerate's hold a batch"):
        with lightck.attach(model, optimizer, run_dir, on_error="raise"):
            for (x, _), (y, _) in zip(one, other, strict=True):
                learn(model, optimizer, x + y)


def test_extra_may_not_be_named_as_lightcks_own(run_dir: Path) -> None:
    with pytest.raises(lightck.StateError, match="begins with '@'"):
        lightck.attach(*fresh(), run_dir, extras={"@ahead": {}})


class Noisy(TensorDataset):
    def __getitem__(self, i: int) -> Any:
        x, y = super().__getitem__(i)
        return x + torch.rand(4), y


@pytest.mark.parametrize("persistent", [False, True])
def test_seeding_workers_moves_the_generator_as_far_as_torch_does(
    run_dir: Path, persistent: bool
) -> None:
    generator = torch.Generator()
    held = Noisy(*data(24).tensors)
    given = DataLoader(held, 4, num_workers=2, generator=generator, persistent_workers=persistent)
    loader = prepared(given, stateful=False)

    def after_a_pass() -> tuple[Any, torch.Tensor]:
        generator.manual_seed(5)
        drawn = [x for x, _ in loader]
        assert loader.base_dataloader.generator is generator
        return torch.stack(drawn), generator.get_state()

    with_none, state = after_a_pass()
    with lightck.attach(*fresh(), run_dir):
        first, again = after_a_pass(), after_a_pass()
    assert torch.equal(first[1], state) and torch.equal(again[1], state)
    assert torch.equal(first[0], again[0])
    assert not torch.equal(first[0], with_none)  # seeded for each batch


def test_accelerate_that_is_too_old_to_be_followed_is_refused(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = types.ModuleType("accelerate.data_loader")
    monkeypatch.setitem(sys.modules, "accelerate.data_loader", old)
    with pytest.raises(lightck.ConfigError, match="from accelerate 1.0 on"):
        lightck.attach(*fresh(), run_dir)


def test_stateful_loader_of_accelerates_that_is_no_extra_is_told_of(
    run_dir: Path, caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookahead, "_told", set())
    one, other = (prepared(DataLoader(data(), 8), stateful=True) for _ in range(2))
    with lightck.attach(*fresh(), run_dir, extras={"data": one}):
        assert len(list(one)) == 5
        assert not [r for r in caplog.records if r.lightck_event == "loader_not_kept"]
        assert len(list(other)) == len(list(other)) == 5
    told = [r.lightck["why"] for r in caplog.records if r.lightck_event == "loader_not_kept"]
    assert len(told) == 1 and "TensorDataset" in told[0] and "give it in extras" in told[0]


class Counting(TensorDataset):
    """Counts the samples that are made."""

    counters: dict[str, int]

    def __getitem__(self, i: int) -> Any:
        self.counters["made"] = self.counters.get("made", 0) + 1
        return super().__getitem__(i)


@pytest.mark.parametrize("where", ["sampler", "skip", "generator"])
@pytest.mark.parametrize("told", [lightck.at_step, lightck.at_forward])
def test_extra_that_moves_where_a_followed_batch_is_made_is_found(
    run_dir: Path, told: Any, where: str
) -> None:
    """The extra is found where the batch is one ahead, too: there no instant is the right one."""
    held = Counting(*data().tensors)
    held.counters = {}
    extras: dict[str, Any] = {"counters": told(held.counters)}
    learner = Learner()
    if where == "generator":
        torchdata = pytest.importorskip(TORCHDATA, reason="SKIPPED: torchdata is not installed")

        class Given(torchdata.StatefulDataLoader):  # type: ignore[name-defined,misc]
            def __iter__(self) -> Any:
                yield from super().__iter__()

        loader = extras["data"] = Given(held, batch_size=8)
    else:
        sampler = lightck.ResumableSampler(held) if where == "sampler" else None
        loader = prepared(DataLoader(held, 8, sampler=sampler), stateful=False)
        extras |= {"data": sampler} if sampler is not None else {}
    handle = lightck.attach(learner.model, learner.optimizer, run_dir, extras=extras)
    if where == "generator" and told is lightck.at_step:
        with handle:
            assert len(learner.run(loader, 4)) == 4
        return
    ahead = "be ahead by one" if where == "generator" else "ahead of its step"
    with pytest.raises(lightck.StateError, match=rf"extras\['counters'\].*{ahead}"), handle:
        learner.run(loader, 4)


def test_counters_of_the_loop_and_of_a_validation_are_no_movement_under_accelerate(
    run_dir: Path,
) -> None:
    """The counts of a validation are not drawn again."""
    held = Counting(*data().tensors)
    held.counters = {}
    loader = prepared(DataLoader(data(), 8), stateful=False)
    validation = prepared(DataLoader(held, 8), stateful=False)
    place = {"seen": 0}
    extras = {"made": lightck.at_forward(held.counters), "place": lightck.at_step(place)}
    model, optimizer = fresh()
    with lightck.attach(model, optimizer, run_dir, extras=extras) as handle:
        for _ in range(2):
            for x, _ in loader:
                place["seen"] += 1
                learn(model, optimizer, x)
                assert len(list(validation)) == 5
        assert handle.stats().moved_in_draws == 0


@pytest.mark.parametrize("looked", ["train", "validation"])
def test_look_at_data_around_the_first_draw_of_an_epoch_keeps_its_place(
    run_dir: Path, looked: str
) -> None:
    """Under Accelerate, with nothing but counters as the position."""
    held, other = Noisy(*data().tensors), Noisy(*data().tensors)

    def run(learner: Learner, start: int, handle: Any = None) -> list[Any]:
        loader = prepared(DataLoader(held, 8), stateful=False)
        behind = prepared(DataLoader(held if looked == "train" else other, 4), stateful=False)
        seen = []
        for _ in range(start // 5, 2):
            for i, (x, _) in enumerate(loader):
                if i == 0 and looked == "validation":
                    next(iter(behind))
                learn(learner.model, learner.optimizer, x)
                seen.append(x[:, 0].tolist())
                if handle is not None and len(seen) == 6:
                    return seen
            if looked == "train":
                next(iter(behind))
        return seen

    left_over = iter(prepared(DataLoader(other, 4), stateful=False))
    next(left_over)
    torch.manual_seed(3)
    whole = run(Learner(), 0)
    torch.manual_seed(3)
    first = Learner()
    with lightck.attach(first.model, first.optimizer, run_dir, policy=5) as handle:
        assert run(first, 0, handle) == whole[:6]
    second = Learner()
    assert lightck.restore(second.model, second.optimizer, run_dir, step=5) is not None
    assert run(second, 5) == whole[5:]
