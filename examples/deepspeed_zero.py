"""DeepSpeed with ZeRO: one call behind `initialize`, the loop as ever.

    python examples/deepspeed_zero.py                    # one process on a CPU: kill it, go on
    deepspeed --num_gpus 2 examples/deepspeed_zero.py    # on GPUs

pip install 'lightck[deepspeed]'
"""

import argparse
import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # read when DeepSpeed is imported

import deepspeed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lightck
from lightck.integrations.deepspeed import attach


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    path = os.environ.get("LIGHTCK_PATH", "./run-deepspeed")  # `lightck chaos` sets it
    parser.add_argument("--path", default=path, help="where the snapshots are (%(default)s)")
    parser.add_argument("--epochs", type=int, default=6, help="of 32 updates each (%(default)s)")
    parser.add_argument("--stage", type=int, default=1, help="0, 1 or 2 of ZeRO (%(default)s)")
    args = parser.parse_args()

    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    for name, value in {**alone, "MASTER_PORT": "29517"}.items():
        os.environ.setdefault(name, value)  # a launcher has set them
    deepspeed.init_distributed()
    torch.manual_seed(0)
    x = torch.randn(1024, 64)
    data = TensorDataset(x, x[:, :1].sin())
    net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Dropout(0.1), nn.Linear(256, 1))
    adamw = torch.optim.AdamW(net.parameters())
    config = {
        "train_micro_batch_size_per_gpu": 32,
        "zero_optimization": {"stage": args.stage},
        "zero_allow_untested_optimizer": True,
    }
    engine, *_ = deepspeed.initialize(model=net, optimizer=adamw, config=config)
    sampler = lightck.ResumableSampler(data, seed=1)
    loader = DataLoader(data, batch_size=32, sampler=sampler)

    with attach(engine, args.path, policy=10, extras={"data": sampler}) as run:
        talks = int(os.environ["RANK"]) == 0
        if talks:
            print("begins" if run.info is None else f"goes on after step {run.info.step}")
        for _ in range(sampler.epoch, args.epochs):
            for inputs, targets in loader:
                found = engine(inputs.to(engine.device))
                loss = nn.functional.mse_loss(found, targets.to(engine.device))
                engine.backward(loss)
                engine.step()
                if talks:
                    print(f"step {run.step} loss {loss.item()}", flush=True)
        last = run.step
    if talks:
        print(f"done after step {last}. Next: `lightck ls {args.path}` shows what is kept,")
        print(f"`lightck rm {args.path}` removes it; with more --epochs the run goes on.")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
