"""A spare process: it has imported everything, and waits to become a worker.

    python -m lightck.inplace.spare [MODULE,...]

One line of JSON on its standard input names environment, arguments and files for its output; then
it is that worker. It ends with the process that started it.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

PRELOADED = (
    *("torch", "torch.distributed", "torch._dynamo", "torch.profiler._cupti_monitor"),
    *("pyarrow.ipc", "lightck", "lightck.inplace.worker"),
    *("lightck.restore", "lightck.attach", "lightck.optim"),
)
_PR_SET_PDEATHSIG = 1


class Spare:
    """A spare process, as the agent that started it sees it."""

    def __init__(self, preload: Sequence[str] = ()) -> None:
        """Start it; it imports while the workers train."""
        command = [sys.executable, "-u", "-m", "lightck.inplace.spare", ",".join(preload)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)

    def become(
        self,
        environment: Mapping[str, str],
        arguments: Sequence[str],
        outputs: Sequence[str | None],
    ) -> subprocess.Popen[bytes] | None:
        """Let it be a worker; None if it has ended meanwhile.

        Args:
            environment: of the worker, beside that of this process.
            arguments: of `lightck.inplace.worker`.
            outputs: files for standard output and error; None: this process's.
        """
        told = {"environment": {**os.environ, **environment}, "arguments": [*arguments]}
        line = json.dumps({**told, "outputs": [*outputs]}) + "\n"
        pipe = self.process.stdin
        assert pipe is not None
        with contextlib.suppress(OSError):
            pipe.write(line.encode())
            pipe.close()
            return self.process
        return None

    def end(self) -> None:
        """End it: it is not needed."""
        self.process.kill()
        self.process.wait()


def _warm_up() -> None:
    """Compute once, so that torch's libraries are set up; no random number is drawn."""
    import torch

    with torch.no_grad():
        torch.nn.functional.linear(torch.ones(8, 8), torch.ones(8, 8), torch.ones(8))


def _wait() -> dict[str, Any] | None:
    line = sys.stdin.readline()
    return json.loads(line) if line else None


def main(preload: Sequence[str]) -> None:
    """Import, wait, and become a worker."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return
    for name in (*PRELOADED, *preload):
        with contextlib.suppress(Exception):  # the script says what is wrong with it
            importlib.import_module(name)
    _warm_up()
    told = _wait()
    if told is None:
        return
    for descriptor, path in zip((1, 2), told["outputs"], strict=True):
        if path:
            file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            os.dup2(file, descriptor)
            os.close(file)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.environ.clear()
    os.environ.update(told["environment"])
    from lightck.inplace import worker

    worker.run(told["arguments"])


if __name__ == "__main__":
    main([name for name in sys.argv[1].split(",") if name] if len(sys.argv) > 1 else [])
