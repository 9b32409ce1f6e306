"""Collectives that are open when recovery in place ends raise: nobody goes on with half a sum."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightck.errors import CoordinationError
from lightck.inplace.communicator import Communicator
from lightck.inplace.group import Group
from lightck.inplace.inputs import Inputs

WHY = "no rank is left"


def open_work() -> tuple[Communicator, Any]:
    """Return a communicator without connections, and a reduction that waits for some."""
    communicator = Communicator(0, 2)
    work = Group(communicator, Inputs(2)).allreduce([torch.ones(3)])
    assert not work.is_completed()
    return communicator, work


def test_who_waits_in_a_collective_is_told_why_all_are_restarted() -> None:
    communicator, work = open_work()
    communicator.end(WHY)
    with pytest.raises(CoordinationError, match=WHY):
        work.wait()


def test_a_later_collective_is_told_as_well() -> None:
    communicator, _ = open_work()
    communicator.end(WHY)
    with pytest.raises(CoordinationError, match=WHY):
        Group(communicator, Inputs(2)).allreduce([torch.ones(3)]).wait()


def test_to_torch_s_own_code_the_future_has_failed_and_has_no_value() -> None:
    communicator, work = open_work()
    given = work.get_future()
    communicator.end(WHY)
    # What DDP does behind its wait; a value here would be taken for its bucket.
    taken = torch._C._distributed_c10d._create_work_from_future(given)  # type: ignore[attr-defined]
    taken.wait()
    with pytest.raises(RuntimeError, match=WHY):
        taken.get_future().value()
