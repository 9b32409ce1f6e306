"""The command line on small regions: what it prints, what it refuses, with which exit status."""

from __future__ import annotations

import collections
import importlib
import json
import os
import re
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import lightck
from lightck.cli.main import main
from lightck.examine import check, contents
from lightck.load import load_tensors
from lightck.policy.failure_record import FailureRecord
from support.processes import closed_output

_COMMANDS = ["ls", "inspect", "verify", "export", "rm", "top", "plan", "timeline", "demo", "chaos"]


class Tied(nn.Module):
    """A head tied to its embedding, and a weight that is not row-major."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(10, 16)
        self.middle = nn.Linear(16, 16)
        self.middle.weight = nn.Parameter(torch.randn(16, 16).t())
        self.head = nn.Linear(16, 10, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.middle(self.tokens(x)))


@dataclass
class Trained:
    path: Path
    model: Tied
    optimizer: torch.optim.Optimizer
    scheduler: Any
    extras: dict[str, Any]

    @property
    def file(self) -> Path:
        return self.path / "region-00000.lck"


@pytest.fixture
def trained(region_dir: Path) -> Trained:
    torch.manual_seed(0)
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    odd = {"array": np.arange(3), "recent": collections.deque([1, 2]), "number": np.float32(0.5)}
    extras = {"scheduler": scheduler, "progress": {"seen": 0}, "odd": odd}
    path = region_dir / "run"
    with lightck.attach(model, optimizer, path, extras=extras) as handle:
        for _ in range(3):
            x = torch.randint(10, (4,))
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), x).backward()
            optimizer.step()
            scheduler.step()
            handle.wait()
    return Trained(path, model, optimizer, scheduler, extras)


def _flip(trained: Trained, step: int, name: str) -> None:
    """Change one bit of a tensor's bytes in the region."""
    rows = contents(trained.path, step).tensors.to_pylist()
    offset = next(row["offset"] for row in rows if row["name"] == name)
    with trained.file.open("r+b") as file:
        file.seek(offset + 5)
        byte = file.read(1)[0]
        file.seek(offset + 5)
        file.write(bytes([byte ^ 1]))


def _flip_record(trained: Trained, slot: int) -> None:
    with trained.file.open("r+b") as file:
        file.seek((2 + slot) * 4096 + 16)
        byte = file.read(1)[0]
        file.seek((2 + slot) * 4096 + 16)
        file.write(bytes([byte ^ 1]))


def _steps(path: Path) -> list[int]:
    return [row["step"] for row in lightck.snapshots(path).to_pylist()]


# ---- ls, inspect, verify -------------------------------------------------------------------------


def test_ls_lists_snapshots_newest_first(trained: Trained, capsys: Any) -> None:
    assert main(["ls", str(trained.path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:2] == ["STEP", "STATE"]
    assert [line.split()[:2] for line in lines[1:]] == [["3", "whole"], ["2", "whole"]]
    assert "process death" in lines[1]


@pytest.mark.parametrize("command", ["ls", "inspect", "verify"])
def test_json_is_one_document(trained: Trained, capsys: Any, command: str) -> None:
    assert main([command, "--json", str(trained.path)]) == 0
    document = json.loads(capsys.readouterr().out)
    if command == "inspect":
        assert document["snapshot"]["step"] == 3
        assert document["regions"][0]["slots"] == 2
        assert document["snapshot"]["roles"]["parameter"]["tensors"] == 4
        assert document["snapshot"]["extras"] == ["odd", "progress", "scheduler"]
    else:
        assert [row["step"] for row in document["snapshots"]] == [3, 2]


def test_the_path_comes_from_the_environment(
    trained: Trained, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LIGHTCK_PATH", str(trained.path))
    assert main(["ls"]) == 0
    assert "whole" in capsys.readouterr().out


def test_inspect_describes_region_and_tensors(trained: Trained, capsys: Any) -> None:
    assert main(["inspect", "--tensors", str(trained.path)]) == 0
    text = capsys.readouterr().out
    assert re.search(r"^uuid +[0-9a-f]{32}$", text, re.M)
    assert re.search(r"^medium +tmpfs$", text, re.M)
    assert re.search(r"^survives +process death$", text, re.M)
    assert re.search(r"^snapshot +step 3 \(whole\)$", text, re.M)
    assert re.search(r"^extras +odd, progress, scheduler$", text, re.M)
    assert re.search(r"^optimizers +torch.optim.adamw.AdamW$", text, re.M)
    assert re.search(r"^model/head.weight +parameter.* = model/tokens.weight$", text, re.M)
    assert re.search(r"^model/tokens.weight +parameter +float32\[10,16\] +640 B", text, re.M)
    rows = contents(trained.path).tensors.to_pylist()
    assert all(row["name"] in text for row in rows)


def test_inspect_lists_the_largest_tensors_only(trained: Trained, capsys: Any) -> None:
    assert main(["inspect", "--step", "2", str(trained.path)]) == 0
    text = capsys.readouterr().out
    assert "snapshot    step 2" in text
    assert "smaller ones (--tensors lists all)" in text


def test_verify_reads_everything(trained: Trained, capsys: Any) -> None:
    assert main(["verify", str(trained.path)]) == 0
    assert "all good" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["model/tokens.weight", "optim/0/middle.bias/exp_avg_sq"])
def test_verify_names_every_damaged_tensor(trained: Trained, capsys: Any, name: str) -> None:
    _flip(trained, 2, name)
    _flip(trained, 2, "model/middle.weight")
    assert main(["verify", str(trained.path)]) == 1
    out = capsys.readouterr().out
    assert f"step 2: the bytes of {name} do not match" in out
    assert "step 2: the bytes of model/middle.weight do not match" in out
    assert out.count("damaged: ") == 2
    assert main(["verify", "--step", "3", str(trained.path)]) == 0
    capsys.readouterr()
    assert main(["verify", "--json", str(trained.path)]) == 1
    document = json.loads(capsys.readouterr().out)
    assert [(s["step"], s["state"]) for s in document["snapshots"]] == [(3, "good"), (2, "damaged")]
    assert set(document["snapshots"][1]["damaged"]) == {name, "model/middle.weight"}


@pytest.mark.parametrize("command", ["ls", "inspect", "verify"])
def test_a_damaged_record_is_told(trained: Trained, capsys: Any, command: str) -> None:
    slot = lightck.snapshots(trained.path).to_pylist()[0]["slot"]
    _flip_record(trained, slot)
    assert main([command, str(trained.path)]) == 1
    out = capsys.readouterr().out
    assert f"damaged: {trained.file} slot {slot}" in out
    assert "2" in out  # the older one is still there


def test_checks_report_progress_of_every_byte(trained: Trained) -> None:
    read: list[int] = []
    results = check(trained.path, progress=read.append)
    assert sum(read) == sum(result["bytes"] for result in results) > 0


def test_a_region_without_snapshots_is_no_error(region_dir: Path, capsys: Any) -> None:
    model = nn.Linear(2, 2)
    lightck.attach(model, torch.optim.SGD(model.parameters()), region_dir / "run").detach()
    for command in ("ls", "inspect", "verify"):
        assert main([command, str(region_dir / "run")]) == 0
        assert "no snapshot" in capsys.readouterr().out
    assert main(["export", str(region_dir / "run"), str(region_dir / "x.pt")]) == 1
    assert "no whole snapshot" in capsys.readouterr().err


def test_commands_work_beside_a_trainer(region_dir: Path, capsys: Any) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    path = region_dir / "run"
    with lightck.attach(model, optimizer, path) as handle:
        for step in range(1, 6):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            if step > 1:
                for command in ("ls", "inspect", "verify"):
                    assert main([command, str(path)]) == 0, capsys.readouterr()
        handle.wait()
    assert handle.stats().slipped == 0
    assert max(_steps(path)) == 5


# ---- export --------------------------------------------------------------------------------------


def test_torch_export_goes_into_load_state_dict(trained: Trained, tmp_path: Path) -> None:
    out = tmp_path / "state.pt"
    assert main(["export", str(trained.path), str(out)]) == 0
    state = torch.load(out, weights_only=True)
    assert state.keys() == {"step", "model", "optimizers", "extras"}
    assert state["step"] == 3
    fresh = Tied()
    optimizer = torch.optim.AdamW(fresh.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    fresh.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizers"][0])
    scheduler.load_state_dict(state["extras"]["scheduler"])
    assert _equal(fresh.state_dict(), trained.model.state_dict())
    theirs, ours = optimizer.state_dict(), trained.optimizer.state_dict()
    assert theirs["param_groups"] == ours["param_groups"]
    for position, entries in ours["state"].items():
        assert _equal(theirs["state"][position], entries)
    assert scheduler.state_dict() == trained.scheduler.state_dict()


def test_torch_export_says_what_it_made_plain(
    trained: Trained, tmp_path: Path, capsys: Any
) -> None:
    out = tmp_path / "state.pt"
    assert main(["export", str(trained.path), str(out)]) == 0
    text = capsys.readouterr().out
    assert "extras/odd/array: ndarray written as Tensor" in text
    assert "extras/odd/recent: deque written as list" in text
    odd = torch.load(out, weights_only=True)["extras"]["odd"]
    assert odd["array"].tolist() == [0, 1, 2]
    assert (odd["recent"], odd["number"]) == ([1, 2], 0.5)


def test_safetensors_export_holds_the_model(trained: Trained, tmp_path: Path) -> None:
    from safetensors import safe_open
    from safetensors.torch import load_file, load_model

    out = tmp_path / "model.safetensors"
    assert main(["export", str(trained.path), str(out)]) == 0
    kept = load_file(out)
    assert sorted(kept) == ["middle.bias", "middle.weight", "tokens.weight"]
    with safe_open(out, "pt") as file:
        assert file.metadata()["head.weight"] == "tokens.weight"
        assert file.metadata()["step"] == "3"
    fresh = Tied()
    load_model(fresh, out)
    assert _equal(fresh.state_dict(), trained.model.state_dict())


def test_safetensors_export_of_everything(trained: Trained, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    out = tmp_path / "all.safetensors"
    assert main(["export", "--all", "--step", "2", str(trained.path), str(out)]) == 0
    (tmp_path / "other").touch()
    assert out.stat().st_mode == (tmp_path / "other").stat().st_mode
    step, tensors = load_tensors(trained.path, 2)
    kept = load_file(out)
    assert step == 2
    assert torch.equal(kept["optim/0/middle.bias/exp_avg"], tensors["optim/0/middle.bias/exp_avg"])
    assert len(kept) == len(tensors) - 1  # one is tied


def test_the_format_may_be_given(trained: Trained, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "state.ckpt"
    assert main(["export", str(trained.path), str(out)]) == 2
    assert "suffix" in capsys.readouterr().err
    assert main(["export", "--json", "--format", "torch", str(trained.path), str(out)]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["step"], document["bytes"]) == (3, out.stat().st_size)


def test_export_replaces_only_when_told(trained: Trained, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "state.pt"
    out.write_text("precious")
    assert main(["export", str(trained.path), str(out)]) == 2
    assert "--force" in capsys.readouterr().err
    assert out.read_text() == "precious"
    assert main(["export", "--force", str(trained.path), str(out)]) == 0
    assert torch.load(out, weights_only=True)["step"] == 3
    assert os.listdir(tmp_path) == ["state.pt"]


def test_export_follows_no_link(trained: Trained, tmp_path: Path, capsys: Any) -> None:
    target, out = tmp_path / "target.pt", tmp_path / "link.pt"
    target.write_text("precious")
    out.symlink_to(target)
    for force in ([], ["--force"]):
        assert main(["export", *force, str(trained.path), str(out)]) == 2
        assert "symbolic link" in capsys.readouterr().err
    assert target.read_text() == "precious"


def test_export_leaves_nothing_behind_when_it_fails(
    trained: Trained, tmp_path: Path, capsys: Any
) -> None:
    for step in _steps(trained.path):
        _flip(trained, step, "model/middle.bias")
    assert main(["export", str(trained.path), str(tmp_path / "state.pt")]) == 1
    assert "model/middle.bias" in capsys.readouterr().err
    assert os.listdir(tmp_path) == []


def test_export_never_replaces_the_region(trained: Trained, capsys: Any) -> None:
    before = trained.file.read_bytes()
    where = str(trained.path)
    assert main(["export", "--force", "--format", "torch", where, str(trained.file)]) == 2
    assert "is a region" in capsys.readouterr().err
    assert trained.file.read_bytes() == before
    other = trained.path / "history" / "step-1" / trained.file.name
    assert main(["export", "--force", "--format", "torch", where, str(other)]) == 2
    assert "has a region's name" in capsys.readouterr().err


def test_torch_export_of_what_its_loader_refuses_is_told(
    region_dir: Path, tmp_path: Path, capsys: Any
) -> None:
    model, extras = torch.nn.Linear(2, 2), {"d": {"dates": np.datetime64("2026-11-29")}}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with lightck.attach(model, optimizer, region_dir / "run", extras=extras):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    assert main(["export", str(region_dir / "run"), str(tmp_path / "state.pt")]) == 2
    assert "--format safetensors takes the tensors" in capsys.readouterr().err
    assert os.listdir(tmp_path) == []


def test_what_cannot_be_mapped_privately_is_copied(
    trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = importlib.import_module("lightck.load")
    _, mapped = load_tensors(trained.path)
    monkeypatch.setattr(module, "_complete_rows", lambda part, snapshot: [])  # as for devices
    step, copied = load_tensors(trained.path)
    assert step == 3 and _equal(copied, mapped)
    assert copied["model/head.weight"] is copied["model/tokens.weight"]


# ---- wrong input, help ---------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["ls", "inspect", "verify", "export", "top"])
def test_no_such_place(command: str, tmp_path: Path, capsys: Any) -> None:
    out = [str(tmp_path / "x.pt")] if command == "export" else []
    for wrong in (tmp_path / "nothing", tmp_path / "no" / "thing", tmp_path):
        assert main([command, str(wrong), *out]) == 2
        err = capsys.readouterr().err
        assert err.startswith("lightck: error: ") and str(tmp_path) in err
        assert "Traceback" not in err


@pytest.mark.parametrize("command", ["ls", "inspect", "verify"])
def test_a_file_that_is_no_region(command: str, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "region-00000.lck").write_bytes(b"not a region" * 1000)
    assert main([command, str(tmp_path)]) == 1
    assert capsys.readouterr().err.startswith("lightck: error: ")
    assert main([command, str(tmp_path / "region-00000.lck")]) == 2


@pytest.mark.parametrize("command", ["inspect", "verify", "export"])
def test_a_step_that_is_not_there(
    command: str, trained: Trained, tmp_path: Path, capsys: Any
) -> None:
    out = [str(tmp_path / "x.pt")] if command == "export" else []
    assert main([command, "--step", "77", str(trained.path), *out]) == 2
    assert "no snapshot of step 77; steps there: 2, 3" in capsys.readouterr().err


def test_wrong_usage(capsys: Any) -> None:
    for wrong in ([], ["frobnicate"], ["ls", "--step", "1"], ["demo", "--steps", "1"]):
        assert main(wrong) == 2
        err = capsys.readouterr().err
        assert err.startswith("lightck: error: ")


def test_a_reader_that_closes_the_output_ends_a_command_quietly(
    trained: Trained, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    with closed_output() as output:
        monkeypatch.setattr("sys.stdout", output)
        assert main(["ls", str(trained.path)]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("command", _COMMANDS)
def test_help_teaches_by_example(command: str, capsys: Any) -> None:
    assert main([command, "--help"]) == 0
    text = capsys.readouterr().out
    assert f"examples:\n  lightck {command} " in text or f"examples:\n  lightck {command}\n" in text
    assert "exit status:" in text


def test_the_main_help_names_every_command(capsys: Any) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(re.search(rf"^    {command} ", text, re.M) for command in _COMMANDS)
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"lightck {lightck.__version__}\n"


def _equal(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# ---- plan ----------------------------------------------------------------------------------------


def test_plan_takes_what_a_run_has_learned(
    trained: Trained, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = FailureRecord().ran(7200.0, 1).failed(recovered=False).ran(60.0, 1)
    learned = {
        "version": 1,
        "failures": record.to_plain(),
        "cost_s": 0.25,
        "persist_s": 1.5,
        "quiet_s": 0.75,
    }
    found = contents(trained.path, "latest")
    text = json.dumps(learned)
    monkeypatch.setattr(
        "lightck.examine.contents", lambda *_: types.SimpleNamespace(learned=text, found=found)
    )
    words = ["plan", "--json", "--days", "1", "--policy", "auto", str(trained.path)]
    assert main(words) == 0
    document = json.loads(capsys.readouterr().out)
    job = document["job"]
    assert (job["cost_s"], job["persist_s"], job["step_s"]) == (0.25, 1.5, 0.75)
    assert job["sources"]["cost_s"].startswith("measured") and job["state_bytes"] > 0
    assert job["sources"]["restart_s"] == "assumed"
    assert "learned from 1 failure of the run" in document["failures"]
    assert document["rows"][0]["mtbf_s"] == pytest.approx(7260.0, rel=0.01)
    assert main([*words, "--cost", "2"]) == 0
    assert json.loads(capsys.readouterr().out)["job"]["cost_s"] == 2.0
    text = '{"damaged'
    assert main(words) == 0
    assert json.loads(capsys.readouterr().out)["job"]["sources"]["cost_s"] == "assumed"


def test_plan_of_no_run_is_refused(tmp_path: Path, capsys: Any) -> None:
    assert main(["plan", str(tmp_path)]) == 2
    assert "no lightck region" in capsys.readouterr().err
