"""Names that the fragments on a page take for granted: small models, data, a run that has ended."""

from __future__ import annotations

_EVERY = """
import os
import torch
from pathlib import Path
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lightck

torch.manual_seed(0)
path = "./lightck-run"
extras = {}
data = TensorDataset(torch.randn(64, 8), torch.randint(4, (64,)))
"""

_TRAINED = """
model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.Linear(16, 4))
optimizer = torch.optim.AdamW(model.parameters())

def train(steps=1):
    for _ in range(steps):
        nn.functional.cross_entropy(model(torch.randn(4, 8)), torch.randint(4, (4,))).backward()
        optimizer.step()
        optimizer.zero_grad()
"""

_LIGHTNING = """
import lightning

class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(8, 4)

    def training_step(self, batch, index):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())

module = Module()
"""

SETUP = {
    "every page": _EVERY,
    "cli": _TRAINED
    + """
with lightck.attach(model, optimizer, path, trace="run.json"):
    train(5)
""",
    "history": _TRAINED,
    "data": """
epochs = max_iters = 2

class GPT(nn.Linear):
    def forward(self, x, y):
        logits = super().forward(x)
        return logits, nn.functional.cross_entropy(logits, y)

def get_batch(split):
    return torch.randn(4, 8), torch.randint(4, (4,))

model = GPT(8, 4)
optimizer = torch.optim.AdamW(model.parameters())
""",
    "distributed": """
net = nn.Linear(8, 4)
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}
""",
    "failures": _TRAINED,
    "migration": _TRAINED
    + _LIGHTNING
    + """
loader = DataLoader(data, batch_size=16)
schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
""",
    "optimizers": _TRAINED,
    "store": _TRAINED + _LIGHTNING,
    "frameworks": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.Linear(16, 4))

    def forward(self, x, labels=None):
        logits = self.layers(x)
        if labels is None:
            return logits
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}

class Rows(TensorDataset):
    '''As the Trainer wants them: dicts.'''
    def __getitem__(self, i):
        x, y = super().__getitem__(i)
        return {"x": x, "labels": y}

rows = Rows(*data.tensors)
""",
}

DIGESTS = """
import hashlib
import signal

def told(optimizer, *_):
    if type(optimizer).__name__ == "AcceleratedOptimizer":  # the one inside of it tells, too
        return
    parameters = (each for group in optimizer.param_groups for each in group["params"])
    state = b"".join(each.detach().numpy().tobytes() for each in parameters)
    with open("digests", "a") as file:
        file.write(hashlib.sha256(state).hexdigest() + "\\n")
    told.steps += 1
    if told.steps == int(os.environ.get("KILL", 0)):
        os.kill(os.getpid(), signal.SIGKILL)

told.steps = 0
from torch.optim.optimizer import register_optimizer_step_post_hook

register_optimizer_step_post_hook(told)
"""
"""Write a digest of the parameters behind every update, and die behind update `$KILL`."""
