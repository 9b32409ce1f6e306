"""Micro-benchmarks with pytest-benchmark: `make bench-micro`; not part of `make test`."""
