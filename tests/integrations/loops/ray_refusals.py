"""The seam of Ray Train: the names that are used, and a call outside of its workers."""

from __future__ import annotations

import os

import ray.train
import torch

import lightck
import lightck.integrations.ray as ours
from support.integrations import probe

for name in ("get_preemption_info", "get_context", "report"):
    assert callable(getattr(ray.train, name)), f"ray.train has no {name}"
net = torch.nn.Linear(2, 2)
try:
    ours.attach(net, torch.optim.AdamW(net.parameters()), probe.PATH)
except lightck.ConfigError as error:
    assert "TorchTrainer" in str(error) and "lightck.attach" in str(error), error
else:
    raise AssertionError("not refused")
assert not os.path.exists(probe.PATH)
os._exit(0)
