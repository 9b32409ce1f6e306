"""A failure finds a slot although every one of due snapshots holds something that must stay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_peer_death import FORWARD, LAST, LONG_S, LOOP, Mortal, first_life, go_on, stand

from lightck.distributed.commit.protocol import CommitProtocol
from support.distributed import ranks
from support.distributed.training import Training


def count_nothing_behind_step_1() -> None:
    """This rank says of no later step that it has committed it: no fate is known any more."""
    committed = CommitProtocol.committed

    def counted(own: CommitProtocol, step: int, *more: Any) -> None:
        if step == 1:
            committed(own, step, *more)

    CommitProtocol.committed = counted  # type: ignore[assignment]


@pytest.mark.parametrize("where", [FORWARD, LOOP])
@pytest.mark.parametrize("dead", [0, 1])
def test_a_failure_finds_a_slot_though_no_due_step_s_fate_is_known(
    region_dir: Path, dead: int, where: str
) -> None:
    """Step 1 is whole, and 2 and 3 take the slots of due ones: later ones slip. The last one is
    saved all the same, and at the instant that the dead rank has, though it is not the survivor's.
    """

    def prepare(me: ranks.Me, job: Mortal) -> None:
        if me.rank == dead:
            count_nothing_behind_step_1()
        stand(me, job, dead, where, lambda: job.handle.stats().slipped)

    settings = {"last": LAST, "prepare": prepare, "policy": 1, "placement": "direct"}
    code = first_life(region_dir, dead, "step end", **settings)
    with ranks.started(2, code) as job:
        slipped = job.receive(1 - dead)
        job.let_go(dead)
        ((saved, taken, refused, _),) = job.outcomes([1 - dead])
    due = LAST if where == FORWARD else LAST - 1  # the last one opens in the next forward
    assert slipped == due - 3
    assert saved["step"] == LAST and saved["fresh"] and not refused, (saved, refused)
    assert [each["step"] for each in taken] == [LAST]
    info = go_on(region_dir, 2)
    assert info is not None and info.step == LAST and info.early


def test_a_close_takes_the_slot_that_was_left_to_a_failure(region_dir: Path) -> None:
    def train(me: ranks.Me) -> Any:
        if me.rank == 1:
            count_nothing_behind_step_1()
        training = Training(me.rank)
        with training.attach(region_dir, placement="direct", on_error=print) as handle:
            training.steps(2)
            handle.wait(1, LONG_S)
            training.steps(4)
            slipped = handle.stats().slipped
        return slipped, handle.last_committed_step

    with ranks.started(2, train) as job:
        assert job.results() == [(2, 6), (2, 6)]
