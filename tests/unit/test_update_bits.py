"""The native update gives the bits of torch's fused kernels, and streams just what it computes."""

from __future__ import annotations

import itertools
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from lightck import optim
from lightck.optim.openmp import gomp_parallel
from lightck.optim.self_test import is_same_as_torch, order_of
from lightck.region._ffi import ffi, library
from lightck.region.native_update import ADAM, ADAMW, BFLOAT16, FLOAT16, FLOAT32, SGD, UNFUSED

KERNELS = ("avx512", "avx2", "portable")
ROUNDS = {4: 40, 2: 15}  # by the size of an element: half types share the arithmetic
TYPES = [torch.float32, torch.bfloat16, torch.float16]
SPECIAL = torch.tensor([0.0, -0.0, 1e-39, -1e-45, 3e38, -3e38, float("inf"), float("nan"), 1e-25])


@pytest.fixture(autouse=True)
def _same_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    library().lck_kernel(b"avx512", ffi.NULL)


def select(kernel: str) -> None:
    if library().lck_kernel(kernel.encode(), ffi.NULL) < 0:
        pytest.skip(f"this CPU has no {kernel}")


def canonical(tensor: torch.Tensor) -> torch.Tensor:
    """Bits, with every NaN alike: sign and payload are not torch's."""
    flat = tensor.detach().reshape(-1)
    bits = flat.view(torch.int32 if flat.element_size() == 4 else torch.int16).clone()
    bits[flat.isnan()] = -1
    return bits


def drawn(dice: random.Random, length: int) -> torch.Tensor:
    rng = torch.Generator().manual_seed(dice.getrandbits(31))
    values = torch.randn(length, generator=rng) * 10.0 ** dice.choice([-30, -6, -2, 0, 3])
    for _ in range(dice.choice([0, 0, 3])):
        values[dice.randrange(length)] = SPECIAL[dice.randrange(len(SPECIAL))]
    return values


def options(dice: random.Random, kind: str) -> dict[str, Any]:
    common = {
        "lr": dice.choice([1e-4, 0.1, torch.tensor(3e-3)]) if kind != "SGD" else 0.05,
        "weight_decay": dice.choice([0.0, 0.013]),
        "maximize": dice.random() < 0.3,
    }
    if kind == "SGD":
        momentum = dice.choice([0.0, 0.9, 0.5])
        nesterov = momentum > 0 and dice.random() < 0.5
        dampening = 0.0 if nesterov else dice.choice([0.0, 0.1])
        return {**common, "momentum": momentum, "nesterov": nesterov, "dampening": dampening}
    betas = dice.choice([0.9, 0.37, 0.5]), dice.choice([0.999, 0.95])
    return {
        **common,
        "betas": betas,
        "eps": dice.choice([1e-8, 0.0, 1e-3]),
        "amsgrad": dice.random() < 0.3,
    }


def lengths(dice: random.Random) -> list[int]:
    small = [dice.randrange(1, 70) for _ in range(dice.randrange(1, 5))]
    return [*small, dice.choice([4096, 65_536 + 5, 100_003, 1000])]


CASES = [*itertools.product(["AdamW", "Adam"], TYPES), ("SGD", torch.float32)]


@pytest.mark.parametrize(("kind", "dtype"), CASES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_every_step_has_the_bits_of_torch_s_fused_kernel(
    kind: str, dtype: torch.dtype, kernel: str
) -> None:
    select(kernel)
    seed = random.randrange(1 << 30)
    print("seed", seed)
    dice = random.Random(seed)
    for _ in range(ROUNDS[dtype.itemsize]):
        torch.set_num_threads(dice.choice([1, 2]))
        chosen, sizes = options(dice, kind), lengths(dice)
        first = [drawn(dice, size).to(dtype) for size in sizes]
        theirs = [nn.Parameter(tensor.clone()) for tensor in first]
        ours = [nn.Parameter(tensor.clone()) for tensor in first]
        expected = getattr(torch.optim, kind)(theirs, fused=True, **chosen)
        found = getattr(optim, kind)(ours, **chosen)
        for step in range(dice.randrange(2, 5)):
            for p, q in zip(theirs, ours, strict=True):
                p.grad = drawn(dice, p.numel()).to(dtype)
                q.grad = p.grad.clone()
            expected.step()
            found.step()
            assert step == 0 or not found.why_not, found.why_not
        for p, q in zip(theirs, ours, strict=True):
            assert torch.equal(canonical(p), canonical(q)), (chosen, p.numel())
            for key, value in expected.state[p].items():
                if isinstance(value, torch.Tensor):
                    assert torch.equal(canonical(value), canonical(found.state[q][key])), key


def test_this_machine_s_torch_has_an_order_that_is_known() -> None:
    order = order_of(frozenset({ADAM, ADAMW, SGD}), frozenset({FLOAT32}), True)
    assert order is not None
    halves = order_of(frozenset({ADAM, ADAMW}), frozenset({BFLOAT16, FLOAT16}), True)
    assert halves == order


@pytest.mark.parametrize("kind", [ADAM, ADAMW])
@pytest.mark.parametrize("type_", [FLOAT32, BFLOAT16, FLOAT16])
def test_two_orders_are_told_apart_by_every_type(kind: int, type_: int) -> None:
    """Rounding to a half type hides nearly every difference from numbers at random."""
    assert is_same_as_torch(kind, 0, type_) != is_same_as_torch(kind, UNFUSED, type_)


def test_parameters_of_several_types_are_updated_in_one_step() -> None:
    theirs = [nn.Parameter(torch.ones(77, dtype=dtype)) for dtype in TYPES]
    ours = [nn.Parameter(p.detach().clone()) for p in theirs]
    expected, found = torch.optim.AdamW(theirs, fused=True), optim.AdamW(ours)
    for _ in range(3):
        for p, q in zip(theirs, ours, strict=True):
            p.grad, q.grad = torch.ones_like(p), torch.ones_like(q)
        expected.step()
        found.step()
    assert not found.why_not
    assert all(p.equal(q) for p, q in zip(theirs, ours, strict=True))


@pytest.mark.parametrize("type_", [torch.bfloat16, torch.float16])
def test_half_types_that_torch_does_otherwise_are_left_to_it(type_: torch.dtype) -> None:
    p, q = (nn.Parameter(torch.ones(8, dtype=type_)) for _ in range(2))
    sgd, adamw = optim.SGD([p], lr=0.1), optim.AdamW([q], lr=0.1)
    for parameter in (p, q):
        parameter.grad = torch.ones_like(parameter)
    for optimizer in (sgd, adamw):
        optimizer.step()
    adamw.state[q]["exp_avg"] = torch.zeros(8)
    with pytest.raises(RuntimeError):  # torch's, which takes one type
        adamw.step()
    sgd.step()
    assert "float16" in sgd.why_not and "another type" in adamw.why_not


@pytest.mark.parametrize("unscales", [False, True])
@pytest.mark.parametrize("scale", [1.0, 1024.0, 2.0**127])
def test_a_scaler_leaves_its_steps_to_torch_bit_for_bit(scale: float, unscales: bool) -> None:
    """The largest scale overflows; unscaled to be clipped, the gradients say so by themselves."""
    kind = torch.float32 if unscales else torch.float16  # which torch would not unscale
    theirs, ours = (nn.Parameter(torch.ones(99, dtype=kind)) for _ in range(2))
    steppers = [torch.optim.AdamW([theirs], fused=True), optim.AdamW([ours])]
    for p, optimizer in zip([theirs, ours], steppers, strict=True):
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        for i in range(4):
            optimizer.zero_grad()
            loss = (p.float() * torch.linspace(-2, 2, 99)).square().sum()
            if i % 2:
                scaler.scale(loss).backward()
                if unscales:
                    scaler.unscale_(optimizer)
                scaler.step(optimizer)
                scaler.update()
            else:
                loss.backward()
                optimizer.step()
    assert torch.equal(theirs, ours) and ours.isfinite().all()


THREADS = """
import ctypes, os, threading, torch
from lightck import optim
from lightck.optim.openmp import gomp_parallel

BODY = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
PARALLEL = ctypes.CFUNCTYPE(None, BODY, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)

def tasks():
    return set(map(int, os.listdir("/proc/self/task")))

def run():
    before = tasks()
    torch.ones(1 << 22).exp_()  # starts this thread's team
    team = tasks() - before | {threading.get_native_id()}
    seen = set()
    body = BODY(lambda _: seen.add(threading.get_native_id()))
    ctypes.cast(gomp_parallel(), PARALLEL)(body, None, 2, 0)
    assert seen == team and len(team) == 2, (seen, team)
    p = torch.nn.Parameter(torch.ones(400_000))
    optimizer, there = optim.AdamW([p]), tasks()
    for _ in range(3):
        p.grad = torch.ones_like(p)
        optimizer.step()
    assert not optimizer.why_not and tasks() == there, "threads beside torch's"

torch.set_num_threads(2)
run()
other = threading.Thread(target=run)
other.start()
other.join()
print("done")
"""


@pytest.mark.parametrize("policy", ["PASSIVE", "ACTIVE"])
def test_updates_run_on_the_threads_that_torch_s_kernels_run_on(policy: str) -> None:
    if not gomp_parallel():
        pytest.skip("torch has no OpenMP runtime here")
    environment = {**os.environ, "OMP_WAIT_POLICY": policy}
    done = subprocess.run(
        [sys.executable, "-c", THREADS],
        env=environment,
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.stdout == "done\n", done.stderr
