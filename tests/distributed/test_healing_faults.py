"""What goes wrong while a snapshot is given: an error on every rank, nothing is half filled."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
from islands import Islands, check
from written import Crew

from lightck.capture.assembled import Assembled
from lightck.distributed import gifts, recall, transfer
from lightck.distributed.channel import Channel
from lightck.errors import CoordinationError, NoSnapshotError

NAME = "model/second.weight"


def lacking(folder: Path, world: int = 2, *steps: int) -> tuple[Islands, Crew]:
    """As many nodes as ranks; the last one has lost its region."""
    islands = Islands(folder, world, world)
    with islands.crew() as crew:
        for step in steps or (3,):
            crew.train(step)
    islands.settle(crew)
    islands.file(world - 1).unlink()
    return islands, crew


def on(rank: int, change: Any) -> Any:
    """For `Islands.restored`: do it in one rank's process."""

    def before(me: ranks.Me) -> None:
        if me.rank == rank:
            change()

    return before


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many messages, though the state is small; ranks are forked from here."""
    monkeypatch.setattr(transfer, "CHUNK_BYTES", 10_000)


def damage_when_sending(islands: Islands, rank: int) -> Any:
    """After the source was found good, and after some of it has gone."""
    send = transfer.Giving.send

    def sending(giving: transfer.Giving) -> int:
        islands.alter(rank, 3, NAME)
        return send(giving)

    return lambda: setattr(transfer.Giving, "send", sending)


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

    def dying(giving: transfer.Giving) -> int:
        if dies == "while it sends":
            giving._to_all(transfer.CHUNK, next(transfer.stream(giving.state)))
        os.kill(os.getpid(), signal.SIGKILL)
        return 0

    results = islands.restored(
        before=on(0, lambda: setattr(transfer.Giving, "send", dying)), patience_s=3.0
    )
    assert isinstance(results[0], ranks.Gone)
    for result in results[1:]:
        assert isinstance(result, CoordinationError) and "0" in str(result), result


def test_a_rank_that_gives_nothing_in_time_is_named_with_the_one_that_waits(
    tmp_path: Path,
) -> None:
    islands, crew = lacking(tmp_path, 2, 1, 3)
    silent = on(0, lambda: setattr(transfer.Giving, "send", lambda giving: 0))
    for result in islands.restored(before=silent, patience_s=2.0):
        assert isinstance(result, NoSnapshotError | CoordinationError), result
        assert "from rank 0 to rank 1: no progress after" in str(result)


def test_bytes_that_change_on_the_way_are_noticed(tmp_path: Path) -> None:
    """The head's checksum is that of what was meant to be sent."""
    islands, _ = lacking(tmp_path)
    receive = Channel._receive

    def receiving(channel: Channel, tensor: torch.Tensor) -> None:
        receive(channel, tensor)
        if tensor.numel() == 10_000:
            tensor[77] ^= 1

    for result in islands.restored(before=on(1, lambda: setattr(Channel, "_receive", receiving))):
        assert isinstance(result, NoSnapshotError), result
        assert "10000 bytes came with checksum" in str(result)


def test_a_tensor_that_is_not_what_the_donors_region_says_is_noticed(tmp_path: Path) -> None:
    """Every message is what was sent, and yet the bytes are not those of the snapshot."""
    islands, _ = lacking(tmp_path)
    stream = transfer.stream

    def altered(state: Assembled) -> Iterator[torch.Tensor]:
        for chunk in stream(state):
            chunk[5] ^= 1
            yield chunk

    change = on(0, lambda: setattr(transfer, "stream", altered))
    for result in islands.restored(before=change):
        assert isinstance(result, NoSnapshotError), result
        assert "from rank 0 have checksum" in str(result)


def test_a_model_that_does_not_fit_on_the_donor_is_an_error_on_every_rank(tmp_path: Path) -> None:
    from lightck.capture.filling import Filling
    from lightck.errors import RestoreMismatchError

    islands, _ = lacking(tmp_path)

    def refuse(filling: Filling, first: Any) -> None:
        raise RestoreMismatchError("does not fit")

    first, second = islands.restored(before=on(0, lambda: setattr(Filling, "check", refuse)))
    assert isinstance(first, RestoreMismatchError)
    assert isinstance(second, CoordinationError) and "rank 0: RestoreMismatchError" in str(second)


@pytest.mark.parametrize("donor", [0, 1])
def test_ranks_that_cannot_connect_take_an_older_step_together(tmp_path: Path, donor: int) -> None:
    """Not before their patience ends, as gloo does; rank 0, where it is given it, at once."""
    islands = Islands(tmp_path, 4, 4)
    with islands.crew() as crew:
        crew.train(1)
        crew.train(2)
        crew.train(9, absent=[rank for rank in range(4) if rank != donor])
    islands.settle(crew)

    def before(me: ranks.Me) -> None:
        def nobody(store: Any, here: int, world: int, limit: timedelta) -> None:
            if (me.rank, donor) != (0, 1):
                time.sleep(limit.total_seconds())
            raise RuntimeError("connect timed out")

        torch.distributed.ProcessGroupGloo = nobody

    infos = check(islands.restored(before=before, patience_s=6.0), crew, 2)
    told = [text for text in infos[0].fell_back if "no connection after" in text]
    assert len(told) == 3 and infos[0].healed == ()


@pytest.mark.parametrize("fails", [0, 2])
def test_a_rank_whose_gift_fails_at_once_waits_for_those_that_are_still_given_theirs(
    tmp_path: Path, fails: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (gifts, recall):  # what is believed of a medium is scaled with the state
        monkeypatch.setattr(module, "SLOWEST_BYTES_S", 1e4)
    islands = Islands(tmp_path, 3, 3)
    with islands.crew() as crew:
        crew.train(1)
        crew.train(2)
        crew.train(9, absent=[0, 2])
    islands.settle(crew)

    def before(me: ranks.Me) -> None:
        send = Channel.begin_send

        def receive(channel: Channel) -> Any:
            raise CoordinationError(f"{channel.label}: changed on the way")

        def slowly(channel: Channel, kind: int, data: torch.Tensor) -> list[Any]:
            time.sleep(0.5 if kind == transfer.CHUNK else 0.0)
            return send(channel, kind, data)

        if me.rank == fails:
            monkeypatch.setattr(Channel, "receive", receive)
        if me.rank == 1:
            monkeypatch.setattr(Channel, "begin_send", slowly)

    infos = check(islands.restored(before=before, patience_s=3.0), crew, 2)
    assert any(f"rank {fails}: changed on the way" in text for text in infos[0].fell_back)
