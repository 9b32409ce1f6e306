"""Compile `ntcopy.c`, pick the machine's best variant, and time copies of a whole state."""

from __future__ import annotations

import hashlib
import mmap
import os
import subprocess
import tempfile
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from cffi import FFI

from bench.errors import BenchError
from bench.place import BUILD

_SOURCE = Path(__file__).with_name("ntcopy.c")
_FLAGS = ["-std=c11", "-D_GNU_SOURCE", "-O3", "-fPIC", "-shared", "-fvisibility=hidden"]
_LINE = 64  # bytes
_TRIALS = 3

_ffi: Any = FFI()
_ffi.cdef("""
const char *ntcopy_name(unsigned which);
int ntcopy_usable(unsigned which);
void ntcopy(unsigned which, void *to, const void *from, size_t bytes);
""")


@cache
def _library() -> Any:
    key = hashlib.sha256(_SOURCE.read_bytes() + " ".join(_FLAGS).encode()).hexdigest()[:16]
    made = BUILD / f"ntcopy-{key}.so"
    if not made.exists():
        made.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=made.parent) as folder:
            part = Path(folder) / made.name
            command = [os.environ.get("CC", "gcc"), *_FLAGS, "-o", str(part), str(_SOURCE)]
            try:
                done = subprocess.run(command, capture_output=True, text=True)
            except OSError as error:
                raise BenchError(f"{' '.join(command)}: {error}") from error
            if done.returncode:
                raise BenchError(f"{' '.join(command)} failed:\n{done.stderr}")
            part.rename(made)  # atomic: engines in other processes may be doing the same
    return _ffi.dlopen(str(made))


class Kernels:
    """The variants that this CPU can run."""

    def __init__(self) -> None:
        self._library = _library()
        self.names: dict[int, str] = {}
        which = 0
        while (name := self._library.ntcopy_name(which)) != _ffi.NULL:
            if self._library.ntcopy_usable(which):
                self.names[which] = _ffi.string(name).decode()
            which += 1

    def copy(self, which: int, to: int, source: int, length: int) -> None:
        """Copy `length` bytes between addresses; the GIL is released."""
        self._library.ntcopy(which, _ffi.cast("void *", to), _ffi.cast("void *", source), length)


class SyncCopy:
    """The yardstick `sync_copy`: one thread copies the state while everything else waits.

    The destination is a file of its own beside the engine's, pre-faulted, each tensor on a line.
    """

    def __init__(self, folder: Path, tensors: Sequence[torch.Tensor]) -> None:
        self._kernels = Kernels()
        self._tensors = [t.detach() for t in tensors]
        wrong = [t.shape for t in self._tensors if not t.is_contiguous() or t.device.type != "cpu"]
        if wrong:
            raise BenchError(f"the yardstick copies dense CPU tensors only, not {wrong[0]}")
        self.offsets, self.bytes = _packed(self._tensors)
        self._file = folder / "yardstick"
        with open(self._file, "w+b") as file:
            os.posix_fallocate(file.fileno(), 0, self.bytes)
            self.mapping = mmap.mmap(file.fileno(), self.bytes)
        self._view = _ffi.from_buffer(self.mapping, require_writable=True)
        self._base = int(_ffi.cast("uintptr_t", self._view))
        self._run(next(iter(self._kernels.names)))  # also touches every page
        self.which = min(self._kernels.names, key=self._best)

    @property
    def kernel(self) -> str:
        """Return the name of the variant in use."""
        return self._kernels.names[self.which]

    def __call__(self) -> float:
        """Copy once; return the seconds."""
        return self._timed(self.which)

    def memcpy(self) -> float:
        """Copy once through memcpy; return the seconds."""
        plain = next(i for i, name in self._kernels.names.items() if name == "memcpy")
        return self._timed(plain)

    def _best(self, which: int) -> float:
        """Return the best of a few runs over the whole state.

        What wins on one large tensor loses on others, as memcpy does, which copies past the caches
        only from some size on.
        """
        return min(self._timed(which) for _ in range(_TRIALS))

    def _timed(self, which: int) -> float:
        begin = time.perf_counter()
        self._run(which)
        return time.perf_counter() - begin

    def _run(self, which: int) -> None:
        for tensor, offset in zip(self._tensors, self.offsets, strict=True):
            self._kernels.copy(which, self._base + offset, tensor.data_ptr(), tensor.nbytes)

    def close(self) -> None:
        """Free the memory."""
        _ffi.release(self._view)
        self.mapping.close()
        self._file.unlink()


def _packed(tensors: Sequence[torch.Tensor]) -> tuple[list[int], int]:
    """Return offsets of the tensors one after the other, each on a line, and the bytes in all."""
    offsets, at = [], 0
    for tensor in tensors:
        offsets.append(at)
        at += -(-tensor.nbytes // _LINE) * _LINE
    return offsets, max(at, _LINE)
