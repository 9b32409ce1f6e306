"""The demo comes to its verdict honestly: equal when equal, different when anything differs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lightck.cli.chaos.verdict import compare
from lightck.cli.demo.command import Life, differences, live
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


def _pair() -> tuple[Life, list[Life]]:
    losses = {step: str(float(step)) for step in range(1, 7)}
    first = Life(losses={s: losses[s] for s in (1, 2, 3)}, killed=True)
    second = Life(began_after=2, losses={s: losses[s] for s in (3, 4, 5, 6)})
    return Life(losses=losses), [first, second]


def test_equal_runs_have_no_differences() -> None:
    reference, lives = _pair()
    assert differences(reference, lives, 6) == []


def test_one_bit_of_one_loss_is_a_difference() -> None:
    for number, step in [(0, 2), (0, 3), (1, 3), (1, 6)]:
        reference, lives = _pair()
        value = float(lives[number].losses[step])
        lives[number].losses[step] = str(value * (1 + 2**-52))
        (text,) = differences(reference, lives, 6)
        assert f"process {number + 1}, step {step}: loss" in text


def test_one_bit_or_one_name_of_the_state_is_a_difference() -> None:
    def state() -> dict[str, Any]:
        return {"model": {"a": torch.ones(4)}, "optimizer": {"state": {0: {"exp_avg": 0.5}}}}

    assert compare(state(), state()) == (1, [])
    other = state()
    other["model"]["a"].view(torch.int32)[2] ^= 1
    assert compare(other, state()) == (1, ["/model/a"])
    other = state()
    other["optimizer"]["state"][0]["exp_avg"] = 0.5 + 2**-52
    assert compare(other, state()) == (1, ["/optimizer/state/0/exp_avg"])
    del other["optimizer"]["state"][0]["exp_avg"]
    assert "/optimizer/state/0/exp_avg" in compare(other, state())[1]


def test_steps_that_nobody_trained_are_a_difference() -> None:
    reference, lives = _pair()
    del lives[1].losses[4]
    assert differences(reference, lives, 6) == ["no process trained steps [4]"]
    reference, lives = _pair()
    del reference.losses[6]
    assert any("the reference has steps" in text for text in differences(reference, lives, 6))


def test_a_restart_from_the_beginning_is_a_difference() -> None:
    reference, lives = _pair()
    lives[1].began_after = 0
    lives[1].losses = dict(reference.losses)
    assert differences(reference, lives, 6) == ["process 2 began after step 0, not at a snapshot"]


def test_a_failing_trainer_is_told_with_its_output(tmp_path: Path) -> None:
    with pytest.raises(Refusal, match="invalid int value: 'twelve'") as caught:
        live(tmp_path, "bad", ["--steps", "twelve"], os.environ, print)
    assert caught.value.code == 1


def test_the_demo_needs_a_folder_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "mine").write_text("precious")
    assert main(["demo", "--path", str(tmp_path)]) == 2
    assert "not empty" in capsys.readouterr().err
    assert (tmp_path / "mine").read_text() == "precious"
