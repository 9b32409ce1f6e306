"""The exceptions of the benchmarks: something cannot be measured, or a file cannot be read."""

from __future__ import annotations


class BenchError(Exception):
    """Nothing was published; the text says what was found, what was expected and what to do."""


class NoNumber(BenchError):
    """An engine did not keep up: due snapshots have slipped, so that their cost is not known."""


class Unavailable(BenchError):
    """A tool, a right or a kernel feature is missing on this machine, or for this user."""
