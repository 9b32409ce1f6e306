"""The one exception of the benchmarks: something cannot be measured, or a file cannot be read."""

from __future__ import annotations


class BenchError(Exception):
    """Nothing was published; the text says what was found, what was expected and what to do."""
