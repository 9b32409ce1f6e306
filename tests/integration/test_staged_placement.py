"""Copies go through DRAM on media that could be written directly, and commit what was captured."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import lightck
from lightck.pipeline import placement
from lightck.region.native_pool import NativePool
from support import internals
from support.loops import Loop, adam_loop, attach, mlp, steps_at

HUGE_PAGE = 2 << 20
SLOW = 4 << 20  # bytes per second


def messages(caplog: pytest.LogCaptureFixture, event: str) -> list[dict[str, Any]]:
    return [r.lightck for r in caplog.records if getattr(r, "lightck_event", "") == event]


@pytest.mark.parametrize("threads", [1, 3])
def test_staged_snapshots_hold_the_state_of_their_step(run_dir: Path, threads: int) -> None:
    loop = adam_loop()
    handle = lightck.attach(
        loop.model, list(loop.optimizers), run_dir, placement="staged", threads=threads, slots=4
    )
    loop.run(12)
    loop.note()
    handle.close()
    stats = handle.stats()
    assert stats.staging_bytes > 0
    assert (stats.torn, stats.failed) == (0, 0)
    assert stats.captured == stats.committed
    loop.check(run_dir, steps_at(run_dir))


def test_the_dram_is_said_before_it_is_used(
    run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "lightck")
    loop = adam_loop()
    loop.run(1)
    handle = lightck.attach(loop.model, list(loop.optimizers), run_dir, placement="staged")
    loop.run(2)
    handle.close()
    names = [getattr(r, "lightck_event", "") for r in caplog.records]
    assert names.index("staging") < names.index("committed")
    (said,) = messages(caplog, "staging")
    assert said["bytes"] == said["payload_bytes"] > 0


def test_what_nobody_expected_while_mapping_dram_reaches_the_caller(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stage(pool: NativePool, size: int) -> None:
        raise ZeroDivisionError(f"of {size}")

    loop = adam_loop()
    handle = lightck.attach(loop.model, list(loop.optimizers), run_dir, placement="staged")
    monkeypatch.setattr(NativePool, "stage", stage)
    with pytest.raises(ZeroDivisionError, match=r"of \d+"):
        loop.run(1)
    handle.detach()


def test_a_slow_medium_lets_steps_slip_and_never_makes_the_fence_wait(run_dir: Path) -> None:
    loop = adam_loop()
    handle = lightck.attach(
        loop.model, list(loop.optimizers), run_dir, placement="staged", write_limit=1 << 10
    )
    loop.run(1)
    while handle.stats().slipped < 3:
        loop.run(1)
        assert loop.step < 1000, "every step found the medium free: the training thread waits"
    assert handle.stats().committed <= 1
    loop.note()
    internals.pipeline(handle).pool.limit(0)  # or the close would take its time, too
    handle.close()
    assert steps_at(run_dir)[-1] == loop.step
    loop.check(run_dir, steps_at(run_dir))


def test_one_staged_snapshot_holds_the_dram_although_slots_are_free(
    run_dir: Path, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    caplog.set_level(logging.DEBUG, "lightck")
    model = mlp(1200, 2)  # so large that a second snapshot does not fit into what is mapped
    loop = Loop(model, torch.optim.AdamW(model.parameters()), width=1200)
    slow = {"write_limit": 1 << 14, "chunk_bytes": 4096}
    handle = attach(run_dir, loop, placement="staged", slots=4, trace=True, **slow)
    loop.run(1)
    while handle.stats().slipped < 3:
        loop.run(1)
        assert loop.step < 1000, "every step found a free slot"
    stats = handle.stats()
    (said,) = messages(caplog, "staging")
    assert stats.captured == 1
    assert said["payload_bytes"] <= stats.staging_bytes < said["payload_bytes"] + HUGE_PAGE
    assert len(internals.pipeline(handle).region.free_slots()) > 0
    why = "the DRAM for staging still holds the last snapshot"
    assert {slip["why"] for slip in messages(caplog, "slipped")} == {why}
    internals.pipeline(handle).pool.limit(0)
    loop.note()
    handle.close()
    document = json.loads(handle.trace(tmp_path / "run.json").read_text())
    slips = [e["args"]["why"] for e in document["traceEvents"] if e["name"].startswith("slipped")]
    assert len(slips) >= 3 and set(slips) == {why}
    loop.check(run_dir, steps_at(run_dir))


def test_auto_stages_what_goes_to_a_medium_slower_than_dram(
    run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "lightck")
    loop = adam_loop()
    handle = lightck.attach(loop.model, list(loop.optimizers), run_dir, write_limit=SLOW)
    (told,) = messages(caplog, "attached")
    assert told["placement"] == "staged" and told["placement_why"].count("GB/s") == 2
    loop.run(4)
    stats = handle.stats()
    assert (stats.placement, stats.placement_why) == ("staged", told["placement_why"])
    assert stats.staging_bytes > 0
    loop.note()
    handle.close()
    loop.check(run_dir, steps_at(run_dir))


@pytest.mark.parametrize("wanted", ["auto", "direct", "staged"])
def test_dram_is_not_measured_and_an_explicit_placement_wins(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, wanted: str
) -> None:
    monkeypatch.setattr(placement, "dram_rate", None)  # whoever measures fails
    monkeypatch.setattr(placement, "measure_stores", None)
    loop = adam_loop()
    limit = {} if wanted == "auto" else {"write_limit": SLOW}
    with lightck.attach(loop.model, loop.optimizers, run_dir, placement=wanted, **limit) as handle:
        assert handle.stats().placement == ("staged" if wanted == "staged" else "direct")
        loop.run(2)


@pytest.mark.parametrize("limit", [0, 1 << 30])
def test_no_copy_at_the_forward_waits_for_a_write_limit(run_dir: Path, limit: int) -> None:
    loop = adam_loop()
    with lightck.attach(loop.model, loop.optimizers, run_dir, write_limit=limit) as handle:
        assert internals.pipeline(handle).copy_plan.may_block_at_boundary == (limit == 0)


def test_a_write_limit_holds_for_direct_snapshots_too(run_dir: Path) -> None:
    loop = adam_loop()
    handle = lightck.attach(
        loop.model, list(loop.optimizers), run_dir, placement="direct", write_limit=SLOW
    )
    loop.run(5)
    handle.wait()
    stats = handle.stats()
    handle.close()
    assert stats.staging_bytes == 0
    assert sum(stats.stall_s.values()) * SLOW >= 0.5 * stats.bytes_helped
    assert stats.copy_rate <= SLOW
