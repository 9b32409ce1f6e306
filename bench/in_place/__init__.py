"""The scripts that `bench.measures.in_place` starts as a job, and how they are started.

`common` and the scripts of other engines import torch alone: they run in environments of their own.
"""
