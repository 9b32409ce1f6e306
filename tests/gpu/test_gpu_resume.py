"""Resumed training on a device is bit-identical, whatever the loop is made of."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gpu_jobs import CLASSES, WIDTH, Job, Mode, check
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

import lightck
from support import processes

# What torch warns of on a GPU is not known here; lightck's own warnings are not what is tested.
pytestmark = pytest.mark.filterwarnings("default")

_UPDATES: dict[str, dict[str, bool]] = {
    "loop": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
    "capturable": {"capturable": True, "foreach": True},
    "amsgrad": {"amsgrad": True},
}


def apart(mode: Mode, work: Callable[[], None]) -> None:
    """Work in a process of its own: some leaves threads behind, which tests that fork would die of.

    Not on a GPU, which a forked process cannot use; the tests of one are run by themselves.
    """
    if mode.gpu:
        work()
    else:
        processes.run(work)


@pytest.mark.parametrize("update", _UPDATES)
def test_every_form_of_an_optimizer_resumes(update: str, mode: Mode, region_dir: Path) -> None:
    class Updated(Job):
        def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
            options: dict[str, Any] = dict(_UPDATES[update])
            if not self.gpu:
                options.pop("capturable", None)  # a GPU's alone
            return torch.optim.AdamW(model.parameters(), lr=1e-2, **options)

    check(Updated, mode, region_dir / "run")


@pytest.mark.parametrize("update", ["loop", "foreach", "fused"])
def test_a_run_on_the_cpu_goes_on_where_the_model_is_now(
    update: str, auto: Mode, region_dir: Path
) -> None:
    class Updated(Job):
        def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
            return torch.optim.AdamW(model.parameters(), lr=1e-2, **_UPDATES[update])

    first, second = Updated("cpu"), Updated(auto.device, seed=1)
    with lightck.attach(first.model, first.optimizers, region_dir / "run") as handle:
        for t in range(3):
            first.step(t, handle)
    info = lightck.restore(second.model, second.optimizers, region_dir / "run")
    assert info is not None and info.step == 3
    assert not [name for name in info.skipped if not name.startswith("rng")]
    for mine, theirs in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(mine, theirs.cpu())
        for key, value in first.optimizers[0].state[mine].items():
            there = second.optimizers[0].state[theirs][key]
            assert torch.equal(value, there.cpu()), key
            assert there.device == theirs.device or (key == "step" and update != "fused")
    second.step(3, None)


class Mixed(Job):
    """Autocast with a scaled loss; one step's gradients overflow, and the scaler skips it."""

    def prepare(self) -> None:
        self.scaler = torch.amp.GradScaler(self.device, init_scale=1024.0, growth_interval=2)
        self.extras = {"scaler": self.scaler}

    def step(self, t: int, handle: lightck.Handle | None) -> torch.Tensor:
        x, y = self.batch(t)
        kind = torch.float16 if self.gpu else torch.bfloat16
        with torch.autocast(self.device, dtype=kind):
            loss = self.loss(x, y)
        self.scaler.scale(loss).backward()
        if t == 3:
            next(self.model.parameters()).grad.fill_(float("inf"))  # type: ignore[union-attr]
        self.scaler.step(self.optimizers[0])
        self.scaler.update()
        self.optimizers[0].zero_grad()
        return loss.detach()


def test_mixed_precision_with_a_scaler_resumes(mode: Mode, region_dir: Path) -> None:
    check(Mixed, mode, region_dir / "run")


class Compiled(Job):
    """The model is compiled; on a GPU into kernels."""

    def prepare(self) -> None:
        backend = "inductor" if self.gpu else "aot_eager"
        self.compiled = torch.compile(self.model, backend=backend)

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(self.compiled(x), y)


def test_a_compiled_model_resumes(auto: Mode, region_dir: Path) -> None:
    apart(auto, lambda: check(Compiled, auto, region_dir / "run"))


class Graphed(Job):
    """Forward, backward and update are one CUDA graph; marks stand around its replay.

    On a CPU the same operations, run one by one.
    """

    def make_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, CLASSES))

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-2, capturable=self.gpu)

    def prepare(self) -> None:
        self.x, self.y = (part.clone() for part in self.batch(0))
        self.graph: Any = None
        if not self.gpu:
            for _ in range(3):
                self.body()
            return
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(3):
                self.body()
        torch.cuda.current_stream().wait_stream(aside)
        self.optimizers[0].zero_grad(set_to_none=True)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.body()

    def body(self) -> None:
        self.optimizers[0].zero_grad(set_to_none=True)
        self.out = self.loss(self.x, self.y)
        self.out.backward()
        self.optimizers[0].step()

    def step(self, t: int, handle: lightck.Handle | None) -> torch.Tensor:
        x, y = self.batch(t)
        self.x.copy_(x)
        self.y.copy_(y)
        if handle is not None:
            handle.before_update()
        if self.graph is not None:
            self.graph.replay()
        else:
            self.body()
        if handle is not None:
            handle.after_update()
        return self.out.detach().clone()


def test_a_step_that_is_one_graph_resumes(mode: Mode, region_dir: Path) -> None:
    check(Graphed, mode, region_dir / "run")


class UpdateGraphed(Graphed):
    """Only the update is a graph: forwards and backwards are seen, the update is marked."""

    def prepare(self) -> None:
        super().prepare()
        if self.gpu:
            for parameter in self.model.parameters():
                parameter.grad = torch.zeros_like(parameter)
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.optimizers[0].step()

    def step(self, t: int, handle: lightck.Handle | None) -> torch.Tensor:
        loss = self.loss(*self.batch(t))
        self.optimizers[0].zero_grad(set_to_none=False)
        loss.backward()
        if handle is not None:
            handle.before_update()
        if self.graph is not None:
            self.graph.replay()
        else:
            self.optimizers[0].step()
        if handle is not None:
            handle.after_update()
        return loss.detach()


def test_an_update_that_is_one_graph_resumes(mode: Mode, region_dir: Path) -> None:
    check(UpdateGraphed, mode, region_dir / "run")


class OtherStream(Job):
    """The whole loop on a stream that is not the default one."""

    def prepare(self) -> None:
        self.stream = torch.cuda.Stream() if self.gpu else None

    def around(self) -> AbstractContextManager[Any]:
        if self.stream is None:
            return nullcontext()
        self.stream.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(self.stream)


def test_a_loop_on_another_stream_resumes(mode: Mode, region_dir: Path) -> None:
    check(OtherStream, mode, region_dir / "run")


class TwoStreams(Job):
    """Forward and backward on one stream, the update on another."""

    def prepare(self) -> None:
        self.streams = [torch.cuda.Stream(), torch.cuda.Stream()] if self.gpu else []

    def step(self, t: int, handle: lightck.Handle | None) -> torch.Tensor:
        if not self.gpu:
            return super().step(t, handle)
        compute, update = self.streams
        outer = torch.cuda.current_stream()
        compute.wait_stream(outer)
        compute.wait_stream(update)
        with torch.cuda.stream(compute):
            loss = self.loss(*self.batch(t))
            loss.backward()
        update.wait_stream(compute)
        with torch.cuda.stream(update):
            self.optimizers[0].step()
            self.optimizers[0].zero_grad(set_to_none=False)
        outer.wait_stream(update)
        return loss.detach()


def test_an_update_on_a_stream_of_its_own_resumes(mode: Mode, region_dir: Path) -> None:
    check(TwoStreams, mode, region_dir / "run")


class Rivals(Job):
    """Two models with an optimizer each, as a GAN has them."""

    def prepare(self) -> None:
        with torch.device(self.device):
            judge = nn.Sequential(nn.Linear(CLASSES, 8), nn.GELU(), nn.Linear(8, 1))
        self.models = [self.model, judge]
        self.optimizers.append(torch.optim.SGD(judge.parameters(), lr=1e-2, momentum=0.9))

    def step(self, t: int, handle: lightck.Handle | None) -> torch.Tensor:
        x, y = self.batch(t)
        made, judge = self.model(x), self.models[1]
        real = torch.eye(CLASSES, device=self.device)[y]
        told = judge(made.detach()).mean() - judge(real).mean()
        told.backward()
        self.optimizers[1].step()
        self.optimizers[1].zero_grad()
        loss: torch.Tensor = functional.cross_entropy(made, y) - judge(made).mean()
        loss.backward()
        self.optimizers[0].step()
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        return loss.detach()


def test_two_optimizers_resume(mode: Mode, region_dir: Path) -> None:
    check(Rivals, mode, region_dir / "run")


class Normed(Job):
    """Convolutions with BatchNorm, whose buffers a forward changes."""

    def make_model(self) -> nn.Module:
        return nn.Sequential(
            *(nn.Unflatten(1, (1, 4, 4)), nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4)),
            *(nn.ReLU(), nn.Flatten(), nn.Linear(64, CLASSES)),
        )


def test_buffers_that_a_forward_changes_resume(mode: Mode, region_dir: Path) -> None:
    check(Normed, mode, region_dir / "run")


class Half(Job):
    """Parameters of 16 bits, whose tensors start anywhere."""

    def make_model(self) -> nn.Module:
        return super().make_model().bfloat16()

    def batch(self, t: int) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = super().batch(t)
        return x.bfloat16(), y


def test_sixteen_bits_resume(mode: Mode, region_dir: Path) -> None:
    check(Half, mode, region_dir / "run")


@contextmanager
def one_rank() -> Iterator[None]:
    """torch.distributed with this process alone."""
    with tempfile.TemporaryDirectory() as folder:
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()


class Sharded(Job):
    """FSDP2: parameters are DTensors."""

    def prepare(self) -> None:
        mesh = init_device_mesh(self.device, (1,))
        fully_shard(self.model, mesh=mesh)
        self.optimizers = [self.make_optimizer(self.model)]


def test_dtensors_resume(mode: Mode, region_dir: Path) -> None:
    def work() -> None:
        with one_rank():
            check(Sharded, mode, region_dir / "run")

    apart(mode, work)
