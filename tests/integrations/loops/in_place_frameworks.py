"""A framework's loop under `lightck run`: says its losses, and kills itself where it is told to.

    in_place_frameworks.py FRAMEWORK FOLDER [RANK@STEP...]

The life of a rank that makes STEP first ends by SIGKILL before its forward. Each rank appends to
FOLDER/<rank>.said, and writes FOLDER/<rank>.state at its end.
"""

from __future__ import annotations

import os
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lightck

RANK = int(os.environ["RANK"])
EPOCHS = 2


class Net(nn.Module):
    """Some layers and the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(8, 100), nn.BatchNorm1d(100), nn.Dropout(0.2), nn.Linear(100, 2)
        )

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Compute loss and logits."""
        logits = self.layers(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Said:
    """Says what this rank computes, and ends it where it is to die."""

    def __init__(self, folder: Path, deaths: list[str]) -> None:
        self.folder, self._deaths = folder, deaths
        self._file = (folder / f"{RANK}.said").open("a", buffering=1)
        print("pid", os.getpid(), file=self._file)

    def die_at(self, step: int) -> None:
        """Die if this is the place, the first time."""
        name = f"{RANK}@{step}"
        mark = self.folder / f"died-{name}"
        if name in self._deaths and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def loss(self, step: int, loss: torch.Tensor) -> None:
        """Say a loss in all its bits."""
        print("loss", step, float(loss.detach()).hex(), file=self._file)

    def rows(self, step: int, rows: torch.Tensor) -> None:
        """Say which rows a step has."""
        print("rows", step, *rows.tolist(), file=self._file)

    def end(self, net: nn.Module) -> None:
        """Write the last state."""
        torch.save(net.state_dict(), self.folder / f"{RANK}.state")


def data() -> TensorDataset:
    """Return 96 rows, the same on every rank."""
    made = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(96, 8, generator=made), torch.randint(0, 2, (96,), generator=made)
    )


def transformers(said: Said) -> None:
    """Train with HF's Trainer."""
    from transformers import Trainer, TrainingArguments

    from lightck.integrations.transformers import LightckCallback

    class Tells(Trainer):  # type: ignore[misc]
        """Says its losses."""

        def training_step(self, *given: Any, **named: Any) -> Any:
            """Die before it, or tell its loss."""
            step = self.state.global_step + 1
            said.die_at(step)
            loss = super().training_step(*given, **named)
            said.loss(step, loss)
            return loss

    torch.manual_seed(3)
    rows = [{"x": x, "labels": y} for x, y in data()]
    net = Net()
    arguments = TrainingArguments(
        "out", num_train_epochs=EPOCHS, per_device_train_batch_size=4, learning_rate=0.01,
        save_strategy="no", eval_strategy="epoch", logging_steps=5, report_to=[], use_cpu=True,
        disable_tqdm=True, ddp_find_unused_parameters=False, remove_unused_columns=False,
    )  # fmt: skip
    trainer = Tells(net, arguments, train_dataset=rows, eval_dataset=rows[:16])
    callback = LightckCallback(said.folder / "regions", policy=4).bind(trainer)
    trainer.train(resume_from_checkpoint=callback.checkpoint())
    said.end(net)


def accelerate(said: Said) -> None:
    """Train with a loop of Accelerate's."""
    from accelerate import Accelerator

    from lightck.integrations.accelerate import Lightck

    accelerator = Accelerator(cpu=True)
    torch.manual_seed(3 + RANK)  # the ranks have to agree on the order of the rows
    net = Net()
    weights = [p for p in net.parameters() if p.dim() > 1]
    rest = [{"params": [p for p in net.parameters() if p.dim() <= 1], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW([{"params": weights}, *rest], lr=0.01)
    decay = torch.optim.lr_scheduler.StepLR(optimizer, step_size=5, gamma=0.5)
    numbered = TensorDataset(*data().tensors, torch.arange(96))
    shuffled = DataLoader(numbered, batch_size=4, shuffle=True)
    model, optimizer, loader, schedule = accelerator.prepare(net, optimizer, shuffled, decay)
    with Lightck(accelerator, said.folder / "regions", policy=4) as run:
        for _ in run.epochs(EPOCHS):
            for x, y, rows in run.batches(loader):
                said.die_at(run.step + 1)
                said.rows(run.step + 1, rows)
                loss = model(x, y)["loss"]
                accelerator.backward(loss)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
                said.loss(run.step, loss)
    said.end(net)


def lightning(said: Said) -> None:
    """Train with Lightning: validation behind each epoch, and logged values of each rank."""
    import lightning as L

    from lightck.integrations.lightning import LightckCallback

    class Module(L.LightningModule):
        """Says its losses."""

        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            """Die before the step, or tell its loss."""
            x, y, rows = batch
            said.die_at(self.global_step + 1)
            said.rows(self.global_step + 1, rows)
            loss = self.net(x, y)["loss"]
            said.loss(self.global_step + 1, loss)
            self.log("loss", loss, on_step=True, on_epoch=True)
            self.log("all", loss, sync_dist=True)
            return loss

        def validation_step(self, batch: Any, index: int) -> None:
            """Log the loss of all ranks."""
            x, y, _ = batch
            self.log("val", self.net(x, y)["loss"], sync_dist=True)

        def on_train_epoch_end(self) -> None:
            """Tell the mean of what was logged."""
            said.loss(self.global_step, self.trainer.callback_metrics["loss_epoch"])

        def configure_optimizers(self) -> Any:
            """Return an optimizer and its schedule."""
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=5, gamma=0.5)
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    L.seed_everything(3, verbose=False)
    numbered = TensorDataset(*data().tensors, torch.arange(96))
    loader = DataLoader(numbered, batch_size=4, sampler=lightck.ResumableSampler(numbered, seed=1))
    trainer = L.Trainer(
        max_epochs=EPOCHS, accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), strategy="ddp",
        callbacks=[LightckCallback(said.folder / "regions", policy=4)], logger=False,
        use_distributed_sampler=False, enable_progress_bar=False, enable_model_summary=False,
        log_every_n_steps=5,
    )  # fmt: skip
    module = Module()
    trainer.fit(module, loader, DataLoader(numbered, batch_size=8))
    said.end(module.net)


if __name__ == "__main__":
    warnings.filterwarnings("ignore", module="transformers|torch|accelerate|lightning")
    globals()[sys.argv[1]](Said(Path(sys.argv[2]), sys.argv[3:]))
