"""Shares of one instant only go together; and a step that is whole stays so, whoever takes over."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st
from test_restore import check, restore

from lightck.failure.takeover.takeover import TakeoverResult, common_instant
from lightck.region.native_region import FENCE, RECORD_EARLY, STEP_END
from lightck.region.region import Region
from support.distributed.node import JIT, Node
from support.distributed.written import NoSlotError


@pytest.fixture
def folder(region_dir: Path) -> Path:
    return region_dir / "run"


def test_a_rank_dead_before_the_forward_takes_all_to_the_early_instant(folder: Path) -> None:
    with Node(folder, 3) as node:
        node.train(1)
        node.crew.train(2, absent=[1], flags=JIT)
        node.live_steps = dict.fromkeys(range(3), 2)
        node.journal(1, 2, STEP_END)
        node.die(1)
        for survivor in (0, 2):
            takeover = node.takeover(survivor)
            assert takeover.required_instant([1]) is True
        taken = node.take(0, 1)
        assert "the journal's entry of the start of the next forward is of step 1" in taken.why
        assert "no early snapshot" in node.take(0, 1, early=True).why
        for survivor in (0, 2):  # beside the exact ones
            node.crew.commit(survivor, 2, JIT | RECORD_EARLY)
        assert node.take(0, 1, early=True) == TakeoverResult(1, 2, early=True, wrote=True)
        assert node.steps(1) == [(1, 0), (2, JIT | RECORD_EARLY)]
    infos = check(restore(3, folder, step=2), node.crew, 2)
    assert all(info.early for info in infos)


def test_an_early_survivor_takes_the_dead_ranks_step_end_though_it_has_the_forward(
    folder: Path,
) -> None:
    with Node(folder, 2) as node:
        node.train(1)
        node.train(2, absent=[1], flags=JIT | RECORD_EARLY)
        node.die(1)
        assert node.takeover(0).required_instant([1]) is True
        assert node.take(0, 1) == TakeoverResult(1, 2, early=True, wrote=True)
    assert check(restore(2, folder, step=2), node.crew, 2)[0].early


@pytest.mark.parametrize("alike", [True, False])
def test_a_rank_dead_inside_its_update_has_the_early_instant_if_its_end_can_be_told(
    folder: Path, alike: bool
) -> None:
    """No end can be told where an iteration still changes things of its own behind the fence."""
    with Node(folder, 2) as node:
        node.train(1)
        if not alike:
            for rank in range(2):
                node.journal(rank, 2, FENCE)
        node.crew.train(2, absent=[1], flags=JIT | RECORD_EARLY)
        node.live_steps = dict.fromkeys(range(2), 2)
        if alike:
            for rank in range(2):
                node.journal(rank, 2, FENCE)
        node.journal(0, 2, STEP_END)
        node.die(1)
        assert node.takeover(0).required_instant([1]) is True
        taken = node.take(0, 1, early=True)
        if not alike:
            assert "was killed inside the update to step 2: the update changes" in taken.why
            assert node.steps(1) == [(1, 0)]
            return
        assert taken == TakeoverResult(1, 2, early=True, wrote=True)
    assert check(restore(2, folder, step=2), node.crew, 2)[0].early


@pytest.mark.parametrize("lacking", [FENCE, STEP_END])
def test_a_survivor_that_has_not_kept_both_sides_of_the_update_writes_nothing(
    folder: Path, lacking: int
) -> None:
    with Node(folder, 2) as node:
        node.train(1)
        node.crew.train(2, absent=[1], flags=JIT | RECORD_EARLY)
        node.live_steps = dict.fromkeys(range(2), 2)
        node.journal(1, 2, FENCE)
        node.journal(0, 2, STEP_END if lacking == FENCE else FENCE)
        node.die(1)
        taken = node.take(0, 1, early=True)
        assert "this rank has not kept what that changes" in taken.why
        assert node.steps(1) == [(1, 0)]


def test_the_fence_of_another_step_serves_nothing(folder: Path) -> None:
    with Node(folder, 2) as node:
        node.train(1)
        node.crew.train(2, absent=[1], flags=JIT | RECORD_EARLY)
        node.live_steps = dict.fromkeys(range(2), 2)
        for rank in range(2):
            node.journal(rank, 2 + rank, FENCE)
        node.journal(0, 2, STEP_END)
        node.die(1)
        assert node.takeover(0).required_instant([1]) is None
        assert "entry of the end of the step is of step 1" in node.take(0, 1, early=True).why


def test_a_living_rank_that_only_has_the_early_instant_takes_all_to_it(folder: Path) -> None:
    with Node(folder, 3) as node:
        node.train(1)
        node.train(2, absent=[1, 2])
        node.crew.commit(2, 2, RECORD_EARLY)
        node.die(1)
        takeover = node.takeover(0)
        assert takeover.required_instant([1]) is False
        assert takeover.required_instant([1], living=[2]) is True


def test_ranks_that_have_both_instants_restore_the_one_that_all_have(folder: Path) -> None:
    """All have the early one if nothing is shared, too: pending work is the same on every rank."""
    with Node(folder, 2, shares=False) as node:
        node.crew.train(1, absent=[1])
        node.crew.commit(0, 1, RECORD_EARLY)
        node.crew.commit(1, 1, RECORD_EARLY)
    assert [info.early for info in check(restore(2, folder), node.crew, 1)] == [True, True]
    with Node(folder.with_name("exact"), 2, shares=False) as node:
        node.crew.train(1)
        node.crew.commit(0, 1, RECORD_EARLY)
    infos = check(restore(2, folder.with_name("exact")), node.crew, 1)
    assert [info.early for info in infos] == [False, False]


@given(st.lists(st.sets(st.booleans()), min_size=1, max_size=5))
def test_the_common_instant_is_the_best_that_everybody_has(held: list[set[bool]]) -> None:
    early = common_instant(held)
    if early is None:
        assert not set.intersection(*held)
    else:
        assert all(early in each for each in held)
        assert early is False or not all(False in each for each in held)


# ---- what was whole stays whole ------------------------------------------------------------

ACTION = st.tuples(
    st.sampled_from(["step", "die", "take"]), st.integers(0, 2), st.integers(0, 2), st.booleans()
)


@pytest.fixture(scope="module")
def copy_buffer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield tmp_path_factory.mktemp("shelf")


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_what_is_whole_on_every_rank_stays_whole_until_something_newer_is(
    copy_buffer: Path, data: st.DataObject
) -> None:
    """Ranks die at any point, commit or not, a step apart; survivors take over in any order."""
    folder = copy_buffer / str(len(list(copy_buffer.iterdir())))
    with Node(folder, 3) as node:
        node.train(1)
        whole, step, dead = 1, 1, set()
        for region in node.crew.regions:
            region.reusable = lambda timeline, step: step < whole
        for action, a, b, flag in data.draw(st.lists(ACTION, max_size=6)):
            living = [r for r in range(3) if r not in dead]
            if action == "step" and not dead and step < 4:
                step += 1
                missing = {a, b} if flag else set()
                try:
                    node.train(step, absent=sorted(missing))
                except NoSlotError:
                    reject()  # a job would have taken no snapshot of this step
                behind = data.draw(st.sampled_from([None, *missing]))
                if behind is not None:
                    node.live_steps[behind] = step - 1
                if not missing:
                    whole = step
                    for region in node.crew.regions:
                        region.mark_committed(region.slots[_slot(region, step)])
            elif action == "die" and len(living) > 1 and a in living:
                node.die(a)
                dead.add(a)
            elif action == "take" and a in living and b in dead:
                node.take(a, b)
        node.die(*[r for r in range(3) if r not in dead])
        newest = _whole_steps(node)
        assert newest and max(newest) >= whole, (newest, whole)
    check(restore(3, folder), node.crew, max(newest))


def _slot(region: Region, step: int) -> int:
    return next(s.index for s in region.slots if s.record is not None and s.record.step == step)


def _whole_steps(node: Node) -> set[int]:
    """Steps of which every rank's region has a part."""
    return set.intersection(*({step for step, _ in node.steps(r)} for r in range(node.world)))
