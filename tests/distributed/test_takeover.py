"""A dead rank's share, written by a survivor of its node: whole, or not at all, never a mixture."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_restore import check, restore

from lightck.errors import TornSnapshotError
from lightck.failure.takeover import coordinator
from lightck.failure.takeover.takeover import TakeoverResult
from lightck.region import location
from lightck.region.native_region import FORWARD, STEP_END
from lightck.region.region import open_and_recover
from lightck.state.inventory import StateTensor
from lightck.types import Saved
from support.distributed.node import JIT, LONG_S, Live, Node
from support.distributed.written import T2


class Saves:
    """Nothing has to be saved again."""

    def save(self, reason: str, deadline: float, *, early: bool = False) -> Saved:
        raise AssertionError(reason)


@pytest.fixture
def folder(region_dir: Path) -> Path:
    return region_dir / "run"


@pytest.mark.parametrize("world", [2, 3, 4])
def test_a_survivor_finishes_the_step_of_a_dead_rank_bit_for_bit(folder: Path, world: int) -> None:
    for dead in range(world):
        with Node(folder.with_name(f"dead-{dead}"), world) as node:
            node.train(1)
            node.train(2, absent=[dead], flags=JIT)
            node.die(dead)
            survivor = (dead + 1) % world
            assert node.take(survivor, dead) == TakeoverResult(dead, 2, wrote=True)
            assert node.steps(dead) == [(1, 0), (2, JIT)]
        check(restore(world, folder.with_name(f"dead-{dead}")), node.crew, 2)


def test_several_dead_ranks_are_finished_by_the_one_that_is_left(folder: Path) -> None:
    with Node(folder, 4) as node:
        node.train(1)
        node.train(2, absent=[0, 1, 3])
        node.die(0, 1, 3)
        assert [node.take(2, dead).wrote for dead in (0, 1, 3)] == [True] * 3
    check(restore(4, folder), node.crew, 2)


def test_without_the_takeover_the_step_is_lost(folder: Path) -> None:
    with Node(folder, 2) as node:
        node.train(1)
        node.train(2, absent=[1])
        node.die(1)
    check(restore(2, folder), node.crew, 1)


@pytest.mark.parametrize("last", [1, 2], ids=["before the copies", "while they are made"])
def test_weights_that_others_stand_in_for_are_no_dead_rank_s_share(folder: Path, last: int) -> None:
    """The survivor validates with an average by now, though its own part is committed."""
    with Node(folder, 2) as node:
        node.train(1)
        node.train(2, absent=[1])
        node.die(1)
        takeover, asked = node.takeover(0), []

        def require_instant(early: bool) -> None:
            asked.append(early)
            if len(asked) == last:
                raise TornSnapshotError("model/w is not what it was")

        takeover.context.live.require_instant = require_instant
        taken = takeover.complete(1, time.monotonic() + LONG_S)
        assert taken.step is None and "model/w is not what it was" in taken.why
        assert asked == [False] * last and node.steps(1) == [(1, 0)]
        takeover.context.live.require_instant = lambda early: None
        assert takeover.complete(1, time.monotonic() + LONG_S).wrote


def test_what_this_rank_has_counted_on_since_goes_as_it_was(folder: Path) -> None:
    """Its device hangs in the step that both have; what is in DRAM is of the next one already."""
    with Node(folder, 2) as node:
        node.train(1)
        node.train(2, absent=[1])
        node.die(1)
        takeover = node.takeover(0)
        lives = takeover.context.inventory.everything()
        then = {live.name: live.tensor.detach().clone() for live in lives}
        for live in lives:
            live.tensor.detach().add_(1)
        looks: list[bool] = []
        counts = SimpleNamespace(by_name=lambda: then)
        before: Any = SimpleNamespace(dram_copies=counts, require_instant=looks.append)
        takeover.context.live.pre_update = before
        kept = then.popitem()
        refused = takeover.complete(1, time.monotonic() + LONG_S)
        assert "of a later step here" in refused.why, refused
        then[kept[0]] = kept[1]
        assert takeover.complete(1, time.monotonic() + LONG_S).wrote
        assert looks == [False] * 3, "once before and once behind the copies"
        for live in lives:
            live.tensor.detach().copy_(then[live.name])
        check(restore(2, folder), node.crew, 2)


def test_a_region_whose_owner_lives_is_left_alone(folder: Path) -> None:
    with Node(folder, 2) as node:
        node.train(1)
        node.train(2, absent=[1])
        taken = node.take(0, 1)
        assert taken.step is None and "its rank lives, or another survivor is at it" in taken.why
        assert node.steps(1) == [(1, 0)]


def test_a_step_that_the_dead_rank_has_committed_ends_it(folder: Path) -> None:
    with Node(folder, 2) as node:
        node.train(1)
        node.train(2)
        node.die(1)
        before = node.crew.file(1).read_bytes()
        assert node.take(0, 1) == TakeoverResult(1, 2)
        assert node.crew.file(1).read_bytes() == before, "it was only looked at"


@pytest.mark.parametrize("saved", [True, False], ids=["has saved itself", "has not"])
def test_a_region_in_hand_is_waited_for_only_while_its_part_is_missing(
    folder: Path, saved: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that ends lets go of its memory first, and of its lock only then."""
    waits: list[float] = []
    monkeypatch.setattr(coordinator, "_owns_itself", lambda where: False)
    monkeypatch.setattr(coordinator, "time", SimpleNamespace(sleep=waits.append))
    with Node(folder, 2) as node:
        node.train(1)
        node.train(2, absent=[] if saved else [1])
        heir = coordinator.TakeoverCoordinator(node.takeover(0), Saves(), clock=lambda: sum(waits))
        assert heir.complete_dead_ranks(LONG_S) == []
    assert not waits if saved else sum(waits) >= 2 * coordinator.TURN_S


def test_a_second_takeover_finds_it_done(folder: Path) -> None:
    with Node(folder, 3) as node:
        node.train(1)
        node.train(2, absent=[1])
        node.die(1)
        assert node.take(0, 1).wrote
        assert node.take(2, 1) == TakeoverResult(1, 2)


@pytest.mark.parametrize("last", [1, 3])
def test_a_journal_of_another_step_serves_nothing(folder: Path, last: int) -> None:
    with Node(folder, 2) as node:
        node.train(1)
        node.train(2, absent=[1])
        for kind in (STEP_END, FORWARD):  # both entries are overwritten
            node.journal(1, last, kind)
        node.die(1)
        taken = node.take(0, 1)
        assert f"is of step {last} of timeline" in taken.why and "wanted step 2 of" in taken.why
        assert node.steps(1) == [(1, 0)]
    check(restore(2, folder), node.crew, 1)


def test_a_dead_rank_that_was_a_step_ahead_still_has_the_entry_of_the_forward(folder: Path) -> None:
    """It had ended its update and written the entry of step 3's end over that of step 2's."""
    with Node(folder, 2) as node:
        node.train(1)
        node.train(2, absent=[1])
        node.journal(1, 3, STEP_END)
        node.die(1)
        assert node.take(0, 1).wrote
    check(restore(2, folder), node.crew, 2)


def test_a_dead_rank_with_an_empty_region_and_journal_is_left_alone(folder: Path) -> None:
    with Node(folder, 2) as node:
        node.crew.train(1, absent=[1])
        node.live_steps[0] = 1
        node.die(1)
        taken = node.take(0, 1)
        assert "its journal has no entry of the start of the next forward" in taken.why
        assert node.steps(1) == []


def test_a_dead_rank_without_a_region_is_left_alone(folder: Path) -> None:
    with Node(folder, 2) as node:
        node.train(1, absent=[1])
        node.die(1)
        node.crew.file(1).unlink()
        assert node.take(0, 1).why.endswith("rank 1 has no region")
        assert not node.crew.file(1).exists()


def test_a_region_of_another_timeline_run_or_rank_is_left_alone(folder: Path) -> None:
    with Node(folder, 2) as node:
        node.train(1)
        node.train(2, absent=[1])
        node.die(1)
        mine = node.crew.file(1).read_bytes()
        with Node(folder.parent / "other", 2, timeline=T2) as other:
            other.train(1)
        node.crew.file(1).write_bytes(other.crew.file(1).read_bytes())
        assert f"its timeline is {T2:x}, the job's is" in node.take(0, 1).why
        node.crew.file(1).write_bytes(other.crew.file(0).read_bytes())
        assert "is the region of rank 0, not of rank 1" in node.take(0, 1).why
        with Node(folder.parent / "third", 2, run=b"run of another..") as third:
            third.train(1)
        node.crew.file(1).write_bytes(third.crew.file(1).read_bytes())
        assert node.take(0, 1).why.endswith("belongs to another run")
        node.crew.file(1).write_bytes(mine)
        assert node.take(0, 1).wrote


def test_a_survivor_inside_an_update_or_without_the_step_writes_nothing(folder: Path) -> None:
    with Node(folder, 2) as node:
        node.train(1)
        node.train(2, absent=[1])
        node.die(1)
        node.live_steps[0] = None
        assert "inside an update" in node.take(0, 1).why
        node.live_steps[0] = 3
        assert node.take(0, 1).why == "this rank has no snapshot of step 3 itself"
        node.live_steps[0] = 2
        assert node.take(0, 1, early=True).why == "this rank has no early snapshot of step 2 itself"
        assert node.steps(1) == [(1, 0)]


def test_a_rank_of_another_node_is_left_alone(folder: Path) -> None:
    with Node(folder, 2) as node:
        node.train(1)
        node.die(1)
        assert "rank 2 is no peer of rank 0 (0, 1)" in node.take(0, 2).why
        assert "rank 0 is no peer of rank 0" in node.take(0, 0).why


def test_state_of_its_own_that_the_journal_has_not_refuses_the_takeover(folder: Path) -> None:
    with Node(folder, 2) as node:
        node.train(1)
        node.train(2, absent=[1])
        node.journal(1, 2, FORWARD, lives=[StateTensor("model/none", "buffer", "", torch.zeros(1))])
        node.die(1)
        taken = node.take(0, 1)
        assert taken.why.endswith("that its journal has not: extras/noise, model/seen"), taken.why
        assert node.steps(1) == [(1, 0)]


def test_a_survivor_whose_state_has_another_share_map_writes_nothing(folder: Path) -> None:
    with Node(folder, 2) as node:
        node.train(1)
        node.train(2, absent=[1])
        node.die(1)
        node.crew.ranks[0].net.register_parameter("late", torch.nn.Parameter(torch.zeros(4)))
        assert "the share map is" in node.take(0, 1).why
        assert node.steps(1) == [(1, 0)]


@pytest.mark.parametrize("torn_before", [False, True], ids=["", "torn before"])
def test_a_tensor_that_changes_under_the_copy_is_never_committed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, torn_before: bool
) -> None:
    """A tensor copied at forward start, since it was found torn, is copied from its place, too."""
    from lightck.region.slot_writer import SlotWriter

    with Node(folder, 2) as node:
        node.train(1)
        node.train(2, absent=[0])
        node.die(0)
        capture = SlotWriter.finish_copies

        def changing(writer: SlotWriter, batch: Any, timeout_s: float | None = None) -> None:
            capture(writer, batch, timeout_s)
            with torch.no_grad():
                for parameter in node.crew.ranks[1].net.parameters():
                    parameter += 1

        monkeypatch.setattr(SlotWriter, "finish_copies", changing)
        takeover = node.takeover(1)
        lives = takeover.context.inventory.everything()
        lives = tuple(replace(live, sync=live.sync or torn_before) for live in lives)
        monkeypatch.setattr(takeover.context.inventory, "everything", lambda: lives)
        assert "changed while it was copied" in takeover.complete(0, time.monotonic() + LONG_S).why
        monkeypatch.undo()
        assert node.steps(0) == [(1, 0)]


def test_a_time_that_is_over_leaves_nothing_half_written(folder: Path) -> None:
    with Node(folder, 2) as node:
        node.train(1)
        node.train(2, absent=[1])
        node.die(1)
        takeover = node.takeover(0)
        held = threading.Event()
        done = threading.Event()

        def hold() -> None:
            with takeover.context.lock:
                held.set()
                done.wait(LONG_S)

        thread = threading.Thread(target=hold)
        thread.start()
        held.wait(LONG_S)
        assert "held the lock" in takeover.complete(1, time.monotonic() + 0.05).why
        done.set()
        thread.join()
        assert node.steps(1) == [(1, 0)]
        assert node.take(0, 1).wrote


def test_the_protected_slot_and_slots_of_unknown_fate_stay(folder: Path) -> None:
    """Three slots: step 1 is whole, the fate of 2 is not known, so that 3 finds one, and 4 none."""
    with Node(folder, 2) as node:
        node.train(1)
        own = node.crew.regions[0]
        own.reusable = lambda timeline, step: False
        node.train(2)
        node.train(3, absent=[1])
        node.die(1)
        assert own.protected is not None
        assert node.take(0, 1).wrote
        assert [step for step, _ in node.steps(1)] == [1, 2, 3]
        node.live_steps[0] = 4
    assert own.slots[own.protected].record is not None


def test_the_newest_whole_step_is_never_overwritten_though_it_is_the_oldest(folder: Path) -> None:
    """Every later step is known to be dead, and the dead rank's slots are full."""
    with Node(folder, 2) as node:
        node.train(1)
        own, dead = node.crew.regions
        own.reusable = dead.reusable = lambda timeline, step: True
        for step in (2, 3, 4):
            node.train(step, absent=[1] if step == 4 else [])
            for region in (own, dead):
                for slot in region.slots:
                    slot.fate_open = False
        node.die(1)
        assert own.protected == 0
        assert node.take(0, 1).wrote
        assert [step for step, _ in node.steps(1)] == [1, 3, 4]


def test_a_step_that_the_survivor_has_overwritten_gives_its_slot(folder: Path) -> None:
    """It is whole no more, whatever its fate was."""
    with Node(folder, 2) as node:
        node.train(1)
        own, dead = node.crew.regions
        own.reusable = dead.reusable = lambda timeline, step: False
        node.train(2)
        dead.slots[1].fate_open = False
        own.slots[1].fate_open, own.slots[1].record = False, None  # a just-in-time one, given up
        node.train(3)
        node.train(4, absent=[1])
        node.die(1)
        assert node.take(0, 1).wrote
        assert [step for step, _ in node.steps(1)] == [1, 3, 4]


def test_a_survivor_that_goes_on_before_the_copy_writes_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Node(folder, 2) as node:
        node.train(1)
        node.train(2, absent=[1])
        node.die(1)
        takeover, said = node.takeover(0), iter([2, 2, 3])
        monkeypatch.setattr(Live, "step", property(lambda live: next(said)))
        taken = takeover.complete(1, time.monotonic() + LONG_S)
        assert taken.why == "this rank has gone on from step 2"
        assert node.steps(1) == [(1, 0)]


def test_no_free_slot_is_a_reason_and_no_harm(folder: Path) -> None:
    """Readers hold every slot."""
    with Node(folder, 2) as node:
        node.train(1)
        node.train(2, absent=[1])
        node.die(1)
        reader, _ = open_and_recover(location.locate(folder, 1, create=False))
        for slot in reader.slots:
            reader.native.lease(slot.index, True)
        assert "every slot is protected or leased" in node.take(0, 1).why
        reader.close()
        assert node.steps(1) == [(1, 0)]
        assert node.take(0, 1).wrote
