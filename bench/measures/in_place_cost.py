"""Measure what recovery in place adds to each step while nothing fails.

Under `lightck run` two ranks train two models that are alike, blocks of steps in turn: one in place
over lightck's group, one over plain gloo, each with a handle that never saves. Each makes as many
allreduces per step as it has layers, large enough that they are not copied.

Records:
    cost_s: seconds that a step takes longer, in all: the group, and the commit of each iteration.
    cost_cpu_s: the same in CPU time of rank 0's process, which other processes disturb less.
    plain_s: seconds of a step over plain gloo.
    kept_bytes: memory for inputs behind the third step.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

from bench.errors import BenchError
from bench.measures import Job
from bench.place import ROOT
from bench.record import Record, sampled, single

VARIABLE = "LIGHTCK_BENCH_IN_PLACE_COST"
_PATIENCE_S = 600.0


def measure(job: Job) -> list[Record]:
    """Measure the job; see the module and `bench.measures.run`."""
    method, told = job.method, job.folder / "told"
    asked = {
        "path": str(job.folder / "run"),
        "told": str(told),
        "block": method.block,
        "blocks": method.settle + method.least,
    }
    environment = {**os.environ, VARIABLE: json.dumps(asked), "PYTHONPATH": str(ROOT)}
    environment |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    ranks = ["--standalone", "--nproc-per-node", str(job.work.forks)]
    ranks += ["--no-spare", "--max-restarts", "0"]
    launch = [sys.executable, "-m", "bench.in_place.launch", "lightck", str(job.folder)]
    done = subprocess.run(
        [*launch, *ranks, "-m", "bench.in_place.cost_script"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=_PATIENCE_S,
    )
    if done.returncode:
        raise BenchError(f"status {done.returncode}: {done.stderr[:3000]}")
    found = json.loads(told.read_text())
    ours, plain = (found[name][method.settle :] for name in ("lightck", "gloo"))
    pairs = list(zip(ours, plain, strict=True))
    job.tell(f"{len(pairs)} pairs of blocks")
    return [
        sampled("cost_s", "s", [a[0] - b[0] for a, b in pairs]),
        sampled("cost_cpu_s", "s", [a[1] - b[1] for a, b in pairs]),
        sampled("plain_s", "s", [each[0] for each in plain]),
        single("kept_bytes", "B", found["kept"]),
    ]
