"""Benchmarks of lightck and of what people use instead; see `python -m bench --help`."""
