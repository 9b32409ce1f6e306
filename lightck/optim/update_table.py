"""The tensors of one optimizer's update as rows for native code, checked anew at every step.

Native code writes wherever a row points: a row is used only while each tensor has the form with
which it was checked, and addresses are read at every step. Whatever is not plain, dense and of a
known type on the CPU, and whatever torch itself would treat in another way, has a reason to be left
to torch.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch._C._dynamo.guards import TensorGuards
from torch.optim import Optimizer

from lightck.region.native_update import (
    ADAM,
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
    flushes_denormals,
)

_ALL_DIMENSIONS = {"dynamic_dims_sizes": None, "dynamic_dims_strides": None}
_COLUMNS = ("parameter", "first", "second", "largest")
"""Columns of a task that hold the addresses of one parameter's tensors, in their order."""


@dataclass(frozen=True)
class StateKeys:
    """The keys under which an optimizer's state holds the tensors of one parameter, and their type.

    A parameter, its gradient and its state are of one type; counts of steps are float32.
    """

    types: dict[torch.dtype, int]
    """The types that parameters may have, and the native ones."""
    first: str
    second: str | None = None
    largest: str | None = None
    step: str | None = None


_HALF = {torch.bfloat16: BFLOAT16, torch.float16: FLOAT16}
"""Torch's fused SGD leaves most of a parameter of these as it is."""
ADAM_KEYS = StateKeys(
    {torch.float32: FLOAT32, **_HALF}, "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "step"
)
SGD_KEYS = StateKeys({torch.float32: FLOAT32}, "momentum_buffer")


@dataclass(eq=False)
class UpdateTable:
    """Rows for the native update of one optimizer; for the thread that steps."""

    kind: int
    """The native kind of the optimizer; a group of Adam's may have AdamW's all the same."""
    keys: StateKeys
    rows: list[tuple[torch.Tensor, ...]] = field(default_factory=list)
    """Each parameter that has a gradient and its state's tensors, in the order of the columns; the
    same list while these are the same objects."""
    tasks: npt.NDArray[Any] = field(default_factory=lambda: np.zeros(0, TASK_DTYPE))
    rules: npt.NDArray[Any] = field(default_factory=lambda: np.zeros(0, RULE_DTYPE))
    pointers: npt.NDArray[np.uint64] = field(default_factory=lambda: np.zeros(0, np.uint64))
    """The addresses of the rows' tensors, row by row."""
    types: frozenset[int] = frozenset()
    """The native types of the parameters."""
    _objects: bytes = b""
    """The addresses of all objects that `rows` depend on."""
    _held: list[Any] = field(default_factory=list)
    """These objects: while they are held, no other object can have their addresses."""
    _written: list[torch.Tensor] = field(default_factory=list)
    """The tensors of `rows` one behind the other, then the counts of steps."""
    _at: npt.NDArray[np.intp] = field(default_factory=lambda: np.zeros(0, np.intp))
    """For each row's tensor, its place in a task's columns, over all tasks."""
    _guard: Any = None
    """Torch's own check of every tensor's form, gradients included; None: check one by one."""
    _apart: npt.NDArray[np.uint64] = field(default_factory=lambda: np.zeros(0, np.uint64))
    """The addresses that were last found to belong to memory that does not overlap."""

    def prepare(self, optimizer: Optimizer) -> str:
        """Bring rows, rules and tasks up to date; return why torch has to step, or nothing."""
        if any(getattr(optimizer, name, None) is not None for name in ("grad_scale", "found_inf")):
            return "a GradScaler leaves it to the step whether gradients are finite"
        if flushes_denormals():
            return "the thread flushes denormals, and other threads may not"
        groups = optimizer.param_groups
        why = self._set_rules(groups)
        if why:
            return why
        parameters = list(chain.from_iterable(group["params"] for group in groups))
        gradients = [p.grad for p in parameters]
        objects = self._objects_of(optimizer, gradients)
        bits = np.fromiter(objects, object, len(objects)).tobytes()
        if bits != self._objects:
            self._objects = b""
            why = self._find_rows(optimizer)
            if why:
                return why
            self._objects, self._held, self._guard = bits, objects, None
        found = [gradient for gradient in gradients if gradient is not None]
        if not found:
            return "no parameter has a gradient"
        return self._check_forms(found) or self._set_pointers(found)

    def _objects_of(self, optimizer: Optimizer, gradients: list[Any]) -> list[Any]:
        """Return the objects that `rows` depend on; none of them is made anew while it is equal.

        Before each group's parameters stands its list: none can change over unseen.
        """
        found: list[Any] = [optimizer.state]
        for group in optimizer.param_groups:
            found += (group["params"], bool(group.get("amsgrad") or group.get("momentum")))
            found += group["params"]
        found += [gradient is not None for gradient in gradients]
        states = optimizer.state.values()
        found += states
        found += chain.from_iterable(states)
        found += chain.from_iterable(state.values() for state in states)
        return found

    def _set_rules(self, groups: Sequence[dict[str, Any]]) -> str:
        rules = np.zeros(len(groups), RULE_DTYPE)
        for rule, group in zip(rules, groups, strict=True):
            if group.get("foreach") or group.get("differentiable") or group.get("capturable"):
                return "an option asks for another of torch's implementations"
            if group.get("fused") is None:
                group["fused"] = True  # of a state that was saved with torch's default
            elif not group["fused"]:
                return "fused=False asks for another of torch's implementations"
            rule["lr"], rule["weight_decay"] = float(group["lr"]), float(group["weight_decay"])
            flags = MAXIMIZE * bool(group["maximize"])
            if self.keys.step is not None:
                rule["beta1"], rule["beta2"] = map(float, group["betas"])
                rule["eps"] = float(group["eps"])
                decoupled = group.get("decoupled_weight_decay", self.kind == ADAMW)
                rule["kind"] = ADAMW if decoupled else ADAM
                flags |= AMSGRAD * bool(group["amsgrad"])
            else:
                rule["kind"] = SGD
                rule["momentum"] = float(group["momentum"])
                rule["dampening"] = float(group["dampening"])
                flags |= NESTEROV * bool(group["nesterov"])
            rule["flags"] = flags
        self.rules = rules
        return ""

    def _find_rows(self, optimizer: Optimizer) -> str:
        """Look up the tensors of every parameter with a gradient."""
        rows: list[tuple[torch.Tensor, ...]] = []
        steps: list[Any] = []
        rules: list[int] = []
        for number, group in enumerate(optimizer.param_groups):
            wanted = self._state_keys(group)
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = optimizer.state.get(p, {})
                found = [state.get(key) for key in wanted]
                if not all(isinstance(each, torch.Tensor) for each in found):
                    return "its state is not made yet"
                if self.keys.step is not None:
                    steps.append(state.get(self.keys.step))
                rows.append((p, *found))
                rules.append(number)
        self.rows = rows
        self._written = [*chain.from_iterable(rows), *steps]
        tasks = np.zeros(len(rows), TASK_DTYPE)
        tasks["rule"], tasks["copies"] = rules, NOT_STREAMED
        self.tasks = tasks
        each = (range(4 * i, 4 * i + len(row)) for i, row in enumerate(rows))
        self._at = np.fromiter(chain.from_iterable(each), np.intp)
        return ""

    def _state_keys(self, group: dict[str, Any]) -> list[str]:
        keys = self.keys
        if keys.step is None:
            return [keys.first] if group["momentum"] else []
        assert keys.second is not None and keys.largest is not None
        return [keys.first, keys.second, *([keys.largest] if group["amsgrad"] else [])]

    def _check_forms(self, gradients: list[torch.Tensor]) -> str:
        if self._guard is not None and self._guard.check(*self._written, *gradients):
            return ""
        self._guard = None
        for row, gradient in zip(self.rows, gradients, strict=True):
            strides = _order(row[0])
            for tensor in (*row, gradient):
                if why := _unfit(tensor, self.keys.types):
                    return why
                if tensor.dtype is not row[0].dtype:
                    return "a gradient, or state, is of another type than its parameter"
                if tensor.shape != row[0].shape or _order(tensor) != strides:
                    return "a gradient, or state, is laid out unlike its parameter"
        for step in islice(self._written, len(self._at), None):
            if why := _unfit(step, [torch.float32]):
                return why
            if step.numel() != 1:
                return "a count of steps is not one number"
        self.tasks["length"] = [row[0].numel() for row in self.rows]
        self.tasks["type"] = types = [self.keys.types[row[0].dtype] for row in self.rows]
        self.types = frozenset(types)
        self._apart = np.zeros(0, np.uint64)
        self._guard = TensorGuards(*self._written, *gradients, **_ALL_DIMENSIONS)
        return ""

    def _set_pointers(self, gradients: list[torch.Tensor]) -> str:
        """Write all addresses into the tasks, unless two tensors that are written overlap."""
        written = np.fromiter(map(torch.Tensor.data_ptr, self._written), np.uint64)
        if not np.array_equal(written, self._apart):
            lengths = np.fromiter((t.nbytes for t in self._written), np.uint64)
            order = np.argsort(written)
            ends = (written + lengths)[order]
            if (ends[:-1] > written[order][1:]).any():
                return "two of its tensors share memory"
            self._apart = written
        tensors, tasks = len(self._at), self.tasks
        columns = np.zeros(4 * len(tasks), np.uint64)
        columns[self._at] = self.pointers = written[:tensors]
        for i, name in enumerate(_COLUMNS):
            tasks[name] = columns[i::4]
        if self.keys.step is not None:
            tasks["step"] = written[tensors:]
        tasks["gradient"] = np.fromiter(map(torch.Tensor.data_ptr, gradients), np.uint64)
        return ""


def _unfit(tensor: Any, types: Container[torch.dtype]) -> str:
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return f"a tensor is a {type(tensor).__name__}"
    if tensor.layout is not torch.strided or tensor.dtype not in types:
        return f"a tensor is {tensor.dtype}, {tensor.layout}"
    if not tensor.is_cpu:
        return f"a tensor is on {tensor.device}"
    if tensor.numel() == 0 or not _is_dense(tensor):
        return "a tensor is empty, or not dense"
    return ""


def _is_dense(tensor: torch.Tensor) -> bool:
    """Tell whether the elements lie one behind the other, in any order of the dimensions."""
    sizes = zip(tensor.stride(), tensor.shape, strict=True)
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in sizes if size > 1):
        if stride != expected:
            return False
        expected *= size
    return True


def _order(tensor: torch.Tensor) -> list[int]:
    """Return the strides that say where elements lie: those of dimensions longer than one."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return [stride for size, stride in sizes if size > 1]
