"""Every kind of tensor that a model may hold comes back bit by bit, killed anywhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

import lightck
from support.e2e.jobs import Plain, batch, small_model
from support.e2e.resume import Bed, request, same_end
from support.e2e.trainer import Run


class TiedModel(nn.Module):
    """A head that shares the embedding's weight, and one block used under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 6)
        self.block = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))
        self.again = self.block
        self.head = nn.Linear(6, 9, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.again(self.block(self.embed(x))))


class Tied(Plain):
    def setup(self) -> None:
        self.models = [TiedModel()]
        self.optimizers = [self.make_optimizer()]

    def step(self, t: int, run: Run) -> Any:
        x = torch.randint(0, 9, (12,))
        loss = F.cross_entropy(self.model(x), (x + 1) % 9)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def more(self) -> dict[str, Any]:
        model = self.model
        return {
            "weight is tied": model.head.weight is model.embed.weight,
            "block is tied": model.again is model.block,
            "at one place": model.head.weight.data_ptr() == model.embed.weight.data_ptr(),
        }


def test_tied_weights_stay_tied_and_resume(bed: Bed) -> None:
    bed.check(Tied)
    saved = lightck.load(bed.folder / "closed")["model"]
    assert saved["head.weight"].data_ptr() == saved["embed.weight"].data_ptr()


class Adapted(nn.Module):
    """A frozen layer with a low-rank correction."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(6, 400)
        self.base.requires_grad_(False)
        self.down = nn.Linear(6, 2, bias=False)
        self.up = nn.Linear(2, 400, bias=False)
        self.head = nn.Linear(400, 5)
        self.head.weight.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.base(x) + self.up(self.down(x))))


class Lora(Plain):
    """Trains the correction; the optimizer holds that only."""

    def setup(self) -> None:
        self.models = [Adapted()]
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizers = [torch.optim.AdamW(trained, lr=0.05)]

    def finished(self, run: Run) -> None:
        if run.handle is not None:
            run.handle.wait()
            stats = run.handle.stats()
            frozen = sum(p.nbytes for p in self.model.parameters() if not p.requires_grad)
            run.write(skipped=stats.skipped_unchanged_bytes, frozen=frozen)


def test_frozen_tensors_are_written_once_per_slot_and_resume(bed: Bed) -> None:
    bed.check(Lora)
    run = bed.run(Lora, "attach", "whole").check_ended()
    # Snapshots 1 to 7 are opened by then; the first one of each of the two slots writes all.
    assert run.value("skipped") == (Lora.steps - 1 - 2) * run.value("frozen")


class WrittenBehind(Lora):
    """NumPy writes into a frozen tensor, which moves no version counter."""

    def step(self, t: int, run: Run) -> Any:
        loss = super().step(t, run)
        if t == 4:
            self.model.base.weight.detach().numpy()[7, 3] += 1
        return loss


def test_write_through_numpy_into_a_frozen_tensor_is_captured(bed: Bed) -> None:
    for k in (5, 6, 7):  # so that each slot is the one with the first snapshot after the write
        bed.fresh(f"k{k}").check(WrittenBehind, kill_step=k)


class Kinds(nn.Module):
    """Parameters and buffers of many types and of no size; the forward changes the buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(()))
        self.none = nn.Parameter(torch.randn(0, 3))
        self.waves = nn.Parameter(torch.randn(6, 5, dtype=torch.complex64))
        self.brief = nn.Parameter(torch.randn(6, 5).to(torch.bfloat16))
        self.fine = nn.Parameter(torch.randn(6, 5, dtype=torch.float64))
        self.register_buffer("mask", torch.rand(5) > 0.5)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("tiny", torch.zeros(5, dtype=torch.int8))
        self.register_buffer("empty", torch.zeros(2, 0, 4, dtype=torch.bool))
        self.register_buffer("e4m3", torch.randn(5).to(torch.float8_e4m3fn))
        self.register_buffer("e5m2", torch.randn(5).to(torch.float8_e5m2))
        self.register_buffer("mirror", torch.randn(3, 5, dtype=torch.complex128).conj())
        self.register_buffer("phase", torch.randn(4, dtype=torch.complex64))
        self.register_buffer("spare", torch.zeros(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = (x.to(torch.complex64) @ self.waves).abs() * self.scale
        out = out + (x.to(torch.bfloat16) @ self.brief).float() + (x.double() @ self.fine).float()
        out = torch.where(self.mask.clone(), out, 0.5 * out + self.e4m3.float() + self.e5m2.float())
        out = out + self.mirror.abs().sum(0).float() + self.tiny + self.none.sum()
        if self.training:
            self.mask.logical_xor_(torch.rand(5) > 0.7)
            self.count.add_(1)
            self.tiny.add_((out.mean(0) > 0).to(torch.int8))
            self.e4m3.copy_((self.e4m3.float() * 0.5 + out.detach()[0]).clamp(-9, 9))
            self.e5m2.copy_((self.e5m2.float() * 0.5 + out.detach()[1]).clamp(-9, 9))
            self.mirror.mul_(torch.view_as_complex(torch.tensor([0.6, 0.8])))
            self.spare.fill_(float(self.count))
        return out


class EveryKind(Plain):
    def setup(self) -> None:
        self.models = [Kinds()]
        self.optimizers = [torch.optim.AdamW(self.model.parameters(), lr=0.01, foreach=False)]


def test_tensors_of_every_type_and_of_no_size_resume(bed: Bed) -> None:
    bed.check(EveryKind)
    saved = lightck.load(bed.folder / "closed")["model"]
    assert "spare" not in saved, "a non-persistent buffer was saved"
    assert set(saved) == set(Kinds().state_dict())


class Strided(nn.Module):
    """Memory orders other than row-major, with gaps, overlapping, expanded."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
        self.turned = nn.Parameter(torch.randn(8, 5, 4).permute(2, 0, 1))
        self.gaps = nn.Parameter(torch.randn(5, 16)[:, ::2])
        self.wide = nn.Parameter(torch.randn(1, 5).expand(4, 5), requires_grad=False)
        self.register_buffer("window", torch.randn(9).as_strided((5, 5), (1, 1)))
        self.register_buffer("spread", torch.randn(5, 1).expand(5, 8))
        self.register_buffer("column", torch.randn(6, 5)[:, 2])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        image = x[:, :3, None, None].expand(-1, 3, 4, 4).contiguous()
        out = self.conv(image).mean((2, 3))
        # An expanded buffer changes through its one row, the overlapping one through its base.
        if self.training:
            self.spread[:, 0].mul_(0.9)
            self.window[0].add_(out.detach().mean())
            self.column.add_(out.detach()[0, :6].mean())
        mixed = torch.einsum("bi,kij->bj", out, self.turned) + self.wide.sum(0)
        return mixed + out @ (self.gaps + self.spread).T + self.window[0] + self.column.sum()


class EveryStride(Plain):
    def setup(self) -> None:
        self.models = [Strided()]
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizers = [torch.optim.Adam(trained, lr=0.01)]

    def more(self) -> dict[str, Any]:
        tensors = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        state = self.optimizer.state[self.model.conv.weight]
        return {
            "strides": {name: tensor.stride() for name, tensor in tensors.items()},
            "state": {key: value.stride() for key, value in state.items()},
        }


def test_permuted_expanded_and_overlapping_tensors_resume(bed: Bed) -> None:
    bed.check(EveryStride)


class Late(Plain):
    """Parameters without gradients: one never has any, one has some from step 4 on."""

    def setup(self) -> None:
        self.models = [nn.ModuleDict({"main": small_model(), "late": nn.Linear(6, 5)})]
        self.model["never"] = nn.Linear(300, 300)
        self.optimizers = [self.make_optimizer()]

    def step(self, t: int, run: Run) -> Any:
        x, y = batch()
        out = self.model["main"](x)
        if t >= 4:
            out = out + self.model["late"](x)
        loss = F.cross_entropy(out, y)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach()


@pytest.mark.parametrize("k", [4, 5, 6, 7])
def test_parameters_that_get_gradients_late_or_never_resume(bed: Bed, k: int) -> None:
    bed.check(Late, kill_step=k)


class Parametrized(Plain):
    """Weight and spectral norm: buffers that a training forward changes decide the weights."""

    def setup(self) -> None:
        model = small_model()
        parametrizations.weight_norm(model[0])
        parametrizations.spectral_norm(model[4])
        self.models = [model]
        self.optimizers = [self.make_optimizer()]


def test_parametrized_weights_resume(bed: Bed) -> None:
    bed.check(Parametrized)


class ManyModel(nn.Module):
    """Very many small tensors."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.each = nn.ParameterList([torch.randn(3) for _ in range(count)])

    def forward(self) -> torch.Tensor:
        return torch.stack(list(self.each)) * torch.rand(3)


class ManyTensors(Plain):
    steps = 4

    def setup(self) -> None:
        self.models = [ManyModel(self.params["count"])]
        self.optimizers = [torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)]

    def step(self, t: int, run: Run) -> Any:
        loss = self.model().square().sum()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach()


def test_ten_thousand_tensors_with_their_state_resume(bed: Bed) -> None:
    fields = {"params": {"count": 10_000}, "timeout_s": 250.0}
    bed.check(ManyTensors, kills=("update", "after"), kill_step=3, **fields)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_a_hundred_thousand_tensors_resume(bed: Bed) -> None:
    fields = {"params": {"count": 100_000}, "timeout_s": 900.0}
    bed.check(ManyTensors, kills=("update", "after"), kill_step=3, **fields)


class Huge(Plain):
    """One tensor of several GB, trained without state."""

    steps = 3

    def setup(self) -> None:
        self.models = [nn.EmbeddingBag(self.params["rows"], 1024, mode="sum", sparse=True)]
        self.optimizers = [torch.optim.SGD(self.model.parameters(), lr=0.1)]

    def step(self, t: int, run: Run) -> Any:
        rows = torch.randint(0, self.params["rows"], (64, 4))
        loss = self.model(rows).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach()


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_a_tensor_of_several_gigabytes_resumes(bed: Bed) -> None:
    # 2.2 GiB: beyond every 31-bit length, and two slots of it fit beside it in 24 GB.
    rows = (9 << 28) // (4 * 1024)
    fields = {"params": {"rows": rows}, "timeout_s": 900.0, "last": 3}
    plain, dead = bed.server.run(
        *[_huge(bed, mode, fields) for mode in ("plain", "attach")], parallel=1
    )
    dead.check_killed()
    again = bed.run(Huge, "resume", **fields).check_ended()
    assert again.value("restored") == 1
    same_end(again, plain.check_ended())


def _huge(bed: Bed, mode: str, fields: dict[str, Any]) -> dict[str, Any]:
    death = {"kill_step": 3, "kill_where": "backward"} if mode == "attach" else {}
    return request(Huge, bed.folder / "run", mode, **fields, **death)
