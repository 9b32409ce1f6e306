"""A tiny training for `lightck chaos`; what it is told to do wrong, it does."""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lightck
from lightck.types import Failure


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--path", default=None)
    parser.add_argument("--policy", type=int, default=1)
    parser.add_argument("--forgets", action="store_true", help="a counter is no extra")
    parser.add_argument("--waits", action="store_true", help="for each due step's commit")
    parser.add_argument("--evaluates", action="store_true", help="and sets a rate, after each step")
    parser.add_argument("--hang-s", type=float, help="what is a hang outside of a collective")
    parser.add_argument("--hang-exit-s", type=float, help="after which a hang ends the process")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    model: nn.Module = nn.Sequential(
        nn.Linear(8, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)
    )
    if dist.is_initialized():
        model = DistributedDataParallel(model)
        torch.manual_seed(1 + dist.get_rank())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    forgotten = {"seen": 0.0}
    rank = os.environ.get("RANK", "0")
    settings: dict[str, Any] = {}
    if options.hang_s is not None:
        settings["failure"] = Failure(hang_s=options.hang_s, hang_exit_s=options.hang_exit_s)

    def pending(step: int) -> None:
        """Do what the loop has to do behind a step; again, after a restore, it changes nothing."""
        optimizer.param_groups[0]["lr"] = 1e-2 / (1 + step)
        model.eval()
        with torch.no_grad():
            score = float(model(torch.ones(2, 8)).sum())
        model.train()
        losses.write(f"{rank} evaluation-{step} {score.hex()}\n".encode())

    lightck.restore(model, optimizer, options.path)
    with (
        open(os.environ["LIGHTCK_CHAOS_LOSSES"], "ab", buffering=0) as losses,
        lightck.attach(model, optimizer, options.path, policy=options.policy, **settings) as handle,
    ):
        # No counter of its own: just in time, one might be saved before it is counted up.
        while True:
            if options.evaluates and handle.step:
                pending(handle.step)
            if handle.step >= options.steps:
                break
            x = torch.randn(16, 8)
            optimizer.zero_grad()
            loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
            forgotten["seen"] += 0.01 if options.forgets else 0.0
            (loss * (1 + forgotten["seen"])).backward()
            optimizer.step()
            losses.write(f"{rank} {handle.step} {float(loss.detach()).hex()}\n".encode())
            if options.waits and handle.step % options.policy == 0:
                handle.wait(handle.step)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
