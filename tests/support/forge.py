"""Region files with damage behind right checksums: what accident cannot make, and nothing excludes.

Offsets are those of native/src/format.h; a test compares the fields' names with the tables of
docs/design.md.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from lightck.region.native_region import crc32c

PAGE = 4096
SUPER_BYTES, RECORD_BYTES = 960, 256
SLOTS = 2
SUPER_FIELDS = {
    "magic": (0, 8), "version": (8, 4), "bytes": (12, 4), "generation": (16, 8), "size": (24, 8),
    "rank": (64, 4), "world": (68, 4), "slot_count": (72, 4), "segment_count": (76, 4),
    "created_ns": (80, 8), "journal_offset": (88, 8), "journal_length": (96, 8),
    "timeline": (104, 8), "lineage_count": (112, 4), "flags": (116, 4),
    "segment0.offset": (128, 8), "segment0.length": (136, 8), "segment0.slot_bytes": (144, 8),
    "segment1.offset": (152, 8), "segment1.length": (160, 8), "segment1.slot_bytes": (168, 8),
    "lineage0.timeline": (512, 8), "lineage0.sequence": (520, 8),
}  # fmt: skip
RECORD_FIELDS = {
    "sequence": (0, 8), "magic": (8, 4), "version": (12, 4), "step": (16, 8), "timeline": (24, 8),
    "parent": (32, 8), "flags": (56, 4), "slot": (60, 4), "layout_offset": (64, 8),
    "layout_length": (72, 8), "manifest_offset": (80, 8), "manifest_length": (88, 8),
    "payload_bytes": (104, 8), "wall_time_ns": (112, 8), "rank": (136, 4), "world": (140, 4),
}  # fmt: skip
BLOBS = ("layout", "manifest")
_FORMAT = {4: "<I", 8: "<Q"}


@dataclass
class Image:
    """The bytes of a region's file, and its structures by name."""

    raw: bytearray

    def start(self, name: str) -> int:
        """Return where `super0`, `super1`, `record0` or `record1` begins."""
        return (int(name[-1]) + (2 if name.startswith("record") else 0)) * PAGE

    def get(self, name: str, field: str) -> int:
        """A field of a structure."""
        at, size = (RECORD_FIELDS if name.startswith("record") else SUPER_FIELDS)[field]
        value: int = struct.unpack_from(_FORMAT[size], self.raw, self.start(name) + at)[0]
        return value

    def put(self, name: str, field: str, value: int) -> None:
        """Overwrite a field, the value cut to its size."""
        at, size = (RECORD_FIELDS if name.startswith("record") else SUPER_FIELDS)[field]
        cut = value & (1 << 8 * size) - 1
        struct.pack_into(_FORMAT[size], self.raw, self.start(name) + at, cut)

    def part(self, name: str) -> tuple[int, int]:
        """Offset and length of a structure, or of `layout0`, `manifest1`, ..., within the file."""
        if name.startswith(("super", "record")):
            length = SUPER_BYTES if name.startswith("super") else RECORD_BYTES
            return self.start(name), length
        blob, record = name[:-1], f"record{name[-1]}"
        begin = min(self.get(record, f"{blob}_offset"), len(self.raw))
        return begin, min(self.get(record, f"{blob}_length"), len(self.raw) - begin)

    def bytes_of(self, name: str) -> bytes:
        """Return a part's bytes."""
        at, length = self.part(name)
        return bytes(self.raw[at : at + length])

    def replace(self, name: str, data: bytes) -> None:
        """Put another layout table or manifest in a blob's place, longer or shorter."""
        at, _ = self.part(name)
        self.raw[at : at + len(data)] = data
        self.put(f"record{name[-1]}", f"{name[:-1]}_length", len(data))

    def seal(self) -> None:
        """Give every structure the checksum that it should have."""
        if len(self.raw) < (2 + SLOTS) * PAGE:
            return
        for copy in range(2):
            self._crc(f"super{copy}", SUPER_BYTES)
        for slot in range(SLOTS):
            for k, blob in enumerate(BLOBS):
                crc = crc32c(self.bytes_of(f"{blob}{slot}"))
                struct.pack_into("<I", self.raw, self.start(f"record{slot}") + 96 + 4 * k, crc)
            self._crc(f"record{slot}", RECORD_BYTES)

    def _crc(self, name: str, length: int) -> None:
        at = self.start(name)
        crc = crc32c(bytes(self.raw[at : at + length - 4]))
        struct.pack_into("<I", self.raw, at + length - 4, crc)
