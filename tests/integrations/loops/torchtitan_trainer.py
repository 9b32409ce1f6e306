"""torchtitan's `Trainer.train` and `train_step`, its optimizers, schedule and loader, on a CPU.

Only the Trainer's `__init__` is not torchtitan's own: that builds one of its large models.
"""

from __future__ import annotations

import contextlib
import os
import random
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

torch._utils._get_available_device_type = lambda: "cpu"  # type: ignore[attr-defined]

from torchtitan import trainer as titan  # noqa: E402
from torchtitan.components.checkpointer import CheckpointManager  # noqa: E402
from torchtitan.components.dataloader import ParallelAwareDataloader  # noqa: E402
from torchtitan.components.optimizer import (  # noqa: E402
    LRSchedulersContainer,
    OptimizersContainer,
    default_adamw,
)
from torchtitan.distributed.parallel_dims import ParallelDims  # noqa: E402
from torchtitan.tools.profiler import Profiler  # noqa: E402

from support.integrations import probe  # noqa: E402
from support.integrations.probe import ON, RANK, here, param, tell  # noqa: E402

STEPS = 14
WORLD = int(os.environ.get("WORLD_SIZE", "1"))
if WORLD == 1:
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
else:
    dist.init_process_group("gloo")
titan.dist_utils.set_pg_timeouts = lambda **_: None  # for devices
titan.time.sleep = lambda _: None  # type: ignore[attr-defined]


class Rows(torch.utils.data.IterableDataset[Any]):
    """An endless stream of rows with a state, as torchtitan's datasets are."""

    def __init__(self) -> None:
        self.i = 0

    def __iter__(self) -> Any:
        while True:
            source = torch.Generator().manual_seed(10 * self.i + RANK)
            self.i += 1
            x = torch.randn(8, generator=source)
            if param("augment", False):
                x = x + 0.1 * torch.randn(8) + 0.1 * float(np.random.random()) * random.random()
            yield {"input": x}, torch.randint(0, 4, (), generator=source)

    def state_dict(self) -> dict[str, Any]:
        return {"i": self.i}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.i = state["i"]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 16), nn.ReLU()
        )
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.layers(x))


class Metrics:
    """Metrics that tell what the Trainer tells them."""

    def __init__(self) -> None:
        self.ntokens_since_last_log, self.data_loading_times = 0, []

    def should_log(self, step: int) -> bool:
        return True

    def log(self, step: int, mean: float, most: float, norm: float, extra_metrics: Any) -> None:
        tell(f"step {step}", [mean, most, norm, extra_metrics])

    def close(self) -> None:
        tell("closed", True)


class Validator:
    """Validates every fifth step."""

    def should_validate(self, step: int) -> bool:
        return step % 5 == 0

    def validate(self, parts: list[nn.Module], step: int) -> None:
        parts[0].eval()
        for i in range(2):
            here(f"validation {step}.{i}", handle())
            with torch.no_grad():
                tell(f"validation {step}.{i}", parts[0](torch.full((2, 8), 0.1 * i)).sum())
        parts[0].train()


class Trainer(titan.Trainer):
    """Everything but what builds it is torchtitan's."""

    def __init__(self, config: Any) -> None:
        self.config, self.device = config, torch.device("cpu")
        self.parallel_dims = ParallelDims(
            dp_replicate=1, dp_shard=WORLD, cp=1, tp=1, pp=1, ep=1, world_size=WORLD,
            spmd_backend="default",
        )  # fmt: skip
        torch.manual_seed(3)
        model = Model()
        mesh = init_device_mesh("cpu", (WORLD,))
        for each in (model.layers, model.head, model):
            fully_shard(each, mesh=mesh)
        self.model_parts = [model]
        chosen = default_adamw(lr=0.01)
        chosen.implementation = "foreach"
        self.optimizers = OptimizersContainer(chosen, model_parts=self.model_parts)
        self.lr_schedulers = LRSchedulersContainer.Config(warmup_steps=6).build(
            optimizers=self.optimizers, training_steps=STEPS
        )
        self.metrics_processor, self.validator = Metrics(), Validator()
        self.gc_handler = SimpleNamespace(run=lambda step: None)
        self.step = self.ntokens_seen = 0
        self.gradient_accumulation_steps = param("accumulate", 1)
        self.num_pipeline_parallel_microbatches = 1
        self.dataloader = ParallelAwareDataloader(
            Rows(), RANK, WORLD, batch_size=4, num_workers=param("workers", 0),
            snapshot_every_n_steps=config.checkpoint.interval * param("accumulate", 1),
        )  # fmt: skip
        self.checkpointer = config.checkpoint.build(
            dataloader=self.dataloader,
            model_parts=self.model_parts,
            optimizers=self.optimizers,
            lr_schedulers=self.lr_schedulers,
            states={"train_state": self},
            sd_adapter=None,
            base_folder=os.path.dirname(probe.PATH),
        )
        self.train_context = contextlib.nullcontext
        self.fwd_bwd_fn = self._forward_backward_body
        self.loss_fn = lambda pred, y, count: (
            F.cross_entropy(pred, y, reduction="sum") / count,
            None,
        )

    def post_dataloading_process(self, input_dict: Any, labels: Any) -> Any:
        self.ntokens_seen += labels.numel()
        tell(f"batch {self.ntokens_seen}", [input_dict["input"], labels])
        return input_dict["input"], labels, {}

    def forward_backward_step(self, **given: Any) -> Any:
        self.micro = getattr(self, "micro", 0) + 1
        if self.micro % self.gradient_accumulation_steps == 0:  # between the micro-batches, too
            here(f"forward {self.step}", handle())
        return super().forward_backward_step(**given)


def handle() -> Any:
    """The handle, while lightck is on."""
    return checkpointer.handle if ON else None


if ON:
    from lightck.integrations.torchtitan import LightckCheckpointer

    checkpoint: Any = LightckCheckpointer.Config(enable=True, folder="snapshots")
else:
    checkpoint = CheckpointManager.Config(enable=False, interval=1)
plain = SimpleNamespace
trainer = Trainer(
    plain(
        checkpoint=checkpoint,
        training=plain(steps=STEPS, disable_cuda_graphs=True, max_norm=1.0),
        validator=plain(enable=True),
        profiler=Profiler.Config(),
        comm=plain(train_timeout_seconds=100),
        dump_folder=os.path.dirname(probe.PATH),
    )
)
checkpointer = trainer.checkpointer
torch.manual_seed(7 + RANK)
np.random.seed(RANK)
random.seed(RANK)
if ON:
    load = checkpointer.load

    def loaded(step: int = -1) -> bool:
        found: bool = load(step)
        probe.note("restored", checkpointer.info and checkpointer.info.step)
        return found

    checkpointer.load = loaded
trainer.train()
trainer.close()
dist.barrier()
state = {k: v.full_tensor() for k, v in trainer.model_parts[0].state_dict().items()}
probe.end(SimpleNamespace(state_dict=lambda: state))
sys.stdout.flush()
os._exit(0)
