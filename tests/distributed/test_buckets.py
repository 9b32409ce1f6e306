"""DDP's buckets after a restart are those of the run that goes on, so that its sums are, too.

From three ranks on gloo's sums depend on them. DDP arranges them anew after the first backward.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from signal import SIGKILL
from typing import Any, TypeVar

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import lightck
from lightck.distributed import ddp_buckets
from lightck.distributed.ddp_buckets import (
    KEY,
    Arrangement,
    Arrangements,
    bring,
    in_use,
    lacking,
    opened,
)
from lightck.distributed.rendezvous import Rendezvous, meeting
from lightck.errors import CorruptSnapshotError
from support.distributed import ranks
from support.distributed.resumed import same

LAST = 5
WORLD = 3
T = TypeVar("T")
Result = tuple[list[float], dict[str, torch.Tensor]]

OPTIONS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "small": {"bucket_cap_mb": 0.01},
    "views": {"bucket_cap_mb": 0.01, "gradient_as_bucket_view": True},
    "static": {"bucket_cap_mb": 0.01, "static_graph": True},
    "no_sync": {"bucket_cap_mb": 0.01},
    "hook": {"bucket_cap_mb": 0.01},
}


class Net(nn.Module):
    """Its gradients become ready in an order that is each rank's own, and not that of its layers.

    The two branches have 1.2 MB together where `wide`: DDP's first bucket of 1 MiB is not all.
    """

    def __init__(self, rank: int, wide: bool) -> None:
        super().__init__()
        width = 380 if wide else 40
        self.branches = nn.ModuleList(
            nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, width)) for _ in range(2)
        )
        self.last = nn.Linear(width, 3)
        self.order = (0, 1) if rank % 2 else (1, 0)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        made = {i: self.branches[i](batch) for i in self.order}
        return self.last(torch.tanh(made[0] + made[1]))  # type: ignore[no-any-return]


class Training:
    """Trains a DDP module on a rank's own data, with dropout's kind of draws."""

    def __init__(self, rank: int, kind: str, wrap: bool = True) -> None:
        torch.manual_seed(7)
        self.kind = kind
        self.net = Net(rank, wide=kind == "defaults")
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.3, momentum=0.9)
        self.data = torch.Generator().manual_seed(100 + rank)
        self.extras = {"data": self.data}
        if wrap:
            self.wrap()

    def wrap(self) -> None:
        self.model = DistributedDataParallel(self.net, **OPTIONS[self.kind])
        if self.kind == "hook":
            self.model.register_comm_hook(None, default_hooks.fp16_compress_hook)

    def forward(self) -> torch.Tensor:
        batch = torch.randn(16, 8, generator=self.data)
        return self.model(batch).square().mean()  # type: ignore[no-any-return]

    def step(self, loss: torch.Tensor | None = None) -> float:
        self.optimizer.zero_grad()
        if self.kind == "no_sync":
            with self.model.no_sync():
                self.forward().backward()
        loss = self.forward() if loss is None else loss
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def result(self, losses: list[float]) -> Result:
        held = {name: each.clone() for name, each in self.net.state_dict().items()}
        for i, parameter in enumerate(self.net.parameters()):
            held[f"momentum {i}"] = self.optimizer.state[parameter]["momentum_buffer"].clone()
        return losses, held


@cache
def golden(kind: str) -> list[Result]:
    """Return what each rank has after `LAST` steps that nothing interrupts."""

    def train(me: ranks.Me) -> Result:
        training = Training(me.rank, kind)
        return training.result([training.step() for _ in range(LAST)])

    with ranks.started(WORLD, train) as job:
        return job.results()


def killed_after(step: int, kind: str, path: Path) -> None:
    """Train; kill all when the snapshot of `step` is committed, and the next forward has run."""

    def train(me: ranks.Me) -> None:
        training = Training(me.rank, kind)
        settings = {"threads": 1, "on_error": "raise"}
        with lightck.attach(
            training.model, training.optimizer, path, extras=training.extras, **settings
        ) as handle:
            for _ in range(step):
                training.step()
            training.forward()
            handle.wait()
            me.send(handle.last_committed_step)
            me.pause()

    with ranks.started(WORLD, train) as job:
        for rank in range(WORLD):
            assert job.receive(rank) == step
        for rank in range(WORLD):
            os.kill(job.pid(rank), SIGKILL)
        assert all(isinstance(each, ranks.Gone) for each in job.outcomes())


def killed_in_update(victim: int, path: Path) -> None:
    """Kill a rank behind its first update: the others make its step whole, and save it."""

    def train(me: ranks.Me) -> None:
        training = Training(me.rank, "small")
        if me.rank == victim:
            training.optimizer.register_step_post_hook(lambda *_: os.kill(os.getpid(), SIGKILL))
        given = (training.model, training.optimizer, path)
        with lightck.attach(*given, extras=training.extras, threads=1, policy=10**6):
            for _ in range(LAST):
                training.step()

    with ranks.started(WORLD, train) as job:
        assert isinstance(job.outcomes()[victim], ranks.Gone)


def resumed(kind: str, path: Path, *, wrapped_late: bool = False) -> list[tuple[int, Any, Result]]:
    """Go on to the end: the step that was restored, DDP's buckets at first, and the result."""

    def train(me: ranks.Me) -> tuple[int, Any, Result]:
        training = Training(me.rank, kind, wrap=not wrapped_late)
        model = training.net if wrapped_late else training.model
        info = lightck.restore(model, training.optimizer, path, extras=training.extras)
        if wrapped_late:
            training.wrap()
        began = info.step if info else 0
        with lightck.attach(
            training.model, training.optimizer, path, extras=training.extras, threads=1
        ):
            buckets = in_use(training.model)
            losses = [training.step() for _ in range(began, LAST)]
        return began, buckets, training.result(losses)

    with ranks.started(WORLD, train) as job:
        return job.results()


def must_equal(kind: str, found: list[tuple[int, Any, Result]], step: int) -> None:
    for rank, (began, buckets, (losses, held)) in enumerate(found):
        wanted = golden(kind)[rank]
        assert began == step
        assert losses == wanted[0][step:], (kind, step, rank)
        assert same(held, wanted[1]), (kind, step, rank)
        assert buckets == found[0][1], (kind, step, rank)


@pytest.mark.parametrize(
    ("kind", "step"),
    [
        ("defaults", 3),
        ("small", 1),
        ("views", 2),
        ("static", 3),
        ("no_sync", 1),
        ("hook", 2),
    ],
)
def test_three_killed_ranks_go_on_with_the_sums_of_the_run_that_nothing_interrupts(
    kind: str, step: int, region_dir: Path
) -> None:
    killed_after(step, kind, region_dir)
    found = resumed(kind, region_dir)
    must_equal(kind, found, step)
    assert len(found[0][1]) > 1, "one bucket shows little"


def test_a_module_that_is_wrapped_after_restore_has_them_from_attach_on(region_dir: Path) -> None:
    killed_after(2, "small", region_dir)
    must_equal("small", resumed("small", region_dir, wrapped_late=True), 2)


@pytest.mark.parametrize("victim", [0, 1])
def test_of_the_first_step_rank_0_s_order_is_kept_before_ddp_has_told_the_others(
    victim: int, region_dir: Path
) -> None:
    killed_in_update(victim, region_dir)
    must_equal("small", resumed("small", region_dir), 1)


def one_rank(code: Callable[[], T]) -> T:
    with ranks.started(1, lambda _: code()) as job:
        return job.results()[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("options", [{}, {"bucket_cap_mb": 0.01}, {"static_graph": True}])
def test_what_is_computed_before_ddp_rebuilds_is_what_it_then_has(options: Any) -> None:
    def code() -> list[Any]:
        module = DistributedDataParallel(Net(0, wide=True), **options)
        kept = Arrangements(module)
        found = []
        for _ in range(4):
            module(torch.randn(2, 8)).sum().backward()
            found.append((kept()[""], in_use(module)))
        assert not any(p._post_accumulate_grad_hooks for p in module.parameters())
        return found

    found = one_rank(code)
    late = "static_graph" in options
    assert [told["rebuilt"] for told, _ in found] == (
        [False, False, True, True] if late else [True] * 4
    )
    assert found[0 if not late else 2][0]["buckets"] == found[-1][1]
    for told, used in found[1:]:
        assert told["buckets"] == used


def test_what_is_kept_stays_the_same_object_so_that_it_is_encoded_once() -> None:
    def code() -> None:
        module = DistributedDataParallel(Net(0, wide=False))
        kept = Arrangements(module)
        first = kept()
        assert kept() is first
        for _ in range(3):
            module(torch.randn(2, 8)).sum().backward()
        last = kept()
        assert last is not first
        assert kept() is last

    one_rank(code)


def test_torch_has_every_private_name_that_is_used() -> None:
    """It fails by the name that torch has changed; restore then warns and leaves buckets alone."""
    assert one_rank(lambda: lacking(DistributedDataParallel(nn.Linear(1, 1)))) == []


def trained(steps: int, **options: Any) -> DistributedDataParallel:
    module = DistributedDataParallel(Net(0, wide=False), **options)
    train(module, steps)
    return module


def train(module: DistributedDataParallel, steps: int) -> None:
    for _ in range(steps):
        module(torch.randn(2, 8)).sum().backward()


def saved(module: DistributedDataParallel) -> dict[str, Arrangement]:
    return opened({KEY: Arrangements(module)()}, context="here")


def listen() -> list[str]:
    """Return the list to which the reasons go with which lightck leaves buckets alone."""
    told: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: Any) -> None:
            if record.lightck_event == "buckets_differ":
                told.append(record.lightck["why"])

    logging.getLogger("lightck").addHandler(Handler())
    return told


ALONE = Rendezvous("restore")


SMALL: dict[str, Any] = {"bucket_cap_mb": 0.01}


def test_a_module_that_has_not_rebuilt_yet_goes_to_what_was_saved() -> None:
    """Also one that would rebuild at its next forward, and back to before its first backward."""

    def code() -> None:
        fresh, wanted = saved(trained(0, **SMALL)), saved(trained(2, **SMALL))
        for steps in (0, 1):
            module = trained(steps, **SMALL)
            initial = in_use(module)
            gradients, state = [p.grad for p in module.parameters()], torch.get_rng_state()
            bring(ALONE, module, wanted)
            assert in_use(module) == wanted[""].buckets
            assert all(p.grad is g for p, g in zip(module.parameters(), gradients, strict=True))
            assert torch.equal(torch.get_rng_state(), state)
            train(module, 2)
            assert in_use(module) == wanted[""].buckets

            module = trained(steps, **SMALL)
            bring(ALONE, module, fresh)
            train(module, 1)
            assert in_use(module) == initial
            train(module, 1)
            assert in_use(module) == wanted[""].buckets

    one_rank(code)


def test_of_a_module_that_has_rebuilt_it_is_told_when_it_sums_otherwise() -> None:
    def code(me: ranks.Me) -> list[str]:
        module = trained(0, **SMALL)
        fresh = saved(module)
        train(module, 3)
        told = listen()
        with meeting("restore") as all_ranks:
            bring(all_ranks, module, saved(module))
            assert not told
            bring(all_ranks, module, fresh)
        return told

    for world, count in ((2, 0), (3, 1)):
        with ranks.started(world, code) as job:
            assert all(len(told) == count for told in job.results())


@pytest.mark.parametrize(
    ("options", "steps", "why"),
    [
        ({"bucket_cap_mb": 0.02}, 2, "closes buckets at [20971, 20971] bytes, in the snapshot at"),
        (SMALL | {"find_unused_parameters": True}, 2, "find_unused_parameters=True"),
        (SMALL | {"find_unused_parameters": True}, 0, "begins with other buckets"),
    ],
)
def test_another_setting_of_ddp_is_left_alone_and_told(
    options: dict[str, Any], steps: int, why: str
) -> None:
    def code() -> list[str]:
        wanted, module = saved(trained(steps, **SMALL)), trained(0, **options)
        before, told = in_use(module), listen()
        bring(ALONE, module, wanted)
        assert in_use(module) == before
        assert not module._has_rebuilt_buckets
        return told

    (told,) = one_rank(code)
    assert why in told


def test_where_one_rank_cannot_no_rank_does() -> None:
    def code(me: ranks.Me) -> tuple[bool, list[str]]:
        wanted = saved(trained(2, **SMALL))
        module, told = trained(0, **({} if me.rank else SMALL)), listen()
        with meeting("restore") as all_ranks:
            bring(all_ranks, module, wanted)
        return module._has_rebuilt_buckets, told

    with ranks.started(2, code) as job:
        for rebuilt, told in job.results():
            assert not rebuilt
            assert "rank 1: DDP module '' closes buckets at" in "".join(told)


def test_a_torch_without_the_private_names_keeps_nothing_and_says_so_at_restore(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def code() -> list[str]:
        wanted = saved(trained(2))
        monkeypatch.setattr(ddp_buckets, "_PRIVATE", ((torch, "_renamed"),))
        module, told = trained(0), listen()
        assert Arrangements(module)() == {}
        bring(ALONE, module, wanted)
        assert not module._has_rebuilt_buckets
        return told

    (told,) = one_rank(code)
    assert "has no torch._renamed" in told


GOOD = {"rebuilt": True, "limits": [8, 8], "sizes": [4, 4], "buckets": [[1], [0]]}


@pytest.mark.parametrize(
    "changed",
    [
        {"buckets": [[1], [1]]},
        {"buckets": [[1], [2]]},
        {"buckets": [[1, 0], []]},
        {"buckets": [[1], 0]},
        {"buckets": [["1"], [0]]},
        {"buckets": []},
        {"sizes": [8]},
        {"rebuilt": 1},
        {"limits": None},
        {"more": 1},
    ],
)
def test_what_no_ddp_module_can_have_is_damage(changed: dict[str, Any]) -> None:
    """DDP itself would read beyond its parameters."""
    assert opened({KEY: {"": GOOD}}, context="here")[""].buckets == [[1], [0]]
    with pytest.raises(CorruptSnapshotError, match="here: no arrangement of buckets"):
        opened({KEY: {"": GOOD | changed}}, context="here")
    with pytest.raises(CorruptSnapshotError, match="here: no arrangement of buckets"):
        opened({KEY: [GOOD]}, context="here")
