"""Plan which faults `lightck chaos` injects and where: as given, or drawn from a seed."""

from __future__ import annotations

import random
from collections.abc import Sequence

from lightck.cli.output import Refusal
from lightck.failure.fault_plan import ANY_NEWER, KINDS, NOT_IN, PHASES, Fault

_IN_TRAINING = [phase for phase in PHASES if phase not in (*ANY_NEWER, "evaluation")]
"""The phases that every training goes through."""
_FORM = "must be KIND:STEP, KIND:STEP:PHASE or KIND:STEP:PHASE:RANK"


def parse(text: str) -> Fault:
    """Parse a fault such as `kill:7`, `hang:12:backward`, `term:20:fence:1`, `kill:9:update:*`.

    Raises:
        Refusal: the text is not a fault; the message says what is allowed.
    """
    parts = text.split(":")
    if not 2 <= len(parts) <= 4:
        raise Refusal(f"--fault {text}: {_FORM}")
    kind, step, phase, rank = (*parts, *("forward", "0")[len(parts) - 2 :])
    known_kind(f"--fault {text}", kind)
    if not step.isdecimal() or int(step) < 1:
        raise Refusal(f"--fault {text}: step {step!r} is no number of 1 or more; {_FORM}")
    if phase not in PHASES:
        raise Refusal(f"--fault {text}: no phase {phase!r}; must be one of {', '.join(PHASES)}")
    if kind in NOT_IN.get(phase, ()):
        raise Refusal(f"--fault {text}: {kind} is no fault of a {phase}")
    if rank != "*" and not rank.isdecimal():
        raise Refusal(f"--fault {text}: rank {rank!r} is no number and not * (every rank)")
    return Fault(kind, int(step), phase, None if rank == "*" else int(rank))


def known_kind(where: str, kind: str) -> str:
    """Return the kind of fault, which must be known.

    Raises:
        Refusal: there is no kind of that name.
    """
    if kind not in KINDS:
        raise Refusal(f"{where}: no fault {kind!r}; must be one of {', '.join(KINDS)}")
    return kind


def draw(seed: int, kinds: Sequence[str], steps: int, world: int) -> list[Fault]:
    """Draw one fault of each kind: order, step, phase and rank come from the seed.

    Each has a part of the run to itself, so that its consequences can be told from the next one's.

    Args:
        seed: the same seed gives the same faults.
        kinds: the kinds of fault; one may come several times.
        steps: number of steps of the run.
        world: number of ranks.

    Raises:
        Refusal: there are not two steps for each fault.
    """
    # The first step has no snapshot before it, and nothing follows the last.
    room = steps - 2
    if room < 2 * len(kinds):
        raise Refusal(
            f"{len(kinds)} faults in a run of {steps} steps: at least {2 * len(kinds) + 2} are"
            " needed; train longer, or choose fewer with --kinds"
        )
    dice = random.Random(seed)
    order = list(kinds)
    dice.shuffle(order)
    faults = []
    for i, kind in enumerate(order):
        first, end = 2 + room * i // len(order), 2 + room * (i + 1) // len(order)
        step = dice.randrange(first, end - 1)
        faults.append(Fault(kind, step, dice.choice(_IN_TRAINING), dice.randrange(world)))
    return faults


def check(faults: Sequence[Fault], steps: int, world: int) -> None:
    """Refuse faults that cannot happen in a run of so many steps and ranks.

    Raises:
        Refusal: the message says which fault, and what steps or ranks there are.
    """
    for fault in faults:
        if fault.step > steps:
            raise Refusal(f"{spelled(fault)}: the training has only {steps} steps")
        if fault.rank is not None and fault.rank >= world:
            raise Refusal(f"{spelled(fault)}: the training has only ranks 0 to {world - 1}")


def spelled(fault: Fault) -> str:
    """Return the fault as text that `parse` takes."""
    rank = "*" if fault.rank is None else fault.rank
    return f"{fault.kind}:{fault.step}:{fault.phase}:{rank}"
