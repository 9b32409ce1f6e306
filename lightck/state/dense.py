"""Tell which tensors have plain bytes that can be saved, and why others have none."""

from __future__ import annotations

import torch
from torch.nn.parameter import is_lazy

from lightck.errors import StateError
from lightck.state import tensor_support

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and not str(dtype).startswith(("torch.qint", "torch.quint"))
}
"""Dtypes, by name, whose tensors have plain bytes."""
_PLACEHOLDER = (
    "is a placeholder of DeepSpeed ZeRO-3 (ds_id {}, ds_status {}): its values lie in flat buffers"
    " over all ranks, and nothing that is read here could be brought back. Use ZeRO stage 0, 1 or 2"
    " (attach(engine.module, engine.optimizer.optimizer)), torch's fully_shard (FSDP2), or"
    " DeepSpeed's own engine.save_checkpoint"
)


def must_be_dense(path: str, tensor: torch.Tensor) -> None:
    """Refuse a tensor that has no plain bytes.

    Raises:
        StateError: the tensor is sparse, quantized, not initialized yet, without memory (meta), a
            placeholder of DeepSpeed's, or a sum over ranks.
    """
    if hasattr(tensor, "ds_id"):
        status = getattr(tensor, "ds_status", "unknown")
        raise StateError(f"{path} {_PLACEHOLDER.format(tensor.ds_id, status)}", path=path)
    why = tensor_support.refusal(tensor)
    if why is not None:
        raise StateError(f"{path} {why}", path=path)
    if is_lazy(tensor):
        raise StateError(f"{path} is not initialized: run one forward before attach", path=path)
    if tensor.is_meta:
        why = "is on the meta device and has no bytes: call Module.to_empty before"
        raise StateError(f"{path} {why}", path=path)
    if tensor.layout is not torch.strided or tensor.is_quantized:
        kind = "quantized" if tensor.is_quantized else str(tensor.layout)
        raise StateError(f"{path} is a {kind} tensor; only dense tensors can be saved", path=path)
