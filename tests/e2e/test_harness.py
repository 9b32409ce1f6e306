"""The harness itself: what it must notice, and that it does."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from support.e2e.jobs import Plain
from support.e2e.resume import Bed, same_end
from support.e2e.trainer import Run


class WithoutOptimizer(Plain):
    """A restore that forgets the optimizer's state."""

    def restore(self, run: Run) -> Any:
        info = super().restore(run)
        self.optimizer.state.clear()
        return info


class WithoutRandom(Plain):
    """A restore that forgets where the generators stood."""

    def resumed(self, t: int) -> None:
        if t:
            torch.manual_seed(1)


class OneBit(Plain):
    """A restore that gets one bit of one weight wrong."""

    def resumed(self, t: int) -> None:
        if t:
            weight = self.model.get_parameter("4.weight").detach()
            weight.view(torch.int32)[0, 0] ^= 1


class WithoutBuffers(Plain):
    """A restore that forgets what BatchNorm counted."""

    def resumed(self, t: int) -> None:
        if t:
            self.model.get_buffer("1.num_batches_tracked").fill_(0)


def test_plain_job_resumes_bit_for_bit_after_death_in_every_phase_of_every_step(bed: Bed) -> None:
    for k in range(3, Plain.steps + 1):
        bed.fresh(f"k{k}").check(Plain, kill_step=k)


def test_plain_job_whose_state_is_copied_at_once_resumes_bit_for_bit(bed: Bed) -> None:
    """A snapshot that is copied at once is committed before the forward goes on."""
    bed.check(Plain, at_once=True, restored={"forward": {4}, "backward": {4}, "update": {4}})


@pytest.mark.parametrize("wrong", [WithoutOptimizer, WithoutRandom, OneBit, WithoutBuffers])
def test_comparison_notices_a_restore_that_is_wrong(bed: Bed, wrong: type[Plain]) -> None:
    with pytest.raises(AssertionError, match="differ|loss of step"):
        bed.check(wrong)


def test_job_that_was_never_killed_ends_as_one_that_was_never_attached(bed: Bed) -> None:
    run = bed.run(Plain, "attach").check_ended()
    same_end(run, bed.plain(Plain))
    assert run.value("committed") == Plain.steps


def test_free_running_job_resumes_from_whatever_was_committed(bed: Bed) -> None:
    plain = bed.plain(Plain, last=30)
    for where in ("forward", "backward", "update", "after"):
        death = {"kill_step": 25, "kill_where": where}
        bed.run(Plain, "attach", where, last=30, settle=False, **death).check_killed()
        again = bed.run(Plain, "resume", where, last=30, settle=False).check_ended()
        assert again.value("restored") is not None
        same_end(again, plain)
