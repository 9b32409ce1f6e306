"""The store and the global commit over torch's real TCPStore, in several processes."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest
import torch.distributed as dist

from lightck.distributed import store as module
from lightck.distributed.commit.coordinator import CommitCoordinator, Limits
from lightck.distributed.commit.due_steps import DueCalendar
from lightck.distributed.commit.protocol import CommitProtocol
from lightck.distributed.rounds import AgreementRounds, Identity, agree_on_attach
from lightck.distributed.store import JobStore, bounded, default_store
from lightck.distributed.topology import find, here
from lightck.errors import CoordinationError, StoreError
from lightck.types import Fate
from support import proof
from support.processes import Child, Parent, start

LONG_S = 100.0


def tcp(port: int, *, master: bool = False) -> dist.TCPStore:
    limit = timedelta(seconds=LONG_S)
    return dist.TCPStore("127.0.0.1", port, None, master, limit, wait_for_workers=False)


@pytest.fixture
def server() -> Iterator[dist.TCPStore]:
    yield tcp(0, master=True)


def serve() -> tuple[Child, int]:
    """A server in a process of its own, which can be stopped and killed."""

    def code(parent: Parent) -> None:
        server = tcp(0, master=True)
        parent.send(server.port)
        parent.pause()
        del server  # which ends it

    child = start(code)
    return child, child.receive()


def ranks_of(port: int, world: int, code: Callable[[int, Parent], object]) -> list[Child]:
    return [start(lambda parent, r=rank: code(r, parent)) for rank in range(world)]


def test_every_call_means_over_tcp_what_it_means_in_memory(server: dist.TCPStore) -> None:
    for raw in (server, dist.PrefixStore("job", server), dist.HashStore()):
        store = JobStore(raw, "lightck/run")
        assert store.read("a") is None
        assert store.claim("a", b"one") == b"one"
        assert store.claim("a", b"two") == b"one"
        store.set("b", b"3")
        assert store.read_many(["b", "a"]) == [b"3", b"one"]
        assert [store.add("n"), store.clone().add("n"), store.below("x").add("n")] == [1, 2, 1]
        assert store.wait("a", LONG_S)
        store.delete(["a", "b"])
        assert store.read("a") is None
        assert raw.check(["lightck/run/n"])


def test_a_wait_ends_and_the_client_lives_on(server: dist.TCPStore) -> None:
    store = JobStore(server)
    assert store.wait("never", 0.02) is False
    assert store.add("n") == 1
    assert store.add("n", (1 << 62) - 1) == 1 << 62


def test_a_wait_in_one_client_holds_up_no_other(server: dist.TCPStore) -> None:
    store = JobStore(server)
    waiting = store.clone()
    told: list[bool] = []
    thread = threading.Thread(target=lambda: told.append(waiting.wait("later", LONG_S)))
    thread.start()
    assert store.add("n") == 1
    store.set("later", b"1")
    thread.join()
    assert told == [True]


def test_a_store_that_is_gone_is_named_with_its_key() -> None:
    child, port = serve()
    store = JobStore(tcp(port), timeout_s=1.0)
    child.kill()
    child.join()
    with pytest.raises(StoreError, match=r"did not add to 'lightck/c/7' after .* rank 0\) lives"):
        store.add("c/7")


def test_a_server_that_hangs_holds_up_an_agreement_no_longer_than_said() -> None:
    child, port = serve()
    store = JobStore(tcp(port))
    child.stop()
    try:
        with pytest.raises(StoreError, match="agree: the job's store gave no answer within 0 s"):
            bounded("agree", 0.2, lambda: store.add("n"))
    finally:
        child.go_on()
        child.let_go()
        child.receive()
        child.join()


def test_where_no_thread_starts_any_more_the_caller_itself_asks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Python 3.12 starts none while the interpreter exits."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert bounded("agree", 1.0, threading.get_ident) == threading.get_ident()


def test_a_restart_over_a_shared_rendezvous_store_is_warned_of_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_warned", False)
    shared = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_MAX_RESTARTS": "3"}
    assert not module.warn_of_shared_store({})
    assert not module.warn_of_shared_store({**shared, "TORCHELASTIC_MAX_RESTARTS": "0"})
    assert not module.warn_of_shared_store({**shared, "TORCHELASTIC_USE_AGENT_STORE": "False"})
    with pytest.warns(RuntimeWarning, match="TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"):
        assert module.warn_of_shared_store(shared)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not module.warn_of_shared_store(shared)


def test_without_torch_distributed_there_is_one_rank_and_no_store() -> None:
    assert here() == (0, 1)
    with pytest.raises(CoordinationError, match="call torch.distributed.init_process_group"):
        default_store()


def test_gloo_ranks_agree_commit_and_learn_the_fate_together() -> None:
    world, steps = 3, 20

    def code(rank: int, parent: Parent, port: int = 0) -> object:
        raw = tcp(port, master=rank == 0)
        parent.send(raw.port)
        dist.init_process_group("gloo", store=raw, rank=rank, world_size=world)
        rounds = AgreementRounds(default_store(), *here())
        topology = find(rounds, environment={})
        timeline = agree_on_attach(rounds, Identity(topology.run_id, world, "/p", 3))
        store = default_store(f"lightck/{topology.run_id.hex()}/{timeline:x}")
        commit = CommitCoordinator(
            store, CommitProtocol(rank, world, timeline=timeline), DueCalendar(every=1)
        )
        fates, waits = [], []
        for step in range(1, steps + 1):
            due = commit.due(step)
            assert due
            commit.opened(due)
            dist.barrier()
            began = time.monotonic()
            if rank == 1 and step % 5 == 0:
                commit.lost(due, "slip")
            else:
                commit.committed(step)
            fates.append(commit.wait(step, LONG_S))
            waits.append(time.monotonic() - began)
        left = commit.close()
        dist.barrier()  # rank 0 hosts the store
        dist.destroy_process_group()
        return topology.peers, timeline, fates, sorted(waits), left

    first = start(lambda parent: code(0, parent))
    port = first.receive()
    others = [start(lambda parent, r=rank: code(r, parent, port)) for rank in range(1, world)]
    assert [other.receive() for other in others] == [port] * (world - 1)
    children = [first, *others]
    results = [child.receive() for child in children]
    for child in children:
        assert child.join() == 0
    assert {r[0] for r in results} == {(0, 1, 2)}
    assert len({r[1] for r in results}) == 1
    expected = [Fate.DEAD if step % 5 == 0 else Fate.WHOLE for step in range(1, steps + 1)]
    assert all(r[2] == expected and r[4] == [] for r in results)
    median = max(r[3][steps // 2] for r in results)
    proof.record("commit-gloo", {"ranks": world, "to_fate_median_ms": round(1e3 * median, 2)})


def test_a_rank_that_is_stopped_in_its_commit_makes_others_slip_and_stalls_none() -> None:
    child, port = serve()
    code_store = lambda: JobStore(tcp(port))  # noqa: E731

    def code(rank: int, parent: Parent) -> object:
        commit = CommitCoordinator(
            code_store(),
            CommitProtocol(rank, 2),
            DueCalendar(every=1),
            limits=Limits(patience_s=0.5),
        )
        due = commit.due(1)
        assert due
        commit.opened(due)
        parent.send("opened")
        parent.pause()
        commit.committed(1)
        fate = commit.wait(1, LONG_S)
        commit.close()
        return fate

    both = ranks_of(port, 2, code)
    assert [rank.receive() for rank in both] == ["opened"] * 2
    both[1].stop()
    both[0].let_go()
    assert both[0].receive() is Fate.DEAD
    both[1].go_on()
    both[1].let_go()
    assert both[1].receive() is Fate.DEAD
    child.let_go()
    for each in (*both, child):
        each.join()
