"""A checkpoint manager for torchtitan's Trainer.

    config.checkpoint = LightckCheckpointer.Config(enable=True, folder="lightck")

Snapshots are taken by hooks, at the interval that the config says; the calls of the Trainer only
begin and end that. Tried with torchtitan 0.3.0.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

from torch import nn

import lightck
from lightck.errors import ConfigError, NoSnapshotError
from lightck.handle import Handle
from lightck.types import RestoreInfo

try:
    from torchdata.stateful_dataloader import StatefulDataLoader
    from torchtitan.components.checkpointer import (
        DATALOADER,
        LR_SCHEDULER,
        BaseCheckpointManager,
        CheckpointManager,
    )
except ImportError as error:
    raise ImportError(
        "lightck.integrations.torchtitan needs torchtitan 0.3 or newer:"
        " pip install 'lightck[torchtitan]'"
    ) from error


class LightckCheckpointer(BaseCheckpointManager):  # type: ignore[misc]
    """A checkpoint manager of torchtitan's that takes snapshots in the background.

    `load` restores the newest whole snapshot below the folder, or the one of `load_step`, and
    attaches: from then on a snapshot is taken every `interval` steps, and when training fails.
    Where there is none, what `initial_load_path` names is loaded as torchtitan's own manager does.
    `close` commits the last step, whole: model, optimizer, schedule, data and Trainer.

    Attributes:
        handle: the handle, from `load` on; None with `load_only`.
        info: what `load` has restored; None where the run begins.

    Thread: the training thread of each rank.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseCheckpointManager.Config):  # type: ignore[misc]
        """The shared settings of torchtitan's managers, but for those that this one refuses."""

        interval: int = 1
        """A snapshot every so many steps."""

        settings: str = ""
        """Path of a TOML file with lightck's settings, or name of a preset; empty: the defaults."""

        def __post_init__(self) -> None:
            """Check what torchtitan checks, and refuse what this manager does not do.

            Raises:
                ConfigError: names the setting and what to do instead.
            """
            BaseCheckpointManager.Config.__post_init__(self)
            for name, instead in _REFUSED.items():
                if getattr(self, name):
                    raise ConfigError(f"LightckCheckpointer.Config({name}=True): {instead}")

    def __init__(
        self,
        config: LightckCheckpointer.Config,
        *,
        dataloader: Any,
        model_parts: list[nn.Module],
        optimizers: Any,
        lr_schedulers: Any,
        states: dict[str, Any],
        sd_adapter: Any = None,
        base_folder: str = "",
    ) -> None:
        """Hold what torchtitan's Trainer gives; nothing is touched before `load`."""
        self.enable = config.enable
        self.save_future: Future[int] | None = None
        self.handle: Handle | None = None
        self.info: RestoreInfo | None = None
        if not self.enable:
            return
        self._config = config
        self._path = os.path.join(base_folder, config.folder)
        self._models, self._optimizers = list(model_parts), list(optimizers)
        # The Trainer counts, and draws its batches, at the top of an iteration.
        self._extras = {name: lightck.at_step(each) for name, each in states.items()}
        if dataloader is not None:
            _give_plain_state(dataloader)
            self._extras[DATALOADER] = lightck.at_step(dataloader)
        self._extras[LR_SCHEDULER] = lightck.at_forward(lr_schedulers)
        unknown = set(config.exclude_from_loading) - self._extras.keys()
        if unknown:
            raise ConfigError(
                f"exclude_from_loading: {sorted(unknown)[0]!r} cannot be left out; what can is"
                f" {', '.join(sorted(self._extras))}"
            )
        self._given = {
            "dataloader": dataloader, "model_parts": model_parts, "optimizers": optimizers,
            "lr_schedulers": lr_schedulers, "states": states, "sd_adapter": sd_adapter,
            "base_folder": base_folder,
        }  # fmt: skip

    def _load(self, step: int = -1) -> bool:
        """Restore and attach; return whether there was something to load."""
        where, config = (self._models, self._optimizers, self._path), self._config
        os.makedirs(os.path.dirname(os.path.abspath(self._path)), exist_ok=True)
        kept = {k: v for k, v in self._extras.items() if k not in config.exclude_from_loading}
        self.info = lightck.restore(*where, extras=kept, step="exact" if step < 0 else step)
        if self.info is None and step >= 0:
            raise NoSnapshotError(f"{self._path}: there is no snapshot of step {step}")
        loaded = self.info is not None or self._load_initial()
        if not config.load_only:
            self.handle = lightck.attach(
                *where,
                extras=self._extras,
                policy=config.interval,
                config=config.settings or None,
            )
            begun = getattr(self._given["states"].get("train_state"), "step", 0)
            if self.info is None and begun:  # what it began from had the Trainer's state in it
                self.handle.replaced(begun)
        return loaded

    def _load_initial(self) -> bool:
        """Load what the run is to begin from, by torchtitan's own manager."""
        config = self._config
        if not (config.initial_load_path or config.initial_load_in_hf):
            return False
        known = [each.name for each in fields(BaseCheckpointManager.Config)]
        same = {name: getattr(config, name) for name in known} | {"keep_latest_k": 0}
        states = dict(self._given["states"])
        manager = CheckpointManager(
            CheckpointManager.Config(**same), **(self._given | {"states": states})
        )
        return bool(manager.load())

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        """Take a snapshot that the interval does not take; return whether the step has one."""
        if self.handle is None:
            return False
        first = curr_step == 1 and self._config.enable_first_step_checkpoint
        if last_step or first:
            self.save_future = self.handle.snapshot()
        return bool(last_step or first or curr_step % self._config.interval == 0)

    def _maybe_wait_for_staging(self) -> None:
        """Do nothing: the optimizer's step waits for the copies of what it changes."""

    def _wait_for_saving(self) -> None:
        future, self.save_future = self.save_future, None
        if future is not None:
            future.result()

    def _close(self) -> None:
        """Commit the last step; behind an exception, save the last complete one."""
        if self.handle is None:
            return
        error = sys.exception()  # torchtitan closes where it has caught it
        handle, self.handle = self.handle, None
        handle.__exit__(
            type(error) if error else None, error, getattr(error, "__traceback__", None)
        )


_REFUSED: Mapping[str, str] = {
    "create_seed_checkpoint": "make the seed with torchtitan's CheckpointManager, and give its"
    " folder as initial_load_path",
    "last_save_in_hf": "write the model with `lightck export` afterwards, or with torchtitan's"
    " CheckpointManager",
}
"""Settings that this manager does not follow, and what to do instead."""


def _give_plain_state(loader: Any) -> None:
    """Let a loader of torchtitan's give its position as plain values.

    Its own `state_dict` packs them with pickle; nothing that is read from a region is unpickled.
    """
    if isinstance(loader, StatefulDataLoader):
        for name in ("state_dict", "load_state_dict"):
            vars(loader)[name] = partial(getattr(StatefulDataLoader, name), loader)
