"""Each example is killed in the middle, started again, and ends as if nothing had happened."""

from __future__ import annotations

import ast
import contextlib
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from fcntl import F_SETPIPE_SZ, fcntl
from pathlib import Path
from typing import IO

import pytest
import yaml

import lightck
from lightck.cli.chaos.runner import descendants

pytestmark = pytest.mark.timeout(600)

_ROOT = Path(__file__).parents[2]
_MOST_S = 120
"""For each wait."""
_ENOUGH = 61
"""The step whose line means that it is to be killed."""
_PIPE_BYTES = 4096
"""A page, the least there is: some 120 lines. Behind them a run that nobody reads stands still, so
that it cannot come to its end before it is killed, however late the killer is."""


@dataclass(frozen=True)
class Example:
    """One of examples/, with arguments that make it take 192 steps."""

    name: str
    path: str
    length: tuple[str, str]
    ranks: int = 1

    @property
    def command(self) -> list[str]:
        script = [str(_ROOT / "examples" / f"{self.name}.py"), *self.length]
        if self.ranks == 1:
            return [sys.executable, *script]
        launcher = ["torch.distributed.run", "--standalone", f"--nproc-per-node={self.ranks}"]
        return [sys.executable, "-m", *launcher, *script]


_STEPS = 192
_EXAMPLES = [
    Example("minimal", "run", ("--epochs", "6")),
    Example("nanogpt", "run-nanogpt", ("--steps", "192")),
    Example("ddp", "run-ddp", ("--epochs", "12"), ranks=2),
    Example("fsdp2", "run-fsdp2", ("--epochs", "12"), ranks=2),
]


def _started(example: Example, folder: Path) -> subprocess.Popen[bytes]:
    """In a folder of its own, as from a checkout that is installed; what is wrong goes to `err`."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("LIGHTCK_")}
    if "LIGHTCK_NATIVE" in os.environ:
        kept["LIGHTCK_NATIVE"] = os.environ["LIGHTCK_NATIVE"]
    with (folder / "err").open("ab") as errors:
        return subprocess.Popen(
            example.command,
            cwd=folder,
            env=kept | {"PYTHONPATH": str(_ROOT), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=errors,
            bufsize=0,
            start_new_session=True,
        )


@contextlib.contextmanager
def _running(example: Example, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Nothing of it is left at the end."""
    process = _started(example, folder)
    try:
        yield process
    finally:
        _kill(process)
        process.wait(_MOST_S)
        assert process.stdout is not None
        process.stdout.close()


def _kill(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL to it and to its ranks, which are in sessions of their own; they are gone then."""
    if process.poll() is not None:
        return
    ranks = descendants(process.pid)
    for pid in (process.pid, *ranks):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + _MOST_S
    while not all(map(_ended, ranks)):
        assert time.monotonic() < deadline, f"{ranks} do not end"
        time.sleep(0.02)


def _ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def _lines(pipe: IO[bytes]) -> Iterator[str]:
    """Whole lines, none of them read before it is asked for."""
    line = b""
    while True:
        assert select.select([pipe], [], [], _MOST_S)[0], "it says nothing any more"
        byte = pipe.read(1)
        if not byte:
            return  # half a line, if there is one, was cut by the kill
        if byte == b"\n":
            yield line.decode()
            line = b""
        else:
            line += byte


def _losses(lines: list[str]) -> dict[int, str]:
    """Step to loss, as `repr` writes it: exactly."""
    found = [re.fullmatch(r"step (\d+) loss (\S+)", line) for line in lines]
    return {int(match[1]): match[2] for match in found if match is not None}


def _whole(example: Example, folder: Path) -> list[str]:
    """Return what it prints from its start to its end."""
    with _running(example, folder) as process:
        assert process.stdout is not None
        lines = list(_lines(process.stdout))
        assert process.wait(_MOST_S) == 0, (folder / "err").read_text()
    return lines


def _killed(example: Example, folder: Path) -> list[str]:
    """Return what it prints until it is killed, in mid-run and with a snapshot that is whole."""
    with _running(example, folder) as process:
        assert process.stdout is not None
        fcntl(process.stdout, F_SETPIPE_SZ, _PIPE_BYTES)
        lines = []
        for line in _lines(process.stdout):
            lines.append(line)
            if line.startswith(f"step {_ENOUGH} "):
                break
        else:
            raise AssertionError((folder / "err").read_text())
        deadline = time.monotonic() + _MOST_S
        while "whole" not in lightck.snapshots(folder / example.path)["state"].to_pylist():
            assert time.monotonic() < deadline, "no snapshot becomes whole"
            time.sleep(0.02)
        assert process.poll() is None, "it has ended by itself"
        _kill(process)
        lines += _lines(process.stdout)
    assert process.returncode == -signal.SIGKILL
    return lines


def _same_rest(after: list[str], wanted: dict[int, str]) -> int:
    """Go on with the losses of a run that nothing ended; the step that was restored."""
    match = re.fullmatch(r"goes on after step (\d+)", after[0])
    assert match is not None, after[0]
    restored = int(match[1])
    rest = _losses(after)
    assert [*rest] == [*range(restored + 1, _STEPS + 1)]
    assert rest == {step: wanted[step] for step in rest}
    return restored


@pytest.mark.parametrize("example", _EXAMPLES, ids=lambda each: each.name)
def test_it_is_killed_and_goes_on_with_the_losses_of_a_run_that_nothing_ended(
    example: Example, region_dir: Path
) -> None:
    here, undisturbed = region_dir / "killed", region_dir / "undisturbed"
    for folder in (here, undisturbed):
        folder.mkdir()
    before = _killed(example, here)
    after = _whole(example, here)
    expected = _whole(example, undisturbed)

    assert before[0] == expected[0] == "begins"
    wanted = _losses(expected)
    assert [*wanted] == [*range(1, _STEPS + 1)]
    first = _losses(before)
    assert _ENOUGH <= len(first) < _STEPS, "it was killed in mid-run"
    assert first == {step: wanted[step] for step in first}

    restored = _same_rest(after, wanted)
    print(f"killed after step {len(first)}, went on after step {restored}")
    assert 0 < restored <= len(first) + 1
    assert after[-2].startswith(f"done after step {_STEPS}. Next: `lightck ls ./{example.path}`")


def test_an_exception_between_the_update_and_the_schedule_loses_no_step(region_dir: Path) -> None:
    """Nobody reads on: `print` raises, wherever the training is by then."""
    example = _EXAMPLES[0]
    here, undisturbed = region_dir / "raised", region_dir / "undisturbed"
    for folder in (here, undisturbed):
        folder.mkdir()
    with _running(example, here) as process:
        assert process.stdout is not None
        fcntl(process.stdout, F_SETPIPE_SZ, _PIPE_BYTES)
        lines = _lines(process.stdout)
        assert next(line for line in lines if line.startswith(f"step {_ENOUGH} "))
        process.stdout.close()
        assert process.wait(_MOST_S) == 1
    said = (here / "err").read_text()
    failed = re.search(r"saved reason=BrokenPipeError step=(\d+)", said)
    assert failed is not None, said
    restored = _same_rest(_whole(example, here), _losses(_whole(example, undisturbed)))
    print(f"step {failed[1]} was the last, went on after step {restored}")
    # An exact snapshot of the step before it is preferred to one that came before the schedule.
    assert restored == int(failed[1]) or (restored % 10 == 0 and restored == int(failed[1]) - 1)


def test_the_training_of_the_demo_is_named_and_short() -> None:
    """It is installed with the package, so the examples point to it: there is no second copy."""
    guide = (_ROOT / "examples" / "README.md").read_text()
    assert "](../lightck/cli/demo/train.py)" in guide
    assert "python -m lightck.cli.demo.train" in guide
    text = (_ROOT / "lightck" / "cli" / "demo" / "train.py").read_text()
    assert len(text.splitlines()) <= 150


def test_each_is_short_and_says_how_it_is_started() -> None:
    guide = (_ROOT / "examples" / "README.md").read_text()
    files = sorted((_ROOT / "examples").glob("*.py"))
    assert {each.name for each in _EXAMPLES} <= {file.stem for file in files}
    for file in files:
        text = file.read_text()
        assert len(text.splitlines()) <= 90, file.name
        command = next(
            line.split("#")[0].strip()
            for line in (ast.get_docstring(ast.parse(text)) or "").splitlines()
            if f"examples/{file.name}" in line
        )
        assert command in guide, f"{file.name}: its command is not in examples/README.md"


def test_what_clusters_are_given_names_what_is_there_and_leaves_time_to_save() -> None:
    text = (_ROOT / "examples" / "slurm.sbatch").read_text()
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    assert re.search(r"^#SBATCH --signal=TERM@(\d+)$", text, re.M) and "/ddp.py" in text
    pod = next(
        each["spec"]["template"]["spec"]
        for each in yaml.safe_load_all((_ROOT / "examples" / "kubernetes.yaml").read_text())
        if each["kind"] == "Job"
    )
    assert pod["terminationGracePeriodSeconds"] > lightck.Failure().grace_s
    (container,) = pod["containers"]
    python, script = container["command"]
    assert python == "python" and (_ROOT / script).exists()
    assert {each["name"] for each in container["volumeMounts"]} == {
        each["name"] for each in pod["volumes"]
    }
