"""Several ranks with DistributedDataParallel: the loop stays as it is, every rank saves its share.

    torchrun --standalone --nproc-per-node=2 examples/ddp.py    # kill it in the middle
    torchrun --standalone --nproc-per-node=2 examples/ddp.py    # it goes on, on every rank

On GPUs with NCCL if there is one for each rank, else on the CPU with gloo.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import lightck


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    path = os.environ.get("LIGHTCK_PATH", "./run-ddp")  # `lightck chaos -- torchrun ...` sets it
    parser.add_argument("--path", default=path, help="one for all ranks (%(default)s)")
    parser.add_argument("--epochs", type=int, default=40, help="of 16 steps each (%(default)s)")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    local_rank = int(os.environ["LOCAL_RANK"])
    if torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        torch.cuda.set_device(local_rank)
        device, backend = torch.device("cuda", local_rank), "nccl"
    else:
        device, backend = torch.device("cpu"), "gloo"
    dist.init_process_group(backend)

    torch.manual_seed(0)  # the same weights and data on all ranks
    inputs = torch.randn(4096, 256)
    data = TensorDataset(inputs, inputs[:, :1].sin())
    net = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Dropout(0.1), nn.Linear(1024, 1))
    model = DistributedDataParallel(net.to(device))
    optimizer = torch.optim.AdamW(model.parameters())
    torch.manual_seed(1 + dist.get_rank())  # from here on each rank drops out for itself

    # Each rank goes through its own share of the data, as with a DistributedSampler.
    sampler = lightck.ResumableSampler(data, seed=1)
    loader = DataLoader(data, batch_size=128, sampler=sampler)
    extras = {"data": sampler}

    # Every rank calls restore and attach. All of them take the same step: the newest that is
    # whole on every rank. What they hold alike is written once, each rank writes its share.
    info = lightck.restore(model, optimizer, args.path, extras=extras)
    talks = dist.get_rank() == 0
    if talks:
        print("begins" if info is None else f"goes on after step {info.step}", flush=True)
    with lightck.attach(model, optimizer, args.path, policy=10, extras=extras) as handle:
        for _ in range(sampler.epoch, args.epochs):
            for x, y in loader:
                loss = nn.functional.mse_loss(model(x.to(device)), y.to(device))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                if talks:
                    print(f"step {handle.step} loss {loss.item()}", flush=True)
        last = handle.step
    if talks:
        print(f"done after step {last}. Next: `lightck ls {args.path}` shows a region per rank,")
        print(f"`lightck rm {args.path}` removes them; with more --epochs the run goes on.")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
