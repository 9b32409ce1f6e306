"""Several ranks with FSDP2 (fully_shard): each rank saves the shards that it owns.

    torchrun --standalone --nproc-per-node=2 examples/fsdp2.py    # kill it in the middle
    torchrun --standalone --nproc-per-node=2 examples/fsdp2.py    # it goes on, on every rank

On GPUs with NCCL if there is one for each rank, else on the CPU with gloo.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

import lightck


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    path = os.environ.get("LIGHTCK_PATH", "./run-fsdp2")  # `lightck chaos -- torchrun ...` sets it
    parser.add_argument("--path", default=path, help="one for all ranks (%(default)s)")
    parser.add_argument("--epochs", type=int, default=40, help="of 16 steps each (%(default)s)")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    kind, backend = "cpu", "gloo"
    if torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        kind, backend = "cuda", "nccl"
    dist.init_process_group(backend)
    mesh = init_device_mesh(kind, (dist.get_world_size(),))

    torch.manual_seed(0)  # the same data on all ranks, and the same weights before they are cut
    inputs = torch.randn(4096, 256)
    data = TensorDataset(inputs, inputs[:, :1].sin())
    model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Dropout(0.1), nn.Linear(1024, 1))
    model.to(kind)
    for part in (model[0], model[3]):
        fully_shard(part, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())  # after fully_shard: it takes the shards
    torch.manual_seed(1 + dist.get_rank())  # from here on each rank drops out for itself

    sampler = lightck.ResumableSampler(data, seed=1)  # each rank has its share of the data
    loader = DataLoader(data, batch_size=128, sampler=sampler)
    extras = {"data": sampler}

    # Every rank calls restore and attach, on a mesh like the one that wrote the snapshot.
    info = lightck.restore(model, optimizer, args.path, extras=extras)
    talks = dist.get_rank() == 0
    if talks:
        print("begins" if info is None else f"goes on after step {info.step}", flush=True)
    with lightck.attach(model, optimizer, args.path, policy=10, extras=extras) as handle:
        for _ in range(sampler.epoch, args.epochs):
            for x, y in loader:
                loss = nn.functional.mse_loss(model(x.to(kind)), y.to(kind))
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
