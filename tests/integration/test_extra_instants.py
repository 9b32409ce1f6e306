"""Extras whose instant cannot be known are refused; those that move at another are found out."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import lightck
from lightck.loop import extra_movement
from lightck.state.extras import parse
from support.loops import adam_loop, attach, mlp, steps_at

BOTH = r"lightck\.at_step\(it\) takes it .* drawn.*lightck\.at_forward\(it\) takes it .* forward"


class Stateful:
    """Each of the classes below has this state."""

    def __init__(self) -> None:
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class Lite(Stateful):
    """A loader as in build-nanogpt."""

    def next_batch(self) -> torch.Tensor:
        self.at += 1
        return torch.full((2, 16), float(self.at))


class Iterable(Stateful):
    def __iter__(self) -> Any:
        return iter(())


class Iterator(Stateful):
    def __next__(self) -> Any:
        raise StopIteration


class Window(Stateful, list[int]):
    """The last values of something."""


@pytest.mark.parametrize("kind", [Lite, Window])
def test_an_extra_whose_instant_cannot_be_known_is_refused_with_what_to_write(
    run_dir: Path, kind: type
) -> None:
    extra = kind()
    with pytest.raises(lightck.StateError, match=BOTH) as caught:
        attach(run_dir, adam_loop(), extras={"data": extra})
    assert caught.value.path == "extras/data" and kind.__name__ in str(caught.value)
    assert not run_dir.exists()
    for told in (lightck.at_step(extra), lightck.at_forward(extra)):
        attach(run_dir, adam_loop(), extras={"data": told}, overwrite=True).close()
    assert lightck.restore(adam_loop().model, None, run_dir, extras={"data": extra}) is None


def test_what_is_known_is_taken_at_its_instant_without_a_word(run_dir: Path) -> None:
    optimizer = torch.optim.SGD(mlp(4, 1).parameters(), lr=0.1)
    known = {
        "schedule": torch.optim.lr_scheduler.StepLR(optimizer, 2),
        "plateau": torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer),
        "scaler": torch.amp.GradScaler("cpu"),
        "module": torch.nn.BatchNorm1d(4),
        "average": torch.optim.swa_utils.AveragedModel(mlp(4, 1)),
        "sampler": lightck.ResumableSampler(range(8)),
        "iterable": Iterable(),
        "iterator": Iterator(),
        "counters": {"seen": 0},
        "dice": torch.Generator(),
    }
    attach(run_dir, adam_loop(), extras=known).close()
    instants = {extra.name: extra.instant for extra in parse(known)}
    assert {name for name, at in instants.items() if at == "step"} == {
        "sampler", "iterable", "iterator",
    }  # fmt: skip
    assert {name for name, at in instants.items() if at == "both"} == {"dice"}


class Counting(torch.utils.data.Dataset[torch.Tensor]):
    """Calls something for each item that is made."""

    def __init__(self, call: Callable[[], object]) -> None:
        self.call = call

    def __len__(self) -> int:
        return 64

    def __getitem__(self, i: int) -> torch.Tensor:
        self.call()
        return torch.full((16,), float(i))


class Job:
    """A model that is fed by a sampler with a position."""

    def __init__(self, call: Callable[[], object]) -> None:
        self.loop = adam_loop()
        data = Counting(call)
        self.sampler = lightck.ResumableSampler(data)
        self.loader = DataLoader(data, batch_size=1, sampler=self.sampler)

    def run(
        self,
        steps: int,
        before: Callable[[], object] = lambda: None,
        behind: Callable[[], object] = lambda: None,
    ) -> None:
        """Train so many steps of an epoch; call `before` before each draw, `behind` after it."""
        batches = iter(self.loader)
        for _ in range(steps):
            before()
            batch = next(batches)
            behind()
            self.loop.model(batch).square().mean().backward()
            self.loop.update()


class Events(logging.Handler):
    """This handler collects the events of extras that moved."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.seen: list[dict[str, Any]] = []
        logging.getLogger("lightck").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        if getattr(record, "lightck_event", "") == "extra_moved":
            self.seen.append(record.lightck)  # type: ignore[attr-defined]


@pytest.fixture
def moved() -> Any:
    handler = Events()
    yield handler.seen
    logging.getLogger("lightck").removeHandler(handler)


def advance(counters: dict[str, Any]) -> None:
    counters["drawn"] = counters.get("drawn", 0) + 1


@pytest.mark.parametrize("failure", ["jit", "off"])
@pytest.mark.parametrize("told", [False, True])
def test_counters_that_move_while_a_batch_is_drawn_are_an_error_before_a_snapshot_has_them(
    run_dir: Path, told: bool, failure: str
) -> None:
    counters: dict[str, Any] = {}
    job = Job(lambda: advance(counters))
    given = lightck.at_forward(counters) if told else counters
    extras = {"data": job.sampler, "counters": given}
    with (
        pytest.raises(lightck.StateError, match=r"extras\['counters'\].*while a batch was drawn"),
        attach(run_dir, job.loop, extras=extras, failure=failure),
    ):
        job.run(8)
    assert job.loop.step == 1
    assert steps_at(run_dir) == []


def test_counters_that_were_told_to_be_the_data_s_come_back_with_the_position(
    run_dir: Path,
) -> None:
    counters: dict[str, Any] = {}
    job = Job(lambda: advance(counters))
    extras = {"data": job.sampler, "counters": lightck.at_step(counters)}
    with attach(run_dir, job.loop, extras=extras, policy=3) as handle:
        job.run(4)  # the forward of step 4 has taken the snapshot of step 3
        handle.wait(3)
        stored = lightck.load(run_dir, 3)["extras"]
        assert stored["counters"] == {"drawn": 3}
        assert stored["data"]["consumed"] == 3
    assert handle.stats().moved_in_draws == 0


def test_an_object_that_was_told_wrongly_is_found_out_like_a_dict(run_dir: Path) -> None:
    lite = Lite()
    job = Job(lite.next_batch)
    extras = {"data": job.sampler, "lite": lightck.at_forward(lite)}
    handle = attach(run_dir, job.loop, extras=extras)
    with pytest.raises(lightck.StateError, match=r"extras\['lite'\].*at_step"):
        job.run(8)
    assert not handle.snapshot_now("for the test").fresh
    handle.detach()
    assert steps_at(run_dir) == []


def test_movement_later_in_a_run_is_told_once_and_counted(
    run_dir: Path, moved: list[dict[str, Any]]
) -> None:
    counters: dict[str, Any] = {}
    job = Job(lambda: job.loop.step > extra_movement.FIRST_STEPS and advance(counters))
    extras = {"data": job.sampler, "counters": lightck.at_forward(counters)}
    with attach(run_dir, job.loop, extras=extras) as handle:
        job.run(extra_movement.FIRST_STEPS + 5)
        assert handle.stats().moved_in_draws == 4
    assert [each["name"] for each in moved] == ["counters"]
    assert "at_step" in moved[0]["why"]


def test_what_takes_long_to_look_at_is_looked_at_in_the_first_steps_only(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[int] = []
    original = extra_movement._mark_of

    def look(extra: Any) -> Any:
        looks.append(job.loop.step)
        return original(extra)

    monkeypatch.setattr(extra_movement, "_mark_of", look)
    monkeypatch.setattr(extra_movement, "MOST_S", 0.0)
    job = Job(lambda: None)
    extras = {"data": job.sampler, "counters": {}, "told": lightck.at_forward({})}
    with attach(run_dir, job.loop, extras=extras):
        job.run(extra_movement.FIRST_STEPS + 4)
    assert set(looks) == {*range(extra_movement.FIRST_STEPS + 1)}


@pytest.mark.parametrize("told", [None, lightck.at_step, lightck.at_forward])
def test_a_dict_that_moves_where_no_draw_is_seen_is_told_once_with_both_words(
    run_dir: Path, moved: list[dict[str, Any]], told: Any
) -> None:
    counters: dict[str, Any] = {"drawn": 0, "loss": float("nan")}
    loop = adam_loop()
    given = told(counters) if told else counters
    with attach(run_dir, loop, extras={"counters": given, "still": {"a": float("nan")}}) as handle:
        for _ in range(4):
            advance(counters)
            loop.run(1)
        assert handle.stats().moved_in_draws == 0
    assert len(moved) == (told is None)
    assert all("at_step" in each["why"] and "at_forward" in each["why"] for each in moved)


@pytest.mark.parametrize("where", ["before", "behind"])
def test_a_dict_that_moves_before_a_draw_that_is_seen_is_the_step_s(
    run_dir: Path, moved: list[dict[str, Any]], where: str
) -> None:
    """A dict that moves behind the draw, and before the forward, may be the next step's."""
    counters: dict[str, Any] = {}
    job = Job(lambda: None)
    with attach(run_dir, job.loop, extras={"data": job.sampler, "counters": counters}):
        job.run(3, **{where: lambda: advance(counters)})
    assert len(moved) == (where == "behind")


@pytest.mark.parametrize(
    "value",
    [
        torch.zeros(3), torch.zeros((), dtype=torch.bfloat16), torch.zeros(0), torch.ones(2000),
        torch.zeros(2, 2).to_sparse(), {"a": [1, 2.0, float("nan")]}, {1, 2}, b"x", None, 3 + 1j,
    ],
)  # fmt: skip
def test_what_has_not_moved_looks_as_before(value: Any) -> None:
    same = copy.deepcopy(value)
    assert extra_movement._mark({"v": value}) == extra_movement._mark({"v": same})
    assert extra_movement._mark([value, np.arange(3)]) != extra_movement._mark(
        [value, np.arange(1, 4)]
    )
    assert extra_movement._mark([value, 1]) != extra_movement._mark([value, True])
