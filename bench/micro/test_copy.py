"""Measure how fast bytes move: lightck's checksum and writer, the yardstick, memcpy.

`extra_info` has gigabytes per second, so that runs with other sizes compare.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from bench.library import Writer, check, ffi, kernel, library
from bench.yardstick import Kernels, SyncCopy

_KERNELS = ("avx512", "avx2", "sse42", "portable", "aarch64")


@pytest.fixture(params=_KERNELS)
def selected(request: pytest.FixtureRequest) -> Any:
    """Select every copy kernel that this CPU can run in turn, and the fastest again afterwards."""
    before = kernel()
    name = str(request.param)
    if library().lck_kernel(name.encode(), ffi.NULL) < 0:
        pytest.skip(f"this CPU cannot run the copy kernel {name}")
    yield name
    check(library().lck_kernel(before.encode(), ffi.NULL))


def _rate(benchmark: Any, count: int) -> None:
    if benchmark.stats is not None:  # None: --benchmark-disable
        benchmark.extra_info["GB/s"] = round(count / benchmark.stats.stats.min / 1e9, 2)


def test_checksum(benchmark: Any, memory: torch.Tensor, selected: str) -> None:
    address = ffi.cast("void *", memory.data_ptr())
    benchmark(library().lck_crc32c, 0, address, memory.nbytes)
    _rate(benchmark, memory.nbytes)


def test_write_with_checksum(
    benchmark: Any, memory: torch.Tensor, selected: str, folder: Path
) -> None:
    with Writer(folder, [(memory.data_ptr(), memory.nbytes)]) as writer:
        benchmark.pedantic(
            writer.copy, setup=writer.begin, teardown=writer.drop, rounds=9, warmup_rounds=1
        )
        writer.begin()
        writer.copy()
        writer.verify()
        writer.drop()
    _rate(benchmark, memory.nbytes)


@pytest.mark.parametrize("chunk_kib", [64, 256, 1024, 4096])
def test_write_by_chunk_size(
    benchmark: Any, memory: torch.Tensor, chunk_kib: int, folder: Path
) -> None:
    with Writer(folder, [(memory.data_ptr(), memory.nbytes)], chunk_kib << 10) as writer:
        benchmark.pedantic(
            writer.copy, setup=writer.begin, teardown=writer.drop, rounds=9, warmup_rounds=1
        )
    _rate(benchmark, memory.nbytes)


@pytest.mark.parametrize("name", Kernels().names.values())
def test_plain_copy(benchmark: Any, memory: torch.Tensor, name: str, folder: Path) -> None:
    copy = SyncCopy(folder, [memory])
    copy.which = next(which for which, known in Kernels().names.items() if known == name)
    benchmark(copy)
    copy.close()
    _rate(benchmark, memory.nbytes)
