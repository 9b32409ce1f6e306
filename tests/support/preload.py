"""Import once, before a fork, what every child would import: seconds for each of thousands."""

from __future__ import annotations

import gc
import importlib
import pkgutil
from functools import cache

_NO_MODULES = {"lightck._native", "lightck.cli.__main__"}
"""The native library, which is loaded by its path, and the command."""
_FRAMEWORKS = "lightck.integrations."
"""Modules below this need a framework each, which few tests do."""


@cache
def everything() -> None:
    """Import all of lightck, and what torch imports with the first optimizer."""
    gc.disable()  # collections take a quarter of torch's import
    importlib.import_module("torch._dynamo")
    package = importlib.import_module("lightck")
    for module in pkgutil.walk_packages(package.__path__, "lightck."):
        if module.name not in _NO_MODULES and not module.name.startswith(_FRAMEWORKS):
            importlib.import_module(module.name)
    gc.collect()
    gc.freeze()  # a collection in a child would copy every page that an object is on
    gc.enable()
