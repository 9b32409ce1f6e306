"""Find the OpenMP runtime that torch's kernels run on, for updates on the same threads.

A second runtime would have threads of its own, beside torch's that may spin.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache
from pathlib import Path

import torch


@cache
def gomp_parallel() -> int:
    """Return the address of GOMP_parallel in the runtime that libtorch_cpu is linked with.

    Both GNU's and LLVM's runtimes have it. 0: torch has none; threads are then made for each call.
    """
    path = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        # Loaded already: nothing is loaded anew, and its dependencies are looked through, too.
        torch_cpu = ctypes.CDLL(str(path), mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
        function = torch_cpu.GOMP_parallel
    except (OSError, AttributeError):
        return 0
    return ctypes.cast(function, ctypes.c_void_p).value or 0
