"""Entries of the boundary journal, made and read without a training loop."""

from __future__ import annotations

from lightck.capture import boundary, rng
from lightck.capture.entry import Sealing, unpacked
from lightck.capture.shelf import Shelf
from lightck.region.journal import STEP_END, JournalEntry


def test_thousands_of_groups_have_entries_that_are_read() -> None:
    groups = [{"params": [f"p{i}"], "options": {"lr": i / 4096}} for i in range(3000)]
    optimizers = [{"class": "C", "groups": groups, "state": {}, "attributes": {}}]
    first = {"rng": rng.capture(), "extras": {}}
    second = {"optimizers": optimizers, "extras": {}}
    sealing = Sealing()
    for step in range(4):
        groups[2000] = {**groups[2000], "options": {"lr": 2.0 + step}}
        blob = sealing.sealed(Shelf(()), {}, (first, {**second, "optimizers": [*optimizers]}), b"d")
        found = unpacked(JournalEntry(STEP_END, step, 1, 1, 0, 0, blob), context="test")
        assert boundary.decode(found.at_forward, context="test") == {**second, "step": step}
