"""`lightck health`: show what this machine tells of failures to come; train a model of drives."""

from __future__ import annotations

import argparse
import math
import threading
from pathlib import Path
from typing import Any

from lightck.cli.arguments import add_path, location
from lightck.cli.atomic_file import replaced
from lightck.cli.output import OK, Refusal, pairs, print_json, progress, span, table
from lightck.health import MachineProbe, UnavailableError, probes
from lightck.policy.symptoms import Symptom, symptom

DESCRIPTION = """\
Read every probe of this machine once: what it reads, what it says now, and what a policy that
watches symptoms would make of it, or why it cannot be read. Growth of a counter is seen by a
running training only. Drives are those under PATH, or under the folder that it is to be made in.

With --fit, train a small model that foretells failures of drives on logs in Backblaze's format
(date, serial_number, failure, smart_N_raw; one line per drive and day) and try it on the last
quarter of the days. OUT holds the weights as JSON; `--drives OUT` reads with it, as
lightck.health.probes(path, drive_model=OUT) does for Auto(watch=...)."""
EXAMPLES = """\
  lightck health
  sudo lightck health /mnt/run               # smartctl and the kernel's log want root
  lightck health --fit logs/*.csv -o drives.json
"""
_PATIENCE_S = 40.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_path(parser)
    parser.add_argument("--drives", type=Path, metavar="MODEL", help="a file that --fit has made")
    parser.add_argument("--fit", type=Path, nargs="+", metavar="CSV", help="logs to train on")
    parser.add_argument(
        "-o", dest="out", type=Path, metavar="OUT", help="the model that --fit makes"
    )
    parser.add_argument("--force", action="store_true", help="replace OUT if it is there")


def run(arguments: argparse.Namespace) -> int:
    """Run the command; return the exit status."""
    if (arguments.fit is None) != (arguments.out is None):
        raise Refusal("--fit and -o belong together: --fit CSV... -o drives.json")
    if arguments.fit is not None and arguments.drives is not None:
        raise Refusal("--drives reads with a model, --fit makes one: give one of them")
    if arguments.fit is not None:
        return _fit(arguments)
    region = Path(location(arguments.path))
    while not region.exists():
        region = region.absolute().parent
    rows = [_read(probe) for probe in probes(region, drive_model=arguments.drives)]
    names = dict.fromkeys(name for row in rows for name in row["symptoms"])
    if arguments.json:
        known = [_plain(symptom(name)) for name in names]
        print_json({"path": region, "probes": rows, "symptoms": known})
        return OK
    for row in rows:
        about = [("reads", row["reads"]), ("says", row["says"])]
        print(f"{row['name']}\n{pairs(about, indent='  ')}")
    lines = [[each.name, _would(each), each.evidence] for each in map(symptom, names)]
    print(f"\n{table(['SYMPTOM', 'WHAT IT WOULD DO', 'BY'], lines, left=2)}")
    return OK


def _read(probe: MachineProbe) -> dict[str, Any]:
    """Read a probe on a thread of its own, for a reading may hang."""
    row: dict[str, Any] = {
        "name": probe.name,
        "reads": probe.reads,
        "symptoms": probe.symptoms,
        "active": {},
        "says": f"gave no answer for {_PATIENCE_S:g} s",
        "available": False,
    }
    told: list[dict[str, Any]] = []

    def read() -> None:
        try:
            found = dict(probe.read())
        except UnavailableError as why:
            told.append({"says": f"cannot be read: {why}"})
        except Exception as error:  # noqa: BLE001 - whatever a vendor's library raises
            told.append({"says": f"fails: {error!r}"})
        else:
            says = probe.detail or "nothing"
            lacks = getattr(probe, "lacks", "")
            told.append(
                {
                    "active": found,
                    "says": f"{says}; without SMART: {lacks}" if lacks else says,
                    "available": True,
                }
            )

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    thread.join(_PATIENCE_S)
    return row | (told[0] if told else {})


def _would(known: Symptom) -> str:
    if known.medium:
        return "warn that the region's medium is at risk"
    held = f"for {span(known.holds_s)}" if known.holds_s else "while it is there"
    return f"reckon with a failure within {span(known.after_s)}, {held}"


def _plain(known: Symptom) -> dict[str, Any]:
    return {
        "name": known.name,
        "after_s": known.after_s,
        "holds_s": known.holds_s if math.isfinite(known.holds_s) else None,
        "medium": known.medium,
        "evidence": known.evidence,
    }


def _fit(arguments: argparse.Namespace) -> int:
    from lightck.health.drive_fit import ALARM_SHARES, fit  # needs torch

    with replaced(arguments.out, force=arguments.force) as draft:
        with progress("logs", len(arguments.fit), unit="file") as more:
            made = fit(arguments.fit, done=more)
        draft.write_text(made.model.as_json())
    recalls = dict(zip(ALARM_SHARES, made.recall, strict=True))
    if arguments.json:
        print_json(
            {
                "file": arguments.out,
                "trained_on": made.model.trained_on,
                "auc": made.auc,
                "recall": [{"alarms": share, "recall": each} for share, each in recalls.items()],
                "rule": {"alarms": made.rule_share, "recall": made.rule_recall},
                "alarm_per_day": made.model.alarm,
            }
        )
        return OK
    print(f"{arguments.out}: {made.model.trained_on}")
    rows = [
        ("AUC", f"{made.auc:.3f}"),
        *((f"alarms on {share:.2%}", f"recall {each:.1%}") for share, each in recalls.items()),
        (f"SMART 5 and 197: {made.rule_share:.2%}", f"recall {made.rule_recall:.1%}"),
    ]
    print(pairs(rows, indent="  "))
    return OK
