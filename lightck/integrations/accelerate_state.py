"""Accelerate: `save_state` and `load_state` keep models and optimizers in a `Store`.

    states = register(accelerator, "./run")     # after prepare, in both the first run and the next
    accelerator.save_state("out")               # what is large goes to ./run, the rest to out

Accelerate's own hooks take the models. Of an optimizer its `state_dict` and `load_state_dict` are
replaced on the object that `prepare` returned: within `save_state` they give, and within
`load_state` they take, a note of what lies in the store.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Self

import lightck
from lightck.errors import ConfigError, NoSnapshotError
from lightck.integrations import store_file
from lightck.store import SaveFuture

try:
    from accelerate import Accelerator
    from accelerate.utils import DistributedType
except ImportError as error:
    raise ImportError(
        "lightck.integrations.accelerate_state needs Accelerate: pip install 'lightck[accelerate]'"
    ) from error

_NOTE, _FILE = "lightck.Store", "lightck.json"
"""Key of an optimizer's state that lies in a store; file that says under which step."""
_PLAIN = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)
"""Kinds of jobs whose state is whole on every process."""


def register(
    accelerator: Accelerator, path: str | os.PathLike[str], **settings: Any
) -> AcceleratedStates:
    """Let `accelerator.save_state` and `load_state` keep models and optimizers in a store.

    Schedulers, scaler, generators and registered objects stay in Accelerate's folder, which it
    finds them in by itself; what lies there names the step in the store. The newest `slots`
    states can be loaded (2); Accelerate's older folders cannot.

    Args:
        accelerator: after `prepare`.
        path: folder of the store.
        **settings: as for `lightck.Store`.

    Returns:
        What is to be closed at the end; a context manager.

    Raises:
        ConfigError: nothing was prepared yet, or the state is not whole on a process.
    """
    return AcceleratedStates(accelerator, lightck.Store(path, **settings), Path(path))


class AcceleratedStates:
    """The states of an `Accelerator` in a store; see `register`."""

    def __init__(self, accelerator: Accelerator, store: lightck.Store, path: Path) -> None:
        """Register the hooks."""
        kind = accelerator.distributed_type
        if kind not in _PLAIN:
            raise ConfigError(
                f"accelerate's {kind.value} has its state in parts, which a store does not put"
                " together: use lightck.attach"
            )
        if not accelerator._models:
            raise ConfigError("nothing is prepared: call accelerator.prepare(...) before register")
        self.store, self._path, self._accelerator = store, path, accelerator
        self._optimizers = list(accelerator._optimizers)
        self._noted: set[int] = set()
        """Optimizers whose state `save_state` is about to ask for: it gets a note."""
        self._loaded: list[dict[str, Any]] = []
        """States that `load_state` has found in the store, for the optimizers."""
        self.future: SaveFuture | None = None
        """The future of the last `save_state`'s commit; None before, and where others save."""
        self._hooks = [
            accelerator.register_save_state_pre_hook(self._save),
            accelerator.register_load_state_pre_hook(self._load),
        ]
        for i, optimizer in enumerate(self._optimizers):
            vars(optimizer).update(
                state_dict=partial(self._state_of, i, optimizer.state_dict),
                load_state_dict=partial(self._load_into, i, optimizer.load_state_dict),
            )

    def close(self) -> None:
        """Give Accelerate its own way back, and close the store; idempotent.

        Raises what `Store.close` raises.
        """
        for hook in self._hooks:
            hook.remove()
        for optimizer in self._optimizers:
            del vars(optimizer)["state_dict"], vars(optimizer)["load_state_dict"]
        self._hooks, self._optimizers = [], []
        self.store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _save(self, models: list[Any], weights: list[Any], folder: str) -> None:
        """Save models and optimizers, which are then no more Accelerate's to write."""
        optimizers = [each.optimizer.state_dict() for each in self._optimizers]
        if self._accelerator.is_main_process:
            if self.future is not None:
                self.future.result()  # its number is taken once it is committed
            step = 1 + max(self.store.steps(), default=0)
            # A run that is killed before the commit leaves a folder whose number is taken anew.
            name = secrets.token_hex(8)
            state = {"models": list(weights), "optimizers": optimizers, "name": name}
            self.future = self.store.save(state, step)
            store_file.point(Path(folder, _FILE), self._path, step, name)
        weights.clear()
        self._noted = set(range(len(self._optimizers)))

    def _load(self, models: list[Any], folder: str) -> None:
        """Load what the folder says is in the store; a folder that names none is Accelerate's."""
        try:
            if self.future is not None:
                self.future.result()
        finally:
            self._accelerator.wait_for_everyone()  # the main process alone knows when it is there
        file = Path(folder, _FILE)
        said = store_file.read(file)
        self._loaded = []
        if said is None:
            return
        state = self.store.load(said.step)
        if state.get("name") != said.name:
            raise NoSnapshotError(
                f"{file} names step {said.step} of the store at {self._path}, which is the state of"
                " another save_state: this one's was not committed when its run was killed; load"
                " the folder of an earlier one"
            )
        for model, weights in zip(models, state["models"], strict=True):
            model.load_state_dict(weights)
        models.clear()
        self._loaded = state["optimizers"]

    def _state_of(self, i: int, real: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        if i in self._noted:
            self._noted.discard(i)
            return {_NOTE: os.fspath(self._path)}
        return real()

    def _load_into(
        self, i: int, real: Callable[[dict[str, Any]], None], state: dict[str, Any]
    ) -> None:
        if _NOTE not in state:
            real(state)
        elif i < len(self._loaded):
            real(self._loaded[i])
        else:
            raise ConfigError(
                f"optimizer {i}'s state is in the store at {state[_NOTE]}, and {_FILE} is not in"
                " the folder that is loaded: load the folder that save_state has written"
            )
