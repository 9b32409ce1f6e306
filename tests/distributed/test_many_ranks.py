"""The commit protocol with 1,000 ranks over a real TCPStore, and 10,000 in a model of it."""

from __future__ import annotations

import random
import threading
import time
from dataclasses import asdict
from datetime import timedelta

import pytest
import torch.distributed as dist

from lightck.distributed.commit.protocol import Add, Claim, CommitProtocol, DueStep
from lightck.distributed.store import JobStore
from lightck.types import Fate
from support import proof
from support.distributed.simulation import Costs, Simulation, measure

WORLD, CLIENTS, STEPS = 1000, 8, 5


@pytest.fixture(scope="module")
def server() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=30), wait_for_workers=False)


def _advance(ledger: CommitProtocol, store: JobStore) -> int:
    """Make the calls that are due, as the commit thread does; how many."""
    count = 0
    while (call := ledger.next_call(0.0)) is not None:
        assert isinstance(call, Add | Claim)
        answer: object = (
            store.add(call.key, call.amount)
            if isinstance(call, Add)
            else store.claim(call.key, call.value)
        )
        ledger.answered(answer, 0.0)
        count += 1
    return count


def test_a_thousand_ranks_commit_over_one_real_store(server: dist.TCPStore) -> None:
    ledgers = [CommitProtocol(rank, WORLD, patience_s=1e9) for rank in range(WORLD)]
    barrier = threading.Barrier(CLIENTS)
    began, ended, messages = [0.0] * STEPS, [0.0] * STEPS, [0] * CLIENTS

    def code(client: int) -> None:
        store = JobStore(server, "thousand")
        mine = ledgers[client::CLIENTS]
        for index in range(STEPS):
            step = index + 1
            barrier.wait()
            began[index] = time.perf_counter()
            for ledger in mine:
                ledger.opened(DueStep(step, index), 0.0)
                if ledger.rank == 7 and step == 3:
                    ledger.lost(DueStep(step, index), "slip", 0.0)
                else:
                    ledger.committed(step, 0.0)
                messages[client] += _advance(ledger, store)
            for ledger in mine:
                if ledger.watched == step:
                    assert store.wait(f"f/{step}", 30.0)
                    ledger.heard(step, store.read(f"f/{step}") or b"")
                    messages[client] += 2
            ended[index] = max(ended[index], time.perf_counter())
            barrier.wait()

    threads = [threading.Thread(target=code, args=(i,)) for i in range(CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = [Fate.DEAD if step == 3 else Fate.WHOLE for step in range(1, STEPS + 1)]
    for ledger in ledgers:
        assert [ledger.fate(step) for step in range(1, STEPS + 1)] == expected
    per_rank = sum(messages) / WORLD / STEPS
    assert per_rank <= 3.01
    numbers = {
        "ranks": WORLD,
        "clients": CLIENTS,
        "messages_per_rank_and_snapshot": round(per_rank, 3),
        "all_commit_to_all_know_ms": [
            round(1e3 * (b - a), 1) for a, b in zip(began, ended, strict=True)
        ],
    }
    print(numbers)
    proof.record("commit-thousand", numbers)


def test_ten_thousand_ranks_need_the_same_messages_each_as_two(server: dist.TCPStore) -> None:
    costs = measure(lambda: JobStore(server, "measure"))
    rng = random.Random(5)
    rows = []
    for world in (2, 8, 100, 1000, 10_000):
        for spread_s in (0.0, 1.0):
            at = [rng.uniform(0.0, spread_s) for _ in range(world)]
            rows.append({"spread_s": spread_s, **asdict(Simulation(costs, at).run())})
    slipped = Simulation(costs, [0.0] * 1000, lost_by=500).run()
    for row in rows:
        print(row)
    print(slipped)
    assert slipped.fate == "dead"
    assert all(row["fate"] == "whole" for row in rows)
    assert all(row["messages_per_rank"] <= 3 for row in rows)
    assert all(row["busiest_rank_messages"] <= 3 for row in rows)
    assert all(row["bytes_per_rank"] < 500 for row in rows)
    round_ = lambda row: {k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()}  # noqa: E731
    proof.record(
        "commit-model",
        {
            "service_us": round(1e6 * costs.service_s, 1),
            "wire_us": 1e6 * costs.wire_s,
            "rows": [round_(row) for row in rows],
        },
    )


def test_comparing_replicas_takes_one_message_more_of_each_of_ten_thousand_ranks() -> None:
    costs, rows = Costs(10e-6), []
    for world in (2, 100, 1000, 10_000):
        plain = Simulation(costs, [0.0] * world).run()
        compared = Simulation(costs, [0.0] * world, digests=True).run()
        more = compared.messages_per_rank - plain.messages_per_rank
        assert abs(more - (1 + 1 / world)) < 1e-9, "a digest each, and one look"
        assert compared.bytes_per_rank - plain.bytes_per_rank < 350
        assert compared.fate == "whole"
        rows.append(
            {
                "ranks": world,
                "messages_per_rank": round(compared.messages_per_rank, 3),
                "more_messages_per_rank": round(more, 4),
                "more_bytes_per_rank": round(compared.bytes_per_rank - plain.bytes_per_rank, 1),
            }
        )
    print(rows)
    proof.record("divergence-traffic", {"rows": rows})


def test_the_model_counts_what_the_protocol_sends() -> None:
    costs = Costs(1.0, 0.0)
    result = Simulation(costs, [0.0, 10.0]).run()
    # Rank 0: add, wait, read. Rank 1: add, claim. From 10 on: add, claim, notice, read.
    assert result.messages_per_rank == 2.5
    assert (result.know_ms, result.server_ms) == (4000.0, 6000.0)
