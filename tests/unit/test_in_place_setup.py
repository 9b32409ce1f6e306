"""A replacement sets itself up by what the first life got, or all ranks are restarted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import lightck
from lightck.distributed import rendezvous
from lightck.distributed.rendezvous import Joining, Rendezvous
from lightck.errors import CoordinationError
from lightck.inplace import setup
from lightck.inplace.communicator import SETUP_MOST, Communicator
from lightck.inplace.operations import Operation, described
from lightck.inplace.plan import LIBRARY, PROGRAM, TORCH, Description
from lightck.inplace.setup import SetupAnswers, SetupRecord
from support.inplace.simulated import Switch

SEED = 1234


def send(communicator: Communicator, tensor: torch.Tensor, maker: str = "") -> Operation:
    """Send a tensor from rank 0."""
    form = Description("broadcast from 0", described([tensor]), maker=maker)
    return communicator.run(form, [tensor], lambda b: b.broadcast([tensor], 0))


def seed(value: int = 0) -> torch.Tensor:
    return torch.tensor([value])


@pytest.fixture
def first() -> Iterator[Communicator]:
    """A rank of the first life, which is alone."""
    communicator = Communicator(0, 1)
    communicator.resume(Switch(1, 0).open(0))
    yield communicator
    communicator.end("the test is over")


def replacement(first: Communicator) -> Communicator:
    """Return a replacement that is told of the set-up of the first life."""
    record = SetupRecord(first.kept_until)
    for operation in first.window:
        record.add(operation)
    return Communicator(1, 2, SetupAnswers.from_text(1, record.to_text()))


def set_up(communicator: Communicator, count: int, values: int, drawn: torch.Tensor) -> Operation:
    """Send many tensors of one size, then a seed."""
    for _ in range(count):
        communicator.wait(send(communicator, torch.ones(values)))
    return send(communicator, drawn)


def test_a_replacement_is_given_the_seed_that_the_first_life_has_drawn(
    first: Communicator,
) -> None:
    first.wait(set_up(first, SETUP_MOST - 1, 2, seed(SEED)))
    drawn, other = seed(), replacement(first)
    other.wait(set_up(other, SETUP_MOST - 1, 2, drawn))
    assert int(drawn) == SEED


@pytest.mark.parametrize(("count", "values"), [(SETUP_MOST + 44, 2), (20, 16_000)])
def test_a_small_result_beyond_the_limits_restarts_all_ranks_in_words(
    first: Communicator, count: int, values: int
) -> None:
    """Too many, and too many bytes."""
    assert (values * 4 * count > setup.MOST_BYTES) == (count < SETUP_MOST)
    first.wait(set_up(first, count, values, seed(SEED)))
    drawn, other = seed(), replacement(first)
    for _ in range(count):
        send(other, torch.ones(values))
    last = send(other, drawn)
    assert not last.future.done()
    assert "its set-up makes a broadcast from 0" in other.refused
    other.end(other.refused)
    with pytest.raises(CoordinationError, match="send many small tensors as one"):
        other.wait(last)


def test_of_many_results_none_is_given_in_the_place_of_another(
    first: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup, "MOST_BYTES", 100)
    for each in (torch.ones(30), seed(1), seed(2)):
        first.wait(send(first, each))
    other = replacement(first)
    drawn = seed()
    assert not send(other, drawn).future.done()
    assert int(drawn) == 0
    assert other.refused


def test_what_is_not_complete_when_all_have_attached_is_not_passed_over(
    first: Communicator,
) -> None:
    first.wait(send(first, seed(1)))
    first.interrupt()
    send(first, seed(2))
    other = replacement(first)
    send(other, seed())
    assert not other.refused
    send(other, seed())
    assert other.refused


def test_what_is_too_large_to_be_kept_is_answered_with_what_is_there(first: Communicator) -> None:
    first.wait(set_up(first, 2, 100_000, seed(SEED)))
    drawn, other = seed(), replacement(first)
    other.wait(set_up(other, 2, 100_000, drawn))
    assert int(drawn) == SEED


def test_a_large_result_of_the_program_s_own_restarts_all_ranks_in_words(
    first: Communicator,
) -> None:
    """A library sends models, which are restored afterwards; a program may send anything."""
    first.wait(send(first, torch.ones(100_000), PROGRAM))
    other = replacement(first)
    assert not send(other, torch.zeros(100_000), PROGRAM).future.done()
    assert "(100000,)" in other.refused and "a seed in place" in other.refused


def test_behind_its_restore_a_replacement_is_given_no_result_of_before(
    first: Communicator,
) -> None:
    """The first life had restored nothing, or another step."""
    first.restored("run", is_whole=False)
    first.restored("teacher", is_whole=False, by_integration=True)
    first.wait(send(first, seed(SEED), LIBRARY))
    assert {*first.since_restored.values()} == {""}
    first.wait(send(first, seed(SEED), PROGRAM))
    assert {*first.since_restored.values()} == {"broadcast from 0 ()"}
    other = replacement(first)
    other.restored("teacher", is_whole=False)
    send(other, drawn := seed())
    assert int(drawn) == SEED
    other.restored("run", is_whole=True, by_integration=True)
    send(other, kept := seed(5), TORCH)  # of a model, which it has restored
    send(other, seed(), LIBRARY)
    assert int(kept) == 5 and not other.refused
    assert not send(other, seed(), PROGRAM).future.done()
    assert "between restore and attach" in other.refused


def test_what_a_program_has_a_library_send_behind_its_restore_may_be_of_the_step(
    first: Communicator,
) -> None:
    first.restored("run", is_whole=False)
    first.wait(send(first, seed(SEED), LIBRARY))
    assert first.since_restored == {"run": "broadcast from 0 ()"}
    other = replacement(first)
    other.restored("run", is_whole=True)
    assert not send(other, seed(), LIBRARY).future.done() and other.refused


def test_a_replacement_restores_of_other_paths_what_the_first_life_did() -> None:
    joining = Joining(
        7, None, lambda why: None, "/run", {"/run": None, "/teacher": 3, "/none": None}
    )
    assert [joining.step_at(path) for path in ("/run", "/teacher", "/none")] == [7, 3, None]
    with pytest.raises(CoordinationError, match="/other"):
        joining.step_at("/other")


def test_a_replacement_attaches_only_what_it_has_restored_of_the_job(
    region_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It restores from another path the first life's step, though a newer one is there."""
    teacher = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(teacher.parameters(), lr=0.1)
    with lightck.attach(teacher, optimizer, region_dir / "run", policy=1, slots=4) as handle:
        for _ in range(2):
            teacher(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            handle.wait()
    refused: list[str] = []
    joining = Joining(1, None, refused.append, "/of/the/job", {str(region_dir / "run"): 1})
    meets = SimpleNamespace(
        rendezvous=lambda kind: Rendezvous(kind, 0, 2, joining=joining),
        restored=lambda path, step: None,
    )
    monkeypatch.setattr(rendezvous, "here", lambda: (0, 2))
    monkeypatch.setattr(rendezvous, "_stand_in", meets)
    info = lightck.restore(teacher, path=region_dir / "run")
    assert info is not None and info.step == 1
    net = torch.nn.Linear(2, 2)
    with pytest.raises(CoordinationError, match="what it has not restored"):
        lightck.attach(net, None, region_dir / "run", overwrite=True)
    assert len(refused) == 1 and "at step 0, and theirs behind step 1" in refused[0]


def test_a_replacement_whose_set_up_was_refused_is_answered_nothing_more(
    first: Communicator,
) -> None:
    first.wait(set_up(first, SETUP_MOST + 1, 2, seed(SEED)))
    other = replacement(first)
    set_up_again = [send(other, torch.ones(2)) for _ in range(SETUP_MOST)]
    assert all(each.future.done() for each in set_up_again)
    late = [send(other, seed()), send(other, torch.ones(100_000))]
    assert not any(each.future.done() for each in late)
    other.end(other.refused)
    assert all(each.future.done() for each in late)
    with pytest.raises(CoordinationError):
        other.wait(send(other, torch.ones(100_000)))
