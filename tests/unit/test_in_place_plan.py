"""The plan of a recovery in place: all that may be found, and the reasons for a refusal."""

from __future__ import annotations

import json
from typing import Any

import pytest

from lightck.inplace.plan import Description, Plan, PlanRefused, Standing, plan_of

SUM = Description("allreduce SUM", (("float32", (4,)),), site="train.py:7")
SEND = Description("broadcast from 0", (("float32", (4,)),))


def forms(*numbers: int, form: Description = SUM) -> dict[int, Description]:
    return dict.fromkeys(numbers, form)


def standing(rank: int, **more: Any) -> Standing:
    told: dict[str, Any] = dict(
        step=5, starts={4: 10, 5: 20}, ends={5: 18}, intact=forms(*range(10, 22)), issued=22
    )
    return Standing(rank, **{**told, **more})


def planned(*standings: Standing, lost: tuple[int, ...] = (2,)) -> Plan:
    found = plan_of(standings, lost)
    assert isinstance(found, Plan), found
    return found


def refused(*standings: Standing, lost: tuple[int, ...] = (2,)) -> str:
    found = plan_of(standings, lost)
    assert isinstance(found, PlanRefused), found
    return found.why


def test_a_replacement_restores_the_last_step_where_a_survivor_is_beyond_it() -> None:
    plan = planned(
        standing(0, intact=forms(*range(10, 21)), open=forms(21)),
        standing(1, intact=forms(*range(10, 21)), open=forms(21)),
    )
    assert (plan.step, plan.base) == (5, 20)
    assert plan.donors == {18: 0, 19: 0, 20: 0}  # 21 is made again by all
    assert plan.prelude == (18, 19)


def test_a_result_goes_to_a_survivor_that_lacks_it() -> None:
    plan = planned(
        standing(0, intact=forms(*range(10, 20)), open=forms(20, 21)),
        standing(1, intact=forms(*range(10, 21)), open=forms(21)),
    )
    assert plan.donors[20] == 1


def test_between_two_steps_a_replacement_repeats_the_last_one() -> None:
    between = dict(starts={4: 10}, ends={5: 18}, issued=19)
    plan = planned(
        standing(0, **between, intact=forms(*range(10, 18)), open=forms(18)),
        standing(1, **between, intact=forms(*range(10, 18)), open=forms(18)),
    )
    assert (plan.step, plan.base) == (4, 10)
    assert set(plan.donors) == {*range(10, 18)}


def test_one_survivor_beyond_is_enough_and_the_other_is_given_what_it_lacks() -> None:
    plan = planned(
        standing(0, starts={4: 10}, issued=19, intact=forms(*range(10, 18)), open=forms(18)),
        standing(1, intact=forms(*range(10, 20)), issued=21, open=forms(20)),
    )
    assert (plan.step, plan.base) == (5, 20)
    assert plan.donors[18] == 1
    assert 19 in plan.donors  # rank 0 has not begun it, and rank 1 is through


def test_without_a_loss_only_what_is_lacking_is_given() -> None:
    plan = planned(
        standing(0, intact=forms(*range(10, 20)), open=forms(20, 21)),
        standing(1, intact=forms(*range(10, 21)), open=forms(21)),
        standing(2, intact=forms(*range(10, 21)), open=forms(21)),
        lost=(),
    )
    assert plan.step is None
    assert plan.donors == {20: 1}


def test_a_broadcast_that_its_root_has_sent_is_given_to_who_has_not_begun_it() -> None:
    plan = planned(
        standing(0, intact={**forms(*range(10, 21)), **forms(21, form=SEND)}, issued=22),
        standing(1, intact=forms(*range(10, 21)), issued=21),
        lost=(),
    )
    assert plan.donors == {21: 0}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (dict(unable="has left the training"), "rank 1 has left the training"),
        (dict(step=6, starts={6: 30}), "different steps"),
        (dict(open=forms(21, form=SEND), intact=forms(*range(10, 21))), "collective 21 is"),
        (dict(starts={4: 10, 5: 19}), "do not make the same collectives"),
    ],
)
def test_ranks_that_do_not_fit_together_are_restarted(change: dict[str, Any], words: str) -> None:
    assert words in refused(standing(0), standing(1, **change))


def test_a_result_that_was_changed_is_never_given() -> None:
    why = refused(
        standing(0, intact=forms(*range(10, 20)), spoiled=forms(20), open=forms(21)),
        standing(1, intact=forms(*range(10, 20)), open=forms(20, 21)),
    )
    assert "was changed" in why


def test_another_holder_gives_what_one_has_changed() -> None:
    plan = planned(
        standing(0, intact=forms(*range(10, 20)), spoiled=forms(20), open=forms(21)),
        standing(1, intact=forms(*range(10, 21)), open=forms(21)),
    )
    assert plan.donors[20] == 1


def test_results_that_differ_by_rank_are_nobody_elses() -> None:
    alone = Description("gather", shared=False)
    why = refused(
        standing(0, open=forms(21), intact={**forms(*range(10, 20)), 20: alone}),
        standing(1, open=forms(21), intact={**forms(*range(10, 20)), 20: alone}),
    )
    assert "gather" in why
    assert "differ by rank" in why


@pytest.mark.parametrize("step", [0, 1])
def test_the_first_steps_are_not_recovered_in_place(step: int) -> None:
    found = refused(
        standing(0, step=step, starts={step: 20}, open=forms(21)),
        standing(1, step=step, starts={step: 20}, open=forms(21)),
    )
    assert "DDP settles its buckets" in found


def test_nobody_left_is_a_restart() -> None:
    assert refused(lost=(0, 1)) == "no rank is left"


def test_a_standing_is_the_same_behind_the_store() -> None:
    sent = standing(1, open=forms(21), spoiled={9: SEND}, unable="why")
    found = Standing.from_message(json.loads(json.dumps(sent.to_message())))
    assert found == sent
    assert found.open[21].site == SUM.site


def test_ranks_compute_the_same_plan_whatever_order_they_hear_in() -> None:
    both = [standing(0, open=forms(21)), standing(1, open=forms(21))]
    assert plan_of(both, (2,)) == plan_of(reversed(both), [2])


def test_what_nobody_can_give_before_a_forward_is_withheld_and_named() -> None:
    ranks = [
        standing(rank, intact=forms(*range(10, 18), 19, 20), spoiled=forms(18), open=forms(21))
        for rank in (0, 1)
    ]
    plan = planned(*ranks)
    assert plan.prelude == (19,)
    assert plan.withheld == (forms(18)[18],)


def test_where_one_before_a_forward_is_known_to_nobody_none_is_given() -> None:
    ranks = [
        standing(rank, intact=forms(*range(10, 18), 19, 20), open=forms(21)) for rank in (0, 1)
    ]
    plan = planned(*ranks)
    assert (plan.prelude, plan.withheld) == ((), ())


def test_a_rank_that_joined_at_the_step_hides_no_collective_before_its_forward() -> None:
    plan = planned(
        standing(0, intact=forms(*range(10, 21)), open=forms(21)),
        standing(1, starts={5: 20}, ends={}, intact=forms(20), open=forms(21)),
    )
    assert plan.prelude == (18, 19)
