"""`lightck chaos` on a tiny training: every fault comes, is reported, and the end is the same."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lightck.cli.chaos.runner import descendants, network_refusal
from lightck.cli.main import main
from lightck.failure.fault_plan import PHASES
from support.e2e.chaos_runs import NEVER, TRAINER, TWO, chaos, faults
from support.proof import record

_ENDING = {"exception", "term", "kill", "corrupt", "hang"}


def test_each_kind_comes_once_and_the_end_is_the_undisturbed_one() -> None:
    texts = [
        "stop:3:forward", "kill:5:backward", "slow:7:between", "exception:9:allreduce",
        "gil:11:fence", "term:13:commit", "full:15:update", "corrupt:17:backward",
        "hang:20:forward", "kill:18:restore",
    ]  # fmt: skip
    words = ["--hold", "0.5", "--patience", "1", *faults(*texts), "--"]
    document = chaos(*words, *TRAINER, "--waits")
    assert document["identical"] and document["differences"] == []
    assert (document["steps"], document["losses_compared"]) == (24, True)
    *others, last = document["faults"]
    rows = {row["kind"]: row for row in others}
    assert [r for r in document["faults"] if not (r["fired"] and r["identical"])] == []
    assert {kind for kind, row in rows.items() if row["ended"]} == _ENDING
    assert document["lives"] == 2 + len(_ENDING)
    # The hang's restart was killed in its restore; the next one came to the same step.
    assert (last["resumed"], last["lost_steps"]) == (rows["hang"]["resumed"], 0)
    for kind in _ENDING:
        row = rows[kind]
        assert row["resumed"] == row["step"] - (2 if kind == "corrupt" else 1)
        assert row["lost_steps"] == row["step"] - row["resumed"]
        assert 0 < row["detected_s"] <= row["recovered_s"]
    for kind in ("stop", "gil"):
        assert rows[kind]["recovered_s"] >= 0.5
    assert rows["corrupt"]["flipped"]["step"] == 16
    assert rows["hang"]["acted"] == ["the job was ended"] and rows["hang"]["detected_s"] >= 1.0
    record(
        "chaos", {"faults": len(document["faults"]), "lives": document["lives"], "identical": True}
    )


def test_what_a_training_forgets_shows_as_a_difference() -> None:
    document = chaos(*faults("kill:6"), "--", *TRAINER, "--steps", "9", "--forgets", status=1)
    assert not document["identical"]
    (row,) = document["faults"]
    assert row["identical"] is False
    assert any("loss of '0 9'" in text for text in document["differences"])
    assert any("differs after step 9" in text for text in document["differences"])


def test_rare_snapshots_lose_what_lies_between_them() -> None:
    document = chaos(
        *faults("kill:10"), "--",
        *TRAINER, "--steps", "12", "--policy", "4", "--waits", "--path", "{path}",
    )  # fmt: skip
    assert document["identical"]
    (row,) = document["faults"]
    assert (row["resumed"], row["lost_steps"]) == (8, 2)
    assert row["lost_s"] > 0


def test_just_in_time_snapshots_leave_a_minibatch_to_lose() -> None:
    words = [*faults("exception:5:backward", "term:9:forward"), "--", *TRAINER]
    document = chaos(*words, "--steps", "12", "--policy", "1000", LIGHTCK_FAILURE="jit")
    assert document["identical"]
    exception, term = document["faults"]
    assert (exception["saved"], exception["resumed"], exception["lost_steps"]) == (4, 4, 1)
    assert exception["detected_by"] == "InjectedError, rank 0"
    # The loop goes on until the process ends; nothing of that is in the snapshot.
    assert term["saved"] == term["resumed"] >= 8
    assert term["detected_by"] == "SIGTERM, rank 0"


def test_a_network_drop_passes() -> None:
    if (why := network_refusal()) is not None:
        print(f"SKIPPED: {why}")
        pytest.skip(f"no network namespaces: {why}")
    words = ["--hold", "0.3", *faults("network:4"), "--", *TRAINER, "--steps", "400"]
    document = chaos(*words)
    assert document["identical"]
    (row,) = document["faults"]
    assert row["acted"] == ["lo down", "lo up"] and not row["ended"]


def test_faults_of_several_kinds_and_phases_under_torchrun() -> None:
    """No step is ever due; what the last one leaves is killed once more, in its restore."""
    texts = ["exception:4:backward:1", "kill:5:restore:0", "term:7:commit:*", "kill:9:between:1"]
    command = [*TWO, *TRAINER[1:], "--steps", "11", "--policy", str(NEVER)]
    document = chaos(*faults(*texts), "--", *command, LIGHTCK_FAILURE="jit")
    assert document["identical"] and document["world"] == 2
    assert [row for row in document["faults"] if not (row["fired"] and row["identical"])] == []
    assert [row for row in document["faults"] if row["lost_steps"] > 2] == []


_ON_RANKS = [
    [f"kill:{4 + 4 * i}:{phase}:{i % 2}" for i, phase in enumerate(list(PHASES)[:4])],
    [f"kill:{4 + 4 * i}:{phase}:{i % 2}" for i, phase in enumerate(list(PHASES)[4:7])],
    ["term:4:forward:*", "kill:8:backward:*", "stop:12:backward:1", "hang:16:forward:0"],
]


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("texts", _ON_RANKS, ids=lambda texts: texts[0])
def test_several_ranks_and_every_phase_under_torchrun(texts: list[str]) -> None:
    command = [*TWO, *TRAINER[1:], "--steps", "22"]
    document = chaos("--patience", "3", *faults(*texts), "--", *command)
    assert document["identical"] and document["world"] == 2
    assert all(row["fired"] for row in document["faults"])


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_torchrun_restarts_the_ranks_itself() -> None:
    command = [*TWO, "--max-restarts=3", *TRAINER[1:], "--steps", "16"]
    document = chaos(*faults("kill:5:backward:1", "exception:10:update:0"), "--", *command)
    assert document["identical"] and document["lives"] == 1
    assert all(row["resumed"] is not None for row in document["faults"])


@pytest.mark.timeout(400)
def test_under_lightck_run_the_report_says_which_ranks_were_replaced_alone() -> None:
    command = [sys.executable, "-m", "lightck.cli", "run", "--standalone", "--nproc-per-node=2"]
    document = chaos(
        *faults("kill:6:backward:1"), "--", *command, *TRAINER[1:], "--steps", "10",
        LIGHTCK_FAILURE="jit",
    )  # fmt: skip
    assert document["identical"]
    assert (document["lives"], document["replaced"], document["restarts"]) == (1, 1, 0)
    (row,) = document["faults"]
    assert (row["replaced"], row["resumed"], row["lost_steps"]) == ([1], 5, 1)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--fault", "melt:3"], "no fault 'melt'"),
        (["--kinds", "kill,melt"], "--kinds kill,melt: no fault 'melt'"),
        (["--kinds", "kill", "--fault", "kill:3"], "either given or drawn"),
        (["--ranks", "0"], "--ranks 0: must be 1 or more"),
        (["--steps", "0"], "--steps 0: must be 1 or more"),
        (["--steps", "5"], "faults in a run of 5 steps: at least"),
        (["--fault", "kill:3", "--", "train.py"], "; is it `python train.py`?"),
        (["--ranks", "2", "--", "true"], "--ranks 2 is for the built-in training"),
        (["--steps", "9", "--", "true"], "--steps 9 is for the built-in training"),
        (["--hold", "0", "--", "true"], "--hold 0.0: must be seconds"),
        (["--fault", "kill:3", "--", "/no/such/command"], "/no/such/command: No such file"),
        (["--fault", "kill:3", "--", "true"], "never called lightck.attach"),
        (["--fault", "kill:3", "--", "sh", "-c", "echo why; exit 3"], "(exit status 3):\n$ sh -c"),
        (
            ["--quiet", "0.2", "--", "sleep", "60"],
            "said nothing for 0.2 s (--quiet), and was ended",
        ),
    ],
)
def test_wrong_input_has_a_clear_error(
    words: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["chaos", *words]) in (1, 2)
    error = capsys.readouterr().err
    assert error.startswith("lightck: error: ") and named in error


def test_a_command_with_a_place_of_its_own_is_refused(
    region_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    elsewhere = region_dir / "mine"
    words = ["chaos", "--fault", "kill:3", "--", *TRAINER, "--steps", "2", "--path"]
    assert main([*words, str(elsewhere)]) == 2
    assert f"writes its snapshots to {elsewhere}; let it take" in capsys.readouterr().err


def test_without_the_variable_nothing_of_it_is_loaded() -> None:
    code = (
        "import sys, torch, lightck; m = torch.nn.Linear(2, 2);"
        "lightck.attach(m, torch.optim.SGD(m.parameters()), sys.argv[1]).detach();"
        "unwanted = {'lightck.failure.fault_plan', 'lightck.failure.fault_injector'};"
        "assert not unwanted & set(sys.modules)"
    )
    clean = {k: v for k, v in os.environ.items() if k != "LIGHTCK_CHAOS"}
    where = f"/dev/shm/lightck-test-{os.getpid()}-none"
    try:
        subprocess.run([sys.executable, "-c", code, where], check=True, env=clean)
    finally:
        subprocess.run(["rm", "-rf", where], check=True)


def test_descendants_are_found_and_others_left_alone() -> None:
    before = descendants(os.getpid())
    with subprocess.Popen(["sh", "-c", "sleep 60 & wait"]) as process:
        try:
            while len(found := descendants(process.pid)) < 1:
                pass
            assert {process.pid, *found} <= set(descendants(os.getpid()))
            assert descendants(os.getpid(), {*before, process.pid}) == []
        finally:
            for pid in (*descendants(process.pid), process.pid):
                os.kill(pid, 9)
