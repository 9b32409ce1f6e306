"""lightck sees gradients on their way to other ranks, and changes no bit of them."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import lightck
from support.distributed import ranks
from support.distributed.ranks import Me
from support.distributed.replicas import (
    Case,
    compared,
    made,
    micro_batch,
    register,
    same_bits,
    train,
)
from support.proof import record_whole

VIEWS: tuple[dict[str, Any], ...] = (
    {"gradient_as_bucket_view": True},
    {"gradient_as_bucket_view": False},
)
WHOLE = {"bucket_cap_mb": 25}
"""PowerSGD's collectives, from gloo's own threads, pass each other when there are two buckets."""
CASES = [
    *(Case(view, hook) for view in VIEWS for hook in ("", "allreduce", "fp16")),
    *(Case(view | WHOLE, "power") for view in VIEWS),
    *(Case(view, to_none=False) for view in VIEWS),
    *(Case(view, accumulation=3) for view in VIEWS),
    *(Case({**view, "static_graph": True}, branches="same") for view in VIEWS),
    *(Case({**view, "find_unused_parameters": True}, branches="own") for view in VIEWS),
    Case({"batched_grad_copy": True}),
    *(Case(kind=kind) for kind in ("checkpointed", "tied", "half", "mixed")),
    Case({"find_unused_parameters": True}, "fp16", accumulation=2, branches="own"),
]


_shown = {"trainings": 0, "tensors": 0, "differing": 0}


@pytest.fixture(scope="module", autouse=True)
def shown(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    record_whole(request, "gradients", _shown)


def count(results: list[tuple[int, int]]) -> None:
    """Add a training, on every rank."""
    _shown["trainings"] += 1
    _shown["tensors"] += sum(tensors for tensors, _ in results)
    _shown["differing"] += sum(differing for _, differing in results)
    assert not any(differing for _, differing in results), results


@pytest.mark.parametrize("case", CASES, ids=str)
def test_no_bit_of_a_gradient_changes(case: Case, tmp_path: Path) -> None:
    def code(me: Me) -> tuple[int, int]:
        plain = train(me, case)
        return compared(plain, train(me, case, tmp_path, schedule="comm", trace=True))

    with ranks.started(3, code) as job:
        count(job.results())


def test_a_hook_from_before_attach_is_left_alone(tmp_path: Path) -> None:
    case = Case(hook="fp16")

    def code(me: Me) -> bool:
        plain = train(me, case)
        return same_bits(plain, train(me, case, tmp_path, late_hook=False, schedule="comm"))

    with ranks.started(2, code) as job:
        assert job.results() == [True] * 2


def attached(me: Me, folder: Path, **settings: Any) -> tuple[Any, ...]:
    """Return (module, optimizer, handle)."""
    module, optimizer = made(Case())
    handle = lightck.attach(module, optimizer, folder / "run", overwrite=True, **settings)
    return module, optimizer, handle


def one_step(me: Me, module: Any, optimizer: Any, step: int = 0) -> None:
    micro_batch(Case(), module, me.rank, step, 0)
    optimizer.step()
    optimizer.zero_grad()


def test_the_module_is_as_it_was_after_detach(tmp_path: Path) -> None:
    def code(me: Me) -> None:
        module, optimizer, handle = attached(me, tmp_path)
        assert "register_comm_hook" in vars(module)
        one_step(me, module, optimizer)
        handle.detach()
        assert "register_comm_hook" not in vars(module)
        assert not any(p._post_accumulate_grad_hooks for p in module.parameters())
        register(Case(hook="fp16"), module)  # nobody has taken the one place
        one_step(me, module, optimizer)

    with ranks.started(2, code) as job:
        job.results()


def test_a_second_hook_is_refused_as_torch_does(tmp_path: Path) -> None:
    def code(me: Me) -> None:
        module, _, handle = attached(me, tmp_path)
        with pytest.raises(TypeError, match="must be callable"):
            module.register_comm_hook(None, 7)
        register(Case(hook="fp16"), module)
        with pytest.raises(RuntimeError, match="can only be called once"):
            register(Case(hook="allreduce"), module)
        assert module._comm_hooks[0][0] is default_hooks.fp16_compress_hook
        pickle.dumps(module._comm_hooks[1][0])  # torch keeps the refused one, too
        handle.detach()

    with ranks.started(1, code) as job:
        job.results()


def test_a_hook_that_gives_no_future_is_told_so_by_torch(tmp_path: Path) -> None:
    def code(me: Me) -> None:
        module, _, handle = attached(me, tmp_path, trace=True)
        module.register_comm_hook(None, lambda state, bucket: 7)
        with pytest.raises(RuntimeError, match="must return a torch.futures.Future"):
            micro_batch(Case(), module, me.rank, 0, 0)
        handle.detach()

    with ranks.started(1, code) as job:
        job.results()


def pickled(module: DistributedDataParallel) -> DistributedDataParallel:
    return pickle.loads(pickle.dumps(module))


def saved(module: DistributedDataParallel) -> DistributedDataParallel:
    file = io.BytesIO()
    torch.save(module, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled, saved])
@pytest.mark.parametrize("hook_of_module", ["", "fp16"])
def test_copies_of_the_module_have_a_hook_of_their_own(
    copied: Callable[[DistributedDataParallel], DistributedDataParallel],
    hook_of_module: str,
    tmp_path: Path,
) -> None:
    def code(me: Me) -> None:
        module, optimizer, handle = attached(me, tmp_path)
        other = copied(module)
        seen: list[str] = []

        # Annotations would be strings here, which DDP does not take.
        def hook(state, bucket):  # type: ignore[no-untyped-def]
            seen.append(state)
            return default_hooks.fp16_compress_hook(None, bucket)

        register(Case(hook=hook_of_module), module)
        other.register_comm_hook("copy", hook)
        assert other.register_comm_hook.__self__ is other
        micro_batch(Case(), other, me.rank, 0, 0)
        assert set(seen) == {"copy"}
        handle.detach()

    with ranks.started(1, code) as job:
        job.results()
