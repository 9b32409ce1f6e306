"""The integrations find what they use of a framework beyond its documents, each by its name.

A version that has moved one of them fails here with its name, before any run goes wrong.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.filterwarnings("default")


def lightnings_trainer() -> Any:
    lightning = pytest.importorskip("lightning", reason="SKIPPED: make integrations")
    return lightning.Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip


def transformers_trainer() -> Any:
    transformers = pytest.importorskip("transformers", reason="SKIPPED: make integrations")
    arguments = transformers.TrainingArguments("/dev/shm/unused", use_cpu=True, report_to=[])
    return transformers.Trainer(torch.nn.Linear(1, 1), arguments)


def accelerator() -> Any:
    accelerate = pytest.importorskip("accelerate", reason="SKIPPED: make integrations")
    return accelerate.Accelerator(cpu=True)


@pytest.mark.parametrize(
    "path",
    [
        *("_logger_connector._first_loop_iter", "_logger_connector._current_fx"),
        *("_logger_connector._progress_bar_metrics", "_logger_connector._logged_metrics"),
        *("_logger_connector._callback_metrics", "should_stop", "precision_plugin.state_dict"),
        *("fit_loop.setup_data", "fit_loop._combined_loader", "fit_loop._data_fetcher"),
        *("fit_loop.state_dict", "fit_loop._last_train_dl_reload_epoch", "fit_loop._restarting"),
        *("fit_loop.epoch_progress.current.ready", "fit_loop.epoch_progress.current.completed"),
        *("fit_loop.epoch_loop.reset", "fit_loop.epoch_loop.restarting"),
        *("fit_loop.epoch_loop._results", "fit_loop.epoch_loop._batches_that_stepped"),
        *("fit_loop.epoch_loop.val_loop.setup_data", "fit_loop.__class__.skip"),
        *("_signal_connector.teardown", "_signal_connector.register_signal_handlers"),
        "_signal_connector._original_handlers",
        *("strategy.reduce", "strategy.root_device", "ckpt_path", "lr_scheduler_configs"),
    ],
)
def test_lightnings_trainer_has(path: str) -> None:
    found = lightnings_trainer()
    for name in path.split("."):
        assert hasattr(found, name), f"{path}: no {name} in a {type(found).__name__}"
        found = getattr(found, name)


def test_lightnings_loops_keep_their_progress_under_the_names_that_are_taken_back() -> None:
    state = lightnings_trainer().fit_loop.state_dict()
    assert {"state_dict", "epoch_progress", "epoch_loop.state_dict"} <= state.keys()
    assert state["epoch_loop.batch_progress"].keys() == {"total", "current", "is_last_batch"}
    assert "completed" in state["epoch_loop.batch_progress"]["total"]
    optimization = state["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]
    assert optimization.keys() == {"step", "zero_grad"}
    assert "epoch_loop.val_loop.batch_progress" in state
    assert "_batches_that_stepped" in state["epoch_loop.state_dict"]


def test_lightnings_logged_values_have_the_parts_that_are_kept() -> None:
    pytest.importorskip("lightning", reason="SKIPPED: make integrations")
    from lightning.pytorch.trainer.connectors.logger_connector import result

    found = result._ResultCollection(training=True)
    found.log("training_step", "loss", torch.tensor(1.0), on_step=True, on_epoch=True, batch_size=2)
    (metric,) = found.values()
    for name in ("value", "cumulated_batch_size", "_forward_cache", "_update_count", "has_reset"):
        assert hasattr(metric, name), name
    for name in (
        *("fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph"),
        *("add_dataloader_idx", "dataloader_idx", "metric_attribute", "reduce_fx"),
    ):
        assert hasattr(metric.meta, name), name
    for name in ("should", "rank_zero_only", "group", "fn"):
        assert hasattr(metric.meta.sync, name), name


def test_torchmetrics_metrics_have_the_parts_that_are_kept() -> None:
    torchmetrics = pytest.importorskip("torchmetrics", reason="SKIPPED: make integrations")
    metric = torchmetrics.MeanMetric()
    metric.update(1.0)
    assert metric.metric_state.keys() == {"mean_value", "weight"}
    for name in ("_update_count", "_computed", "_forward_cache"):
        assert hasattr(metric, name), name


def test_lightning_asks_for_callbacks_by_the_entry_point() -> None:
    pytest.importorskip("lightning", reason="SKIPPED: make integrations")
    import inspect

    from lightning.pytorch.trainer.connectors import callback_connector

    assert "lightning.pytorch.callbacks_factory" in inspect.getsource(callback_connector)


@pytest.mark.parametrize(
    "name",
    [
        *("is_deepspeed_enabled", "is_fsdp_enabled", "accelerator", "callback_handler", "control"),
        *("model_wrapped", "current_flos", "state"),
    ],
)
def test_transformers_trainer_has(name: str) -> None:
    assert hasattr(transformers_trainer(), name)


@pytest.mark.parametrize(
    "name",
    ["_tr_loss", "_total_loss_scalar", "_globalstep_last_logged", "_initial_global_step"],
)
def test_transformers_trainer_keeps_the_sum_before_it_calls_on_train_begin(name: str) -> None:
    pytest.importorskip("transformers", reason="SKIPPED: make integrations")
    import inspect

    from transformers import Trainer

    before, called, _ = inspect.getsource(Trainer._inner_training_loop).partition("on_train_begin(")
    assert called and f"self.{name} = " in before


def test_transformers_logs_what_training_took_before_it_loads_the_best_model() -> None:
    pytest.importorskip("transformers", reason="SKIPPED: make integrations")
    import inspect

    from transformers import Trainer

    source = inspect.getsource(Trainer._finalize_training)
    assert 0 < source.index("self.log(metrics)") < source.index("_load_best_model()")


@pytest.mark.parametrize(
    "name",
    [
        *("_models", "_optimizers", "_schedulers", "_custom_objects", "_dataloaders"),
        *("scaler", "distributed_type", "skip_first_batches"),
    ],
)
def test_an_accelerator_has(name: str) -> None:
    assert hasattr(accelerator(), name)


def test_accelerate_s_loaders_have_what_ranks_agree_on() -> None:
    loader = accelerator().prepare(torch.utils.data.DataLoader(range(4), shuffle=True))  # type: ignore
    assert hasattr(loader, "rng_types") and hasattr(loader, "synchronized_generator")


def test_a_loader_of_accelerates_has_what_finds_its_sampler_and_says_how_it_was_made() -> None:
    made = accelerator()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loader = made.prepare(torch.utils.data.DataLoader(range(4), shuffle=True))  # type: ignore
    for name in ("base_dataloader", "use_stateful_dataloader", "batch_sampler", "set_epoch"):
        assert hasattr(loader, name), name
    assert type(loader.batch_sampler.sampler) is torch.utils.data.RandomSampler
