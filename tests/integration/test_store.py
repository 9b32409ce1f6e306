"""`lightck.Store`: what `torch.save` would give back, whole or not there at all."""

from __future__ import annotations

import collections
import concurrent.futures
import gc
import io
import os
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import lightck
from lightck.region import location
from lightck.region.region import open_and_recover
from support import faults, processes

SECONDS = 120


def training() -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model with buffers and a tied weight, and an optimizer that has stepped."""
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 64))
    model[2].weight = model[0].weight
    optimizer = torch.optim.AdamW(model.parameters(), amsgrad=True)
    model(torch.randn(8, 64)).square().sum().backward()
    optimizer.step()
    return model, optimizer


def full(value: int, size: int = 50_000) -> dict[str, Any]:
    """A state dict in which everything says the same number."""
    return {"number": value, "tensors": [torch.full((size,), value), torch.full((9,), value)]}


def number_of(state: dict[str, Any]) -> int:
    """The number that everything says; a state dict of two saves fails here."""
    for each in state["tensors"]:
        assert (each == state["number"]).all()
    return int(state["number"])


def assert_equal(one: Any, other: Any, path: str = "") -> None:
    assert type(one) is type(other), path
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype and torch.equal(one, other), path
    elif isinstance(one, np.ndarray):
        assert one.dtype == other.dtype and np.array_equal(one, other), path
    elif isinstance(one, dict):
        assert list(one) == list(other), path
        for key in one:
            assert_equal(one[key], other[key], f"{path}/{key}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), path
        for i, pair in enumerate(zip(one, other, strict=True)):
            assert_equal(*pair, f"{path}/{i}")
    else:
        assert one == other, path


def by_torch(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def test_a_state_dict_comes_back_as_torch_load_gives_it(run_dir: Path) -> None:
    model, optimizer = training()
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=9)
    grid = torch.randn(6, 8)
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "schedule": schedule.state_dict(),
        "views": [grid, grid[1:3], grid.t(), grid[:, ::2], grid[:1].expand(4, 8)],
        "dtypes": [grid.to(dtype) for dtype in (torch.bfloat16, torch.int8, torch.complex64)],
        "small": (torch.tensor(3.5), torch.empty(0, 3), torch.tensor(True)),
        "plain": {1: None, "1": {"a/b%": float("inf")}, (2, "x"): b"\0", "size": grid.shape},
        "numpy": [np.arange(5), np.float64(2.5)],
        "ordered": collections.OrderedDict(a=1),
    }
    expected = by_torch(state)
    with lightck.Store(run_dir) as store:
        assert store.save(state, 7).result(SECONDS) == 7
        found = store.load()
    assert_equal(found, expected)
    again, other = training()
    again.load_state_dict(found["model"])
    other.load_state_dict(found["optimizer"])
    assert_equal(again.state_dict(), expected["model"])
    assert_equal(other.state_dict(), expected["optimizer"])
    assert found["model"]._metadata == state["model"]._metadata


def test_keys_of_one_text_and_what_shares_memory_come_back_apart_and_together(
    run_dir: Path,
) -> None:
    one = torch.arange(100)
    state = {1: {"a": one}, "1": {"a": one + 1}, "tied": [one, one], "part": one[:50]}
    with lightck.Store(run_dir) as store:
        store.save(state, 1).result(SECONDS)
        found = store.load()
        assert_equal(found, by_torch(state))
        assert found["tied"][0] is found["tied"][1] is found[1]["a"]
        found["part"] += 1  # of its own memory, unlike torch.load's
        assert torch.equal(found[1]["a"], one)
    assert len(lightck.load(run_dir)["extras"]) == 1


def test_after_save_returns_the_tensors_may_change(run_dir: Path) -> None:
    state = full(1)
    with lightck.Store(run_dir) as store:
        for step in range(1, 6):
            future = store.save(state, step)
            state["number"] += 1
            for each in state["tensors"]:
                each.add_(1)
            assert future.result(SECONDS) == step
            assert number_of(store.load()) == step


@pytest.mark.parametrize("whose", ["future", "store"])
def test_without_waiting_they_may_change_once_staged_has_returned(
    run_dir: Path, whose: str
) -> None:
    state = full(1)
    with lightck.Store(run_dir) as store:
        future = store.save(state, 1, wait=False)
        (future if whose == "future" else store).staged()
        state["tensors"][0].add_(1)
        future.result(SECONDS)
        assert number_of(store.load()) == 1


def test_a_change_before_staged_fails_the_save_and_keeps_the_one_before(run_dir: Path) -> None:
    state = full(1)
    with lightck.Store(run_dir) as store:
        store.save(state, 1).result(SECONDS)
        future = store.save(state, 2, wait=False)
        state["tensors"][0].add_(1)
        future.staged()
        with pytest.raises(lightck.TornSnapshotError, match="state/tensors/0 changed before stag"):
            future.result(SECONDS)
        assert number_of(store.load()) == 1 and store.steps() == [1]
        store.save(full(3), 3).result(SECONDS)
        assert number_of(store.load()) == 3


def test_close_raises_what_nobody_has_asked_for(run_dir: Path) -> None:
    state = full(1)
    store = lightck.Store(run_dir)
    store.save(state, 1, wait=False)
    state["tensors"][0].add_(1)
    with pytest.raises(lightck.TornSnapshotError):
        store.close()
    store.close()
    with pytest.raises(lightck.LightckError, match="is closed"):
        store.save(state, 2)
    assert store.steps() == []


def test_a_value_that_would_not_come_back_is_named_and_nothing_is_written(run_dir: Path) -> None:
    class Odd:
        pass

    store = lightck.Store(run_dir)
    for state, named in (
        ({"a": [Odd()]}, "state/a/0 is a .*Odd"),
        ({"a": {"b": torch.randn(3).to_sparse()}}, "state/a/b is a torch.sparse_coo"),
        ({"a": nn.parameter.UninitializedParameter()}, "state/a is not initialized"),
        ({Odd(): 1}, "state has the key"),
        ({"a": np.ma.MaskedArray([1, 2], mask=[0, 1])}, "state/a is a MaskedArray"),
        ({"\ud800": torch.ones(1)}, "no text in UTF-8"),
    ):
        with pytest.raises(lightck.StateError, match=named):
            store.save(state, 1)
    assert not run_dir.exists()


def test_a_dtensor_is_refused_with_what_to_give_instead(run_dir: Path, region_dir: Path) -> None:
    def job() -> str:
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import distribute_tensor

        dist.init_process_group("gloo", init_method=f"file://{region_dir}/r", rank=0, world_size=1)
        tensor = distribute_tensor(torch.ones(4), init_device_mesh("cpu", (1,)))
        with pytest.raises(lightck.StateError) as refused:
            lightck.Store(run_dir).save({"a": tensor}, 1)
        lightck.Store(run_dir).save({"a": tensor.full_tensor()}, 1).result(SECONDS)
        return str(refused.value)

    assert "state/a is a DTensor" in (why := processes.run(job)) and "full_tensor()" in why


@pytest.mark.parametrize("step", [-1, True, 1.5, "1", 1 << 63])
def test_a_step_that_is_no_number_of_steps_is_refused(run_dir: Path, step: Any) -> None:
    with pytest.raises(lightck.ConfigError, match="step"):
        lightck.Store(run_dir).save({}, step)


def test_settings_of_a_training_are_refused_by_name(run_dir: Path) -> None:
    with pytest.raises(lightck.ConfigError, match="Store: unknown argument policy = 10"):
        lightck.Store(run_dir, policy=10)


def test_an_older_step_replaces_what_came_after_it(run_dir: Path) -> None:
    with lightck.Store(run_dir) as store:
        for number, step in enumerate((5, 6, 6, 2, 3, 0, 0)):
            store.save(full(number), step).result(SECONDS)
            assert number_of(store.load()) == number and store.steps()[0] == step
        assert store.steps() == [0]
        store.save(full(8), 9).result(SECONDS)
        assert store.steps() == [9, 0] and number_of(store.load(0)) == 6
        with pytest.raises(lightck.NoSnapshotError, match="wanted: 5"):
            store.load(5)


def test_a_layout_that_changes_and_grows_is_saved_like_any_other(run_dir: Path) -> None:
    sizes = (10, 300_000, 5, 2_000_000, 0)
    with lightck.Store(run_dir) as store:
        store.save({}, 0).result(SECONDS)
        for step, size in enumerate(sizes, 1):
            state = full(step, size) | {f"k{step}": torch.randn(size, 2)}
            store.save(state, step).result(SECONDS)
            assert_equal(store.load(), state)


def test_a_store_goes_on_where_another_has_ended(run_dir: Path) -> None:
    for number in range(1, 6):
        with lightck.Store(run_dir) as store:
            assert store.steps() == [*range(number - 1, max(number - 3, 0), -1)]
            store.save(full(number), number)  # close waits for its commit
    assert number_of(lightck.Store(run_dir).load()) == 5


def test_a_store_that_is_gone_has_committed_and_given_up_the_region(run_dir: Path) -> None:
    lightck.Store(run_dir).save(full(1), 1)
    gc.collect()
    lightck.Store(run_dir).save(full(2), 2)
    gc.collect()
    assert lightck.Store(run_dir).steps() == [2, 1]


def test_what_was_loaded_holds_no_slot(run_dir: Path) -> None:
    with lightck.Store(run_dir) as store:
        store.save(full(1), 1).result(SECONDS)
        held = store.load()
        for step in (2, 3, 4):
            store.save(full(step), step).result(SECONDS)
        assert number_of(held) == 1 and number_of(store.load()) == 4


def test_a_reader_that_holds_every_other_slot_is_named(run_dir: Path) -> None:
    with lightck.Store(run_dir) as store:
        store.save(full(1), 1).result(SECONDS)
        mapped = lightck.load(run_dir)
        store.save(full(2), 2).result(SECONDS)
        with pytest.raises(lightck.RegionBusyError, match="step 3 is not saved"):
            store.save(full(3), 3)
        assert number_of(mapped["extras"]["state"]) == 1
        del mapped
        store.save(full(3), 3).result(SECONDS)
        assert number_of(store.load()) == 3


def test_what_is_held_stays_while_others_come_and_go(run_dir: Path) -> None:
    with lightck.Store(run_dir, slots=3) as store:
        for step in (1, 2, 3):
            store.save(full(step), step).result(SECONDS)
        with store.hold(2):
            for step in (4, 5, 6):
                store.save(full(step), step).result(SECONDS)
            assert store.steps() == [6, 5, 2] and number_of(store.load(2)) == 2
        store.save(full(7), 7).result(SECONDS)
        assert store.steps() == [7, 6, 5]
        with pytest.raises(lightck.NoSnapshotError, match=r"no step 2 to hold; there: \[7, 6, 5\]"):
            store.hold(2)
    with pytest.raises(lightck.NoSnapshotError, match="there: nothing"):
        lightck.Store(run_dir.parent / "none").hold(1)


def test_one_process_saves_and_others_load(run_dir: Path) -> None:
    with lightck.Store(run_dir) as store:
        store.save(full(1), 1).result(SECONDS)

        def other() -> tuple[int, str]:
            reader = lightck.Store(run_dir)
            with pytest.raises(lightck.RegionBusyError) as busy:
                reader.save(full(2), 2)
            return number_of(reader.load()), str(busy.value)

        found, why = processes.run(other)
        assert found == 1 and f"its owner is process {os.getpid()}" in why
        store.save(full(2), 2).result(SECONDS)


def test_a_forked_child_does_not_save_and_its_end_closes_nothing(run_dir: Path) -> None:
    with lightck.Store(run_dir) as store:
        store.save(full(1), 1).result(SECONDS)

        def child() -> int:
            with pytest.raises(lightck.LightckError, match="a forked child must not write"):
                store.save(full(2), 2)
            store.close()
            return number_of(store.load())

        assert processes.run(child) == 1
        store.save(full(2), 2).result(SECONDS)


def test_a_training_and_a_store_refuse_each_other_s_path(run_dir: Path, region_dir: Path) -> None:
    model, optimizer = training()
    with lightck.Store(run_dir) as store:
        store.save(full(1), 1)
    for overwrite in (False, True):
        with pytest.raises(lightck.RegionError, match=r"of a store \(lightck.Store\), and this is"):
            lightck.attach(model, optimizer, run_dir, overwrite=overwrite)
    assert number_of(lightck.Store(run_dir).load()) == 1
    trained = region_dir / "trained"
    late = lightck.Store(trained)
    lightck.attach(model, optimizer, trained, failure="off").close()
    with pytest.raises(lightck.RegionError, match=r"of a training \(lightck.attach\), and this is"):
        lightck.Store(trained)
    for call in (late.load, late.steps, lambda: late.save({}, 1)):
        with pytest.raises(lightck.RegionError, match="of a training"):
            call()


def test_nothing_there_is_told_apart_from_something(run_dir: Path) -> None:
    store = lightck.Store(run_dir)
    assert store.steps() == []
    with pytest.raises(lightck.NoSnapshotError):
        store.load()
    assert not run_dir.exists()


def test_the_commands_read_a_store(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("safetensors", reason="SKIPPED: safetensors is not installed")
    from lightck.cli.main import main

    with lightck.Store(run_dir) as store:
        store.save(full(1), 7).result(SECONDS)
    out = run_dir.parent / "out.safetensors"
    for command in ("ls", "inspect", "verify"):
        assert main([command, str(run_dir)]) == 0 and "7" in capsys.readouterr().out
    assert main(["export", str(run_dir), str(out)]) != 0
    assert "--all takes every tensor" in capsys.readouterr().err and not out.exists()
    assert main(["export", str(run_dir), str(out), "--all"]) == 0
    assert out.stat().st_size > 50_000


def flip(folder: Path, step: int) -> None:
    """Flip a bit of the largest tensor of a step."""
    region, recovery = open_and_recover(location.locate(folder, 0, create=False))
    layout = next(c.layout for c in recovery.candidates if c.record.step == step)
    at = int(layout.offsets[int(layout.lengths.argmax())]) + 100
    file = region.place.file
    region.close()
    with open(file, "r+b") as opened:
        opened.seek(at)
        byte = opened.read(1)[0]
        opened.seek(at)
        opened.write(bytes([byte ^ 4]))


def test_of_a_damaged_newest_the_older_one_is_loaded_and_kept(
    run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with lightck.Store(run_dir) as store:
        for step in (1, 2):
            store.save(full(step), step).result(SECONDS)
    flip(run_dir, 2)
    store = lightck.Store(run_dir)
    assert number_of(store.load()) == 1
    assert "fell_back" in [getattr(r, "lightck_event", "") for r in caplog.records]
    state = full(3)
    future = store.save(state, 3, wait=False)  # it takes the damaged one's slot, not the older's
    state["tensors"][0].add_(1)
    assert isinstance(future.exception(SECONDS), lightck.TornSnapshotError)
    assert number_of(store.load()) == 1
    store.save(full(4), 4).result(SECONDS)
    assert number_of(store.load()) == 4
    store.close()


def test_where_nothing_is_whole_nothing_is_overwritten(run_dir: Path) -> None:
    with lightck.Store(run_dir) as store:
        store.save(full(1), 1).result(SECONDS)
    flip(run_dir, 1)
    before = (run_dir / "region-00000.lck").read_bytes()
    with pytest.raises(lightck.CorruptSnapshotError, match="no state dict that is whole"):
        lightck.Store(run_dir).save(full(2), 2)
    assert (run_dir / "region-00000.lck").read_bytes() == before


def test_a_failed_sync_fails_the_future_and_the_next_save(disk_dir: Path) -> None:
    with lightck.Store(disk_dir) as store:
        store.save(full(1), 1).result(SECONDS)
        faults.arm(faults.SYNC)
        with pytest.raises(lightck.LightckError):
            store.save(full(2), 2).result(SECONDS)
        faults.clear()
        with pytest.raises(lightck.LightckError):
            store.save(full(3), 3).result(SECONDS)
    assert number_of(lightck.Store(disk_dir).load()) in (1, 2)


@pytest.mark.parametrize("medium", ["memory", "file"])
def test_a_killed_process_leaves_the_last_one_that_it_was_told_of_or_a_newer(
    medium: str, run_dir: Path, disk_dir: Path, rng: np.random.Generator
) -> None:
    folder = run_dir if medium == "memory" else disk_dir
    told = 0
    for _ in range(6):
        begin = told

        def job(parent: processes.Parent, begin: int = begin) -> None:
            store = lightck.Store(folder)
            for step in range(begin + 1, begin + 1000):
                future = store.save(full(step, 400_000), step, wait=bool(step % 2))
                parent.send(future.result(SECONDS))

        child = processes.start(job)
        for _ in range(int(rng.integers(1, 6))):
            told = child.receive()
        for _ in range(int(rng.integers(0, 30_000))):  # anywhere in the next saves
            pass
        child.kill()
        assert child.join() == -9
        found = lightck.Store(folder).load()
        assert told <= number_of(found) <= told + 300
        told = number_of(found)


# ---- the history -----------------------------------------------------------------------------


def test_what_keep_chooses_stays_when_the_slots_are_written_over(run_dir: Path) -> None:
    losses = [5.0, 3.0, 1.0, 4.0, 2.0]
    with lightck.Store(run_dir, keep="newest 2 or best loss") as store:
        for step, loss in enumerate(losses, 1):
            store.save(full(step), step, metrics={"loss": loss}).result()
    store = lightck.Store(run_dir)
    assert set(store.steps()) == {3, 4, 5}
    assert [number_of(store.load(step)) for step in (3, 4, 5)] == [3, 4, 5]
    assert number_of(store.load()) == 5


def test_a_store_that_goes_back_leaves_what_its_history_had_beyond(run_dir: Path) -> None:
    for step in (1, 2, 3):
        with lightck.Store(run_dir, keep=9) as store:  # its close waits for the copy
            store.save(full(step), step).result()
    with lightck.Store(run_dir, keep=9) as store:
        store.save(full(20), 2).result()
    store = lightck.Store(run_dir)
    assert store.steps()[0] == 2 and number_of(store.load(2)) == 20
    assert number_of(store.load(1)) == 1


def test_an_item_of_a_history_is_read_by_a_store_and_not_written(run_dir: Path) -> None:
    with lightck.Store(run_dir, keep=2) as store:
        store.save(full(1), 1).result()
    kept = lightck.Store(run_dir / "history" / "step-1")
    assert number_of(kept.load()) == 1
    with pytest.raises(lightck.RegionError, match="an item of a history"):
        kept.save(full(2), 2)


def test_a_future_that_nobody_asks_comes_to_its_end(region_dir: Path) -> None:
    """A callback, `as_completed` and asyncio wait so."""
    called: list[int] = []
    with lightck.Store(region_dir / "store") as store:
        future = store.save(full(3), 3, wait=False)
        future.add_done_callback(lambda done: called.append(done.result()))
        assert not concurrent.futures.wait([future], SECONDS).not_done
        assert called == [3]


def test_a_store_stays_where_it_was_made_wherever_the_process_goes(
    region_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(region_dir)
    with lightck.Store("store") as store:
        store.save(full(1), 1)
        monkeypatch.chdir("/")
        store.save(full(2), 2)
        assert sorted(store.steps()) == [1, 2]
    assert (region_dir / "store").is_dir()


def test_what_is_mapped_is_the_file_that_was_verified(
    region_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("one", "other"):
        with lightck.Store(region_dir / name) as store:
            store.save(full(1 if name == "one" else 2), 1)
    file = region_dir / "one" / "region-00000.lck"
    real, other = location.opened, region_dir / "other" / "region-00000.lck"

    def replaced(place: location.Location, *, writable: bool) -> Any:
        if other.exists() and sys._getframe(1).f_code.co_name == "_mapping":
            os.replace(other, file)
        return real(place, writable=writable)

    monkeypatch.setattr(location, "opened", replaced)
    held = lightck.load(region_dir / "one")["extras"]["state"]  # read anew, all of it
    assert number_of(held) == 2 and not other.exists()


def test_what_is_loaded_reserves_no_memory(region_dir: Path) -> None:
    """A region, all its slots, may be larger than the machine's memory."""
    with lightck.Store(region_dir / "store") as store:
        store.save(full(1), 1)
    held = lightck.load(region_dir / "store")
    parts = Path("/proc/self/smaps").read_text().split("region-00000.lck")[1:]
    flags = [re.search(r"VmFlags: (.*)", part) for part in parts]
    written = [found[1].split() for found in flags if found and " wr " in found[0]]
    assert written and all("nr" in each for each in written)
    del held
