"""Runs trainers as forked children of one process that has imported torch once.

A request is one line of JSON on stdin, the answer one line on stdout. torch's import costs seconds,
a fork milliseconds: that makes hundreds of killed and resumed trainings per minute possible. The
server itself never starts a thread, so that a child is what a fresh process would be.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import time
import traceback
from typing import Any

POLL_S = 0.002


def child(request: dict[str, Any]) -> None:
    """Run one trainer in this forked process; never returns."""
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    code = 1
    try:
        os.setpgid(0, 0)  # what it forks dies with it
        from lightck.pipeline import at_once
        from support.e2e import trainer

        # As the test says and not as it is measured: which step a kill leaves depends on it.
        at_once.MOST_BYTES = 1 << 62 if request.get("at_once") else -1
        at_once.WAKES = 1 << 40
        trainer.main(request)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def start(request: dict[str, Any]) -> int:
    """Fork a child for a request; its module is imported before, once."""
    importlib.import_module(request["module"])
    pid = os.fork()
    if pid == 0:
        child(request)
    return pid


def serve(requests: list[dict[str, Any]], parallel: int) -> list[int | None]:
    """Wait status of each request's child; None: it ran into its time-out."""
    waiting = list(enumerate(requests))
    running: dict[int, tuple[int, float]] = {}
    killing: dict[int, float] = {}
    status: list[int | None] = [None] * len(requests)
    while waiting or running:
        while waiting and len(running) < parallel:
            i, request = waiting.pop(0)
            now, pid = time.monotonic(), start(request)
            running[pid] = (i, now + request["timeout_s"])
            killing[pid] = now + request.get("kill_after_s", float("inf"))
        for pid, (i, deadline) in list(running.items()):
            done, result = os.waitpid(pid, os.WNOHANG)
            if done:
                status[i] = result
                del running[pid]
            elif time.monotonic() > killing[pid]:
                killing[pid] = float("inf")
                os.kill(pid, signal.SIGKILL)
            elif time.monotonic() > deadline:
                os.killpg(pid, signal.SIGABRT)  # faulthandler writes the stacks into the log
                os.waitpid(pid, 0)
                del running[pid]
        time.sleep(POLL_S)
    return status


def main() -> None:
    """Serve until stdin ends."""
    import faulthandler

    from support import preload

    preload.everything()
    import torch

    from support.e2e import trainer  # noqa: F401

    faulthandler.enable()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    for line in sys.stdin:
        batch = json.loads(line)
        try:
            answer: dict[str, Any] = {"status": serve(batch["requests"], batch["parallel"])}
        except Exception:
            answer = {"error": traceback.format_exc()}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
