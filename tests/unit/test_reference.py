"""The reference page shows every public name, and nothing that is not there."""

from __future__ import annotations

import ast
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import lightck

_PAGE = Path(__file__).parents[2] / "docs" / "reference.md"
_SHOWN = re.findall(r"^::: (\S+)$", _PAGE.read_text(), re.M)


def _found(dotted: str) -> Any:
    """Return the object, or the module, of a name as mkdocstrings takes it."""
    module, _, name = dotted.rpartition(".")
    if dotted == "lightck.errors":
        return import_module(dotted)
    try:
        return getattr(import_module(module), name)
    except ImportError as error:  # a framework that is not in this environment
        assert module in str(error), error
        file = _PAGE.parents[1].joinpath(*module.split(".")).with_suffix(".py")
        return next(e for e in ast.parse(file.read_text()).body if getattr(e, "name", "") == name)


@pytest.mark.parametrize("dotted", _SHOWN)
def test_what_the_page_shows_is_there_and_has_a_docstring(dotted: str) -> None:
    found = _found(dotted)
    assert ast.get_docstring(found) if isinstance(found, ast.AST) else found.__doc__


def test_every_public_name_is_on_the_page() -> None:
    shown = [_found(each) for each in _SHOWN]
    errors = vars(import_module("lightck.errors")).values()
    optimizers = [getattr(lightck.optim, name) for name in lightck.optim.__all__]
    for name in lightck.__all__:
        value = getattr(lightck, name)
        if name == "optim":
            assert all(each in shown for each in optimizers)
        else:
            assert value in shown or value in errors, name


def test_no_name_is_shown_twice() -> None:
    assert sorted(_SHOWN) == sorted(set(_SHOWN))
