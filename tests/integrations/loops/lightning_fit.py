"""Lightning as people use it: validation, accumulation, clipping, a schedule, callbacks, a log."""

from __future__ import annotations

import logging
import os
import warnings
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers.logger import Logger
from torch.nn import functional as F
from torch.utils.data import DataLoader

import lightck
from support.integrations import probe
from support.integrations.probe import ON, Data, Net, here, param, tell

for noisy in ("lightning.pytorch", "lightning.fabric", "lightning"):
    logging.getLogger(noisy).setLevel(logging.ERROR)
warnings.filterwarnings("ignore", module="lightning|torch")
WORLD = int(os.environ.get("WORLD_SIZE", "1"))


class Log(Logger):
    """A logger that tells each row."""

    name, version = "log", 0

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        """Ignore them."""

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        tell(f"log at {step}: {sorted(metrics)}", metrics)


class Module(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def training_step(self, batch: Any, index: int) -> Any:
        x, y = batch
        step = self.trainer.global_step
        tell(f"batch {self.trainer.current_epoch}.{index}", [x, y])
        loss = F.cross_entropy(self.net(x), y)
        here(f"forward {self.trainer.fit_loop.total_batch_idx}", handle())
        tell(f"loss {self.trainer.current_epoch}.{index} of step {step}", loss)
        self.log("train", loss, on_step=True, on_epoch=True, sync_dist=WORLD > 1)
        self.log("most", loss.detach(), on_epoch=True, on_step=False, reduce_fx="max")
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        x, y = batch
        if not self.trainer.sanity_checking:
            here(f"validation {self.trainer.fit_loop.total_batch_idx}.{index}", handle())
        self.log("val", F.cross_entropy(self.net(x + 0.01 * torch.randn_like(x)), y), on_step=True,
                 on_epoch=True, sync_dist=WORLD > 1)  # fmt: skip

    def on_train_epoch_start(self) -> None:
        tell(f"epoch {self.trainer.current_epoch} begins", self.trainer.global_step)

    def on_train_epoch_end(self) -> None:
        tell(f"epoch {self.trainer.current_epoch} ends", dict(self.trainer.callback_metrics))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        kind = param("schedule", "step")
        if kind == "plateau":
            schedule: Any = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": schedule, "monitor": "val_epoch"},
            }
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": kind},
        }


def handle() -> Any:
    """The handle, while lightck is on."""
    return callback.handle if ON else None


L.seed_everything(3 + probe.RANK)
data = Data(augment=param("augment", False))
workers = param("workers", 0)
kind = param("loader", "sampler")
if kind == "stateful":
    from torchdata.stateful_dataloader import StatefulDataLoader

    loader: Any = StatefulDataLoader(data, batch_size=4, shuffle=True, num_workers=workers)
elif kind in ("shuffled", "two"):
    loader = DataLoader(data, batch_size=4, shuffle=True)
    loader = [loader, loader] if kind == "two" else loader
else:
    sampler = lightck.ResumableSampler(data, seed=1)
    loader = DataLoader(data, batch_size=4, sampler=sampler, num_workers=workers)
callbacks: list[Any] = []
if param("callbacks", True):
    stopping = EarlyStopping("val_epoch", patience=param("patience", 3), min_delta=0.05)
    best = ModelCheckpoint("best", monitor="val_epoch", save_top_k=2, filename="{step}",
                           enable_version_counter=False)  # fmt: skip
    callbacks = [stopping, best]
if ON:
    from lightck.integrations.lightning import LightckCallback

    callback = LightckCallback(probe.PATH, keep=param("keep", None))
    if not param("found", False):
        callbacks.append(callback)
trainer = L.Trainer(
    max_epochs=3,
    max_steps=param("max_steps", -1),
    accelerator="cpu",
    devices=WORLD,
    strategy="ddp" if WORLD > 1 else "auto",
    use_distributed_sampler=WORLD == 1 or param("put_in", False),
    accumulate_grad_batches=param("accumulate", 1),
    val_check_interval=param("every", 1.0),
    gradient_clip_val=1.0,
    log_every_n_steps=2,
    logger=Log(),
    callbacks=callbacks,
    enable_progress_bar=False,
    enable_model_summary=False,
    num_sanity_val_steps=1,
)
if param("found", False) and ON:  # by its entry point
    callback = next(each for each in trainer.callbacks if isinstance(each, LightckCallback))
if param("keeps", False):
    Module.on_save_checkpoint = lambda self, checkpoint: checkpoint.update(own=1)  # type: ignore
module = Module()
if ON:
    shown, callback.on_fit_start = callback.on_fit_start, lambda *a: (  # type: ignore[method-assign]
        shown(*a), probe.note("restored", callback.info and callback.info.step)
    )  # fmt: skip
trainer.fit(module, loader, DataLoader(Data(10), batch_size=4))
tell("end", [trainer.global_step, trainer.current_epoch, trainer.should_stop])
if param("callbacks", True):
    tell("stopping", stopping.state_dict())
    tell("best", [os.path.basename(best.best_model_path), best.best_model_score])
    probe.note("best step", int(os.path.basename(best.best_model_path)[5:-5]))
    tell("kept", sorted(os.path.basename(each) for each in best.best_k_models))
probe.end(module)
