"""Weights edited between the forward and the next update tear a snapshot: it is dropped, counted
and reported once; the next one is copied at once; a tensor torn twice is copied at the forward
from then on."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import lightck
from support import faults
from support.loops import Loop, Overwriter, mlp, of_stored, steps_at

DELAY_S = 0.0005


def edit_in_place(tensor: torch.Tensor) -> None:
    with torch.no_grad():
        tensor.copy_(tensor + 1)


def edit_data(tensor: torch.Tensor) -> None:
    tensor.data += 1


def edit_through_numpy(tensor: torch.Tensor) -> None:
    tensor.detach().numpy()[...] += 1


def replace_storage(tensor: torch.Tensor) -> None:
    tensor.data = tensor.data + 1


EDITS = [edit_in_place, edit_data, edit_through_numpy, replace_storage]
SILENT = [edit_data, edit_through_numpy]
"""Edits that move neither version counter nor pointer."""


class Reports(list[BaseException]):
    """`on_error` was called with these errors."""

    def __call__(self, error: BaseException) -> None:
        self.append(error)


def until_copied(handle: lightck.Handle, loop: Loop, before: int) -> None:
    """Wait until everything is copied: later edits differ from the copies for certain."""
    deadline = time.monotonic() + 100
    total = sum(v.numel() * v.element_size() for v in loop.model.state_dict().values())
    total += sum(
        v.numel() * v.element_size()
        for o in loop.optimizers
        for held in o.state.values()
        for v in held.values()
    )
    while handle.stats().bytes_copied - before < total:
        assert time.monotonic() < deadline, "the workers did not copy everything"
        time.sleep(0.001)


def overwriter_loop() -> Loop:
    model = mlp()
    return Loop(model, Overwriter(model.parameters()))


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("schedule", ["eager", "backward"])
def test_an_edit_in_the_window_drops_the_snapshot_and_the_next_is_synchronous_and_good(
    run_dir: Path, edit: Callable[[torch.Tensor], None], schedule: str
) -> None:
    loop, reports = overwriter_loop(), Reports()
    handle = lightck.attach(
        loop.model,
        list(loop.optimizers),
        run_dir,
        slots=8,
        schedule="eager" if edit in SILENT else schedule,
        proof=edit in SILENT,
        on_error=reports,
        chunk_bytes=4096,
    )
    loop.run(2)
    copied = handle.stats().bytes_copied
    loss = loop.forward()
    if edit in SILENT:
        until_copied(handle, loop, copied)
    loss.backward()
    edit(loop.model[1].weight)
    loop.update()  # the fence finds snapshot 2 torn

    assert handle.stats().torn == 1
    assert [type(e) for e in reports] == [lightck.TornSnapshotError]
    assert reports[0].names == ("model/1.weight",)
    assert "model/1.weight" in str(reports[0]) and "step 2" in str(reports[0])

    faults.delay(faults.COPY, DELAY_S)  # the next one is complete before its forward runs
    captured = handle.stats().captured
    loop.forward()
    assert handle.stats().captured == captured + 1
    assert handle.last_captured_step == 3
    edit(loop.model[1].weight)  # too late to tear anything
    loop.update()
    assert handle.stats().torn == 1
    loop.note()
    with pytest.raises(lightck.TornSnapshotError, match="model/1.weight"):
        handle.close()
    assert steps_at(run_dir) == [1, 3, 4]
    loop.check(run_dir, [1, 3, 4])


@pytest.mark.parametrize("edit", SILENT)
def test_the_sampled_audit_finds_a_tensor_that_changed_as_a_whole(
    run_dir: Path, edit: Callable[[torch.Tensor], None]
) -> None:
    loop, reports = overwriter_loop(), Reports()
    handle = lightck.attach(
        loop.model,
        list(loop.optimizers),
        run_dir,
        slots=8,
        schedule="eager",
        on_error=reports,
        placement="direct",
    )
    for name, parameter in loop.model.named_parameters():
        torn = handle.stats().torn
        loop.run(2)
        copied = handle.stats().bytes_copied
        loss = loop.forward()
        until_copied(handle, loop, copied)
        edit(parameter)
        loss.backward()
        loop.update()
        assert handle.stats().torn == torn + 1
        assert reports[-1].names == (f"model/{name}",)
    handle.detach()
    loop.check(run_dir, steps_at(run_dir))


@pytest.mark.parametrize("where", ["first byte", "last byte"])
def test_in_proof_mode_one_changed_byte_is_enough(run_dir: Path, where: str) -> None:
    loop, reports = overwriter_loop(), Reports()
    handle = lightck.attach(
        loop.model,
        list(loop.optimizers),
        run_dir,
        schedule="eager",
        proof=True,
        on_error=reports,
        chunk_bytes=4096,
    )
    loop.run(1)
    copied = handle.stats().bytes_copied
    loss = loop.forward()
    until_copied(handle, loop, copied)
    raw = loop.model[2].weight.detach().view(torch.uint8).numpy().reshape(-1)
    raw[0 if where == "first byte" else -1] ^= 1
    loss.backward()
    loop.update()
    assert handle.stats().torn == 1
    assert [e.names for e in reports] == [("model/2.weight",)]
    handle.detach()


@pytest.mark.parametrize("medium", ["tmpfs", "file"])
def test_a_tensor_torn_twice_is_copied_at_the_forward_and_never_drops_one_again(
    run_dir: Path, disk_dir: Path, medium: str
) -> None:
    path = run_dir if medium == "tmpfs" else disk_dir
    loop, reports = overwriter_loop(), Reports()
    handle = lightck.attach(
        loop.model, list(loop.optimizers), path, slots=16, on_error=reports, chunk_bytes=4096
    )
    for _ in range(10):
        loop.run(1, lambda step: edit_in_place(loop.model[0].bias))
        handle.wait()
    loop.note()
    # Torn, synchronous, torn, synchronous, then copied at forward start for good.
    assert handle.stats().torn == 2
    assert len(reports) == 1
    with pytest.raises(lightck.TornSnapshotError):
        handle.close()
    assert steps_at(path) == [2, 4, 5, 6, 7, 8, 9, 10]
    loop.check(path, steps_at(path))


def test_many_tensors_edited_in_every_window_cost_no_more_snapshots_than_one(
    run_dir: Path,
) -> None:
    loop, reports = overwriter_loop(), Reports()
    handle = lightck.attach(loop.model, list(loop.optimizers), run_dir, slots=16, on_error=reports)

    def edit_all(step: int) -> None:
        for parameter in loop.model.parameters():
            edit_in_place(parameter)

    for _ in range(8):
        loop.run(1, edit_all)
        handle.wait()
    loop.note()
    names = {f"model/{name}" for name, _ in loop.model.named_parameters()}
    assert handle.stats().torn == 2
    assert [set(error.names) for error in reports] == [names]
    assert f"{reports[0].names[0]} and {len(names) - 1} more changed" in str(reports[0])
    handle.detach()
    loop.check(run_dir, [2, 4, 5, 6, 7])


def test_optimizer_state_edited_in_the_window_is_found_as_well(run_dir: Path) -> None:
    loop, reports = overwriter_loop(), Reports()
    handle = lightck.attach(loop.model, list(loop.optimizers), run_dir, slots=16, on_error=reports)
    held = loop.optimizers[0].state[loop.model[1].weight]["memory"]
    for _ in range(8):
        loop.run(1, lambda step: edit_in_place(held))
        handle.wait()
    assert handle.stats().torn == 2
    assert [e.names for e in reports] == [("optim/0/1.weight/memory",)]
    handle.detach()
    loop.check(run_dir, steps_at(run_dir))


def test_a_learning_rate_tensor_that_a_scheduler_changes_in_the_window_settles_too(
    run_dir: Path,
) -> None:
    model, reports = mlp(), Reports()
    rate = torch.tensor(0.1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, capturable=False, foreach=False)
    loop = Loop(model, optimizer)
    handle = lightck.attach(model, optimizer, run_dir, slots=16, on_error=reports)
    held = optimizer.param_groups[0]["lr"]
    for _ in range(8):
        loop.run(1, lambda step: edit_in_place(held))
        handle.wait()
    assert handle.stats().torn <= 2
    assert len(reports) <= 1
    handle.detach()
    there = steps_at(run_dir)
    assert there[-3:] == [5, 6, 7]
    loop.check(run_dir, there)


def test_a_torn_snapshot_leaves_the_one_before_it_as_it_was(run_dir: Path) -> None:
    loop, reports = overwriter_loop(), Reports()
    handle = lightck.attach(loop.model, list(loop.optimizers), run_dir, slots=2, on_error=reports)
    loop.run(2)
    handle.wait()
    assert handle.last_committed_step == 1
    loop.run(1, lambda step: edit_in_place(loop.model[0].weight))
    assert handle.stats().torn == 1
    assert handle.last_committed_step == 1
    assert of_stored(run_dir, 1) == loop.seen[1]
    handle.detach()


def test_a_snapshot_on_request_cannot_be_torn(run_dir: Path) -> None:
    loop, reports = overwriter_loop(), Reports()
    handle = lightck.attach(
        loop.model, list(loop.optimizers), run_dir, policy=1000, on_error=reports
    )
    loop.run(1)
    loss = loop.forward()
    loss.backward()
    future = handle.snapshot()  # between micro-batches: step 2 gets it
    loop.update()
    loop.forward().backward()
    edit_in_place(loop.model[0].weight)
    loop.update()
    assert future.result(timeout=100) == 2
    assert not reports
    handle.detach()
    loop.check(run_dir, [2])


def test_with_on_error_raise_the_update_that_finds_the_tear_raises_and_training_can_go_on(
    run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loop = overwriter_loop()
    handle = lightck.attach(loop.model, list(loop.optimizers), run_dir, slots=8, on_error="raise")
    loop.run(1)
    loop.forward().backward()
    edit_in_place(loop.model[0].weight)
    before = {k: v.clone() for k, v in loop.model.state_dict().items()}
    with pytest.raises(lightck.TornSnapshotError, match="model/0.weight"):
        loop.update()
    assert sum("model/0.weight" in r.getMessage() for r in caplog.records) == 1
    # The update had not begun, and can be made now.
    assert all(torch.equal(v, before[k]) for k, v in loop.model.state_dict().items())
    loop.update()
    assert handle.step == 2
    loop.run(2)
    assert handle.stats().torn == 1
    with pytest.raises(lightck.TornSnapshotError):
        handle.close()
    handle.close()
    assert steps_at(run_dir) == [2, 3, 4]


def test_by_default_a_tear_is_a_warning_that_names_the_tensor(run_dir: Path) -> None:
    loop = overwriter_loop()
    handle = lightck.attach(loop.model, list(loop.optimizers), run_dir)
    loop.run(1)
    with pytest.warns(RuntimeWarning, match=r"step 1 was dropped: model/0.weight changed"):
        loop.run(1, lambda step: edit_in_place(loop.model[0].weight))
    handle.detach()
