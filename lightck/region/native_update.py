"""Wrap the native update of an optimizer: tables of rules and tasks in, parameters updated."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from lightck.region._ffi import check, ffi, library
from lightck.region.native_pool import NativeSnapshot

ADAM, ADAMW, SGD = 0, 1, 2
AMSGRAD, MAXIMIZE, NESTEROV, UNFUSED = 1, 2, 4, 8
FLOAT32, BFLOAT16, FLOAT16 = 0, 1, 2
NOT_STREAMED = 2**32 - 1
COLUMNS = 4

RULE_DTYPE = np.dtype(
    [("lr", "<f8"), ("beta1", "<f8"), ("beta2", "<f8"), ("eps", "<f8"), ("weight_decay", "<f8"),
     ("momentum", "<f8"), ("dampening", "<f8"), ("kind", "<u4"), ("flags", "<u4")]
)  # fmt: skip
TASK_DTYPE = np.dtype(
    [("parameter", "<u8"), ("first", "<u8"), ("second", "<u8"), ("largest", "<u8"),
     ("gradient", "<u8"), ("step", "<u8"), ("length", "<u8"), ("rule", "<u4"),
     ("copies", "<u4", (COLUMNS,)), ("type", "<u4")]
)  # fmt: skip


def flushes_denormals() -> bool:
    """Tell whether the calling thread's mode is to take denormals for zeros: a mode of each thread.

    Results would depend on which thread has an element.
    """
    return bool(library().lck_flushes_denormals())


def update(
    rules: npt.NDArray[Any],
    tasks: npt.NDArray[Any],
    snapshot: NativeSnapshot | None = None,
    batch: int = 0,
    *,
    threads: int = 1,
    parallel: int = 0,
) -> None:
    """Update in place as torch's fused kernels do; with a snapshot into the batch's extents, too.

    Args:
        rules: RULE_DTYPE rows, one for each group of options.
        tasks: TASK_DTYPE rows, one for each parameter; their memory is valid and does not overlap.
        snapshot: the snapshot that is open; its failure is its own, the update is made.
        batch: the number of the batch, of which nothing was released.
        threads: the most threads that take part.
        parallel: the address of an OpenMP runtime's GOMP_parallel; 0: own threads.

    Raises:
        RegionError: the arguments are wrong, or the thread flushes denormals; nothing was changed.
    """
    code = library().lck_update(
        ffi.cast("const lck_update_rule *", rules.ctypes.data),
        len(rules),
        ffi.cast("const lck_update_task *", tasks.ctypes.data),
        len(tasks),
        ffi.NULL if snapshot is None else snapshot.handle,
        batch,
        threads,
        ffi.cast("lck_parallel", parallel),
    )
    check(code, "update parameters")
