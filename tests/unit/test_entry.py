"""Entries of the boundary journal, made and read without a training loop."""

from __future__ import annotations

import torch

from lightck.journal.copy_buffer import CopyBuffer
from lightck.journal.entry import EntryEncoder, unpacked
from lightck.region.native_region import STEP_END, JournalEntry
from lightck.state import boundary_blob, rng
from lightck.state.inventory import StateTensor


def test_thousands_of_groups_have_entries_that_are_read() -> None:
    groups = [{"params": [f"p{i}"], "options": {"lr": i / 4096}} for i in range(3000)]
    optimizers = [{"class": "C", "groups": groups, "state": {}, "attributes": {}}]
    first = {"rng": rng.capture(), "extras": {}}
    second = {"optimizers": optimizers, "extras": {}}
    sealing = EntryEncoder()
    for step in range(4):
        groups[2000] = {**groups[2000], "options": {"lr": 2.0 + step}}
        blob = sealing.sealed(
            CopyBuffer(()), {}, (first, {**second, "optimizers": [*optimizers]}), b"d"
        )
        found = unpacked(JournalEntry(STEP_END, step, 1, 1, 0, 0, blob), context="test")
        assert boundary_blob.opened(found.at_forward, context="test") == {**second, "step": step}


def test_what_extras_have_is_found_wherever_it_begins() -> None:
    first = {"rng": rng.capture(), "extras": {"x": [b"x" * 2000]}}
    second = {"optimizers": [], "extras": {"y": {"z": b"y" * 3000}}}
    sealing = EntryEncoder()
    for step, size in enumerate((3, 3, 300, 3)):
        live = StateTensor("model/b", "buffer", "", torch.full((size,), float(step)), sync=True)
        copy_buffer = CopyBuffer([live])
        blob = sealing.sealed(copy_buffer, copy_buffer.fill(), (first, second), b"d")
        found = unpacked(JournalEntry(STEP_END, step, 1, 1, 0, 0, blob), context="test")
        assert torch.equal(found.lives[0].tensor, live.tensor)
        held = boundary_blob.opened(found.at_step, context="test")
        assert held["extras"] == first["extras"]
        held = boundary_blob.opened(found.at_forward, context="test")
        assert held["extras"] == second["extras"]
