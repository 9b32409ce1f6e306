"""Ranks that fail together, or one after the other: the job goes on from the last complete step.

No step is ever due: what is resumed from was saved just in time, by each rank for itself.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # what an optimizer would load on first use, in every rank

import lightck
from lightck.region import location
from lightck.region.location import Location
from lightck.region.region import open_and_recover
from lightck.types import Failure
from support.distributed import ranks
from support.distributed.resumed import (
    LAST,
    attach,
    begin,
    golden,
    losses_of,
    restore,
    same,
    state_of,
)
from support.distributed.training import Training

AT = 4
"""The last complete step when it fails."""


class Broken(Exception):
    """A training fails with this exception."""


class Never:
    """A policy by which no step is ever due."""

    def due(self, moment: Any) -> bool:
        return False


def armed(training: Training, path: Path, **settings: Any) -> lightck.Handle:
    failure = Failure(hang_steps=1e6)  # what a loaded machine delays is no hang
    return attach(training, path, policy=Never(), failure=failure, **settings)


def fail(training: Training, place: str) -> None:
    """The next step fails there, on this rank."""

    def broken(*_: Any) -> None:
        raise Broken

    if place == "data":
        broken()
    if place == "forward":
        training.module[2].register_forward_hook(broken)
    if place == "backward":
        training.module[0].weight.register_hook(broken)
    if place == "update":
        training.optimizer.register_step_post_hook(broken)
    losses_of(training, 1)


def broken_job(path: Path, world: int, places: list[str], **settings: Any) -> list[Any]:
    """Each rank's losses until it failed, where it was told to or because another one did."""

    def train(me: ranks.Me) -> Any:
        training = begin(me)
        losses: list[float] = []
        try:
            with armed(training, path, **settings):
                losses += losses_of(training, AT)
                fail(training, places[me.rank])
        except Exception as error:  # noqa: BLE001 - gloo's, on ranks that wait for the others
            return type(error).__name__, losses
        raise AssertionError("nothing failed")

    with ranks.started(world, train) as job:
        return job.results()


def resumed(path: Path, world: int) -> list[Any]:
    """(restored step, early, losses, state) of each rank at the end."""

    def train(me: ranks.Me) -> Any:
        training = begin(me)
        info = restore(training, path)
        assert info is not None
        with armed(training, path) as handle:
            losses = losses_of(training, LAST - info.step)
            state = state_of(training)
            handle.detach()
        return info.step, info.early, losses, state

    with ranks.started(world, train) as job:
        return job.results()


def check(found: list[Any], world: int, step: int, *, early: bool) -> None:
    """The job went on from this step and ended as one that nothing interrupted."""
    for rank, (at, was_early, losses, state) in enumerate(found):
        expected, final = golden(world)[rank]
        assert (at, was_early) == (step, early)
        assert losses == expected[step:]
        assert same(state, final)


@pytest.mark.parametrize("place", ["data", "forward", "backward"])
def test_ranks_that_fail_at_one_place_go_on_bit_for_bit(region_dir: Path, place: str) -> None:
    words = broken_job(region_dir, 2, [place] * 2)
    assert [word for word, _ in words] == ["Broken"] * 2
    check(resumed(region_dir, 2), 2, AT, early=place == "data")


def test_ranks_that_close_where_they_were_restored_early_commit_what_they_have_made_up_for(
    region_dir: Path,
) -> None:
    """All had failed behind the last step of all."""
    broken_job(region_dir, 2, ["data"] * 2)

    def train(me: ranks.Me, ends: bool) -> Any:
        training = begin(me)
        info = restore(training, region_dir)
        assert info is not None
        if ends:
            with armed(training, region_dir) as handle, torch.no_grad():
                for parameter in training.module.parameters():
                    parameter.clamp_(-0.01, 0.01)
            assert handle.last_committed_step == AT
        return info.step, info.early, state_of(training)

    found = []
    for ends in (True, False):
        with ranks.started(2, partial(train, ends=ends)) as job:
            found.append(job.results())
    for first, last in zip(*found, strict=True):
        assert (first[:2], last[:2]) == ((AT, True), (AT, False))
        assert same(first[2], last[2])


def test_ranks_that_share_nothing_go_on_from_different_places(region_dir: Path) -> None:
    """Rank 0 fails before its forward, rank 1 behind its own: each saves what it has."""

    def train(me: ranks.Me) -> Any:
        training = begin(me)
        training.model = training.module  # as without replicas: nothing is shared
        try:
            with armed(training, region_dir):
                losses_of(training, AT)
                fail(training, ["data", "forward"][me.rank])
        except Broken:
            return True
        return False

    with ranks.started(2, train) as job:
        assert job.results() == [True, True]

    def again(me: ranks.Me) -> Any:
        training = begin(me)
        training.model = training.module
        info = restore(training, region_dir)
        return info and (info.step, info.early)

    with ranks.started(2, again) as job:
        assert [found[0] for found in job.results()] == [AT, AT]


def test_ranks_that_have_saved_different_steps_before_any_was_whole_begin_anew(
    region_dir: Path,
) -> None:
    """One fails when the other has what it needs to go on: nothing is whole, and never was."""

    def train(me: ranks.Me) -> Any:
        training = begin(me)
        training.model = training.module  # nothing is reduced: one can be ahead
        heard: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: heard.append(record.lightck_event)  # type: ignore
        logging.getLogger("lightck").addHandler(handler)
        info = restore(training, region_dir)
        handle = armed(training, region_dir)
        losses_of(training, 3)
        if me.rank:
            losses_of(training, 1)
        saved = handle.snapshot_now("ahead" if me.rank else "behind")
        me.send((info, heard, saved.step))
        me.pause()  # and ends there, with the test

    for life in range(3):
        with ranks.started(2, train) as job:
            for rank in range(2):
                info, heard, step = job.receive(rank)
                assert info is None and step == 3 + rank
                assert ("begins_anew" in heard) == bool(life)


def test_what_was_saved_at_a_failure_and_is_damaged_is_not_given_up_in_silence(
    region_dir: Path,
) -> None:
    """It was whole: the user decides what is done with the rest."""

    def train(me: ranks.Me) -> Any:
        training = begin(me)
        training.model = training.module  # each rank has all of its state
        restore(training, region_dir)
        handle = armed(training, region_dir)
        losses_of(training, 3)
        me.send(handle.snapshot_now("here").step)
        me.pause()

    with ranks.started(2, train) as job:
        assert [job.receive(rank) for rank in range(2)] == [3, 3]
    damage(location.locate(region_dir, 1, create=False))
    with ranks.started(2, train) as job:
        assert {type(each) for each in job.outcomes()} == {lightck.NoSnapshotError}


def damage(where: Location) -> None:
    """Flip a bit of a tensor in the only snapshot of a region."""
    region, recovery = open_and_recover(where)
    (only,) = recovery.candidates
    offset = int(only.layout.offsets[0])
    region.close()
    with where.file.open("r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def test_a_rank_that_another_ones_exception_reaches_saves_the_same_step(region_dir: Path) -> None:
    def train(me: ranks.Me) -> Any:
        training = begin(me)
        try:
            with armed(training, region_dir):
                losses_of(training, AT)
                if me.rank == 0:
                    fail(training, "backward")
                losses_of(training, 1)
        except Exception as error:  # noqa: BLE001
            if me.rank == 0:
                me.send("broken")
                me.pause()
                os._exit(0)  # its connections end: that is what rank 1 hears
            return type(error).__name__
        return "nothing"

    with ranks.started(2, train) as job:
        assert job.receive(0) == "broken"
        job.let_go(0)
        assert job.outcomes([1]) == ["RuntimeError"]
    check(resumed(region_dir, 2), 2, AT, early=False)


@pytest.mark.parametrize("draws", [False, True])
def test_an_update_that_fails_on_one_rank_ends_as_on_the_other_or_leaves_the_step_that_all_have(
    region_dir: Path, draws: bool
) -> None:
    """A draw from a generator of each rank's own cannot be told from the other rank's."""

    def train(me: ranks.Me) -> Any:
        training = begin(me)
        saved = None
        with pytest.raises(Broken), armed(training, region_dir) as handle:
            losses_of(training, 2)
            training.optimizer.zero_grad()
            assert handle.snapshot_now("before").fresh
            losses_of(training, 2)
            if draws:
                training.optimizer.register_step_post_hook(lambda *_: torch.rand(()))
            if me.rank == 0:  # else rank 1 might hear of the failure before its own update
                training.optimizer.register_step_post_hook(lambda *_: me.pause())
            fail(training, "update" if me.rank == 0 else "nowhere")
            me.send("updated")
            saved = handle.snapshot_now("behind").step
            raise Broken
        return saved

    with ranks.started(2, train) as job:
        assert job.receive(1) == "updated"
        job.let_go(0)
        assert job.results() == [None, 5]
    found = resumed(region_dir, 2)
    check(found, 2, 2 if draws else 5, early=True)


def _left_off(me: ranks.Me, path: Path, before: Callable[[], Any]) -> Any:
    """Rank 0 fails between its gradients and its update, rank 1 ends it and then saves."""
    training, saved = begin(me), None
    update = training.optimizer.step

    with pytest.raises(Broken), armed(training, path) as handle:
        training.optimizer.step = lambda: (before(), update())
        losses_of(training, 2)
        training.optimizer.zero_grad()
        assert handle.snapshot_now("all of them").fresh
        losses_of(training, AT - 2)
        if me.rank == 0:
            # Once the other is ahead: it would save this step, too, if it heard earlier.
            training.optimizer.step = lambda: (me.pause(), fail(training, "data"))
        losses_of(training, 1)
        saved = handle.snapshot_now("ahead").step
        me.send("ahead")
        me.pause()  # until the other has left
        raise Broken
    return saved


def _nothing() -> None:
    """Do nothing between gradients and update."""


@pytest.mark.parametrize("between", ["nothing", "a draw"])
def test_a_rank_that_fails_behind_its_part_of_the_allreduce_costs_one_step(
    region_dir: Path, between: str
) -> None:
    """It saves the step before whole, which is exact, with the entries that the other one has kept
    of it, whatever it would still have done before its update."""
    draws = between == "a draw"

    def train(me: ranks.Me) -> Any:
        return _left_off(me, region_dir, partial(torch.rand, ()) if draws else _nothing)

    with ranks.started(2, train) as job:
        assert job.receive(1) == "ahead"
        job.let_go(0)
        assert job.outcomes([0]) == [None]
        job.let_go(1)
        assert job.outcomes([1]) == [AT + 1]
    found = resumed(region_dir, 2)
    assert [each[:2] for each in found] == [(AT, False)] * 2
    if not draws:
        check(found, 2, AT, early=False)


def test_a_just_in_time_slot_is_kept_until_a_newer_step_is_whole(region_dir: Path) -> None:
    def train(me: ranks.Me) -> Any:
        training = begin(me)
        seen = []
        with attach(training, region_dir, policy=3, failure="jit") as handle:
            for _ in range(9):
                losses_of(training, 1)
                handle.wait()
                saved = handle.snapshot_now("each")
                region = handle.region
                protected = region.protected
                assert protected is None or region.slots[protected].record is not None
                seen.append((saved.fresh, len([s for s in region.slots if s.record])))
            return seen, handle.stats().slipped, handle.last_committed_step

    with ranks.started(2, train) as job:
        for seen, slipped, last in job.results():
            assert all(fresh for fresh, _ in seen)
            assert slipped == 0
            assert last is not None and last >= 6
