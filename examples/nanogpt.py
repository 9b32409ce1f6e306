"""A loop like nanoGPT's: the next batch is fetched during a step, gradients are accumulated.

    python examples/nanogpt.py    # end it in the middle: Ctrl-C, or kill -9
    python examples/nanogpt.py    # it goes on, with the losses of a run that nothing ended

What differs from a loop without lightck are the five lines that end in `# lightck`.
"""

import argparse
import math
import os
import sysconfig
from pathlib import Path

import numpy as np
import torch
from torch import nn

import lightck
from lightck.cli.demo.train import GPT

BATCH, BLOCK, ACCUMULATE, EVALUATE, RATE, LEAST_RATE, WARMUP = 8, 64, 2, 50, 1e-3, 1e-4, 10
TEXT = np.fromfile(Path(sysconfig.get_paths()["stdlib"]) / "typing.py", np.uint8)
SPLITS = {"train": TEXT[: -len(TEXT) // 10], "val": TEXT[-len(TEXT) // 10 :]}


def get_batch(split: str, source: torch.Generator | None = None) -> tuple[torch.Tensor, ...]:
    places = torch.randint(len(SPLITS[split]) - BLOCK - 1, (BATCH, 1), generator=source)
    pieces = torch.from_numpy(SPLITS[split].astype(int))[places + torch.arange(BLOCK + 1)]
    return pieces[:, :-1], pieces[:, 1:]


@torch.no_grad()
def validate(model: nn.Module) -> float:
    model.eval()
    own = torch.Generator().manual_seed(0)  # moves no number that the training draws
    losses = [float(model(*get_batch("val", own))) for _ in range(4)]
    model.train()
    return sum(losses) / len(losses)


def rate(step: int, steps: int) -> float:
    decay = LEAST_RATE + (RATE - LEAST_RATE) * (1 + math.cos(math.pi * step / steps)) / 2
    return min(decay, RATE * (step + 1) / WARMUP)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    path = os.environ.get("LIGHTCK_PATH", "./run-nanogpt")
    parser.add_argument("--path", default=path, help="where the snapshots are (%(default)s)")
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps (%(default)s)")
    args = parser.parse_args()
    torch.manual_seed(1337)
    model = GPT(layers=2, width=64)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    best = {"validation": math.inf}
    batches = lightck.Prefetched(lambda: get_batch("train"))  # lightck
    extras = {"data": batches, "best": lightck.at_forward(best)}  # lightck
    info = lightck.restore(model, optimizer, args.path, extras=extras)  # lightck
    print("begins" if info is None else f"goes on after step {info.step}", flush=True)
    x, y = next(batches)
    with lightck.attach(model, optimizer, args.path, policy=10, extras=extras) as handle:  # lightck
        while (step := handle.step) < args.steps:  # lightck
            if step % EVALUATE == 0:
                best["validation"] = min(best["validation"], validate(model))
            for group in optimizer.param_groups:
                group["lr"] = rate(step, args.steps)
            for _ in range(ACCUMULATE):
                loss = model(x, y)
                x, y = next(batches)  # nanoGPT: get_batch("train")
                (loss / ACCUMULATE).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            print(f"step {handle.step} loss {loss.item()}", flush=True)
    print(f"done after step {args.steps}. Next: `lightck ls {args.path}` shows what is kept,")
    print(f"`lightck rm {args.path}` removes it; the best validation was {best['validation']:.3f}")


if __name__ == "__main__":
    main()
