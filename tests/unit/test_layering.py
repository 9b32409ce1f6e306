"""A part of lightck imports from the floors below its own only, as docs/design.md has them.

Lazy imports, imports under TYPE_CHECKING and `import_module("...")` count like any other.
"""

from __future__ import annotations

import ast
import graphlib
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

_ROOT = Path(__file__).parents[2]
_FLOORS = {
    1: {"errors", "events", "keywords", "types"},
    2: {"policy", "device", "notices"},
    3: {"config"},
    4: {"region", "health"},
    5: {"state", "tracing", "optim", "history"},
    6: {"data"},
    7: {"reader", "pipeline"},
    8: {"journal"},
    9: {"loop"},
    10: {"distributed"},
    11: {"restore", "load", "failure"},
    12: {"inplace"},
    13: {"handle", "examine", "watch", "pmdk", "removal"},
    14: {"attach", "store"},
    15: {"integrations", "cli", "__init__"},
}
_FLOOR_OF = {room: floor for floor, rooms in _FLOORS.items() for room in rooms}
_STANDARD_LIBRARY = {"errors", "events", "keywords", "types", "policy", "config", "notices"}
"""Rooms that import nothing that has to be installed."""
_WITHOUT_TORCH = {*_STANDARD_LIBRARY, "region"}
# Faces use what users use; __init__ hands out names of these, the marks of instants, the sampler.
_FACES_USE = {
    *("attach", "store", "handle", "restore", "load", "examine", "pmdk", "watch", "removal"),
    *("config", "errors", "events", "policy", "types", "__init__"),
    "failure",
    "health",
    "history",
    "inplace",
}
_HANDED_OUT = {
    "lightck.optim",
    "lightck.state.extras",
    "lightck.data.prefetched",
    "lightck.data.sampler",
}
_TOLD_BY_FRAMEWORKS = {"lightck.distributed.sharding"}
"""Names by which integrations tell of a framework's own replicas."""
_CLOCKS = {"time", "datetime", "random", "secrets"}


@cache
def _modules() -> dict[str, Path]:
    found = {}
    for file in sorted((_ROOT / "lightck").rglob("*.py")):
        parts = file.relative_to(_ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


@cache
def _imports(module: str) -> set[tuple[str, int]]:
    """Everything a module of ours imports, as absolute names with line numbers."""
    file = _modules()[module]
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        for name in _named(node, package):
            found.add((name, getattr(node, "lineno", 0)))
    return found


def _named(node: ast.AST, package: str) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        up = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
        base = ".".join([*up, *([node.module] if node.module else [])])
        for alias in node.names:
            submodule = f"{base}.{alias.name}"
            yield submodule if submodule in _modules() else base
    elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
        called = ast.unparse(node.func).rpartition(".")[2]
        if called in ("import_module", "__import__", "find_spec"):
            yield str(node.args[0].value)


def _room(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def _in_rooms(rooms: set[str]) -> list[str]:
    return [module for module in _modules() if _room(module) in rooms]


def _allowed(importer: str, imported: str) -> bool:
    if importer == imported:
        return True
    if _FLOOR_OF[importer] == 15:
        return imported in _FACES_USE
    return _FLOOR_OF[imported] < _FLOOR_OF[importer]


def test_every_module_has_a_floor() -> None:
    assert {_room(module) for module in _modules()} <= _FLOOR_OF.keys()


def test_rooms_import_from_lower_floors_only() -> None:
    wrong = [
        f"{_modules()[module].relative_to(_ROOT)}:{line}: {_room(module)} imports {name}"
        for module in _modules()
        for name, line in _imports(module)
        if name.split(".")[0] == "lightck"
        and name != "lightck._native"
        and not (module == "lightck" and name in _HANDED_OUT)
        and not (_room(module) == "integrations" and name in _TOLD_BY_FRAMEWORKS)
        and not _allowed(_room(module), _room(name))
    ]
    assert not wrong, "\n".join(sorted(wrong))


def test_modules_import_each_other_without_cycles() -> None:
    graph = {
        module: {name for name, _ in _imports(module) if name in _modules() and name != module}
        for module in _modules()
    }
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError with the cycle


def test_one_module_loads_the_native_library() -> None:
    users = {m for m in _modules() if any(n == "lightck._native" for n, _ in _imports(m))}
    assert users <= {"lightck.region._ffi"}


def test_no_line_imports_torch_where_it_must_not_be_needed() -> None:
    wrong = [
        f"{module}:{line}: imports {name}"
        for module in _in_rooms(_WITHOUT_TORCH)
        for name, line in _imports(module)
        if name.split(".")[0] in ("torch", "torchvision")
    ]
    assert not wrong, "\n".join(wrong)


def test_rooms_that_need_nothing_installed_import_nothing_else() -> None:
    wrong = [
        f"{module}:{line}: imports {name}"
        for module in _in_rooms(_STANDARD_LIBRARY)
        for name, line in _imports(module)
        if name.split(".")[0] not in sys.stdlib_module_names | {"lightck"}
    ]
    assert not wrong, "\n".join(wrong)


def test_policies_read_no_clock_and_draw_no_numbers() -> None:
    wrong = [
        f"{module}:{line}: imports {name}"
        for module in _modules()
        if _room(module) == "policy"
        for name, line in _imports(module)
        if name.split(".")[0] in _CLOCKS
    ]
    assert not wrong, "\n".join(wrong)


def test_rooms_without_torch_can_be_imported_where_there_is_none() -> None:
    # A bare package stands in for lightck/__init__.py, which may well need torch.
    names = _in_rooms(_WITHOUT_TORCH)
    code = f"""
import importlib, sys, types
package = types.ModuleType("lightck")
package.__path__ = [{str(_ROOT / "lightck")!r}]
sys.modules["lightck"] = package
sys.modules["torch"] = None
for name in {names!r}:
    importlib.import_module(name)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_benchmarks_use_the_public_interface_only() -> None:
    public = {"lightck", "lightck.config", "lightck.errors", "lightck.policy", "lightck.types"}
    # Pure functions that plans and claims are played with.
    played = ("simulation", "failure_times", "failure_record", "formulas")
    public |= {f"lightck.policy.{name}" for name in played}
    # The cost of a collective, and the moments of a recovery, are seen from inside only.
    public |= {"lightck.inplace.runtime", "lightck.inplace.agent", "lightck.cli.run"}
    wrong = [
        f"{file.relative_to(_ROOT)}: {name}"
        for file in sorted((_ROOT / "bench").rglob("*.py"))
        for node in ast.walk(ast.parse(file.read_text()))
        for name in _named(node, "bench")
        if name.split(".")[0] == "lightck" and name not in public
    ]
    assert not wrong, "\n".join(wrong)


def test_of_health_the_training_of_a_model_alone_needs_what_has_to_be_installed() -> None:
    wrong = [
        f"{module}:{line}: imports {name}"
        for module in {*_in_rooms({"health"})} - {"lightck.health.drive_fit"}
        for name, line in _imports(module)
        if name.split(".")[0] not in sys.stdlib_module_names | {"lightck", "pynvml"}
    ]
    assert not wrong, "\n".join(wrong)
