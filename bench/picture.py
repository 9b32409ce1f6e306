"""Make README's picture: a traced run of GPT-2 small, one step of it drawn by `lightck timeline`.

`python -m bench picture` starts this module in a process of its own, with the stress case's threads
and OpenMP policy, then draws what it wrote.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench import definition
from bench.errors import BenchError
from bench.place import ROOT, scratch

PICTURE = ROOT / "docs" / "timeline.png"
_STRESS = "stress"
_STEPS = 24
_CANDIDATES = 7  # of the last steps the median one is drawn: neither the best nor the worst


def draw(out: Path, steps: int = _STEPS, model: str | None = None) -> None:
    """Train, trace and draw; replace `out`.

    Raises:
        BenchError: training or drawing failed; the message has its output.
    """
    stress = definition.load(_STRESS)
    environment = {**os.environ, "OMP_NUM_THREADS": str(stress.threads)}
    environment["OMP_WAIT_POLICY"] = stress.wait
    with tempfile.TemporaryDirectory(prefix="lightck-bench-") as name:
        trace = Path(name) / "trace.json"
        work = model or stress.work.model
        _do([sys.executable, "-m", "bench.picture", str(trace), str(steps), work], environment)
        step = _median_step(trace)
        out.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "lightck.cli", "timeline", str(trace)]
        _do([*command, "--steps", f"{step}:{step}", "-o", str(out), "--force"], environment)


def _do(command: list[str], environment: dict[str, str]) -> None:
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise BenchError(f"{' '.join(command)}: status {done.returncode}\n{done.stderr[-4000:]}")


def _median_step(trace: Path) -> int:
    """Return the step whose length is the median of the last steps."""
    events: list[dict[str, Any]] = json.loads(trace.read_bytes())["traceEvents"]
    lengths: dict[int, float] = {
        e["args"]["step"]: e["dur"] for e in events if e.get("cat") == "step"
    }
    last = sorted(lengths)[-_CANDIDATES:]
    middle = statistics.median_low(lengths[step] for step in last)
    return next(step for step in last if lengths[step] == middle)


def _train(trace: Path, steps: int, model: str) -> None:
    """Train with a snapshot every step, and write the trace of the last steps."""
    from dataclasses import replace

    import torch

    import lightck
    from bench.work import Training

    stress = definition.load(_STRESS)
    torch.set_num_threads(stress.threads)
    training = Training(replace(stress.work, model=model))
    training.steps(stress.method.warmup)
    with (
        scratch("tmpfs") as folder,
        lightck.attach(
            training.model, training.optimizer, folder / "run", trace=trace, on_error="raise"
        ),
    ):
        training.steps(steps)


if __name__ == "__main__":
    _train(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
