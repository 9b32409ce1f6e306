"""docs/proof.md says of the stored runs what they showed, and they showed what must be."""

from __future__ import annotations

import json
from typing import Any

import pytest

from support import proof_table


@pytest.fixture(scope="module")
def stored() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(proof_table.STORED.read_text())
    return found


def test_the_document_is_rendered_from_the_stored_runs(stored: dict[str, Any]) -> None:
    document = proof_table.DOCUMENT.read_text()
    assert proof_table.replaced(document, proof_table.render(stored)) == document, (
        "run `python -m tests.support.proof_table`"
    )


def test_the_stored_runs_show_no_loss(stored: dict[str, Any]) -> None:
    for subject, least in (("crash", 100_000), ("crash-soak", 1_000_000)):
        proof = stored[subject]
        cells = [cell for found in proof["media"].values() for cell in found["steps"].values()]
        assert sum(cell["images"] for cell in cells) == proof["images"] >= least
        assert sum(cell["bad"] + cell["bad_unsummed"] for cell in cells) == 0
        assert len(proof["mutants"]) >= 19 and all(each["caught"] for each in proof["mutants"])
    for seen in stored["order"]["kernels"].values():
        assert seen["undecoded"] == seen["bad"] == seen["bad_unsummed"] == 0
        assert seen["same_order_as_shim"]
    assert all(each["found_out"] for each in stored["order"]["mutants"])
    assert stored["python_images"]["bad"] == stored["flips"]["silently_wrong"] == 0
    assert stored["kill"]["losses"] == stored["kill-native"]["losses"] == 0
    assert stored["fuzz"]["crashes"] == stored["fuzz-native"]["crashes"] == 0
    assert stored["guest"]["jobs"] and all(job["passed"] for job in stored["guest"]["jobs"])
    assert stored["guest"]["snapshots_bad"] == 0


def test_a_document_without_its_markers_is_an_error() -> None:
    with pytest.raises(ValueError, match="put the markers back"):
        proof_table.replaced("nothing", {"proof": "text"})
