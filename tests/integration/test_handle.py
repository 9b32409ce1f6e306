"""The handle: which steps are due, waiting, futures, snapshots on request, closing, counters."""

from __future__ import annotations

import concurrent.futures
import dataclasses
from pathlib import Path

import pytest
import torch

import lightck
from lightck.examine import kept
from lightck.policy import AtSteps, EveryEpochs, EverySteps
from support import faults
from support.loops import Loop, adam_loop, mlp, of_stored, steps_at


def attach(loop: Loop, path: Path, **settings: object) -> lightck.Handle:
    # A fence that waits long, on a busy machine, makes `auto` try staging: one snapshot at a time.
    settings = {"slots": 16, "placement": "direct", **settings}
    return lightck.attach(loop.model, list(loop.optimizers), path, **settings)  # type: ignore[arg-type]


# ---- Policies ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (1, [1, 2, 3, 4, 5, 6, 7]),
        (3, [3, 6]),
        (AtSteps([2, 5]), [2, 5]),
        (EverySteps(4) | AtSteps([1]), [1, 4]),
        (EverySteps(2) & EverySteps(3), [6]),
    ],
)
def test_due_steps_and_no_others_have_snapshots_and_close_adds_the_last(
    run_dir: Path, policy: object, expected: list[int]
) -> None:
    loop = adam_loop()
    with attach(loop, run_dir, policy=policy) as handle:
        for _ in range(8):
            loop.run(1)
            handle.wait()
        assert steps_at(run_dir) == expected
        loop.note()
    assert handle.stats().slipped == 0
    loop.check(run_dir, [*expected, 8])


class EveryTenSeconds:
    """A policy of the user's own, over a clock of the test's own."""

    def __init__(self) -> None:
        self.now = 0.0
        self.last = 0.0
        self.asked: list[lightck.Moment] = []

    def due(self, moment: lightck.Moment) -> bool:
        self.asked.append(moment)
        if self.now - self.last < 10:
            return False
        self.last = self.now
        return True


def test_any_object_with_a_method_due_decides_and_is_asked_once_per_step(run_dir: Path) -> None:
    loop, policy = adam_loop(), EveryTenSeconds()
    with attach(loop, run_dir, policy=policy) as handle:
        for seconds in (4, 4, 4, 4, 12, 1):
            policy.now += seconds
            loop.run(1)
            handle.wait()
        loop.note()
    assert [m.step for m in policy.asked] == [1, 2, 3, 4, 5, 6]
    assert [m.last_step for m in policy.asked] == [None, None, None, 3, 3, 5]
    assert policy.asked[0].cost_s is None and policy.asked[0].persist_s is None
    assert policy.asked[5].cost_s > 0 and policy.asked[5].persist_s > 0  # type: ignore[operator]
    assert [m.time_s for m in policy.asked] == sorted(m.time_s for m in policy.asked)
    loop.check(run_dir, [3, 5, 6])


def test_an_epoch_is_due_at_the_first_step_after_the_loop_has_marked_it(run_dir: Path) -> None:
    loop = adam_loop()
    with attach(loop, run_dir, policy=EveryEpochs()) as handle:
        for _ in range(3):
            loop.run(3)
            handle.epoch()
        handle.wait()
        loop.run(1)
        handle.wait()
        loop.note()
    loop.check(run_dir, [4, 7, 10])


# ---- Waiting ----------------------------------------------------------------------------------


def test_wait_makes_held_back_copies_and_returns_when_the_snapshot_is_committed(
    run_dir: Path,
) -> None:
    loop = adam_loop()
    with attach(loop, run_dir) as handle:
        loop.run(1)
        assert handle.last_captured_step is None
        loop.forward()  # opens snapshot 1
        handle.wait(1)
        assert (handle.last_captured_step, handle.last_committed_step) == (1, 1)
        assert steps_at(run_dir) == [1]
        handle.wait(1)
        handle.wait()


def test_a_wait_that_runs_out_of_time_names_the_steps_and_the_commit_goes_on(
    disk_dir: Path,
) -> None:
    loop = adam_loop()
    with attach(loop, disk_dir) as handle:
        loop.run(1)
        faults.hold(faults.SYNC)
        loop.forward()
        with pytest.raises(lightck.WaitTimeoutError, match=r"after 0.001 s: steps \[1\]") as caught:
            handle.wait(timeout=0.001)
        assert isinstance(caught.value, TimeoutError)
        faults.release(faults.SYNC)
        handle.wait(timeout=100)
        assert handle.last_committed_step == 1
        assert of_stored(disk_dir, 1) == loop.seen[1]


def test_waiting_for_a_step_that_nobody_opened_fails_at_once_and_names_it(run_dir: Path) -> None:
    loop = adam_loop()
    with attach(loop, run_dir, policy=2) as handle:
        loop.run(3)
        with pytest.raises(lightck.WaitTimeoutError, match=r"step 9 or newer.*committed one is 2"):
            handle.wait(9)


def test_waiting_for_a_due_step_before_its_forward_opens_it_early(disk_dir: Path) -> None:
    loop = adam_loop()
    with attach(loop, disk_dir, slots=2) as handle:
        for step in (1, 2, 3):
            loop.run(1)  # also opens the one before, whose commit may keep its slot busy
            loop.note()
            handle.wait(handle.step)
            assert handle.last_committed_step == step
            assert of_stored(disk_dir, step) == loop.seen[step]
            assert lightck.snapshots(disk_dir)["early"].to_pylist()[0] is True
        handle.wait()  # opens nothing twice
        assert handle.stats().captured == 3
        loop.forward()


def test_waiting_for_what_is_not_due_opens_nothing(run_dir: Path) -> None:
    loop = adam_loop()
    with attach(loop, run_dir, policy=2) as handle:
        loop.run(2)
        loop.run(1)
        handle.wait(2)  # opened at its forward already
        with pytest.raises(lightck.WaitTimeoutError, match="step 3 or newer"):
            handle.wait(3)
        loop.run(1)
        handle.wait()
        handle.wait(2)  # 4 is due, and 2 is there
        assert handle.stats().captured == 1


def test_waiting_early_ends_at_the_time_out_when_no_slot_is_free(disk_dir: Path) -> None:
    loop = adam_loop()
    with attach(loop, disk_dir, slots=2) as handle:
        loop.run(1)
        handle.wait(1)
        loop.run(1)
        with faults.delayed(faults.SYNC, 3600.0):
            loop.run(1)  # opens 2, beside the committed 1
            with pytest.raises(lightck.WaitTimeoutError, match=r"after 0.01 s: steps \[2\]"):
                handle.wait(3, timeout=0.01)
            assert handle.last_captured_step == 2
        handle.wait(3)
        assert handle.last_committed_step == 3
        assert handle.stats().slipped == 0


def test_step_zero_can_be_waited_for(run_dir: Path) -> None:
    loop = adam_loop()
    with attach(loop, run_dir, policy=1000) as handle:
        handle.snapshot()
        handle.wait(0)
        assert handle.last_committed_step == 0
        handle.wait(0)


# ---- Snapshots on request -----------------------------------------------------------------------


def test_snapshot_is_copied_when_it_returns_and_its_future_gives_the_step(run_dir: Path) -> None:
    loop = adam_loop()
    with attach(loop, run_dir, policy=1000) as handle:
        loop.run(2)
        loop.note()
        future = handle.snapshot()
        assert handle.last_captured_step == 2
        with torch.no_grad():  # after forward start was declared: not part of it
            loop.model[0].weight.zero_()
        assert future.result(timeout=100) == 2
        assert of_stored(run_dir, 2) == loop.seen[2]


def test_a_snapshot_before_the_first_step_holds_step_zero(run_dir: Path) -> None:
    loop = adam_loop()
    with attach(loop, run_dir, policy=1000) as handle:
        loop.note()
        assert handle.snapshot().result(timeout=100) == 0
        assert of_stored(run_dir, 0) == loop.seen[0]


def test_between_micro_batches_a_snapshot_waits_for_the_next_boundary(run_dir: Path) -> None:
    loop = adam_loop()
    with attach(loop, run_dir, policy=1000) as handle:
        loop.run(1)
        loop.forward().backward()
        first, second = handle.snapshot(), handle.snapshot()
        loop.forward().backward()
        assert handle.last_captured_step is None
        loop.update()
        assert not first.done()
        loop.forward()
        assert first.result(timeout=100) == second.result(timeout=100) == 2
        assert of_stored(run_dir, 2) == loop.seen[2]
    assert handle.stats().captured == 1


def test_inside_an_update_a_snapshot_waits_for_the_next_boundary(run_dir: Path) -> None:
    loop = adam_loop()
    futures = []
    with attach(loop, run_dir, policy=1000) as handle:
        hook = loop.optimizers[0].register_step_pre_hook(
            lambda *_: futures.append(handle.snapshot())
        )
        loop.run(1)
        hook.remove()
        assert handle.stats().captured == 0
        loop.run(1)
        assert futures[0].result(timeout=100) == 1
        assert of_stored(run_dir, 1) == loop.seen[1]


def test_between_the_updates_of_one_step_a_snapshot_waits_as_well(run_dir: Path) -> None:
    model = mlp(16, 2)
    first = torch.optim.AdamW(model[0].parameters())
    second = torch.optim.AdamW(model[1].parameters())
    loop = Loop(model, first, second, width=16)
    with lightck.attach(model, [first, second], run_dir, policy=1000) as handle:
        loop.run(1)
        loop.forward().backward()
        first.step()
        future = handle.snapshot()
        assert handle.stats().captured == 0
        second.step()
        loop.step += 1
        model.zero_grad()
        loop.forward()
        assert future.result(timeout=100) == 2
        assert of_stored(run_dir, 2) == loop.seen[2]


@pytest.mark.parametrize("how", ["close", "detach", "exception"])
def test_a_future_that_still_waits_for_a_boundary_ends_with_the_handle(
    run_dir: Path, how: str
) -> None:
    loop = adam_loop()
    handle = attach(loop, run_dir, policy=1000)
    loop.run(1)
    loop.forward().backward()
    future = handle.snapshot()
    if how == "close":
        handle.close()
    elif how == "detach":
        handle.detach()
    else:
        with pytest.raises(KeyError), handle:
            raise KeyError("the user's")
    if how == "close":
        assert future.exception(timeout=100) is None
        assert future.result() == 1
    else:
        with pytest.raises(lightck.LightckError, match="closed"):
            future.result(timeout=100)


def test_a_future_cannot_be_cancelled_behind_the_engines_back(run_dir: Path) -> None:
    loop = adam_loop()
    with attach(loop, run_dir, policy=1000) as handle:
        loop.run(1)
        future = handle.snapshot()
        assert not future.cancel()
        assert future.result(timeout=100) == 1


def test_a_future_can_be_waited_for_on_another_thread(run_dir: Path) -> None:
    loop = adam_loop()
    with attach(loop, run_dir, policy=1000) as handle:
        loop.run(1)
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            assert pool.submit(handle.snapshot().result, 30).result(60) == 1


# ---- Closing ------------------------------------------------------------------------------------


def test_close_commits_the_last_step_and_can_be_called_again(run_dir: Path) -> None:
    loop = adam_loop()
    handle = attach(loop, run_dir, policy=1000)
    loop.run(3)
    handle.close()
    before = handle.stats()
    handle.close()
    handle.detach()
    assert handle.stats() == before
    assert steps_at(run_dir) == [3]
    for call in (handle.snapshot, handle.fence, handle.before_update):
        with pytest.raises(lightck.LightckError, match="closed"):
            call()


def test_after_close_training_goes_on_without_the_engine(run_dir: Path) -> None:
    loop = adam_loop()
    handle = attach(loop, run_dir)
    loop.run(1)
    handle.close()
    loop.run(3)
    assert handle.step == 1
    assert steps_at(run_dir) == [1]


def test_the_users_exception_is_not_masked_and_the_last_opened_snapshot_is_kept(
    run_dir: Path,
) -> None:
    loop = adam_loop()
    with pytest.raises(KeyError, match="the user's"), attach(loop, run_dir):
        loop.run(2)
        loop.forward()
        raise KeyError("the user's")
    loop.check(run_dir, [1, 2])


def test_detach_then_attach_goes_on_in_the_same_process(run_dir: Path) -> None:
    loop = adam_loop()
    for _ in range(3):
        handle = attach(loop, run_dir, policy=2, slots=8)
        assert handle.step == loop.step
        loop.run(3)
        handle.detach()
    loop.check(run_dir, [2, 4, 8])  # 6 was due, but its boundary came after detach
    with attach(loop, run_dir, policy=1000, slots=8):
        loop.run(1)
        loop.note()
    loop.check(run_dir, [2, 4, 8, 10])


def test_two_handles_on_two_models_do_not_see_each_other(run_dir: Path) -> None:
    first, second = adam_loop(), adam_loop()
    with (
        attach(first, run_dir.with_name("a")) as one,
        attach(second, run_dir.with_name("b"), policy=2) as other,
    ):
        for _ in range(3):
            first.run(2)
            second.run(1)
        assert (one.step, other.step) == (6, 3)
        first.note()
        second.note()
    first.check(run_dir.with_name("a"), [1, 2, 3, 4, 5, 6])
    second.check(run_dir.with_name("b"), [2, 3])


# ---- Counters -----------------------------------------------------------------------------------


def test_stats_say_what_happened(run_dir: Path) -> None:
    loop = adam_loop()
    with attach(loop, run_dir, policy=2) as handle:
        before = handle.stats()
        assert dataclasses.astuple(before)[:8] == (0, 0, 0, 0, 0, 0, 0, 0)
        loop.run(5)
        handle.wait()
        stats = handle.stats()
        assert (stats.captured, stats.committed) == (2, 2)
        assert (stats.slipped, stats.torn, stats.failed) == (0, 0, 0)
        state = sum(t.nbytes for t in loop.model.state_dict().values())
        state += sum(v.nbytes for held in loop.optimizers[0].state.values() for v in held.values())
        assert stats.bytes_copied + stats.skipped_unchanged_bytes == 2 * state
        assert 0 <= stats.bytes_helped <= stats.bytes_copied
        assert stats.copy_rate > 0 and stats.commit_s > 0
        assert set(stats.stall_s) >= {"fence", "boundary"}
        assert all(spent > 0 for spent in stats.stall_s.values())
        assert before.captured == 0  # a copy, not a view


def test_a_snapshot_for_which_readers_leave_no_slot_is_an_error_and_no_wait(run_dir: Path) -> None:
    loop = adam_loop()
    with attach(loop, run_dir, policy=1000, slots=2, failure="off") as handle:
        loop.run(1)
        assert handle.snapshot().result(250) == 1
        held = lightck.load(run_dir)
        loop.run(1)
        assert handle.snapshot().result(250) == 2
        loop.run(1)
        with pytest.raises(lightck.RegionBusyError, match=r"step 3 .*let go of it, or attach"):
            handle.snapshot().result(250)
        del held
        assert handle.snapshot().result(250) == 3


@pytest.mark.parametrize("again", ["restored", "attached again"])
def test_epochs_are_counted_over_all_lives(run_dir: Path, again: str) -> None:
    loop = adam_loop()
    for life in range(2):
        if life and again == "restored":
            loop = adam_loop()
            lightck.restore(loop.model, list(loop.optimizers), run_dir)
        with attach(loop, run_dir, policy=EveryEpochs(2), keep="every 1 epochs") as handle:
            for _ in range(3):
                for _ in range(2):
                    loop.run(1)
                    handle.wait()
                handle.epoch()
    # The first step behind the second epoch and behind the fourth, and at each life's end the last.
    assert {5, 6, 9, 12} >= {*steps_at(run_dir)} >= {9, 12}
    assert {each["step"]: each["epoch"] for each in kept(run_dir)} == {12: 6, 9: 4, 6: 3, 5: 2}


def test_a_model_that_was_made_anew_behind_attach_is_told(
    run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A notebook's cell that is run again does that."""
    loop, again = adam_loop(), adam_loop()
    with attach(loop, run_dir) as handle:
        again.run(99)
        assert "no_step_seen" not in caplog.text
        again.run(2)
        assert caplog.text.count("no_step_seen") == 1
        assert handle.step == 0
        loop.run(1)
        again.run(200)
        assert caplog.text.count("no_step_seen") == 1
