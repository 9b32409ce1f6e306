"""A fault while a snapshot is given is an error on every rank; nothing is half filled."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from lightck.distributed.restore import healing
from lightck.distributed.restore.healing import P2PChannel, ReplicaSender
from lightck.distributed.restore.protocol import RestoreAttempt
from lightck.distributed.rounds import AgreementRounds
from lightck.distributed.store import JobStore
from lightck.errors import CoordinationError, NoSnapshotError
from lightck.reader.assembly import AssembledSnapshot
from support.distributed import ranks
from support.distributed.islands import Islands, check
from support.distributed.written import Crew

NAME = "model/second.weight"


def lacking(folder: Path, world: int = 2, *steps: int) -> tuple[Islands, Crew]:
    """Train on as many nodes as ranks, and take the last one's region away."""
    islands = Islands(folder, world, world)
    with islands.crew() as crew:
        for step in steps or (3,):
            crew.train(step)
    islands.settle(crew)
    islands.file(world - 1).unlink()
    return islands, crew


def on(rank: int, change: Any) -> Any:
    """Make a `before` for `Islands.restored` that does this in one rank's process."""

    def before(me: ranks.Me) -> None:
        if me.rank == rank:
            change()

    return before


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Send many messages, though the state is small; ranks are forked from here."""
    monkeypatch.setattr(healing, "CHUNK_BYTES", 10_000)


def damage_when_sending(islands: Islands, rank: int) -> Any:
    """Damage the source after it was found good, and after some of it has gone."""
    send = ReplicaSender.send

    def sending(sender: ReplicaSender) -> None:
        islands.alter(rank, 3, NAME)
        send(sender)

    return lambda: setattr(ReplicaSender, "send", sending)


def test_a_source_that_is_damaged_while_it_is_sent_is_an_error_on_every_rank(
    tmp_path: Path,
) -> None:
    islands, _ = lacking(tmp_path)
    for result in islands.restored(before=on(0, damage_when_sending(islands, 0))):
        assert isinstance(result, NoSnapshotError), result
        assert f"the bytes of {NAME} do not match their checksum any more" in str(result)
        assert "rank 1: step 3 from rank 0 to rank 1: " in str(result)


def test_another_rank_gives_what_the_first_one_cannot(tmp_path: Path) -> None:
    islands, crew = lacking(tmp_path, 3)
    results = islands.restored(before=on(0, damage_when_sending(islands, 0)))
    infos = check(results, crew, 3, lent={2: 1})
    assert [text.split(";")[0].split()[-1] for text in infos[0].healed] == ["1", "1"]


@pytest.mark.parametrize("dies", ["before it sends", "while it sends"])
def test_a_rank_that_dies_while_it_gives_is_named_on_every_other(tmp_path: Path, dies: str) -> None:
    islands, _ = lacking(tmp_path, 3)

    def dying(sender: ReplicaSender) -> None:
        if dies == "while it sends":
            sender._to_all(healing.CHUNK, next(healing.read_chunks(sender.state)))
        os.kill(os.getpid(), signal.SIGKILL)

    def before(me: ranks.Me) -> None:
        if me.rank == 0:
            ReplicaSender.send = dying
        agreed = RestoreAttempt._all_agree

        def later(attempt: Any, *args: Any) -> Any:
            me.send("waits for rank 0")
            me.pause()
            attempt.ranks.rounds.timeout_s = 0.5  # nobody else is waited for
            return agreed(attempt, *args)

        RestoreAttempt._all_agree = later

    def during(job: ranks.Job) -> None:
        (dead,) = job.outcomes([0])
        assert isinstance(dead, ranks.Gone), dead
        assert job.receive(1) == job.receive(2) == "waits for rank 0"
        job.let_go(1, 2)

    for result in islands.restored(before=before, during=during)[1:]:
        assert isinstance(result, CoordinationError) and "rank(s) 0 of 3" in str(result), result


def test_a_rank_that_gives_nothing_in_time_is_named_with_the_one_that_waits(
    tmp_path: Path,
) -> None:
    islands, _ = lacking(tmp_path, 2, 1, 3)

    def before(me: ranks.Me) -> None:
        expected, receive = healing._expected, healing.receive
        number = itertools.count()

        def silent(sender: ReplicaSender) -> None:
            me.store.wait([f"lost patience/{next(number)}"])

        def hasty(channel: P2PChannel, kind: int) -> torch.Tensor:
            """Wait only a second, in vain, for what comes after the header."""
            found = expected(channel, kind)
            channel.seconds = 1.0
            return found

        def receiving(*args: Any) -> Any:
            try:
                return receive(*args)
            finally:
                me.store.set(f"lost patience/{next(number)}", "")

        ReplicaSender.send, healing._expected, healing.receive = silent, hasty, receiving

    for result in islands.restored(before=before):
        assert isinstance(result, NoSnapshotError), result
        assert "from rank 0 to rank 1: no progress after" in str(result)
        assert " of 1 s; the other rank died, failed or is too slow" in str(result)


def test_bytes_that_change_on_the_way_are_noticed(tmp_path: Path) -> None:
    """The head's checksum is that of what was meant to be sent."""
    islands, _ = lacking(tmp_path)
    receive = P2PChannel._receive

    def receiving(channel: P2PChannel, tensor: torch.Tensor) -> None:
        receive(channel, tensor)
        if tensor.numel() == 10_000:
            tensor[77] ^= 1

    for result in islands.restored(
        before=on(1, lambda: setattr(P2PChannel, "_receive", receiving))
    ):
        assert isinstance(result, NoSnapshotError), result
        assert "10000 bytes came with checksum" in str(result)


def test_a_tensor_that_is_not_what_the_donors_region_says_is_noticed(tmp_path: Path) -> None:
    """Every message is what was sent, and yet the bytes are not those of the snapshot."""
    islands, _ = lacking(tmp_path)
    read_chunks = healing.read_chunks

    def altered(state: AssembledSnapshot) -> Iterator[torch.Tensor]:
        for chunk in read_chunks(state):
            chunk[5] ^= 1
            yield chunk

    change = on(0, lambda: setattr(healing, "read_chunks", altered))
    for result in islands.restored(before=change):
        assert isinstance(result, NoSnapshotError), result
        assert "from rank 0 have checksum" in str(result)


def test_a_model_that_does_not_fit_on_the_donor_is_an_error_on_every_rank(tmp_path: Path) -> None:
    from lightck.errors import RestoreMismatchError
    from lightck.reader.fill import StateFiller

    islands, _ = lacking(tmp_path)

    def refuse(filler: StateFiller) -> None:
        raise RestoreMismatchError("does not fit")

    first, second = islands.restored(before=on(0, lambda: setattr(StateFiller, "check", refuse)))
    assert isinstance(first, RestoreMismatchError)
    assert isinstance(second, CoordinationError) and "rank 0: RestoreMismatchError" in str(second)


@dataclass
class Clock:
    """`time`, as far as it is used here, with waits that take no time."""

    passed_s: float = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.passed_s


@pytest.mark.parametrize("donor", [0, 1])
def test_ranks_that_cannot_connect_take_an_older_step_together(tmp_path: Path, donor: int) -> None:
    """Connecting fails when patience ends, as gloo's does.

    It fails at once on rank 0 where that is given the snapshot.
    """
    islands = Islands(tmp_path, 4, 4)
    with islands.crew() as crew:
        crew.train(1)
        crew.train(2)
        crew.train(9, absent=[rank for rank in range(4) if rank != donor])
    islands.settle(crew)

    def before(me: ranks.Me) -> None:
        clock = Clock()

        def nobody(store: Any, here: int, world: int, limit: timedelta) -> None:
            if (me.rank, donor) != (0, 1):
                clock.passed_s += limit.total_seconds()
            assert clock.passed_s <= ranks.PATIENCE_S / 2, "the others lose patience meanwhile"
            raise RuntimeError("connect timed out")

        torch.distributed.ProcessGroupGloo = nobody
        healing.time = clock  # type: ignore[assignment]

    infos = check(islands.restored(before=before), crew, 2)
    told = [text for text in infos[0].fell_back if "no connection after" in text]
    assert len(told) == 3 and infos[0].healed == ()


def test_a_slow_store_takes_nothing_from_the_time_to_connect(tmp_path: Path) -> None:
    islands, crew = lacking(tmp_path, 3)

    def before(me: ranks.Me) -> None:
        clock, plain = Clock(), JobStore.plain

        def slowly(store: JobStore, part: str) -> Any:
            clock.passed_s += ranks.PATIENCE_S if me.rank == 2 else 0.0
            return plain(store, part)

        JobStore.plain = slowly
        healing.time = clock  # type: ignore[assignment]

    check(islands.restored(before=before), crew, 3, lent={2: 0})


@pytest.mark.parametrize("fails", [0, 2])
def test_a_rank_whose_gift_fails_at_once_waits_for_those_that_are_still_given_theirs(
    tmp_path: Path, fails: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What is believed of a medium is scaled with the state.
    monkeypatch.setattr(healing, "SLOWEST_BYTES_S", 1e4)
    islands = Islands(tmp_path, 3, 3)
    with islands.crew() as crew:
        crew.train(1)
        crew.train(2)
        crew.train(9, absent=[0, 2])
    islands.settle(crew)

    def before(me: ranks.Me) -> None:
        agree, waits = AgreementRounds.agree, list[float]()

        def receive(channel: P2PChannel) -> Any:
            raise CoordinationError(f"{channel.label}: changed on the way")

        def waiting(rounds: AgreementRounds, kind: str, *asked: Any, **limit: Any) -> Any:
            if kind == "restore: verified" and not waits:  # of step 9, the first that is tried
                waits.append(limit.get("timeout_s", rounds.timeout_s))
                me.send(waits[0])
            return agree(rounds, kind, *asked, **limit)

        if me.rank == fails:
            P2PChannel.receive = receive
        AgreementRounds.agree = waiting

    def during(job: ranks.Job) -> None:
        waits = {job.receive(rank) for rank in range(3)}
        assert len(waits) == 1 and waits.pop() > ranks.PATIENCE_S + 1.0

    infos = check(islands.restored(before=before, during=during), crew, 2)
    assert any(f"rank {fails}: changed on the way" in text for text in infos[0].fell_back)
