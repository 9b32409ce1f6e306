"""A training with DDP over gloo for torchrun and `lightck run`: its state is kept by lightck, by
torch.save, or not at all.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import lightck
from bench.in_place.common import Asked, Marks, Script
from lightck.inplace import runtime

_NEVER = 1 << 40
_EVENTS = ("rank_lost", "recovered", "in_place_refused", "restored")


class _Kept:
    """State in one file that rank 0 writes, as scripts with torch.save have it."""

    def __init__(self, script: Script, model: Any, optimizer: Any) -> None:
        self.script, self.model, self.optimizer, self.step = script, model, optimizer, 0
        self._path = Path(script.asked.regions) / "state.pt"
        if self._path.exists():
            found = torch.load(self._path)
            self.step = found["step"]
            model.load_state_dict(found["model"])
            optimizer.load_state_dict(found["optimizer"])

    def advance(self) -> None:
        """Count a step; save it if it is due."""
        self.step += 1
        asked = self.script.asked
        if asked.engine != "torch.save" or self.script.rank or self.step % asked.every:
            return
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        other = self._path.with_suffix(".new")
        torch.save({"step": self.step, **state}, other)
        other.rename(self._path)


def _memory() -> dict[str, int]:
    """Return the bytes that recovery in place keeps here, and the process's resident ones."""
    found = {
        "rss": int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
    }
    if runtime.WORKER is not None:
        window = [*runtime.WORKER.communicator.window]
        results = [copy for each in window for copy in each._copies or ()]
        found |= {"inputs": runtime.WORKER.inputs.copied_bytes, "operations": len(window)}
        found["results"] = sum(each.nbytes for each in results)
    return found


def main() -> None:
    """Train until the measuring process has had enough."""
    began_s = time.monotonic()
    asked = Asked.from_environment()
    marks = Marks(asked.folder, os.environ["RANK"])
    marks.mark("began", at=began_s)
    dist.init_process_group("gloo")
    script = Script(asked, dist.get_rank(), marks)
    optimizer = torch.optim.AdamW(script.model.parameters(), lr=1e-4, fused=True)
    model = DistributedDataParallel(script.model)
    marks.mark("built")
    with ExitStack() as stack:
        step: Callable[[], int]
        kept = _Kept(script, script.model, optimizer) if asked.engine != "lightck" else None
        if kept is None:
            lightck.restore(model, optimizer, asked.regions)
            handle = stack.enter_context(
                lightck.attach(
                    model,
                    optimizer,
                    asked.regions,
                    policy=_NEVER,
                    on_event=lambda name, _: marks.mark(name) if name in _EVENTS else None,
                )
            )
            step = lambda: handle.step  # noqa: E731
        else:
            step = lambda: kept.step  # noqa: E731
        marks.mark("attached")
        while script.goes_on(step()):
            loss = model(script.batch(step()))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if kept is not None:
                kept.advance()
            script.ended(step(), loss, **_memory())
    dist.destroy_process_group()
    # Torch 2.13 may hang at the exit: DDP's reducer is freed under Python's lock, joins gloo's
    # thread, and that one waits for the lock.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
