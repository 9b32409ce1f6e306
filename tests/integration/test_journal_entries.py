"""Entries of the boundary journal: whatever changes is in the very next one, however it changes."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import lightck
from lightck.journal.entry import decode_entry
from lightck.policy import AtSteps, Auto
from lightck.region.native_region import FENCE, FORWARD, STEP_END
from lightck.state import boundary_blob, boundary_codec, extras, rng
from lightck.state.extras import POLICY
from lightck.state.inventory import Inventory
from support import internals
from support.loops import with_peers

Tree = dict[str, Any]
STEADY = 3
"""Steps after which everything that can be kept is."""


def Never() -> AtSteps:  # noqa: N802
    """Return a policy by which no step is ever due, and that counts no epochs."""
    return AtSteps([1 << 40])


class Noted(nn.Module):
    """A buffer that forwards change, one that they replace, and a part without any."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(3))
        self.register_buffer("last", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.add_(1)
        self.last = self.last * 0.5 + 1
        return self.inner(x)


class Job:
    """A training loop that compares every entry with what stands then, looked up anew."""

    def __init__(self, path: Path, *, rich: bool = False, large: bool = False) -> None:
        """`rich`: the optimizer holds what can change in place, so that less of it is kept.

        `large`: extras hold what is kept apart.
        """
        self.model = Noted()
        self.optimizer: Any = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.optimizer.rate, self.optimizer._quiet = 2.5, {}
        if rich:
            self.optimizer.param_groups[0]["note"] = ["a"]
            self.optimizer.param_groups[0]["scale"] = torch.ones(2)
            self.optimizer.counts, self.optimizer._memory = [1], torch.zeros(2)
        self.own: Tree = {"n": 1, "list": [1], "tensor": torch.zeros(3), "gone": torch.zeros(2)}
        self.position: Tree = {"at": 0, "list": [1], "tensor": torch.zeros(3)}
        if large:
            for each in (self.own, self.position):
                each["long"] = [float(i) for i in range(300)]
                each["pairs"] = [(i, [float(i)]) for i in range(300)]
                each["words"] = {f"k{i}": i for i in range(300)}
                each["array"], each["zeros"] = np.arange(8_200), np.zeros(8_200)
                each["bytes"] = b"x" * 5000
            self.position["order"] = torch.arange(8_200)
        self.dice = torch.Generator().manual_seed(3)
        self.extras = {
            "own": self.own,
            "position": lightck.at_step(self.position),
            "dice": self.dice,
        }
        settings: Tree = {"policy": Never(), "failure": "jit", "extras": self.extras}
        self.handle = with_peers(lightck.attach(self.model, self.optimizer, path, **settings))
        self.inside: Callable[[], None] = lambda: None
        self.optimizer.register_step_post_hook(lambda *_: self.inside())
        self.first: Tree = {}

    def values(self) -> tuple[Tree, Tree, Tree]:
        """Return both instants as if step end were now, and the rank's own small tensors."""
        parsed = extras.parse(self.extras)
        collected = Inventory(self.model, [self.optimizer], parsed).collect()
        position = {
            e.name: boundary_codec.plain(e.state(), "") for e in parsed if e.instant != "forward"
        }
        generators = {
            "torch": torch.get_rng_state(),
            "numpy": np.random.get_state(legacy=False),
            "python": random.getstate(),
        }
        own = {
            live.name: live.tensor.clone()
            for live in collected.lives
            if live.sync or "/@group/" in live.name or "/@attribute/" in live.name
        }
        first = {"rng": generators, "extras": boundary_codec.rebuild(position)}
        return first, boundary_codec.rebuild(collected.tree), dict(sorted(own.items()))

    def entry(self, kind: int, step: int) -> tuple[Tree, Tree, Tree]:
        """The newest of a kind."""
        found = self.handle.region.native.read_journal(kind)
        assert found is not None and (found.kind, found.step) == (kind, step)
        held = decode_entry(found, context="test")
        first, second = (
            boundary_codec.rebuild(boundary_blob.opened(each, context="test"))
            for each in (held.at_step, held.at_forward)
        )
        for generators in (first["rng"], second.get("rng")):
            if generators:
                generators["python"] = rng.unpacked(generators["python"])
        assert second.pop("step") == step
        return first, second, dict(sorted((live.name, live.tensor) for live in held.lives))

    def iterate(self, *, before: Any = None, within: Any = None, inside: Any = None) -> None:
        """One step, changes at places of choice, all of its entries compared."""
        if before:
            before(self)
        step, (now, second, own) = self.handle.step, self.values()
        loss = self.model(torch.ones(2, 4)).square().mean()
        seen = self.entry(FORWARD, step)
        if self.first:
            assert same(seen[0], self.first)
        assert same(seen[1].pop("rng"), now["rng"])
        assert same(seen[1:], (second, own))
        loss.backward()
        if within:
            within(self)
        fence = self.values()
        self.inside = (lambda: inside(self)) if inside else lambda: None
        self.optimizer.step()
        assert same(self.entry(FENCE, step + 1), fence)
        assert same(self.entry(STEP_END, step + 1), self.values())
        self.first = self.values()[0]
        self.optimizer.zero_grad()


def same(one: Any, other: Any) -> bool:
    """Equal, with types, bit by bit."""
    if isinstance(one, torch.Tensor):
        return same(one.detach().numpy(), other.detach().numpy())
    if isinstance(one, np.ndarray):
        alike = one.dtype == other.dtype and one.shape == other.shape
        return alike and one.tobytes() == other.tobytes()
    if isinstance(one, float):
        return type(other) is float and one.hex() == other.hex()
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and bool(one == other)


def group(job: Job) -> Tree:
    options: Tree = job.optimizer.param_groups[0]
    return options


CHANGES: dict[str, Callable[[Job], Any]] = {
    "nothing": lambda job: None,
    "an option": lambda job: group(job).update(lr=0.05),
    "a pair of options": lambda job: group(job).update(betas=(0.8, 0.9)),
    "a new option": lambda job: group(job).update(new=True),
    "an option that is gone": lambda job: group(job).pop("note"),
    "a list among the options": lambda job: group(job)["note"].append("b"),
    "a tensor among the options": lambda job: group(job)["scale"].mul_(2),
    "another tensor among the options": lambda job: group(job).update(scale=torch.zeros(2)),
    "an attribute": lambda job: setattr(job.optimizer, "rate", 3.5),
    "a new attribute": lambda job: setattr(job.optimizer, "other", 3),
    "a list that is an attribute": lambda job: job.optimizer.counts.append(2),
    "an empty private attribute": lambda job: job.optimizer._quiet.update(x=torch.ones(2)),
    "a tensor that is an attribute": lambda job: job.optimizer._memory.add_(1),
    "a buffer": lambda job: job.model.seen.add_(5),
    "another buffer": lambda job: setattr(job.model, "seen", torch.ones(3)),
    "a buffer's shape": lambda job: setattr(job.model, "seen", torch.ones(2, 3)),
    "a buffer's type": lambda job: setattr(job.model, "seen", torch.ones(3).double()),
    "a buffer's memory": lambda job: setattr(job.model.seen, "data", torch.ones(5)),
    "a buffer's strides": lambda job: setattr(job.model, "seen", torch.ones(2, 3).t()),
    "a buffer with gaps": lambda job: setattr(job.model, "seen", torch.arange(6.0)[::2]),
    "a buffer where none was": lambda job: job.model.inner.register_buffer("b", torch.ones(2)),
    "a buffer that is gone": lambda job: job.model.register_buffer("last", torch.ones(7)),
    "a value of extras": lambda job: job.own.update(n=2),
    "a list of extras": lambda job: job.own["list"].append(2),
    "a tensor of extras": lambda job: job.own["tensor"].add_(1),
    "another tensor of extras": lambda job: job.own.update(tensor=torch.ones(3)),
    "the shape of a tensor of extras": lambda job: job.own.update(tensor=torch.ones(4)),
    "the type of a tensor of extras": lambda job: job.own.update(tensor=torch.ones(3).int()),
    "the memory of a tensor of extras": lambda job: setattr(
        job.own["tensor"], "data", torch.ones(3).double()
    ),
    "a new tensor of extras": lambda job: job.own.update(new=torch.ones(3)),
    "a tensor of extras that is gone": lambda job: job.own.pop("gone"),
    "a tensor that is a value now": lambda job: job.own.update(gone=3),
    "torch's generator": lambda job: torch.rand(3),
    "NumPy's generator": lambda job: np.random.random(),
    "NumPy's normal numbers": lambda job: np.random.randn(),
    "Python's generator": lambda job: random.random(),
    "Python's normal numbers": lambda job: random.gauss(0, 1),
    "the position": lambda job: job.position.update(at=1),
    "a list of the position": lambda job: job.position["list"].append(3),
    "a tensor of the position": lambda job: job.position["tensor"].add_(1),
    "a generator of extras": lambda job: torch.rand(3, generator=job.dice),
}  # fmt: skip


RICH = {
    *("a list among the options", "a tensor among the options", "a list that is an attribute"),
    *("another tensor among the options", "an option that is gone"),
    "a tensor that is an attribute",
}


@pytest.mark.parametrize("place", ["before", "within", "inside"])
@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_in_the_very_next_entry(run_dir: Path, name: str, place: str) -> None:
    job = Job(run_dir, rich=name in RICH)
    for _ in range(STEADY):
        job.iterate()
    for _ in range(2):
        job.iterate(**{place: CHANGES[name]} if name not in _ONCE else {place: _once(name)})
    for _ in range(2):
        job.iterate()
    job.handle.detach()


_ONCE = {"an option that is gone", "a tensor of extras that is gone", "a buffer where none was"}


def _once(name: str) -> Callable[[Job], Any]:
    def change(job: Job) -> None:
        done: set[str] = job.__dict__.setdefault("done", set())
        if name not in done:
            done.add(name)
            CHANGES[name](job)

    return change


def test_the_entry_at_the_fence_leaves_what_is_kept_of_the_last_step(run_dir: Path) -> None:
    job = Job(run_dir)
    kept = internals.checkpointer(job.handle).step_journal
    for _ in range(STEADY):
        job.iterate()
    ended = {name: value.clone() for name, value in kept.step_end.copies.items()}
    job.own["tensor"].add_(1)
    begun = job.values()[2]
    loss = job.model(torch.ones(2, 4)).mean()
    job.model.seen.add_(7)
    loss.backward()
    looked = []

    def look(*_: Any) -> None:
        looked.append(1)
        assert job.handle.region.native.read_journal().kind == FENCE
        assert kept.step == job.handle.step
        assert same(kept.step_end.copies, ended)
        assert same(kept.forward_start.copies, {name: begun[name] for name in ended})
        assert not same(kept.forward_start.copies["model/seen"], job.model.seen)

    job.optimizer.register_step_pre_hook(look)
    job.optimizer.step()
    assert looked
    job.handle.detach()


def test_of_several_optimizers_the_first_to_step_has_an_entry_at_its_fence(run_dir: Path) -> None:
    one, other = nn.Linear(2, 2), nn.Linear(2, 2)
    model = nn.Sequential(one, other)
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (one, other)]
    settings: Tree = {"policy": Never(), "failure": "jit"}
    with lightck.attach(model, list(optimizers), run_dir, **settings) as handle:
        with_peers(handle)
        for step in range(1, 4):
            model(torch.ones(2, 2)).mean().backward()
            first, second = optimizers if step % 2 else reversed(optimizers)
            first.step()
            entry = handle.region.native.read_journal()
            assert entry is not None and (entry.kind, entry.step) == (FENCE, step)
            second.step()
            found = handle.region.native.read_journal(FENCE)
            assert found is not None and found.sequence == entry.sequence
            entry = handle.region.native.read_journal()
            assert entry is not None and (entry.kind, entry.step) == (STEP_END, step)
        handle.detach()


def test_an_update_that_the_scaler_skips_has_no_fence_and_those_after_it_have(
    run_dir: Path,
) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    settings: Tree = {"policy": Never(), "failure": "jit", "extras": {"scaler": scaler}}
    with lightck.attach(model, optimizer, run_dir, **settings) as handle:
        with_peers(handle)
        fences = []
        for step in range(1, 6):
            loss = model(torch.ones(2, 2)).mean() * (float("inf") if step == 3 else 1)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            found = handle.region.native.read_journal(FENCE)
            fences.append(found and found.step)
            ended = handle.region.native.read_journal(STEP_END)
            assert ended is not None and ended.step == handle.step == step
            scaler.update()
            optimizer.zero_grad()
        assert fences == [1, 2, None, 4, 5]  # the three entries there are of what came after
        handle.detach()


def test_a_fence_whose_entry_fails_is_told_once_and_training_goes_on(
    run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, logger="lightck")
    job = Job(run_dir)
    job.iterate()
    for _ in range(3):
        job.model(torch.ones(2, 4)).mean().backward()
        job.own["n"] = object()
        job.inside = lambda: job.own.update(n=1)
        job.optimizer.step()
        assert same(job.entry(STEP_END, job.handle.step), job.values())
    fence = job.handle.region.native.read_journal(FENCE)
    assert fence is None or fence.step == 1
    assert sum("not_kept" in record.message for record in caplog.records) == 1
    job.inside = lambda: None
    job.first = {}
    job.iterate()
    job.handle.detach()


def test_marked_updates_have_an_entry_at_their_fence(run_dir: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings: Tree = {"policy": Never(), "failure": "jit"}
    with lightck.attach(model, optimizer, run_dir, **settings) as handle:
        with_peers(handle)
        for step in range(1, 3):
            model(torch.ones(2, 2)).mean().backward()
            handle.before_update()
            entry = handle.region.native.read_journal()
            assert entry is not None and (entry.kind, entry.step) == (FENCE, step)
            optimizer.step()
            handle.after_update()
            found = handle.region.native.read_journal(FENCE)
            assert found is not None and found.sequence == entry.sequence
        handle.detach()


def test_one_rank_writes_no_entries_for_nobody_would_read_them(run_dir: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings: Tree = {"policy": Never(), "failure": "jit"}
    with lightck.attach(model, optimizer, run_dir, **settings) as handle:
        for _ in range(3):
            model(torch.ones(2, 2)).mean().backward()
            optimizer.step()
            assert handle.region.native.read_journal() is None
        saved = handle.snapshot_now("test")
        handle.detach()
    assert saved.fresh and saved.step == 3, "from memory"


def test_the_policies_state_at_a_fence_is_that_of_the_step_that_it_makes(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the entry of a fence would not stand for a step whose rank was killed in the update."""
    monkeypatch.setattr("lightck.loop.policy_state._RENEWED_S", 0.0)  # it changes at every step
    model = nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    policy = Auto(watch=False)
    handle = with_peers(lightck.attach(model, optimizer, run_dir, policy=policy, failure="jit"))

    def held(kind: int) -> list[str]:
        """Return all that the newest entry, of the last step, has of the state."""
        found = handle.region.native.read_journal(kind)
        assert found is not None
        assert found.step == handle.step
        entry = decode_entry(found, context="test")
        trees = (
            boundary_blob.opened(each, context="test") for each in (entry.at_step, entry.at_forward)
        )
        return [tree["extras"][POLICY]["json"] for tree in trees if POLICY in tree["extras"]]

    seen = []
    with handle:
        loss = model(torch.ones(2, 4)).square().mean()
        for _ in range(5):
            loss.backward()
            optimizer.step()
            fence = held(FENCE)
            assert held(STEP_END) == fence
            loss = model(torch.ones(2, 4)).square().mean()
            assert held(FORWARD) == fence
            seen += fence
    assert len(seen) == 5
    assert len({*seen}) > 1
