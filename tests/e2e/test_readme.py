"""README's first block runs as it stands: killed and started again, and under `lightck chaos`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(900)

_ROOT = Path(__file__).parents[2]
_MOST_S = 420
_ENOUGH = 100
"""Lines before the kill, of more than 300."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An empty folder with README's first block, byte for byte, as train.py."""
    text = (_ROOT / "README.md").read_text()
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.M | re.S)
    first = next(body for language, body in blocks if language == "python")
    assert 15 <= len(first.splitlines()) <= 25
    (tmp_path / "train.py").write_text(first)
    return tmp_path


def _environment() -> dict[str, str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("LIGHTCK_")}
    return environment | {"PYTHONPATH": str(_ROOT), "PYTHONUNBUFFERED": "1"}


def _whole(folder: Path) -> list[str]:
    """Run the example from its start to its end, and return the lines that it prints."""
    done = subprocess.run(
        [sys.executable, "train.py"],
        cwd=folder,
        env=_environment(),
        capture_output=True,
        text=True,
        timeout=_MOST_S,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_it_trains_is_killed_and_goes_on_with_the_losses_of_a_run_without_an_end(
    folder: Path,
) -> None:
    with subprocess.Popen(
        [sys.executable, "train.py"],
        cwd=folder,
        env=_environment(),
        stdout=subprocess.PIPE,
        text=True,
    ) as killed:
        assert killed.stdout is not None
        before = [killed.stdout.readline().rstrip("\n") for _ in range(_ENOUGH)]
        killed.kill()
        before += killed.stdout.read().split("\n")[:-1]  # the last line may be cut
    assert killed.returncode == -9
    assert before[0] == "begins"
    after = _whole(folder)
    step = int(re.fullmatch(r"goes on after step (\d+)", after[0])[1])  # type: ignore[index]
    print(f"killed after step {len(before) - 1}, went on after {step}")
    again = _whole(folder)
    last = int(after[-1].split()[0])
    assert again == [f"goes on after step {last}"], "it has ended: there is nothing left to do"
    other = folder / "undisturbed"
    other.mkdir()
    (other / "train.py").write_bytes((folder / "train.py").read_bytes())
    lines = _whole(other)
    assert lines[0] == "begins" and len(lines) == 1 + last
    assert before == lines[: len(before)]
    assert after[1:] == lines[1 + step :]


def test_chaos_finds_it_identical_as_readme_says(folder: Path) -> None:
    text = (_ROOT / "README.md").read_text()
    opening = text[: text.index("\n## ")]
    assert "lightck chaos -- python train.py" in opening
    done = subprocess.run(
        [sys.executable, "-m", "lightck.cli", "chaos", "--fault", "kill:60:backward"]
        + ["--", sys.executable, "train.py"],
        cwd=folder,
        env=_environment(),
        capture_output=True,
        text=True,
        timeout=_MOST_S,
    )
    print(done.stdout, done.stderr)
    assert done.returncode == 0
    assert "IDENTICAL: " in done.stdout
    assert not (folder / "lightck-run").exists(), "chaos has a place of its own"
