"""The C header, the library's exported symbols and the cffi declarations say the same.

A difference between them would not be an error but a crash, or worse.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import cffi
import pytest

from bench import library as bench_library
from lightck.region import _ffi, medium, native_pool, native_region, native_update
from lightck.region.native_pool import COPY_DTYPE, SPAN_DTYPE

_ROOT = Path(__file__).parents[2]
_HEADER = _ROOT / "native/include/lightck.h"


def _library() -> str:
    spec = importlib.util.find_spec("lightck._native")
    assert spec is not None, "lightck._native is not built: run `make venv`"
    assert spec.origin is not None
    return spec.origin


def _tool() -> Any:
    spec = importlib.util.spec_from_file_location("declarations", _ROOT / "tools/declarations.py")
    assert spec is not None and spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    return tool


@cache
def _declarations() -> str:
    """The header as cffi reads it."""
    text: str = _tool().declarations()
    return text


@cache
def _parsed(text: str) -> tuple[Any, Any]:
    ffi = cffi.FFI()
    ffi.cdef(text)
    return ffi, ffi.dlopen(_library())


def _functions(text: str) -> dict[str, str]:
    """Name to type, with `struct x` and its typedef `x` made one."""
    ffi, library = _parsed(text)
    names = re.findall(r"\b(lck_\w+)\s*\(", text)
    return {n: ffi.typeof(getattr(library, n)).cname.replace("struct ", "") for n in names}


def _structs(text: str) -> dict[str, Any]:
    """Name to size and fields (name, type, offset); None for an opaque one."""
    ffi, _ = _parsed(text)
    found = {}
    for name in ffi.list_types()[0]:
        kind = ffi.typeof(name)
        if kind.kind != "struct":
            continue
        if kind.fields is None:
            found[name] = None
        else:
            fields = [(n, f.type.cname.replace("struct ", ""), f.offset) for n, f in kind.fields]
            found[name] = (ffi.sizeof(kind), fields)
    return found


def _constants() -> dict[str, int]:
    text = _declarations()
    _, library = _parsed(text)
    names = re.findall(r"^\s*(?:#define )?(LCK_\w+)(?: =| \d)", text, re.M)
    names += [
        n for line in re.findall(r"enum \{(.*?)\}", text) for n in re.findall(r"LCK_\w+", line)
    ]
    return {name: int(getattr(library, name)) for name in names}


def test_library_exports_exactly_the_header() -> None:
    listing = subprocess.run(
        ["nm", "-D", "--defined-only", _library()], capture_output=True, text=True, check=True
    )
    exported = {line.split()[-1] for line in listing.stdout.splitlines()}
    assert exported == set(_functions(_declarations()))


def test_declarations_are_made_of_the_header(tmp_path: Path) -> None:
    tool = _tool()
    tool.write(tmp_path / "made.py")
    of_cffi = re.compile("_version = 0x[0-9A-F]+")
    made, there = (of_cffi.sub("", p.read_text()) for p in (tmp_path / "made.py", tool.MADE))
    assert made == there, "the header has changed: run python tools/declarations.py"


def test_benchmarks_declare_a_part_of_the_header() -> None:
    package = _functions(_declarations()) | _structs(_declarations())
    ours = _functions(bench_library.CDEF) | _structs(bench_library.CDEF)
    assert len(ours) > 20
    assert {name: package.get(name) for name in ours} == ours
    assert bench_library.ABI == _ffi.ABI


def test_python_constants_equal_the_headers() -> None:
    constants = _constants()
    assert constants["LCK_E_STATE"] == -14  # the header was really read
    mirrored = {
        f"LCK_{n}": v
        for n, v in (vars(native_region) | vars(native_pool) | vars(native_update)).items()
        if f"LCK_{n}" in constants
    }
    assert mirrored == {name: constants[name] for name in mirrored}
    assert len(mirrored) >= 10
    assert constants["LCK_ABI"] == _ffi.ABI
    assert constants["LCK_LINE"] == native_region.LINE_BYTES
    for code, name in medium.MEDIA.items():
        assert constants[f"LCK_{name.upper()}"] == code


@pytest.mark.parametrize(
    ("struct", "dtype"),
    [
        ("lck_copy", COPY_DTYPE),
        ("lck_read", native_region.READ_DTYPE),
        ("lck_span", SPAN_DTYPE),
        ("lck_update_rule", native_update.RULE_DTYPE),
        ("lck_update_task", native_update.TASK_DTYPE),
    ],
)
def test_arrays_passed_to_c_are_laid_out_as_its_structs(struct: str, dtype: Any) -> None:
    size, fields = _structs(_declarations())[struct]
    assert dtype.itemsize == size
    offsets = {name: offset for name, _, offset in fields}
    assert {name: dtype.fields[name][1] for name in dtype.names} == offsets


@pytest.mark.parametrize(
    ("key", "patterns"),
    [
        ("sources", ["native/src/*.c"]),
        ("depends", ["native/src/*.h", "native/include/*.h"]),
    ],
)
def test_pyproject_lists_every_native_file(key: str, patterns: list[str]) -> None:
    project = tomllib.loads((_ROOT / "pyproject.toml").read_text())
    (module,) = project["tool"]["setuptools"]["ext-modules"]
    files = sorted(str(f.relative_to(_ROOT)) for p in patterns for f in _ROOT.glob(p))
    assert sorted(module[key]) == files


def test_pyproject_lists_every_package() -> None:
    project = tomllib.loads((_ROOT / "pyproject.toml").read_text())
    inits = (_ROOT / "lightck").rglob("__init__.py")
    packages = {".".join(init.parent.relative_to(_ROOT).parts) for init in inits}
    assert set(project["tool"]["setuptools"]["packages"]) == packages | {"lightck.configs"}
