"""Ranks as threads of this process, over a store in memory: quick, where no process has to die."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

from lightck.distributed import rendezvous
from lightck.distributed.rounds import AgreementRounds
from support.distributed.memory import MemoryStore, Server

PATIENCE_S = 20.0
_here = threading.local()


def together(
    world: int,
    code: Callable[[int], Any],
    *,
    absent: Sequence[int] = (),
    timeout_s: float = PATIENCE_S,
    server: Server | None = None,
) -> list[Any]:
    """Return what `code(rank)` returned or raised on every rank; it may call `lightck.restore`."""
    server = server or Server()
    results: list[Any] = [None] * world

    def run(rank: int) -> None:
        _here.seat = (rank, world)
        _here.rounds = AgreementRounds(MemoryStore(server), rank, world, timeout_s)
        try:
            results[rank] = code(rank)
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(r,)) for r in range(world) if r not in absent]
    with _patched():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(3 * timeout_s + 30)
    assert not any(thread.is_alive() for thread in threads), "a rank hangs"
    return results


@contextmanager
def _patched() -> Iterator[None]:
    """Let `meeting` ask these, in place of torch.distributed."""
    module = sys.modules[rendezvous.__name__]
    seat = mock.patch.object(module, "here", lambda: getattr(_here, "seat", (0, 1)))
    rounds = mock.patch.object(module, "_over_default_store", lambda rank, world: _here.rounds)
    with seat, rounds:
        yield
