"""Replicas of several nodes held against each other before a snapshot of them is restored.

Every rank says one digest of the replicated state that it can read, computed from the checksums
that the layout tables have: no byte of a tensor is read. Only where digests differ do the ranks go
on to find the first tensor that does, by halving, 64 ranges at a time.

A vote is a node's: the ranks that wrote one replica together. Whatever most nodes have counts.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lightck.capture.assembled import Assembled
from lightck.distributed.agreement import named
from lightck.distributed.exchange import Said
from lightck.distributed.views import plain
from lightck.region.checksum import combine
from lightck.region.layout import Entry

RANGES = 64
_NAME = 200  # letters of a tensor's name


def is_own(entry: Entry) -> bool:
    """What a rank has for itself: buffers, extras, and what optimizers keep beside their state."""
    beside = "/@group/" in entry.name or "/@attribute/" in entry.name
    return entry.role not in ("parameter", "optimizer") or beside


@dataclass(frozen=True, eq=False)
class Content:
    """Checksums of the replicated tensors of one snapshot, whoever wrote which of their bytes."""

    names: tuple[str, ...]
    """Sorted."""
    sums: npt.NDArray[np.uint32]
    form: str
    """Stands for names, dtypes, shapes and ties."""

    @classmethod
    def of(cls, state: Assembled) -> Content:
        """From the layout tables and manifests alone."""
        alike = [(e.name, i) for i, e in enumerate(state.entries) if not is_own(e)]
        alike.sort()
        sums = whole_sums(state)
        forms = hashlib.blake2b(digest_size=8)
        for _, i in alike:
            e = state.entries[i]
            forms.update(repr((e.name, e.dtype, e.shape, e.strides, e.alias_of)).encode())
        whole = np.array([sums[i] for _, i in alike], np.uint32)
        return cls(tuple(name for name, _ in alike), whole, forms.hexdigest())

    @property
    def digest(self) -> str:
        """Of all of it."""
        return self.form + self._of(0, len(self.names))

    def ranges(self, begin: int, end: int) -> list[str]:
        """Digests of the equal parts of a range."""
        return [self._of(a, b) for a, b in parts(begin, end)]

    def _of(self, begin: int, end: int) -> str:
        return hashlib.blake2b(self.sums[begin:end].tobytes(), digest_size=8).hexdigest()


def whole_sums(state: Assembled) -> npt.NDArray[np.uint32]:
    """CRC32C of each entry's bytes; several ranks may hold them."""
    sums = np.zeros(len(state.entries), np.uint32)
    held = [(p.entries, p.begins, p.rows["length"], p.rows["crc"]) for p in state.parts]
    entries, begins, lengths, crcs = map(np.concatenate, zip(*held, strict=True))
    last = -1
    for row in np.lexsort((begins, entries)):
        i, crc = int(entries[row]), int(crcs[row])
        sums[i] = crc if i != last else combine(int(sums[i]), crc, int(lengths[row]))
        last = i
    return sums


def parts(begin: int, end: int) -> list[tuple[int, int]]:
    """At most `RANGES` consecutive ones of equal size."""
    size = max(1, -(-(end - begin) // RANGES))
    return [(at, min(at + size, end)) for at in range(begin, end, size)]


def said_of(replica: int, content: Content) -> Said:
    """What a rank says of a snapshot that it can put together."""
    return {"replica": replica, "digest": content.digest, "count": len(content.names)}


def judge(said: Sequence[Said]) -> Said:
    """Rank 0's word: who has what most nodes have. Pure.

    Returns:
        `same`; if not, `most`: the ranks that have what more than half of the nodes have, empty if
        there is no such thing; `odd`: all others that have something; `count` of tensors, 0 if the
        ranks differ in more than their contents.
    """
    there = {rank: each for rank, each in enumerate(said) if each.get("digest")}
    replicas = {(each["replica"], each["digest"]) for each in there.values()}
    votes = Counter(digest for _, digest in replicas)
    if len(votes) <= 1:
        return {"same": True, "most": [], "odd": [], "count": 0}
    (first, count), *_ = votes.most_common()
    most = [r for r, each in there.items() if each["digest"] == first]
    if 2 * count <= len(replicas):
        most = []
    forms = {(each["digest"][:16], each["count"]) for each in there.values()}
    return {
        "same": False,
        "most": most,
        "odd": [rank for rank in there if rank not in most],
        "count": next(iter(forms))[1] if len(forms) == 1 else 0,
    }


def narrow(said: Sequence[Said]) -> Said:
    """Rank 0's word: the first range that differs, and the name of its first tensor. Pure."""
    there = [each for each in said if each.get("ranges")]
    columns = zip(*(each["ranges"] for each in there), strict=True)
    at = next((i for i, column in enumerate(columns) if len(set(column)) > 1), 0)
    return {"at": at, "name": next((each["name"] for each in there), "")}


def said_of_range(content: Content, begin: int, end: int) -> Said:
    """What a rank says of a range of its tensors."""
    return {"ranges": content.ranges(begin, end), "name": plain(content.names[begin])[:_NAME]}


def in_words(step: int, verdict: Said, tensor: str) -> str:
    """One sentence, the same on every rank."""
    what = tensor or "which tensors there are, or their shapes"
    odd, most = verdict["odd"], verdict["most"]
    text = f"step {step}: replicas on different nodes differ in {what}"
    if most:
        return (
            f"{text}: on the node(s) of rank(s) {named(odd)} it is not what most nodes have, those"
            f" of rank(s) {named(most)}"
        )
    return f"{text}: those of rank(s) {named(odd)}; no value is most nodes'"
