"""A round of agreement: every rank sends a message, rank 0 decides, every rank reads the decision.

A rank that cannot take part sends the reason and does not wait; the others then learn of it at
once.

A round takes five messages per rank, whatever the number of ranks: claim, count, wait, read,
delete. Rank 0 also reads the messages of all ranks, in large batches. No other rank does: at 10,000
ranks these were 10^8 messages.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from lightck.distributed.store import KeyValueStore
from lightck.errors import CoordinationError

MAX_BYTES = 4096  # the longest message of one rank
_NAMED = 16  # missing ranks named in a message
_FAILURE = 1500  # the longest failure text, in characters

Message = dict[str, Any]
Decide = Callable[[Sequence[Message]], Message]


@dataclass
class AgreementRounds:
    """The numbered rounds of one store prefix; no key is used twice.

    Every rank must take part in every round, in the same order, as in a collective. Used at attach,
    restore and close, by one thread at a time.
    """

    store: KeyValueStore
    rank: int
    world: int
    timeout_s: float = 120.0
    number: int = 0
    """The number of the next round."""
    decided: list[tuple[str, Message]] = field(default_factory=list)
    """Kind and decision of each round of the last meeting."""

    def agree(
        self, kind: str, message: Message, decide: Decide, *, timeout_s: float | None = None
    ) -> Message:
        """Take part in the next round, and return the decision.

        Args:
            kind: of the round, such as `attach`; a rank that is in another kind of round is named.
            message: of this rank; JSON, at most `MAX_BYTES`.
            decide: called on rank 0 with the messages of all ranks, in rank order; pure. A
                `CoordinationError` that it raises is raised on every rank.
            timeout_s: how long rank 0 waits for the others in this round; None: as in every one.

        Returns:
            The decision of rank 0.

        Raises:
            CoordinationError: a rank is missing, or the decision was an error.
            StoreError: the store does not answer.
        """
        base, began = self._next(), time.monotonic()
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        self._send(base, {"kind": kind, **message})
        if self.rank == 0:
            answer = self._decide(base, kind, decide, began, limit_s)
            self.store.set(f"{base}/out", json.dumps(answer).encode())
        else:
            answer = self._await(base, kind, began, limit_s)
        if "error" in answer:
            raise CoordinationError(answer["error"])
        self._sweep()
        self.decided.append((kind, answer))
        return answer

    def fail(self, kind: str, why: str) -> None:
        """Report in the next round that this rank cannot go on; returns at once.

        The other ranks, which are in that round or will be, raise a `CoordinationError` that names
        this rank and the reason.
        """
        base, text = self._next(), why.encode("ascii", "replace").decode()[:_FAILURE]
        self._send(base, {"kind": kind, "failure": text})
        if self.rank == 0:
            self.store.set(f"{base}/out", json.dumps({"error": _failed(kind, {0: text})}).encode())

    def _next(self) -> str:
        base, self.number = f"round/{self.number}", self.number + 1
        return base

    def _send(self, base: str, message: Message) -> None:
        text = json.dumps(message, separators=(",", ":"))
        if len(text) > MAX_BYTES:  # fail at once: otherwise all would wait for it
            why = f"it has {len(text)} bytes to say, more than {MAX_BYTES}"
            text = json.dumps({"kind": message["kind"], "failure": why})
        mine = f"{base}/in/{self.rank}"
        if self.store.claim(mine, text.encode()) != text.encode():
            # The message needs no nonce: two lives of one rank with the same message are found by
            # the count, which then exceeds the world.
            raise self._stale(mine)
        count = self.store.add(f"{base}/count")
        if count > self.world:
            raise self._stale(f"{base}/count")
        if count == self.world:
            self.store.set(f"{base}/all", b"1")

    def _decide(
        self, base: str, kind: str, decide: Decide, began: float, limit_s: float
    ) -> Message:
        if not self.store.wait(f"{base}/all", limit_s):
            missing = [r for r in range(self.world) if self.store.read(f"{base}/in/{r}") is None]
            waited = time.monotonic() - began
            return {"error": _absent(kind, missing, self.world, base, waited)}
        raw = self.store.read_many([f"{base}/in/{r}" for r in range(self.world)])
        messages = [json.loads(each) for each in raw]
        failures = {r: each["failure"] for r, each in enumerate(messages) if "failure" in each}
        if failures:
            return {"error": _failed(messages[min(failures)]["kind"], failures)}
        other = [(r, each["kind"]) for r, each in enumerate(messages) if each["kind"] != kind]
        if other:
            rank, theirs = other[0]
            return {
                "error": f"rank 0 is in {kind} and rank {rank} in {theirs}: every rank must call "
                "lightck.restore and lightck.attach in the same order"
            }
        try:
            return decide(messages)
        except CoordinationError as error:
            return {"error": str(error)}
        except Exception as error:  # noqa: BLE001 - a fault of ours, which every rank must know
            return {"error": f"{kind}: rank 0 could not decide: {error!r}"[:_FAILURE]}

    def _await(self, base: str, kind: str, began: float, limit_s: float) -> Message:
        # Wait half as long again as rank 0, whose answer then names the ranks that are missing. A
        # wait may end without the key: torch's server wakes all waiters when one of them gives up.
        while (left := began + 1.5 * limit_s - time.monotonic()) > 0:
            if self.store.wait(f"{base}/out", left):
                decision = self.store.read(f"{base}/out")
                if decision is not None:
                    decided: Message = json.loads(decision)
                    return decided
        waited = time.monotonic() - began
        raise CoordinationError(_absent(kind, [0], self.world, base, waited))

    def _sweep(self) -> None:
        """Delete this rank's keys of the last round, which no rank reads any more.

        Every rank counted in this round has left the last one. Round 0's count stays, so that
        another life of the job over the same keys is found out.
        """
        before = self.number - 2
        if before < 0:
            return
        names = [f"in/{self.rank}"]
        if self.rank == 0:
            names += ["out", "all"] + (["count"] if before else [])
        self.store.delete([f"round/{before}/{name}" for name in names])

    def _stale(self, key: str) -> CoordinationError:
        return CoordinationError(
            f"rank {self.rank} of {self.world} finds {key} in the store already: another job or an "
            "earlier life of this one wrote it; give each job a store of its own, and torchrun "
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 if it restarts workers"
        )


def _failed(kind: str, failures: dict[int, str]) -> str:
    named = list(failures.items())[:_NAMED]
    more = f" and {len(failures) - _NAMED} more" if len(failures) > _NAMED else ""
    return f"no rank can {kind}: " + "; ".join(f"rank {r}: {why}" for r, why in named) + more


def _absent(kind: str, missing: Sequence[int], world: int, base: str, waited: float) -> str:
    named = ", ".join(str(r) for r in missing[:_NAMED])
    more = f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
    return (
        f"{kind}: rank(s) {named}{more} of {world} did not come in {waited:.1f} s (key {base}): "
        "every rank must call it; see their logs, or raise the time-out if they are only slow"
    )


# ---- the agreement at attach: all ranks belong together, and share one new timeline --------------

_NAMED_RANKS = 8


@dataclass(frozen=True, slots=True)
class Identity:
    """The facts about a rank that must be the same on every rank at attach.

    Attributes:
        run_id: the job's id, 16 bytes.
        world: number of ranks.
        path: the path below which each rank has its region.
        slots: number of slots in each region.
        policy: how due steps are decided, such as `every 5 steps`.
        restored: (timeline, step) that this rank continues; None for a fresh start.
        step: the last complete step; training goes on after it.
    """

    run_id: bytes
    world: int
    path: str
    slots: int
    policy: str = ""
    restored: tuple[int, int] | None = None
    step: int = 0


def agree_on_attach(rounds: AgreementRounds, identity: Identity) -> int:
    """Compare the identities of all ranks; return the id of a new timeline, the same on all.

    Raises:
        CoordinationError: the identities differ; names the field, the values and the ranks. Raised
            on every rank.
    """
    message = {**asdict(identity), "run_id": identity.run_id.hex()}
    return int(rounds.agree("attach", message, decide_attach)["timeline"])


def decide_attach(messages: Sequence[Message]) -> Message:
    """Decide the attach round on rank 0: draw a timeline id, or raise if the identities differ."""
    remedies = {
        "run_id": "regions of two jobs are mixed: give every rank the same run",
        "world": "every rank must be started for the same world",
        "path": "give every rank the same path=; it may be node-local",
        "slots": "give every rank the same slots=",
        "policy": "give every rank the same policy=",
        "restored": "every rank must restore the same snapshot, or none",
        "step": "every rank must attach at the same step",
    }
    for name, remedy in remedies.items():
        values: dict[str, list[int]] = {}
        for rank, each in enumerate(messages):
            values.setdefault(str(each[name]), []).append(rank)
        if len(values) > 1:
            found = "; ".join(f"{v} on rank(s) {named(r)}" for v, r in list(values.items())[:4])
            raise CoordinationError(f"the ranks differ in {name}: {found}; {remedy}")
    return {"timeline": secrets.randbits(63) | 1}


def named(ranks: Sequence[int]) -> str:
    """List ranks for a message: the first 8, and how many more."""
    more = f" and {len(ranks) - _NAMED_RANKS} more" if len(ranks) > _NAMED_RANKS else ""
    return ", ".join(str(r) for r in ranks[:_NAMED_RANKS]) + more
