"""A process that reads whatever it is given with everything lightck has, in bounded memory."""

from __future__ import annotations

import contextlib
import io
import resource
import signal
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import lightck
from lightck import examine
from lightck.cli.main import main as command
from support import processes
from support.loops import Digests, Loop, mlp, of_live

MEMORY_BYTES = 768 << 20
"""A reader may take this beyond what the process has: a region here has 4 MiB."""
LIMIT_S = 60
"""One verdict may take this long; milliseconds are usual."""


def job() -> tuple[Loop, dict[str, Any]]:
    """A model with tied weights, an optimizer with state, and one extra of every kind."""
    model = mlp(8, 2)
    extras = {
        "counters": {"seen": [1, 2], "best": 0.5, "history": np.arange(4)},
        "dice": torch.Generator().manual_seed(3),
        "numpy": np.random.default_rng(4),
    }
    return Loop(model, torch.optim.AdamW(model.parameters(), lr=0.1), width=8), extras


def train(path: Path, steps: int = 3) -> dict[int, Digests]:
    """Make a region with snapshots of the last two steps; return what each step's holds."""
    loop, extras = job()
    with lightck.attach(loop.model, list(loop.optimizers), path, extras=extras) as handle:
        for _ in range(steps):
            loop.run(1)
            handle.wait()
        loop.note()
    return loop.seen


class Judge:
    """Asks a child, and starts another one when it dies."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.child = processes.start(lambda parent: _serve(parent, path))

    def verdicts(self) -> dict[str, dict[str, Any]]:
        """Return what each reader made of the region; fail when one crashed or took too long."""
        self.child.let_go()
        try:
            found: dict[str, dict[str, Any]] = self.child.receive()
        except AssertionError:
            status = self.child.join()
            self.child = processes.start(lambda parent: _serve(parent, self.path))
            raise AssertionError(f"a reader ended the process with status {status}") from None
        return found

    def close(self) -> None:
        """End the child."""
        self.child.kill()
        self.child.join()


def _serve(parent: processes.Parent, path: Path) -> None:
    warnings.simplefilter("ignore")
    with open("/proc/self/statm") as file:
        present = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (present + MEMORY_BYTES, resource.RLIM_INFINITY))
    loop, extras = job()
    while True:
        parent.pause()
        signal.alarm(LIMIT_S)
        parent.send({name: _judged(reader, path, loop, extras) for name, reader in READERS.items()})
        signal.alarm(0)


Reader = Callable[[Path, Loop, dict[str, Any]], dict[str, Any]]


def _judged(reader: Reader, path: Path, loop: Loop, extras: dict[str, Any]) -> dict[str, Any]:
    try:
        return reader(path, loop, extras)
    except lightck.LightckError as error:
        return {"error": type(error).__name__, "text": str(error)[:2000]}
    except Exception as error:  # noqa: BLE001
        return {"untyped": repr(error)[:2000]}


def _restore(path: Path, loop: Loop, extras: dict[str, Any]) -> dict[str, Any]:
    optimizers = list(loop.optimizers)
    info = lightck.restore(loop.model, optimizers, path, extras=extras)
    return {"step": info and info.step, "digests": of_live(loop.model, optimizers)}


def _load(path: Path, loop: Loop, extras: dict[str, Any]) -> dict[str, Any]:
    state = lightck.load(path)
    for tensor in state["model"].values():
        tensor.sum()
    return {"step": state["step"]}


def _snapshots(path: Path, loop: Loop, extras: dict[str, Any]) -> dict[str, Any]:
    return {"rows": len(lightck.snapshots(path).to_pylist())}


def _verify(path: Path, loop: Loop, extras: dict[str, Any]) -> dict[str, Any]:
    return {"checked": len(examine.check(path))}


def _commands(path: Path, loop: Loop, extras: dict[str, Any]) -> dict[str, Any]:
    """The command line tells everything by its exit status and a text.

    It reads with the same functions: one region in four is enough, and which does not depend on
    chance.
    """
    data = (path / "region-00000.lck").read_bytes()
    if zlib.crc32(data[: 1 << 16]) % 4:
        return {"codes": []}
    out = path.parent / "out.pt"
    codes = []
    for argv in (["inspect"], ["inspect", "--json"], ["verify"], ["ls"], ["export", "--force"]):
        rest = [str(path), str(out)] if argv[0] == "export" else [str(path)]
        text = io.StringIO()
        with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
            codes.append(command([*argv, *rest]))
        assert "Traceback" not in text.getvalue(), text.getvalue()
    return {"codes": codes}


def _attach(path: Path, loop: Loop, extras: dict[str, Any]) -> dict[str, Any]:
    """Goes on training there; last, because it writes."""
    optimizers = list(loop.optimizers)
    with lightck.attach(
        loop.model, optimizers, path, extras=extras, overwrite=True, on_error="raise"
    ) as handle:
        loop.run(1)
        step = handle.step
    return {"step": step}


READERS: dict[str, Reader] = {
    "restore": _restore,
    "load": _load,
    "snapshots": _snapshots,
    "verify": _verify,
    "commands": _commands,
    "attach": _attach,
}
