"""Ranks that were given what they lacked, and a second loss before anything new is whole."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from test_healed_jobs import begin, losses_of

import lightck
from lightck.region import location
from lightck.region.region import Region
from support.distributed import ranks
from support.distributed.islands import Islands
from support.distributed.written import Rank


def killed_after_attach(islands: Islands) -> list[int]:
    """The steps that a life restores which ends before its first snapshot."""

    def life(me: ranks.Me) -> Any:
        path, live = islands.enter(me.rank), Rank(me.rank)
        info = lightck.restore(live.net, live.optimizer, path, extras=live.extras)
        assert info is not None
        lightck.attach(live.net, live.optimizer, path, extras=live.extras, policy=1000)
        me.send(info.step)
        me.pause()

    with ranks.started(2, life) as job:
        steps = [job.receive(rank) for rank in range(2)]
        job.kill(0)
        job.kill(1)
    return steps


def restored(islands: Islands) -> list[int | None]:
    def life(me: ranks.Me) -> Any:
        path, live = islands.enter(me.rank), Rank(me.rank)
        info = lightck.restore(live.net, live.optimizer, path, extras=live.extras)
        return info and info.step

    with ranks.started(2, life) as job:
        return job.results()


def test_a_healed_rank_keeps_what_the_job_falls_back_to_when_the_donor_is_lost(
    tmp_path: Path,
) -> None:
    two = Islands(tmp_path, 2, 2)
    with two.crew() as crew:
        crew.train(100)
        crew.train(200)
        crew.train(300, absent=[1])
    two.settle(crew)
    assert killed_after_attach(two) == [300, 300]
    two.lose(0)
    assert restored(two) == [200, 200]


def test_a_timeline_that_only_the_healed_rank_has_begun_abandons_nothing_of_the_donor(
    tmp_path: Path,
) -> None:
    two = Islands(tmp_path, 2, 2)
    with two.crew() as crew:
        crew.train(100)
        crew.train(300)
    two.settle(crew)
    two.lose(0)

    def life(me: ranks.Me) -> Any:
        path, live = two.enter(me.rank), Rank(me.rank)
        lightck.restore(live.net, live.optimizer, path, extras=live.extras)

        def waits(*_: Any) -> None:
            me.send("about to begin")
            me.pause()

        if me.rank == 1:
            Region.begin_timeline = waits  # type: ignore[method-assign,assignment]
        lightck.attach(live.net, live.optimizer, path, extras=live.extras, policy=1000)
        me.send("begun")
        me.pause()

    with ranks.started(2, life) as job:
        assert [job.receive(0), job.receive(1)] == ["begun", "about to begin"]
        job.kill(0)
        job.kill(1)
    assert restored(two) == [300, 300]


def test_a_rank_healed_with_its_own_journal_keeps_its_older_snapshot(tmp_path: Path) -> None:
    """Rank 1 is killed in a forward: rank 0 alone saves that step, and gives it to rank 1."""
    two = Islands(tmp_path, 2, 2)

    def train(me: ranks.Me) -> Any:
        path, training = two.enter(me.rank), begin(me)
        extras = {"data": training.data}
        with training.attach(path, extras=extras, policy=3, failure="jit") as handle:
            losses_of(training, 3)
            handle.wait(3, timeout=ranks.LONG_S)
            losses_of(training, 2)

            def stop(*_: Any) -> None:
                me.send("in the forward of step 6")
                me.pause()

            if me.rank == 1:
                training.module[2].register_forward_pre_hook(stop)
            losses_of(training, 1)

    with ranks.started(2, train) as job:
        job.receive(1)
        job.kill(1)
        job.outcomes([0])

    def life(me: ranks.Me) -> Any:
        path, training = two.enter(me.rank), begin(me)
        extras = {"data": training.data}
        info = lightck.restore(training.model, training.optimizer, path, extras=extras)
        assert info is not None
        training.attach(path, extras=extras, policy=1000)
        me.send(info.step)
        me.pause()

    with ranks.started(2, life) as job:
        assert [job.receive(0), job.receive(1)] == [5, 5]
        job.kill(0)
        job.kill(1)
    region = Region.open(location.locate(two.file(1).parent, 1, create=False), writable=False)
    assert [each.record.step for each in region.recover().candidates] == [3]
    region.close()


def test_a_job_that_begins_anew_beside_a_snapshot_says_so(tmp_path: Path) -> None:
    """Rank 0 alone has one, of state that no other rank has alike."""
    two = Islands(tmp_path, 2, 2)
    with two.crew(shares=False) as crew:
        crew.train(1, absent=[1])
    two.settle(crew)

    def life(me: ranks.Me) -> Any:
        heard: list[tuple[str, str]] = []
        handler = logging.Handler()
        handler.emit = lambda record: heard.append(  # type: ignore[method-assign]
            (record.lightck_event, str(record.lightck))  # type: ignore[attr-defined]
        )
        logging.getLogger("lightck").addHandler(handler)
        path, live = two.enter(me.rank), Rank(me.rank)
        info = lightck.restore(live.net, live.optimizer, path, extras=live.extras)
        return info, [said for event, said in heard if event == "begins_anew"]

    with ranks.started(2, life) as job:
        for info, said in job.results():
            assert info is None
            assert len(said) == 1 and "step 1: not whole" in said[0]
