"""`lightck plan`: what each policy would cost a job, and what failures would still undo."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lightck.cli.atomic_file import replaced
from lightck.cli.output import OK, Refusal, pairs, print_json, progress, size, table
from lightck.cli.plan_data import (
    PUBLISHED,
    UNSAVED,
    Failures,
    PlannedJob,
    failures_of,
    job_of,
    positive_time,
    ranks_of,
    step_time,
    time_of,
)
from lightck.cli.plan_rows import FALL, Row, played
from lightck.policy import AtSteps, EveryEpochs, OnBest, parse
from lightck.policy.combination import single_policies
from lightck.policy.quantities import in_percent, in_units, to_three_digits
from lightck.policy.simulation import PlayedRun
from lightck.types import Policy

DESCRIPTION = f"""\
Say what each policy would cost a job, and what failures would still undo: policies are played
against failures by the code that decides in training.

The job is that of the run at PATH (its measured step, cost of a snapshot, time to a commit, and the
failures of its earlier lives), or given; what is neither is assumed, and the output says so. Times
are seconds, or 200 ms, 10 min, 12 h, 2 d.

Failures are exponential with --mtbf, the mean time between failures of the whole job (with several
--ranks, of the first of them; more ranks fail more often); in bursts with --bursts; at the times of
a FILE, one per line (seconds, or dates, which count from the earliest), or JSON events with
event_time in days and event_type; or as somebody has published:

{pairs([(name, each.source) for name, each in PUBLISHED.items()], "  ")}

{100 * (1 - UNSAVED):.0f} % of them are saved just in time, at the last complete step, or as many as
the run at PATH has shown; none with --no-jit.

Of each policy: mean time from one snapshot to the next, snapshots per hour, and the shares of the
time that are stall, rework (training undone), restarts, and training that is there at the end
(GOODPUT); by FORMULA, the waste 1 - goodput of that interval to first order; the time that a
failure loses, mean and 95 % of them below. `quality` is played with a loss that falls by
e^-{FALL:g}."""
EXAMPLES = """\
  lightck plan                                      # with assumed numbers
  lightck plan /dev/shm/run                         # a run's own
  lightck plan --step 0.2 --cost 20ms --persist 2s --mtbf 12h
  lightck plan --failures llama3 --policy auto --policy '30 min' --no-jit
  lightck plan --failures rsc-1 --ranks 8,1024,16384,100000 -o ranks.png
  lightck plan --failures times.txt --json | python3 -c 'import json, sys; \\
      print([(row["policy"], row["goodput"]) for row in json.load(sys.stdin)["rows"]])'
"""
_DEFAULT = ("auto", "quality", "3.5 %", "1 step", "10 min", "1 h")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("path", metavar="PATH", nargs="?", help="a run; default: given numbers")
    add = parser.add_argument
    add("--step", dest="step_s", type=step_time, metavar="TIME", help="of one step")
    add("--cost", dest="cost_s", type=time_of, metavar="TIME", help="that one snapshot adds")
    add("--persist", dest="persist_s", type=time_of, metavar="TIME", help="until it is committed")
    add("--restart", dest="restart_s", type=time_of, metavar="TIME", help="failure to training")
    add("--ranks", type=ranks_of, metavar="N[,N...]", help="numbers of ranks, to 100000")
    add("--days", type=_days, metavar="D", help="to play; default: 200 failures, from 30 to 3650")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--mtbf", type=positive_time, metavar="TIME", help="between failures")
    what.add_argument("--failures", metavar="FILE|NAME", help="a trace, or a published rate")
    add("--bursts", action="store_true", help="failures come in bursts")
    add("--seed", type=int, default=7, metavar="N", help="of the failures; default: 7")
    add(
        "--jit",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="failures are saved just in time where they can be",
    )
    add("--policy", action="append", metavar="TEXT", help="instead of the default ones; repeatable")
    add("-o", "--out", metavar="PNG", type=Path, help="draw a picture: png, svg, pdf")
    add("--force", action="store_true", help="replace the picture if it is there")


def _days(text: str) -> float:
    try:
        days = float(text)
    except ValueError:
        days = math.nan
    if not 0 < days < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a number of days above 0")
    return days


def run(arguments: argparse.Namespace) -> int:
    """Run the command; return the exit status."""
    policies = [_playable(text) for text in arguments.policy or _DEFAULT]
    job = job_of(arguments)
    failures = failures_of(arguments, job)
    ranks = arguments.ranks or [failures.ranks]
    if failures.trace and len(ranks) > 1:
        raise Refusal("the times of a trace are those of one number of ranks: give one --ranks")
    with _picture(arguments) as draw:  # a place that cannot be written is told before the play
        with progress("play", len(ranks) * len(policies), unit="policy") as told:
            rows = []
            for count in ranks:
                for policy in policies:
                    rows.append(played(policy, job, failures, count, arguments.days))
                    told(1)
        draw(rows, job)
    if arguments.json:
        print_json(_document(rows, job, failures))
    else:
        print(_told(rows, job, failures))
        if arguments.out is not None:
            print(f"{arguments.out}: {size(arguments.out.stat().st_size)}")
    return OK


def _playable(text: str) -> Policy:
    policy = parse(int(text) if text.strip().isdecimal() else text)
    for each in single_policies(policy):
        if isinstance(each, AtSteps | EveryEpochs | OnBest):
            raise Refusal(f"--policy {text}: a plan has no epochs, metrics or given steps")
    return policy


# ---- output --------------------------------------------------------------------------------------


def _told(rows: Sequence[Row], job: PlannedJob, failures: Failures) -> str:
    several = len({row.ranks for row in rows}) > 1
    costs = job.costs
    names = {"step_s": "step", "cost_s": "snapshot", "persist_s": "commit", "restart_s": "restart"}
    about = [
        (name, f"{in_units(getattr(costs, key)):9} {job.sources[key]}")
        for key, name in names.items()
    ]
    mean = "" if several else f"every {in_units(rows[0].mtbf_s)}: "
    about.append(("failures", f"{mean}{failures.told}"))
    kinds = f"{in_percent(1 - job.unsaved)} of failures" if costs.jit else "no failure"
    about.append(("saved", f"{kinds} just in time"))
    played = {row.ranks: row for row in rows}
    spans = ", ".join(
        f"{in_units(row.outcome.horizon_s)}{f' of {ranks} ranks' if several else ''}"
        for ranks, row in played.items()
    )
    about.append(("played", spans))
    headings = ["RANKS"] * several + ["POLICY", "EVERY", "PER H", "STALL", "REWORK", "RESTART"]
    headings += ["GOODPUT", "1 - GOODPUT", "FORMULA", "LOST", "95 %"]
    headings += ["WRITTEN/DAY"] * (job.state_bytes is not None) + [""]
    lines = [[*([f"{r.ranks:,}"] * several), *_cells(r, job), ""] for r in rows]
    return f"{pairs(about)}\n\n{table(headings, lines, left=1 + several)}"


def _cells(row: Row, job: PlannedJob) -> list[str]:
    outcome, every_s = row.outcome, row.interval_s
    cells = [row.policy]
    cells += [in_units(every_s), to_three_digits(3600 / every_s)] if every_s else ["-", "0"]
    cells += [in_percent(row.share(part)) for part in ("stall_s", "rework_s", "down_s")]
    cells += [f"{100 * outcome.goodput:.2f} %", in_percent(max(0.0, 1 - outcome.goodput))]
    cells.append("-" if row.formula is None else in_percent(row.formula))
    cells += [in_units(value) for value in row.lost] if row.lost else ["-", "-"]
    if job.state_bytes is not None:
        cells.append(size(round(job.state_bytes * 86400 / every_s)) if every_s else "0 B")
    return cells


def _document(rows: Sequence[Row], job: PlannedJob, failures: Failures) -> dict[str, Any]:
    costs = {k: v for k, v in asdict(job.costs).items() if k not in ("loss", "world")}
    return {
        "job": {
            **costs,
            "unsaved": job.unsaved,
            "sources": job.sources,
            "state_bytes": job.state_bytes,
        },
        "failures": failures.told,
        "rows": [_plain(row) for row in rows],
    }


def _plain(row: Row) -> dict[str, Any]:
    outcome = row.outcome
    return {
        "ranks": row.ranks,
        "policy": row.policy,
        "mtbf_s": row.mtbf_s,
        "interval_s": row.interval_s,
        "horizon_s": outcome.horizon_s,
        "goodput": outcome.goodput,
        **{part: row.share(f"{part}_s") for part in ("stall", "rework", "down")},
        "formula": row.formula,
        "progress_waste": _progress_waste(outcome),
        "lost_mean_s": row.lost and row.lost[0],
        "lost_95_s": row.lost and row.lost[1],
        "snapshots": outcome.snapshots,
        "slipped": outcome.slipped,
        "failures": outcome.failures,
    }


def _progress_waste(outcome: PlayedRun) -> float:
    """Return stall and rework as a share, training that was undone priced by the loss's fall."""
    end_s = outcome.horizon_s

    def loss(trained_s: float) -> float:
        return math.exp(-FALL * trained_s / end_s)

    undone = sum(loss(begin) - loss(end) for begin, end in outcome.undone)
    return outcome.stall_s / end_s + undone / (1 - loss(end_s))


@contextmanager
def _picture(
    arguments: argparse.Namespace,
) -> Iterator[Callable[[Sequence[Row], PlannedJob], None]]:
    """Yield what draws the picture, which is in its place afterwards; nothing without -o."""
    if arguments.out is None:
        yield lambda rows, job: None
        return
    try:
        from lightck.cli.plan_plot import SUFFIXES, draw
    except ImportError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        raise Refusal("a picture needs matplotlib: pip install 'lightck[timeline]'") from error
    if arguments.out.suffix not in SUFFIXES:
        raise Refusal(f"{arguments.out}: the suffix must be one of {', '.join(SUFFIXES)}")
    with replaced(arguments.out, force=arguments.force) as draft:
        yield lambda rows, job: draw(rows, job, draft, arguments.out.suffix)
