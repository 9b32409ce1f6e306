"""Every code name that docs/glossary.md gives for a term exists, in lightck/ or in native/.

Names of Python are looked up in the syntax trees, so that a word in a docstring is none; names of C
in the headers and sources without their comments.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]
_ROW = re.compile(r"^\| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", re.M)
_COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.S)


def _rows() -> list[tuple[str, str, list[str]]]:
    """Term, sentence and code names of each row of the glossary."""
    text = (_ROOT / "docs" / "glossary.md").read_text()
    rows = [
        (term, said, re.findall(r"`([^`]+)`", names)) for term, said, names in _ROW.findall(text)
    ]
    return [row for row in rows if row[0] != "term"]


def _defined(statement: ast.stmt) -> Iterator[str]:
    """Return the names that a statement of a module or class body defines."""
    if isinstance(statement, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        yield statement.name
    elif isinstance(statement, ast.Assign | ast.AnnAssign):
        yield from (part.id for part in _assigned(statement) if isinstance(part, ast.Name))


def _assigned(node: ast.Assign | ast.AnnAssign) -> Iterator[ast.expr]:
    for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
        yield from target.elts if isinstance(target, ast.Tuple) else [target]


def _members(made: ast.ClassDef) -> Iterator[str]:
    """Return the names of methods, fields, and attributes that methods assign to `self`."""
    for statement in made.body:
        yield from _defined(statement)
    for node in ast.walk(made):
        if isinstance(node, ast.Assign | ast.AnnAssign):
            for part in _assigned(node):
                if isinstance(part, ast.Attribute) and ast.unparse(part.value) == "self":
                    yield part.attr


@cache
def _python_names() -> frozenset[str]:
    """Classes, functions and constants of modules; members of classes as `Class.member`."""
    found: set[str] = set()
    for file in (_ROOT / "lightck").rglob("*.py"):
        tree = ast.parse(file.read_text())
        for statement in tree.body:
            found.update(_defined(statement))
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                found.update(f"{node.name}.{member}" for member in _members(node))
    return frozenset(found)


@cache
def _c_names() -> frozenset[str]:
    """Identifiers of the native headers and sources, comments left out."""
    found: set[str] = set()
    for folder in ("include", "src"):
        for file in (_ROOT / "native" / folder).glob("*.[ch]"):
            found.update(re.findall(r"[A-Za-z_]\w+", _COMMENT.sub(" ", file.read_text())))
    return frozenset(found)


def _exists(name: str) -> bool:
    if name.startswith(("lck_", "LCK_")) or name.endswith("_disk"):
        return name in _c_names()
    return name in _python_names()


@pytest.mark.parametrize(
    "name", [pytest.param(n, id=f"{term}: {n}") for term, _, names in _rows() for n in names]
)
def test_a_code_name_of_the_glossary_exists(name: str) -> None:
    assert _exists(name), f"docs/glossary.md names {name}, which is not in lightck/ or native/"


@pytest.mark.parametrize(
    "name",
    [
        "RegionOfNothing",
        "Region.protectde",
        "Slot.fence",
        "lck_regoin",
        "LCK_GRAN_SECTOR",
        "run_disk",
    ],
)
def test_a_made_up_code_name_is_found_out(name: str) -> None:
    assert not _exists(name)


def test_every_term_has_a_sentence_and_a_code_name() -> None:
    rows = _rows()
    assert len(rows) >= 40
    assert not [term for term, said, names in rows if not names or not said.endswith(".")]


def test_no_term_is_explained_twice() -> None:
    terms = [term for term, _, _ in _rows()]
    assert sorted(terms) == sorted(set(terms))
