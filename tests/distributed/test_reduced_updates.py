"""Layer-wise update under DDP: on reduced gradients only, and every bit as in the plain step."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import lightck
from lightck.errors import ConfigError
from lightck.layerwise import updates as layer_updates
from lightck.layerwise.updates import step_only
from support import internals
from support.distributed import ranks
from support.distributed.ranks import Me
from support.distributed.replicas import (
    OPTIMIZERS,
    Case,
    compared,
    made,
    micro_batch,
    register,
    same_bits,
    train,
)
from support.proof import record_whole

KINDS = ("checkpointed", "tied", "half", "mixed")
VIEW: dict[str, Any] = {"gradient_as_bucket_view": True}
CASES = [
    *(Case(optimizer=name) for name in OPTIMIZERS),
    *(Case(VIEW, optimizer=name) for name in ("momentum", "adamw fused")),
    *(Case(options, to_none=False) for options in ({}, VIEW)),
    *(Case(options, accumulation=3, optimizer="adam") for options in ({}, VIEW)),
    *(Case(options, hook) for options in ({}, VIEW) for hook in ("allreduce", "fp16")),
    *(Case(options | {"bucket_cap_mb": 25}, "power") for options in ({}, VIEW)),
    *(Case(options | {"static_graph": True}, branches="same") for options in ({}, VIEW)),
    *(Case(options | {"find_unused_parameters": True}, branches="own") for options in ({}, VIEW)),
    Case(VIEW | {"find_unused_parameters": True}, branches="own", to_none=False, accumulation=2),
    Case({"find_unused_parameters": True}, "fp16", branches="own", accumulation=2),
    *(Case(options, kind=kind) for kind in KINDS for options in ({}, VIEW)),
    *(Case(VIEW, kind=kind, to_none=False) for kind in KINDS),
    Case({"batched_grad_copy": True}, to_none=False),
    Case(VIEW | {"batched_grad_copy": True}, to_none=False),
]


_shown = {"trainings": 0, "tensors": 0, "differing": 0}


@pytest.fixture(scope="module", autouse=True)
def shown(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    record_whole(request, "reduced_updates", _shown)


def count(results: list[tuple[int, int]]) -> None:
    """Add a training, on every rank."""
    _shown["trainings"] += 1
    _shown["tensors"] += sum(tensors for tensors, _ in results)
    _shown["differing"] += sum(differing for _, differing in results)
    assert not any(differing for _, differing in results), results


def layerwise(case: Case) -> lightck.Layerwise:
    return lightck.Layerwise(accumulation=case.accumulation)


@pytest.mark.parametrize(
    "world, case", [(3, c) for c in CASES] + [(2, c) for c in CASES[: len(OPTIMIZERS)]], ids=str
)
def test_the_result_is_that_of_plain_steps_bit_for_bit(
    case: Case, world: int, tmp_path: Path
) -> None:
    def code(me: Me) -> tuple[int, int]:
        plain = train(me, case)
        update = layerwise(case)
        return compared(plain, train(me, case, tmp_path, update=update, slots=4, proof=True))

    with ranks.started(world, code) as job:
        count(job.results())


def test_a_layer_is_updated_while_others_still_compute(tmp_path: Path) -> None:
    def code(me: Me) -> list[bool]:
        module, optimizer = made(Case())
        handle = lightck.attach(module, optimizer, tmp_path / "run", update="layerwise")
        module.register_comm_hook(None, at_once)
        last = module.module.narrow.weight
        changed: list[bool] = []
        first = module.module.look.bias
        before = torch.empty(0)
        first.register_post_accumulate_grad_hook(
            lambda _: changed.append(not torch.equal(last, before))
        )
        for step in range(4):
            before = last.detach().clone()
            micro_batch(Case(), module, me.rank, step, 0)
            optimizer.step()
            optimizer.zero_grad()
        handle.close()
        return changed

    with ranks.started(2, code) as job:
        # Two plain steps, and one of them before DDP has made its buckets.
        assert job.results() == [[False, False, True, True]] * 2


def at_once(state, bucket):  # type: ignore[no-untyped-def]
    """A hook whose reduction is over when it returns."""
    buffer = bucket.buffer()
    buffer.div_(dist.get_world_size())
    dist.all_reduce(buffer)
    done: Any = torch.futures.Future()
    done.set_result(buffer)
    return done


REFUSED: list[tuple[str, Callable[[], Any], str]] = [
    ("a hook", lambda: hooked(made(Case())), "registered before attach"),
    ("a built-in hook", lambda: built_in(made(Case())), "registered before attach"),
    ("a sparse embedding", lambda: sparse(), "sparse gradients"),
    ("updates of DDP's own", lambda: updating(made(Case())), "itself updates in its backward"),
]


def sparse() -> tuple[Any, Any]:
    module = DistributedDataParallel(torch.nn.Embedding(7, 3, sparse=True))
    return module, torch.optim.SparseAdam(module.parameters())


def updating(pair: tuple[Any, Any]) -> tuple[Any, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from torch.distributed.optim import _apply_optimizer_in_backward

    _apply_optimizer_in_backward(torch.optim.SGD, pair[0].parameters(), {"lr": 0.1})
    return pair


def hooked(pair: tuple[Any, Any]) -> tuple[Any, Any]:
    register(Case(hook="fp16"), pair[0])
    return pair


def built_in(pair: tuple[Any, Any]) -> tuple[Any, Any]:
    pair[0]._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    return pair


@pytest.mark.parametrize("what, make, reason", REFUSED, ids=[r[0] for r in REFUSED])
def test_what_cannot_be_followed_is_refused_at_attach(
    what: str, make: Callable[[], Any], reason: str, tmp_path: Path
) -> None:
    def code(me: Me) -> None:
        module, optimizer = make()
        with pytest.raises(ConfigError, match=reason):
            lightck.attach(module, optimizer, tmp_path / "run", update="layerwise")

    with ranks.started(1, code) as job:
        job.results()


def test_gradients_that_are_never_reduced_are_an_error_at_the_step(tmp_path: Path) -> None:
    def code(me: Me) -> None:
        module, optimizer = made(Case())
        handle = lightck.attach(module, optimizer, tmp_path / "run", update="layerwise")
        with module.no_sync():
            micro_batch(Case(), module, me.rank, 0, 0)
        with pytest.raises(ConfigError, match=r"is this rank's alone: no_sync\(\)"):
            optimizer.step()
        handle.detach()

    with ranks.started(2, code) as job:
        job.results()


def test_a_gradient_changed_after_its_reduction_is_an_error(tmp_path: Path) -> None:
    def code(me: Me) -> None:
        module, optimizer = made(Case())
        handle = lightck.attach(module, optimizer, tmp_path / "run", update="layerwise")
        for step in range(2):
            micro_batch(Case(), module, me.rank, step, 0)
            optimizer.step()
            optimizer.zero_grad()
        micro_batch(Case(), module, me.rank, 2, 0)
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1e-3)
        with pytest.raises(ConfigError, match="its gradient was changed"):
            optimizer.step()
        handle.detach()

    with ranks.started(2, code) as job:
        job.results()


def test_a_world_that_shrinks_in_join_is_refused(tmp_path: Path) -> None:
    def code(me: Me) -> None:
        module, optimizer = made(Case())
        handle = lightck.attach(module, optimizer, tmp_path / "run", update="layerwise")
        with pytest.raises(ConfigError, match="divide_by_initial_world_size"):
            with module.join(divide_by_initial_world_size=False):
                micro_batch(Case(), module, me.rank, 0, 0)
        handle.detach()

    with ranks.started(2, code) as job:
        job.results()


@pytest.mark.parametrize("options", [{}, VIEW], ids=["", "view"])
def test_after_detach_ddp_goes_on_as_without_a_hook_and_still_takes_the_users(
    options: dict[str, Any], tmp_path: Path
) -> None:
    def code(me: Me) -> list[bool]:
        def run(attach: bool, hook: str) -> list[torch.Tensor]:
            case = Case(options, to_none=False)
            module, optimizer = made(case)
            if attach:
                folder = tmp_path / (hook or "none")
                handle = lightck.attach(module, optimizer, folder, update="layerwise")
            for step in range(6):
                if step == 3:
                    if attach:
                        handle.detach()
                    register(Case(hook=hook), module)
                micro_batch(case, module, me.rank, step, 0)
                optimizer.step()
                optimizer.zero_grad(set_to_none=False)
            return [p.detach().clone() for p in module.parameters()]

        # A plain one takes a hook in the middle, too.
        return [same_bits(run(False, hook), run(True, hook)) for hook in ("", "fp16")]

    with ranks.started(3, code) as job:
        assert job.results() == [[True, True]] * 3


def test_attaching_again_finds_its_place(tmp_path: Path) -> None:
    def code(me: Me) -> None:
        module, optimizer = made(Case())
        for turn in range(2):
            folder = tmp_path / f"{turn}"
            handle = lightck.attach(module, optimizer, folder, update="layerwise")
            for step in range(4):
                micro_batch(Case(), module, me.rank, step, 0)
                optimizer.step()
                optimizer.zero_grad()
            assert internals.checkpointer(handle).updates.active
            handle.close()
            assert handle.stats().committed > 0

    with ranks.started(2, code) as job:
        job.results()


class Broken(Exception):
    """An update that failed."""


FAILS_IN = 4


@pytest.mark.parametrize("early", [True, False], ids=["in the backward", "at its end"])
def test_a_failure_between_updates_leaves_others_in_peace_and_no_mixture_behind(
    early: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(optimizer="adam")

    def parameters(module: Any) -> list[torch.Tensor]:
        return [p.detach().clone() for p in module.parameters()]

    def code(me: Me) -> list[list[torch.Tensor]]:
        module, optimizer = made(case)
        run = tmp_path / "run"
        handle = lightck.attach(module, optimizer, run, update="layerwise", slots=4)
        if early:
            module.register_comm_hook(None, at_once)
        golden = [parameters(module)]
        for step in range(FAILS_IN):
            micro_batch(case, module, me.rank, step, 0)
            optimizer.step()
            optimizer.zero_grad()
            golden.append(parameters(module))
        handle.wait()
        if me.rank == 0:
            micro_batch(case, module, me.rank, FAILS_IN, 0)  # nobody is left waiting
            optimizer.step()
            handle.detach()
            return golden
        updates = []

        def update(optimizer: Any, some: Any) -> None:
            step_only(optimizer, some[: 1 if len(updates) == 2 else None])
            updates.append(some)
            if len(updates) == 3:
                raise Broken("half of a layer is updated")

        monkeypatch.setattr(layer_updates, "step_only", update)
        with pytest.raises(Broken):
            micro_batch(case, module, me.rank, FAILS_IN, 0)
        assert len(updates) == 3
        with pytest.raises(ConfigError, match="the state is mixed"):
            optimizer.step()
        handle.detach()
        return golden

    def again(me: Me) -> tuple[int, list[torch.Tensor]]:
        module, optimizer = made(case)
        info = lightck.restore(module, optimizer, tmp_path / "run")
        return info.step, parameters(module)

    with ranks.started(2, code) as job:
        golden, other = job.results()
    assert all(map(same_bits, golden, other))
    with ranks.started(2, again) as job:
        for step, restored in job.results():
            assert 0 < step <= FAILS_IN
            assert same_bits(restored, golden[step])
