"""Lightning and Accelerate, by themselves, with their checkpoints in a `lightck.Store`."""

from __future__ import annotations

import contextlib
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lightck
from support import processes

STEPS = 12


@pytest.fixture
def data() -> TensorDataset:
    torch.manual_seed(3)
    return TensorDataset(torch.randn(64, 8), torch.randint(0, 4, (64,)))


def net() -> nn.Module:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))


# ---- Lightning -----------------------------------------------------------------------------------


def fit(
    folder: Path,
    data: TensorDataset,
    steps: int,
    plugins: list[Any],
    resume: Any = None,
    **more: Any,
) -> tuple[dict[str, Any], list[float], Any]:
    """Train, and return model and losses, and the checkpoint callback."""
    lightning = pytest.importorskip("lightning")
    from lightning.pytorch.callbacks import ModelCheckpoint

    losses: list[float] = []
    kill_at = more.pop("kill_at", None)

    class Module(lightning.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self, **hparams: Any) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.net = net()

        def training_step(self, batch: Any, index: int) -> Any:
            loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
            losses.append(loss.item())
            self.log("score", -float(self.global_step))
            if self.global_step == kill_at:
                os.kill(os.getpid(), 9)
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

    warnings.simplefilter("ignore")
    warnings.filterwarnings("error", message="lightck")
    checkpoints = ModelCheckpoint(
        folder / "checkpoints", every_n_train_steps=2, **more.pop("checkpoints", {})
    )
    module = Module(**more.pop("hparams", {"width": 32, "name": "small"}))
    trainer = lightning.Trainer(
        max_steps=steps,
        plugins=plugins,
        callbacks=[checkpoints],
        **dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False),
        accelerator="cpu",
        devices=1,
    )
    trainer.fit(module, DataLoader(data, batch_size=16), ckpt_path=resume)
    return module.state_dict(), losses, checkpoints


def io(folder: Path, **settings: Any) -> Any:
    pytest.importorskip("lightning")
    from lightck.integrations.lightning_io import LightckCheckpointIO

    return LightckCheckpointIO(folder / "store", **settings)


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return list(one) == list(other) and all(torch.equal(one[k], other[k]) for k in one)


def test_lightning_resumes_from_the_store_as_it_does_from_a_file(
    region_dir: Path, data: TensorDataset
) -> None:
    (region_dir / "f").mkdir()
    (region_dir / "s").mkdir()
    ends = {}
    for name, plugins in (("f", []), ("s", [io(region_dir / "s")])):
        folder = region_dir / name
        fit(folder, data, 8, plugins, checkpoints={"save_last": "link"})
        last = folder / "checkpoints" / "last.ckpt"
        assert sorted(os.listdir(folder / "checkpoints")) == ["epoch=1-step=8.ckpt", "last.ckpt"]
        linked = {"save_last": "link"}
        ends[name] = fit(folder, data, STEPS, plugins, last, checkpoints=linked)[:2]
    assert ends["f"][1] == ends["s"][1] and len(ends["s"][1]) == STEPS - 8
    assert same(ends["f"][0], ends["s"][0])
    small = sum(f.stat().st_size for f in (region_dir / "s" / "checkpoints").iterdir())
    assert small < 1000, "checkpoints lie in the store, and not beside it"


def test_a_killed_lightning_run_goes_on_from_a_checkpoint_that_is_whole(
    region_dir: Path, data: TensorDataset
) -> None:
    found: Path | None = None
    for kill_at in (3, 5, 7, 9, 10):
        child = processes.start(
            lambda parent, at=kill_at, ck=found: fit(  # type: ignore[misc]
                region_dir / "s", data, STEPS, [io(region_dir)], ck, kill_at=at
            )
        )
        assert child.join() == -9
        there = (region_dir / "s" / "checkpoints").glob("*.ckpt")
        # A run that is killed right after its first save leaves no checkpoint; the next one starts.
        found = max(there, key=lambda file: int(file.stem.rpartition("=")[2]), default=None)
    assert found is not None, "each save waits for the one before: the second run leaves one"
    torch.save(io(region_dir).load_checkpoint(found), region_dir / "file.ckpt")
    reference = fit(region_dir / "f", data, STEPS, [], region_dir / "file.ckpt")
    end, losses, _ = fit(region_dir / "s", data, STEPS, [io(region_dir)], found)
    assert losses == reference[1] and same(end, reference[0])


def test_the_best_three_and_the_last_keep_their_slots_while_others_come_and_go(
    region_dir: Path, data: TensorDataset
) -> None:
    settings = {"monitor": "score", "mode": "max", "save_top_k": 2, "save_last": True}
    *_, checkpoints = fit(region_dir, data, STEPS, [io(region_dir, slots=5)], checkpoints=settings)
    paths = {*checkpoints.best_k_models, checkpoints.last_model_path}
    assert len(paths) == 3
    for path in paths:
        step = int(io(region_dir).load_checkpoint(path)["global_step"])
        assert step == STEPS if path.endswith("last.ckpt") else step in (2, 4)
    # A new process holds them, too.
    plugin = io(region_dir, slots=5)
    for n in range(6):
        plugin.save_checkpoint({"n": n}, region_dir / "other.ckpt")
    assert plugin.load_checkpoint(region_dir / "other.ckpt")["n"] == 5
    assert all("state_dict" in plugin.load_checkpoint(path) for path in paths)
    plugin.teardown()


def test_more_checkpoints_than_slots_are_refused_and_none_is_lost(region_dir: Path) -> None:
    plugin = io(region_dir, slots=2)
    for n in (1, 2):
        plugin.save_checkpoint({"n": n}, region_dir / f"{n}.ckpt")
    with pytest.raises(lightck.RegionBusyError) as refused:
        plugin.save_checkpoint({"n": 3}, region_dir / "3.ckpt")
    assert "Lightning keeps 2 checkpoints here" in refused.value.__notes__[0]
    assert [plugin.load_checkpoint(region_dir / f"{n}.ckpt")["n"] for n in (1, 2)] == [1, 2]
    plugin.remove_checkpoint(region_dir / "1.ckpt")
    plugin.save_checkpoint({"n": 3}, region_dir / "3.ckpt")
    plugin.teardown()
    assert not (region_dir / "1.ckpt").exists()
    assert plugin.load_checkpoint(region_dir / "3.ckpt") == {"n": 3}
    plugin.teardown()


def test_a_hyperparameter_that_would_not_come_back_is_named(
    region_dir: Path, data: TensorDataset
) -> None:
    with pytest.raises(lightck.StateError, match="state/hyper_parameters/where is a pathlib"):
        fit(region_dir, data, 4, [io(region_dir)], hparams={"where": Path("x")})


def test_a_file_of_lightning_s_own_is_loaded_as_before(region_dir: Path) -> None:
    plugin, file = io(region_dir), region_dir / "own.ckpt"
    torch.save({"n": 1}, file)
    assert plugin.load_checkpoint(file) == {"n": 1}
    with pytest.raises(lightck.ConfigError, match="map_location"):
        plugin.save_checkpoint({"n": 2}, file)
        plugin.load_checkpoint(file, map_location="cuda")
    plugin.teardown()


# ---- Accelerate ----------------------------------------------------------------------------------


def accelerated(
    folder: Path, data: TensorDataset, *, states: bool, begin: str = "", until: int = STEPS
) -> tuple[list[float], dict[str, Any]]:
    """Train by Accelerate, with a state saved at every second step; go on from one, if given."""
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    losses: list[float] = []
    with contextlib.ExitStack() as held:
        if states:
            from lightck.integrations.accelerate_state import register

            held.enter_context(register(accelerator, folder / "store"))
        first = 0
        if begin:
            accelerator.load_state(str(folder / begin))
            first = int(begin.removeprefix("at-"))
        for step in range(first, until):
            batch = [each[8 * (step % 8) : 8 * (step % 8) + 8] for each in data.tensors]
            loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if step % 2:
                accelerator.save_state(str(folder / f"at-{step + 1}"))
    return losses, model.state_dict()


def test_accelerate_goes_on_from_a_state_in_the_store(
    region_dir: Path, data: TensorDataset
) -> None:
    (region_dir / "f").mkdir()
    (region_dir / "s").mkdir()
    reference = accelerated(region_dir / "f", data, states=False)
    accelerated(region_dir / "s", data, states=True, until=7)
    folder = region_dir / "s" / "at-6"
    assert sum(file.stat().st_size for file in folder.iterdir()) < sum(
        file.stat().st_size for file in (region_dir / "f" / "at-6").iterdir()
    )
    losses, end = accelerated(region_dir / "s", data, states=True, begin="at-6")
    assert losses == reference[0][6:] and same(end, reference[1])
    # The optimizers are Accelerate's again: its folder has all of them.
    assert accelerated(region_dir / "f", data, states=False, begin="at-6")[0] == losses


def test_a_folder_without_a_note_is_accelerate_s_and_one_that_is_too_old_is_told(
    region_dir: Path, data: TensorDataset
) -> None:
    accelerated(region_dir, data, states=False, until=6)
    losses, _ = accelerated(region_dir, data, states=True, begin="at-6")
    assert len(losses) == STEPS - 6
    assert len(accelerated(region_dir, data, states=True, begin="at-12")[0]) == 0
    with pytest.raises(lightck.NoSnapshotError, match="wanted: "):
        accelerated(region_dir, data, states=True, begin="at-8")
    os.unlink(region_dir / "at-12" / "lightck.json")
    with pytest.raises((lightck.ConfigError, OSError)):
        accelerated(region_dir, data, states=True, begin="at-12")


def test_each_of_two_quick_states_is_loaded_from_its_own_folder(region_dir: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    from lightck.integrations.accelerate_state import register

    accelerator, model = accelerate.Accelerator(cpu=True), nn.Linear(64, 64)
    accelerator.prepare(model)
    slow = {"slots": 4, "write_limit": 1 << 16}  # the first is not committed as the second comes
    with register(accelerator, region_dir / "store", **slow):
        for value in (1.0, 2.0):
            nn.init.constant_(model.weight, value)
            accelerator.save_state(str(region_dir / f"out-{value}"))
        for value in (1.0, 2.0):
            accelerator.load_state(str(region_dir / f"out-{value}"))
            assert model.weight.unique().tolist() == [value]


def test_a_folder_whose_state_was_not_committed_never_gives_the_next_run_s(
    region_dir: Path,
) -> None:
    accelerate = pytest.importorskip("accelerate")
    from lightck.integrations.accelerate_state import register

    accelerator, model = accelerate.Accelerator(cpu=True), nn.Linear(64, 64)
    accelerator.prepare(model)

    def die_before_the_commit(parent: processes.Parent) -> None:
        register(accelerator, region_dir / "store", write_limit=1)
        accelerator.save_state(str(region_dir / "killed"))
        os._exit(9)

    assert processes.start(die_before_the_commit).join() == 9
    with register(accelerator, region_dir / "store") as states:
        accelerator.save_state(str(region_dir / "next"))
        assert states.future is not None
        states.future.result()
        with pytest.raises(lightck.NoSnapshotError, match="step 1 .* was not committed"):
            accelerator.load_state(str(region_dir / "killed"))
        accelerator.load_state(str(region_dir / "next"))


def test_what_accelerate_has_not_prepared_is_refused(region_dir: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    from lightck.integrations.accelerate_state import register

    with pytest.raises(lightck.ConfigError, match="nothing is prepared"):
        register(accelerate.Accelerator(cpu=True), region_dir / "store")
