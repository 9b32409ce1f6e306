"""One live tensor: its name, its role, and which optimizers change it."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from lightck.state import tensor_support
from lightck.state.boundary import reference
from lightck.state.dense import must_be_dense

SMALL_EXTRA_BYTES = 64 << 10
"""An extra's tensor up to this size is copied at forward start: cheaper than finding it torn."""


@dataclass(frozen=True, slots=True)
class Live:
    """One live tensor and what is known about the optimizers that change it."""

    name: str
    role: str
    layer: str
    tensor: torch.Tensor = field(compare=False)
    holders: frozenset[int] = frozenset()
    """Optimizers whose step changes the tensor; with none, any optimizer's step ends its window."""
    sync: bool = False
    """True if the tensor changes inside the window, as buffers do, and is copied at forward
    start."""
    alias_of: str | None = None
    span: tuple[int, int] | None = None
    """First byte and end of what this rank captures of a tensor that other ranks hold, too; None:
    all."""

    @property
    def local(self) -> torch.Tensor:
        """The tensor that holds the bytes: of a DTensor this rank's part, else itself."""
        return tensor_support.local(self.tensor)


@dataclass(eq=False)
class Placing:
    """Collects the tensors found in a tree for the region, and leaves references in their place."""

    lives: list[Live]
    role: str
    layer: str
    holders: frozenset[int]
    always_sync: set[str]
    known: dict[str, Live] = field(default_factory=dict)
    """The last `Live` of each path; it serves while the tensor is the same object."""

    def __call__(self, path: str, tensor: torch.Tensor) -> dict[str, str]:
        """Collect one tensor, and return what stands for it in the tree; see `boundary.Place`."""
        must_be_dense(path, tensor)
        small = self.role == "extra" and tensor_support.local(tensor).nbytes <= SMALL_EXTRA_BYTES
        sync = small or path in self.always_sync
        live = self.known.get(path)
        if live is None or live.tensor is not tensor or live.sync is not sync:
            live = Live(path, self.role, self.layer, tensor, self.holders, sync)
            self.known[path] = live
        self.lives.append(live)
        return reference(path)
