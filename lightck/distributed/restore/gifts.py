"""The exchange of a snapshot's replicas between ranks before it is restored, seen from one rank."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from lightck.distributed.rendezvous import Meeting
from lightck.distributed.restore import replica_transfer
from lightck.distributed.restore.channel import Channel
from lightck.distributed.restore.lineage import Key
from lightck.distributed.restore.received_snapshot import Healed
from lightck.distributed.restore.survey import Holdings
from lightck.errors import CoordinationError, LightckError
from lightck.events import event
from lightck.reader.assembly import Assembled
from lightck.region import layout

SLOWEST_BYTES_S = 100e6
"""The rate in bytes per second at which a rank is still believed to be reading, or sending."""


class GiftError(LightckError):
    """A replica from another rank did not come, or is not valid; nothing live has changed."""


@dataclass(eq=False)
class Gifts:
    """The exchange of one snapshot's replicas. Used by the thread that restores."""

    ranks: Meeting
    holdings: Holdings
    key: Key
    early: bool
    heals: Mapping[int, int]
    """The sending rank of each receiving rank."""
    patience_s: float
    """Time to wait for each message, in seconds; connections together may take half of it."""
    mine: Assembled | None = None
    """The state that this rank put together by itself; None if it receives one."""
    got: Healed | None = None
    _giving: replica_transfer.Giving | None = None
    _channels: list[Channel] = field(default_factory=list)

    @contextlib.contextmanager
    def exchanged(self) -> Iterator[Assembled | Healed]:
        """Yield this rank's snapshot, its own or a received one; close all connections at the end.

        If a sender fails inside the context, it tells the ranks that wait for it.

        Raises:
            GiftError: the replica that this rank was to receive did not come.
        """
        rank = self.ranks.rank
        if rank not in self.heals:
            found = self.holdings.assembled(self.key, early=self.early)
            assert isinstance(found, Assembled), "chosen, but not offered here"
            self.mine = found
        try:
            self._connect()
            if self.mine is None:
                self.got = self._received()
                yield self.got
            else:
                if self._channels:
                    self._giving = replica_transfer.Giving(self.mine, [*self._channels])
                    self._giving.announce()
                yield self.mine
        except LightckError as error:
            if self._giving is not None:
                self._giving.fail(str(error))
            raise
        finally:
            for channel in self._channels:
                channel.close()

    def give(self) -> None:
        """Send the snapshot, which is now verified, to the ranks that lack it.

        Raises:
            CorruptSnapshotError, RegionIOError: it cannot be read any more.
        """
        if self._giving is None:
            return
        giving, self._giving = self._giving, None
        giving.send()
        for text in giving.lost:
            event("not_given", logging.WARNING, step=self.key.step, why=text)

    def in_words(self) -> str:
        """Describe what this rank received, in words; empty if nothing."""
        if self.got is None:
            return ""
        rank, donor, size = self.ranks.rank, self.got.donor, self.got.given.payload_bytes
        own = "buffers, generators and data position are its own"
        if self.got.half is None:
            own = f"buffers and data position are those of rank {self.got.given.record.rank}, too"
        return f"rank {rank} got {size} bytes of step {self.key.step} from rank {donor}; {own}"

    def _connect(self) -> None:
        rank, rounds = self.ranks.rank, self.ranks.rounds
        mine = [(r, donor) for r, donor in sorted(self.heals.items()) if rank in (r, donor)]
        if not mine:
            return
        assert rounds is not None, "alone, nobody gives anything"
        # The store is asked first: a receiver that waits for its server waits for no other rank.
        stores = [self.ranks.store.plain(f"heal/{rounds.number}/{d}-{r}") for r, d in mine]
        # The connections are made one after the other, with one deadline for all, long before any
        # rank's time-out in the round that follows: there the ranks learn of each other's failures,
        # and take an older step.
        until = time.monotonic() + self.patience_s / 2
        for (receiver, donor), store in zip(mine, stores, strict=True):
            what, ends = f"step {self.key.step}", (donor, receiver)
            try:
                channel = Channel.between(store, ends, rank, what, self.patience_s, until)
            except CoordinationError as error:
                if rank == receiver:
                    raise GiftError(str(error)) from error
                event("not_given", logging.WARNING, step=self.key.step, why=error)
                continue
            self._channels.append(channel)

    def _received(self) -> Healed:
        donor = self.heals[self.ranks.rank]
        try:
            found = replica_transfer.receive(self._channels[0], self.key, donor, SLOWEST_BYTES_S)
            found.half = self.holdings.half(self.key, self.early)
            if found.half is not None and not _fits(found):
                found.drop_half()
        except LightckError as error:
            raise GiftError(str(error)) from error
        return found


def _fits(found: Healed) -> bool:
    """Tell whether the rank's own state fits the received one, and no tensor is missing."""
    half, entries = found.half, found.entries
    try:
        found.trees()
        layout.decode(layout.encode(entries, np.zeros(len(entries), np.uint64)), context="healed")
    except LightckError:
        return False
    # A snapshot has every name of its own rank's model, which may be other names than the donor's.
    names = {each.name for each in entries}
    return (half is not None and half.ties is not None) or all(
        each.name in names for each in found.given.entries if each.name.startswith("model/")
    )
