"""One warning when due snapshots slip too often, with the reason and what to do."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from lightck.loop.outcomes import SlipWatch
from lightck.pipeline.pipeline import SlipReason


def _noted(caplog: pytest.LogCaptureFixture, fates: dict[int, str | None]) -> list[dict[str, Any]]:
    watch = SlipWatch()
    with caplog.at_level(logging.WARNING, "lightck"):
        for step, slip in fates.items():
            watch.note(step, slip)
    return [record.lightck for record in caplog.records]


def test_more_than_a_tenth_of_the_due_snapshots_slipped_is_told_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    told = _noted(
        caplog, {step: SlipReason.SLOTS if step % 5 == 0 else None for step in range(300)}
    )
    assert len(told) == 1
    assert told[0]["why"] == "every slot is busy" and "policy=" in told[0]["remedy"]
    assert told[0]["slipped"] > told[0]["due"] / 10


def test_a_tenth_is_not_told(caplog: pytest.LogCaptureFixture) -> None:
    fates = {step: SlipReason.DRAM if step % 10 == 9 else None for step in range(300)}
    assert _noted(caplog, fates) == []


def test_slips_of_more_than_a_hundred_steps_ago_do_not_count(
    caplog: pytest.LogCaptureFixture,
) -> None:
    early: dict[int, str | None] = dict.fromkeys(
        range(9), SlipReason.SLOTS
    )  # of so few nothing is said
    assert _noted(caplog, early | dict.fromkeys(range(109, 300)) | {300: SlipReason.SLOTS}) == []


def test_the_reason_is_that_of_most_and_one_that_is_not_known_has_a_remedy_too(
    caplog: pytest.LogCaptureFixture,
) -> None:
    fates = {step: SlipReason.DRAM if step == 0 else "another rank is behind" for step in range(12)}
    (told,) = _noted(caplog, fates)
    assert told["why"] == "another rank is behind" and "`slipped`" in told["remedy"]
