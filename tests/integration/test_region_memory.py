"""lightck says what a region takes: at attach, and at close where it goes on holding memory.

It says so, too, where a container has too little of it.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from test_real_limits import mounted

import lightck
from lightck.region import location
from support.loops import Loop, adam_loop, attach, mlp, train


def said(caplog: pytest.LogCaptureFixture, name: str) -> dict[str, Any]:
    """The fields of the only event of that name."""
    (found,) = [
        record.lightck  # type: ignore[attr-defined]
        for record in caplog.records
        if getattr(record, "lightck_event", "") == name
    ]
    return dict(found)


def test_on_memory_attach_says_what_the_region_takes_and_close_what_it_goes_on_holding(
    run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loop = adam_loop()
    with caplog.at_level(logging.INFO, "lightck"):
        train(run_dir, loop, 2, slots=3)
    file = run_dir / "region-00000.lck"
    attached, closed = said(caplog, "attached"), said(caplog, "closed")
    slots, _, slot_bytes, _ = attached["takes"].replace(" x ", " ").split()
    assert int(slots) == 3
    state = sum(p.nbytes for p in loop.model.parameters()) * 3
    assert state <= int(slot_bytes) and 3 * int(slot_bytes) < attached["bytes"]
    assert attached["bytes"] == closed["memory_bytes"] == file.stat().st_blocks * 512
    assert closed["until"] == f"lightck rm {run_dir}" and closed["step"] == 2
    assert f"memory_bytes={closed['memory_bytes']}" in caplog.text


def test_on_a_disk_close_speaks_of_no_memory(
    disk_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "lightck"):
        train(disk_dir, adam_loop(), 1)
    assert "memory_bytes" not in said(caplog, "closed")


@pytest.mark.parametrize("kind", ["docker", "kubernetes"])
def test_a_container_with_too_little_shared_memory_is_told_how_it_gets_more(
    kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The user is told at attach, and when the state outgrows the memory."""
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    mark = tmp_path / ".dockerenv"
    monkeypatch.setattr(location, "MARKS", (mark,))
    if kind == "docker":
        mark.touch()
    else:
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    with mounted("-o", "size=8m", "-t", "tmpfs") as memory:
        monkeypatch.setattr(location, "SHARED_MEMORY", memory)
        large = adam_loop(width=512)
        with pytest.raises(lightck.RegionFullError, match=r"\d+ bytes needed, \d+ free") as caught:
            attach(memory / "run", large)
        for part in ("--shm-size", "emptyDir: {medium: Memory}", str(8 << 20), str(memory)):
            assert part in str(caught.value)
        model = mlp(64, 1)
        loop = Loop(model, torch.optim.SGD(model.parameters(), lr=0.1), width=64)
        told: list[BaseException] = []
        handle = attach(memory / "run", loop, on_error=told.append)
        loop.run(1)
        model.append(torch.nn.Linear(64, 64_000))
        loop.optimizers[0].add_param_group({"params": model[1].parameters()})
        loop.run(2)
        with pytest.raises(lightck.RegionFullError, match="--shm-size"):
            handle.close()
        assert told and "--shm-size" in str(told[0])


@pytest.mark.parametrize("where", ["no container", "another medium"])
def test_others_are_not_told_of_containers(
    where: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    (tmp_path / "mark").touch()
    marks = (tmp_path / ("none" if where == "no container" else "mark"),)
    monkeypatch.setattr(location, "MARKS", marks)
    with mounted("-o", "size=8m", "-t", "tmpfs") as memory:
        if where == "no container":
            monkeypatch.setattr(location, "SHARED_MEMORY", memory)
        with pytest.raises(lightck.RegionFullError) as caught:
            attach(memory / "run", adam_loop(width=512))
        assert "shm" not in str(caught.value)
