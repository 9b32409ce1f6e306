"""Lightning: a callback that checkpoints `trainer.fit`, and resumes it when it is run again.

    trainer = Trainer(callbacks=[LightckCallback("./run")], ...)

Nothing else is needed if the training loader has a `ResumableSampler`. With the environment
variable `LIGHTCK_LIGHTNING=1` not even that line: Lightning finds `callbacks` by its entry point.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator, Mapping
from typing import Any

import torch

import lightck
from lightck.errors import ConfigError, StateError

try:
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import Checkpoint
    from lightning.pytorch.utilities.exceptions import SIGTERMException
except ImportError as error:
    raise ImportError(
        "lightck.integrations.lightning needs Lightning: pip install 'lightck[lightning]'"
    ) from error

_REFUSED = {
    "FSDPStrategy": "shards by FSDP1, which lightck cannot restore: take ModelParallelStrategy",
    "DeepSpeedStrategy": "runs DeepSpeed: take DDPStrategy, or lightck.integrations.deepspeed",
    "XLAStrategy": "runs on XLA, which lightck does not follow",
}
"""Strategies that cannot be restored exactly, and what to do."""
_SAMPLER = "DataLoader(data, sampler=lightck.ResumableSampler(data, seed=1), ...)"


class LightckCallback(Checkpoint):  # type: ignore[misc]
    """Take snapshots of a `trainer.fit` in the background, and go on from the newest.

    Where `fit` starts, the newest whole snapshot below `path` is restored, if there is one: model,
    optimizers, schedulers, loops and their counters, logged metrics, other callbacks, the data
    module, the precision plugin, generators and the position in the training data. Training goes
    on with the next batch, as if it had not been interrupted; one line of the log, at INFO, says
    with which step. When `fit` ends, its last step is committed.

    As Lightning's own `ModelCheckpoint` it is a checkpoint callback: Lightning adds no default one
    beside it, and refuses `enable_checkpointing=False`.

    Thread: the training thread.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        data: Any = None,
        extras: Mapping[str, Any] | None = None,
        boundary: int | None = None,
        **settings: Any,
    ) -> None:
        """Do nothing yet: everything begins with `fit`.

        Args:
            path: as for `lightck.attach`.
            data: what knows the position in the training data; by default found in the training
                loader: its `ResumableSampler`, or the loader itself if it is a stateful one.
            extras: further state of yours, as for `lightck.attach`.
            boundary: in manual optimization with several optimizers, which one's step ends a step
                (its place in `configure_optimizers`).
            **settings: further arguments of `lightck.attach`, `policy=10` for example.
        """
        self.path, self.data, self.boundary, self.settings = path, data, boundary, settings
        self.extras = None if extras is None else dict(extras)
        self.handle: lightck.Handle | None = None
        """The handle while `fit` trains; the closed one after it."""
        self.info: lightck.RestoreInfo | None = None
        """The description of what was restored when `fit` began last; None: nothing was there."""
        self._trained: Any = None
        """The module that this callback has followed before, in this process."""
        self._followed: dict[str, Any] = {}
        """All extras, of the `fit` that runs."""
        self._running = False

    @property
    def state_key(self) -> str:
        """Return the name of this callback in Lightning's own checkpoints, in which it has none."""
        return "lightck"

    # ---- what Lightning calls ----------------------------------------------------------------

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Restore: the model is set up, and no loop has begun.

        Raises:
            ConfigError: the training could not be resumed exactly; it says why and what to write.
            LightckError: as `lightck.restore` raises it; the training has not begun.
        """
        inside = _Loops(trainer)
        self._refuse(trainer, pl_module)
        self._followed = {**self._data(inside), **self._state(inside), **(self.extras or {})}
        if self._trained is not pl_module:
            self.info = lightck.restore(
                trainer.strategy.model, trainer.optimizers, self.path, extras=self._followed,
                step="exact",
            )  # fmt: skip
            if self.info is not None:
                self._resumed(trainer, inside)
        if inside.has_ended():
            self._attach(trainer, pl_module)  # `on_train_start` will not come

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Attach: Lightning's set-up is over, in which the ranks meet several times.

        A replacement that joins the others in place goes through it alone.

        Raises:
            LightckError: as `lightck.attach` raises it; the training has not begun.
        """
        # lightck's handlers end the process as the signal would have, where they are the last to be
        # called. Were they not, Lightning would end it, with status 0, as if all steps were made.
        signals = trainer._signal_connector
        signals.teardown()
        self._attach(trainer, pl_module)
        signals.register_signal_handlers()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Report what was logged to the history, by which `keep="best val_loss"` chooses."""
        if self._running and self.handle is not None:
            self.handle.report(**{k: float(v) for k, v in trainer.callback_metrics.items()})

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Mark the end of the epoch, for policies that count epochs."""
        if self._running and self.handle is not None:
            self.handle.epoch()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Commit the last step and detach, before Lightning moves the model off its device."""
        self._close(trainer)

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Detach where `fit` had nothing to train."""
        self._close(trainer)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Save the last complete step for the exception, which goes on.

        Lightning ends a training that has got SIGTERM between two batches, where the loops have
        done all that belongs to the last one, or within a validation, where they have not.
        """
        done = isinstance(exception, SIGTERMException) and trainer.training
        if done and self._running and self.handle is not None:
            try:
                self.handle.snapshot()  # exact; what is saved for an exception would be early
            except Exception as error:  # noqa: BLE001 - also of a user's state_dict
                exception.add_note(f"lightck: {error!r}")
        self._close(trainer, exception)

    # ---- inside ------------------------------------------------------------------------------

    def _attach(self, trainer: Any, module: Any) -> None:
        if self.boundary is not None:
            self.settings["boundary"] = trainer.optimizers[self.boundary]
        self.handle = lightck.attach(
            trainer.strategy.model, trainer.optimizers, self.path, extras=self._followed,
            **self.settings,
        )  # fmt: skip
        self._trained, self._running = module, True

    def _close(self, trainer: Any, error: BaseException | None = None) -> None:
        if self._running and self.handle is not None:
            self._running = False
            with _without_handlers(trainer):
                self.handle.__exit__(type(error) if error else None, error, getattr(
                    error, "__traceback__", None))  # fmt: skip

    def _resumed(self, trainer: Any, inside: _Loops) -> None:
        if trainer.ckpt_path is not None:
            assert self.info is not None
            raise ConfigError(
                f"trainer.fit(ckpt_path={str(trainer.ckpt_path)!r}) would load over step"
                f" {self.info.step}, which lightck has restored from {self.info.path}: leave"
                " ckpt_path out, or take another path for a run that begins from the file"
            )
        inside.go_on()

    def _refuse(self, trainer: Any, module: Any) -> None:
        strategy = next(
            (
                name
                for each in type(trainer.strategy).__mro__
                if (name := each.__name__) in _REFUSED
            ),
            None,
        )
        if strategy is not None:
            raise ConfigError(f"the {strategy} {_REFUSED[strategy]}")
        several = len(trainer.optimizers) > 1 and "boundary" not in self.settings
        if several and self.boundary is None:
            raise ConfigError(
                f"configure_optimizers returns {len(trainer.optimizers)} optimizers, and which of"
                " them ends a step cannot be known: LightckCallback(..., boundary=0) says that the"
                " first does"
            )
        if self.extras is not None:
            return
        for each in (module, *trainer.callbacks):
            base = pl.LightningModule if each is module else pl.Callback
            if type(each).on_save_checkpoint is not base.on_save_checkpoint:
                raise ConfigError(
                    f"{type(each).__name__}.on_save_checkpoint keeps state in Lightning's"
                    " checkpoint files only: keep it in state_dict and load_state_dict, or give"
                    " what training goes on from as LightckCallback(..., extras={...}); extras={}"
                    " says that it is nothing of that kind"
                )

    def _data(self, inside: _Loops) -> dict[str, Any]:
        """Return the extras that know the position in the training data."""
        loaders = inside.loaders()  # in any case: the loop goes on with what it makes here
        if self.data is not None:
            return {"data": self.data}
        if len(loaders) != 1:
            raise ConfigError(
                f"there are {len(loaders)} training loaders, and which of them give batches at a"
                " time cannot be followed: give one loader over a ConcatDataset, or"
                " LightckCallback(..., data=...) what knows the position in them"
            )
        loader, trainer = loaders[0], inside.trainer
        sampler = getattr(loader, "sampler", None)
        inner = getattr(getattr(loader, "batch_sampler", None), "sampler", sampler)
        if isinstance(inner, lightck.ResumableSampler):
            if trainer.reload_dataloaders_every_n_epochs:
                raise ConfigError(
                    "reload_dataloaders_every_n_epochs makes loaders anew: make one"
                    " ResumableSampler for all of them, and give it as"
                    " LightckCallback(..., data=sampler)"
                )
            return {"data": inner}
        if hasattr(loader, "load_state_dict") and trainer.world_size == 1:
            return {"data": loader}
        if _wraps_resumable(sampler):
            raise ConfigError(
                "Lightning has put its DistributedSampler around the ResumableSampler, which shares"
                " the data out itself: Trainer(..., use_distributed_sampler=False)"
            )
        raise ConfigError(
            f"the position in a {type(loader).__name__} with a {type(inner).__name__} could not be"
            f" found again in the middle of an epoch: write {_SAMPLER}"
            + (" and Trainer(..., use_distributed_sampler=False)" if trainer.world_size > 1 else "")
            + ", or give LightckCallback(..., data=...) what knows it"
        )

    def _state(self, inside: _Loops) -> dict[str, Any]:
        trainer = inside.trainer
        extras: dict[str, Any] = {
            "lightning/loops": lightck.at_forward(inside),
            "lightning/logged": lightck.at_forward(_Logged(trainer)),
            "lightning/callbacks": lightck.at_forward(_Callbacks(trainer, self)),
        }
        for i, config in enumerate(trainer.lr_scheduler_configs):
            extras[f"lightning/scheduler/{i}"] = config.scheduler
        module = trainer.datamodule
        if module is not None and type(module).state_dict is not pl.LightningDataModule.state_dict:
            extras["lightning/datamodule"] = lightck.at_forward(module)
        if trainer.precision_plugin.state_dict():
            extras["lightning/precision"] = lightck.at_forward(trainer.precision_plugin)
        return extras


def callbacks() -> list[Any]:
    """Return a callback if `LIGHTCK_LIGHTNING` is 1, else none; Lightning calls it by its name.

    The path is `LIGHTCK_PATH`, as for `lightck.attach`.
    """
    return [LightckCallback()] if os.environ.get("LIGHTCK_LIGHTNING") == "1" else []


@contextlib.contextmanager
def _without_handlers(trainer: Any) -> Iterator[None]:
    """Take Lightning's signal handlers off, which lie over lightck's.

    These could not go else, and Lightning would bring them back behind the fit: the next one's
    would lie over them, and so on. Not behind the fit, and not while it ignores Ctrl-C.
    """
    signals = trainer._signal_connector
    if not signals._original_handlers or signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        yield
        return
    signals.teardown()
    try:
        yield
    finally:
        signals.register_signal_handlers()


class _Callbacks:
    """The state of all callbacks but lightck's, as Lightning keeps it in its checkpoints."""

    def __init__(self, trainer: Any, own: LightckCallback) -> None:
        self._trainer, self._own = trainer, own

    def _others(self) -> list[Any]:
        return [each for each in self._trainer.callbacks if each is not self._own]

    def state_dict(self) -> dict[str, Any]:
        states = ((each.state_key, each.state_dict()) for each in self._others())
        return {key: _packed(state) for key, state in states if state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for each in self._others():
            if each.state_key in state:
                each.load_state_dict(_unpacked(state[each.state_key]))


# These two classes alone know Lightning's inside; `tests/integrations/test_seams.py` names every
# attribute that they use. They are two, since what a lost rank would have done before its forward
# is inferred of what is alike on all ranks, which logged values hardly are.


class _Loops:
    """The loops of a trainer, whose state is alike on all ranks.

    The state is taken at the start of a forward. By then the loops have counted the batch that this
    forward is of, which a resumed run draws again: what is under way counts as not begun.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self._fit = trainer.fit_loop
        self._epoch = self._fit.epoch_loop

    def loaders(self) -> list[Any]:
        """Return the training loaders as the loop iterates over them, made now if need be."""
        self._fit.setup_data()
        combined = self._fit._combined_loader
        return [] if combined is None else list(combined.flattened)

    def has_ended(self) -> bool:
        """Tell whether there is nothing left to train, as Lightning finds again in a moment."""
        return bool(self._fit.skip)

    def go_on(self) -> None:
        """Make the loops go on from the restored state when they are run next."""
        # The fetcher's iterator is from before the restore.
        iter(self._fit._data_fetcher)
        epochs = self._fit.epoch_progress.current
        if epochs.ready == epochs.completed:  # between two epochs, or at the end
            self._fit._restarting = self._epoch.restarting = False
            return
        epoch = self._epoch

        def reset() -> None:
            """Leave the loop where it was restored, once, in place of its own reset.

            Its own takes what comes next for a validation that was not made.
            """
            del epoch.reset
            epoch.restarting = False

        epoch.reset = reset

    def state_dict(self) -> dict[str, Any]:
        """Return the counters of all loops."""
        loops = self._fit.state_dict()
        loops["state_dict"].pop("combined_loader", None)
        return {
            "loops": loops,
            "stopping": self.trainer.should_stop,
            "reloaded": self._fit._last_train_dl_reload_epoch,
            "seen": dict(self._epoch.val_loop._seen_batches_per_dataloader),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` returned."""
        loops = {name: _undone(name, value) for name, value in state["loops"].items()}
        self._fit.load_state_dict(loops)
        self.trainer.should_stop = state["stopping"]
        self._fit._last_train_dl_reload_epoch = state["reloaded"]
        if state["seen"]:
            self._epoch.val_loop.setup_data()
            self._epoch.val_loop._seen_batches_per_dataloader.update(state["seen"])


class _Logged:
    """Values that `self.log` has gathered in this epoch, to be reduced at its end, and those shown.

    They are each rank's own.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self._connector = trainer._logger_connector

    def state_dict(self) -> dict[str, Any]:
        """Return it, in plain values."""
        connector = self._connector
        first = connector._first_loop_iter
        return {
            "first": None if first else first,  # of the batch that is drawn again
            "fx": connector._current_fx,
            "shown": _packed(dict(connector._progress_bar_metrics)),
            "logged": _packed(dict(connector._logged_metrics)),
            "monitored": _packed(dict(connector._callback_metrics)),
            "results": {name: self._result(name, each) for name, each in self._results().items()},
            "metrics": {name: _metric_state(each) for name, each in self._metrics().items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` returned."""
        connector = self._connector
        connector._first_loop_iter, connector._current_fx = state["first"], state["fx"]
        connector._progress_bar_metrics = _unpacked(state["shown"])
        connector._logged_metrics = _unpacked(state["logged"])
        connector._callback_metrics = _unpacked(state["monitored"])
        metrics = self._metrics()
        for name, each in state["metrics"].items():
            _load_metric(metrics[name], each)
        self._results().clear()
        for name, each in state["results"].items():
            self._results()[name] = self._made(each)

    def _results(self) -> Any:
        return self.trainer.fit_loop.epoch_loop._results

    def _metrics(self) -> dict[str, Any]:
        """Return the metrics of torchmetrics in the module, by name."""
        from torchmetrics import Metric

        named = self.trainer.lightning_module.named_modules()
        return {name: each for name, each in named if isinstance(each, Metric)}

    def _result(self, name: str, result: Any) -> dict[str, Any]:
        meta = result.meta
        if meta.sync.group is not None:
            raise StateError(
                f"self.log({meta.name!r}, sync_dist_group=...) reduces over a group, which lightck"
                " cannot find again: leave the group out, or log without on_epoch",
                path=f"lightning/logged/{name}",
            )
        state: dict[str, Any] = {
            each: getattr(meta, each)
            for each in (
                *("fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph"),
                *("add_dataloader_idx", "dataloader_idx", "metric_attribute"),
            )
        }
        return {
            "meta": state,
            "reduce": meta.reduce_fx.__name__,
            "sync": {"_should": meta.sync.should, "rank_zero_only": meta.sync.rank_zero_only},
            "is_tensor": result.is_tensor,
            "has_reset": result.has_reset,
            "value": _packed(result.value) if result.is_tensor else None,
            "size": _packed(getattr(result, "cumulated_batch_size", None)),
            "step": _packed(result._forward_cache),
            "updates": result._update_count,
        }

    def _made(self, state: dict[str, Any]) -> Any:
        from lightning.pytorch.trainer.connectors.logger_connector import result as own

        meta = own._Metadata(**state["meta"], reduce_fx=getattr(torch, state["reduce"]))
        meta.sync = own._Sync(fn=self.trainer.strategy.reduce, **state["sync"])
        made = own._ResultMetric(meta, state["is_tensor"])
        if state["is_tensor"]:
            made.value = _unpacked(state["value"])
            if state["size"] is not None:
                made.cumulated_batch_size = _unpacked(state["size"])
        else:
            made.value = self._metrics()[state["meta"]["metric_attribute"]]
        made._forward_cache, made.has_reset = _unpacked(state["step"]), state["has_reset"]
        made._update_count = state["updates"]
        return made.to(self.trainer.strategy.root_device)


def _undone(name: str, value: Any) -> Any:
    """Return a loop's progress with what was under way taken back."""
    if "val_loop" in name or not name.endswith("progress") or name == "epoch_progress":
        return value
    value = {k: _undone("progress", v) if isinstance(v, dict) else v for k, v in value.items()}
    if "completed" in value:
        return dict.fromkeys(value, value["completed"])
    if "is_last_batch" in value:
        value["is_last_batch"] = False
    return value


def _metric_state(metric: Any) -> dict[str, Any]:
    return {
        "states": _packed(dict(metric.metric_state)),
        "updates": metric._update_count,
        "step": _packed(metric._forward_cache),
    }


def _load_metric(metric: Any, state: dict[str, Any]) -> None:
    for name, value in _unpacked(state["states"]).items():
        setattr(metric, name, value)
    metric._update_count, metric._computed = state["updates"], None
    metric._forward_cache = _unpacked(state["step"])


def _packed(tree: Any) -> Any:
    """Return a tree with single numbers in place of tensors of one: their names would change."""
    if isinstance(tree, torch.Tensor) and tree.ndim == 0:
        return {"@number": [tree.item(), tree.dtype, tree.device]}
    if isinstance(tree, dict):
        return {key: _packed(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)([_packed(each) for each in tree])
    return tree


def _unpacked(tree: Any) -> Any:
    """Undo `_packed`."""
    if isinstance(tree, dict):
        if tree.keys() == {"@number"}:
            value, dtype, device = tree["@number"]
            return torch.tensor(value, dtype=dtype, device=device)
        return {key: _unpacked(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)([_unpacked(each) for each in tree])
    return tree


def _wraps_resumable(sampler: Any) -> bool:
    """Tell whether Lightning has put its own sampler around a `ResumableSampler`."""
    inner = getattr(getattr(sampler, "dataset", None), "_sampler", None)
    return isinstance(inner, lightck.ResumableSampler)
