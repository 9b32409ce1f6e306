"""What a test run showed, in numbers: one JSON file per subject in build/proof/, for DESIGN.md."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

FOLDER = Path(__file__).parent.parent / "build" / "proof"


def record(subject: str, numbers: Mapping[str, object]) -> None:
    """Replace what the last run said of `subject` (`kill`, `flips`, `guest`, ...)."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    text = json.dumps(dict(numbers), indent=1, sort_keys=True)
    (FOLDER / f"{subject}.json").write_text(text + "\n")
