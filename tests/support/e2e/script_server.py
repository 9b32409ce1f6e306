"""Runs scripts in forked children of one process that has imported torch once.

A request is one line of JSON on stdin, the wait status of its child the answer on stdout. A script
is what a fresh process's would be: it is `__main__`, in the main thread, and the interpreter ends
behind it as ever. The server itself never starts a thread.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any


@dataclass
class Scripts:
    """The side of the tests."""

    folder: Path
    process: subprocess.Popen[str] = field(init=False)

    def __post_init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, text: str, *words: str, without: str = "") -> subprocess.CompletedProcess[str]:
        """Run a script with arguments, and without one of the environment's variables."""
        out, err = self.folder / "out", self.folder / "err"
        request = {"text": text, "words": words, "without": without, "out": str(out)}
        assert self.process.stdin is not None and self.process.stdout is not None
        print(json.dumps(request | {"err": str(err)}), file=self.process.stdin, flush=True)
        status = os.waitstatus_to_exitcode(int(self.process.stdout.readline()))
        return subprocess.CompletedProcess(words, status, out.read_text(), err.read_text())

    def close(self) -> None:
        """End the server."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()


def serve() -> dict[str, Any] | None:
    """Answer requests until there are no more: None. A child returns with what it is to run."""
    for line in sys.stdin:
        request: dict[str, Any] = json.loads(line)
        pid = os.fork()
        if pid == 0:
            return request
        print(os.waitpid(pid, 0)[1], flush=True)
    return None


def main() -> None:
    """Serve; in a child, become the script."""
    from support import preload

    preload.everything()
    import torch

    request = serve()
    if request is None:
        return
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(request[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), number)
    torch.set_num_threads(1)  # in every child alike
    os.environ.pop(request["without"], None)
    sys.argv = ["-c", *request["words"]]
    script = sys.modules["__main__"] = ModuleType("__main__")
    exec(compile(request["text"], "<string>", "exec"), script.__dict__)


if __name__ == "__main__":
    main()
