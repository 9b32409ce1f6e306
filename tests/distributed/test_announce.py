"""DueStep steps: pure periods, and announcements that are known before their step."""

from __future__ import annotations

import pytest

from lightck.distributed.commit.due_steps import POLL_S, DueAnnouncer, DueCalendar
from lightck.distributed.commit.protocol import CommitProtocol, DueStep


def test_a_period_needs_no_message_and_counts_from_attach() -> None:
    calendar = DueCalendar(every=5, start=12)
    due = [calendar.at(step) for step in range(13, 31)]
    assert [d for d in due if d] == [DueStep(15, 0), DueStep(20, 1), DueStep(25, 2), DueStep(30, 3)]


def test_a_step_is_asked_for_once() -> None:
    calendar = DueCalendar(every=1)
    calendar.at(1)
    with pytest.raises(ValueError, match="step 1 has been asked for already"):
        calendar.at(1)


def test_an_announced_step_is_due_when_it_was_known_in_time() -> None:
    calendar = DueCalendar()
    calendar.at(1)
    assert calendar.learn(3, 0.0) is None
    assert [calendar.at(2), calendar.at(3)] == [None, DueStep(3, 0, "a")]
    assert calendar.learned == 1


def test_an_announced_step_that_was_passed_is_handed_back_as_lost() -> None:
    calendar = DueCalendar()
    for step in (1, 2, 3):
        calendar.at(step)
    assert calendar.learn(3, 0.0) == DueStep(3, 0, "a")


def test_looks_are_rarer_when_snapshots_are() -> None:
    calendar = DueCalendar()
    calendar.learn(10, 0.0)
    assert calendar.poll_s(0.1) == POLL_S[0]
    assert calendar.poll_s(16.0) == 1.0
    assert calendar.poll_s(1e6) == POLL_S[1]


def test_a_step_is_published_later_than_any_rank_looks() -> None:
    calendar = DueCalendar()
    announcer = DueAnnouncer(calendar)
    step_s = 0.1
    target = announcer.choose(100, step_s, now_s=0.0)
    assert target is not None
    assert (target - 100) * step_s > POLL_S[1]
    calendar.learn(target, 0.0)
    later = announcer.choose(target, step_s, now_s=16.0)
    assert later is not None
    assert (later - target) * step_s > calendar.poll_s(16.0)


def test_one_announcement_is_out_at_a_time() -> None:
    announcer = DueAnnouncer(DueCalendar())
    target = announcer.choose(1, 0.5, now_s=0.0)
    assert target is not None
    assert announcer.choose(2, 0.5, now_s=0.1) is None
    assert announcer.choose(target, 0.5, now_s=9.0) is not None
    assert announcer.count == 2


def test_nothing_is_announced_when_the_period_comes_no_later() -> None:
    assert DueAnnouncer(DueCalendar(every=1)).choose(7, 10.0, now_s=0.0) is None


def test_a_rank_that_was_late_makes_rank_0_look_further_ahead() -> None:
    announcer = DueAnnouncer(DueCalendar())
    first = announcer.choose(0, None, now_s=0.0)
    for _ in range(3):
        announcer.came_late()
    second = announcer.choose(100, None, now_s=60.0)
    assert first is not None
    assert second is not None
    assert second - 100 == first + 7


def test_a_step_that_loops_asked_for_is_the_same_block_however_often_each_has_asked() -> None:
    assert DueStep(9, 0, "r").block == DueStep(9, 1, "r").block != DueStep(8, 0, "r").block


def test_an_announcement_that_comes_late_does_not_lose_what_the_loop_asked_for() -> None:
    protocol = CommitProtocol(0, 2)
    protocol.opened(DueStep(9, 0, "r"), 0.0)
    protocol.committed(9, 0.0)
    protocol.lost(DueStep(9, 4, "a"), "not known in time", 0.0)
    assert protocol.next_call(0.0) is not None and protocol.unsettled == [9]
    with pytest.raises(ValueError, match="cannot be lost"):
        protocol.lost(DueStep(9, 0, "r"), "slipped", 0.0)
