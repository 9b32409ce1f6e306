"""Workflows that no machine here runs: what they name is there, and they may do little."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

_ROOT = Path(__file__).resolve().parents[2]
_FILES = sorted((_ROOT / ".github" / "workflows").glob("*.yml"))


@pytest.mark.parametrize("file", _FILES, ids=lambda file: file.name)
def test_a_workflow_reads_only_and_names_what_is_there(file: Path) -> None:
    yaml = pytest.importorskip("yaml")
    workflow = yaml.safe_load(file.read_text())
    assert workflow["permissions"] == {"contents": "read"}
    targets = set(re.findall(r"^([a-z-]+):", (_ROOT / "Makefile").read_text(), re.M))
    for job in workflow["jobs"].values():
        assert job["timeout-minutes"] and "permissions" not in job
        for step in job["steps"]:
            assert re.fullmatch(r"actions/[a-z-]+@v\d+", step.get("uses", "actions/checkout@v6"))
            if step.get("uses", "").startswith("actions/checkout@"):
                assert step["with"]["persist-credentials"] is False
            for words in re.findall(r"^make ([^\n]+)", step.get("run", ""), re.M):
                assert {word for word in words.split() if "=" not in word} <= targets


def test_there_is_a_workflow_for_each_purpose() -> None:
    assert {file.stem for file in _FILES} == {"tests", "wheels", "docs", "weekly"}
