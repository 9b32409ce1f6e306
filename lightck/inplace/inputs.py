"""The inputs of reductions, which gloo overwrites: kept so that a reduction can be made again.

A small one is copied. DDP's buckets are not: until the reduction is complete, the gradients they
were filled from are still there, and `grad * (1 / world)` gives the bucket again, bit for bit. That
is proved once for each bucket, against a copy, and relied on from then on. Everything else is
copied into memory that is used again; new memory would cost more than the copy.
"""

from __future__ import annotations

import logging
import threading
from bisect import insort
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightck.distributed.ddp_buckets import Buckets, by_path, known_buckets
from lightck.distributed.ddp_communication import reduced_parameters
from lightck.events import event
from lightck.inplace.operations import SMALL_BYTES, UNSPOILED, KeptInput

_Place = tuple[int, int, torch.dtype]
"""A tensor's address, number of values and dtype."""


@dataclass(eq=False)
class CopiedInput:
    """The input as a copy; the memory is given back when the collective is complete."""

    tensors: Sequence[torch.Tensor]
    copies: list[torch.Tensor]
    give_back: Callable[[], None]

    def put_back(self) -> bool:
        """Put the copy back."""
        with torch.no_grad():
            for tensor, copy in zip(self.tensors, self.copies, strict=True):
                tensor.detach().copy_(copy)
        return True

    def release(self) -> None:
        """Give the memory back."""
        if self.copies:
            self.copies = []
            self.give_back()

    def is_hidden(self) -> bool:
        """Tell that the program has the tensors."""
        return False


@dataclass(frozen=True, eq=False)
class BucketInput:
    """The input of a bucket's reduction: the gradients, until DDP puts the results into them."""

    bucket: torch.Tensor
    parameters: Sequence[nn.Parameter]
    factor: float
    module: DistributedDataParallel

    def put_back(self) -> bool:
        """Fill the bucket from the gradients again; False if they do not fit it."""
        filled = refilled(self.parameters, self.factor)
        if filled is None or filled.numel() != self.bucket.numel():
            return False
        with torch.no_grad():
            self.bucket.detach().copy_(filled)
        return True

    def release(self) -> None:
        """Nothing is kept."""

    def is_hidden(self) -> bool:
        """Tell whether DDP alone has the bucket: apart from the gradients, and given to no hook.

        DDP's own writes into it move its version counter.
        """
        return not getattr(self.module, "_comm_hooks", True)


def refilled(parameters: Sequence[nn.Parameter], factor: float) -> torch.Tensor | None:
    """Return what DDP fills a bucket with from these gradients; None if it cannot be said."""
    parts = []
    for each in parameters:
        grad = each.grad
        if grad is None or grad.layout != torch.strided or grad.stride() != each.stride():
            return None
        try:  # in the order of memory, as in the bucket
            parts.append(torch.as_strided(grad.detach(), (grad.numel(),), (1,)))
        except RuntimeError:
            return None
    return torch.cat(parts).mul_(factor)


@dataclass(eq=False)
class Inputs:
    """Keeps inputs for one rank. The training thread, or autograd's."""

    world: int
    models: list[nn.Module] = field(default_factory=list)
    """The models that are trained; whoever attaches adds his."""
    copied_bytes: int = 0
    """Bytes of the memory for copies."""
    _free: dict[torch.dtype, list[torch.Tensor]] = field(default_factory=lambda: defaultdict(list))
    """Memory for copies that is not in use; a copy takes the smallest that holds it."""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    """Guards both: collectives end on another thread than they begin on."""
    _proved: dict[_Place, BucketInput] = field(default_factory=dict)
    """The buckets that gradients were shown to give again; their memory is not used otherwise."""
    _refuted: set[_Place] = field(default_factory=set)
    _told: bool = False

    def keep(self, tensors: Sequence[torch.Tensor]) -> KeptInput:
        """Keep the values of these tensors until their collective is complete."""
        if any(each.layout != torch.strided for each in tensors):
            return UNSPOILED  # sparse gradients: gloo makes new tensors, and copies them at the end
        if len(tensors) == 1 and (proved := self._proved.get(_place(tensors[0]))) is not None:
            return proved
        if sum(each.numel() * each.element_size() for each in tensors) <= SMALL_BYTES:
            return CopiedInput(tensors, [each.detach().clone() for each in tensors], _drop)
        if len(tensors) == 1:
            proof = self._proof(tensors[0])
            if proof is not None:
                return proof
        places = [self._place(each.dtype, each.numel()) for each in tensors]
        with torch.inference_mode(False):  # memory that a tensor of any mode can be copied to later
            pairs = zip(places, tensors, strict=True)
            copies = [place[: each.numel()].view(each.shape) for place, each in pairs]
        for copy, each in zip(copies, tensors, strict=True):
            copy.copy_(each.detach())
        return CopiedInput(tensors, copies, partial(self._take_back, places))

    def _proof(self, bucket: torch.Tensor) -> BucketInput | None:
        """Return the bucket's gradients in place of a copy, if they are shown to give it."""
        key = _place(bucket)
        if key in self._refuted or not (modules := self._modules()):
            return None
        for module, buckets in modules:
            if _gives_gradients(module):
                parameters = reduced_parameters(module)
                for members in buckets:
                    chosen = [parameters[i] for i in members]
                    proof = BucketInput(bucket, chosen, 1.0 / self.world, module)
                    if _gives(proof):
                        self._proved[key] = proof
                        with self._lock:
                            gone = sum(each.nbytes for f in self._free.values() for each in f)
                            self._free.clear()
                            self.copied_bytes -= gone
                        return proof
        self._refuted.add(key)
        return None

    def _modules(self) -> list[tuple[DistributedDataParallel, Buckets]]:
        """Return the DDP modules whose buckets are known for certain, with these."""
        every = (module for model in self.models for module in by_path(model).values())
        found = ((module, known_buckets(module)) for module in every)
        return [(module, buckets) for module, buckets in found if buckets is not None]

    def _place(self, dtype: torch.dtype, count: int) -> torch.Tensor:
        """Return memory for a copy: the smallest that is free and holds it, or new."""
        with self._lock:
            free = self._free[dtype]
            at = next((i for i, each in enumerate(free) if each.numel() >= count), None)
            if at is not None:
                return free.pop(at)
            if free:  # else tensors of another length each time would keep a place each
                self.copied_bytes -= free.pop().nbytes
            with torch.inference_mode(False):
                place = torch.empty(count, dtype=dtype)
            self.copied_bytes += place.nbytes
        self._tell()
        return place

    def _take_back(self, places: list[torch.Tensor]) -> None:
        with self._lock:
            for each in places:
                insort(self._free[each.dtype], each, key=torch.Tensor.numel)

    def _tell(self) -> None:
        if not self._told and self._refuted:
            self._told = True
            event(
                "inputs_copied",
                logging.INFO,
                bytes=self.copied_bytes,
                why="DDP's buckets cannot be filled again from gradients here (bucket views, a"
                " comm hook, unused parameters, or no DDP): each reduction's input is copied",
            )


def _place(tensor: torch.Tensor) -> _Place:
    return tensor.data_ptr(), tensor.numel(), tensor.dtype


def _gives_gradients(module: DistributedDataParallel) -> bool:
    """Tell whether the gradients are apart from the buckets, and all there, in every backward."""
    return not (module.gradient_as_bucket_view or module.find_unused_parameters)


def _gives(proof: BucketInput) -> bool:
    filled = refilled(proof.parameters, proof.factor)
    bucket = proof.bucket.detach().view(-1)
    if filled is None or filled.shape != bucket.shape or filled.dtype != bucket.dtype:
        return False
    return filled.view(torch.uint8).equal(bucket.contiguous().view(torch.uint8))


def _drop() -> None:
    """Nothing is used again."""
