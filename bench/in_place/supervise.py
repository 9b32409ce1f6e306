"""Start the ranks of an engine that brings no launcher which would let the others live.

    python -m bench.in_place.supervise torchft|nvrx [--again] [--spare]

With --again a rank that is killed is started anew; with --spare by a process that has imported
everything already, as `lightck run` has one. Ends when a rank has ended by itself.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from bench.in_place.common import Asked, Marks

_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG
_PARENT = "LIGHTCK_BENCH_SUPERVISOR"  # the process number of who starts the ranks


def dies_with_parent() -> None:
    """Let this process end with the one that has started it."""
    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    if os.getppid() != int(os.environ.get(_PARENT, os.getppid())):
        os._exit(1)  # it was gone already


def _waiting(engine: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", f"bench.in_place.{engine}_script"]
    return subprocess.Popen(command, stdin=subprocess.PIPE)


def _named(process: subprocess.Popen[bytes], rank: int) -> subprocess.Popen[bytes]:
    """Let a waiting process be a rank."""
    assert process.stdin is not None
    process.stdin.write(f"{rank}\n".encode())
    process.stdin.close()
    return process


def _served(world: int) -> Any:
    """Serve torchft's quorum to `world` replicas."""
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(
        bind="127.0.0.1:0",
        min_replicas=world,
        join_timeout_ms=100,
        quorum_tick_ms=20,
        heartbeat_timeout_ms=1000,
    )
    os.environ["TORCHFT_LIGHTHOUSE"] = server.address()
    return server


def main(engine: str, options: Sequence[str]) -> int:
    """Run the job."""
    dies_with_parent()
    os.environ[_PARENT] = str(os.getpid())
    asked = Asked.from_environment()
    marks = Marks(asked.folder, "agent")
    server = _served(asked.world) if engine == "torchft" else None
    ranks = [_named(_waiting(engine), rank) for rank in range(asked.world)]
    spare = _waiting(engine) if "--spare" in options else None
    try:
        while True:
            for rank, process in enumerate(ranks):
                code = process.poll()
                if code is None:
                    continue
                if code != -signal.SIGKILL:
                    return code
                if "--again" in options:
                    marks.mark("noticed", rank=rank)
                    ranks[rank] = _named(spare or _waiting(engine), rank)
                    spare = _waiting(engine) if spare is not None else None
            time.sleep(0.02)
    finally:
        for process in (*ranks, *([spare] if spare is not None else [])):
            process.kill()
            process.wait()
        del server


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
