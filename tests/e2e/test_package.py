"""The package as pip meets it: sdist, wheel, no compiler, another system, extras."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

_ROOT = Path(__file__).resolve().parents[2]
_HOOK = "import sys, sysconfig\nfrom setuptools import build_meta as hooks\n"
_OURS = {"test", "lint", "bench", "docs"}
_FRAMEWORKS = {
    "lightning",
    "transformers",
    "accelerate",
    "deepspeed",
    "torchtitan",
    "torchft",
    "ray",
}
"""The extras of those who have the framework: `all` brings none, for they exclude each other."""
"""Extras for work on lightck itself."""


def _run(*words: str | Path, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run this Python elsewhere, with nothing of the checkout on its path."""
    surroundings = {
        k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "LIGHTCK_NATIVE")
    }
    return subprocess.run(
        [sys.executable, *words],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=cwd,
        env={**surroundings, **variables},
    )


@pytest.fixture
def sdist(tmp_path: Path) -> Path:
    """An sdist, made of a copy: setuptools writes beside what it reads."""
    tree = tmp_path / "tree"
    ignored = shutil.ignore_patterns("__pycache__", "*.so")
    for folder in ("lightck", "native", "configs"):
        shutil.copytree(_ROOT / folder, tree / folder, ignore=ignored)
    for name in ("pyproject.toml", "setup.py", "setup.cfg", "README.md", "LICENSE"):
        shutil.copy(_ROOT / name, tree)
    made = _run("-c", _HOOK + "hooks.build_sdist(sys.argv[1])", tmp_path, cwd=tree)
    assert made.returncode == 0, made.stderr
    (found,) = tmp_path.glob("lightck-*.tar.gz")
    return found


def _pip_wheel(sdist: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    offline = ("--no-build-isolation", "--no-deps", "--no-index", "--no-cache-dir")
    words = ("-m", "pip", "wheel", *offline, "-w", sdist.parent, sdist)
    return _run(*words, cwd=sdist.parent, **variables)


def _built_in() -> set[str]:
    """Name the files of the checkout that a wheel is made of, as an sdist has them."""
    found = {"pyproject.toml", "setup.py", "README.md", "LICENSE", "lightck/py.typed"}
    for pattern in ("lightck/**/*.py", "configs/*.toml", "native/src/*.[ch]", "native/include/*.h"):
        found |= {str(file.relative_to(_ROOT)) for file in _ROOT.glob(pattern)}
    return found


def test_an_sdist_has_all_that_a_wheel_is_made_of(sdist: Path) -> None:
    with tarfile.open(sdist) as packed:
        inside = {name.partition("/")[2] for name in packed.getnames()}
    assert not _built_in() - inside


def test_a_wheel_of_an_sdist_has_all_and_its_library_loads(sdist: Path) -> None:
    made = _pip_wheel(sdist)
    assert made.returncode == 0, made.stdout + made.stderr
    (wheel,) = sdist.parent.glob("lightck-*-cp311-abi3-linux_*.whl")
    unpacked = sdist.parent / "unpacked"
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(unpacked)
    wanted = {name.replace("configs/", "lightck/configs/") for name in _built_in()}
    wanted = {name for name in wanted if name.startswith("lightck/")} | {"lightck/_native.abi3.so"}
    files = (file for file in (unpacked / "lightck").rglob("*") if file.is_file())
    assert {str(file.relative_to(unpacked)) for file in files} == wanted
    code = "import lightck.region._ffi as it; it.library(); print(it.library_path())"
    loaded = _run("-P", "-c", code, cwd=sdist.parent, PYTHONPATH=str(unpacked))
    assert loaded.stdout.strip() == str(unpacked / "lightck" / "_native.abi3.so"), loaded.stderr


def test_without_a_compiler_pip_says_what_to_install(sdist: Path, tmp_path: Path) -> None:
    made = _pip_wheel(sdist, PATH=str(tmp_path))
    told = made.stdout + made.stderr
    assert made.returncode == 1 and "Traceback" not in told
    assert re.search(r"there is no \S+ to compile it: install gcc, set CC, or take a wheel", told)


@pytest.mark.parametrize("hook", ["get_requires_for_build_wheel()", "build_wheel('.')"])
def test_another_system_is_refused_in_a_sentence(hook: str) -> None:
    # What Python knows of this system is read before it takes itself to be on another.
    code = f"{_HOOK}sysconfig.get_config_vars()\nsys.platform = 'darwin'\nhooks.{hook}"
    done = _run("-c", code, cwd=_ROOT)
    assert done.returncode == 1
    assert done.stderr == "lightck needs Linux, whose mappings its regions use; this is darwin.\n"


def test_extras_that_messages_name_are_there_and_all_has_those_for_users() -> None:
    project = tomllib.loads((_ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    files = [_ROOT / "README.md"]
    files += [*(_ROOT / "lightck").rglob("*.py"), *(_ROOT / "docs").rglob("*.md")]
    named = set(re.findall(r"lightck\[([a-z]+)\]'", "".join(map(Path.read_text, files))))
    assert named and named <= extras.keys()
    users = extras.keys() - _OURS - _FRAMEWORKS - {"all"}
    assert extras["all"] == [f"lightck[{','.join(sorted(users))}]"]
