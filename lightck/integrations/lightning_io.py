"""Lightning: a `CheckpointIO` that keeps checkpoints in a `Store`, in place of `torch.save`.

    trainer = Trainer(plugins=[LightckCheckpointIO("./run")], ...)

At the path that Lightning gives to a checkpoint lies a small file that says where it is, so that
Lightning finds, lists, links and removes it as any other. It is written once the checkpoint is
committed, and what Lightning removes is removed after that: at every instant one of them is whole.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import torch

import lightck
from lightck.errors import ConfigError, LightckError, NoSnapshotError, RegionBusyError
from lightck.events import event
from lightck.integrations import store_file

try:
    from lightning.fabric.plugins.io import CheckpointIO, TorchCheckpointIO
except ImportError as error:
    raise ImportError(
        "lightck.integrations.lightning_io needs Lightning: pip install 'lightck[lightning]'"
    ) from error

_INDEX = "checkpoints.json"
"""Name of the file, in the store's folder, that has the path and step of every checkpoint."""


class LightckCheckpointIO(CheckpointIO):  # type: ignore[misc]
    """Keep Lightning's checkpoints in a `lightck.Store`.

    A checkpoint is copied when `save_checkpoint` returns, and committed in the background. Each
    that Lightning keeps takes a slot, and so does the one that it resumed from; two more are needed
    to write. Unless told otherwise it has four, for `ModelCheckpoint`'s defaults; `save_top_k=3`
    with `save_last=True` wants `slots=7`. Values that would not come back, such as objects among
    the hyperparameters, are refused by their path.

    Checkpoints of `torch.save` are loaded as Lightning does it itself.

    Thread: that of the trainer.
    """

    def __init__(self, path: str | os.PathLike[str], **settings: Any) -> None:
        """Do nothing yet but check the settings.

        Args:
            path: folder of the store, beside Lightning's own files or elsewhere.
            **settings: as for `lightck.Store`.
        """
        # One is kept, and the one resumed from; one was committed when a crash came before its
        # file; one is written.
        self._path, self._settings = Path(path).absolute(), {"slots": 4, **settings}
        self._store: lightck.Store | None = lightck.Store(self._path, **self._settings)
        self._held: dict[str, ExitStack] = {}
        """The holds on checkpoints' slots, by the path that Lightning gave it."""
        self._resumed = ""
        """Path of the checkpoint that was loaded last."""
        self._removed: list[str] = []
        """Paths to remove once the checkpoint that is under way is committed."""
        self._idle = threading.Event()
        """Set while no checkpoint is under way."""
        self._idle.set()
        self._error: BaseException | None = None
        """The error that the last checkpoint has met, until somebody is told."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        """Save a checkpoint; on return its tensors may change.

        Raises:
            StateError: a value would not come back; its path is named.
            RegionBusyError: Lightning keeps as many checkpoints as there are slots.
            LightckError: what an earlier checkpoint has met.
        """
        if storage_options is not None:
            raise ConfigError(f"storage_options = {storage_options!r}: a store takes none")
        store, name = self._ready(), os.path.abspath(path)
        os.makedirs(os.path.dirname(name), exist_ok=True)  # Lightning may link to it at once
        step = 1 + max(store.steps(), default=0)
        while True:
            try:
                future = store.save(checkpoint, step)
            except RegionBusyError as error:
                # With a code it is another process that owns the region.
                if error.code is None and self._gave_up():
                    continue
                kept = ", ".join(sorted(self._held))
                error.add_note(f"Lightning keeps {len(self._held)} checkpoints here: {kept}")
                raise
            break
        self._idle.clear()
        future.add_done_callback(lambda done: self._committed(name, step, done.exception()))

    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        map_location: Any = None,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Load a checkpoint, on the CPU, every byte checked; nothing in it is executed.

        Raises:
            NoSnapshotError: it is not in its store any more.
            ConfigError: `map_location` is another place than the CPU.
        """
        self._settle()
        said = store_file.read(Path(path))
        if said is None:
            found: dict[str, Any] = TorchCheckpointIO().load_checkpoint(
                os.fspath(path), map_location=map_location, weights_only=weights_only
            )
            return found
        if map_location is not None and torch.device(map_location).type != "cpu":
            raise ConfigError(f"map_location = {map_location!r}: a store loads to the CPU")
        self._resumed = os.path.realpath(path)
        loaded: dict[str, Any] = lightck.Store(said.store).load(said.step)
        return loaded

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Remove a checkpoint, once the one that is under way is committed."""
        self._removed.append(os.path.abspath(path))
        if self._idle.is_set():
            self._remove()

    def teardown(self) -> None:
        """Commit what is under way and give up the store.

        Raises:
            LightckError: what a checkpoint has met.
        """
        self._idle.wait()
        for held in self._held.values():
            held.close()
        self._held.clear()
        store, self._store = self._store, None
        if store is not None:
            store.close()
        self._settle()

    def _ready(self) -> lightck.Store:
        """Return the store once no checkpoint is under way; what Lightning keeps there is held."""
        self._settle()
        if self._store is None:
            self._store = lightck.Store(self._path, **self._settings)
        if not self._held:
            for name, step in self._index()[0].items():
                said = store_file.read(Path(name))
                if said is not None and (said.store, said.step) == (self._path, step):
                    with suppress(NoSnapshotError):
                        self._held[name] = self._store.hold(step)
        return self._store

    def _settle(self) -> None:
        """Wait until no checkpoint is under way, and raise what the last one has met."""
        self._idle.wait()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _committed(self, name: str, step: int, error: BaseException | None) -> None:
        """Write the file of a checkpoint that is committed, and remove what waited for it."""
        try:
            if error is None:
                self._publish(name, step)
                self._remove()
        except (LightckError, OSError) as theirs:
            error = theirs
        finally:
            self._error = error
            self._idle.set()

    def _publish(self, name: str, step: int) -> None:
        assert self._store is not None
        held = self._store.hold(step)
        if name in self._held:
            self._held[name].close()
        self._held[name] = held
        steps, resumed = self._index()
        kept = {n: k for n, k in {**steps, name: step}.items() if n == name or os.path.lexists(n)}
        left = [n for n in {*resumed, self._resumed} if n in kept and n != name]
        store_file.write(self._path / _INDEX, {"steps": kept, "resumed": left})
        store_file.point(Path(name), self._path, step)

    def _remove(self) -> None:
        removed, self._removed = self._removed, []
        for name in removed:
            with suppress(FileNotFoundError):
                os.unlink(name)
            if name in self._held:
                self._held.pop(name).close()

    def _gave_up(self) -> bool:
        """Give up the oldest checkpoint that an earlier run resumed from; return whether one was.

        Lightning removes none that it resumes from, and forgets them: each run would take a slot
        more.
        """
        steps, resumed = self._index()
        left = [n for n in resumed if n in self._held and n != self._resumed]
        if not left:
            return False
        oldest = min(left, key=lambda name: steps.get(name, 0))
        why = "an earlier run resumed from it, and no other slot is free"
        event("checkpoint_removed", logging.WARNING, path=oldest, why=why)
        self._removed.append(oldest)
        self._remove()
        return True

    def _index(self) -> tuple[dict[str, int], list[str]]:
        """Return the step of every checkpoint's path, and the paths that runs resumed from."""
        try:
            said = json.loads((self._path / _INDEX).read_text())
            return dict(said["steps"]), list(said["resumed"])
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return {}, []
