"""Bytes on a medium: named tensors become extents, extents a committed snapshot. No torch."""
