"""The users' guide: its size, its words, and that the messages it explains are the code's."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]
_GUIDE = sorted((_ROOT / "docs" / "guide").glob("*.md"))
_TROUBLES = [page for page in _GUIDE if page.stem.startswith("troubleshooting")]
_PLACE = "\0"
"""Stands in a message for a value."""


@cache
def _texts() -> tuple[str, ...]:
    """Every string in lightck's code, with a mark for each value in it."""
    found = []
    for file in (_ROOT / "lightck").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
            elif isinstance(node, ast.JoinedStr):
                parts = (p.value if isinstance(p, ast.Constant) else _PLACE for p in node.values)
                found.append("".join(map(str, parts)))
    return tuple(found)


def _quoted() -> list[str]:
    """Return what stands in code in the first column of the tables, but for commands."""
    lines = [line for page in _TROUBLES for line in page.read_text().splitlines()]
    rows = [line for line in lines if line.startswith("| ")]
    cells = [row.split(" | ")[0] for row in rows]
    found = [text for cell in cells for text in re.findall(r"`([^`]+)`", cell)]
    return [text for text in found if not text.startswith("lightck ") or "..." in text]


@pytest.mark.parametrize("message", _quoted())
def test_a_message_that_is_explained_is_one_of_the_code_s(message: str) -> None:
    if re.fullmatch("[a-z_]+", message):
        assert message in _texts(), "no such event"
        return
    parts = [part.strip() for part in re.split(r"\.{3,}", message) if len(part.strip()) > 3]
    assert parts and any(all(part in text for part in parts) for text in _texts())


@pytest.mark.parametrize("page", _GUIDE, ids=lambda page: page.stem)
def test_pages_are_short_and_so_are_their_lines(page: Path) -> None:
    lines = page.read_text().splitlines()
    assert 50 <= len(lines) <= 150
    assert not [line for line in lines if len(line) > 120 and not line.startswith("|")]


@pytest.mark.parametrize("page", [*_GUIDE, _ROOT / "README.md"], ids=lambda page: page.stem)
def test_instants_have_names_and_no_letters(page: Path) -> None:
    assert not re.search(r"\([ab]\)", page.read_text())
