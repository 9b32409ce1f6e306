"""The demo comes to its verdict honestly: equal when equal, different when anything differs."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path

import pytest

from lightck.cli.demo.runner import Kill, Run, Trainer, differences
from lightck.cli.main import main
from lightck.cli.output import Refusal


def test_the_demo_ends_equal_after_two_kills(region_dir: Path) -> None:
    where = region_dir / "demo"
    command = [sys.executable, "-m", "lightck.cli", "demo", "--steps", "12", "--seed", "5"]
    done = subprocess.run(
        [*command, "--path", str(where), "--json"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr + done.stdout
    document = json.loads(done.stdout)
    assert document["equal"] is True and document["differences"] == []
    assert [each["killed"] for each in document["processes"]] == [True, True, False]
    assert all(each["began_after"] > 0 for each in document["processes"][1:])
    assert document["losses_compared"] >= 12
    assert document["stall_ms_per_snapshot"] > 0 and len(document["torch_save_ms"]) > 0
    assert main(["verify", str(where / "region")]) == 0


def _pair() -> tuple[Run, list[Run]]:
    losses = {step: float(step).hex() for step in range(1, 7)}
    end = {"digests": {"model/a": "00", "optimizer/0/exp_avg": "11"}}
    first = Run(losses={s: losses[s] for s in (1, 2, 3)}, killed=True)
    second = Run(began_after=2, losses={s: losses[s] for s in (3, 4, 5, 6)}, end=end)
    return Run(losses=losses, end=copy.deepcopy(end)), [first, second]


def test_equal_runs_have_no_differences() -> None:
    reference, runs = _pair()
    assert differences(reference, runs, 6) == []


def test_one_bit_of_one_loss_is_a_difference() -> None:
    for number, step in [(0, 2), (0, 3), (1, 3), (1, 6)]:
        reference, runs = _pair()
        value = float.fromhex(runs[number].losses[step])
        runs[number].losses[step] = (value * (1 + 2**-52)).hex()
        (text,) = differences(reference, runs, 6)
        assert f"process {number + 1}, step {step}: loss" in text


def test_one_digest_is_a_difference() -> None:
    for name in ("model/a", "optimizer/0/exp_avg"):
        reference, runs = _pair()
        assert runs[-1].end is not None
        runs[-1].end["digests"][name] = "ff"
        assert differences(reference, runs, 6) == [f"{name} differs at the end"]
        del runs[-1].end["digests"][name]
        assert differences(reference, runs, 6) == [f"{name} differs at the end"]


def test_steps_that_nobody_trained_are_a_difference() -> None:
    reference, runs = _pair()
    del runs[1].losses[4]
    assert differences(reference, runs, 6) == ["no process trained steps [4]"]
    reference, runs = _pair()
    del reference.losses[6]
    assert any("the reference has steps" in text for text in differences(reference, runs, 6))


def test_a_restart_from_the_beginning_is_a_difference() -> None:
    reference, runs = _pair()
    runs[1].began_after = 0
    runs[1].losses = dict(reference.losses)
    assert differences(reference, runs, 6) == ["process 2 began after step 0, not at a snapshot"]


def test_a_run_without_digests_is_a_difference() -> None:
    reference, runs = _pair()
    runs[-1].end = None
    assert "the last process left no digests" in differences(reference, runs, 6)


def test_a_failing_trainer_is_told_with_its_output(tmp_path: Path) -> None:
    with Trainer(tmp_path, "bad", ["--steps", "twelve", "--seed", "1"]) as trainer:
        with pytest.raises(Refusal, match="invalid int value: 'twelve'") as caught:
            trainer.follow(Kill(3, 0.5), lambda step, loss: None)
    assert caught.value.code == 1


def test_a_late_kill_still_comes_in_the_middle_of_a_step(tmp_path: Path) -> None:
    arguments = ["--steps", "9", "--seed", "1", "--hold-in", "4"]
    with Trainer(tmp_path, "held", arguments) as trainer:
        run = trainer.follow(Kill(3, 0.9), lambda step, loss: None)
    assert (run.killed, run.last, run.end) == (True, 3, None)


def test_the_demo_needs_a_folder_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "mine").write_text("precious")
    assert main(["demo", "--path", str(tmp_path)]) == 2
    assert "not empty" in capsys.readouterr().err
    assert (tmp_path / "mine").read_text() == "precious"
