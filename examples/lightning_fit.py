"""Lightning: a callback is all that is needed; `trainer.fit` goes on by itself.

    python examples/lightning_fit.py    # end it in the middle: Ctrl-C, or kill -9
    python examples/lightning_fit.py    # it goes on, with the losses of a run that nothing ended

pip install 'lightck[lightning]'
"""

import argparse
import os

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lightck
from lightck.integrations.lightning import LightckCallback


class Regression(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(64, 256), nn.ReLU(), nn.BatchNorm1d(256), nn.Dropout(0.1), nn.Linear(256, 1)
        )

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        x, y = batch
        loss = nn.functional.mse_loss(self.net(x), y)
        self.log("loss", loss)
        print(f"step {self.global_step + 1} loss {loss.item()}", flush=True)
        return loss

    def validation_step(self, batch: list[torch.Tensor], index: int) -> None:
        x, y = batch
        self.log("validation", nn.functional.mse_loss(self.net(x), y))

    def configure_optimizers(self) -> dict[str, object]:
        optimizer = torch.optim.AdamW(self.parameters())
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=6)
        return {"optimizer": optimizer, "lr_scheduler": schedule}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    path = os.environ.get("LIGHTCK_PATH", "./run-lightning")  # `lightck chaos` sets it
    parser.add_argument("--path", default=path, help="where the snapshots are (%(default)s)")
    parser.add_argument("--epochs", type=int, default=6, help="of 32 steps each (%(default)s)")
    args = parser.parse_args()

    lightning.seed_everything(0, verbose=False)
    x = torch.randn(2048 + 256, 64)
    data = TensorDataset(x, x[:, :1].sin())
    train, held_out = data[:2048], data[2048:]
    sampler = lightck.ResumableSampler(train[0], seed=1)  # any order can be resumed, this one is
    loader = DataLoader(TensorDataset(*train), batch_size=64, sampler=sampler)
    checkpoints = LightckCallback(args.path, policy=10)
    trainer = lightning.Trainer(
        max_epochs=args.epochs,
        callbacks=[checkpoints],
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Regression(), loader, DataLoader(TensorDataset(*held_out), batch_size=64))
    info = checkpoints.info
    print("had begun" if info is None else f"went on after step {info.step}")
    print(f"done after step {trainer.global_step}. Next: `lightck ls {args.path}` shows what is")
    print(f"kept, `lightck rm {args.path}` removes it; with more --epochs the run goes on.")


if __name__ == "__main__":
    main()
