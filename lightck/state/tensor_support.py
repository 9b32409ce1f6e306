"""The kinds of tensors that can be saved: DTensors, by this rank's part, and all with plain bytes.

There can be a DTensor only where `torch.distributed.tensor` was imported: that is looked up and
not imported to find out, so that lightck costs nothing, and loads, without it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from lightck.errors import StateError
from lightck.region.layout import Entry, Shard

_PLACEMENT = re.compile(r"(Shard|_StridedShard|Replicate)\((\d+)?(?:, (\d+))?\)")
_NAME = re.compile(r"[^ ]+=(?=\d)")
"""Pattern of the name of a mesh's dimension, before its size."""
_UNSUPPORTED = "restoring sharded state on another mesh is not supported yet"


def _kind() -> Any:
    """Return the class `DTensor` if somebody has imported it; else None."""
    return getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)


def is_dtensor(tensor: torch.Tensor) -> bool:
    """Tell whether this is a DTensor."""
    kind = _kind()
    return kind is not None and isinstance(tensor, kind)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this rank holds: a DTensor's local tensor without autograd, else the tensor."""
    return tensor._local_tensor if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]


def locals_of(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return `local` of each; the same list, at no Python code per tensor, if none is a DTensor."""
    kind = _kind()
    if kind is None or not any(issubclass(each, kind) for each in set(map(type, tensors))):
        return tensors
    return [t._local_tensor if isinstance(t, kind) else t for t in tensors]


def forms_of(tensors: Iterable[torch.Tensor]) -> list[Any]:
    """Return what each DTensor's shard depends on besides its local tensor; None for others."""
    kind = _kind()
    return [getattr(t, "_spec", None) if isinstance(t, kind) else None for t in tensors]


def refusal(tensor: torch.Tensor) -> str | None:
    """Say why a DTensor's part cannot be saved as it is; None if it can, or for other tensors."""
    if not is_dtensor(tensor):
        return None
    spec: Any = tensor._spec  # type: ignore[attr-defined]
    held = local(tensor)
    if spec.mesh.get_coordinate() is None:
        return f"is a DTensor on {_mesh(spec.mesh)}, which this rank is not part of"
    if any(placement.is_partial() for placement in spec.placements):
        return f"is a DTensor placed {_placements(spec)}: no rank holds its values; redistribute it"
    if type(held) is not torch.Tensor:
        return f"is a DTensor over a {type(held).__name__}; only plain local tensors can be saved"
    if not all(map(_PLACEMENT.fullmatch, map(_placement, spec.placements))):
        return f"is a DTensor placed {_placements(spec)}, which is not supported"
    shape, _ = _part(tensor)
    if shape != tuple(held.shape):
        return (
            f"is a DTensor whose local tensor has shape {list(held.shape)}, where"
            f" {_placements(spec)} of {list(tensor.shape)} gives {list(shape)}"
        )
    return None


def shard_of(tensor: torch.Tensor) -> Shard | None:
    """Describe which part of the whole this rank has; None for what is no DTensor.

    Raises:
        StateError: a DTensor that `refusal` refuses.
    """
    if not is_dtensor(tensor):
        return None
    why = refusal(tensor)
    if why is not None:
        raise StateError(f"a tensor {why}")
    _, offset = _part(tensor)
    spec: Any = tensor._spec  # type: ignore[attr-defined]
    return Shard(tuple(tensor.shape), offset, f"{here(spec.mesh)}: {_placements(spec)}")


def here(mesh: Any) -> str:
    """Describe a mesh and this rank's place in it, e.g. "mesh dp=2 x tp=2 at (1, 0)"."""
    return f"{_mesh(mesh)} at ({', '.join(map(str, mesh.get_coordinate() or ()))})"


def _mesh(mesh: Any) -> str:
    sizes = tuple(mesh.shape)
    names = mesh.mesh_dim_names or [f"dim{i}" for i in range(len(sizes))]
    return "mesh " + " x ".join(f"{n}={size}" for n, size in zip(names, sizes, strict=True))


def _placements(spec: Any) -> str:
    return ", ".join(map(_placement, spec.placements))


def _placement(placement: Any) -> str:
    """Describe a placement in words of our own: torch's differ between its versions."""
    kind = type(placement).__name__
    if kind == "_StridedShard":
        return f"{kind}({placement.dim}, {placement.split_factor})"
    return f"{kind}({placement.dim})" if kind == "Shard" else f"{kind}()"


def _made(kind: str, dim: str, factor: str) -> Any:
    """Make the placement that `_placement` has described."""
    from torch.distributed.tensor import placement_types

    made = getattr(placement_types, kind)
    if factor:
        return made(int(dim), split_factor=int(factor))
    return made(int(dim)) if dim else made()


def _part(tensor: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return shape and offset of this rank's part, as the placements say."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    spec: Any = tensor._spec  # type: ignore[attr-defined]
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, spec.mesh, spec.placements)
    return tuple(shape), tuple(offset)


def difference(entry: Entry, tensor: torch.Tensor) -> str:
    """Say why a saved tensor's or part's bytes cannot become this live one's; empty if they can."""
    was, now = entry.shard, shard_of(tensor)
    if _nameless(was) != _nameless(now):
        saved, live = (s.placements if s else "whole, no DTensor" for s in (was, now))
        return f"{_UNSUPPORTED}: saved {saved}; live {live}"
    held = local(tensor)
    saved = _geometry(entry.dtype, entry.shape, was)
    live = _geometry(str(held.dtype).removeprefix("torch."), held.shape, now)
    return "" if saved == live else f"saved {saved}, live {live}"


def _geometry(dtype: str, shape: Sequence[int], shard: Shard | None) -> str:
    part = f"{dtype}{list(shape)}"
    return f"{part} of {list(shard.shape)} at {list(shard.offset)}" if shard else part


def meshes(tensors: Iterable[torch.Tensor]) -> dict[str, Any]:
    """Return the meshes of live DTensors, by their description without names of dimensions."""
    kind = _kind()
    if kind is None:
        return {}
    found = {id(t._spec.mesh): t._spec.mesh for t in tensors if isinstance(t, kind)}
    return {_NAME.sub("", here(mesh)): mesh for mesh in found.values()}


def homeless(entries: Iterable[Entry], known: dict[str, Any]) -> dict[str, str]:
    """Return the saved parts that cannot become DTensors on any of these meshes, and why."""
    live = " and ".join(sorted(known)) or "no DTensor"
    return {
        e.name: f"{_UNSUPPORTED}: saved {e.shard.placements}; live {live}"
        for e in entries
        if e.shard is not None and _split(e.shard)[0] not in known
    }


def _nameless(shard: Shard | None) -> str | None:
    """Describe a shard without the names of dimensions, which say nothing of where bytes belong."""
    return None if shard is None else _NAME.sub("", shard.placements)


def _split(shard: Shard) -> tuple[str, str]:
    mesh, _, placements = _NAME.sub("", shard.placements).partition(": ")
    return mesh, placements


def whole(entry: Entry, part: torch.Tensor, known: dict[str, Any]) -> torch.Tensor:
    """Return the tensor that a saved part was: a DTensor over `part`, or `part` if it was none.

    The memory is that of `part`, unless the mesh's device needs it elsewhere.
    """
    if entry.shard is None:
        return part
    name, words = _split(entry.shard)
    placements = tuple(_made(*found) for found in _PLACEMENT.findall(words))
    mesh, shape = known[name], entry.shard.shape
    if entry.device == mesh.device_type:  # not where FSDP2 offloads to the CPU
        part = part.to(mesh.device_type)
    return _over(part, mesh, placements, shape, _strides(shape, entry.strides))


def like(tensor: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """Make a DTensor over `part`, placed as this one."""
    spec: Any = tensor._spec  # type: ignore[attr-defined]
    return _over(part, spec.mesh, spec.placements, tensor.shape, tensor.stride())


def _over(
    part: torch.Tensor, mesh: Any, placements: Any, shape: Sequence[int], strides: Sequence[int]
) -> torch.Tensor:
    """Make a DTensor as FSDP2 does: `from_local` would move the part to the mesh's device."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    meta = TensorMeta(torch.Size(shape), tuple(strides), part.dtype)
    made: Any = DTensor
    result: torch.Tensor = made(
        part, DTensorSpec(mesh, placements, tensor_meta=meta), requires_grad=False
    )
    return result


def _strides(shape: Sequence[int], like: Sequence[int]) -> tuple[int, ...]:
    """Return strides of a dense tensor whose dimensions are ordered in memory as `like` says."""
    strides, step = [0] * len(shape), 1
    for dim in sorted(range(len(shape)), key=lambda d: (like[d], -d)):
        strides[dim] = step
        step *= max(shape[dim], 1)
    return tuple(strides)


# ---- which tensors have plain bytes that can be saved, and why others have none ------------------

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and not str(dtype).startswith(("torch.qint", "torch.quint"))
}
"""Dtypes, by name, whose tensors have plain bytes."""
_PLACEHOLDER = (
    "is a placeholder of DeepSpeed ZeRO-3 (ds_id {}, ds_status {}): its values lie in flat buffers"
    " over all ranks, and nothing that is read here could be brought back. Use ZeRO stage 0, 1 or 2"
    " (lightck.integrations.deepspeed), torch's fully_shard (FSDP2), or"
    " DeepSpeed's own engine.save_checkpoint"
)


_PLAIN = (torch.Tensor, nn.Parameter, nn.Buffer)


def _has_no_bytes(tensor: torch.Tensor) -> bool:
    try:
        return tensor.layout is torch.strided and tensor.data_ptr() == 0
    except RuntimeError:  # a wrapper may have no storage at all
        return True


def must_be_dense(path: str, tensor: torch.Tensor) -> None:
    """Refuse a tensor that has no plain bytes.

    Raises:
        StateError: the tensor is sparse, quantized, not initialized yet, without memory (meta), a
            placeholder of DeepSpeed's, a wrapper of other tensors, or a sum over ranks.
    """
    if hasattr(tensor, "ds_id"):
        status = getattr(tensor, "ds_status", "unknown")
        raise StateError(f"{path} {_PLACEHOLDER.format(tensor.ds_id, status)}", path=path)
    why = refusal(tensor)
    if why is not None:
        raise StateError(f"{path} {why}", path=path)
    if is_lazy(tensor):
        raise StateError(f"{path} is not initialized: run one forward before attach", path=path)
    if tensor.is_meta:
        why = "is on the meta device and has no bytes: call Module.to_empty before"
        raise StateError(f"{path} {why}", path=path)
    held = local(tensor)
    if type(held) not in _PLAIN and held.numel() and _has_no_bytes(held):
        kind = type(held).__name__
        why = f"is a {kind}, which wraps other tensors; only tensors with bytes of their own"
        raise StateError(f"{path} {why} can be saved", path=path)
    if tensor.layout is not torch.strided or tensor.is_quantized:
        kind = "quantized" if tensor.is_quantized else str(tensor.layout)
        raise StateError(f"{path} is a {kind} tensor; only dense tensors can be saved", path=path)
