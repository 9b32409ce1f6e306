"""Transformers: a callback that checkpoints `Trainer.train`, and resumes it when it is run again.

    ck = LightckCallback("./run").bind(trainer)
    trainer.train(resume_from_checkpoint=ck.checkpoint())

The Trainer finds its place by itself, from a folder that `checkpoint` makes of the newest snapshot.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch.utils.data import IterableDataset

import lightck
from lightck.config import Config
from lightck.errors import ConfigError
from lightck.inplace import runtime
from lightck.load import load_agreed

try:
    from transformers import TrainerCallback
    from transformers.trainer_callback import ExportableState
except ImportError as error:
    raise ImportError(
        "lightck.integrations.transformers needs transformers: pip install 'lightck[transformers]'"
    ) from error

_STATE, _RANK_STATE = "transformers/state", "transformers/rank"
_OF_RANKS = ("is_local_process_zero", "is_world_process_zero")


class LightckCallback(TrainerCallback):  # type: ignore[misc]
    """Take snapshots of a `Trainer.train` in the background, and go on from the newest.

    A snapshot holds model (of PEFT, too), optimizer, schedule, the Trainer's state with its log,
    the state of its callbacks (an `EarlyStoppingCallback`'s patience), the loss that is still to be
    logged, and the generators. The batches that are behind a resumed run are skipped by the Trainer
    itself; the one that Accelerate had drawn ahead is drawn again as it was. When training ends its
    last step is committed, before the best model is loaded. One line of the log, at INFO, says with
    which step a resumed run goes on.

    Thread: the training thread.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        extras: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        """Do nothing yet: see `bind`.

        Args:
            path: as for `lightck.attach`.
            extras: further state of yours, as for `lightck.attach`.
            **settings: further arguments of `lightck.attach`, `policy=10` for example.
        """
        self.path, self.extras, self.settings = path, dict(extras or {}), settings
        self.handle: lightck.Handle | None = None
        """The handle while the Trainer trains; the closed one after it."""
        self.info: lightck.RestoreInfo | None = None
        """The description of what was restored when training began; None: nothing was there."""
        self._trainer: Any = None
        self._running = False
        self._made: Path | None = None
        """The folder of our own that `checkpoint` has made, until training begins."""

    def bind(self, trainer: Any) -> Self:
        """Add the callback to a Trainer, and return it; a callback alone is given no Trainer."""
        self._trainer = trainer
        trainer.add_callback(self)
        return self

    def checkpoint(self, folder: str | os.PathLike[str] | None = None) -> str | None:
        """Make a folder that `resume_from_checkpoint` takes, of the newest whole snapshot.

        It holds the weights, as `save_pretrained` writes them (of PEFT the adapter's), and
        `trainer_state.json`: all that the Trainer needs to find its place. The rest is restored
        where training begins. With several ranks every rank calls it.

        Args:
            folder: where `checkpoint-STEP` is made, and stays; by default beside the snapshots,
                and only until training begins.

        Returns:
            Its path, or None when there is no snapshot yet.

        Raises:
            ConfigError: `bind` was not called. LightckError: as `lightck.restore` raises them.
        """
        args = self._bound().args
        self._close()
        # What the node's first process wrote is gone where a lost one of its peers is replaced.
        writes = args.local_process_index <= 0 or runtime.joins()
        # Ranks may come here minutes apart, and make the same collectives in every life.
        with args.main_process_first(local=True, desc="lightck: all are here"):
            pass
        found = load_agreed(self.path, tensors=writes)
        made: Path | None = None
        with args.main_process_first(local=True, desc="lightck: checkpoint"):
            if found is not None:
                root = Path(folder) if folder is not None else Path(f"{self._root()}-transformers")
                made = root / f"checkpoint-{found[0]}"
                if folder is None:
                    self._made = root
                if writes and folder is None:
                    shutil.rmtree(root, ignore_errors=True)  # from a run that was killed
                if writes:
                    self._write(found[1], made)
        return str(made) if made is not None else None

    # ---- what the Trainer calls ---------------------------------------------------------------

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Restore and attach: all is made and loaded, and no batch is drawn.

        Raises:
            ConfigError: the training could not be resumed exactly; it says why and what to write.
            LightckError: as `lightck.restore` and `lightck.attach` raise them; the training has not
                begun.
        """
        trainer = self._bound()
        self._close()
        _refuse(trainer, given.get("train_dataloader"))
        log = _Log()
        extras = {
            "transformers/schedule": lightck.at_forward(given["lr_scheduler"]),
            _STATE: lightck.at_forward(_SharedState(trainer, log)),
            _RANK_STATE: lightck.at_forward(_RankState(trainer, log)),
            **self.extras,
        }
        if trainer.accelerator.scaler is not None:
            extras["transformers/scaler"] = trainer.accelerator.scaler
        optimizer = getattr(given["optimizer"], "optimizer", given["optimizer"])
        where = (trainer.model_wrapped, optimizer, self.path)
        begun = state.global_step
        self.info = lightck.restore(*where, extras=extras, step=begun or "exact")
        if self.info is not None and self.info.step != begun:
            raise ConfigError(
                f"the Trainer begins at step {begun}, and the newest snapshot at {self.info.path}"
                f" is of step {self.info.step}: write trainer.train(resume_from_checkpoint="
                "callback.checkpoint()), or take another path for a new run"
            )
        if self._made is not None and (trainer.args.local_process_index <= 0 or runtime.joins()):
            shutil.rmtree(self._made, ignore_errors=True)  # all ranks have read it
        self.handle = lightck.attach(*where, extras=extras, **self.settings)
        self._running = True
        if self.handle.step != begun:  # the Trainer goes on from a checkpoint of its own
            self.handle.replaced(begun)

    def on_evaluate(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Report the metrics to the history, by which `keep="best eval_loss"` chooses."""
        if self._running and self.handle is not None:
            found = given.get("metrics") or {}
            self.handle.report(**{k: v for k, v in found.items() if isinstance(v, int | float)})

    def on_epoch_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Mark the end of the epoch, for policies that count epochs."""
        if self._running and self.handle is not None:
            self.handle.epoch()

    def on_log(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Commit the last step and detach where the Trainer logs its sums: training has ended.

        It loads the best model next, which is no step of this run.
        """
        if "train_runtime" in (given.get("logs") or {}):
            self._close()

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Detach, if that was not done yet."""
        self._close()

    # ---- inside ------------------------------------------------------------------------------

    def _bound(self) -> Any:
        if self._trainer is None:
            raise ConfigError(
                "the callback knows no Trainer: write ck = LightckCallback(path).bind(trainer), and"
                " not Trainer(callbacks=[...])"
            )
        return self._trainer

    def _root(self) -> str:
        return os.fspath(Config.resolve(path=self.path).path)

    def _close(self) -> None:
        """Detach, also from a training that an exception has ended: the Trainer says nothing then.

        Does nothing behind the first call.
        """
        running, self._running = self._running, False
        if running and self.handle is not None:
            self.handle.close()

    def _write(self, snapshot: Mapping[str, Any], made: Path) -> None:
        """Write the folder complete or not at all; it is read by this process only."""
        made.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".lightck-", dir=made.parent) as folder:
            whole = Path(folder) / made.name
            whole.mkdir()
            _save(self._trainer.model, snapshot["model"], whole)
            extras = snapshot["extras"]
            text = _as_json(extras[_STATE], extras[_RANK_STATE]["clock"])
            (whole / "trainer_state.json").write_text(text)
            shutil.rmtree(made, ignore_errors=True)
            whole.rename(made)


class _Log:
    """A Trainer's log as JSON, a row each: written once, what was logged stays as it is."""

    def __init__(self) -> None:
        self.rows: list[str] = []
        """The rows, without times."""
        self.times: list[str] = []
        """The times and rates of each row."""

    def follow(self, history: Sequence[Mapping[str, Any]]) -> None:
        """Add what was logged since."""
        del self.rows[len(history) :], self.times[len(history) :]
        for row in history[len(self.rows) :]:
            times = {key: value for key, value in row.items() if _is_time(key)}
            rest = {key: value for key, value in row.items() if key not in times}
            self.rows.append(json.dumps(rest, sort_keys=True))  # alike in a row that was read
            self.times.append(json.dumps(times, sort_keys=True))


# The two parts of a Trainer's state name all that it keeps to itself and that is used here; so does
# `tests/integrations/test_seams.py`. They are taken at the start of a forward: what was logged and
# evaluated behind the last step is in them, and of the step to come nothing. They are two, since
# what a lost rank would have done before its forward is inferred of what is alike on all ranks.


class _SharedState:
    """The part of a Trainer's state that is alike on all ranks, but for their flags."""

    _KEPT = ("_total_loss_scalar", "_globalstep_last_logged", "_initial_global_step")

    def __init__(self, trainer: Any, log: _Log) -> None:
        self._trainer, self._log = trainer, log

    def state_dict(self) -> dict[str, Any]:
        """Return it in the parts of a `trainer_state.json`, and sums that are kept elsewhere."""
        trainer, state = self._trainer, self._trainer.state
        self._log.follow(state.log_history)
        left = {"log_history", "stateful_callbacks", *_OF_RANKS}
        names = [each.name for each in dataclasses.fields(state) if each.name not in left]
        return {
            "state": {name: getattr(state, name) for name in names},
            "log": self._log.rows,
            "callbacks": [
                [type(each).__name__, json.dumps(each.state())] for each in self._exportable()
            ],
            "sums": {name: getattr(trainer, name) for name in self._KEPT},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what the Trainer has not loaded from the folder of `checkpoint`."""
        for name, value in state["sums"].items():
            setattr(self._trainer, name, value)
        saved = list(state["callbacks"])
        for each in self._exportable()[:-1]:  # the control's flags are for a step that is over
            mine = next((pair for pair in saved if pair[0] == type(each).__name__), None)
            if mine is not None:
                saved.remove(mine)
                for name, value in json.loads(mine[1]).get("attributes", {}).items():
                    setattr(each, name, value)

    def _exportable(self) -> list[Any]:
        """Return the callbacks that keep a state, and the control, as the Trainer does."""
        every = [*self._trainer.callback_handler.callbacks, self._trainer.control]
        return [each for each in every if isinstance(each, ExportableState)]


class _RankState:
    """The part of a Trainer's state that is each rank's own."""

    _KEPT = ("current_flos",)

    def __init__(self, trainer: Any, log: _Log) -> None:
        self._trainer, self._log = trainer, log

    def state_dict(self) -> dict[str, Any]:
        """Return the loss that is still to be logged, sums, and the times of the log's rows."""
        trainer = self._trainer
        self._log.follow(trainer.state.log_history)
        sums = {name: getattr(trainer, name) for name in self._KEPT}
        return {"loss": float(trainer._tr_loss.item()), "sums": sums, "clock": self._log.times}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load it, but for the times, which the Trainer has loaded."""
        for name, value in state["sums"].items():
            setattr(self._trainer, name, value)
        self._trainer._tr_loss.fill_(state["loss"])


def _as_json(state: Mapping[str, Any], times: Sequence[str]) -> str:
    """Return the `trainer_state.json` of a `_SharedState`, with the times of its log's rows."""
    callbacks: dict[str, Any] = {}
    for name, text in state["callbacks"]:
        callbacks.setdefault(name, []).append(json.loads(text))
    every = {
        **state["state"],
        **dict.fromkeys(_OF_RANKS, True),
        "log_history": [
            {**json.loads(row), **json.loads(taken)}
            for row, taken in zip(state["log"], times, strict=True)
        ],
        "stateful_callbacks": {k: v[0] if len(v) == 1 else v for k, v in callbacks.items()},
    }
    return json.dumps(every, indent=2, sort_keys=True) + "\n"


def _is_time(key: str) -> bool:
    """Return whether a value of the log is a time or a rate, by the Trainer's names for them."""
    return key.endswith(("_runtime", "_per_second"))


def _save(model: Any, tensors: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Write the weights as the Trainer's own checkpoints have them."""
    state = dict(tensors)
    if hasattr(model, "save_pretrained"):
        model.save_pretrained(folder, state_dict=state)
        return
    from safetensors.torch import save_file

    save_file({k: v.contiguous().clone() for k, v in state.items()}, folder / "model.safetensors")


def _refuse(trainer: Any, loader: Any) -> None:
    """Refuse what could not be resumed exactly."""
    args = trainer.args
    if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
        raise ConfigError(
            "the Trainer runs DeepSpeed or FSDP, which this callback was not made for: train by DDP"
            " (torchrun), or take the Trainer's own checkpoints"
        )
    if getattr(args, "enable_jit_checkpoint", False):
        raise ConfigError(
            "enable_jit_checkpoint=True answers SIGTERM, and so does lightck: leave it out"
        )
    if args.auto_find_batch_size:
        raise ConfigError("auto_find_batch_size=True begins the training again: give a batch size")
    if args.ignore_data_skip:
        raise ConfigError("ignore_data_skip=True begins the epoch again: leave it out")
    if isinstance(getattr(loader, "dataset", None), IterableDataset):
        raise ConfigError(
            f"the position in a {type(loader.dataset).__name__} could not be found again exactly:"
            " take a dataset with a length and indices"
        )
    batches = getattr(loader, "batch_sampler", None)
    batches = getattr(batches, "batch_sampler", batches)  # Accelerate's share of several ranks
    sampler = getattr(batches, "sampler", None)
    if isinstance(sampler, lightck.ResumableSampler):
        raise ConfigError(
            "the Trainer skips what a resumed run has behind it, and so would the ResumableSampler:"
            " leave the sampler out"
        )
    strategy = getattr(args, "train_sampling_strategy", "random")
    if strategy not in ("random", "sequential"):
        raise ConfigError(
            f"train_sampling_strategy={strategy!r} draws its order from the global generators, and"
            " a resumed run would find another one: take 'random' or 'sequential'"
        )
