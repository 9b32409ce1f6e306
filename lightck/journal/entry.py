"""Encode and decode entries of the boundary journal; `step_journal.py` describes their content.

When a step ends, code and data are out of the caches: whatever is done costs ten times what it does
in a loop, so as little as possible is done. What is the same object as at the instant before
(names, large containers) is a part that is encoded once (`BlobWriter.apart`).
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from lightck.errors import CorruptSnapshotError, RegionFullError
from lightck.journal.copy_buffer import CopyBuffer
from lightck.region.native_region import (
    FORWARD,
    RECORD_EARLY,
    STEP_END,
    JournalEntry,
    Record,
)
from lightck.state import boundary_blob
from lightck.state.boundary_blob import BlobEncoder, BlobWriter, constituents
from lightck.state.boundary_codec import TAG, identical
from lightck.state.inventory import StateTensor

MAX_EXTRA_BYTES = 1 << 20
"""Bytes of extras in an entry at most: more would cost every step a millisecond."""


class ExtrasFullError(RegionFullError):
    """Raised when extras have more bytes than may be written at every step; names the largest."""


@dataclass(eq=False)
class EntryEncoder:
    """Encodes entries. For one thread at a time."""

    _encoders: dict[int, BlobEncoder] = field(default_factory=lambda: defaultdict(BlobEncoder))
    """The encoders of entries with the generators of so many instants."""
    _groups: dict[int, _OptimizerGroups] = field(default_factory=dict)
    """Each optimizer's groups as last given, by its index."""

    def encode(
        self,
        copy_buffer: CopyBuffer,
        copies: Mapping[str, torch.Tensor],
        trees: tuple[dict[str, Any], dict[str, Any]],
        share_digest: bytes,
    ) -> bytes:
        """Encode an entry, without the step, which the journal has beside it.

        Args:
            copy_buffer: just filled with the rank's own small tensors.
            copies: the copies in it, by name.
            trees: plain values of step end and of forward start.
            share_digest: digest of the share map.

        Raises:
            ExtrasFullError: extras have more than `MAX_EXTRA_BYTES`.
        """
        first, second = trees

        def put(
            writer: BlobWriter, tensors: list[dict[str, Any]], states: list[dict[str, Any]]
        ) -> None:
            before = writer.size
            extras = writer.put([first["extras"], second["extras"]])
            if writer.size - before > MAX_EXTRA_BYTES:
                raise ExtrasFullError(_extras_too_large(first["extras"], second["extras"]))
            rest = {key: value for key, value in second.items() if key not in ("extras", "step")}
            if "rng" in rest:
                rest["rng"] = states[1]
            rest["optimizers"] = self._optimizers(writer, second["optimizers"])
            digest = writer.put(share_digest)
            writer.put(
                {
                    "tensors": tensors[0],
                    "extras": extras,
                    "rng": states[0],
                    "second": rest,
                    "share_digest": digest,
                }
            )

        generated = [tree["rng"] for tree in trees if "rng" in tree]
        told = [*constituents(first), *constituents(second), share_digest]
        part = copy_buffer.part(copies)
        return self._encoders[len(generated)].encode([part], generated, told, put)

    def _optimizers(self, writer: BlobWriter, trees: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Split the parameters' names, which are the most, from what a schedule changes."""
        described = []
        for i, tree in enumerate(trees):
            names = [group["params"] for group in tree["groups"]]
            options = [group["options"] for group in tree["groups"]]
            known = self._groups.get(i)
            if known is None or not identical(known.names, names):
                known = _OptimizerGroups(names)
            if not identical(known.options, options):
                known = _OptimizerGroups(known.names, options, _differences(options))
            self._groups[i] = known
            parts = {"params": writer.apart(known.names), "options": writer.apart(known.different)}
            described.append({**tree, "groups": parts})
        return described


@dataclass(frozen=True, eq=False)
class _OptimizerGroups:
    """Keeps what was last given of an optimizer's groups: what stays the same is encoded once."""

    names: list[list[str]]
    options: list[dict[str, Any]] = field(default_factory=list)
    different: list[list[Any]] = field(default_factory=list)


def _differences(options: Sequence[dict[str, Any]]) -> list[list[Any]]:
    """Return of each group what the first one has not, and whether the rest is as there."""
    if not options:
        return []
    first, names = options[0], [*options[0]]
    found: list[list[Any]] = [[False, first]]
    for each in options[1:]:
        alike = [*each] == names
        rest = {k: v for k, v in each.items() if v is not first[k]} if alike else each
        found.append([alike, rest])
    return found


@dataclass(frozen=True)
class DecodedEntry:
    """Content of a journal entry."""

    at_step: bytes
    """Encoded values of step end, as in a manifest."""
    at_forward: bytes
    """Encoded values of forward start, as in a manifest."""
    lives: tuple[StateTensor, ...]
    """Small tensors of the rank's own."""
    share_digest: bytes


def decode_entry(found: JournalEntry, *, context: str) -> DecodedEntry:
    """Decode an entry, running no code.

    Raises:
        CorruptSnapshotError: it is not what `encode` makes.
    """
    tree = boundary_blob.opened(found.blob, context=context)
    try:
        tensors, first, second, digest = _rebuilt(tree, found.step)
        lives = tuple(_state_tensor(name, described) for name, described in tensors.items())
        if type(digest) is bytes:
            return DecodedEntry(
                boundary_blob.closed(first), boundary_blob.closed(second), lives, digest
            )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CorruptSnapshotError(f"{context}: no boundary state: {error!r}") from error
    raise CorruptSnapshotError(f"{context}: no boundary state")


# ---- entries of all ranks of a node, beside a whole snapshot -------------------------------------

ENTRIES = "entries"
"""The key of these entries in the state at the forward of a whole snapshot."""


@dataclass(frozen=True, slots=True)
class RankEntry:
    """A journal entry as a whole snapshot has it: what is one rank's own, at one instant."""

    rank: int
    entry: JournalEntry

    @property
    def early(self) -> bool:
        """Tell whether it is of the step end."""
        return self.entry.kind == STEP_END or self.entry.early


def with_entries(second: dict[str, Any], entries: Sequence[RankEntry]) -> dict[str, Any]:
    """Return values of forward start with the entries of all ranks beside them."""
    told = [
        {"rank": each.rank, "kind": each.entry.kind, "flags": each.entry.flags}
        | {"blob": each.entry.blob}
        for each in entries
    ]
    return {**second, ENTRIES: told}


def entries_in(second: dict[str, Any], record: Record, *, context: str) -> list[RankEntry]:
    """Return the entries that values of forward start have beside them; none if there are none.

    Args:
        second: as decoded from the manifest.
        record: of the snapshot; the entries are of its step and timeline.
        context: for messages.

    Raises:
        CorruptSnapshotError: they are not what `with_entries` makes.
    """
    found = []
    try:
        for told in second.get(ENTRIES, ()):
            rank, kind, flags, blob = (told[key] for key in ("rank", "kind", "flags", "blob"))
            if [type(each) for each in (rank, kind, flags, blob)] != [int, int, int, bytes]:
                raise TypeError("an entry of other types")
            step, timeline = record.step, record.timeline
            found.append(RankEntry(rank, JournalEntry(kind, step, timeline, 0, 0, flags, blob)))
    except (KeyError, TypeError) as error:
        raise CorruptSnapshotError(f"{context}: no entries of ranks: {error!r}") from error
    return found


def missing_tensors(entry: JournalEntry, own: Set[str], shared: Set[str]) -> list[str]:
    """Return the names of tensors that an entry lacks: large ones of extras are in no entry.

    Args:
        entry: of one rank.
        own: names of the model's own tensors, which it has to have.
        shared: names of the tensors that all ranks have, which its values may refer to.

    Raises:
        CorruptSnapshotError: it does not decode.
    """
    found = decode_entry(entry, context="journal")
    wanted = set(own)
    for blob in (found.at_step, found.at_forward):
        _add_references(boundary_blob.opened(blob, context="journal"), wanted)
    return sorted(wanted - shared - {live.name for live in found.lives})


def _add_references(tree: Any, names: set[str]) -> None:
    """Add the names of the tensors that plain values refer to."""
    if isinstance(tree, dict):
        if tree.get(TAG) == "tensor" and type(tree.get("name")) is str:
            names.add(tree["name"])
            return
        tree = list(tree.values())
    if isinstance(tree, list | tuple):
        for each in tree:
            _add_references(each, names)


class CannotInfer(Exception):  # noqa: N818 - no error
    """The change that the training made to a part of a rank's own state is unknown; names it."""

    def __init__(self, part: str, what: str) -> None:
        super().__init__(f"{what} changes {part}, which was not alike on both ranks before it")


def step_end_of(fence: JournalEntry, around: Sequence[JournalEntry]) -> JournalEntry:
    """Return the entry of the step end that a rank would have left, which has left the fence's.

    An update changes the same on every rank. What it left alone on the witness is, on this rank, as
    at its fence; what it changed there, and was alike on both ranks before, is alike behind it.

    Args:
        fence: the entry of the fence of the rank that stands inside its update, or died there.
        around: the witness's entries of the fence and of the step end, around the same update.

    Raises:
        CannotInfer: another part changed.
        CorruptSnapshotError: an entry does not decode.
    """
    blob = _inferred(fence, around, "the update")
    return replace(fence, kind=STEP_END, flags=RECORD_EARLY, blob=blob)


def forward_of(step_end: JournalEntry, around: Sequence[JournalEntry]) -> JournalEntry:
    """Return the entry of forward start that a rank would have left, which has left the step end's.

    As `step_end_of`, for what the loop does between a step's end and the next forward.

    Args:
        step_end: the entry of the rank that was lost before its forward.
        around: the witness's entries of step end and forward start of the same step.

    Raises:
        CannotInfer: another part changed.
        CorruptSnapshotError: an entry does not decode.
    """
    blob = _inferred(step_end, around, "what the loop does before its next forward")
    return replace(step_end, kind=FORWARD, flags=0, blob=blob)


def _inferred(left: JournalEntry, around: Sequence[JournalEntry], what: str) -> bytes:
    trees = [boundary_blob.opened(each.blob, context="journal") for each in (left, *around)]
    named = [{**tree, "extras": _by_name(tree["extras"])} for tree in trees]
    seconds = [_with_whole_options(tree["second"]) for tree in named]
    if any("rng" in second for second in seconds):  # at the step end they are those of that
        seconds = [
            {"rng": tree["rng"], **second} for tree, second in zip(named, seconds, strict=True)
        ]
    whole = {
        **named[0],
        "tensors": _table([tree["tensors"] for tree in named], "", what),
        "extras": _from_names(
            _table([tree["extras"] for tree in named], "extra ", what), len(trees[0]["extras"])
        ),
        "rng": _behind([tree["rng"] for tree in named], "random generators", what),
        "second": _table(seconds, "", what),
    }
    return boundary_blob.closed(whole)


def _with_whole_options(second: dict[str, Any]) -> dict[str, Any]:
    """Return values of forward start in which no group's options refer to the first group's.

    Which ones do depends on which objects groups share, and that differs by process: a restored
    optimizer has other objects than one that was built.
    """
    whole = []
    for described in second["optimizers"]:
        groups = _rebuilt_optimizer(described)["groups"]
        options = [[False, group["options"]] for group in groups]
        whole.append({**described, "groups": {**described["groups"], "options": options}})
    return {**second, "optimizers": whole}


def _by_name(instants: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {f"{i}/{name}": value for i, row in enumerate(instants) for name, value in row.items()}


def _from_names(table: Mapping[str, Any], count: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [{} for _ in range(count)]
    for key, value in table.items():
        i, _, name = key.partition("/")
        found[int(i)][name] = value
    return found


_PARTS = {"optimizers": "optimizers' options", "rng": "random generators"}


def _table(trees: Sequence[Mapping[str, Any]], label: str, what: str) -> dict[str, Any]:
    names = dict.fromkeys(name for tree in trees for name in tree)
    found = {
        name: _behind([tree.get(name) for tree in trees], _PARTS.get(name, f"{label}{name}"), what)
        for name in names
    }
    return {name: value for name, value in found.items() if value is not None}


def _behind(values: Sequence[Any], part: str, what: str) -> Any:
    """Return what a part is afterwards, from its values on this rank and on the witness."""
    here, before, after = (boundary_blob.closed(value) for value in values)
    if before == after or here == after:  # left alone, or made here already
        return values[0]
    if here == before:
        return values[2]
    raise CannotInfer(part, what)


def _state_tensor(name: str, described: dict[str, Any]) -> StateTensor:
    role, layer, tensor = described["role"], described["layer"], described["tensor"]
    if not isinstance(tensor, torch.Tensor) or {type(name), type(role), type(layer)} != {str}:
        raise TypeError(f"{name!r} is no tensor")
    return StateTensor(
        name, role, layer, tensor, frozenset(map(int, described["holders"])), sync=True
    )


def _rebuilt(tree: Any, step: int) -> tuple[Any, Any, Any, Any]:
    """Return tensors, both instants and the share digest, from a tree that `encode` made.

    Raises:
        KeyError, TypeError, ...: it is not what `encode` makes.
    """
    extras, second = tree["extras"], tree["second"]
    optimizers = [_rebuilt_optimizer(described) for described in second["optimizers"]]
    first = {"rng": tree["rng"], "extras": extras[0]}
    whole = {**second, "optimizers": optimizers, "extras": extras[1], "step": step}
    return tree["tensors"], first, whole, tree["share_digest"]


def _rebuilt_optimizer(described: dict[str, Any]) -> dict[str, Any]:
    """Rebuild an optimizer's values as `OptimizerOptions.take` gives them."""
    names, different = described["groups"]["params"], described["groups"]["options"]
    options = [{**different[0][1], **rest} if alike else rest for alike, rest in different]
    rows = zip(names, options, strict=True)
    return {**described, "groups": [{"params": each, "options": rest} for each, rest in rows]}


def _extras_too_large(first: dict[str, Any], second: dict[str, Any]) -> str:
    sizes = {
        name: len(boundary_blob.closed((first.get(name), second.get(name))))
        for name in first | second
    }
    name, most = max(sizes.items(), key=operator.itemgetter(1))
    return (
        f"extras[{name!r}] has {most} bytes of {sum(sizes.values())} that extras have beside large"
        f" tensors: more than the {MAX_EXTRA_BYTES} that are written at every step"
    )
