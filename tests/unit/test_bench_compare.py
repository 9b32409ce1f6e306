"""Micro-benchmarks of two commits: in turn, fairly built, and nothing is left of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench import cli, compare, place
from bench.errors import BenchError

pytest.importorskip("pytest_benchmark", reason="SKIPPED: no pytest-benchmark, '.[bench]'")

pytestmark = pytest.mark.timeout(600)  # each starts a compiler twice, and pytest in both trees

_PROJECT = """\
[[tool.setuptools.ext-modules]]
name = "x"
sources = ["native.c"]
include-dirs = ["."]
extra-compile-args = ["-O2"]
extra-link-args = []
"""
_NATIVE = "unsigned lck_abi_version(void) {{ return {abi}; }}\n"
_MICRO = """\
import os, pathlib
def test_{name}(benchmark):
    with open({log!r}, "a") as log:
        print(pathlib.Path.cwd().name, os.getpid(), os.environ["LIGHTCK_NATIVE"], file=log)
    {then}
    benchmark.pedantic(lambda: None, rounds=3)
"""


class _Repository:
    """A checkout with one native file and one micro-benchmark, and what compare needs of it."""

    def __init__(self, folder: Path) -> None:
        self.root, self.log, self.scratch = folder / "tree", folder / "log", folder / "scratch"
        self.commit("first")

    def write(self, name: str = "one", abi: int = 8, then: str = "pass") -> None:
        micro = self.root / "bench" / "micro"
        micro.mkdir(parents=True, exist_ok=True)
        for old in micro.iterdir():
            old.unlink()
        text = _MICRO.format(name=name, log=str(self.log), then=then)
        (micro / "test_micro.py").write_text(text)
        (self.root / "native.c").write_text(_NATIVE.format(abi=abi))
        (self.root / "pyproject.toml").write_text(_PROJECT)
        (self.root / "setup.cfg").write_text("[tool:pytest]\nfilterwarnings = error\n")

    def commit(self, tag: str, **what: object) -> None:
        self.write(**what)  # type: ignore[arg-type]
        self.git("init", "-q")
        self.git("add", ".")
        who = ["-c", "user.name=x", "-c", "user.email=x@example.org"]
        self.git(*who, "commit", "-q", "--allow-empty", "-m", tag)
        self.git("tag", tag)

    def git(self, *arguments: str) -> str:
        command = ["git", "-C", str(self.root), *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    def runs(self) -> list[str]:
        """Return in which tree each run was, in order."""
        return [line.split()[0] for line in self.log.read_text().splitlines()]

    def check_nothing_is_left(self) -> None:
        assert list(self.scratch.iterdir()) == []
        assert len(self.git("worktree", "list").splitlines()) == 1
        assert self.git("status", "--porcelain", "--untracked-files=no") == ""


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> _Repository:
    # pytest-benchmark measures nothing where it takes itself for a worker of `make test`.
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    made = _Repository(tmp_path)
    monkeypatch.setattr(compare, "ROOT", made.root)
    monkeypatch.setitem(place.MEDIA, "file", made.scratch)
    return made


def test_both_trees_run_in_turn_each_with_its_own_library(
    repository: _Repository, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["compare", "first", "--rounds", "2"]) == 0
    shown = capsys.readouterr().out
    (row,) = [line for line in shown.splitlines() if line.startswith("test_one ")]
    assert "us" in row and "[" in row
    assert repository.runs() == ["base", "tree", "tree", "base"], "who is first changes"
    lines = [line.split() for line in repository.log.read_text().splitlines()]
    assert {(tree, Path(library).name) for tree, _, library in lines} == {
        ("base", "base.so"),
        ("tree", "this.so"),
    }
    repository.check_nothing_is_left()


def test_benchmarks_of_this_tree_measure_both_where_the_native_abi_is_the_same(
    repository: _Repository,
) -> None:
    repository.commit("second", name="two")
    shown = compare.compare("first", 1, "", lambda text: None)
    assert "\ntest_two " in shown and "test_one" not in shown


def test_another_native_abi_is_measured_by_its_own_benchmarks_and_that_is_told(
    repository: _Repository,
) -> None:
    repository.commit("second", name="two", abi=9)
    shown = compare.compare("first", 1, "", lambda text: None)
    assert "native ABI 8 there, 9 here: each tree is measured by its own" in shown
    assert "only this tree: test_two" in shown and "only first (" in shown
    repository.check_nothing_is_left()


def test_what_fails_in_one_tree_is_told_and_the_rest_is_compared(repository: _Repository) -> None:
    fails = "assert pathlib.Path.cwd().name != 'base', 'no such call there'"
    repository.write(then=fails)
    shown = compare.compare("first", 1, "", lambda text: None)
    assert "test_micro.py failed in first (" in shown and "no such call there" in shown
    assert "only this tree: test_one" in shown


def test_benchmarks_can_be_chosen(repository: _Repository) -> None:
    with pytest.raises(BenchError, match="-k 'nothing': no benchmark in bench/micro of this name"):
        compare.compare("first", 1, "nothing", lambda text: None)
    assert not repository.log.exists()
    assert "\ntest_one " in compare.compare("first", 1, "one", lambda text: None)


def test_a_commit_that_is_none_is_told(
    repository: _Repository, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["compare", "nowhere"]) == 2
    assert "nowhere: no commit to compare with" in capsys.readouterr().err
    assert cli.main(["compare", "first", "--rounds", "0"]) == 2
    assert "--rounds 0: must be 1 or more" in capsys.readouterr().err


def test_what_the_compiler_said_is_told(repository: _Repository) -> None:
    (repository.root / "native.c").write_text("int f(void) { return nonsense; }\n")
    with pytest.raises(BenchError, match=r"(?s)gcc failed:.*nonsense"):
        compare.compare("first", 1, "", lambda text: None)
    assert list(repository.scratch.iterdir()) == []
    (repository.root / "pyproject.toml").write_text("")
    with pytest.raises(BenchError, match="no native library to build"):
        compare.compare("first", 1, "", lambda text: None)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_nothing_is_left_of_a_comparison_that_was_interrupted(
    repository: _Repository, number: signal.Signals
) -> None:
    repository.write(then="import time; time.sleep(600)")
    code = (
        "import sys; from pathlib import Path; from bench import cli, compare, place;"
        f"compare.ROOT = Path({str(repository.root)!r});"
        f"place.MEDIA['file'] = Path({str(repository.scratch)!r});"
        "sys.exit(cli.main(['compare', 'first']))"
    )
    run = subprocess.Popen(
        [sys.executable, "-c", code], cwd=place.ROOT, env={**os.environ, "PYTHONPATH": "."}
    )
    deadline = time.monotonic() + 300
    while not repository.log.exists() or not repository.log.read_text().endswith("\n"):
        assert time.monotonic() < deadline and run.poll() is None, "no benchmark began"
        time.sleep(0.01)
    child = int(repository.log.read_text().split()[1])
    run.send_signal(number)
    assert run.wait(300) == 130
    assert not Path("/proc", str(child)).exists()
    assert list(repository.scratch.iterdir()) == []
    assert len(repository.git("worktree", "list").splitlines()) == 1


def _tree(name: str, **seconds: list[float]) -> compare.Tree:
    return compare.Tree(name, Path(), Path(), seconds)


def test_a_difference_is_one_if_every_round_has_it() -> None:
    there = _tree("base", a=3 * [1.0], b=3 * [1.0], c=3 * [1.0], d=2 * [1.0], gone=[1.0])
    here = _tree("this tree", a=[1.2, 1.1, 1.15], b=[1.2, 1.0, 1.2], c=[0.5, 0.7, 0.6])
    here.seconds |= {"d": [1.5, 1.5], "new": [1.0]}
    lines = compare.table(there, here, ["a note"]).splitlines()
    rows = {line.split()[0]: line for line in lines[1:5]}
    assert rows["a"].endswith("slower") and rows["c"].endswith("faster")
    assert rows["b"].endswith("[1.00, 1.20]")
    assert rows["d"].endswith("[1.50, 1.50]"), "two rounds agree by chance"
    assert " 1.15 " in rows["a"] and " 0.600 " in rows["c"]
    assert lines[5:7] == ["only base: gone", "only this tree: new"]
    assert lines[7].startswith("ratio: this tree / base, ") and lines[8:] == ["a note"]
