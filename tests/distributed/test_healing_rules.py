"""Rules say who gives a snapshot to whom, when nobody may, and what a transfer refuses."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_choice import T1, view

from lightck.distributed.restore.healing import (
    CHUNK,
    END,
    FAILURE,
    HEADER,
    encode_header,
    read_chunks,
    receive,
)
from lightck.distributed.restore.selection import (
    Choice,
    HealingPlan,
    Key,
    RankView,
    decide,
    decide_restore,
    plan_healing,
)
from lightck.distributed.restore.survey import LocalState, RegionSurvey
from lightck.distributed.sharding import SharePartitioner, is_own
from lightck.distributed.topology import Topology
from lightck.errors import CoordinationError, CorruptSnapshotError
from lightck.reader.assembly import AssembledSnapshot
from lightck.reader.fill import empty_tensor
from lightck.region import location
from lightck.state.extras import parse
from lightck.state.inventory import Inventory
from support.distributed.written import Crew, Rank, replicated

K8 = Key(T1, 8, 3)


def node(*steps: int, early: bool = False, local_states: tuple[int, ...] = ()) -> RankView:
    seen = view(*steps, world=3)
    offers = tuple(replace(offer, alike=True, early=early) for offer in seen.offers)
    own = tuple((Key(T1, step, 3), early) for step in local_states)
    return replace(seen, offers=offers, local_states=own)


def test_whoever_lacks_the_newest_step_gets_it_from_the_lowest_rank_that_has_it() -> None:
    choice = decide([node(5), node(8, 5), node(8, 5)])
    assert choice.key == K8 and choice.heals == ((0, 1),) and choice.without_local_state == (0,)
    assert choice.why == (
        "step 8 is the newest: rank(s) 0 get it from rank 1, rank(s) 0 with that rank's buffers"
        " and data position"
    )
    assert choice.fell_back == ()
    whole = decide([node(8), node(8), node(8)])
    assert whole.heals == () and whole.why == "step 8 is the newest that is whole"


def test_every_rank_hears_the_same_plan() -> None:
    views = [node(5, local_states=(8,)), node(8, 5), node(8)]
    for rank, size in ((1, 30), (2, 40)):
        offers = tuple(replace(offer, size=size) for offer in views[rank].offers)
        views[rank] = replace(views[rank], offers=offers)
    choice = Choice.from_message(decide_restore([each.to_message() for each in views]))
    assert choice == decide(views) and choice.size == 40, "the largest one's"
    assert choice.heals == ((0, 1),) and choice.without_local_state == ()


def test_a_plan_is_of_one_instant() -> None:
    assert plan_healing(K8, [node(8), node(8, early=True), node(5)]) == (
        "the ranks that have it have it of two instants, before and at the forward"
    )
    early = plan_healing(K8, [node(8, early=True), node(), node(local_states=(8,))])
    assert early == HealingPlan(0, (1, 2), without_local_state=(1, 2), early=True), (
        "its own state is of the other one"
    )


def test_what_is_not_alike_by_the_word_of_each_part_is_not_given() -> None:
    other = replace(view(8, world=3), offers=view(8, world=3).offers)
    assert "as rank(s) 1 have it, it is not replicated" in str(
        plan_healing(K8, [node(8), other, node()])
    )
    assert decide([node(8, 5), replace(other, offers=view(8, 5, world=3).offers), node(5)]).key == (
        Key(T1, 5, 3)
    )


def test_a_step_without_a_ranks_own_state_yields_to_a_whole_one_just_before_it() -> None:
    lacking = node(7)
    assert decide([node(8, 7), node(8, 7), lacking]).key == Key(T1, 7, 3)
    with_own = node(7, local_states=(8,))
    assert decide([node(8, 7), node(8, 7), with_own]).key == K8
    assert decide([node(8, 6), node(8, 6), node(6)]).key == K8


def test_a_job_stopped_before_its_first_whole_snapshot_begins_anew_only_at_its_first_step() -> None:
    def young(seen: RankView) -> RankView:
        return replace(seen, fresh_timeline=T1, lineage=replace(view(world=3).lineage, world=3))  # type: ignore[type-var]

    def old(seen: RankView) -> RankView:
        return replace(seen, lineage=replace(view(world=3).lineage, world=3))  # type: ignore[type-var]

    first = decide([old(node(1)), old(node(1)), young(node())])
    assert first.never_written and first.key is None and first.heals == ()
    later = decide([old(node(9)), old(node(9)), young(node())])
    assert not later.never_written and later.heals == ((2, 0),)
    known = decide([old(node(1)), old(node(1)), young(node(local_states=(1,)))])
    assert known.key == Key(T1, 1, 3)


def test_a_region_that_cannot_be_opened_is_named_unless_its_rank_is_healed() -> None:
    broken = replace(node(), unreadable="RegionFormatError: truncated")
    assert decide([node(8), node(8), broken]).heals == ((2, 0),)
    with pytest.raises(CoordinationError, match="rank 2: RegionFormatError: truncated"):
        decide([view(8, world=3), view(8, world=3), broken])


@pytest.mark.parametrize("peers", [(0,), (0, 1)])
def test_a_manifest_says_that_all_is_alike_only_if_it_is(peers: tuple[int, ...]) -> None:
    def told(names: Any) -> Any:
        live = Rank(0)
        live.train(1)
        sharing = SharePartitioner(Topology(0, 2, peers=peers), names)
        inventory = Inventory(live.net, [live.optimizer], parse(live.extras), division=sharing)
        return inventory.collect().tree["share"]["alike"]

    def most(lives: Any) -> set[str]:
        return replicated(lives) - {"model/second.bias"}

    assert told(replicated) is True
    assert told(most) is False and told(lambda lives: set()) is False
    assert SharePartitioner(Topology(), replicated)([]).told is None, "one rank has nobody to tell"


class Sent:
    """A channel's other end."""

    def __init__(self, messages: list[tuple[int, torch.Tensor]]) -> None:
        self.messages, self.seconds, self.label = messages, 1.0, "step 1 from rank 0 to rank 1"

    def receive(self) -> tuple[int, torch.Tensor]:
        return self.messages.pop(0)


@pytest.fixture
def messages(tmp_path: Path) -> Iterator[tuple[Key, list[tuple[int, torch.Tensor]]]]:
    with Crew(tmp_path / "run", 1) as crew:
        crew.train(1)
    key = Key(crew.records[0, 1].timeline, 1, 1)
    with RegionSurvey.opened(location.locate(tmp_path / "run", 0, create=False), 0, 1) as held:
        state = held.assembled(key)
        assert isinstance(state, AssembledSnapshot)
        chunks = [(CHUNK, chunk.clone()) for chunk in read_chunks(state)]
        end = (END, torch.empty(0, dtype=torch.uint8))
        yield key, [(HEADER, encode_header(state)), *chunks, end]


def got(key: Key, messages: list[tuple[int, torch.Tensor]]) -> Any:
    channel: Any = Sent(messages)
    return receive(channel, key, 0)


def test_what_was_sent_is_what_is_taken_once_and_let_go(messages: Any) -> None:
    key, sent = messages
    healed = got(key, sent)
    healed.verify()
    assert healed.trees()[1]["step"] == 1
    first = healed.chunks[0].clone()
    target = torch.empty(healed.entries[0].length, dtype=torch.uint8)
    addresses = np.zeros(len(healed.entries), np.uint64)
    addresses[0] = target.data_ptr()
    healed.read(addresses)
    assert torch.equal(target, first[: target.numel()])


def test_what_is_a_ranks_own_is_used_only_with_every_name_of_the_model(messages: Any) -> None:
    key, sent = messages
    healed = got(key, sent)
    given, bare = healed.header, healed.entries
    own = tuple((e, empty_tensor(e)) for e in given.entries if is_own(e) and e.alias_of is None)

    def fits(tensors: Any, ties: Any) -> bool:
        local = LocalState(key, 0, False, given.at_step, given.at_forward, tensors, ties)
        healed.join(local)
        assert healed.local in (local, None)
        return healed.local is local

    buffer = next(e for e, _ in own if e.role == "buffer")
    lacking = tuple(held for held in own if held[0] is not buffer)
    assert fits(own, None) and fits(own, ())
    assert not fits(lacking, None), "a journal that lacks a buffer"
    assert fits(lacking, ()), "a snapshot knows its rank's names, whatever the donor has"
    tie = replace(buffer, name="model/too", length=0, alias_of=buffer.name)
    assert fits(own, (tie,))
    assert not fits(lacking, (tie,)) and not fits(own, (replace(tie, shape=(2,)),))
    healed.join(None)
    assert healed.entries == bare


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda sent: sent[:1] + sent[-1:], "kind 3, expected 2"),
        (lambda sent: sent[:-1] + sent[1:], "more than was announced"),
        (lambda sent: sent[1:], "kind 2, expected 1"),
        (lambda sent: [(HEADER, sent[0][1][:40]), *sent[1:]], "what came is no table"),
        (lambda sent: [(HEADER, sent[0][1][:-9000]), *sent[1:]], "what came is no table"),
        (lambda sent: [*sent[:1], (FAILURE, torch.tensor([104, 105], dtype=torch.uint8))], ": hi"),
    ],
)
def test_a_transfer_that_is_not_what_was_announced_is_refused(
    messages: Any, change: Any, named: str
) -> None:
    key, sent = messages
    with pytest.raises(CorruptSnapshotError) as caught:
        got(key, change(sent))
    assert named in str(caught.value) and "from rank 0 to rank 1" in str(caught.value)


def test_another_step_than_the_one_agreed_on_is_refused(messages: Any) -> None:
    key, sent = messages
    with pytest.raises(CorruptSnapshotError, match="step 1 came, of another timeline or job"):
        got(key._replace(step=2), sent)
