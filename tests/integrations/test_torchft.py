"""Replica groups of torchft are killed, go on bit for bit, and are healed from their regions' step.

Of two groups that are killed together nothing shows in the end. Where one is killed and the other
goes on without it, the one that comes back is healed by its peer, and its snapshots are of the
peer's steps from then on.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from support.integrations.chain import Chain

FRAMEWORK = "torchft"
MODULES = ("torch._dynamo",)  # torchft itself starts threads, which a fork would not have


def test_two_groups_that_are_killed_together_go_on_bit_for_bit(
    chain: Callable[..., Chain],
) -> None:
    chain("torchft_groups.py", ranks=2).check("forward 0", "forward 3", "forward 5", "forward 6")


def test_the_steps_of_a_group_that_its_peer_has_healed_are_the_manager_s(
    chain: Callable[..., Chain],
) -> None:
    made = chain("torchft_groups.py", params={"heal": True})
    assert made.life(on=True) == [0], made.log
    assert made.notes("restored", 0) == [None]
    assert made.notes("restored", 1)[0] is None and made.notes("restored", 1)[1] in (4, 5), made.log
    assert made.notes("healed", 1)[-1] > 9, made.log
    assert made.notes("newest", 0) == made.notes("newest", 1) == [30]
    ends = [
        torch.load(made.folder / "run" / f"on-weights.{group}", weights_only=True)
        for group in (0, 1)
    ]
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


def test_the_names_that_are_used_are_there_and_a_group_must_be_known(
    chain: Callable[..., Chain],
) -> None:
    made = chain("torchft_refusals.py")
    assert made.life(on=True) == [0], made.log
