"""Ranks choose what they restore by a pure function of what each of them can put together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from lightck.distributed.restore.selection import (
    Choice,
    Key,
    Lineage,
    RankView,
    SnapshotOffer,
    branch_points,
    decide,
    decide_restore,
    ruling_lineage,
)
from lightck.distributed.rounds import MAX_BYTES
from lightck.errors import CoordinationError

T1, T2, T3 = 11, 12, 13


def lineage(head: int, *ancestors: tuple[int, int], run: str = "aa", world: int = 2) -> Lineage:
    return Lineage(head, ancestors, world, run, f"region of {head}")


def view(*steps: int, timeline: int = T1, world: int = 2) -> RankView:
    offers = tuple(SnapshotOffer(Key(timeline, step, world)) for step in steps)
    return RankView("/mnt/run", None, offers, lineage(timeline))


def marked(seen: RankView, step: int, **flags: bool) -> RankView:
    offers = [replace(o, **flags) if o.key.step == step else o for o in seen.offers]
    return replace(seen, offers=tuple(offers))


def chosen(*views: RankView) -> tuple[int, int] | None:
    choice = decide(views)
    return choice.key and (choice.key.timeline, choice.key.step)


def test_the_newest_step_that_every_rank_can_put_together_is_chosen() -> None:
    views = [view(8, 7, 6, world=3), view(7, 6, world=3), view(8, 7, world=3)]
    choice = decide(views)
    assert choice.key == Key(T1, 7, 3)
    assert choice.fell_back == (
        "step 8: not whole, missing on rank(s) 1; not healed: as rank(s) 0, 2 have it, it is not"
        " replicated on every rank",
    )
    assert choice.why == "step 7 is the newest that is whole"


def test_nothing_in_common_is_nothing_to_restore() -> None:
    choice = decide([view(8), view(7)])
    assert choice.key is None and not choice.never_written
    assert len(choice.fell_back) == 2
    empty = RankView("/mnt/run", None, never_written=True)
    assert decide([empty, empty]).never_written


def test_what_was_stopped_before_its_first_whole_snapshot_begins_anew() -> None:
    young = replace(view(), fresh_timeline=T1)
    assert decide([view(1), young]).never_written
    assert not decide([replace(view(1), step=1), replace(young, step=1)]).never_written
    # It has continued something, is of another timeline, or of another number of ranks.
    older = lineage(T1, (T2, 9))
    assert not decide(
        [replace(view(1), lineage=older), replace(young, lineage=older)]
    ).never_written
    assert not decide([view(1), replace(young, fresh_timeline=T2)]).never_written
    assert not decide([view(1, world=3), young, young]).never_written
    # They were stopped while they began again, in either order.
    again = replace(young, lineage=lineage(T2), fresh_timeline=T2)
    assert decide([view(1), again]).never_written and decide([again, view(1)]).never_written
    # What is whole is taken, and one that was left behind is not passed over in silence.
    assert chosen(view(1), replace(view(1), fresh_timeline=T1)) == (T1, 1)
    assert not decide([view(1), replace(young, offers=view(4, timeline=T2).offers)]).never_written


def test_a_step_is_never_combined_with_its_namesake_of_another_timeline() -> None:
    ahead = replace(view(10, timeline=T2), lineage=lineage(T2, (T1, 9)))
    ahead = replace(ahead, offers=(*ahead.offers, SnapshotOffer(Key(T1, 9, 2))))
    assert chosen(view(10, 9), ahead) == (T1, 9)


def test_a_snapshot_beyond_the_branch_point_is_not_chosen_whoever_offers_it() -> None:
    # Both hold step 10 of the old timeline; one of them knows that the job went back to 9.
    ahead = replace(view(10, 9), lineage=lineage(T2, (T1, 9)))
    choice = decide([view(10, 9), ahead])
    assert choice.key == Key(T1, 9, 2)
    assert "step 10: beyond the step at which a later restore went on" in choice.passed_over[0]


def test_nothing_of_an_ancestor_counts_where_its_branch_point_is_not_kept() -> None:
    assert branch_points([T2, T1], [(T3, 12), (T2, 10), (T2, 9)]) == [10, -1]
    behind = replace(view(9), lineage=lineage(T3, (T2, 10), (T1, -1)))
    assert chosen(behind, behind) is None


def test_a_timeline_that_no_newer_one_continues_is_abandoned() -> None:
    kept = replace(
        view(10, timeline=T2),
        lineage=lineage(T2, (T1, 9)),
        offers=(SnapshotOffer(Key(T2, 10, 3)), SnapshotOffer(Key(T1, 9, 3))),
    )
    away = replace(
        view(40, timeline=T3),
        lineage=lineage(T3, (T1, 9)),
        offers=(SnapshotOffer(Key(T3, 40, 3)), SnapshotOffer(Key(T1, 9, 3))),
    )
    choice = decide([kept, kept, away])
    assert choice.key == Key(T1, 9, 3)
    assert "step 40: of a timeline that was abandoned" in choice.passed_over


def test_a_rank_that_died_before_its_own_branch_still_agrees() -> None:
    ahead = replace(view(9, 8), lineage=lineage(T2, (T1, 9)))
    assert chosen(ahead, view(9, 8)) == (T1, 9)


def test_a_region_that_is_new_in_this_world_knows_no_ancestors_and_changes_nothing() -> None:
    ahead = replace(view(9, 8), lineage=lineage(T2, (T1, 9)))
    fresh = replace(view(9, 8), lineage=lineage(T2))
    assert chosen(fresh, ahead) == chosen(ahead, fresh) == (T1, 9)


def test_of_unrelated_timelines_the_one_with_the_most_of_its_ranks_counts() -> None:
    # Four ranks wrote T1; two of them began anew as T2 and left the others' regions behind.
    old = [lineage(T1, world=4), lineage(T1, world=4)]
    new = [lineage(T2, world=2), lineage(T2, world=2)]
    assert ruling_lineage([*old, *new]).head == ruling_lineage([*new, *old]).head == T2


def test_regions_of_two_jobs_are_an_error_that_names_them() -> None:
    other = replace(view(8, timeline=T2), lineage=lineage(T2, run="bb"))
    with pytest.raises(CoordinationError, match=r"different jobs are mixed: run aa in .*; run bb"):
        decide([view(8), other])
    # A region that was made later has another run's name, and the same timeline.
    same = replace(view(8), lineage=lineage(T1, run="bb"))
    assert chosen(view(8), same) == (T1, 8)


def test_a_suspect_step_comes_after_all_others() -> None:
    views = [view(8, 7), marked(view(8, 7), 8, suspect=True)]
    choice = decide(views)
    assert choice.key == Key(T1, 7, 2)
    assert "step 8: suspect, for replicas were found to differ there or before" in choice.fell_back
    only = [view(8), marked(view(8), 8, suspect=True)]
    assert decide(only).key == Key(T1, 8, 2)
    assert "is suspect" in decide(only).why


def test_an_early_step_yields_to_an_exact_one_just_before_it() -> None:
    early = marked(view(8, 7), 8, early=True)
    choice = decide([view(8, 7), early])
    assert choice.key == Key(T1, 7, 2) and not choice.early
    assert "step 8 was finished early" in choice.why
    assert choice.passed_over == ("step 8 was finished early, and step 7 is exact",)


def test_an_early_step_yields_to_nothing_that_is_two_steps_older() -> None:
    early = marked(view(8, 6), 8, early=True)
    assert chosen(view(8, 6), early) == (T1, 8)
    between = marked(marked(view(9, 8, 7), 9, early=True), 8, early=True)
    assert chosen(view(9, 8, 7), between) == (T1, 9)


def test_an_early_step_yields_to_any_exact_one_where_the_ranks_want_that() -> None:
    views = [view(9, 8, 4), marked(marked(view(9, 8, 4), 9, early=True), 8, early=True)]
    choice = decide([replace(each, wants_exact=True) for each in views])
    assert choice.key == Key(T1, 4, 2) and not choice.early
    said = [replace(each, wants_exact=True).to_message() for each in views]
    assert Choice.from_message(decide_restore(said)).key == choice.key
    only = [replace(marked(view(8), 8, early=True), wants_exact=True)] * 2
    assert decide(only).key == Key(T1, 8, 2) and decide(only).early
    with pytest.raises(CoordinationError, match="None, exact on rank.s. 0; None on rank.s. 1"):
        decide([replace(views[0], wants_exact=True), views[1]])


def test_an_early_step_that_is_taken_names_the_newest_exact_one() -> None:
    far = marked(view(8, 4), 8, early=True)
    choice = decide([view(8, 4), far])
    assert choice.key == Key(T1, 8, 2) and choice.early
    assert choice.why.endswith("of the exact ones step 4 is the newest")
    only = decide([view(8), marked(view(8), 8, early=True)])
    assert only.key == Key(T1, 8, 2) and only.early and "finished early" in only.why


def test_ranks_of_another_world_look_further_before_they_choose() -> None:
    assert decide([view(8, world=2)]).scan_all
    wide = replace(view(8, world=2), scanned_all=True)
    assert decide([wide]).key == Key(T1, 8, 2)
    # An older one of another world does no harm as long as it does not count.
    old = SnapshotOffer(Key(T3, 9, 4))
    assert not decide([replace(v, offers=(*v.offers, old)) for v in (view(8), view(8))]).scan_all


def test_ranks_without_a_region_look_further_if_others_are_there() -> None:
    lacking = RankView("/mnt/run", None, own_missing=True)
    assert decide([view(8), lacking]).scan_all
    told = decide([replace(view(8), scanned_all=True), replace(lacking, scanned_all=True)])
    (text,) = told.fell_back
    assert text.startswith("step 8: not whole, missing on rank(s) 1; not healed: ")


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [("step", 6, "step: None on rank(s) 0; 6 on"), ("path", "/b", "path: /mnt/run on rank(s) 0")],
)
def test_ranks_that_want_different_things_are_told_so(
    field: str, value: object, named: str
) -> None:
    with pytest.raises(CoordinationError) as caught:
        decide([view(8), replace(view(8), **{field: value})])
    assert named in str(caught.value) and "on rank(s) 1" in str(caught.value)


def test_every_rank_hears_the_same_choice_and_what_others_met() -> None:
    views = [replace(view(8, 7), problems=("slot 1 is damaged",)), view(7)]
    choice = Choice.from_message(decide_restore([each.to_message() for each in views]))
    assert choice == decide(views)
    assert choice.fell_back[0] == "rank 0: slot 1 is damaged"


def test_what_a_rank_says_has_room_in_one_message() -> None:
    most: Sequence[tuple[int, int]] = [(2**62 + i, 2**40) for i in range(40)]
    offers = tuple(
        SnapshotOffer(Key(2**62 + i, 2**40, 10_000), True, True, True, 2**46) for i in range(60)
    )
    seen = RankView(
        "\N{SNOWMAN}" * 900,
        2**40,
        offers,
        Lineage(2**62, tuple(most), 10_000, "f" * 32, "x" * 255),
        tuple('"' * 900 for _ in range(60)),
    )
    said = {"kind": "restore", **seen.to_message()}
    import json

    assert len(json.dumps(said, separators=(",", ":"))) <= MAX_BYTES
    assert RankView.from_message(seen.to_message()).offers == seen.offers[:16]


def test_of_as_many_ranks_of_two_timelines_the_one_with_the_newer_snapshot_counts() -> None:
    """A life that ended before its first snapshot is nobody's ancestor."""
    ended = lineage(T2, (T1, 8), world=2)
    went_on = replace(lineage(T3, (T1, 8), world=2), newest_ns=5)
    assert ruling_lineage([ended, went_on]).head == ruling_lineage([went_on, ended]).head == T3


def test_a_region_that_cannot_be_read_and_is_not_needed_stops_nobody() -> None:
    """The rank puts the snapshot together from other regions."""
    broken = replace(view(8), unreadable="RegionFormatError: truncated")
    assert decide([view(8), broken]).key == Key(T1, 8, 2)
    lacks = replace(view(), unreadable="RegionFormatError: truncated", scanned_all=True)
    with pytest.raises(CoordinationError, match=r"no rank can restore: rank 1: RegionFormatError"):
        decide([replace(view(8), scanned_all=True), lacks])


def test_a_step_is_healed_as_of_the_instant_that_every_rank_has_that_has_it() -> None:
    def both(**flags: bool) -> RankView:
        return marked(marked(view(8, 2, world=3), 2, alike=True), 8, alike=True, **flags)

    lacks = view(2, world=3)
    choice = decide([both(early=True), both(early_too=True), marked(lacks, 2, alike=True)])
    assert (choice.key, choice.early, choice.heals) == (Key(T1, 8, 3), True, ((2, 0),))
    choice = decide([both(early=True), both(), marked(lacks, 2, alike=True)])
    assert choice.key == Key(T1, 2, 3)
    choice = decide([both(early_too=True), both(), marked(lacks, 2, alike=True)])
    assert (choice.key, choice.early) == (Key(T1, 8, 3), False)
