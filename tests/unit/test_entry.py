"""Entries of the boundary journal, made and read without a training loop."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from lightck.journal.copy_buffer import CopyBuffer
from lightck.journal.entry import EntryEncoder, decode_entry, forward_of
from lightck.region.native_region import FORWARD, STEP_END, JournalEntry
from lightck.state import boundary_blob, boundary_codec, rng
from lightck.state.inventory import StateTensor


def test_thousands_of_groups_have_entries_that_are_read() -> None:
    groups = [{"params": [f"p{i}"], "options": {"lr": i / 4096}} for i in range(3000)]
    first = {"rng": rng.capture(), "extras": {}}
    encoder = EntryEncoder()
    for step in range(4):
        groups[2000] = {**groups[2000], "options": {"lr": 2.0 + step}}
        optimizers = [{"class": "C", "groups": [*groups], "state": {}, "attributes": {}}]
        second = {"optimizers": optimizers, "extras": {}}
        blob = encoder.encode(CopyBuffer(()), {}, (first, second), b"d")
        found = decode_entry(JournalEntry(STEP_END, step, 1, 1, 0, 0, blob), context="test")
        assert boundary_blob.opened(found.at_forward, context="test") == {**second, "step": step}


def test_groups_come_back_with_their_own_options_in_their_own_order() -> None:
    alike = {"lr": 0.1, "betas": (0.9, 0.99), "more": [1.0] * 20}
    options: list[dict[str, Any]] = [
        alike,
        {**alike, "lr": 0.2},
        {"betas": alike["betas"], "lr": 0.1, "more": alike["more"]},
        {"lr": 0.1},
        {},
        {**alike, "new": None},
        {**alike, "lr": float("nan")},
    ]
    encoder = EntryEncoder()
    for step in range(6):
        given = options[step:] + options[:step] if step < 5 else []
        groups = [{"params": [f"p{i}"], "options": each} for i, each in enumerate(given)]
        optimizers = [{"class": "C", "groups": groups, "state": {}, "attributes": {}}] * 2
        trees = {"rng": rng.capture(), "extras": {}}, {"optimizers": optimizers, "extras": {}}
        blob = encoder.encode(CopyBuffer(()), {}, trees, b"d")
        found = decode_entry(JournalEntry(STEP_END, step, 1, 1, 0, 0, blob), context="test")
        second = boundary_blob.opened(found.at_forward, context="test")
        assert repr(second["optimizers"]) == repr(optimizers)


def test_a_forward_is_inferred_where_groups_share_objects_on_one_rank_and_none_on_the_other() -> (
    None
):
    """A restored optimizer has equal options in other objects than one that was built."""

    def entry(kind: int, lr: float, restored: bool) -> JournalEntry:
        eps, betas = 1.0e-8, (0.9, 0.999)
        first = {"lr": lr, "eps": eps, "betas": betas}
        second = {"lr": lr + 1, "eps": float("1.0e-8") if restored else eps, "betas": betas}
        groups = [
            {"params": [f"p{i}"], "options": options} for i, options in enumerate((first, second))
        ]
        optimizers = [{"class": "C", "groups": groups, "state": {}, "attributes": {}}]
        trees = {"rng": generators, "extras": {}}, {"optimizers": optimizers, "extras": {}}
        blob = EntryEncoder().encode(CopyBuffer(()), {}, trees, b"d")
        return JournalEntry(kind, 7, 1, 1, 0, 0, blob)

    generators = rng.capture()
    around = [entry(STEP_END, 0.2, False), entry(FORWARD, 0.1, False)]
    wanted = decode_entry(around[1], context="test")
    for lr in (0.2, 0.1):  # before what the loop does there, and behind it
        here = entry(STEP_END, lr, True)
        assert here.blob not in [each.blob for each in around]
        told = decode_entry(forward_of(here, around), context="test")
        assert told.at_forward == wanted.at_forward


def _draws() -> list[float]:
    return [float(torch.rand(1)), random.random(), np.random.random_sample()]


@pytest.mark.parametrize("draw", [torch.rand, random.random, np.random.random_sample, None])
@pytest.mark.parametrize("is_forward", [False, True])
def test_generators_alone_change_from_an_entry_to_the_next(draw: Any, is_forward: bool) -> None:
    extras = {"x": torch.arange(3), "y": b"y" * 300}
    second: dict[str, Any] = {"optimizers": [], "extras": {}}
    encoder = EntryEncoder()
    ends, forwards = boundary_blob.BlobEncoder(), boundary_blob.BlobEncoder()
    for step in range(4):
        first = {"rng": rng.capture(), "extras": extras}
        if draw is not None:
            draw(1) if draw is torch.rand else draw()
        second = {**second, "step": step, **({"rng": rng.capture()} if is_forward else {})}
        blob = encoder.encode(CopyBuffer(()), {}, (first, second), b"d")
        found = decode_entry(JournalEntry(STEP_END, step, 1, 1, 0, 0, blob), context="test")
        for tree, held in (
            (first, found.at_step),
            (second, found.at_forward),
            (first, ends.closed(first)),
            (second, forwards.closed(second)),
        ):
            opened = boundary_blob.opened(held, context="test")
            assert sorted(opened) == sorted(tree)
            if "rng" in tree:
                rng.restore(boundary_codec.rebuild(tree["rng"]))
                drawn = _draws()
                rng.restore(boundary_codec.rebuild(opened["rng"]))
                assert _draws() == drawn
            if tree is second:
                assert opened["step"] == step
            else:
                assert torch.equal(opened["extras"]["x"], extras["x"])


def test_what_extras_have_is_found_wherever_it_begins() -> None:
    first = {"rng": rng.capture(), "extras": {"x": [b"x" * 2000]}}
    second = {"optimizers": [], "extras": {"y": {"z": b"y" * 3000}}}
    encoder = EntryEncoder()
    for step, size in enumerate((3, 3, 300, 3)):
        live = StateTensor("model/b", "buffer", "", torch.full((size,), float(step)), sync=True)
        copy_buffer = CopyBuffer([live])
        blob = encoder.encode(copy_buffer, copy_buffer.fill(), (first, second), b"d")
        found = decode_entry(JournalEntry(STEP_END, step, 1, 1, 0, 0, blob), context="test")
        assert torch.equal(found.lives[0].tensor, live.tensor)
        held = boundary_blob.opened(found.at_step, context="test")
        assert held["extras"] == first["extras"]
        held = boundary_blob.opened(found.at_forward, context="test")
        assert held["extras"] == second["extras"]
