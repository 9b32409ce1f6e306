"""Store bytes on a medium: named tensors become extents, and extents a committed snapshot.

This package does not import torch.
"""
