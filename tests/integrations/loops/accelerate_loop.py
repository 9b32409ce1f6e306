"""A loop of Accelerate's as people write it: accumulation, clipping, a schedule, validation."""

from __future__ import annotations

import contextlib
import random
import warnings
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch.nn import functional as F
from torch.utils.data import DataLoader

import lightck
from support.integrations import probe
from support.integrations.probe import ON, Data, Net, here, param, tell

warnings.filterwarnings("ignore", module="accelerate|torch")


class Seen:
    """A user's own object, registered for checkpointing."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def state_dict(self) -> dict[str, Any]:
        return {"losses": self.losses}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.losses = list(state["losses"])


class Plain:
    """The loop's own lines without lightck."""

    handle = None
    step = 0

    def epochs(self, count: int) -> Any:
        return range(count)

    def batches(self, loader: Any) -> Any:
        return loader


set_seed(3)
accelerator = Accelerator(
    cpu=True,
    gradient_accumulation_steps=param("accumulate", 1),
    step_scheduler_with_optimizer=False,
    dataloader_config=DataLoaderConfiguration(
        use_seedable_sampler=param("seedable", False),
        use_stateful_dataloader=param("stateful", False),
    ),
)
data = Data(augment=param("augment", False))
sampler = lightck.ResumableSampler(data, seed=1) if param("sampler", False) else None
loader: Any = DataLoader(
    data, 4, sampler=sampler, shuffle=sampler is None, num_workers=param("workers", 0)
)
model: Any = Net()
optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
schedule: Any = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
if not param("unprepared", False):
    loader = accelerator.prepare(loader)
validation = DataLoader(Data(10), 4, shuffle=True)
seen = Seen()
accelerator.register_for_checkpointing(seen)
set_seed(5 + probe.RANK)
ck: Any = Plain()
if ON:
    from lightck.integrations.accelerate import Lightck

    ck = Lightck(accelerator, probe.PATH)
    probe.note("restored", ck.info and ck.info.step)
with ck if ON else contextlib.nullcontext():
    for epoch in ck.epochs(3):
        for x, y in ck.batches(loader):
            name = f"{epoch}.{len(seen.losses)}"
            with accelerator.accumulate(model):
                tell(f"batch {name}", [x, y])
                loss = F.cross_entropy(model(x), y)
                here(f"forward {len(seen.losses)}", ck.handle)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            tell(f"loss {name}", loss)
            seen.losses.append(loss.item())
        schedule.step()
        model.eval()
        with torch.no_grad():
            for i, (x, y) in enumerate(validation):
                here(f"validation {epoch}.{i}", ck.handle)
                tell(f"validation {epoch}.{i}", F.cross_entropy(model(x), y))
                torch.rand(1), np.random.random(), random.random()  # as sampling would
        model.train()
        tell(f"epoch {epoch}", [schedule.get_last_lr()[0], len(seen.losses)])
tell("seen", seen.losses)
probe.end(accelerator.unwrap_model(model))
