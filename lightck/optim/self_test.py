"""Find out whether torch's fused kernels give the native update's bits on this machine.

The order of operations inside torch's kernels, fused multiply-adds above all, is the choice of the
compiler that built torch, and of the CPU. No list of versions tells it: both are run and compared.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import chain, product
from math import sqrt

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
_DRAWS = 8
_LENGTH = 63
"""Whole lines, vectors and a tail, of float32 and of half types."""
_Case = tuple[np.ndarray, list[torch.Tensor], list[torch.Tensor]]
"""A rule, the parameter with its state, and the gradients of some steps."""


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
    for variant in (0, MAXIMIZE, NESTEROV if kind == SGD else AMSGRAD):
        cases = _random_cases(kind, variant | order, rng)
        if kind != SGD:
            cases = chain(cases, _cancelling_cases(kind, variant | order, _DTYPES[type_], rng))
        if not all(_same(kind, type_, *case) for case in cases):
            return False
    return True


def _random_cases(kind: int, flags: int, rng: torch.Generator) -> Iterator[_Case]:
    for decay, beta, length in product((0.0, 0.013), (0.9, 0.37), _LENGTHS):
        rule = _rule(kind, flags, lr=3e-3, weight_decay=decay, beta1=beta, beta2=0.995, eps=1e-7)
        rule["momentum"], rule["dampening"] = beta, 0.0 if flags & NESTEROV else 0.11
        held = [torch.randn(length, generator=rng) for _ in range(2)]
        held += [torch.rand(length, generator=rng) for _ in range(2)]
        yield rule, held, [torch.randn(length, generator=rng) for _ in range(_STEPS)]


def _cancelling_cases(
    kind: int, flags: int, dtype: torch.dtype, rng: torch.Generator
) -> Iterator[_Case]:
    """Yield updates of Adam's by which one sum or another is zero but for its rounding.

    The order of operations is told by the last bit of a product. Rounded to a half type, numbers
    at random show it once in ten thousand times; these show it in most. The factors are chosen for
    one element, so that all are alike.
    """
    sign, large = -1.0 if flags & MAXIMIZE else 1.0, 64.0
    for _ in range(_DRAWS):
        p, m, v, g = (torch.rand(4, generator=rng) + 1).to(dtype).tolist()
        rule = _rule(kind, flags, lr=3e-3, beta1=g / (g + m), beta2=g * g / (g * g + v), eps=1e-7)
        yield rule, *_filled(p, -large * m, -(large**2) * v, large * g * sign)
        rule = _rule(kind, flags, beta1=0.9, beta2=0.995)
        rule["weight_decay"] = decay = 0.013 if kind == ADAMW else 0.0
        direction = (9 * m + g) / sqrt(199 * v + g * g)
        rule["lr"] = large * p / (large * p * decay + direction)
        yield rule, *_filled(large * p, m, v, g * sign)
        if kind != ADAMW:
            rule = _rule(kind, flags, lr=3e-3, beta1=0.9, beta2=0.995, weight_decay=g / p, eps=1e-7)
            yield rule, *_filled(-large * p, 0.0, 0.0, large * g * sign)


def _rule(kind: int, flags: int, **options: float) -> np.ndarray:
    rule = np.zeros(1, RULE_DTYPE)
    rule["kind"], rule["flags"] = kind, flags
    for name, value in options.items():
        rule[name] = value
    return rule


def _filled(
    p: float, first: float, second: float, gradient: float
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    held = [torch.full((_LENGTH,), value) for value in (p, first, second, 0.0)]
    return held, [torch.full((_LENGTH,), gradient)]


def _same(
    kind: int,
    type_: int,
    rule: np.ndarray,
    held: list[torch.Tensor],
    gradients: list[torch.Tensor],
) -> bool:
    theirs, ours = ([tensor.to(_DTYPES[type_], copy=True) for tensor in held] for _ in range(2))
    counts = torch.zeros(()), torch.zeros(())
    for each in gradients:
        gradient = each.to(_DTYPES[type_])
        _torch_step(kind, theirs, gradient.clone(), counts[0], rule[0])
        _native_step(kind, type_, ours, gradient, counts[1], rule)
    pairs = zip(theirs, ours, strict=True)
    return all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in pairs)


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
