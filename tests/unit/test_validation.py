"""Restore takes what capture writes beside a snapshot's tensors, and refuses anything else."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from lightck.errors import CorruptSnapshotError
from lightck.reader import assembly
from lightck.region.layout import Entry
from lightck.region.region import Candidate
from lightck.state import boundary_blob, boundary_codec, rng

Tree = dict[str, Any]
Edit = Callable[[Tree, Tree], object]
MOMENT = "optim/0/state/weight/exp_avg"


def entry(name: str) -> Entry:
    return Entry(name, "parameter", "float32", (2,), (1,), 8)


def states() -> tuple[Tree, Tree]:
    """Return step end and forward start of a snapshot of step 5, as trees not yet encoded."""
    taken = rng.capture()
    optimizer = {
        "class": "torch.optim.AdamW",
        "groups": [{"params": ["weight"], "options": {"lr": 0.1}}],
        "state": {"weight": {"exp_avg": boundary_codec.reference(MOMENT)}, "@#0": {}},
        "attributes": {"calls": 3},
    }
    extras = {"log": {"history": boundary_codec.reference("extras/log/history")}}
    first = {"rng": taken, "extras": extras}
    return first, {"optimizers": [optimizer], "extras": {}, "step": 5, "rng": taken}


def candidate(edit: Edit = lambda a, b: None, names: tuple[str, ...] = (), step: int = 5) -> Any:
    first, second = states()
    edit(first, second)
    held = ("model/weight", MOMENT, "extras/log/history", *names)
    made = SimpleNamespace(
        record=SimpleNamespace(step=step),
        layout=SimpleNamespace(entries=tuple(entry(name) for name in held)),
        manifest=SimpleNamespace(
            step=5, at_step=boundary_blob.closed(first), at_forward=boundary_blob.closed(second)
        ),
    )
    return cast("Candidate", made)


def _read(held: Candidate) -> tuple[dict[str, Any], dict[str, Any]]:
    return assembly.boundary_trees(held, held.layout.entries, context="snapshot 5")


def test_what_capture_writes_is_read_as_it_was_written() -> None:
    first, second = _read(candidate())
    assert second["step"] == 5 and first["extras"] == states()[0]["extras"]
    assert second["optimizers"] == states()[1]["optimizers"]
    assert torch.is_tensor(first["rng"]["torch"])


def optimizer(**fields: Any) -> Edit:
    return lambda a, b: b["optimizers"][0].update(fields)


DAMAGE: dict[str, tuple[Edit, str]] = {
    "no generators": (lambda a, b: a.pop("rng"), "rng is NoneType, expected dict"),
    "a list of extras": (lambda a, b: a.update(extras=[]), "extras is list, expected dict"),
    "a step that is a bool": (lambda a, b: b.update(step=True), "step is bool, expected int"),
    "another step": (lambda a, b: b.update(step=6), "record of step 5.* state of step 6"),
    "an extra without a name": (lambda a, b: a["extras"].update({1: 2}), "a key that is no name"),
    "a tensor that is not there": (
        lambda a, b: a["extras"].update(x=boundary_codec.reference("extras/x")),
        "refers to 'extras/x'",
    ),
    "an extra that is the model's": (
        lambda a, b: a["extras"].update(x=boundary_codec.reference("model/weight")),
        "under extras/ refers to 'model/weight'",
    ),
    "an optimizer that is a list": (
        lambda a, b: b.update(optimizers=[[]]), "optimizer 0 is a list, expected a plain dict",
    ),
    "a tagged optimizer": (optimizer(**{boundary_codec.TAG: "deque"}), "expected a plain dict"),
    "a group without parameters": (optimizer(groups=[{"options": {}}]), "group: params is NoneT"),
    "a parameter without a name": (
        optimizer(groups=[{"params": [1], "options": {}}]), "parameters without a name",
    ),
    "another optimizer's moment": (
        optimizer(state={"w": {"m": boundary_codec.reference("extras/log/history")}}),
        "under optim/0/",
    ),
    "a state under no index": (optimizer(state={"@#1e3": {}}), "state under '@#1e3'"),
    "a state under a huge index": (optimizer(state={"@#" + "9" * 301: {}}), "state under '@#99"),
    "an attribute of the base class": (optimizer(attributes={"step": 1}), "attribute 'step'"),
    "the list of groups": (optimizer(attributes={"param_groups": []}), "attribute 'param_gr"),
    "an attribute that is no name": (optimizer(attributes={"a b": 1}), "attribute 'a b'"),
    "generators at step end": (lambda a, b: a["rng"].update(python={}), "generators' state"),
    "generators at the forward": (lambda a, b: b.update(rng={}), "generators' state"),
    "CUDA's generators": (lambda a, b: a["rng"].update(cuda=[1]), "CUDA's random generators"),
}  # fmt: skip


@pytest.mark.parametrize("case", DAMAGE)
def test_what_has_another_form_is_damage_that_names_the_snapshot(case: str) -> None:
    edit, message = DAMAGE[case]
    with pytest.raises(CorruptSnapshotError, match=f"^snapshot 5: .*{message}"):
        _read(candidate(edit))


@pytest.mark.parametrize("name", ["weight", "optim/x/m", "optim/01/m", "optim/1234567890/m"])
def test_a_tensor_under_a_name_that_capture_never_gives_is_damage(name: str) -> None:
    with pytest.raises(CorruptSnapshotError, match="the layout table names a tensor"):
        _read(candidate(names=(name,)))


def test_a_record_of_another_step_is_damage() -> None:
    with pytest.raises(CorruptSnapshotError, match="record of step 4, manifest of step 5"):
        _read(candidate(step=4))


def test_nothing_that_is_read_changes_the_live_generators() -> None:
    before = torch.get_rng_state()
    _read(candidate())
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("named", [[0, 2], [-1], [True], None, [1 << 40]])
def test_a_share_of_ranks_that_there_are_not_is_damage(named: Any) -> None:
    held = candidate(lambda a, b: b.update(share={"peers": named}))
    held.record.world = 2
    with pytest.raises(
        CorruptSnapshotError, match=r"snapshot 5: its share is one of ranks .* of 2"
    ):
        assembly.share_peers(held, context="snapshot 5")
