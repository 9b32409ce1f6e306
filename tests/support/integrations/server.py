"""Runs scripts as forked children of one process that has imported their framework once.

A request is one line of JSON on stdin, the answer one line on stdout. With `fork` false, or with
spawned workers, a script is a process of its own: slower by the imports.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import time
import traceback
from typing import Any

POLL_S = 0.01


def child(request: dict[str, Any], rank: int) -> None:
    """Run the script in this forked process; never returns."""
    log = os.open(request["logs"][rank], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    code = 1
    try:
        os.setpgid(0, 0)
        os.environ.update(environment(request, rank))
        os.chdir(request["folder"])
        from lightck.pipeline import at_once

        at_once.MOST_BYTES = -1  # small states go through the window, as large ones do
        sys.argv = [request["script"]]
        runpy.run_path(request["script"], run_name="__main__")
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        # As the interpreter would: functions of atexit are part of what is tested.
        import atexit

        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def environment(request: dict[str, Any], rank: int) -> dict[str, str]:
    """Return the variables that torchrun would set, and the request's own."""
    own: dict[str, str] = dict(request["environment"])
    if request["ranks"] > 1:
        names = ("WORLD_SIZE", "LOCAL_WORLD_SIZE")
        own |= dict.fromkeys(names, str(request["ranks"]))
        own |= dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank))
        own |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(request["port"])}
        own |= {"GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "test", "OMP_NUM_THREADS": "1"}
    return own


def start(request: dict[str, Any], rank: int) -> int:
    """Start one rank; return its process id."""
    if request["fork"]:
        pid = os.fork()
        if pid == 0:
            child(request, rank)
        return pid
    with open(request["logs"][rank], "ab") as log:
        return subprocess.Popen(
            [sys.executable, request["script"]],
            stdout=log, stderr=log, process_group=0, cwd=request["folder"],
            env={**os.environ, **environment(request, rank)},
        ).pid  # fmt: skip


def serve(request: dict[str, Any]) -> list[int | None]:
    """Return the wait status of each rank; None: it ran into the time-out.

    Once a rank has died by a signal, the others are killed, too.
    """
    running = {start(request, rank): rank for rank in range(request["ranks"])}
    status: list[int | None] = [None] * request["ranks"]
    deadline = time.monotonic() + request["timeout_s"]
    while running:
        for pid, rank in list(running.items()):
            done, result = os.waitpid(pid, os.WNOHANG)
            if done:
                status[rank] = result
                del running[pid]
                if result != 0:
                    for other in running:
                        os.killpg(other, signal.SIGKILL)
            elif time.monotonic() > deadline:
                os.killpg(pid, signal.SIGABRT)  # faulthandler writes the stacks into the log
                os.waitpid(pid, 0)
                del running[pid]
        time.sleep(POLL_S)
    return status


def main() -> None:
    """Import what is named on the command line, and serve until stdin ends."""
    import faulthandler

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # frameworks print where they are imported
    import torch

    import lightck

    for name in lightck.__all__:
        getattr(lightck, name)
    for name in ("torch._dynamo", *sys.argv[1:]):
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a collection in a child would copy every page that an object is on
    faulthandler.enable()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    for line in sys.stdin:
        try:
            answer: dict[str, Any] = {"status": serve(json.loads(line))}
        except Exception:
            answer = {"error": traceback.format_exc()}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
