"""Find out whether torch's fused kernels give the native update's bits on this machine.

The order of operations inside torch's kernels, fused multiply-adds above all, is the choice of the
compiler that built torch, and of the CPU. No list of versions tells it: both are run and compared.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import torch

from lightck.region import native_update
from lightck.region.native_update import (
    ADAMW,
    AMSGRAD,
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    MAXIMIZE,
    NESTEROV,
    NOT_STREAMED,
    RULE_DTYPE,
    SGD,
    TASK_DTYPE,
    UNFUSED,
)

_LENGTHS = (1, 7, 8, 15, 16, 17, 31, 331)
"""Whole vectors and tails of every kind: a kernel's tail may be compiled unlike its body."""
_DTYPES = {FLOAT32: torch.float32, BFLOAT16: torch.bfloat16, FLOAT16: torch.float16}
_STEPS = 2


@cache
def order_of(kinds: frozenset[int], types: frozenset[int], threads: bool) -> int | None:
    """Return the flag under which native updates of these kinds have torch's bits; None: none has.

    `types` are those of the parameters. The result is kept for the process. Takes some ten
    milliseconds for each kind and type. `threads` is only a key: with more of them torch may take
    another way.
    """
    for order in (0, UNFUSED):
        if all(
            is_same_as_torch(kind, order, type_)
            for kind in sorted(kinds)
            for type_ in sorted(types)
        ):
            return order
    return None


def is_same_as_torch(kind: int, order: int, type_: int) -> bool:
    """Tell whether native updates of a kind, order and type have the bits of torch's kernel."""
    rng = torch.Generator().manual_seed(0x1C4C)
    variants = (0, MAXIMIZE, NESTEROV if kind == SGD else AMSGRAD)
    return all(
        _same(kind, flags | order, type_, decay, beta, rng)
        for flags in variants
        for decay in (0.0, 0.013)
        for beta in (0.9, 0.37)
    )


def _same(
    kind: int, flags: int, type_: int, decay: float, beta: float, rng: torch.Generator
) -> bool:
    dtype = _DTYPES[type_]
    rule = np.zeros(1, RULE_DTYPE)
    rule["lr"], rule["weight_decay"], rule["kind"], rule["flags"] = 3e-3, decay, kind, flags
    rule["beta1"], rule["beta2"], rule["eps"] = beta, 0.995, 1e-7
    rule["momentum"], rule["dampening"] = beta, 0.0 if flags & NESTEROV else 0.11
    for length in _LENGTHS:
        theirs = [torch.randn(length, generator=rng) for _ in range(2)]
        theirs += [torch.rand(length, generator=rng) for _ in range(2)]
        theirs = [tensor.to(dtype) for tensor in theirs]
        gradients = [torch.randn(length, generator=rng).to(dtype) for _ in range(_STEPS)]
        if kind != SGD:
            _cancel(theirs, gradients[0], rule[0])
        ours = [tensor.clone() for tensor in theirs]
        counts = torch.zeros(()), torch.zeros(())
        for gradient in gradients:
            _torch_step(kind, theirs, gradient.clone(), counts[0], rule[0])
            _native_step(kind, type_, ours, gradient, counts[1], rule)
        if not all(a.equal(b) for a, b in zip(map(_plain, theirs), map(_plain, ours), strict=True)):
            return False
    return True


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float().nan_to_num(1e30)  # where `_cancel` left the second moment below zero


def _cancel(held: list[torch.Tensor], gradient: torch.Tensor, rule: np.void) -> None:
    """Change numbers so that the next of Adam's updates nearly cancels them out.

    The order of operations is told by a product's last bit. Rounded to a half type two sums that
    differ there are equal, but for one in thousands, unless hardly more than that bit is left.
    """
    p, first, second, largest = (tensor.double() for tensor in held)
    beta1, beta2, decay = float(rule["beta1"]), float(rule["beta2"]), float(rule["weight_decay"])
    g = gradient.double() * (-1 if rule["flags"] & MAXIMIZE else 1)
    kept = 1.0 - float(rule["lr"]) * decay if rule["kind"] == ADAMW else 1.0
    if rule["kind"] != ADAMW:
        g += decay * p
    held[1][1::3] = (-(1 - beta1) / beta1 * g)[1::3]
    held[2][2::3] = (-(1 - beta2) / beta2 * g * g)[2::3]
    bound = beta2 * second + (1 - beta2) * g * g
    if rule["flags"] & AMSGRAD:
        bound = bound.maximum(largest)
    root = (bound / (1 - beta2)).sqrt() + float(rule["eps"])
    step = float(rule["lr"]) / (1 - beta1) * (beta1 * first + (1 - beta1) * g) / root
    held[0][0::3] = (step / kept)[0::3]


def _torch_step(
    kind: int, held: list[torch.Tensor], gradient: torch.Tensor, count: torch.Tensor, rule: np.void
) -> None:
    p, first, second, largest = ([tensor] for tensor in held)
    flags, decay = int(rule["flags"]), float(rule["weight_decay"])
    if kind == SGD:
        torch._fused_sgd_(
            p,
            [gradient],
            first,
            lr=float(rule["lr"]),
            weight_decay=decay,
            momentum=float(rule["momentum"]),
            dampening=float(rule["dampening"]),
            nesterov=bool(flags & NESTEROV),
            maximize=bool(flags & MAXIMIZE),
            is_first_step=False,
        )
        return
    torch._foreach_add_([count], 1)
    kernel = torch._fused_adamw_ if kind == ADAMW else torch._fused_adam_
    kernel(
        p,
        [gradient],
        first,
        second,
        largest if flags & AMSGRAD else [],
        [count],
        lr=float(rule["lr"]),
        weight_decay=decay,
        beta1=float(rule["beta1"]),
        beta2=float(rule["beta2"]),
        eps=float(rule["eps"]),
        amsgrad=bool(flags & AMSGRAD),
        maximize=bool(flags & MAXIMIZE),
    )


def _native_step(
    kind: int,
    type_: int,
    held: list[torch.Tensor],
    gradient: torch.Tensor,
    count: torch.Tensor,
    rule: np.ndarray,
) -> None:
    task = np.zeros(1, TASK_DTYPE)
    adam = kind != SGD
    used = held if adam and int(rule["flags"][0]) & AMSGRAD else held[: 3 if adam else 2]
    for name, tensor in zip(("parameter", "first", "second", "largest"), used, strict=False):
        task[name] = tensor.data_ptr()
    task["gradient"], task["length"] = gradient.data_ptr(), gradient.numel()
    task["type"], task["copies"] = type_, NOT_STREAMED
    if adam:
        task["step"] = count.data_ptr()
    native_update.update(rule, task)
