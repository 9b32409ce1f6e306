"""What this process knows about one slot of a region."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from lightck.region import allocator
from lightck.region.layout import Layout
from lightck.region.native import Record
from lightck.region.pool import NativeSnapshot


@dataclass(eq=False)
class Slot:
    """What this process knows about one slot."""

    index: int
    record: Record | None = None
    """Of the committed snapshot it holds; None: none that counts."""
    fate_open: bool = False
    """Other ranks decide whether it counts, and what they decided has not been taken in here."""
    table_digest: bytes = b""
    """Of the layout table that its last commit made durable."""
    digests: tuple[bytes, npt.NDArray[np.uint32]] | None = None
    """Layout digest and CRCs of content that this process wrote completely or read and verified."""
    layout: tuple[allocator.Plan, Layout, list[int]] | None = field(default=None, repr=False)
    """The plan last used here, with its extents in this slot; offsets of table and manifest."""
    writer: NativeSnapshot | None = field(default=None, repr=False)
    kept: bool = False
    """Of one that was begun for a failure: no other rank was asked about it, see `Region.keep`."""
