"""Names do not depend on DDP; one rank stays as it was; how long a step takes to be whole."""

from __future__ import annotations

import statistics
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_fates_of_steps import settled, until
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lightck
from lightck.pipeline.commit_barrier import SingleProcessBarrier
from lightck.pipeline.pipeline import Pipeline
from lightck.restore import progress
from lightck.state.modules import innermost, named_buffers, named_parameters
from support import internals, proof
from support.distributed import ranks
from support.distributed.training import Training


def plain() -> nn.Module:
    inner = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    # A submodule whose own name is that of DDP's attribute.
    return nn.ModuleDict({"module": inner, "head": nn.Linear(3, 1)})


def names(model: nn.Module) -> tuple[list[str], list[str]]:
    return [n for n, _ in named_parameters(model)], [n for n, _ in named_buffers(model)]


def test_names_are_those_of_the_unwrapped_modules() -> None:
    def code(me: ranks.Me) -> None:
        expected = names(plain())
        assert "module.0.weight" in expected[0], "a user's own module of that name"
        assert names(DistributedDataParallel(plain())) == expected
        inside = plain()
        inside["module"] = DistributedDataParallel(inside["module"])  # type: ignore[index]
        assert names(inside) == expected
        compiled = torch.compile(DistributedDataParallel(plain()), backend="eager")
        assert names(compiled) == expected  # type: ignore[arg-type]
        one = nn.Linear(2, 2)
        wrapped = DistributedDataParallel(one)
        both = nn.ModuleList([wrapped, DistributedDataParallel(nn.Linear(2, 2))])
        assert names(both)[0] == ["0.weight", "0.bias", "1.weight", "1.bias"]
        assert innermost(torch.compile(wrapped, backend="eager")) is one  # type: ignore[arg-type]
        assert progress(wrapped) is progress(one) is progress(nn.ModuleList([wrapped]))

    with ranks.started(2, code) as job:
        job.results()


def test_the_wrapped_module_and_the_one_inside_are_the_same_to_attach(region_dir: Path) -> None:
    def train(me: ranks.Me) -> Any:
        training = Training(me.rank)
        found = []
        for model in (training.module, training.model):
            with lightck.attach(model, training.optimizer, region_dir, threads=1) as handle:
                training.steps(3)
            found.append((handle.last_committed_step, progress(training.module).step))
        return found

    with ranks.started(2, train) as job:
        assert job.results() == [[(3, 3), (6, 6)]] * 2


@pytest.mark.parametrize("initialized", [False, True])
def test_one_rank_has_no_threads_and_no_store(initialized: bool, region_dir: Path) -> None:
    def train(me: ranks.Me) -> Any:
        training = Training()
        before = {t.name for t in threading.enumerate()}
        handle = training.attach(region_dir, failure="off")
        training.steps(3)
        more = {t.name for t in threading.enumerate()} - before
        kind = type(internals.pipeline(handle).barrier)
        assert handle.config.slots == 0 and handle.region.info.slot_count == 2
        handle.close()
        keys = dist.distributed_c10d._get_default_store().num_keys() if initialized else None
        return more, kind, handle.last_committed_step, keys

    with ranks.started(1, train, initialized=initialized) as job:
        ((more, kind, last, keys),) = job.results()
    assert (more, kind, last) == (set(), SingleProcessBarrier, 3)
    if initialized:
        with ranks.started(1, lambda me: me.store.num_keys()) as job:
            assert job.results() == [keys], "lightck has put nothing there"


def test_how_long_after_the_last_ranks_copies_every_rank_knows(region_dir: Path) -> None:
    """CLOCK_MONOTONIC is one clock for all processes: captured on the last, whole on the last."""
    world, steps = 2, 40

    def train(me: ranks.Me) -> Any:
        captured: dict[int, float] = {}
        whole: dict[int, float] = {}
        kept = Pipeline._whole

        def noted(pipeline: Pipeline, snapshot: Any) -> None:
            captured[snapshot.step] = snapshot.captured_s
            whole[snapshot.step] = time.monotonic()
            kept(pipeline, snapshot)

        Pipeline._whole = noted  # type: ignore[method-assign]
        training = Training(me.rank)
        with training.attach(region_dir, proof=False, threads=1) as handle:
            for _ in range(steps):
                training.step()
                # Nothing else runs meanwhile: what is measured is the commit, not the training.
                until(lambda: settled(handle))
                dist.barrier()
        return captured, whole

    with ranks.started(world, train) as job:
        results = job.results()
    common = set.intersection(*(set(whole) for _, whole in results))
    latencies = [
        max(whole[s] for _, whole in results) - max(captured[s] for captured, _ in results)
        for s in sorted(common)
    ]
    assert len(latencies) >= steps - 1
    assert min(latencies) > 0
    numbers = {
        "ranks": world,
        "snapshots": len(latencies),
        "median_ms": round(statistics.median(latencies) * 1e3, 2),
        "least_ms": round(min(latencies) * 1e3, 2),
    }
    proof.record("global_commit_latency", numbers)
    print(numbers)
