"""The state that this process knows of one slot of a region."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from lightck.region import allocator
from lightck.region.layout import Layout
from lightck.region.native_pool import NativeSnapshot
from lightck.region.native_region import Record


@dataclass(eq=False)
class Slot:
    """The state that this process knows of one slot."""

    index: int
    record: Record | None = None
    """The record of the committed snapshot in the slot; None: none that counts."""
    fate_open: bool = False
    """Other ranks decide whether the snapshot counts, and their decision has not arrived here."""
    table_digest: bytes = b""
    """The digest of the layout table that the slot's last commit made durable."""
    digests: tuple[bytes, npt.NDArray[np.uint32]] | None = None
    """Layout digest and CRCs of content that this process wrote completely or read and verified."""
    layout: tuple[allocator.Plan, Layout, list[int]] | None = field(default=None, repr=False)
    """The plan last used here, its layout with extents in this slot, and the offsets of table and
    manifest."""
    writer: NativeSnapshot | None = field(default=None, repr=False)
    kept: bool = False
    """The snapshot was begun for a failure: no other rank was asked about it, see `Region.keep`."""
