"""Events: what a handler and a subscriber are given is plain JSON, whatever was said."""

from __future__ import annotations

import enum
import json
import logging
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pytest
import torch

from lightck.events import as_plain, event


class Colour(enum.StrEnum):
    """A text with a name."""

    RED = "red"


class Level(enum.IntEnum):
    """A number with a name."""

    HIGH = 3


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (Path("/run/x"), "/run/x"),
        (PurePosixPath("a/b"), "a/b"),
        (ValueError("too small"), "too small"),
        (Colour.RED, "red"),
        (Level.HIGH, 3),
        (np.uint64(2**63), 2**63),
        (np.float32(0.5), 0.5),
        (np.bool_(True), True),
        (np.arange(3), [0, 1, 2]),
        (torch.tensor([1.5]), [1.5]),
        (torch.tensor(2), 2),
        (torch.float32, "torch.float32"),
        (float("inf"), "inf"),
        (b"raw", "b'raw'"),
        ({Path("/a"): {1}, 2: (None, True)}, {"/a": [1], "2": [None, True]}),
        ((each for each in (Path("a"), 2)), ["a", 2]),
        (None, None),
        (False, False),
        ("text", "text"),
    ],
)
def test_every_value_becomes_what_json_has(value: Any, plain: Any) -> None:
    found = as_plain(value)
    assert found == plain
    assert type(found) in (str, int, float, bool, type(None), list, dict)
    assert json.loads(json.dumps(found, allow_nan=False)) == plain


def test_a_record_has_the_event_and_plain_fields_and_text_for_people(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG, "lightck")
    event("moved", logging.DEBUG, path=Path("/run"), error=OSError(5, "no"), n=np.int32(3))
    event("restored", sentence="restored step 3, next is 4", step=3)
    first, second = caplog.records
    assert first.getMessage() == "lightck: moved path=/run error=[Errno 5] no n=3"
    assert first.__dict__["lightck"] == {"path": "/run", "error": "[Errno 5] no", "n": 3}
    assert first.filename == second.filename == Path(__file__).name
    assert second.getMessage() == "lightck: restored step 3, next is 4"
    assert second.__dict__["lightck_event"] == "restored"
    assert second.__dict__["lightck"] == {"step": 3}
