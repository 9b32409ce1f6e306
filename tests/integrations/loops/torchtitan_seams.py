"""The seam of torchtitan: what its base class asks of a manager, and what ours makes of it."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

torch._utils._get_available_device_type = lambda: "cpu"  # type: ignore[attr-defined]

from torchtitan.components.checkpointer import BaseCheckpointManager, CheckpointManager  # noqa: E402
from torchtitan.components.optimizer import (  # noqa: E402
    LRSchedulersContainer,
    OptimizersContainer,
    default_adamw,
)

import lightck  # noqa: E402
from lightck.integrations.torchtitan import LightckCheckpointer  # noqa: E402
from support.integrations import probe  # noqa: E402

os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
folder = Path(probe.PATH).parent

ASKED = {"_load", "_save", "_maybe_wait_for_staging", "_wait_for_saving", "_close"}
SETTINGS = {
    *("enable", "folder", "interval", "initial_load_path", "initial_load_model_only"),
    *("initial_load_in_hf", "initial_load_in_hf_quantized", "last_save_model_only"),
    *("last_save_in_hf", "export_dtype", "keep_latest_k", "load_step", "exclude_from_loading"),
    *("enable_first_step_checkpoint", "create_seed_checkpoint", "load_only"),
}
assert BaseCheckpointManager.__abstractmethods__ == ASKED, "torchtitan asks for something else"
now = {each.name for each in dataclasses.fields(BaseCheckpointManager.Config)}
assert now == SETTINGS, f"torchtitan's settings have changed: {sorted(now ^ SETTINGS)}"
assert LightckCheckpointer.Config(enable=True)._owner is LightckCheckpointer


class State:
    """The Trainer's own."""

    def __init__(self) -> None:
        self.step = 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]


class Job:
    """A model, its optimizer and a manager."""

    def __init__(self, config: Any, seed: int) -> None:
        torch.manual_seed(seed)
        self.model, self.state = nn.Linear(8, 4), State()
        chosen = default_adamw(lr=0.01)
        chosen.implementation = "foreach"
        self.optimizers = OptimizersContainer(chosen, model_parts=[self.model])
        self.schedule = LRSchedulersContainer.Config(warmup_steps=3).build(
            optimizers=self.optimizers, training_steps=10
        )
        self.manager = config.build(
            dataloader=None, model_parts=[self.model], optimizers=self.optimizers,
            lr_schedulers=self.schedule, states={"train_state": self.state}, sd_adapter=None,
            base_folder=str(folder),
        )  # fmt: skip

    def train(self, steps: int) -> None:
        while self.state.step < steps:
            self.state.step += 1
            self.optimizers.zero_grad()
            self.model(torch.ones(2, 8)).square().sum().backward()
            self.manager.maybe_wait_for_staging()
            self.optimizers.step()
            self.schedule.step()
            self.manager.save(self.state.step, last_step=self.state.step == steps)


def refusals() -> None:
    for name in ("create_seed_checkpoint", "last_save_in_hf"):
        try:
            LightckCheckpointer.Config(enable=True, **{name: True})
        except lightck.ConfigError as error:
            assert name in str(error)
        else:
            raise AssertionError(f"not refused: {name}")
    try:
        Job(LightckCheckpointer.Config(enable=True, exclude_from_loading=["optimizer"]), 0)
    except lightck.ConfigError as error:
        assert "exclude_from_loading" in str(error) and "train_state" in str(error)
    else:
        raise AssertionError("not refused")


def beginnings() -> None:
    """Begin from a checkpoint of torchtitan's own; then from our snapshots, in each way."""
    base = Job(CheckpointManager.Config(enable=True, folder="base", interval=1,
                                        last_save_model_only=True), 1)  # fmt: skip
    base.train(1)
    base.manager.close()
    initial = str(folder / "base" / "step-1")
    config = {"enable": True, "folder": "ours", "initial_load_path": initial}
    first = Job(LightckCheckpointer.Config(**config), 2)
    assert first.manager.load() and first.manager.info is None and first.state.step == 0
    assert torch.equal(first.model.weight, base.model.weight)
    first.train(4)
    first.manager.maybe_wait_for_saving()
    assert first.manager.save_future is None and first.manager.handle.last_committed_step == 4
    first.manager.close()

    again = Job(LightckCheckpointer.Config(**config), 3)
    assert again.manager.load() and again.manager.info.step == again.state.step == 4
    assert torch.equal(again.model.weight, first.model.weight)
    again.manager.close()

    fresh = Job(LightckCheckpointer.Config(**config, exclude_from_loading=["train_state"]), 3)
    assert fresh.manager.load() and fresh.state.step == 0
    fresh.manager.close()

    base = Job(CheckpointManager.Config(enable=True, folder="whole", interval=2), 1)
    base.train(3)
    base.manager.close()
    whole = config | {"folder": "from-whole", "initial_load_path": str(folder / "whole" / "step-2")}
    begun = Job(LightckCheckpointer.Config(**whole, initial_load_model_only=False, interval=2), 2)
    assert begun.manager.load() and begun.state.step == begun.manager.handle.step == 2
    begun.train(5)
    begun.manager.close()
    assert lightck.snapshots(folder / "from-whole")["step"][0].as_py() == 5

    reader = Job(LightckCheckpointer.Config(**config, load_only=True), 3)
    assert reader.manager.load(step=4) and reader.manager.handle is None
    assert not reader.manager.save(5)
    off = Job(LightckCheckpointer.Config(enable=False), 3)
    assert not off.manager.load()
    try:
        Job(LightckCheckpointer.Config(enable=True, folder="nothing"), 3).manager.load(step=7)
    except lightck.NoSnapshotError as error:
        assert "step 7" in str(error)
    else:
        raise AssertionError("nothing was there")


refusals()
beginnings()
os._exit(0)
