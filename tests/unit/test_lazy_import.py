"""`import lightck` and commands that need no torch start without it; all names are there still."""

from __future__ import annotations

import ast
import inspect
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

import lightck

_HEAVY = ("torch", "numpy", "pyarrow")


def _run(code: str, *words: str, **variables: str) -> str:
    """Return what a fresh interpreter prints."""
    done = subprocess.run(
        [sys.executable, "-c", code, *words],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **variables},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


_LOADED = f"print([name for name in {_HEAVY!r} if name in sys.modules])"


def test_import_takes_nothing_beyond_the_standard_library() -> None:
    assert _run(f"import sys, lightck, lightck.errors, lightck.policy; {_LOADED}") == "[]\n"


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["nonsense"], []])
def test_help_version_and_wrong_usage_of_the_command_start_without_torch(words: list[str]) -> None:
    code = f"import sys; from lightck.cli.main import main; main(sys.argv[1:]); {_LOADED}"
    out = _run(code, *words)
    assert out.endswith("[]\n")
    if words == ["--help"]:
        assert "list snapshots, newest first" in out and "lightck ls /dev/shm/run" in out
    if words == ["--version"]:
        assert out.startswith(f"lightck {lightck.__version__}\n")


@pytest.mark.parametrize("words", [["top", "--once"], ["top", "--help"], ["timeline", "--help"]])
def test_a_command_that_needs_no_torch_does_not_import_it(words: list[str], tmp_path: Path) -> None:
    code = (
        "import sys; from lightck.cli.main import main; main(sys.argv[1:]);"
        " print('torch' in sys.modules)"
    )
    assert _run(code, *words, LIGHTCK_PATH=str(tmp_path / "run")).endswith("False\n")


def test_no_name_imports_pyarrow_and_attaching_does_not_leave_it_to_a_failure(
    region_dir: Path,
) -> None:
    code = (
        "import sys, torch, lightck\n"
        "for name in lightck.__all__: getattr(lightck, name)\n"
        "print('pyarrow' in sys.modules)\n"
        "model = torch.nn.Linear(2, 2)\n"
        "optimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
        "with lightck.attach(model, optimizer, path=sys.argv[1]):\n"
        "    print('pyarrow' in sys.modules)\n"
    )
    assert _run(code, str(region_dir / "run")) == "False\nTrue\n"


def test_every_public_name_is_listed_typed_and_there() -> None:
    assert set(lightck.__all__) <= set(dir(lightck)) and "__version__" in dir(lightck)
    assert all(getattr(lightck, name) is not None for name in lightck.__all__)
    # What type checkers read says the same as what is imported late.
    tree = ast.parse(Path(inspect.getfile(lightck)).read_text())
    (block,) = [
        node
        for node in tree.body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    typed = {
        alias.name: node.module
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert typed == lightck._LATE
    with pytest.raises(AttributeError, match="'lightck' has no attribute 'atach'"):
        lightck.atach  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.parametrize(
    "first",
    [
        "import lightck.restore, lightck.load",
        "from lightck.load import snapshots; from lightck.restore import progress",
        "lightck.attach",
        "lightck.load; lightck.restore",
        "from lightck import *",
    ],
)
def test_restore_and_load_are_functions_whoever_imports_their_modules(first: str) -> None:
    code = f"import lightck\n{first}\nprint(type(lightck.restore), type(lightck.load))"
    assert _run(code) == "<class 'function'> <class 'function'>\n"


@pytest.mark.parametrize("first", ["lightck.attach", "import lightck.restore", "lightck.restore"])
def test_under_chaos_restore_is_disturbed_whichever_name_comes_first(
    first: str, tmp_path: Path
) -> None:
    code = f"import lightck\n{first}\nprint(lightck.restore.__wrapped__.__module__)"
    assert _run(code, LIGHTCK_CHAOS=str(tmp_path)) == "lightck.restore\n"


def test_a_spawned_child_that_knows_lightck_starts_without_torch(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(
        "import multiprocessing, sys\n"
        "import lightck\n"
        "def child(config):\n"
        "    print(config.slots, 'torch' in sys.modules)\n"
        "if __name__ == '__main__':\n"
        "    work = multiprocessing.get_context('spawn').Process(\n"
        "        target=child, args=(lightck.Config(slots=3),))\n"
        "    work.start(); work.join(); sys.exit(work.exitcode)\n"
    )
    assert (
        _run("import runpy, sys; runpy.run_path(sys.argv[1], run_name='__main__')", str(script))
        == "3 False\n"
    )


def test_the_package_is_pickled_by_its_name_as_ray_s_functions_that_use_it_are() -> None:
    assert pickle.loads(pickle.dumps(lightck)) is lightck
    out = _run("import pickle, lightck; print(len(pickle.dumps(lightck)) < 100)")
    assert out == "True\n"
