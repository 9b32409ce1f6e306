"""A test run says in numbers what it showed: one JSON file per subject, for docs/proof.md."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest  # the guest's runner records without it

FOLDER = Path(__file__).parents[2] / "build" / "proof"


def record(subject: str, numbers: Mapping[str, object]) -> None:
    """Replace what the last run said of `subject` (`kill`, `flips`, `guest`, ...)."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    text = json.dumps(dict(numbers), indent=1, sort_keys=True)
    (FOLDER / f"{subject}.json").write_text(text + "\n")


def record_whole(
    request: pytest.FixtureRequest, subject: str, numbers: Mapping[str, object]
) -> None:
    """Record at the end of a module, unless only some of its tests ran, or one has failed."""
    option = request.config.option
    chosen = option.keyword or getattr(option, "lf", False)
    chosen = chosen or any("::" in each for each in request.config.args)
    if chosen or request.session.testsfailed:
        print(f"{subject}: not recorded, part of the tests were left out or have failed")
        return
    record(subject, numbers)
