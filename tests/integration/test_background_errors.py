"""A fault in the middle of a snapshot: latched, told as `on_error` says, older snapshots intact."""

from __future__ import annotations

import errno
import logging
import warnings
from pathlib import Path
from typing import Literal

import pytest
import torch

import lightck
from support import faults
from support.loops import Loop, adam_loop, of_live, of_stored, steps_at

# Where a snapshot can fail, and on which medium the place is visited.
PLACES = [
    (faults.INVALIDATE, "tmpfs"),
    (faults.COPY, "tmpfs"),
    (faults.COMMIT, "tmpfs"),
    (faults.RECORD, "tmpfs"),
    (faults.INVALIDATE, "file"),
    (faults.COPY, "file"),
    (faults.SYNC, "file"),
    (faults.COMMIT, "file"),
    (faults.RECORD, "file"),
]


KEPT: Literal["normal"] = "normal"
"""The priority of workers whose chunks nobody seizes. Who seizes a chunk from an idle one copies it
anew, and would meet a medium's failure again, but not one that is injected once.
"""


class Reports(list[BaseException]):
    """`on_error` was called with these errors."""

    def __call__(self, error: BaseException) -> None:
        self.append(error)


def restored(path: Path, of: Loop) -> tuple[lightck.RestoreInfo, Loop]:
    """A fresh loop like `of`, restored from `path`."""
    loop = adam_loop()
    info = lightck.restore(loop.model, list(loop.optimizers), path)
    assert info is not None
    loop.step = info.step
    assert of_live(loop.model, loop.optimizers) == of.seen[info.step]
    return info, loop


@pytest.mark.parametrize("after", [0, 1])
@pytest.mark.parametrize(("point", "medium"), PLACES)
def test_a_failure_is_told_once_latched_and_leaves_the_older_snapshot(
    run_dir: Path, disk_dir: Path, point: int, medium: str, after: int
) -> None:
    path = run_dir if medium == "tmpfs" else disk_dir
    loop, reports = adam_loop(), Reports()
    handle = lightck.attach(
        loop.model,
        list(loop.optimizers),
        path,
        on_error=reports,
        chunk_bytes=4096,
        priority=KEPT,
    )
    loop.run(3)
    handle.wait()
    assert handle.last_committed_step == 2
    faults.arm(point, errno.ENOSPC, after)
    for _ in range(6):  # training goes on
        loop.run(1)
        handle.wait()
    assert handle.step == 9
    assert len(reports) == 1, handle.stats()
    assert isinstance(reports[0], lightck.RegionIOError)
    assert isinstance(reports[0], OSError)
    assert "No space left" in str(reports[0]) and str(path) in str(reports[0])
    stats = handle.stats()
    survivor = handle.last_committed_step
    # A sync or an invalidation belongs to the first or the second snapshot since it was armed.
    assert survivor in ((2,) if after == 0 else (2, 3))
    assert stats.committed == survivor
    # On page media a slot is given up in the background: what comes meanwhile slips.
    assert stats.failed + stats.slipped == 8 - survivor
    assert of_stored(path, survivor) == loop.seen[survivor]
    with pytest.raises(lightck.RegionIOError, match="No space left"):
        handle.close()
    handle.close()

    info, again = restored(path, loop)
    assert info.step == survivor
    assert info.fell_back == ()
    with lightck.attach(again.model, list(again.optimizers), path) as handle:
        for _ in range(2):  # nothing is latched any more
            again.run(1)
            handle.wait()
        again.note()
    again.check(path, [survivor + 1, survivor + 2])


class Scheduler:
    """An extra whose state can be spoilt."""

    def __init__(self) -> None:
        self.state: dict[str, object] = {"rate": 1.0}

    def state_dict(self) -> dict[str, object]:
        return self.state

    def load_state_dict(self, state: dict[str, object]) -> None:
        self.state = state


def test_a_latched_region_is_told_once_whatever_else_fails_afterwards(run_dir: Path) -> None:
    loop, reports, extra = adam_loop(), Reports(), Scheduler()
    handle = lightck.attach(
        loop.model,
        list(loop.optimizers),
        run_dir,
        on_error=reports,
        extras={"rate": lightck.at_forward(extra)},
    )
    loop.run(2)
    handle.wait()
    faults.arm(faults.COMMIT)
    loop.run(2)
    handle.wait()
    assert [type(error) for error in reports] == [lightck.RegionIOError]
    whole, extra.state = extra.state, {"rate": lambda: 1.0}
    loop.run(1)
    extra.state = whole
    loop.run(3)
    assert reports[1:], "the spoilt state was not met"
    kinds = {type(error) for error in reports[1:]}
    assert kinds == {lightck.StateError}
    with pytest.raises(lightck.RegionIOError):
        handle.close()


def test_the_default_is_one_warning_and_an_error_in_the_log(
    run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loop = adam_loop()
    handle = lightck.attach(loop.model, list(loop.optimizers), run_dir)
    loop.run(2)
    faults.arm(faults.COMMIT)
    with pytest.warns(RuntimeWarning, match="Input/output error") as caught:
        for _ in range(4):
            loop.run(1)
            handle.wait()
    assert len(caught) == 1
    errors = [r for r in caplog.records if r.levelno >= logging.ERROR]
    assert len(errors) == 1 and "Input/output error" in errors[0].getMessage()
    with pytest.raises(lightck.RegionIOError):
        handle.close()


@pytest.mark.parametrize("point", [faults.COPY, faults.COMMIT])
def test_with_raise_the_loop_gets_the_error_at_the_next_call_of_the_engine(
    run_dir: Path, point: int
) -> None:
    loop = adam_loop()
    handle = lightck.attach(
        loop.model, list(loop.optimizers), run_dir, on_error="raise", priority=KEPT
    )
    loop.run(2)
    handle.wait()
    faults.arm(point)
    with pytest.raises(lightck.RegionIOError, match="Input/output error"):
        loop.run(1)
        handle.wait()
    with pytest.raises(lightck.RegionIOError, match="Input/output error"):
        handle.close()
    handle.close()
    assert of_stored(run_dir, 1) == loop.seen[1]


@pytest.mark.parametrize("early", [False, True])
def test_waiting_for_a_step_whose_commit_failed_raises_the_cause_also_with_warn(
    run_dir: Path, early: bool
) -> None:
    loop = adam_loop()
    handle = lightck.attach(loop.model, list(loop.optimizers), run_dir)
    loop.run(2)
    handle.wait()
    if not early:
        loop.forward()
    faults.arm(faults.COMMIT)
    with (
        pytest.warns(RuntimeWarning, match="Input/output error"),
        pytest.raises(lightck.PersistError, match="step 2 or .* one is 1.*Input/out") as caught,
    ):
        handle.wait(2)
    assert isinstance(caught.value.__cause__, lightck.RegionIOError)
    with pytest.raises(lightck.RegionIOError):
        handle.close()
    assert of_stored(run_dir, 1) == loop.seen[1]


def test_with_raise_inside_a_with_block_the_error_comes_out_once(run_dir: Path) -> None:
    loop = adam_loop()
    with (
        pytest.raises(lightck.RegionIOError) as caught,
        lightck.attach(loop.model, list(loop.optimizers), run_dir, on_error="raise") as handle,
    ):
        loop.run(2)
        handle.wait()
        faults.arm(faults.RECORD)
        loop.run(1)
        handle.wait()
    assert caught.value.__context__ is None
    assert not getattr(caught.value, "__notes__", [])


def test_an_error_nobody_met_comes_out_of_close(run_dir: Path) -> None:
    loop = adam_loop()
    handle = lightck.attach(loop.model, list(loop.optimizers), run_dir, on_error="raise")
    loop.run(2)
    handle.wait()
    faults.arm(faults.COMMIT)
    loop.forward()
    with pytest.raises(lightck.RegionIOError):
        handle.close()
    handle.close()
    handle.detach()


def test_the_cause_is_told_before_its_consequence(run_dir: Path) -> None:
    """A commit fails between a look at it and the next snapshot's opening, in some of the runs."""
    for i in range(20):
        loop, reports = adam_loop(), Reports()
        path = run_dir.with_name(f"run-{i}")
        handle = lightck.attach(loop.model, list(loop.optimizers), path, on_error=reports, slots=4)
        faults.arm(faults.COMMIT)
        loop.run(4)
        handle.wait()
        assert [type(e) for e in reports] == [lightck.RegionIOError]
        handle.detach()


@pytest.mark.parametrize("failure", ["off", "jit"])
def test_closing_saves_the_last_step_before_it_raises(run_dir: Path, failure: str) -> None:
    loop = adam_loop()
    handle = lightck.attach(
        loop.model, list(loop.optimizers), run_dir, on_error="raise", failure=failure
    )
    loop.run(2)
    loop.forward()
    with torch.no_grad():
        loop.model[0].bias.add_(1)  # torn
    loop.seen.pop(2)
    loop.note()
    with pytest.raises(lightck.TornSnapshotError):
        handle.close()
    handle.close()
    loop.check(run_dir, [1, 2])


def test_the_users_own_exception_is_never_masked(run_dir: Path) -> None:
    loop, reports = adam_loop(), Reports()
    with (
        pytest.raises(KeyError, match="the user's") as caught,
        lightck.attach(loop.model, list(loop.optimizers), run_dir, on_error=reports) as handle,
    ):
        loop.run(2)
        handle.wait()
        faults.arm(faults.COMMIT)
        loop.forward()
        raise KeyError("the user's")
    assert [type(e) for e in reports] == [lightck.RegionIOError]
    assert caught.value.__context__ is None


def test_the_users_own_exception_comes_with_a_note_about_ours(run_dir: Path) -> None:
    loop = adam_loop()
    with (
        pytest.raises(KeyError, match="the user's") as caught,
        lightck.attach(loop.model, list(loop.optimizers), run_dir, on_error="raise") as handle,
    ):
        loop.run(2)
        handle.wait()
        faults.arm(faults.COMMIT)
        loop.forward()
        raise KeyError("the user's")
    assert any("Input/output error" in note for note in caught.value.__notes__)


@pytest.mark.parametrize("point", [faults.COPY, faults.COMMIT])
@pytest.mark.parametrize("on_error", ["raise", "call"])
def test_a_future_gives_the_error_of_its_snapshot(run_dir: Path, point: int, on_error: str) -> None:
    loop, reports = adam_loop(), Reports()
    handle = lightck.attach(
        loop.model,
        list(loop.optimizers),
        run_dir,
        policy=1000,
        on_error="raise" if on_error == "raise" else reports,
        priority=KEPT,
    )
    loop.run(2)
    faults.arm(point)
    if on_error == "raise" and point == faults.COPY:
        with pytest.raises(lightck.RegionIOError):
            handle.snapshot()
    else:
        future = handle.snapshot()
        assert isinstance(future.exception(timeout=100), lightck.RegionIOError)
    if on_error == "raise" and point == faults.COMMIT:
        # Found by whoever waited for the future; raised on the training thread.
        with pytest.raises(lightck.RegionIOError):
            handle.wait()
    if on_error == "call":
        handle.wait()
        assert [type(e) for e in reports] == [lightck.RegionIOError]
        late = handle.snapshot()  # the region is latched
        assert isinstance(late.exception(timeout=100), lightck.PreviousPersistError)
    with pytest.raises(lightck.RegionIOError):
        handle.close()


def test_a_commit_before_the_failure_still_answers_its_future(disk_dir: Path) -> None:
    loop, reports = adam_loop(), Reports()
    handle = lightck.attach(
        loop.model, list(loop.optimizers), disk_dir, slots=4, policy=1000, on_error=reports
    )
    loop.run(1)
    faults.hold(faults.COMMIT)
    good = handle.snapshot()
    faults.arm(faults.RECORD, after=1)
    faults.release(faults.COMMIT)
    loop.run(1)
    bad = handle.snapshot()
    assert good.result(timeout=100) == 1
    assert isinstance(bad.exception(timeout=100), lightck.RegionIOError)
    handle.detach()
    assert steps_at(disk_dir) == [1]


def test_a_callback_that_raises_stops_the_loop_and_is_called_once(run_dir: Path) -> None:
    calls = []

    def stop(error: BaseException) -> None:
        calls.append(error)
        raise SystemError("stop the training") from error

    loop = adam_loop()
    handle = lightck.attach(
        loop.model, list(loop.optimizers), run_dir, on_error=stop, priority=KEPT
    )
    loop.run(1)
    faults.arm(faults.COPY)
    with pytest.raises(SystemError, match="stop the training"):
        loop.run(1)
    assert len(calls) == 1
    with pytest.raises(lightck.RegionIOError):
        handle.close()


def test_what_is_wrong_at_attach_raises_whatever_on_error_says(run_dir: Path) -> None:
    loop = adam_loop()
    faults.arm(faults.ALLOCATE, errno.ENOSPC)
    with pytest.raises(lightck.RegionFullError, match="bytes"):
        lightck.attach(loop.model, list(loop.optimizers), run_dir, on_error=lambda error: None)
    assert not list(run_dir.iterdir())
    with lightck.attach(loop.model, list(loop.optimizers), run_dir):
        loop.run(1)
    assert steps_at(run_dir) == [1]


def test_a_failed_growth_is_told_and_the_snapshots_stay(run_dir: Path) -> None:
    loop = adam_loop()
    handle = lightck.attach(loop.model, list(loop.optimizers), run_dir)
    loop.run(3)
    handle.wait()
    loop.model.add_module("2", torch.nn.Linear(16, 400_000 // 16))  # a new layer of 1.6 MB
    loop.model.add_module("3", torch.nn.Linear(400_000 // 16, 16))
    loop.optimizers[0].add_param_group({"params": loop.model[2:].parameters()})
    faults.arm(faults.ALLOCATE, errno.ENOSPC)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loop.run(1)
    assert [str(w.message).count("bytes") > 0 for w in caught] == [True]
    handle.wait()
    assert of_stored(run_dir, 2) == loop.seen[2]
    loop.run(1)  # there is room again
    handle.wait()
    loop.note()
    with pytest.raises(lightck.RegionFullError):
        handle.close()
    loop.check(run_dir, steps_at(run_dir))
    assert steps_at(run_dir)[-1] == 5
