"""Recovery in place as a property: whatever is lost, and when, every rank's results are the same.

The ranks are threads, the links are made here; communicators, plans and recoveries are lightck's.
"""

from __future__ import annotations

import random

import pytest
import torch

from lightck.inplace import operations
from tests.support.inplace.simulated import Job, errors, states, undisturbed

STEPS = 9
POINTS = ("forward", "bucket 0", "bucket 1", "bucket 2", "fence", "update", "end")
SEEDS = range(24)


@pytest.fixture(params=["small", "large"], autouse=True)
def sizes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let results and inputs be copied, or be references and pooled copies."""
    if request.param == "large":
        monkeypatch.setattr(operations, "SMALL_BYTES", 16)
        monkeypatch.setattr("lightck.inplace.inputs.SMALL_BYTES", 16)


def finished(job: Job) -> Job:
    job.run()
    assert errors(job.ranks.values()) == []
    return job


def same(job: Job, golden: Job) -> bool:
    """Tell whether all ranks have the golden state, and have seen the golden results in order."""
    alike = all(torch.equal(mine, golden.ranks[0].state) for mine in states(job))
    traces = all(
        dict(job.ranks[rank].trace) == dict(golden.ranks[rank].trace) for rank in range(job.world)
    )
    return alike and traces


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("point", POINTS)
def test_a_rank_that_is_lost_at_any_point_is_replaced_without_a_trace(
    point: str, world: int
) -> None:
    golden = undisturbed(world, STEPS)
    job = finished(Job(world, STEPS, seed=3, losses={0: (point, 4, world - 1)}))
    assert same(job, golden)
    survivors = [job.ranks[rank] for rank in range(world - 1)]
    assert all(each.life == 0 for each in survivors)


@pytest.mark.parametrize("point", ["metric", "end", "update"])
def test_a_collective_between_two_steps_is_repeated_from_the_step_before(point: str) -> None:
    golden = undisturbed(3, STEPS, metric=True)
    job = finished(Job(3, STEPS, seed=5, losses={0: (point, 4, 1)}, metric=True))
    assert same(job, golden)


def test_without_the_step_before_that_is_a_restart_in_words() -> None:
    job = Job(3, STEPS, seed=5, losses={0: ("end", 4, 1)}, metric=True, every=False)
    job.run()
    # Unless nobody else has seen that the step was committed: then all repeat it.
    assert errors(job.ranks.values()) or same(job, undisturbed(3, STEPS, metric=True))


def test_a_loss_between_two_updates_of_a_step_is_a_restart_in_words_and_no_wait() -> None:
    assert same(finished(Job(3, STEPS, seed=5, second=True)), undisturbed(3, STEPS))
    job = Job(3, STEPS, seed=5, losses={0: ("second", 4, 1)}, second=True)
    job.run()  # fails if no rank ends before a recovery is given up
    why = "between the first update of step 5 and that step's end"
    assert any(why in each for each in errors(job.ranks.values()))


@pytest.mark.parametrize("point", ["forward", "bucket 1", "update", "end"])
def test_a_loop_that_begins_with_a_collective_is_entered_there(point: str) -> None:
    golden = undisturbed(3, STEPS, top=True)
    job = finished(Job(3, STEPS, seed=7, losses={0: (point, 4, 2)}, top=True))
    assert same(job, golden)


@pytest.mark.parametrize("point", ["bucket 0", "bucket 1", "fence"])
def test_a_sum_that_every_rank_divides_itself_is_never_divided_twice(point: str) -> None:
    golden = undisturbed(2, STEPS, divides=True)
    job = Job(2, STEPS, seed=3, losses={0: (point, 4, 1)}, divides=True)
    job.run()
    gone = errors(job.ranks.values())
    if operations.SMALL_BYTES > 16:
        assert gone == []
    if gone:
        assert "was changed before every rank had it" in str(gone)
    else:
        assert same(job, golden)


@pytest.mark.parametrize("error", [RuntimeError("no memory"), RuntimeError(), OSError("no files")])
def test_a_recovery_that_fails_every_time_is_refused_with_its_error(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr("lightck.inplace.recovery._broadcast", fail)
    job = Job(2, STEPS, seed=3, losses={0: ("fence", 4, 1)})
    job.run()
    assert "the recovery has failed" in str(errors(job.ranks.values()))
    assert sum(key.startswith("gen/") for key in job.store.values) <= 24


def test_behind_a_long_evaluation_a_later_loss_is_recovered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(operations, "MOST", 64)
    golden = undisturbed(2, STEPS, evaluation=100)
    job = finished(Job(2, STEPS, seed=3, losses={0: ("bucket 1", 8, 1)}, evaluation=100))
    assert same(job, golden)


@pytest.mark.parametrize("second", ["restore", "forward", "bucket 0"])
def test_a_replacement_that_is_lost_itself_is_replaced(second: str) -> None:
    golden = undisturbed(3, STEPS)
    at = 0 if second == "restore" else 4
    losses = {0: ("bucket 1", 4, 1), 1: (second, at, 1)}
    assert same(finished(Job(3, STEPS, seed=1, losses=losses)), golden)


def test_two_ranks_of_three_that_are_lost_in_one_step_are_replaced() -> None:
    golden = undisturbed(3, STEPS)
    losses = {0: ("bucket 1", 4, 1), 1: ("bucket 2", 4, 2)}
    assert same(finished(Job(3, STEPS, seed=1, losses=losses)), golden)


@pytest.mark.parametrize("seed", SEEDS)
def test_whatever_is_lost_at_random_every_result_is_the_same(seed: int) -> None:
    print(f"seed {seed}")
    chosen = random.Random(seed)
    world, metric, top = chosen.choice((2, 3)), chosen.random() < 0.3, chosen.random() < 0.3
    points = [*POINTS, *(["metric"] if metric else [])]
    losses = {
        n: (chosen.choice(points), chosen.randint(3, STEPS - 2), chosen.randrange(world))
        for n in range(chosen.randint(1, 4))
    }
    golden = undisturbed(world, STEPS, metric=metric, top=top)
    job = Job(world, STEPS, seed=seed, losses=losses, metric=metric, top=top)
    job.run()
    gone = errors(job.ranks.values())
    assert not gone or "no rank is left" in str(gone), gone
    if not gone:
        assert same(job, golden)
