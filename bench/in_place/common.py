"""All trained scripts share this: the model, batches by step, a failure on request, marks.

A mark is a line of JSON in FOLDER/<rank>.marks: what, monotonic seconds, process, and more. The
clock is the machine's, so that marks of several processes compare.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bench.models import MODELS, built

VARIABLE = "LIGHTCK_BENCH_IN_PLACE"


@dataclass(frozen=True)
class Asked:
    """The training that a script is asked for.

    Attributes:
        folder: of marks and requests.
        regions: where the state is kept.
        engine: keeps the state: lightck, torch.save, none.
        model: a key of `MODELS`.
        world: number of ranks.
        batch: sequences per step and rank.
        sequence: tokens per sequence.
        step_ms: milliseconds that each step sleeps.
        every: steps from one save to the next, for torch.save.
    """

    folder: str
    regions: str
    engine: str
    model: str
    world: int
    batch: int
    sequence: int
    step_ms: float
    every: int

    def text(self) -> str:
        """Return it as the value of `VARIABLE`."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_environment(environment: Mapping[str, str] = os.environ) -> Asked:
        """Return what this process is asked for."""
        return Asked(**json.loads(environment[VARIABLE]))


class Marks:
    """Writes the marks of one rank."""

    def __init__(self, folder: str, name: str) -> None:
        self._file = open(Path(folder) / f"{name}.marks", "a", buffering=1)  # noqa: SIM115

    def mark(self, what: str, **more: Any) -> None:
        """Write one mark."""
        self._file.write(json.dumps([what, time.monotonic(), os.getpid(), more]) + "\n")


class Script:
    """One rank's model and batches, its failure and its end, as the measuring process asks."""

    def __init__(self, asked: Asked, rank: int, marks: Marks) -> None:
        """Build the model, the same on every rank."""
        self.asked, self.rank, self.marks = asked, rank, marks
        torch.manual_seed(1)
        self.model: nn.Module = built(asked.model, 0, 0).train()
        torch.manual_seed(100 + rank)
        self._fails = False
        parameters = [*self.model.parameters()]
        parameters[len(parameters) // 2].register_post_accumulate_grad_hook(self._in_backward)

    def batch(self, step: int) -> torch.Tensor:
        """Return this rank's batch of a step; also tell whether it fails in this step."""
        request = Path(self.asked.folder) / f"fail-{self.rank}"
        if request.exists():
            request.unlink()
            self._fails = True
        chance = torch.Generator().manual_seed(1000 * step + self.rank)
        shape = (self.asked.batch, self.asked.sequence)
        return torch.randint(MODELS[self.asked.model].vocabulary, shape, generator=chance)

    def _in_backward(self, _: torch.Tensor) -> None:
        if self._fails:
            self.marks.mark("failing")
            os.kill(os.getpid(), signal.SIGKILL)

    def ended(self, step: int, loss: torch.Tensor, **more: Any) -> None:
        """Note that a step is complete."""
        self.marks.mark("step", step=step, loss=float(loss.detach()).hex(), **more)
        if self.asked.step_ms:
            time.sleep(self.asked.step_ms / 1e3)

    def goes_on(self, step: int) -> bool:
        """Tell whether there is a next step."""
        try:
            last = int((Path(self.asked.folder) / "stop").read_text())
        except FileNotFoundError:
            return True
        return step < last
