"""All that extras hold goes into the journal at every step: exactly, once, and up to a limit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_journal_entries import STEADY, Job, Never, with_peers
from torch import nn

import lightck
from lightck.journal.step_journal import RETRY_STEPS
from lightck.region.native_region import FENCE, STEP_END
from support import internals

Tree = dict[str, Any]

LARGE: dict[str, Callable[[Tree], Any]] = {
    "nothing": lambda held: None,
    "a value of a list": lambda held: held["long"].__setitem__(200, -5.0),
    "the sign of a zero": lambda held: held["long"].__setitem__(0, -0.0),
    "a float that is an integer": lambda held: held["long"].__setitem__(1, 1),
    "a longer list": lambda held: held["long"].append(3.0),
    "a shorter list": lambda held: held["long"].pop(),
    "another list": lambda held: held.update(long=[-1.0] * 300),
    "another tuple": lambda held: held["pairs"].__setitem__(3, (3, [4.0])),
    "inside a tuple": lambda held: held["pairs"][7][1].append(1),
    "a value by name": lambda held: held["words"].update(k3=-1),
    "an integer that is true": lambda held: held["words"].update(k1=True),
    "a new name": lambda held: held["words"].update(new=1),
    "other names": lambda held: held.update(words={f"j{i}": i for i in range(300)}),
    "names in another order": lambda held: held.update(words=dict(reversed(held["words"].items()))),
    "an array": lambda held: held["array"].__iadd__(1),
    "the end of an array": lambda held: held["array"].__setitem__(-1, -1),
    "the sign of a zero in an array": lambda held: held["zeros"].__setitem__(7, -0.0),
    "an array's type": lambda held: held.update(array=held["array"].view(np.uint64)),
    "an array's shape": lambda held: held.update(array=held["array"].reshape(2, -1)),
    "an array's order": lambda held: held.update(array=held["array"].reshape(2, -1).T),
    "a small array": lambda held: held.update(array=np.zeros(3)),
    "bytes": lambda held: held.update(bytes=b"x" * 4999 + b"y"),
    "a value beside": lambda held: held.update(beside=held.get("beside", 0) + 1),
    "a tensor behind its version": lambda held: held.get("order", torch.ones(9)).numpy().fill(7),
    "a tensor": lambda held: held.get("order", torch.ones(9)).add_(1),
    "a tensor's type": lambda held: held.update(order=torch.zeros(8_200, dtype=torch.float64)),
}


@pytest.mark.parametrize("name", LARGE)
def test_a_change_of_what_is_kept_apart_is_in_the_very_next_entry(run_dir: Path, name: str) -> None:
    job = Job(run_dir, large=True)
    for _ in range(STEADY - 1):
        job.iterate()
    for place in ("before", "within", "inside"):
        for held in (job.own, job.position):
            change = lambda job, held=held: LARGE[name](held)  # noqa: E731
            job.iterate(**{place: change})
    job.iterate()
    job.handle.detach()


def test_what_extras_have_beyond_a_limit_is_told_and_costs_no_more(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, position = Job(run_dir), np.arange(200_000)
    kept, native = internals.checkpointer(job.handle).step_journal, job.handle.region.native
    job.position["order"] = position
    internals.checkpointer(job.handle).boundary_state.step_ended(0)
    told = r"extras\['position'\] has 1600\d{3} bytes.*a seed and a position"
    with pytest.warns(UserWarning, match=told):
        kept.start(0)
    assert "1048576" in job.handle.stats().not_kept
    sealed, seal = [], kept._encoder.encode
    monkeypatch.setattr(kept._encoder, "encode", lambda *said: sealed.append(1) or seal(*said))
    for step in range(1, RETRY_STEPS + 4):
        job.model(torch.ones(2, 4)).sum().backward()
        job.optimizer.step()
        position[step] = -1
        assert bool(sealed) == (step >= RETRY_STEPS)
    assert len(sealed) == 1 and native.read_journal(STEP_END).step == 0
    saved = job.handle.snapshot_now("test")  # what this process has itself is enough
    assert saved.fresh and saved.step == RETRY_STEPS + 3
    del job.position["order"]
    for _ in range(RETRY_STEPS):
        job.model(torch.ones(2, 4)).sum().backward()
        job.optimizer.step()
    job.first = {}
    job.iterate()
    job.handle.detach()


def test_one_rank_is_not_told_of_what_only_others_would_read(run_dir: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    extras = {"position": lightck.at_step({"order": np.arange(200_000)})}
    settings: Tree = {"policy": Never(), "failure": "jit", "extras": extras}
    with lightck.attach(model, optimizer, run_dir, **settings) as handle:
        for _ in range(2):
            model(torch.ones(2, 2)).mean().backward()
            optimizer.step()
        assert handle.region.native.read_journal() is None and not handle.stats().not_kept
        assert handle.snapshot_now("test").fresh
        handle.detach()


def test_the_journal_has_room_for_what_extras_have_at_the_step_s_end(run_dir: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    extras = {"position": lightck.at_step({"order": np.arange(125_000)})}  # 1,000,000 bytes
    settings: Tree = {"policy": Never(), "failure": "jit", "extras": extras}
    with lightck.attach(model, optimizer, run_dir, **settings) as handle:
        with_peers(handle)
        model(torch.ones(2, 2)).mean().backward()
        optimizer.step()
        for kind in (FENCE, STEP_END):
            found = handle.region.native.read_journal(kind)
            assert found is not None and (found.step, len(found.blob) > 1_000_000) == (1, True)
        assert not handle.stats().not_kept
        handle.detach()
