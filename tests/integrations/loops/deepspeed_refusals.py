"""Engines of DeepSpeed that are refused, that fail within a step, and that begin elsewhere."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

import lightck
from lightck.integrations import deepspeed as ours
from support.integrations import probe

sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]
os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
deepspeed.init_distributed("gloo", verbose=False)


def made(stage: int = 1, **more: Any) -> Any:
    torch.manual_seed(0)
    net = nn.Linear(8, 4)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    config = {
        "train_micro_batch_size_per_gpu": 4, "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage},
    }  # fmt: skip
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30)
    return deepspeed.initialize(
        model=net, optimizer=optimizer, config=config, lr_scheduler=schedule, **more
    )[0]


def refused(engine: Any, *words: str) -> None:
    try:
        ours.attach(engine, probe.PATH)
    except lightck.ConfigError as error:
        assert all(word in str(error) for word in words), error
        return
    raise AssertionError(f"not refused: {words}")


class Failing(torch.optim.lr_scheduler.CosineAnnealingLR):
    """A schedule that fails, behind the update of the inner optimizer."""

    def step(self, epoch: int | None = None) -> None:
        raise RuntimeError("behind the inner update")


def refusals() -> None:
    engine = made()
    ours.require_exact(engine)  # every name that is used is there in this version
    refused(nn.Linear(1, 1), "deepspeed.initialize", "Linear")
    refused(made(stage=3), "ZeRO stage 3", "fully_shard", "engine.save_checkpoint")
    refused(
        made(training_data=torch.utils.data.TensorDataset(torch.zeros(8, 8))),
        "training_data", "ResumableSampler",
    )  # fmt: skip
    answers: dict[str, tuple[Callable[..., Any], str]] = {
        "fp16_enabled": (lambda: True, "bf16"),
        "zero_offload_optimizer": (lambda: {"device": "cpu"}, "offload_optimizer"),
        "data_efficiency_enabled": (lambda: True, "data_efficiency"),
    }
    for name, (answer, word) in answers.items():
        vars(engine)[name] = answer
        refused(engine, word)
        del vars(engine)[name]
    ours._USED = (*ours._USED, "gone")
    refused(engine, "gone", deepspeed.__version__)
    ours._USED = ours._USED[:-1]
    engine.__class__ = deepspeed.PipelineEngine
    refused(engine, "PipelineEngine")


def train(engine: Any, run: Any, steps: int) -> None:
    while engine.global_steps < steps:
        engine.backward(engine(torch.ones(4, 8) * engine.global_steps).square().sum())
        engine.step()


def failures() -> None:
    """Fail behind the inner optimizer's update: no half of a step is ever there afterwards."""
    engine = made()
    try:
        with ours.attach(engine, probe.PATH) as run:
            train(engine, run, 3)
            held = {k: v.clone() for k, v in engine.module.state_dict().items()}
            run.handle.wait(timeout=20)
            engine.lr_scheduler.__class__ = Failing
            train(engine, run, 4)
    except RuntimeError as error:
        assert "behind" in str(error)
    assert "step" not in vars(engine)
    again = made()
    with ours.attach(again, probe.PATH) as run:
        found = run.info and (run.info.step, run.step, again.global_steps, run.info.early)
        assert found and found[:3] == (3, 3, 3), (found, run.info)
        assert again.lr_scheduler.last_epoch == 3
        assert all(torch.equal(held[k], v) for k, v in again.module.state_dict().items())
        train(again, run, 5)
        assert run.step == 5
    assert "step" not in vars(again)
    train(again, None, 6)  # without lightck


def beginnings() -> None:
    """Begin from a checkpoint of DeepSpeed's own: steps count as the engine counts them."""
    engine, own = made(), os.path.join(os.path.dirname(probe.PATH), "own")
    train(engine, None, 4)
    engine.save_checkpoint(own)
    again = made()
    again.load_checkpoint(own)
    path = f"{probe.PATH}-begun"
    with ours.attach(again, path) as run:
        assert run.info is None and run.step == again.global_steps == 4, run.step
        train(again, run, 6)
        assert run.step == 6
    assert lightck.snapshots(path)["step"][0].as_py() == 6


refusals()
failures()
beginnings()
sys.stdout.flush()
os._exit(0)
