"""Each fault in each phase, on one rank, on both and twice in a row, in two ranks under torchrun.

Whatever comes where: every loss and the end are the undisturbed run's, bit for bit. What it costs
goes into docs/proof.md's table.
"""

from __future__ import annotations

import pytest

from lightck.cli.chaos import plan as chaos_plan
from lightck.cli.chaos.runner import network_refusal
from lightck.failure.fault_plan import NOT_IN
from support.e2e.chaos_runs import NEVER, TRAINER, TWO, chaos, faults
from support.proof import record

PARTS = {
    "before": ["forward", "backward"],
    "sums": ["allreduce", "fence"],
    "update": ["commit", "update"],
    "behind": ["between", "evaluation"],
    "edges": [],
}
ENDING = ["kill", "exception", "term", "hang"]
PASSING = ["stop", "gil", "slow", "full", "network"]
OFF, EVERY = "off", "every"
"""Periodic snapshots are off, or every step has one."""

OLDER = {
    # no rank has a step that is whole
    "exception commit all", "exception update all", "hang commit all", "hang update all",
    # the thread that saves hangs with the lock of what is saved, and the other rank has ended
    "hang save one", "hang save all",
}  # fmt: skip
"""The newest snapshot counts here if no step is due; also where all ranks are killed."""

Plan = list[tuple[str, str]]
"""Faults in their order: the cell of the table that each belongs to, and how it is spelled."""


def phases(kind: str, policy: str, names: list[str]) -> Plan:
    """Plan a fault on one rank, on the other two steps later, and on both.

    A life has trained two steps when the first one comes, and the other rank's comes in the second
    step of the life that follows. With every step due there is no other.
    """
    found = []
    for i, name in enumerate(names):
        step = 4 + 12 * i
        places = [("one", step, "1"), ("next", step + 2, "0"), ("all", step + 6, "*")]
        if policy == EVERY:
            places = [("one", step, str(i % 2)), places[2]]
        found += [(f"{name} {who}", f"{kind}:{t}:{name}:{rank}") for who, t, rank in places]
    return found


def edges(kind: str, at: int = 0) -> Plan:
    """Plan faults in the first step, the last one, twice in a row, and where nothing is trained.

    All but the first are behind step `at`; before each that needs one comes what ends a life.
    """
    found = [
        ("first all", f"{kind}:1:forward:*"),
        ("first one", f"{kind}:1:backward:0"),
        ("twice one", f"{kind}:{at + 4}:backward:1"),
        ("twice one", f"{kind}:{at + 4}:backward:1"),
        ("twice all", f"{kind}:{at + 9}:backward:*"),
        ("twice all", f"{kind}:{at + 9}:backward:*"),
    ]
    if kind not in NOT_IN["restore"]:
        found += [
            ("", f"kill:{at + 14}:backward:1"),
            ("restore one", f"{kind}:{at + 12}:restore:0"),
            ("", f"kill:{at + 20}:backward:0"),
            ("restore all", f"{kind}:{at + 18}:restore:*"),
        ]
    if kind not in NOT_IN["save"]:
        found += [
            ("", f"term:{at + 26}:forward:1"),
            ("save one", f"{kind}:{at + 25}:save:0"),
            ("", f"term:{at + 32}:forward:*"),
            ("save all", f"{kind}:{at + 31}:save:*"),
        ]
    return [
        *found,
        ("last one", f"{kind}:{at + 40}:backward:1"),
        ("last all", f"{kind}:{at + 40}:between:*"),
        ("last one", f"{kind}:{at + 40}:evaluation:0"),
    ]


def passing(kinds: list[str], policy: str) -> Plan:
    """Each of these kinds in each phase, on one rank and on both, and the edges of all together."""
    plan, step = [("first all", f"{kind}:1:forward:*") for kind in kinds], 0
    for kind in kinds:
        for i, name in enumerate(sum(PARTS.values(), [])):
            step += 2
            places = [("one", step, str(i % 2)), ("all", step + 1, "*")]
            plan += [(f"{name} {who}", f"{kind}:{t}:{name}:{rank}") for who, t, rank in places]
    at, last = step, step + 40
    plan += 2 * [("twice all", f"{kind}:{at + 4}:backward:*") for kind in kinds]
    if policy == OFF:
        restores = [kind for kind in kinds if kind not in NOT_IN["restore"]]
        plan += [("", f"kill:{at + 10}:backward:1")]
        plan += [("restore one", f"{kind}:{at + 8}:restore:0") for kind in restores]
        plan += [("", f"kill:{at + 16}:backward:0")]
        plan += [("restore all", f"{kind}:{at + 14}:restore:*") for kind in restores]
        plan += [("", f"term:{at + 22}:forward:1")]
        plan += [("save one", f"{kind}:{at + 21}:save:0") for kind in kinds]
        plan += [("", f"term:{at + 28}:forward:*")]
        plan += [("save all", f"{kind}:{at + 27}:save:*") for kind in kinds]
    return plan + [("last all", f"{kind}:{last}:between:*") for kind in kinds]


def run(kind: str, policy: str, part: str, plan: Plan) -> dict[str, int]:
    """Run a plan, golden throughout, and return what each cell has cost."""
    last = max(chaos_plan.parse(text).step for _, text in plan) + 1
    # A hang ends the job by itself, the rank that hangs first.
    hangs = kind == "hang"
    patience, limits = ("40", ["--hang-s=5", "--hang-exit-s=2"]) if hangs else ("8", ["--hang-s=2"])
    words = ["--hold", "0.2", "--patience", patience, *faults(*(text for _, text in plan))]
    # Torchrun starts its workers again by itself, unless it is ended.
    command = [*TWO, f"--max-restarts={2 * len(plan)}", *TRAINER[1:], "--steps", str(last)]
    command += ["--evaluates", *limits, f"--policy={NEVER if policy == OFF else 1}"]
    document = chaos(*words, "--", *command, LIGHTCK_FAILURE="jit")
    assert document["world"] == 2 and document["identical"], document["differences"]
    rows = document["faults"]
    lost: dict[str, int] = {}
    for (cell, _), row in zip(plan, rows, strict=True):
        print(f"{cell:15} {row}")
        if cell:
            lost[cell] = max(lost.get(cell, 0), row["lost_steps"])
    missed = [row["fault"] for row in rows if not row["fired"]]
    assert missed == []
    assert [row for row in rows if row["identical"] is False] == []
    own = [row for (cell, _), row in zip(plan, rows, strict=True) if cell]
    noticed = [row["detected_s"] for row in own if row["saved"] is not None and row["detected_s"]]
    record(
        f"faults {kind} {policy} {part}",
        {
            "lost": lost,
            "faults": len(own),
            "ended": sum(row["ended"] for row in own),
            "saved": len(noticed),
            "noticed_s": [round(each, 2) for each in sorted(noticed)],
        },
    )
    return lost


CASES = [(kind, OFF, part) for kind in ENDING for part in PARTS]
CASES += [(kind, EVERY, part) for kind in ENDING for part in PARTS if PARTS[part]]
CASES += [("corrupt", EVERY, part) for part in PARTS if PARTS[part]]


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("kind", "policy", "part"), CASES)
def test_a_fault_that_ends_a_rank(kind: str, policy: str, part: str) -> None:
    """A minibatch is lost; two where training goes on while a signal's save does."""
    plan = phases(kind, policy, PARTS[part]) or edges(kind)
    lost = run(kind, policy, part, plan)
    print(lost)
    if policy == EVERY:
        assert [cell for cell, steps in lost.items() if steps > 4] == []
        return
    older = {cell for cell in lost if kind == "kill" and cell.endswith(" all")}
    older |= {cell for cell in lost if f"{kind} {cell}" in OLDER}
    most = 2 if kind == "term" else 1
    for cell, steps in lost.items():
        assert steps <= most or cell in older, (cell, steps)


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("policy", [OFF, EVERY])
def test_faults_that_pass(policy: str) -> None:
    """All in one job, in lives that nothing else ends but what a restore and a save need."""
    kinds = [*PASSING]
    if (why := network_refusal()) is not None:
        print(f"SKIPPED: no network namespaces: {why}")
        kinds.remove("network")
    plan = passing(kinds, policy)
    lost = run("passing", policy, "all", plan)
    print(lost)
    assert {cell for cell, steps in lost.items() if steps} <= {"save one", "save all"}
