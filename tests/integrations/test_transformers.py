"""HF's Trainer is killed anywhere and goes on bit for bit, also with LoRA and on two ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import lightck
from lightck.history import item
from lightck.region import location
from lightck.region.region import open_and_recover
from support.integrations.chain import Chain

FRAMEWORK = "transformers"
MODULES = ("transformers.trainer", "accelerate", "peft", "datasets")

# An epoch is 11 batches on one rank, 6 on each of two; places are named by step and micro-batch.
PLACES = ("forward 0.0", "forward 6.0", "forward 10.0", "validation 12", "forward 15.0")
OF_TWO = ("forward 0.0", "forward 3.0", "forward 5.0", "validation 8", "forward 10.0")
MICRO = ("forward 0.0", "forward 3.1", "forward 5.0", "validation 8", "forward 10.0")


@pytest.mark.parametrize(
    ("ranks", "seeded", "params", "places"),
    [
        (1, False, {"augment": True}, PLACES),
        (1, True, {"augment": True, "workers": 2}, PLACES),
        (1, False, {"augment": True, "accumulate": 2, "patience": 9}, MICRO),
        (1, False, {"peft": True, "save": "steps"}, PLACES),
        (2, False, {"augment": True}, OF_TWO),
    ],
)
def test_train_goes_on_bit_for_bit(
    chain: Callable[..., Chain],
    ranks: int,
    seeded: bool,
    params: dict[str, Any],
    places: tuple[str, ...],
) -> None:
    chain("transformers_train.py", params=params, ranks=ranks, seeded=seeded).check(*places)


def test_a_trainer_that_is_given_a_sampler_and_counts_from_0_again_goes_on_bit_for_bit(
    chain: Callable[..., Chain],
) -> None:
    chain("transformers_sampler.py").check("forward 0", "forward 7", "forward 16", "forward 24")


@pytest.mark.parametrize(
    ("params", "text"),
    [
        ({"arguments": {"ignore_data_skip": True}}, "ignore_data_skip=True begins"),
        ({"arguments": {"auto_find_batch_size": True}}, "auto_find_batch_size=True begins"),
        ({"arguments": {"enable_jit_checkpoint": True}}, "enable_jit_checkpoint=True answers"),
        (
            {"peft": True, "arguments": {"train_sampling_strategy": "group_by_length"}},
            "take 'random' or",
        ),
        ({"unbound": True}, "the callback knows no Trainer"),
    ],
)
def test_what_could_not_be_exact_is_refused_with_the_way_out(
    chain: Callable[..., Chain], params: dict[str, Any], text: str
) -> None:
    chain("transformers_train.py", params=params).refused(text)


def test_a_trainer_that_begins_anew_beside_snapshots_is_refused(
    chain: Callable[..., Chain],
) -> None:
    run = chain("transformers_train.py")
    run.killed("forward 6.0")
    run.params = {"forgets": True}
    assert any(run.life(on=True)) and "resume_from_checkpoint=callback.checkpoint()" in run.log


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_damaged_newest_snapshot_costs_a_step_and_no_run(
    chain: Callable[..., Chain], ranks: int
) -> None:
    run = chain("transformers_train.py", params={"augment": True}, ranks=ranks)
    run.reference()
    run.killed("forward 5.0")
    snapshots = run.folder / "run" / "snapshots"
    newest = max(row["step"] for row in lightck.snapshots(snapshots).to_pylist())
    damage(snapshots, newest)
    assert run.life(on=True) == [0] * ranks, run.log
    run.compare(kills=1)
    assert run.notes("restored")[-1] == newest - 1


def damage(snapshots: Path, step: int) -> None:
    """Change a byte of the largest tensor of a step in the last rank's region."""
    file = max(snapshots.glob("region-*.lck"))
    region, recovery = open_and_recover(
        location.locate(snapshots, int(file.stem.split("-")[1]), create=False)
    )
    held = next(c for c in recovery.candidates if c.record.step == step)
    at = int(held.layout.offsets[held.layout.lengths.argmax()])
    region.close()
    with file.open("r+b") as whole:
        whole.seek(at)
        byte = whole.read(1)[0]
        whole.seek(at)
        whole.write(bytes([byte ^ 1]))


def test_the_history_keeps_the_step_that_the_trainer_found_best(
    chain: Callable[..., Chain],
) -> None:
    run = chain("transformers_train.py", params={"keep": "best eval_loss", "save": "steps"})
    run.check("forward 5.0", "validation 8")
    kept = [each.kept.step for each in item.every_item(run.folder / "run" / "snapshots")]
    assert run.notes("best step")[-1] in kept


# ---- in this process: a Trainer's own checkpoint, and a cell that is run again -------------------


def trainer_of(folder: Path, steps: int, **given: Any) -> Any:
    """A Trainer of a tiny model, which writes a checkpoint of its own behind step 3."""
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    sizes = {"n_layer": 1, "n_head": 1, "n_embd": 8, "vocab_size": 16, "n_positions": 8}
    rows = [{"input_ids": [i % 16] * 4, "labels": [i % 16] * 4} for i in range(24)]
    words = TrainingArguments(
        str(folder), max_steps=steps, save_strategy="steps", save_steps=3, report_to=[],
        use_cpu=True, per_device_train_batch_size=2, disable_tqdm=True, logging_steps=1,
    )  # fmt: skip
    return Trainer(GPT2LMHeadModel(GPT2Config(**sizes)), words, train_dataset=rows, **given)


def test_a_run_that_begins_from_the_trainer_s_own_checkpoint_can_be_resumed(
    tmp_path: Path,
) -> None:
    from lightck.integrations.transformers import LightckCallback

    trainer_of(tmp_path / "out", 3).train()
    begun = str(tmp_path / "out" / "checkpoint-3")
    for steps in (5, 7):
        trainer = trainer_of(tmp_path / "other", steps)
        ck = LightckCallback(tmp_path / "run", policy=1).bind(trainer)
        trainer.train(resume_from_checkpoint=ck.checkpoint() or begun)
        assert trainer.state.global_step == steps
        assert ck.handle is not None and ck.handle.step == steps
    assert ck.info is not None and ck.info.step == 5


def test_a_cell_whose_training_was_interrupted_can_be_run_again(tmp_path: Path) -> None:
    from transformers import TrainerCallback

    from lightck.integrations.transformers import LightckCallback

    class Interrupts(TrainerCallback):  # type: ignore[misc]
        ready = True

        def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            if self.ready and state.global_step == 4:
                self.ready = False
                raise KeyboardInterrupt

    trainer = trainer_of(tmp_path / "out", 6, callbacks=[Interrupts()])
    ck = LightckCallback(tmp_path / "run", policy=1).bind(trainer)
    with pytest.raises(KeyboardInterrupt):
        trainer.train(resume_from_checkpoint=ck.checkpoint())
    trainer.train(resume_from_checkpoint=ck.checkpoint())
    assert trainer.state.global_step == 6
    assert ck.info is not None and ck.info.step in (3, 4)
