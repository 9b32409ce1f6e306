"""`lightck chaos`: inject faults into a training, and report what each of them cost."""

from __future__ import annotations

import argparse
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightck.cli.arguments import add_folder, run_folder
from lightck.cli.chaos import plan
from lightck.cli.chaos.runner import Event, Job, Run, TimeLimits, network_refusal
from lightck.cli.chaos.verdict import (
    differences,
    differing_losses,
    missing_losses,
    replacements,
    restarts,
    rows,
    unseeded,
)
from lightck.cli.output import (
    BAD_DATA,
    OK,
    USAGE,
    Refusal,
    print_json,
    progress,
    table,
    teller,
)
from lightck.failure.fault_plan import KINDS, PHASES, Fault


def _listed(names: dict[str, str]) -> str:
    width = max(map(len, names))
    return "\n".join(f"  {name.ljust(width)}  {meaning}" for name, meaning in names.items())


DESCRIPTION = f"""\
Run your training command twice, on one machine: undisturbed, then with faults, started again after
each one that ends it. Then show what every fault cost, and whether the state and the losses at the
end are the undisturbed run's, bit for bit.

The command, plain or torchrun, calls lightck.restore and lightck.attach as always, seeds the random
generators that it draws from, and must end by itself after a few dozen steps. Its snapshots must go
where it is told: {{path}} in its arguments is replaced, and $LIGHTCK_PATH is set. If it appends a
line with its loss at every step to the file $LIGHTCK_CHAOS_LOSSES (`rank step loss`, in one write;
the loss as exact as it can be, say float.hex), losses are compared too. Other settings come from
the environment as usual: LIGHTCK_FAILURE=off shows what is left without just-in-time snapshots.
Without a command a small GPT is trained.

What an extra keeps under the key `clock` may differ: times are those of the run.

A loop counts its steps by handle.step, and after restore makes up for what it does between the end
of a step and the next forward (schedulers, counters): a just-in-time snapshot may come before that.

A fault is KIND:STEP[:PHASE[:RANK]]; PHASE is forward and RANK 0 unless given; RANK * is every rank.

kinds:
{_listed(KINDS)}

phases:
{_listed(PHASES)}

columns of the report, seconds from the fault:
  DETECTED   until lightck noticed, or else the process had ended, and by what
  SAVED      newest step of the just-in-time snapshots
  RESUMED    the step it went on from after a restart; `in place`: the lost rank alone
             (lightck run), which repeats what is LOST
  LOST       steps and seconds of work that had to be done again
  RECOVERED  until the first step had ended after it, start-up and imports included
  AS BEFORE  the losses from there to the next fault are the undisturbed run's

The status is 1 if the runs differ, 2 if they agree and a fault of --fault did nothing."""
EXAMPLES = """\
  lightck chaos
  lightck chaos --ranks 2 --kinds kill,term,hang --seed 7
  lightck chaos -- python train.py --steps 40
  lightck chaos --fault kill:12:backward --fault term:20:update -- python train.py --out {path}
  lightck chaos --fault 'kill:15:allreduce:1' -- torchrun --nproc-per-node 2 train.py
  lightck chaos --fault 'term:9:forward:*' -- torchrun --nproc-per-node 2 --max-restarts 3 train.py
  LIGHTCK_FAILURE=off LIGHTCK_POLICY=10 lightck chaos --fault kill:17 -- python train.py
"""


_STEPS = 40
_NOT_COME = """\
did not come: training was never there in that step, on that rank. restore and save come only behind
another fault, evaluation only where there is a forward without gradients after the step"""

_NO_LOSSES = """\
AS BEFORE is ?: the training writes no losses to $LIGHTCK_CHAOS_LOSSES (lightck chaos --help), so
that only the states at the end were compared"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    defaults = TimeLimits()
    parser.usage = "lightck chaos [options] [-- COMMAND ...]"
    parser.add_argument("command", nargs="*", metavar="COMMAND", help="after --")
    parser.add_argument(
        "--fault", action="append", metavar="F", help="one that comes there; any number of times"
    )
    parser.add_argument(
        "--kinds",
        metavar="K,K",
        help="without --fault: one of each of these, at random places; default: every kind",
    )
    parser.add_argument("--seed", type=int, metavar="S", help="of the places; default: random")
    parser.add_argument(
        "--ranks", type=int, metavar="N", help="of the built-in training; default: 1"
    )
    parser.add_argument(
        "--steps", type=int, metavar="N", help=f"of the built-in training; default: {_STEPS}"
    )
    for name, value, what in [
        ("hold", defaults.hold_s, "seconds of a fault that passes"),
        ("patience", defaults.patience_s, "seconds after which a hanging job is ended"),
        ("quiet", defaults.quiet_s, "seconds without a word after which a job is ended"),
    ]:
        text = f"{what}; default: {value:.0f}"
        parser.add_argument(f"--{name}", type=float, default=value, metavar="S", help=text)
    add_folder(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run the command; return the exit status."""
    command = _command(arguments)
    limits = TimeLimits(arguments.hold, arguments.patience, arguments.quiet)
    for name in ("hold", "patience", "quiet"):
        if not 0 < getattr(arguments, name) < 1e6:
            raise Refusal(f"--{name} {getattr(arguments, name)}: must be seconds, more than 0")
    seed = secrets.randbits(31) if arguments.seed is None else arguments.seed
    tell = teller(arguments)
    given = [plan.parse(text) for text in arguments.fault or ()]
    kinds = _kinds(arguments, given, tell)
    if not (given or arguments.command):  # refuse before training if the steps are too few
        plan.draw(seed, kinds, arguments.steps or _STEPS, arguments.ranks or 1)
    begin = time.monotonic()
    with run_folder(arguments.path, "chaos") as folder:
        tell(f"lightck chaos: {' '.join(command)}\n")
        reference = _reference(command, folder, limits)
        steps, world = reference.steps(), reference.world()
        seconds = time.monotonic() - begin
        tell(f"undisturbed: {steps} steps on {_ranks(world)}, {seconds:.1f} s with start-up")
        faults = given or plan.draw(seed, kinds, steps, world)
        plan.check(faults, steps, world)
        if not given:
            tell(f"faults by --seed {seed}")
        with _following("with faults", steps) as follow:
            disturbed = Job(command, folder / "chaos", faults, limits, follow).to_the_end()
        document = _document(reference, disturbed, faults, world)
        tell(_report(document))
        if arguments.path is not None:
            tell(f"\nlogs, regions and what the processes printed: {folder}")
    document |= {"seed": None if given else seed, "command": command, "world": world}
    document["seconds"] = time.monotonic() - begin
    tell(f"\n{document['seconds']:.0f} s in all")
    if arguments.json:
        print_json(document)
    if not document["identical"]:
        return BAD_DATA
    return USAGE if given and any(_missed(row) for row in document["faults"]) else OK


def _ranks(world: int) -> str:
    return "1 rank" if world == 1 else f"{world} ranks"


def _command(arguments: argparse.Namespace) -> list[str]:
    """Return the user's command, or that of the built-in training.

    Raises:
        Refusal: options of the built-in training were given with a command.
    """
    command: list[str] = arguments.command
    ranks, steps = arguments.ranks, arguments.steps
    if command:
        for name, value in (("ranks", ranks), ("steps", steps)):
            if value is not None:
                raise Refusal(f"--{name} {value} is for the built-in training, not for a COMMAND")
        return command
    for name, value in (("ranks", ranks), ("steps", steps)):
        if value is not None and value < 1:
            raise Refusal(f"--{name} {value}: must be 1 or more")
    steps = _STEPS if steps is None else steps
    train = ["-m", "lightck.cli.demo.train", "--steps", str(steps), "--seed", "1"]
    several = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return [sys.executable, *(several if (ranks or 1) > 1 else []), *train, "--path", "{path}"]


def _kinds(
    arguments: argparse.Namespace, given: Sequence[Fault], tell: Callable[[str], None]
) -> list[str]:
    """Return the kinds of faults to draw.

    Kinds that this machine cannot do are left out, or refused if they were asked for.

    Raises:
        Refusal: there is no such kind, or it cannot be done here.
    """
    if given and arguments.kinds:
        raise Refusal("--fault and --kinds: faults are either given or drawn")
    asked = arguments.kinds.split(",") if arguments.kinds else []
    kinds = [plan.known_kind(f"--kinds {arguments.kinds}", kind) for kind in asked]
    wanted = kinds or [each.kind for each in given] or list(KINDS)
    if "network" in wanted and (why := network_refusal()) is not None:
        if kinds or given:
            raise Refusal(f"network: no network namespace here: {why}")
        tell(f"SKIPPED: network: no network namespace here: {why}")
        wanted.remove("network")
    return wanted


def _reference(command: Sequence[str], folder: Path, limits: TimeLimits) -> Run:
    """Run the command without faults, and return what it did.

    Raises:
        Refusal: it failed, or did not use the path that it was given.
    """
    with _following("undisturbed", None) as follow:
        job = Job(command, folder / "reference", [], limits, follow)
        run = job.to_the_end()
    paths = {e["path"] for e in run.events if e["event"] == "attaching"}
    if not paths:
        raise Refusal(f"the command never called lightck.attach:\n{job.tail()}")
    if paths != {str(run.region)}:
        raise Refusal(
            f"the command writes its snapshots to {', '.join(sorted(paths))}; let it take the path"
            " from $LIGHTCK_PATH, or write {path} where it is given among its arguments"
        )
    if not run.steps():
        raise Refusal("the command has not trained a single step")
    return run


@contextmanager
def _following(title: str, steps: int | None) -> Iterator[Callable[[Event], object]]:
    """Show a bar over the steps, up to the step of the rank that is ahead.

    Yields the function that takes the run's events.
    """
    furthest = 0
    with progress(f"   {title}", steps or 0, unit="step") as more:

        def follow(event: Event) -> None:
            nonlocal furthest
            if event["event"] == "step" and event["step"] > furthest:
                more(event["step"] - furthest)
                furthest = event["step"]

        yield follow


def _document(
    reference: Run, disturbed: Run, faults: Sequence[Fault], world: int
) -> dict[str, Any]:
    """Return everything that was found."""
    free = unseeded(reference, disturbed)
    step, tensors, differ = differences(reference.region, disturbed.region, world, free)
    differ += differing_losses(reference, disturbed)
    return {
        "identical": not differ,
        "differences": differ,
        "steps": step,
        "tensors_compared": tensors,
        "generators_not_seeded": free,
        "losses_compared": reference.losses.exists(),
        "losses_missing": missing_losses(reference, disturbed),
        "lives": disturbed.lives,
        "replaced": len(replacements(disturbed)),
        "restarts": restarts(disturbed),
        "faults": rows(disturbed, reference, faults),
    }


def _missed(row: dict[str, Any]) -> bool:
    """Tell whether a fault did not come, or came and did nothing."""
    return not row["fired"] or bool(row.get("flipped", {}).get("why")) or bool(row.get("failed"))


def _report(document: dict[str, Any]) -> str:
    headings = ["FAULT", "DETECTED", "SAVED", "RESUMED", "LOST", "RECOVERED", "AS BEFORE"]
    lines = [[row["fault"], *_cells(row)] for row in document["faults"]]
    parts = ["", table(headings, lines)]
    for row in document["faults"]:
        notes = [f"not saved: {row['why']}"] if row.get("why") else []
        notes += row.get("acted", [])
        flipped = row.get("flipped") or {}
        if flipped.get("why"):
            notes.append(f"flipped no bit: {flipped['why']}")
        elif flipped:
            notes.append(f"flipped a bit: {flipped}")
        notes += row.get("failed", [])
        parts += [f"{row['fault']}: {note}" for note in notes]
    if document["replaced"]:
        parts += ["", f"replaced in place: {_ranks(document['replaced'])}; all ranks were restarted"
                  f" {document['restarts']} times"]  # fmt: skip
    if document["generators_not_seeded"]:
        names = ", ".join(document["generators_not_seeded"])
        parts += ["", f"not compared: random generators that the training does not seed: {names}"]
        if not document["identical"]:
            parts += ["if it draws from one, no two runs are alike: seed it (torch.manual_seed)"]
    if any(not row["fired"] for row in document["faults"]):
        parts += ["", _NOT_COME]
    if not document["losses_compared"]:
        parts += ["", _NO_LOSSES]
    if document["losses_missing"]:
        missing = ", ".join(document["losses_missing"][:10])
        parts += ["", f"losses that were never written, of a step that had ended: {missing}"]
    end = f"after step {document['steps']}, {document['tensors_compared']} tensors"
    all_losses = "the losses that were written" if document["losses_missing"] else "all losses"
    end += f" and {all_losses}" if document["losses_compared"] else ""
    if document["identical"]:
        parts += ["", f"IDENTICAL: {end} are the undisturbed run's, bit for bit"]
        missed = sum(map(_missed, document["faults"]))
        if missed:
            parts += [f"{missed} of {len(document['faults'])} faults did nothing"]
    else:
        shown = document["differences"][:10]
        more = len(document["differences"]) - len(shown)
        parts += ["", f"DIFFERENT, {end} compared:", *(f"  {text}" for text in shown)]
        parts += [f"  and {more} more"] if more else []
    return "\n".join(parts)


def _cells(row: dict[str, Any]) -> list[str]:
    if not row["fired"]:
        return ["did not come", "", "", "", "", ""]
    detected = _seconds(row["detected_s"])
    by = f" ({row['detected_by']})" if row["detected_by"] else ""
    lost = f"{row['lost_steps']} steps, {_seconds(row['lost_s'])}" if row["ended"] else "nothing"
    return [
        f"{detected}{by}",
        "-" if row["saved"] is None else str(row["saved"]),
        _resumed(row),
        lost,
        _seconds(row["recovered_s"]),
        {None: "?", True: "yes", False: "NO"}[row["identical"]],
    ]


def _resumed(row: dict[str, Any]) -> str:
    if row["resumed"] is None:
        return "-"
    return f"{row['resumed']}{' in place' if row['replaced'] else ''}"


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} s"
