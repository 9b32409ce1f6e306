"""Restoring beside a trainer that writes, and into models that differ from what was saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import processes
import pytest
import torch
from loops import adam_loop, attach, of_live, of_stored

import lightck
from lightck.region import choice
from lightck.region.region import Region


def _read_while_overtaken(path: Path, reader: str, patch: pytest.MonkeyPatch, more: int) -> None:
    """Read while a trainer replaces, once, what the reader has found, or has opened if it grows."""

    def job(parent: processes.Parent) -> None:
        loop, extra = adam_loop(), {"t": torch.zeros(1)}
        with attach(path, loop, extras={"extra": extra}) as handle:
            for _ in range(2):
                for _ in range(3):
                    loop.run(1)
                    handle.wait()
                parent.send(loop.seen)
                parent.pause()
                extra["t"] = torch.zeros(1 + more)

    child = processes.start(job)
    child.receive()
    seen: list[Any] = []

    def overtake() -> None:
        if not seen:
            child.let_go()
            seen.append(child.receive())

    if more:
        recover = Region.recover
        patch.setattr(Region, "recover", lambda region: (overtake(), recover(region))[1])
    else:
        survey = choice.survey
        patch.setattr(choice, "survey", lambda where: (survey(where), overtake())[0])
    if reader == "restore":
        loop = adam_loop()
        info = lightck.restore(loop.model, list(loop.optimizers), path)
        assert info is not None and info.step == 5 and info.fell_back == ()
        held = of_live(loop.model, loop.optimizers)
    else:
        assert lightck.load(path)["step"] == 5
        held = of_stored(path, 5)
    assert held == seen[0][5]
    child.let_go()
    child.receive()
    assert child.join() == 0


@pytest.mark.parametrize("reader", ["restore", "load"])
@pytest.mark.parametrize("more", [0, 1 << 20])
def test_a_reader_that_a_trainer_overtakes_looks_again(
    run_dir: Path, reader: str, more: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the trainer overwrote every slot that was found, or grew the region as well."""
    _read_while_overtaken(run_dir, reader, monkeypatch, more)
