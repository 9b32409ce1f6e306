"""DeepSpeed's engine under `lightck run`: says its losses, and kills itself where it is told to.

    deepspeed_in_place.py FOLDER STAGE STEPS [RANK@STEP...]

The first life of a rank ends by SIGKILL in the forward behind that step. Each rank appends to
FOLDER/<rank>.said, and writes FOLDER/<rank>.state at its end.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lightck
from lightck.integrations.deepspeed import attach

# It takes minutes to compile.
sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]


class Net(nn.Module):
    """Some layers; its forward is where a rank dies."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(8, 200), nn.BatchNorm1d(200), nn.Dropout(0.2), nn.Linear(200, 200),
            nn.Tanh(), nn.Linear(200, 2),
        )  # fmt: skip
        self.fatal = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute, or end here."""
        if self.fatal:
            os.kill(os.getpid(), signal.SIGKILL)
        found: torch.Tensor = self.layers(x)
        return found


def main(folder: Path, stage: int, steps: int, deaths: set[str]) -> None:
    """Train."""
    deepspeed.init_distributed("gloo", verbose=False)
    rank = dist.get_rank()
    first = not any((folder / f"{rank}.{each}").exists() for each in ("said",))
    said = (folder / f"{rank}.said").open("a", buffering=1)
    print("pid", os.getpid(), file=said)
    torch.manual_seed(3)
    data = TensorDataset(torch.randn(96, 8), torch.randint(0, 2, (96,)))
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    warm = {"warmup_min_lr": 0.001, "warmup_max_lr": 0.01, "warmup_num_steps": 20}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0, "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True, "scheduler": {"type": "WarmupLR", "params": warm},
    }  # fmt: skip
    engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, config=config)
    sampler = lightck.ResumableSampler(data, shuffle=True, seed=1)
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    torch.manual_seed(7 + rank)
    with attach(engine, folder / "regions", extras={"data": sampler}) as run:
        print("restored", run.info and run.info.step, file=said)
        while engine.global_steps < steps:
            for x, y in loader:
                net.fatal = first and f"{rank}@{engine.global_steps}" in deaths
                loss = nn.functional.cross_entropy(engine(x), y)
                engine.backward(loss)
                engine.step()
                print("loss", engine.micro_steps, float(loss).hex(), file=said)
                if engine.global_steps >= steps:
                    break
    state = {"model": net.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state, folder / f"{rank}.state")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), {*sys.argv[4:]})
