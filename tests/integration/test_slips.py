"""A slot that is still busy makes a due snapshot slip: training goes on and the slip is counted.

Nothing here looks at a clock: that the training thread does not wait for a medium shows in how far
it gets while the medium has not answered.
"""

from __future__ import annotations

import gc
import logging
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch

import lightck
from support import faults
from support.loops import adam_loop, digest, of_stored, steps_at


def test_steps_go_on_while_the_medium_syncs_and_what_does_not_fit_slips(disk_dir: Path) -> None:
    loop = adam_loop()
    handle = lightck.attach(loop.model, list(loop.optimizers), disk_dir)
    loop.run(1)
    faults.hold(faults.SYNC)
    while handle.stats().slipped < 3:
        loop.run(1)
        assert loop.step < 1000, "every step found a free slot: the training thread waits"
    assert handle.stats().committed == 0
    assert handle.step == loop.step
    faults.release(faults.SYNC)
    handle.wait(timeout=100)
    loop.run(1)
    loop.note()
    handle.close()
    stats = handle.stats()
    assert stats.committed == stats.captured
    assert (stats.torn, stats.failed) == (0, 0)
    assert handle.last_committed_step == loop.step
    there = steps_at(disk_dir)
    assert there[-1] == loop.step
    loop.check(disk_dir, there)


@pytest.mark.parametrize("how", ["torn", "with a slot of it left"])
def test_giving_up_a_snapshot_does_not_wait_for_a_sync_either(disk_dir: Path, how: str) -> None:
    loop = adam_loop()
    slots = 2 if how == "torn" else 3
    handle = lightck.attach(
        loop.model, list(loop.optimizers), disk_dir, slots=slots, on_error=lambda error: None
    )
    loop.run(2)
    handle.wait()
    faults.hold(faults.SYNC)
    loop.forward().backward()
    with torch.no_grad():
        loop.model[0].bias.add_(1)  # torn: dropped at the fence
    loop.update()
    while handle.stats().slipped < 1:
        loop.run(1)
        assert loop.step < 1000, "the training thread waits"
    assert handle.stats().torn == 1
    faults.release(faults.SYNC)
    handle.detach()
    there = steps_at(disk_dir)
    assert 1 in there
    loop.check(disk_dir, there)


def test_a_reader_keeps_its_slot_and_the_trainers_due_steps_slip(run_dir: Path) -> None:
    loop = adam_loop()
    handle = lightck.attach(loop.model, list(loop.optimizers), run_dir, slots=2)
    loop.run(3)
    handle.wait()
    assert steps_at(run_dir) == [1, 2]
    held = lightck.load(run_dir, 1)
    loop.run(3)
    handle.wait()
    assert handle.stats().slipped == 3
    assert steps_at(run_dir) == [1, 2]
    loop_digest = {f"model/{k}": digest(v) for k, v in held["model"].items()}
    assert loop_digest.items() <= loop.seen[1].items()  # what the reader maps has not changed
    del held
    gc.collect()
    loop.run(1)
    handle.wait()
    assert handle.stats().slipped == 3
    assert steps_at(run_dir) == [2, 6]
    handle.detach()
    loop.check(run_dir, [2, 6])


def test_a_slipped_snapshot_is_made_at_the_next_step_due_or_not(
    run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "lightck")
    loop = adam_loop()
    handle = lightck.attach(loop.model, list(loop.optimizers), run_dir, slots=2, policy=4)
    loop.run(9)
    handle.wait()
    held = lightck.load(run_dir, 4)
    loop.run(5)  # opens 12 (slips) and 13 (slips): each at its next forward
    assert handle.stats().slipped == 2
    assert [r.getMessage() for r in caplog.records if "slipped" in r.getMessage()] == [
        "lightck: slipped step=12 why=every slot is busy",
        "lightck: slipped step=13 why=every slot is busy",
    ]
    del held
    gc.collect()
    loop.run(2)
    handle.wait()
    assert steps_at(run_dir) == [8, 14]
    handle.detach()
    loop.check(run_dir, [8, 14])


def test_a_future_of_a_boundary_waits_out_a_slip(run_dir: Path) -> None:
    loop = adam_loop()
    handle = lightck.attach(loop.model, list(loop.optimizers), run_dir, slots=2)
    loop.run(3)
    handle.wait()
    held = lightck.load(run_dir, 1)
    futures: list[Future[int]] = []
    loop.run(1, lambda _: futures.append(handle.snapshot()))  # for step 4: no slot
    loop.run(1)
    (future,) = futures
    assert not future.done()
    del held
    gc.collect()
    loop.run(2)
    assert future.result(timeout=100) == 5
    handle.detach()


def test_close_says_so_when_no_slot_is_left_for_the_last_step(run_dir: Path) -> None:
    loop = adam_loop()
    handle = lightck.attach(loop.model, list(loop.optimizers), run_dir, slots=2)
    loop.run(3)
    handle.wait()
    held = lightck.load(run_dir, 1)
    with (
        pytest.warns(RuntimeWarning, match="step 3, the last one, has no snapshot"),
        pytest.raises(lightck.RegionBusyError, match="step 3, the last one, has no snapshot"),
    ):
        handle.close()
    del held
    gc.collect()
    assert steps_at(run_dir) == [1, 2]
    assert of_stored(run_dir, 2) == loop.seen[2]


def test_the_protected_slot_is_never_reused_however_long_the_others_are_busy(
    run_dir: Path,
) -> None:
    loop = adam_loop()
    handle = lightck.attach(loop.model, list(loop.optimizers), run_dir, slots=3)
    loop.run(4)
    handle.wait()
    assert steps_at(run_dir) == [1, 2, 3]
    held = [lightck.load(run_dir, 1), lightck.load(run_dir, 2)]
    loop.run(5)
    handle.wait()
    assert handle.stats().slipped == 5
    assert of_stored(run_dir, 3) == loop.seen[3]
    del held
    gc.collect()
    handle.detach()
