"""Lightning: a `CheckpointIO` that keeps checkpoints in a `Store`, in place of `torch.save`.

    trainer = Trainer(plugins=[LightckCheckpointIO("./run")], ...)

At the path that Lightning gives to a checkpoint lies a small file that says where it is, so that
Lightning finds, lists, links and removes it as any other. It is written once the checkpoint is
committed, and what Lightning removes is removed after that: at every instant one of them is whole.
"""

from __future__ import annotations

import json
import os
import threading
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import torch

import lightck
from lightck.errors import ConfigError, LightckError, NoSnapshotError, RegionBusyError
from lightck.integrations import store_file

try:
    from lightning.fabric.plugins.io import CheckpointIO, TorchCheckpointIO
except ImportError as error:
    raise ImportError(
        "lightck.integrations.lightning_io needs Lightning: pip install 'lightck[lightning]'"
    ) from error

_INDEX = "checkpoints.json"
"""Name of the file, in the store's folder, that has the path and number of every checkpoint."""


class LightckCheckpointIO(CheckpointIO):  # type: ignore[misc]
    """Keep Lightning's checkpoints in a `lightck.Store`.

    A checkpoint is copied when `save_checkpoint` returns, and committed in the background. Each
    that Lightning keeps takes a slot, and two more are needed to write: `slots=3`, which is what it
    has unless told otherwise, for `ModelCheckpoint`'s defaults, `slots=6` for `save_top_k=3` with
    `save_last=True`. Values that would not come back, such as objects among the hyperparameters,
    are refused by their path.

    Checkpoints of `torch.save` are loaded as Lightning does it itself.

    Thread: that of the trainer.
    """

    def __init__(self, path: str | os.PathLike[str], **settings: Any) -> None:
        """Do nothing yet but check the settings.

        Args:
            path: folder of the store, beside Lightning's own files or elsewhere.
            **settings: as for `lightck.Store`.
        """
        # One is kept, one was committed when a crash came before its file, one is written.
        self._path, self._settings = Path(path).absolute(), {"slots": 3, **settings}
        self._store: lightck.Store | None = lightck.Store(self._path, **self._settings)
        self._held: dict[str, ExitStack] = {}
        """The holds on checkpoints' slots, by the path that Lightning gave it."""
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
        number = 1 + max(store.steps(), default=0)
        try:
            future = store.save(checkpoint, number)
        except RegionBusyError as error:
            kept = ", ".join(sorted(self._held))
            error.add_note(f"Lightning keeps {len(self._held)} checkpoints here: {kept}")
            raise
        self._idle.clear()
        future.add_done_callback(lambda done: self._committed(name, number, done.exception()))

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
        self._ready()
        said = store_file.read(Path(path))
        if said is None:
            found: dict[str, Any] = TorchCheckpointIO().load_checkpoint(
                os.fspath(path), map_location=map_location, weights_only=weights_only
            )
            return found
        if map_location is not None and torch.device(map_location).type != "cpu":
            raise ConfigError(f"map_location = {map_location!r}: a store loads to the CPU")
        where, number = said
        loaded: dict[str, Any] = lightck.Store(where).load(number)
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
        self._raise()

    def _ready(self) -> lightck.Store:
        """Return the store once no checkpoint is under way; what Lightning keeps there is held."""
        self._idle.wait()
        self._raise()
        if self._store is None:
            self._store = lightck.Store(self._path, **self._settings)
        if not self._held:
            for name, number in self._index().items():
                if store_file.read(Path(name)) == (self._path, number):
                    with suppress(NoSnapshotError):
                        self._held[name] = self._store.hold(number)
        return self._store

    def _raise(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _committed(self, name: str, number: int, error: BaseException | None) -> None:
        """Write the file of a checkpoint that is committed, and remove what waited for it."""
        try:
            if error is None:
                self._publish(name, number)
                self._remove()
        except (LightckError, OSError) as theirs:
            error = theirs
        finally:
            self._error = error
            self._idle.set()

    def _publish(self, name: str, number: int) -> None:
        assert self._store is not None
        held = self._store.hold(number)
        if name in self._held:
            self._held[name].close()
        self._held[name] = held
        known = {**self._index(), name: number}
        kept = {n: k for n, k in known.items() if n == name or os.path.lexists(n)}
        store_file.write(self._path / _INDEX, kept)
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        store_file.point(Path(name), self._path, number)

    def _remove(self) -> None:
        removed, self._removed = self._removed, []
        for name in removed:
            with suppress(FileNotFoundError):
                os.unlink(name)
            if name in self._held:
                self._held.pop(name).close()

    def _index(self) -> dict[str, int]:
        try:
            said = json.loads((self._path / _INDEX).read_text())
        except (FileNotFoundError, ValueError):
            return {}
        return said if isinstance(said, dict) else {}
