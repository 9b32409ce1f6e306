"""The exceptions of the benchmarks: something cannot be measured, or a file cannot be read."""

from __future__ import annotations


class BenchError(Exception):
    """Nothing was published; the text says what was found, what was expected and what to do."""


class NoNumber(BenchError):
    """An engine did not keep up: snapshots that were due have slipped; their cost is not known."""


class Unavailable(BenchError):
    """Not on this machine, or not for this user: a tool, a right or a kernel feature is missing."""
