"""One process: every tenth step is saved, and a run that was killed goes on from there.

    python examples/minimal.py    # end it in the middle: Ctrl-C, or kill -9
    python examples/minimal.py    # it goes on, with the losses of a run that nothing ended

The losses are the same to the last bit: compare them with those of a run at another --path.
"""

import argparse
import os

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lightck


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    # `lightck chaos -- python examples/minimal.py` gives a place of its own in LIGHTCK_PATH.
    path = os.environ.get("LIGHTCK_PATH", "./run")
    parser.add_argument("--path", default=path, help="where the snapshots are (%(default)s)")
    parser.add_argument("--epochs", type=int, default=20, help="of 32 steps each (%(default)s)")
    return parser.parse_args()


def main() -> None:
    args = arguments()

    # 1. Everything is made as in a run without lightck, from the same seed at every start.
    torch.manual_seed(0)
    inputs = torch.randn(4096, 256)
    data = TensorDataset(inputs, inputs[:, :1].sin())
    model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Dropout(0.1), nn.Linear(1024, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=100, gamma=0.5)

    # 2. The sampler knows which sample comes next, also in the middle of an epoch.
    sampler = lightck.ResumableSampler(data, seed=1)
    loader = DataLoader(data, batch_size=128, sampler=sampler)

    # 3. What else has to come back: anything with state_dict and load_state_dict. Random
    #    generators are saved without being named.
    extras = {"data": sampler, "schedule": schedule}

    # 4. Restore before the first batch is drawn. None: there is nothing yet.
    info = lightck.restore(model, optimizer, args.path, extras=extras)
    print("begins" if info is None else f"goes on after step {info.step}", flush=True)
    # What was saved at a failure may have come before the loop's schedule.step(): make up for it.
    while info is not None and schedule.last_epoch < info.step:
        schedule.step()

    # 5. Train as ever. Hooks on the model and the optimizer do the rest: every tenth step is
    #    saved behind the training, and the last one when the training fails.
    with lightck.attach(model, optimizer, args.path, policy=10, extras=extras) as handle:
        for _ in range(sampler.epoch, args.epochs):
            for x, y in loader:
                loss = nn.functional.mse_loss(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()  # waits only for copies that are still under way
                print(f"step {handle.step} loss {loss.item()}", flush=True)
                schedule.step()
        last = handle.step
    print(f"done after step {last}. Next: `lightck ls {args.path}` shows what is kept,")
    print(f"`lightck rm {args.path}` removes it; with more --epochs the run goes on.")


if __name__ == "__main__":
    main()
