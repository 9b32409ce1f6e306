"""DeepSpeed's engine as people use it: ZeRO, accumulation, clipping, a schedule, validation."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import sys
from typing import Any

import deepspeed
import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import lightck
from support.integrations import probe
from support.integrations.probe import ON, RANK, Data, Net, here, param, tell

logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
# It takes minutes to compile.
sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]
if "WORLD_SIZE" not in os.environ:
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
deepspeed.init_distributed("gloo", verbose=False)
torch.manual_seed(3)
accumulate, half = param("accumulate", 1), param("half", False)
# A batch norm in bf16 does not validate on the CPU.
net: nn.Module = Net()
if half:
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 4))
optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
config: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": accumulate,
    "gradient_clipping": 1.0, "bf16": {"enabled": half},
    "zero_optimization": {"stage": param("stage", 0)}, "zero_allow_untested_optimizer": True,
}  # fmt: skip
if param("grad_accum_dtype", None):
    config["data_types"] = {"grad_accum_dtype": param("grad_accum_dtype", None)}
schedule: Any = None
if param("schedule", "deepspeed") == "deepspeed":
    warm = {"warmup_min_lr": 0.001, "warmup_max_lr": 0.01, "warmup_num_steps": 20}
    config["scheduler"] = {"type": "WarmupLR", "params": warm}
else:
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30)
engine, *_ = deepspeed.initialize(
    model=net, optimizer=optimizer, config=config, lr_scheduler=schedule
)
data = Data(augment=param("augment", False))
sampler = lightck.ResumableSampler(data, seed=1)
loader = DataLoader(data, batch_size=4, sampler=sampler, num_workers=param("workers", 0))
held = DataLoader(Data(10), batch_size=4)
torch.manual_seed(7 + RANK)
np.random.seed(RANK)
random.seed(RANK)
kind = torch.bfloat16 if half else torch.float32

run: Any = contextlib.nullcontext()
if ON:
    from lightck.integrations.deepspeed import attach

    run = attach(engine, probe.PATH, extras={"data": sampler})
    probe.note("restored", run.info and run.info.step)
handle = run.handle if ON else None
with run:
    for epoch in range(sampler.epoch, 3):
        for x, y in loader:
            at = engine.micro_steps
            tell(f"batch {at}", [x, y])
            loss = F.cross_entropy(engine(x.to(kind)).float(), y)
            here(f"forward {at}", handle)
            engine.backward(loss)
            engine.step()
            tell(f"loss {at}", loss)
            tell(f"counters behind {at}", [engine.global_steps, engine.global_samples,
                 engine.skipped_steps, engine.get_lr()])  # fmt: skip
            if ON:
                assert handle.step == engine.global_steps, (
                    handle.step,
                    engine.global_steps,
                    at,
                    run.info,
                )
        engine.eval()
        for i, (x, y) in enumerate(held):
            here(f"validation {epoch}.{i}", handle)
            with torch.no_grad():
                tell(f"validation {epoch}.{i}", F.cross_entropy(engine(x.to(kind)).float(), y))
        engine.train()
groups = [p for group in optimizer.param_groups for p in group["params"]]
tell("masters", [p.detach().double().sum() for p in groups])
probe.end(net)
sys.stdout.flush()
os._exit(0)  # its threads would be waited for
