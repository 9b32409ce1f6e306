"""Arguments that are wrong or in the wrong place: lightck's own error says what to write."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lightck

Call = Callable[..., Any]
CALLS = [pytest.param(lightck.attach, id="attach"), pytest.param(lightck.restore, id="restore")]


class Net(nn.Linear):
    """The model."""

    def __init__(self) -> None:
        super().__init__(2, 2)


class Wrapper:
    """Some frameworks make this of an optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer


MODEL = Net()
SGD = torch.optim.SGD(MODEL.parameters(), lr=0.1)
SCHEDULE = torch.optim.lr_scheduler.StepLR(SGD, 1)


def _refused(call: Call, run_dir: Path, *arguments: Any, **named: Any) -> str:
    """Check that the call is refused and nothing was made; return the message."""
    with pytest.raises(lightck.ConfigError) as caught:
        call(*arguments, **named)
    assert not run_dir.exists()
    print(caught.value)
    return str(caught.value).replace(call.__name__, "CALL")


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    ("arguments", "named", "said"),
    [
        # What was found, and what to write instead.
        ((MODEL, "run"), {}, "optimizer .*found 'run': write CALL(model, path='run')"),
        ((MODEL, Path("run")), {}, "write CALL(model, path='run')"),
        ((MODEL, "run", SGD), {}, "write CALL(model, path='run')"),
        ((SGD, MODEL), {}, "found an object of type SGD: write CALL(model, optimizer,.*swapped"),
        ((SGD,), {}, "model .*found an object of type SGD: write CALL(model, optimizer, ...)"),
        (
            (MODEL.state_dict(), SGD),
            {},
            "model .*OrderedDict: write CALL(model, .*the module itself",
        ),
        (
            (list(MODEL.parameters()), SGD),
            {},
            "model .*Parameter: write CALL(model, .*the module itself",
        ),
        (("run",), {}, "model .*found 'run': write CALL(model, optimizer, path='run')"),
        ((Net,), {}, "model .*found the class Net: write CALL(Net(...), ...)"),
        ((None,), {}, "model .*found None: write CALL(model, ...)"),
        (([],), {}, "model .*a list of some, found an object of type list"),
        (([MODEL, SGD],), {}, "model .*found an object of type SGD"),
        ((MODEL, MODEL), {}, "optimizer .*type Net: write CALL([model_a, model_b], ...)"),
        ((MODEL, SGD.state_dict()), {}, "optimizer .*type dict.*not its state_dict"),
        ((MODEL, SCHEDULE), {}, "optimizer .*write CALL(model, optimizer, extras={'steplr': ...})"),
        ((MODEL, Wrapper(SGD)), {}, "optimizer .*write CALL(model, wrapper.optimizer, ...)"),
        ((MODEL, [SGD, "run"]), {}, "optimizer .*found 'run'"),
        ((MODEL, torch.optim.SGD), {}, "optimizer .*found the class SGD"),
        ((MODEL, SGD, {"schedule": SCHEDULE}), {}, "path .*type dict: write extras={...}"),
        ((MODEL, SGD, lightck.Config()), {}, "path .*type Config: write config=config"),
        ((MODEL, SGD, "run", {"schedule": SCHEDULE}), {}, "by position, .*: write extras={...}"),
        ((MODEL, SGD, "run", SCHEDULE), {}, "by position, .*: write extras={'steplr': ...}"),
        ((MODEL,), {"extras": [SCHEDULE]}, "extras .*type list: write extras={'steplr': ...}"),
        ((MODEL,), {"extras": SCHEDULE}, "extras .*type StepLR: write extras={'steplr': ...}"),
        ((MODEL,), {"extras": lightck.at_step(SCHEDULE)}, "write extras={'steplr': ...}"),
        ((MODEL,), {"extras": []}, "extras .*write extras={'name': object}"),
        ((MODEL,), {"extra": {}}, "extra = .*did you mean extras? arguments are model"),
        ((MODEL,), {"scheduler": SCHEDULE}, "scheduler = .*StepLR; did you mean extras?"),
        ((MODEL,), {"checkpoint_dir": "x"}, "checkpoint_dir = 'x'; did you mean path?"),
        ((MODEL,), {"optimiser": SGD}, "optimiser = .*SGD; did you mean optimizer?"),
        ((MODEL,), {"qwertz": 3}, "unknown argument qwertz = 3; arguments are model"),
        ((MODEL, SGD, "s3://bucket/run"), {}, "path = 's3://bucket/run' .*s3:/... .*export"),
        ((MODEL, SGD, Path("gs://bucket")), {}, "gs:/... with `lightck export`"),
        ((MODEL, SGD, "file:///dev/shm/run"), {}, "not a URL: write '/dev/shm/run'"),
    ],
)
def test_wrong_arguments_are_told_what_was_found_and_what_to_write(
    call: Call,
    arguments: tuple[Any, ...],
    named: dict[str, Any],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    message = _refused(call, tmp_path / "run", *arguments, **named)
    pattern = ".*".join(re.escape(part) for part in said.split(".*"))
    assert re.search(pattern, message), message
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ({"every": 10}, "every = 10; did you mean policy?"),
        ({"save_interval_steps": 10}, "did you mean policy?"),
        ({"folder": "x"}, "did you mean path?"),
        ({"slot": 3}, "slot = 3; did you mean slots?"),
        ({"boundry": SGD}, "did you mean boundary?"),
        ({"boundary": "end"}, "boundary must be .*found 'end'"),
    ],
)
def test_what_peers_call_a_setting_of_attach_is_known(
    named: dict[str, Any], said: str, run_dir: Path
) -> None:
    message = _refused(lightck.attach, run_dir, MODEL, SGD, run_dir, **named)
    assert re.search(".*".join(re.escape(part) for part in said.split(".*")), message), message


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ({"every": 10}, "every = 10; policy is an argument of attach"),
        ({"overwrite": True}, "overwrite is an argument of attach"),
        ({"stict": False}, "did you mean strict?"),
        ({"step": "newest"}, "step must be .*'latest' or 'exact', found 'newest'"),
        ({"step": True}, "found True"),
        ({"step": -1}, "found -1"),
        ({"strict": "no"}, "strict must be True or False, found 'no'"),
    ],
)
def test_restore_says_what_belongs_to_attach_and_what_its_own_may_be(
    named: dict[str, Any], said: str, run_dir: Path
) -> None:
    message = _refused(lightck.restore, run_dir, MODEL, SGD, run_dir, **named)
    assert re.search(".*".join(re.escape(part) for part in said.split(".*")), message), message


def test_an_interval_in_the_place_of_an_optimizer_or_a_path_is_the_policy(run_dir: Path) -> None:
    for arguments in ((MODEL, 10), (MODEL, SGD, 10), (MODEL, SGD, run_dir, 10)):
        assert "policy=10" in _refused(lightck.attach, run_dir, *arguments)


def test_iterables_of_modules_and_optimizers_are_taken(run_dir: Path) -> None:
    models = (nn.Linear(2, 2), nn.Linear(2, 2))
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in models]
    with lightck.attach(iter(models), iter(optimizers), run_dir, failure="off") as handle:  # type: ignore[arg-type]
        models[1](models[0](torch.ones(1, 2))).sum().backward()
        for each in optimizers:
            each.step()
    assert handle.step == 1
