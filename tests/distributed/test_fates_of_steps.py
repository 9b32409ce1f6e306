"""A step counts on every rank or on none, whatever happens to it on one of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_attach import records

import lightck
from lightck.errors import CoordinationError
from lightck.pipeline.pipeline import Pipeline
from lightck.region.region import Region
from lightck.region.slot_writer import SlotWriter
from support import faults, internals
from support.distributed import ranks
from support.distributed.training import Training


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + ranks.LONG_S
    while not condition():
        assert time.monotonic() < end, "it never came to be"
        time.sleep(0.002)


def settled(handle: lightck.Handle) -> bool:
    """Say whether no fate is open on this rank."""
    handle.stats()
    return not internals.pipeline(handle).in_flight


def step(training: Training, handle: lightck.Handle) -> None:
    """One step; the next begins when the fate of the last snapshot is known."""
    training.step()
    until(lambda: settled(handle))


def test_a_slip_on_one_rank_makes_the_step_dead_on_all(region_dir: Path) -> None:
    def train(me: ranks.Me) -> Any:
        training = Training(me.rank)
        with training.attach(region_dir, on_error=print) as handle:
            for number in range(1, 7):
                if me.rank == 1 and number == 4:  # step 3 is due, and opened in this forward
                    no_slot = lambda *args, **more: None  # noqa: E731
                    SlotWriter.open, kept = no_slot, SlotWriter.open  # type: ignore
                    step(training, handle)
                    SlotWriter.open = kept  # type: ignore
                else:
                    step(training, handle)
            stats = handle.stats()
        return stats.committed, stats.slipped, stats.dead, handle.last_committed_step

    with ranks.started(3, train) as job:
        assert job.results() == [(4, 0, 1, 6), (4, 1, 0, 6), (4, 0, 1, 6)]


def test_a_torn_snapshot_on_one_rank_makes_the_step_dead_on_all(region_dir: Path) -> None:
    def train(me: ranks.Me) -> Any:
        training = Training(me.rank)
        handle = training.attach(region_dir, on_error=print)
        step(training, handle)
        step(training, handle)
        training.optimizer.zero_grad()
        loss = training.model(training.batch()).square().mean()
        if me.rank == 0:
            with torch.no_grad():
                training.module[0].weight.add_(0.0)  # the same bytes, but it might not be
        loss.backward()
        training.optimizer.step()
        step(training, handle)
        stats = handle.stats()
        assert handle.last_committed_step == 3
        with pytest.raises(lightck.TornSnapshotError) if me.rank == 0 else nullcontext():
            handle.close()
        return stats.torn, stats.dead, stats.committed, handle.last_committed_step

    with ranks.started(2, train) as job:
        assert job.results() == [(1, 0, 2, 4), (0, 1, 2, 4)]


def test_a_rank_whose_medium_fails_stops_all_of_them(region_dir: Path) -> None:
    def train(me: ranks.Me) -> Any:
        heard: list[BaseException] = []
        training = Training(me.rank)
        handle = training.attach(region_dir, on_error=heard.append)
        step(training, handle)
        step(training, handle)
        if me.rank == 1:
            faults.arm(faults.RECORD)
        for _ in range(4):
            step(training, handle)
        last, stats = handle.last_committed_step, handle.stats()
        with pytest.raises(lightck.LightckError):
            handle.close()
        return last, stats.committed, stats.dead, [str(error) for error in heard]

    with ranks.started(2, train) as job:
        (last, committed, dead, heard), (_, _, _, other) = job.results()
    assert (last, committed, dead) == (1, 1, 1)
    assert "rank 1 takes no more snapshots: failed:" in heard[0]
    assert "Input/output error" in other[0]
    assert len([text for text in heard if text.startswith("rank 1 takes no more")]) == 1


def watch_slots(found: list[str]) -> None:
    """Note every slot that is taken while its content may be needed."""
    begin, committed = Region.begin, Region.committed
    held: dict[int, tuple[int, int]] = {}
    """Each slot, by its index, holds this timeline and step."""

    def noted(region: Region, slot: Any, record: Any) -> None:
        held[slot.index] = (record.timeline, record.step)
        committed(region, slot, record)

    def checked(region: Region, pool: Any, **more: Any) -> Any:
        slot = begin(region, pool, **more)
        if slot is not None and slot.index in held:
            timeline, step = held.pop(slot.index)
            assert region.reusable is not None
            if not region.reusable(timeline, step):
                found.append(f"slot {slot.index} held step {step}")
        return slot

    Region.begin, Region.committed = checked, noted  # type: ignore[method-assign]


@pytest.mark.parametrize("mistake", [False, True])
def test_no_slot_of_unknown_fate_is_reused(mistake: bool, region_dir: Path) -> None:
    """Rank 1 does not commit for a while: rank 0 slips, and keeps what may be whole."""

    def train(me: ranks.Me) -> Any:
        found: list[str] = []
        if mistake:
            Region._settled = lambda region, slot: True  # type: ignore[method-assign]
        watch_slots(found)
        training = Training(me.rank)
        handle = training.attach(region_dir, on_error=print, close_timeout_s=20, slots=3)
        step(training, handle)
        step(training, handle)
        kept = Pipeline.poll
        if me.rank == 1:
            Pipeline.poll = lambda self, timeout_s=0.0: iter(())  # type: ignore
        for _ in range(6):
            training.step()
            if me.rank == 0:
                until(lambda: (handle.stats(), not internals.pipeline(handle).persisting)[1])
        open_steps = [snapshot.step for snapshot in internals.pipeline(handle).awaiting]
        slipped = handle.stats().slipped
        dist.barrier()  # rank 1's close commits what it holds back: only once rank 0 has looked
        Pipeline.poll = kept  # type: ignore[method-assign]
        if not mistake:  # it is lost then what the close would count
            handle.close()
        return found, open_steps, slipped, handle.last_committed_step

    with ranks.started(2, train) as job:
        (found, open_steps, slipped, last), _ = job.results()
    if mistake:
        assert found, "the mistake was not seen"
        return
    assert not found
    assert open_steps == [2, 3], "two slots beside the one that counts"
    assert slipped == 4
    assert last == 8


def test_a_stopped_rank_makes_others_slip_but_not_wait(region_dir: Path) -> None:
    def train(me: ranks.Me) -> Any:
        training = Training(me.rank, wrap=False)  # no collective of the training's own
        handle = training.attach(region_dir, on_error=print, close_timeout_s=20)
        step(training, handle)
        step(training, handle)
        me.send("two steps")
        me.pause()
        before = time.monotonic()
        for _ in range(10):
            training.step()
        took, slipped = time.monotonic() - before, handle.stats().slipped
        me.send((took, slipped))
        me.pause()
        try:
            handle.close()
        except CoordinationError as error:
            return str(error)
        return handle.last_committed_step

    with ranks.started(2, train) as job:
        assert [job.receive(rank) for rank in (0, 1)] == ["two steps"] * 2
        job.stop(1)
        job.let_go(0)
        _, slipped = job.receive(0)
        assert slipped >= 7
        job.go_on(1)
        job.let_go(1)
        job.receive(1)
        job.let_go()
        assert job.results() == [12, 12]
    assert 12 in records(region_dir, 0)
