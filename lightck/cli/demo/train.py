"""A small GPT learns the sources of Python's standard library; `lightck demo` kills this training.

    python -m lightck.cli.demo.train    # end it in the middle: Ctrl-C, or kill -9
    python -m lightck.cli.demo.train    # it goes on, with the losses of a run that nothing ended

It is an example to read and to copy, a loop as without lightck but for the lines below (1) to (3).
Under torchrun it trains on several ranks.
"""

import argparse
import os
import random
import sysconfig
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import lightck

_BATCH, _BLOCK, _BYTES = 8, 64, 256


class GPT(nn.Module):
    """A decoder-only transformer over bytes; its head is tied to the token embedding."""

    def __init__(self, layers: int = 4, width: int = 128, heads: int = 4) -> None:
        super().__init__()
        self.tokens = nn.Embedding(_BYTES, width)
        self.positions = nn.Embedding(_BLOCK, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, heads, 4 * width, activation="gelu", batch_first=True, norm_first=True
            )
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, _BYTES, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.02)
        self.head.weight = self.tokens.weight

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        """Return the mean cross entropy of the next bytes; both arguments are batch x time."""
        hidden = self.tokens(x) + self.positions.weight[: x.shape[1]]
        future = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        for block in self.blocks:
            hidden = block(hidden, src_mask=future, is_causal=True)
        logits = self.head(self.norm(hidden))
        return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def sources() -> Tensor:
    """Return the first MiB of the standard library's sources, one byte per element."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = b"".join(file.read_bytes() for file in sorted(folder.glob("*.py")))
    if len(text) < 1 << 14:
        raise FileNotFoundError(f"{folder} holds no Python sources to train on")
    return torch.frombuffer(bytearray(text[: 1 << 20]), dtype=torch.uint8)


def batch(text: Tensor) -> tuple[Tensor, Tensor]:
    """Return random pieces and the bytes that follow them, drawn from torch's global generator."""
    begins = torch.randint(len(text) - _BLOCK - 1, (_BATCH,)).tolist()
    pieces = torch.stack([text[begin : begin + _BLOCK + 1] for begin in begins]).long()
    return pieces[:, :-1], pieces[:, 1:]


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    path = os.environ.get("LIGHTCK_PATH", "./run-gpt")  # `lightck chaos` sets it
    parser.add_argument("--path", default=path, help="where the snapshots are (%(default)s)")
    parser.add_argument("--steps", type=int, default=200, help="in all (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="(%(default)s)")
    parser.add_argument("--out", type=Path, help="write the state at the end to this file")
    parser.add_argument("--without-lightck", action="store_true", help="train and save nothing")
    return parser.parse_args()


def main() -> None:
    """Train from the newest snapshot, or from the beginning, to the last step."""
    args = arguments()
    rank, several = int(os.environ.get("RANK", "0")), "RANK" in os.environ
    torch.use_deterministic_algorithms(True)
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(args.seed)
    text, model = sources(), GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
    trained: nn.Module = model
    if several:
        dist.init_process_group("gloo")
        trained = DistributedDataParallel(model)
        torch.manual_seed(args.seed + rank)  # each rank draws batches of its own

    # (1) What has to come back, beside model, optimizer and random generators.
    extras = {"schedule": schedule}
    begin = 0
    saving: AbstractContextManager[object] = nullcontext()
    if not args.without_lightck:
        # (2) The newest snapshot, if there is one. What was saved at a failure may have come
        # before the loop's schedule.step(): make up for it.
        info = lightck.restore(trained, optimizer, args.path, extras=extras)
        begin = 0 if info is None else info.step
        while schedule.last_epoch < begin:
            schedule.step()
        # (3) Hooks on model and optimizer save every step, until the end of the `with`.
        saving = lightck.attach(trained, optimizer, args.path, policy=1, extras=extras)
    if rank == 0:
        print(f"goes on after step {begin}" if begin else "begins", flush=True)
    with saving:
        for step in range(begin + 1, args.steps + 1):
            loss = trained(*batch(text))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            tell(rank, step, loss.item())
    if args.out is not None:
        state = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "schedule": schedule.state_dict(),
            "generator": torch.get_rng_state(),
        }
        torch.save(state, args.out)
    if several:
        dist.destroy_process_group()


def tell(rank: int, step: int, loss: float) -> None:
    """Print a loss with all its digits, and append it to the file that `lightck chaos` compares."""
    if rank == 0:
        print(f"step {step} loss {loss}", flush=True)
    if file := os.environ.get("LIGHTCK_CHAOS_LOSSES"):
        with open(file, "ab", buffering=0) as losses:
            losses.write(f"{rank} {step} {loss}\n".encode())


if __name__ == "__main__":
    main()
