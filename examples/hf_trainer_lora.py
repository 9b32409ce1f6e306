"""HF's Trainer fine-tunes a small GPT-2 with LoRA (PEFT); two lines make it go on.

    python examples/hf_trainer_lora.py    # end it in the middle: Ctrl-C, or kill -9
    python examples/hf_trainer_lora.py    # it goes on, with the losses of a run that nothing ended

pip install 'lightck[transformers]' peft
"""

import argparse
import os
import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from lightck.integrations.transformers import LightckCallback

LENGTH = 32


class Text(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Pieces of a module of Python's, a byte a token."""

    def __init__(self, name: str) -> None:
        text = np.fromfile(Path(sysconfig.get_paths()["stdlib"]) / name, np.uint8).astype(np.int64)
        self.rows = torch.from_numpy(text[: len(text) // LENGTH * LENGTH]).reshape(-1, LENGTH)

    def __len__(self) -> int:
        return min(len(self.rows), 512)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[i], "labels": self.rows[i]}


class Talking(Trainer):
    """Prints every loss, in all its digits."""

    def training_step(self, *given: Any, **named: Any) -> torch.Tensor:
        loss: torch.Tensor = super().training_step(*given, **named)
        print(f"step {self.state.global_step + 1} loss {loss.item()}", flush=True)
        return loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    path = os.environ.get("LIGHTCK_PATH", "./run-lora")  # `lightck chaos` sets it
    parser.add_argument("--path", default=path, help="where the snapshots are (%(default)s)")
    parser.add_argument("--epochs", type=int, default=3, help="of 64 steps each (%(default)s)")
    args = parser.parse_args()

    torch.manual_seed(0)
    small = GPT2Config(vocab_size=256, n_positions=LENGTH, n_embd=64, n_layer=2, n_head=4)
    lora = LoraConfig(r=4, target_modules=["c_attn"], lora_dropout=0.1, fan_in_fan_out=True)
    arguments = TrainingArguments(
        "out-lora",
        num_train_epochs=args.epochs,
        per_device_train_batch_size=8,
        learning_rate=1e-2,
        eval_strategy="epoch",
        save_strategy="no",  # lightck does that
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    model = get_peft_model(GPT2LMHeadModel(small), lora)
    data, held_out = Text("typing.py"), Text("pathlib.py")
    trainer = Talking(model, arguments, train_dataset=data, eval_dataset=held_out)
    checkpoints = LightckCallback(args.path, policy=10).bind(trainer)
    trainer.train(resume_from_checkpoint=checkpoints.checkpoint())
    info = checkpoints.info
    print("had begun" if info is None else f"went on after step {info.step}")
    print(f"done after step {trainer.state.global_step}. Next: `lightck ls {args.path}` shows what")
    print(f"is kept, `lightck rm {args.path}` removes it; with more --epochs the run goes on.")


if __name__ == "__main__":
    main()
