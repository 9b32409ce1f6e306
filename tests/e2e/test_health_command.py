"""`lightck health`: every probe says what it reads, and what it found or why it cannot; `--fit`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightck.cli import health as command
from lightck.cli.main import main
from lightck.health import MachineProbe, drive_fit, probes
from lightck.policy.symptoms import SYMPTOMS
from support.machine import write_drive_logs


def test_every_probe_says_what_it_reads_and_what_it_found(region_dir: Path, capsys: Any) -> None:
    assert main(["health", str(region_dir)]) == 0
    told = capsys.readouterr().out
    for probe in probes(region_dir):
        assert f"\n{probe.name}\n  reads  {probe.reads}" in f"\n{told}"
    assert told.count("  says   ") == len(probes(region_dir))
    for name in SYMPTOMS.keys() - {"rebalance"}:
        assert f"\n{name} " in told
    assert "reckon with a failure within 30 min, for 1.0 h" in told.replace("60 min", "1.0 h")


def test_json_holds_the_same(region_dir: Path, capsys: Any) -> None:
    assert main(["health", "--json", str(region_dir / "not" / "made")]) == 0
    document = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert document["path"] == str(region_dir), "the folder that it is to be made in"
    assert [row["name"] for row in document["probes"]] == [p.name for p in probes(region_dir)]
    for row in document["probes"]:
        assert row["reads"]
        assert row["says"]
        assert row["available"] or "cannot be read" in row["says"] or "fails" in row["says"]
    symptoms = {row["name"]: row for row in document["symptoms"]}
    assert symptoms["drive"] == {
        "name": "drive",
        "after_s": 1.43e7,
        "holds_s": None,
        "medium": True,
        "evidence": SYMPTOMS["drive"].evidence,
    }


def test_a_probe_that_hangs_raises_or_lacks_something_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    import threading

    class Made(MachineProbe):
        symptoms, reads = ("link",), "nothing"

        def __init__(self, name: str, read: Any) -> None:
            self.name, self.read = name, read  # type: ignore[method-assign]

    class Lacks(Made):
        lacks, detail = "smartctl is not installed", "sda: bad"

    def raises() -> dict[str, float]:
        raise OSError("broken")

    made = (
        Made("hangs", threading.Event().wait),
        Made("raises", raises),
        Lacks("lacks", lambda: {"drive": 1}),
    )
    monkeypatch.setattr(command, "probes", lambda region, drive_model: made)
    monkeypatch.setattr(command, "_PATIENCE_S", 0.2)
    assert main(["health", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["probes"]
    assert [row["says"] for row in rows] == [
        "gave no answer for 0.2 s",
        "fails: OSError('broken')",
        "sda: bad; without SMART: smartctl is not installed",
    ]
    assert [row["active"] for row in rows] == [{}, {}, {"drive": 1}]


def test_fit_writes_a_model_that_a_probe_takes(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drive_fit, "_LEAST_HEALTHY", 1_000)  # a tenth of the time
    logs = write_drive_logs(tmp_path, np.random.default_rng(3), drives=300, days=40)
    out = tmp_path / "drives.json"
    fit = ["health", "--fit", *map(str, logs), "-o", str(out)]
    assert main(fit) == 0
    told = capsys.readouterr().out
    assert f"{out}: days 2013-04-10 to 2013-05-19, tried on those from 2013-05-10" in told
    assert "AUC" in told
    assert "alarms on 0.67%" in told
    assert main(["health", "--drives", str(out), str(tmp_path)]) == 0
    assert f"the model of {out}" in capsys.readouterr().out

    assert main(fit) == 2, "it is there"
    assert "--force" in capsys.readouterr().err
    before = out.read_text()
    assert main([*fit, "--force", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["recall"][0]["alarms"] == 0.0067
    assert 0.5 < document["auc"] <= 1
    assert out.read_text() == before, "the same logs give the same model"


def test_wrong_use_is_told_and_leaves_nothing_behind(tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "drives.json"
    (tmp_path / "wrong.csv").write_text("date,serial_number\n2013-05-01,S1\n")
    (tmp_path / "deep.json").write_text("[" * 100_000)
    (tmp_path / "bytes.json").write_bytes(b"\xff" * 100_000)
    (tmp_path / "list.json").write_text("[]")
    for words, error in (
        (["--fit", str(tmp_path / "wrong.csv")], "--fit and -o belong together"),
        (["-o", str(out)], "--fit and -o belong together"),
        (["--fit", str(tmp_path / "wrong.csv"), "-o", str(out)], "there is no column failure"),
        (["--drives", "x", "--fit", "y", "-o", str(out)], "give one of them"),
        (["--drives", str(tmp_path / "wrong.csv")], "is no drive model"),
        (["--drives", str(tmp_path / "deep.json")], "is no drive model"),
        (["--drives", str(tmp_path / "bytes.json")], "is no drive model"),
        (["--drives", str(tmp_path / "list.json")], "no JSON object"),
    ):
        assert main(["health", *words]) == 2
        told = capsys.readouterr().err
        assert error in told
        assert len(told) < 1000, "a file's bytes are not printed"
    kept = {"wrong.csv", "deep.json", "bytes.json", "list.json"}
    assert {file.name for file in tmp_path.iterdir()} == kept


def test_it_needs_no_torch_but_to_fit(region_dir: Path) -> None:
    import subprocess

    code = "import sys; sys.modules['torch'] = None; from lightck.cli.main import main; "
    code += f"sys.exit(main(['health', {str(region_dir)!r}]))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
