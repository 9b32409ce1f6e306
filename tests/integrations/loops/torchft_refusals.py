"""The seam of torchft: the names that are used, and what is refused before anything is touched."""

from __future__ import annotations

import os
from typing import Any

import torch
from torchft import Manager, Optimizer

import lightck
from lightck.integrations.torchft import attach
from support.integrations import probe

for name in ("register_state_dict_fn", "current_step", "state_dict", "load_state_dict"):
    assert callable(getattr(Manager, name)), f"torchft's Manager has no {name}"
net = torch.nn.Linear(2, 2)
adamw = torch.optim.AdamW(net.parameters())
manager: Any = object.__new__(Manager)
assert Optimizer(manager, adamw).optim is adamw


def refused(words: str, *arguments: Any, **named: Any) -> None:
    try:
        attach(*arguments, probe.PATH, **named)
    except lightck.ConfigError as error:
        assert words in str(error), error
        assert not os.path.exists(probe.PATH)
        return
    raise AssertionError(f"not refused: {words}")


os.environ.pop("REPLICA_GROUP_ID", None)
refused("torchft.Manager", net, net, adamw)
refused("REPLICA_GROUP_ID", manager, net, adamw)
refused("letters, digits", manager, net, adamw, group="../other")
os._exit(0)
