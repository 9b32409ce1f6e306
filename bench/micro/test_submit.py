"""Measure what asking for a copy costs, per layer, apart from the copy itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from bench.library import Writer

_LAYER_BYTES = 64


@pytest.fixture(params=[1, 100, 1000])
def layers(request: pytest.FixtureRequest) -> list[torch.Tensor]:
    """Return so many layers of a line each."""
    return [torch.zeros(_LAYER_BYTES, dtype=torch.uint8) for _ in range(request.param)]


def _per_layer(benchmark: Any, count: int) -> None:
    if benchmark.stats is not None:
        benchmark.extra_info["us per layer"] = round(benchmark.stats.stats.median / count * 1e6, 3)


def test_submit(benchmark: Any, layers: list[torch.Tensor], folder: Path) -> None:
    with Writer(folder, [(layer.data_ptr(), layer.nbytes) for layer in layers]) as writer:
        benchmark.pedantic(writer.begin, teardown=writer.drop, rounds=50, warmup_rounds=3)
    _per_layer(benchmark, len(layers))


def test_complete(benchmark: Any, layers: list[torch.Tensor], folder: Path) -> None:
    with Writer(folder, [(layer.data_ptr(), layer.nbytes) for layer in layers]) as writer:
        benchmark.pedantic(
            writer.copy, setup=writer.begin, teardown=writer.drop, rounds=50, warmup_rounds=3
        )
    _per_layer(benchmark, len(layers))
