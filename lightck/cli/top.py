"""`lightck top`: watch running trainers."""

from __future__ import annotations

import argparse
import os
import select
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from types import FrameType
from typing import Any

from lightck.cli.arguments import add_path, location, no_region
from lightck.cli.output import OK, pairs, print_json, size, span, table
from lightck.watch import ELSEWHERE, ENDED, GONE, NONE, RUNNING, readings

DESCRIPTION = """\
Show how the trainer that writes to PATH is doing, every second until interrupted: the last
committed step and how far behind the training it is, write rates, what the training thread lost to
lightck, slipped, torn and failed snapshots, the last error. Read from the region: the trainer does
not notice.

A trainer is `running`, has `ended` (closed its handle) or is `gone` (killed): its last words stay.
Rates and stalls are those since the last look, with --once since the trainer attached."""
EXAMPLES = """\
  lightck top /dev/shm/run
  lightck top --once --json /dev/shm/run | python3 -c 'import json, sys; \\
      print(json.load(sys.stdin)["regions"][0]["committed"]["step"])'
  lightck top --every 10 /mnt/pmem/run >> progress.log
"""
_QUIET_STEPS = 5
"""A running trainer is marked when its last step ended more than this many step times ago."""
_QUIET_S = 5.0

Row = dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_path(parser)
    parser.add_argument("--once", action="store_true", help="show it once and end")
    parser.add_argument(
        "--every",
        type=_positive,
        default=1.0,
        metavar="S",
        help="seconds between looks; default: 1",
    )


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < 1e6:
        raise ValueError(text)
    return value


def run(arguments: argparse.Namespace) -> int:
    """Run the command; return the exit status. Ctrl-C ends watching and is no error."""
    if arguments.once:
        _print(arguments, _look(arguments.path, {}), "")
        return OK
    with _interruptions() as interrupted, suppress(KeyboardInterrupt):
        _watch(arguments, interrupted)
    if sys.stdout.isatty():
        print()  # the terminal shows ^C on the prompt's line
    return OK


@contextmanager
def _interruptions() -> Iterator[int]:
    """Yield a descriptor that can be read once Ctrl-C was pressed; a second Ctrl-C raises.

    An exception in the middle of reading could be raised inside a finalizer, where Python drops
    it. The second is for output that is stuck.
    """
    interrupted, pressed = os.pipe()

    def tell(number: int, frame: FrameType | None) -> None:
        if select.select([interrupted], [], [], 0)[0]:
            raise KeyboardInterrupt
        os.write(pressed, b".")

    before = signal.signal(signal.SIGINT, tell)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, before)
        os.close(interrupted)
        os.close(pressed)


def _watch(arguments: argparse.Namespace, interrupted: int) -> None:
    before: dict[str, Row] = {}
    shown, wait_s = "", 0.0
    while not select.select([interrupted], [], [], wait_s)[0]:
        rows = _look(arguments.path, before)
        shown, wait_s = _print(arguments, rows, shown), arguments.every
        before = {row["file"]: row for row in rows}


def _print(arguments: argparse.Namespace, rows: list[Row], shown: str) -> str:
    """Print the rows in place of the text `shown`; return the text that is shown now."""
    if arguments.json:
        document = {"path": location(arguments.path), "regions": rows}
        print_json(document, indent=2 if arguments.once else None)
        return ""
    text = "\n\n".join(_block(row) for row in rows) if len(rows) < 3 else _table(rows)
    _show(text, shown)
    return text


def _look(path: str | None, before: dict[str, Row]) -> list[Row]:
    rows = readings(path)
    if not rows:
        raise no_region(path)
    for row in rows:
        row["since_s"] = None
        _since(row, before.get(row["file"], {}).get("published"))
    return rows


def _since(row: Row, then: Row | None) -> None:
    """Add rates and stalls since the last reading, if it is still the same trainer."""
    now, same = row["published"], ("process", "began_ns")  # one process may attach again
    if now is None or then is None or any(now[each] != then[each] for each in same):
        return
    elapsed = now["began_s"] - then["began_s"]
    steps = now["step"] - then["step"]
    if elapsed <= 0 or steps <= 0:
        return
    row["since_s"] = elapsed
    now["write_rate"] = (now["bytes_copied"] - then["bytes_copied"]) / elapsed
    lost = {c: s - then["stall_s"].get(c, 0.0) for c, s in now["stall_s"].items()}
    now["stall_s_per_step"] = sum(lost.values()) / steps
    now["step_s"] = elapsed / steps


def _show(text: str, shown: str) -> None:
    """Print, on a terminal over what was printed last; one write, so that nothing flickers."""
    erase = ""
    if shown and sys.stdout.isatty():
        # Ask the terminal, whatever $COLUMNS says: a line that wraps takes two to go back over.
        width = os.get_terminal_size(sys.stdout.fileno()).columns or 80
        above = sum(max(1, -(-len(line) // width)) for line in shown.splitlines())
        erase = f"\x1b[{above}F\x1b[J"  # the cursor stops at the top: a low screen is all erased
    sys.stdout.write(f"{erase}{text}\n")
    sys.stdout.flush()


# ---- one or two regions: a block each ------------------------------------------------------------


def _block(row: Row) -> str:
    of = f" of {row['world']}" if row["world"] > 1 else ""
    head = f"{row['file']}   {datetime.now():%H:%M:%S}"
    lines = [
        ("region", f"rank {row['rank']}{of}, {row['medium']}, survives {row['survives']}"),
        ("trainer", _trainer(row)),
    ]
    said = row["published"]
    if said is not None:
        pace = f", {span(said['step_s'])} per step" if said["step_s"] else ""
        lines += [
            ("step", f"{said['step']}{pace}"),
            ("committed", _committed(row)),
            ("written", _written(row)),
            *_drained(said),
            ("stalls", _stalls(said)),
            ("missed", f"{said['slipped']} slipped, {said['torn']} torn, {said['failed']} failed"),
            ("error", said["last_error"] or "none"),
        ]
    else:
        lines += [("committed", _committed(row)), ("statistics", "none")]
    if row["problem"] and said is not None:
        lines.append(("problem", row["problem"]))
    return f"{head}\n{pairs(lines, '  ')}"


def _trainer(row: Row) -> str:
    said, state = row["published"], row["state"]
    if state == NONE:
        return "none: nobody owns the region"
    if said is None:
        return "running, but tells nothing of itself (an older build, or no step has ended)"
    who = f"process {said['process']}"
    if state == RUNNING:
        late = said["age_s"] > max(_QUIET_S, _QUIET_STEPS * said["step_s"])
        text = f"{who}, running, last step ended {span(said['age_s'])} ago"
        if not said["process_runs"]:
            text += " (not seen from here: in another container?)"
        return text + (" <- unusually long" if late else "")
    if state == ENDED:
        return f"{who} has ended: it closed its handle {span(said['age_s'])} ago"
    if state == GONE:
        return f"{who} is gone without closing (killed?), last step {span(said['age_s'])} ago"
    assert state == ELSEWHERE
    return f"another process than {who}, which closed its handle {span(said['age_s'])} ago"


def _committed(row: Row) -> str:
    there, said = row["committed"], row["published"]
    if there is None:
        return "nothing yet"
    lag = ""
    if said is not None and there["step"] <= said["step"]:
        behind = said["step"] - there["step"]
        lag = ", the last step" if behind == 0 else f", {behind} behind"
    count = f"; {said['committed']} since attach" if said is not None else ""
    text = f"step {there['step']}{lag}, {span(there['age_s'])} ago"
    return f"{text}, {size(there['payload_bytes'])}{count}"


def _written(row: Row) -> str:
    said = row["published"]
    helped = 100 * said["bytes_helped"] / said["bytes_copied"] if said["bytes_copied"] else 0.0
    over = "since attach" if row["since_s"] is None else f"over the last {span(row['since_s'])}"
    return (
        f"{_rate(said['write_rate'])} {over}; {_rate(said['copy_rate'])} while copying,"
        f" {helped:.0f} % by the training thread; commits take {span(said['commit_s'])}"
    )


def _drained(said: Row) -> list[tuple[str, str]]:
    """Return a line where snapshots go through DRAM, none elsewhere."""
    if not said["bytes_drained"]:
        return []
    text = f"{size(said['bytes_drained'])} from DRAM to the medium at {_rate(said['drain_rate'])}"
    return [("drained", f"{text}; {size(said['staging_bytes'])} of DRAM held")]


def _stalls(said: Row) -> str:
    each = 1e3 * said["stall_s_per_step"]
    share = f" ({said['stall_s_per_step'] / said['step_s']:.1%})" if said["step_s"] else ""
    total = sum(said["stall_s"].values())
    causes = sorted(said["stall_s"].items(), key=lambda item: -item[1])
    told = ", ".join(f"{cause} {seconds / total:.0%}" for cause, seconds in causes if total)
    return f"{each:.2f} ms per step{share}" + (f": {told}" if told else "")


def _rate(bytes_per_s: float) -> str:
    if bytes_per_s >= 1 << 30:
        return f"{bytes_per_s / (1 << 30):.1f} GiB/s"
    return f"{size(int(bytes_per_s))}/s"


# ---- many: a table -------------------------------------------------------------------------------


def _table(rows: list[Row]) -> str:
    headings = ["RANK", "TRAINER", "STEP", "COMMITTED", "LAG", "STEP TIME", "WRITES", "STALL"]
    headings += ["SLIPPED", "TORN", "FAILED", "ERROR"]
    lines = []
    for row in rows:
        said, there = row["published"], row["committed"]
        committed = "-" if there is None else str(there["step"])
        if said is None:
            lines.append([str(row["rank"]), row["state"], "-", committed, *["-"] * 7, ""])
            continue
        lag = "-" if there is None else str(max(0, said["step"] - there["step"]))
        lines.append(
            [
                *(str(row["rank"]), row["state"], str(said["step"]), committed, lag),
                span(said["step_s"]),
                _rate(said["write_rate"]),
                f"{1e3 * said['stall_s_per_step']:.2f} ms",
                *(str(said["slipped"]), str(said["torn"]), str(said["failed"])),
                said["last_error"] or "",
            ]
        )
    head = f"{rows[0]['file'].rpartition('/')[0]}, {rows[0]['medium']}, survives"
    text = f"{head} {rows[0]['survives']}   {datetime.now():%H:%M:%S}"
    return f"{text}\n{table(headings, lines, left=2)}"
