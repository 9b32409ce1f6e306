"""Benchmarks of several ranks: the job's time counts, each byte is one rank's, the link is slow."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from bench import definition, launch, link, place
from bench.engines.base import Plan
from bench.engines.blocking import Blocking
from bench.engines.checkfreq import CheckFreq
from bench.engines.lightck import Lightck
from bench.engines.none import Nothing
from bench.errors import BenchError, Unavailable
from bench.group import Group
from bench.measures import ranks
from bench.measures.loop import Loop
from bench.work import Training, Work, difference, digests, part, share, tensors

_TINY = Work("tiny", sequence=8)
_LONG_S = 100


class _Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class _Coupled(Training):
    """Rank 0 of two, whose allreduce waits for the other one, which lost `fence` after its own."""

    def __init__(self, clock: _Clock, fence: float) -> None:
        self.clock, self.fence = clock, fence
        self.ends: list[float] = []  # of the other rank
        self.steps_done = 0

    def compute(self) -> None:
        """Takes a second from when both have begun."""
        self.clock.now = max([self.clock.now, *self.ends[-1:]]) + 1.0

    def update(self) -> None:
        """Takes a second; the other's a fence longer, every other step."""
        self.steps_done += 1
        late = self.fence if self.steps_done % 2 else 0.0
        self.ends.append(self.clock.now + 1.0 + late)
        self.clock.now += 1.0


class _Pair(Group):
    """Both ranks' clocks, though one process."""

    def __init__(self, training: _Coupled) -> None:
        super().__init__(0, 2)
        object.__setattr__(self, "_training", training)

    def latest(self, moments: Sequence[float]) -> list[float]:
        """See `Group`; the moments are the ends of the last steps."""
        others = self._training.ends[-len(moments) :]  # type: ignore[attr-defined]
        return [max(mine, other) for mine, other in zip(moments, others, strict=True)]


def test_time_that_one_rank_loses_counts_once_and_in_its_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = _Clock()
    monkeypatch.setattr(time, "perf_counter", clock)
    training = _Coupled(clock, fence=0.25)
    loop = Loop(training, Nothing(), Plan(every=2))
    loop.attach(Path())
    loop.run(then=False)
    loop.run(then=True)
    series = ranks._Series()
    # Rank 0 alone would see the other's fence one step later: as a gain of 0.25.
    ranks._pairs(loop, _Pair(training), series, 4)
    assert series.extra == [pytest.approx(0.25)] * 3, "the first of the row does not count"
    assert series.without == [pytest.approx(2.0)] * 3


def test_steps_that_are_due_by_a_period_cannot_be_chosen() -> None:
    loop = Loop(Training(_TINY), Nothing(), Plan(every=2))
    loop.attach(Path())
    with pytest.raises(ValueError, match="step 1: every 2 steps, then=True"):
        loop.run(then=True)


@pytest.mark.parametrize("world", [1, 2, 3, 7])
def test_shares_are_everything_once_and_equal_but_for_two_lines(world: int) -> None:
    sizes = [0, 1, 4, 130, 4096, 77, 64]
    state = [torch.arange(size, dtype=torch.int32) for size in sizes]
    seen = [torch.zeros(t.nbytes, dtype=torch.uint8) for t in state]
    lengths = []
    for rank in range(world):
        pieces = share(state, rank, world)
        for index, begin, end in pieces:
            seen[index][begin:end] += 1
            assert torch.equal(
                part(state[index], begin, end), state[index].view(torch.uint8)[begin:end]
            )
        lengths.append(sum(end - begin for _, begin, end in pieces))
    assert all(bool((s == 1).all()) for s in seen)
    assert max(lengths) - min(lengths) < 2 * 64


def _of_rank(rank: int, world: int) -> Training:
    training = Training(_TINY)
    training.rank, training.world = rank, world
    training.compute()
    training.update()
    return training


def test_blocking_copies_of_shares_make_up_the_whole(region_dir: Path) -> None:
    trainings = [_of_rank(rank, 3) for rank in range(3)]
    made = [Blocking() for _ in trainings]
    for engine, training in zip(made, trainings, strict=True):
        engine.attach(training, region_dir, Plan())
        engine.begin(1)
        engine.finish()
    fresh = Training(_TINY, seed=1)
    assert made[1].restore(fresh) == 1
    assert difference(digests(trainings[0].state()), digests(fresh.state())) is None
    whole = sum(t.nbytes for t in tensors(fresh.state()))
    assert whole <= sum(engine.written() for engine in made) <= whole + 3 * 64 * len(made)


def test_a_share_of_an_older_step_is_not_the_newest_snapshot(region_dir: Path) -> None:
    made = [Blocking(), Blocking()]
    for rank, engine in enumerate(made):
        engine.attach(_of_rank(rank, 2), region_dir, Plan())
        engine.begin(2 - rank)
        engine.finish()
    assert made[0].restore(Training(_TINY, seed=1)) == 1


def test_digests_tell_one_flipped_bit() -> None:
    training = Training(_TINY)
    before = digests(training.state())
    assert difference(before, digests(training.state())) is None
    training.plain.embedding.weight.detach().view(torch.int32)[3, 5] ^= 1  # type: ignore[union-attr, operator]
    assert "embedding.weight" in str(difference(before, digests(training.state())))


def test_checkfreq_saves_on_rank_0_only(region_dir: Path) -> None:
    written = []
    for rank in (1, 0):
        engine = CheckFreq(False, 0.05)
        engine.attach(_of_rank(rank, 2), region_dir, Plan())
        engine.begin(1)
        engine.before_update()
        assert engine.finish().complete == 1
        written.append(engine.written())
    assert written[0] == 0 < written[1]


def test_lightck_over_ranks_needs_a_period(region_dir: Path) -> None:
    with pytest.raises(BenchError, match='needs a fixed period: policy = "pairs"'):
        Lightck({}).attach(_of_rank(0, 2), region_dir, Plan())


def test_the_first_rank_that_fails_is_named() -> None:
    outcomes = {1: {"error": "no such step"}, 0: {"error": "connection reset by peer"}}
    assert launch.merged(outcomes) == {"error": "rank 1: no such step"}
    assert launch.merged({1: {}, 0: {"records": [1]}}) == {"records": [1]}
    assert launch.merged({0: {"error": "alone"}}) == {"error": "alone"}


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ('"ranks"', '"training"', "world = 2: only idle, ranks, commit_ranks, restore_ranks take"),
        ("world = 2", "world = 0", "world = 0"),
        ("world = 2", "world = 3", "link = 100 joins two ranks, not world = 3"),
    ],
)
def test_ranks_that_cannot_be_are_refused(tmp_path: Path, old: str, new: str, told: str) -> None:
    text = 'about = "x"\nkind = "ranks"\n[work]\nmodel = "tiny"\nworld = 2\nlink = 100\n'
    text += '[[engine]]\nengine = "none"\n'
    file = tmp_path / "given.toml"
    file.write_text(text)
    definition.load(str(file))
    file.write_text(text.replace(old, new))
    with pytest.raises(BenchError, match=told):
        definition.load(str(file))


def test_without_the_tools_a_link_is_unavailable_and_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Unavailable, match="100 Mbit/s needs ip, tc, unshare, nsenter"):
        link.between(2, 100).__enter__()


@pytest.fixture
def doors() -> Iterator[list[link.Door]]:
    """Both ends of a link of 100 Mbit/s."""
    made = link.between(2, 100)
    try:
        found = made.__enter__()
    except Unavailable as why:
        pytest.skip(f"SKIPPED: {why}")
    yield found
    made.__exit__(None, None, None)


_LISTEN = """
import socket, sys
server = socket.create_server((sys.argv[1], 0))
print(server.getsockname()[1], flush=True)
connection, _ = server.accept()
while connection.recv(1 << 16):
    pass
connection.sendall(b".")
"""
_SEND = """
import socket, sys, time
connection = socket.create_connection((sys.argv[1], int(sys.argv[2])))
begin = time.monotonic()
connection.sendall(bytes(int(sys.argv[3])))
connection.shutdown(socket.SHUT_WR)
connection.recv(1)
print(time.monotonic() - begin)
"""


def test_bytes_take_their_time_on_a_link(doors: list[link.Door]) -> None:
    sent, bucket, rate = 4_000_000, 256_000, 100e6 / 8
    here, there = doors
    listening = [*there.command, sys.executable, "-c", _LISTEN, there.address]
    with subprocess.Popen(listening, stdout=subprocess.PIPE, text=True) as listener:
        assert listener.stdout is not None
        port = listener.stdout.readline().strip()
        sending = [*here.command, sys.executable, "-c", _SEND, there.address, port, str(sent)]
        done = subprocess.run(
            sending, stdout=subprocess.PIPE, text=True, check=True, timeout=_LONG_S
        )
    # A lower bound, which no load can break.
    assert float(done.stdout) >= (sent - bucket) / rate


def test_what_a_killed_run_left_on_a_medium_is_swept_by_the_next(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(place.MEDIA, "tmpfs", tmp_path)
    with subprocess.Popen(["true"]) as gone:
        pass
    dead, other = tmp_path / f"lightck-bench-{gone.pid}-ab", tmp_path / "lightck-bench-ab"
    for folder in (dead, other):
        folder.mkdir()
        (folder / "region").write_bytes(b"x")
    with place.scratch("tmpfs") as first, place.scratch("tmpfs") as second:
        assert first.exists() and second.exists() and first != second
        assert not dead.exists()
        assert other.exists(), "whose it is cannot be told"
    assert not first.exists() and not second.exists()
