"""Every block of code in README and in the guide is run, or says why it is not."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.documents.blocks import PAGES, PYTHON, ROOT, SHELL, SHOWN, below, blocks
from support.documents.setup import DIGESTS

README = ROOT / "README.md"
FRAMEWORKS = ROOT / "docs" / "guide" / "frameworks.md"
NOT_RUN = {
    "README": 1,
    "cli": 2,
    "frameworks-clusters": 4,
    "health": 1,
    "migration": 1,
    "quickstart": 1,
}
"""The number of blocks of a page that say why they are not run."""

_FRAMEWORKS = {
    "accelerate": "accelerate",
    "lightning": "lightning",
    "transformers": "transformers.trainer",
}
"""Modules that the server imports, once, for pages that import a framework."""

_COMMANDS = {
    "python": 'exec {python} "$@"',
    # Depends on no time: `timeout -s KILL SECONDS COMMAND` kills behind the hundredth line.
    "timeout": """
        shift 3
        exec 3< <(exec "$@")
        running=$!
        for line in {{1..100}}; do read -r <&3; done
        kill -KILL $running """,
}
"""Scripts that a shell finds before all else."""

Run = Callable[..., tuple[int, str]]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[subprocess.Popen[str]]:
    """A process that runs pages in forked children."""
    commands = tmp_path_factory.mktemp("bin")
    for name, text in _COMMANDS.items():
        file = commands / name
        file.write_text(f"#!/bin/bash\n{text.format(python=sys.executable)}\n")
        file.chmod(0o700)
    kept = {k: v for k, v in os.environ.items() if not k.startswith("LIGHTCK_")}
    if "LIGHTCK_NATIVE" in os.environ:
        kept["LIGHTCK_NATIVE"] = os.environ["LIGHTCK_NATIVE"]
    kept |= {"PATH": f"{commands}:{kept['PATH']}", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        [sys.executable, "-m", "support.documents.page_server"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=kept,
    ) as running:
        yield running
        assert running.stdin is not None
        running.stdin.close()


@pytest.fixture
def run(server: subprocess.Popen[str], region_dir: Path) -> Run:
    """Run a page, or one of its blocks, in a folder; return the wait status and the log."""

    def run(page: Path, folder: str = "here", **fields: Any) -> tuple[int, str]:
        (region_dir / folder).mkdir(exist_ok=True)
        log = region_dir / "log"
        places = {"page": str(page), "folder": str(region_dir / folder), "log": str(log)}
        assert server.stdin is not None and server.stdout is not None
        print(json.dumps(places | fields), file=server.stdin, flush=True)
        return int(server.stdout.readline()), log.read_text()

    return run


def skip_without(*modules: str) -> None:
    """Skip where one is not installed; importing it here would cost as long as all else."""
    for module in modules:
        if find_spec(module) is None:
            pytest.skip(f"SKIPPED: {module} is not installed")


@pytest.mark.parametrize("page", [p for p in PAGES if p != README], ids=lambda page: page.stem)
def test_the_blocks_of_a_guide_s_page_run_one_behind_the_other(page: Path, run: Run) -> None:
    text = page.read_text()
    needs = [each for each in _FRAMEWORKS if re.search(rf"^(import|from) {each}\b", text, re.M)]
    skip_without(*needs)
    status, log = run(page, imports=[_FRAMEWORKS[each] for each in needs])
    assert status == 0, log


def test_the_blocks_of_readme_run_one_behind_the_other(run: Run) -> None:
    status, log = run(README)
    assert status == 0, log
    assert len(re.findall(r"^goes on after step [1-9]\d*$", log, re.M)) == 1


@pytest.mark.parametrize(
    ("heading", "module"),
    [("HF Trainer", "transformers"), ("Lightning", "lightning"), ("Accelerate", "accelerate")],
)
def test_a_framework_s_training_is_killed_and_goes_on_bit_for_bit(
    heading: str, module: str, run: Run, region_dir: Path, rng: np.random.Generator
) -> None:
    skip_without(module)
    fields = {
        "lines": [below(FRAMEWORKS, heading).line],
        "more": DIGESTS,
        "imports": [_FRAMEWORKS[module]],
    }

    def digests(folder: str, ends: int = 0) -> list[str]:
        file = region_dir / folder / "digests"
        file.unlink(missing_ok=True)
        status, log = run(FRAMEWORKS, folder, environment={"KILL": str(ends)}, **fields)
        assert status == (signal.SIGKILL if ends else 0), log
        return file.read_text().splitlines()

    plain = digests("undisturbed")
    assert len(plain) == len(set(plain)) == 20
    done = 0
    for steps in rng.integers(4, 9, 2).tolist():
        killed = digests("killed", ends=steps)
        begin = plain.index(killed[0])
        assert begin <= done and killed == plain[begin : begin + steps]
        done = begin + steps
        print(f"{heading}: killed in the update of step {done}")
    rest = digests("killed")
    assert 0 < len(rest) < 20 and rest == plain[-len(rest) :]


def test_every_block_has_a_language_and_whatever_is_not_run_a_reason() -> None:
    languages, without = set(), {}
    for page in PAGES:
        found = blocks(page)
        assert 2 * len(found) == len(re.findall("^```", page.read_text(), re.M)), page
        languages |= {each.language for each in found}
        skipped = [each for each in found if each.not_run]
        assert all(each.language in (PYTHON, SHELL) for each in skipped), page
        assert not [each.not_run for each in skipped if len(each.not_run.split()) < 3], page
        without |= {page.stem: len(skipped)} if skipped else {}
    assert languages <= {PYTHON, SHELL, SHOWN, "toml"}
    assert without == NOT_RUN


def test_a_block_s_mark_is_read_and_a_fence_without_one_has_none(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# Page\n\n<!-- not run: needs a GPU -->\n\n```python\na\n```\n\n"
        "```sh\nb\n```\n<!-- saved as: c.py -->\n```python\nc\n```\n"
    )
    found = [(e.line, e.language, e.text, e.not_run, e.saved_as) for e in blocks(page)]
    assert found == [
        (6, "python", "a\n", "needs a GPU", ""),
        (10, "sh", "b\n", "", ""),
        (14, "python", "c\n", "", "c.py"),
    ]
    page.write_text("# Page\n\n## One\n\n```sh\nb\n```\n\n## Two\n\n```python\nc\n```\n")
    assert below(page, "One").text == below(page, "Two").text == "c\n"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_toml_is_toml(page: Path) -> None:
    for each in blocks(page):
        if each.language == "toml":
            assert tomllib.loads(each.text)


def test_a_block_that_fails_is_told_with_its_line(run: Run, tmp_path: Path) -> None:
    for text in ("```python\nassert False\n```\n", "```sh\nfalse\ntrue\n```\n"):
        page = tmp_path / "page.md"
        page.write_text("# Page\n\n" + text)
        status, log = run(page)
        assert os.waitstatus_to_exitcode(status) == 1
        assert "page.md:4" in log and ("line 4" in log or "CalledProcessError" in log)
