"""Replicas that differ: samples of live tensors, and how the ranks find out together."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from lightck.distributed import divergence
from lightck.distributed import divergence as sample
from lightck.distributed.commit.protocol import (
    Add,
    Call,
    Claim,
    CommitProtocol,
    Delete,
    DueStep,
    Read,
)
from lightck.distributed.divergence import Divergence, ReplicaSamples, Verdict, decide, inquire
from lightck.errors import CoordinationError, DivergenceError, LightckError, RegionIOError
from lightck.state.inventory import Inventory, StateTensor
from support.distributed.memory import MemoryStore, Server

LONG_S = 100.0


@pytest.fixture(autouse=True)
def _one_round_is_one_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample, "ROTATION", 1)


def everything(lives: Sequence[StateTensor]) -> set[str]:
    return {live.name for live in lives}


def small(seed: int = 0) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    return model, optimizer


def samples_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> ReplicaSamples:
    return ReplicaSamples(Inventory(model, [optimizer]).found, everything)


def taken(samples: ReplicaSamples, turn: int = 0) -> divergence.ReplicaSample:
    samples.take(1, turn)
    found = samples.of(1)
    assert found is not None
    return found


# ---- samples ---------------------------------------------------------------------------------


def test_replicas_with_the_same_bytes_say_the_same_and_one_bit_shows() -> None:
    (a, opt_a), (b, opt_b) = small(), small()
    first, second = taken(samples_of(a, opt_a)), taken(samples_of(b, opt_b))
    assert first == second
    b[0].weight.data.view(torch.int32)[1, 2] ^= 1
    third = taken(samples_of(b, opt_b))
    assert third.what == first.what
    assert third.digest != first.digest
    changed = [n for n, x, y in zip(first.names, first.crcs, third.crcs, strict=True) if x != y]
    assert changed == ["model/0.weight"]


def test_nan_equals_nan_by_its_bytes() -> None:
    (a, opt_a), (b, opt_b) = small(), small()
    for model in (a, b):
        model[0].weight.data[0, 0] = float("nan")
    assert taken(samples_of(a, opt_a)).digest == taken(samples_of(b, opt_b)).digest


def test_buffers_are_never_compared() -> None:
    (a, opt_a), (b, opt_b) = small(), small()
    b[1].running_mean += 1
    b[1].num_batches_tracked += 5
    found = taken(samples_of(b, opt_b))
    assert found == taken(samples_of(a, opt_a))
    assert not [name for name in found.names if "running" in name or "tracked" in name]
    assert [name for name in found.names if name.startswith("optim/0/0.weight/")]


def test_other_names_or_forms_cannot_be_compared() -> None:
    (a, opt_a), (b, opt_b) = small(), small()
    b.append(torch.nn.Linear(3, 3))
    c, opt_c = small()
    c[0].weight.data = c[0].weight.data.t().contiguous().t()
    whats = {taken(samples_of(m, o)).what for m, o in ((a, opt_a), (b, opt_b), (c, opt_c))}
    assert len(whats) == 3
    samples = samples_of(a, opt_a)
    assert taken(samples, 0).what != taken(samples, 1).what, "each turn is one of its own"


def test_a_form_that_changed_under_the_sample_is_not_compared() -> None:
    model, optimizer = small()
    samples = samples_of(model, optimizer)
    samples.take(1, 0)
    model[0].weight.data = torch.zeros(1)
    samples.take(2, 1)
    assert (samples.of(2), samples.skipped) == (None, 1)


def test_nothing_replicated_is_counted_and_says_nothing() -> None:
    model, optimizer = small()
    samples = ReplicaSamples(Inventory(model, [optimizer]).found, lambda lives: set())
    samples.take(1, 0)
    assert (samples.of(1), samples.skipped) == (None, 1)


# ---- who differs -----------------------------------------------------------------------------


def said(what: str, *crcs: int) -> str:
    return what + ":" + "".join(f"{crc:08x}" for crc in crcs)


def test_the_odd_rank_is_that_with_another_value_than_most() -> None:
    assert decide([said("a", 1, 2), said("a", 1, 2), said("a", 1, 9)]).odd == {1: [2]}
    assert decide([said("a", 7, 2), said("a", 1, 2), said("a", 1, 9)]).odd == {0: [0], 1: [2]}


def test_of_two_ranks_none_is_the_odd_one() -> None:
    assert decide([said("a", 1, 2), said("a", 1, 3)]).odd == {1: None}
    assert decide([said("a", 1), said("a", 2), said("a", 3)]).odd == {0: None}
    assert decide([said("a", 1), said("a", 1), said("a", 2), said("a", 2)]).odd == {0: None}


def test_ranks_without_such_a_sample_are_silent_not_equal() -> None:
    found = decide([said("a", 1), "-", said("a", 1), said("b", 2), said("a", 1)])
    assert (found.what, found.odd, found.silent) == ("a", {}, [1, 3])
    assert decide(["-", "-"]) == Verdict("-", {}, [0, 1])
    assert Verdict.decode(found.encode()) == found


class Turns:
    """Lets several threads' calls to the store happen in one given order."""

    def __init__(self, order: Sequence[int]) -> None:
        self.order, self.at = list(order), 0
        self.changed = threading.Condition()

    def fault(self, rank: int) -> Callable[[str, str], str | None]:
        def wait(operation: str, key: str) -> None:
            with self.changed:
                if rank in self.order[self.at :]:
                    assert self.changed.wait_for(lambda: self.order[self.at] == rank, LONG_S)
                    self.at += 1
                    self.changed.notify_all()

        return wait


@pytest.mark.parametrize("world", [2, 3])
def test_every_order_of_the_ranks_words_gives_all_of_them_the_same_verdict(world: int) -> None:
    orders = set(itertools.permutations([rank for rank in range(world) for _ in range(2)]))
    for order in sorted(orders):
        server, turns = Server(), Turns(order)
        found: list[Any] = [None] * world

        def run(
            rank: int, server: Server = server, turns: Turns = turns, found: list[Any] = found
        ) -> None:
            store = MemoryStore(server, turns.fault(rank))
            found[rank] = inquire(store, rank, world, 5, said("a", 1, int(rank == 1)), LONG_S)

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LONG_S)
        assert found == [Verdict("a", {1: [1] if world > 2 else None}, [])] * world, order
        assert server.values == {}, f"{order} leaves keys"


def test_a_rank_that_does_not_come_is_named_in_time() -> None:
    with pytest.raises(CoordinationError, match=r"rank\(s\) 1, 2 of 3 did not say"):
        inquire(MemoryStore(Server()), 0, 3, 5, said("a", 1), 0.05)


def test_a_wait_that_ends_with_nothing_there_is_no_verdict() -> None:
    """torch's server wakes every waiting client when one of them gives up."""

    class Nervous(MemoryStore):
        def wait(self, key: str, seconds: float) -> bool:
            time.sleep(0.01)
            return True

    with pytest.raises(CoordinationError, match=r"rank\(s\) 1, 2 of 3 did not say"):
        inquire(Nervous(Server()), 0, 3, 5, said("a", 1), 0.05)


def calls_of(world: int, digests: Callable[[int, int], bytes], steps: int = 3) -> list[list[Call]]:
    """Collect what each rank asks of the store until every step has its fate everywhere."""
    store: dict[str, bytes] = {}
    made: list[list[Call]] = [[] for _ in range(world)]
    ledgers = [CommitProtocol(rank, world, compares=True) for rank in range(world)]
    for step in range(1, steps + 1):
        for rank, ledger in enumerate(ledgers):
            ledger.opened(DueStep(step, step - 1), 0.0)
            ledger.committed(step, 0.0, b"form", digests(rank, step))
            while (call := ledger.next_call(0.0)) is not None:
                made[rank].append(call)
                ledger.answered(_served(store, call), 0.0)
        for ledger in ledgers:
            ledger.heard(step, store[f"f/{step}"])
    return made


def _served(store: dict[str, bytes], call: Call) -> object:
    match call:
        case Add(key, amount):
            store[key] = b"%d" % (int(store.get(key, b"0")) + amount)
            return int(store[key])
        case Claim(key, value):
            return store.setdefault(key, value)
        case Read(key):
            return store.get(key)
        case Delete(keys):
            for key in keys:
                store.pop(key, None)
    return None


@pytest.mark.parametrize("world", [2, 16, 128])
def test_a_rank_sends_one_more_message_per_sample_whatever_the_number_of_ranks(world: int) -> None:
    without = calls_of(world, lambda rank, step: b"")
    with_digests = calls_of(world, lambda rank, step: b"what:same")
    assert [len(calls) for calls in with_digests] == [len(calls) + 3 for calls in without]
    assert max(map(len, with_digests)) == 3 * (1 + 1 + 2), "digest, count, look, fate"
    odd = calls_of(world, lambda rank, step: b"what:%d" % (rank == 1))
    more = [len(a) - len(b) for a, b in zip(odd, with_digests, strict=True)]
    # Who differs from the first one said says so, once per step.
    assert more == [3 * (rank == 1) for rank in range(world)]
    assert all(len(c.value) < 40 for calls in odd for c in calls if isinstance(c, Claim))


def test_words_of_older_and_of_newer_differences_are_deleted_with_their_step() -> None:
    """Rank 1 differs at step 1; at step 2 it says that first, and rank 0 the newer one."""
    store: dict[str, bytes] = {}
    seen: set[str] = set()
    ledgers = [CommitProtocol(rank, 2, compares=True) for rank in range(2)]

    def answered(ledger: CommitProtocol) -> None:
        while (call := ledger.next_call(0.0)) is not None:
            ledger.answered(_served(store, call), 0.0)
            seen.update(store)

    for step, order in ((1, (0, 1)), (2, (1, 0))):
        for rank in order:
            ledgers[rank].opened(DueStep(step, 0, "r"), 0.0)  # a block of its own
            ledgers[rank].committed(step, 0.0, b"form", b"what:%d" % rank)
            answered(ledgers[rank])
        for ledger in ledgers:
            ledger.heard(step, store[f"f/{step}"])
        for ledger in ledgers:
            answered(ledger)
    assert {"x/1", "x/2", "y/2"} <= seen and "y/1" not in seen
    assert store == {}


def test_a_digest_of_something_else_is_counted_as_not_compared() -> None:
    ledger = CommitProtocol(1, 2, compares=True)
    store = {"d/1": b"other:1", "d/2": b"what:1"}
    for step in (1, 2):
        ledger.opened(DueStep(step, step - 1), 0.0)
        ledger.committed(step, 0.0, b"", b"what:1")
    while (call := ledger.next_call(0.0)) is not None:
        ledger.answered(_served(store, call), 0.0)
    assert (ledger.compared, ledger.incomparable, ledger.differed) == (1, 1, None)


def test_without_an_answer_from_the_store_nothing_counts_as_compared_or_whole() -> None:
    ledger = CommitProtocol(0, 1, compares=True)
    ledger.opened(DueStep(1, 0), 0.0)
    ledger.committed(1, 0.0, b"", b"what:1")
    for attempt in range(3):
        now = 100.0 * attempt
        assert ledger.next_call(now) == Claim("d/1", b"what:1")
        ledger.failed(now)
    assert (ledger.compared, ledger.unsettled) == (0, [1])


# ---- what follows ----------------------------------------------------------------------------


def job(
    world: int, odd: dict[int, str], **more: Any
) -> tuple[list[Divergence], list[list[LightckError]], list[list[int]]]:
    """Ranks whose models differ in one parameter each, as `odd` says."""
    server = Server()
    reported: list[list[LightckError]] = [[] for _ in range(world)]
    marked: list[list[int]] = [[] for _ in range(world)]
    ranks = []
    for rank in range(world):
        model, optimizer = small()
        if rank in odd:
            dict(model.named_parameters())[odd[rank]].data.view(torch.int32).view(-1)[0] ^= 1 << 22
        samples = samples_of(model, optimizer)
        samples.take(7, 0)
        samples.take(9, 1)
        mark, report = marked[rank].append, reported[rank].append
        ranks.append(Divergence(MemoryStore(server), rank, world, samples, mark, report, **more))
    return ranks, reported, marked


def tell(ranks: list[Divergence], step: int, differed: int) -> None:
    for rank in ranks:
        rank.suspect(step, differed)
    for rank in ranks:
        rank.close(LONG_S)


def test_every_rank_names_step_tensor_and_odd_rank_once() -> None:
    ranks, reported, marked = job(3, {1: "0.bias"})
    tell(ranks, 8, 7)
    tell(ranks, 10, 9)
    tell(ranks, 11, 9)
    assert marked == [[8, 10, 11]] * 3
    for errors in reported:
        (error,) = errors
        assert isinstance(error, DivergenceError)
        assert (error.step, error.names, error.ranks) == (7, ("model/0.bias",), (1,))
        assert "step 7: replicas differ in model/0.bias (rank(s) 1 of 3 differ" in str(error)
        assert "Snapshots from step 8 on are suspect" in str(error)


def test_of_two_ranks_both_are_named() -> None:
    ranks, reported, _ = job(2, {1: "0.weight"})
    tell(ranks, 7, 7)
    for (error,) in reported:
        assert isinstance(error, DivergenceError)
        assert (error.names, error.ranks) == (("model/0.weight",), (0, 1))
        assert "any of the 2 may be wrong" in str(error)


def test_a_second_tensor_is_told_when_it_comes_up() -> None:
    ranks, reported, _ = job(3, {1: "0.bias", 2: "1.weight"})
    tell(ranks, 7, 7)
    (error,) = reported[0]
    assert isinstance(error, DivergenceError)
    assert (error.names, error.ranks) == (("model/0.bias", "model/1.weight"), (1, 2))


def test_ranks_that_never_come_are_told_of_and_the_mark_stands_all_the_same() -> None:
    ranks, reported, marked = job(3, {1: "0.bias"}, patience_s=0.05)
    tell(ranks[:1], 7, 7)
    (error,) = reported[0]
    assert isinstance(error, DivergenceError)
    assert marked[0] == [7]
    assert "in what is not known" in str(error)
    assert "rank(s) 1, 2 of 3 did not say" in str(error)


def test_a_mark_that_fails_is_reported_and_the_difference_is_named_all_the_same() -> None:
    ranks, reported, _ = job(2, {1: "0.bias"})

    def broken(step: int) -> None:
        raise RegionIOError("no medium")

    ranks[0].mark = broken
    tell(ranks, 7, 7)
    assert [type(error) for error in reported[0]] == [RegionIOError, DivergenceError]
