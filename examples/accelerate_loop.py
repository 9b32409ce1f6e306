"""Accelerate: the loop as ever, with what counts epochs and batches from lightck.

    python examples/accelerate_loop.py    # end it in the middle: Ctrl-C, or kill -9
    python examples/accelerate_loop.py    # it goes on, with the losses of a run that nothing ended

With several ranks: accelerate launch --cpu --num_processes 2 examples/accelerate_loop.py
pip install 'lightck[accelerate]'
"""

import argparse
import os

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightck.integrations.accelerate import Lightck


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    path = os.environ.get("LIGHTCK_PATH", "./run-accelerate")  # `lightck chaos` sets it
    parser.add_argument("--path", default=path, help="where the snapshots are (%(default)s)")
    parser.add_argument("--epochs", type=int, default=12, help="of 16 updates each (%(default)s)")
    args = parser.parse_args()

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    torch.manual_seed(0)
    x = torch.randn(1024, 64)
    data = TensorDataset(x, x[:, :1].sin())
    net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Dropout(0.1), nn.Linear(256, 1))
    adamw = torch.optim.AdamW(net.parameters())
    decay = torch.optim.lr_scheduler.StepLR(adamw, step_size=100, gamma=0.5)
    shuffled = DataLoader(data, batch_size=32, shuffle=True)
    model, optimizer, loader, schedule = accelerator.prepare(net, adamw, shuffled, decay)

    with Lightck(accelerator, args.path, policy=10) as checkpoints:
        info = checkpoints.info
        accelerator.print("begins" if info is None else f"goes on after step {info.step}")
        for _ in checkpoints.epochs(args.epochs):
            for inputs, targets in checkpoints.batches(loader):
                with accelerator.accumulate(model):
                    loss = nn.functional.mse_loss(model(inputs), targets)
                    accelerator.backward(loss)
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
                if accelerator.sync_gradients:
                    accelerator.print(f"step {checkpoints.step} loss {loss.item()}", flush=True)
        last = checkpoints.step
    accelerator.print(f"done after step {last}. Next: `lightck ls {args.path}` shows what is kept,")
    accelerator.print(f"`lightck rm {args.path}` removes it; with more --epochs the run goes on.")


if __name__ == "__main__":
    main()
