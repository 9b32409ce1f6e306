"""A spare process: it has imported everything, and waits to become a worker.

    python -m lightck.inplace.spare MODULE,... FOLDER

One line of JSON on its standard input names environment, arguments and files for its output; then
it is that worker. It ends with the process that started it.

What is imported does not know yet which rank it will be of. A module that has read a variable which
the worker then has another value of (`RANK = int(os.getenv("RANK", 0))`) would go by the wrong one:
the process starts Python anew in its place, as a worker that has imported nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import logging
import os
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

PRELOADED = (
    *("torch", "torch.distributed", "torch._dynamo", "torch.profiler._cupti_monitor"),
    *("pyarrow.ipc", "lightck", "lightck.inplace.worker"),
    *("lightck.restore", "lightck.attach", "lightck.optim"),
)
_PR_SET_PDEATHSIG = 1
_WORKER = "lightck.inplace.worker"
_PYTHONS_OWN = (f"{sysconfig.get_path('stdlib')}{os.sep}", "<frozen ", __file__)
_INSTALLED = tuple(f"{sysconfig.get_path(name)}{os.sep}" for name in ("purelib", "platlib"))
_Environment: Any = type(os.environ)


class Spare:
    """A spare process, as the agent that started it sees it."""

    def __init__(self, preload: Sequence[str] = (), folder: str = "") -> None:
        """Start it; it imports while the workers train.

        Args:
            preload: modules to import, beside those that every worker needs.
            folder: where workers look for modules first; empty: the working directory.
        """
        command = [sys.executable, "-u", "-m", "lightck.inplace.spare", ",".join(preload), folder]
        # Python's own idea of the environment, as in `become`: a C library may have added to it.
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, start_new_session=True, env={**os.environ}
        )

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


class WatchedEnvironment(_Environment):  # type: ignore[misc] # `os.environ`, whose class it becomes
    """The environment, which notes what is read and written of it while modules are imported.

    A pass over all of it is not: many modules make a copy for their children, or look for names of
    their own (tqdm's begin with `TQDM_`), and a `MASTER_PORT` of the job's is nothing to them.
    """

    read: dict[str, tuple[str | None, str]]
    """By name the value that was read first, and by which module."""
    written: set[str]
    before: dict[str, str]
    """The environment as it was when the watch began."""
    passed: list[str]
    """The names that a pass over all has still before it, the next one last."""

    @classmethod
    def watch(cls) -> WatchedEnvironment:
        """Let `os.environ` be one of these."""
        watched: Any = os.environ
        watched.read, watched.written, watched.passed = {}, set(), []
        watched.before, watched.__class__ = {**os.environ}, cls
        found: WatchedEnvironment = watched
        return found

    def __getitem__(self, name: str) -> str:
        try:
            value = str(super().__getitem__(name))
        except KeyError:
            self._note(name, None)
            raise
        self._note(name, value)
        return value

    def __iter__(self) -> Iterator[str]:
        names = [*super().__iter__()]
        self.passed = names[::-1]
        return iter(names)

    def __setitem__(self, name: str, value: str) -> None:
        self.written.add(name)
        super().__setitem__(name, value)

    def __delitem__(self, name: str) -> None:
        self.written.add(name)
        super().__delitem__(name)

    def _note(self, name: str, value: str | None) -> None:
        if self.passed and name == self.passed[-1]:  # of items(), or of a copy: one by one
            self.passed.pop()
            return
        self.passed = []
        if name not in self.written and name not in self.read:
            self.read[name] = value, _importing()

    def become(self, told: Mapping[str, str]) -> str:
        """Become a worker's environment, with what the modules have written in theirs.

        Returns:
            What they have read that the worker has another value of, in words; empty: nothing.
        """
        from lightck.inplace.generations import LIFE, RUN

        self.__class__ = _Environment
        ours = LIFE, RUN  # which nothing but lightck goes by, and each start has another
        wrong = [
            f"{module} read {name} while it was imported, which was {value or 'not set'} then"
            for name, (value, module) in self.read.items()
            if told.get(name) != value and name not in ours
        ]
        # Who puts all of it back as it was has written nothing of its own.
        now = {name: self.get(name) for name in self.written}
        own = {name: value for name, value in now.items() if value != self.before.get(name)}
        self.clear()
        self.update(told)
        for name, value in own.items() if not wrong else ():
            if value is None:
                self.pop(name, None)
            else:
                self[name] = value
        return "; ".join(wrong)


def _importing() -> str:
    """Return the name of the module that reads the environment."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(_INSTALLED) or not path.startswith(_PYTHONS_OWN):
            return str(frame.f_globals.get("__name__", path))
        frame = frame.f_back
    return "Python"


def _start_anew(arguments: Sequence[str], why: str) -> None:
    """Be a worker that has imported nothing; the process stays the same one."""
    from lightck.events import event

    event("spare_not_used", logging.WARNING, rank=os.environ.get("RANK"), why=why)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or none
            stream.flush()
    os.execv(sys.executable, [sys.executable, "-u", "-m", _WORKER, *arguments])


def main(preload: Sequence[str], folder: str = "") -> None:
    """Import, wait, and become a worker."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return
    sys.path[0] = folder or sys.path[0]
    environment = WatchedEnvironment.watch()
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
    why = environment.become(told["environment"])
    if why:
        _start_anew(told["arguments"], why)
    from lightck.inplace import worker

    worker.run(told["arguments"])


if __name__ == "__main__":
    main([name for name in sys.argv[1].split(",") if name], sys.argv[2])
