"""Settings and extras that cannot be taken: a typed error with their names; nothing is made."""

from __future__ import annotations

from pathlib import Path

import pytest

import lightck
from support.loops import adam_loop, attach, of_stored, restored, steps_at, train


def test_unknown_settings_are_named_and_nothing_is_made(run_dir: Path) -> None:
    with pytest.raises(lightck.ConfigError, match=r"slot = 3.*did you mean slots"):
        attach(run_dir, adam_loop(), slot=3)
    file = run_dir.with_name("config.toml")
    file.write_text("thread = 3\n")
    with pytest.raises(lightck.ConfigError, match=rf"thread = 3.*{file.name}"):
        attach(run_dir, adam_loop(), config=file)
    assert not run_dir.exists()


class Sampler:
    """An extra whose state can be saved by pickle only."""

    def state_dict(self) -> dict[str, object]:
        return {"epoch": 1, "queue": [1, {"key": lambda x: x}]}

    def load_state_dict(self, state: dict[str, object]) -> None:
        raise AssertionError


def test_an_extra_that_could_not_be_restored_is_an_error_at_attach_with_its_path(
    run_dir: Path,
) -> None:
    with pytest.raises(lightck.StateError, match="extras/sampler/queue/1/key.*function") as caught:
        attach(run_dir, adam_loop(), extras={"sampler": lightck.at_step(Sampler())})
    assert caught.value.path == "extras/sampler/queue/1/key"
    with pytest.raises(lightck.StateError, match=r"extras\['file'\]"):
        attach(run_dir, adam_loop(), extras={"file": object()})
    loop = adam_loop()
    with attach(run_dir, loop, extras={"counters": {"tokens": 3}}):
        loop.run(1)
    assert steps_at(run_dir) == [1]


def test_an_extra_that_turns_unrestorable_costs_its_snapshot_and_not_the_older_one(
    run_dir: Path,
) -> None:
    counters: dict[str, object] = {"tokens": 0}
    loop, reports = adam_loop(), []
    handle = attach(run_dir, loop, extras={"counters": counters}, on_error=reports.append)
    loop.run(3)
    handle.wait()
    counters["hook"] = print
    loop.run(2)
    assert {type(e) for e in reports} == {lightck.StateError}
    assert "extras/counters/hook" in str(reports[0])
    assert of_stored(run_dir, 2) == loop.seen[2]
    del counters["hook"]
    loop.run(2)
    loop.note()
    with pytest.raises(lightck.StateError):
        handle.close()
    assert handle.stats().failed == len(reports)
    assert steps_at(run_dir)[-1] == 7
    assert of_stored(run_dir, 7) == loop.seen[7]


def test_a_leftover_of_a_process_that_died_while_making_a_region_is_removed(
    run_dir: Path,
) -> None:
    run_dir.mkdir(0o700)
    (run_dir / "region-00000.new").write_bytes(b"half a region")
    assert restored(run_dir)[0] is None
    loop = adam_loop()
    train(run_dir, loop, 1)
    assert [p.name for p in run_dir.iterdir()] == ["region-00000.lck"]
