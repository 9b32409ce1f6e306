"""Ranks that are known not to come to a round: only they are waited for in vain.

A small time-out of a whole job would also end the wait for ranks that are merely slow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from lightck.distributed.rounds import AgreementRounds
from support.distributed.ranks import LONG_S


def never_come(
    dead: Sequence[int], seconds: float = 0.5, put: Callable[..., object] = setattr
) -> list[float]:
    """Wait only shortly for ranks that never come; call this in the process of every living rank.

    Args:
        dead: ranks that will never come.
        seconds: how long they are waited for, once all others are there; these are waited for as
            long as a test may take.
        put: where ranks are threads, a `monkeypatch.setattr`.

    Returns:
        Where to find, later, how long the product would have waited, for each round.
    """
    waits: list[float] = []
    decide, wait = AgreementRounds._decide, AgreementRounds._await

    def deciding(rounds: AgreementRounds, base: str, *args: Any) -> Any:
        *rest, limit_s = args
        for rank in range(rounds.world):
            if rank not in dead:
                assert rounds.store.wait(f"{base}/in/{rank}", LONG_S), f"rank {rank} did not come"
        waits.append(limit_s)
        return decide(rounds, base, *rest, seconds)

    def awaiting(rounds: AgreementRounds, *args: Any) -> Any:
        *rest, limit_s = args
        waits.append(1.5 * limit_s)
        return wait(rounds, *rest, seconds if 0 in dead else LONG_S)

    put(AgreementRounds, "_decide", deciding)
    put(AgreementRounds, "_await", awaiting)
    return waits
