"""`handle.stats()` from any thread: whole values, no error, and nobody waits for anybody."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import lightck
from lightck.region.native_pool import NativePool
from support import internals
from support.loops import adam_loop, attach

GROWING = ("captured", "committed", "slipped", "torn", "failed", "dead", "bytes_copied")


def _aside(work: Callable[[], Any], seconds: float = 60.0) -> Any:
    """The result of a call on another thread; it must come in time."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(work()), daemon=True)
    thread.start()
    thread.join(seconds)
    assert results, "the call waits for something, or has failed"
    return results[0]


def test_another_thread_may_ask_all_the_time_from_attach_to_after_the_close(
    run_dir: Path,
) -> None:
    loop = adam_loop()
    handle = attach(run_dir, loop)
    ended = threading.Event()
    seen: list[lightck.Stats] = []
    errors: list[BaseException] = []

    def ask() -> None:
        try:
            while not ended.is_set():
                seen.append(handle.stats())
                seen[:-2] = []
                _check(*seen)
        except BaseException as error:  # noqa: BLE001 - told below
            errors.append(error)

    asker = threading.Thread(target=ask)
    asker.start()
    loop.run(200)
    handle.close()
    ended.set()
    asker.join()
    assert not errors, errors
    final = handle.stats()
    assert _aside(handle.stats) == final
    # Every step is due, slipped ones are made up for: what was due is captured, or slipped.
    assert final.captured + final.slipped == 200 and final.committed == final.captured


def _check(before: lightck.Stats, after: lightck.Stats | None = None) -> None:
    for each in filter(None, (before, after)):
        assert each.committed <= each.captured <= 200
        assert each.captured + each.slipped + each.torn <= 200
        assert all(seconds >= 0 for seconds in each.stall_s.values())
        assert (each.commit_s > 0) >= (each.committed > 0)
    if after is not None:
        for name in GROWING:
            assert getattr(before, name) <= getattr(after, name), name


def test_asking_does_not_wait_for_the_training(run_dir: Path) -> None:
    loop = adam_loop()
    with attach(run_dir, loop) as handle:
        loop.run(3)
        handle.wait()
        here = handle.stats()
        with internals.checkpointer(
            handle
        ).lock:  # as the training has it while it works for lightck
            there = _aside(handle.stats)
        assert there == here and here.committed >= 1


def test_the_training_does_not_wait_for_who_asks(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside, go_on = threading.Event(), threading.Event()
    loop = adam_loop()
    with attach(run_dir, loop) as handle:
        stats = NativePool.stats

        def slow(pool: NativePool) -> dict[str, int]:
            if threading.current_thread() is not threading.main_thread():
                inside.set()
                assert go_on.wait(60)
            return stats(pool)

        monkeypatch.setattr(NativePool, "stats", slow)
        asker = threading.Thread(target=handle.stats)
        asker.start()
        assert inside.wait(60)
        loop.run(5)
        handle.wait()
        assert asker.is_alive()
        go_on.set()
        asker.join()
    assert handle.step == 5


def test_a_close_waits_for_who_reads_what_it_takes_away(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = adam_loop()
    handle = attach(run_dir, loop, failure="off")
    loop.run(2)
    inside = threading.Event()
    order: list[str] = []
    stats, close = NativePool.stats, NativePool.close

    def slow(pool: NativePool) -> dict[str, int]:
        if threading.current_thread() is not threading.main_thread():
            inside.set()
            threading.Event().wait(0.2)
            assert pool.handle, "the pool has gone while it was asked"
            order.append("asked")
        return stats(pool)

    def last(pool: NativePool) -> None:
        order.append("closed")
        close(pool)

    monkeypatch.setattr(NativePool, "stats", slow)
    monkeypatch.setattr(NativePool, "close", last)
    asker = threading.Thread(target=handle.stats)
    asker.start()
    assert inside.wait(60)
    handle.close()
    asker.join()
    assert order == ["asked", "closed"]


def test_what_belongs_together_is_read_together(run_dir: Path) -> None:
    loop = adam_loop()
    with attach(run_dir, loop) as handle:
        loop.run(2)
        handle.wait()
        before = handle.stats()
        # In the middle of noting a commit: one counter has moved, its sum has not.
        internals.pipeline(handle).counters.durable += 1
        assert _aside(handle.stats).commit_s == before.commit_s
        internals.pipeline(handle).counters.durable -= 1
        assert handle.stats().committed == before.committed
