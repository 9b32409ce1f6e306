"""Render what the proofs showed (build/proof/*.json) into DESIGN.md, between its two markers.

    python tests/proof_table.py          take the last run's numbers into tests/proof.json, render
    python tests/proof_table.py --check  say whether DESIGN.md is what tests/proof.json renders to

Numbers are never typed by hand: a program that proves something writes its own file, this one sets
them in tables. A subject that the last run did not touch keeps the numbers of the run before.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from proof import FOLDER

ROOT = Path(__file__).parent.parent
STORED = Path(__file__).parent / "proof.json"
DOCUMENT = ROOT / "DESIGN.md"
BEGIN, END = "<!-- proof:begin -->", "<!-- proof:end -->"

Numbers = Mapping[str, Any]


def table(head: Iterable[object], rows: Iterable[Iterable[object]]) -> list[str]:
    """Lines of a Markdown table; integers get thousands separators."""
    lines = [list(head), *(list(row) for row in rows)]
    text = [
        [f"{cell:,}" if isinstance(cell, int) else str(cell) for cell in line] for line in lines
    ]
    text.insert(1, ["---"] * len(text[0]))
    return ["| " + " | ".join(line) + " |" for line in text] + [""]


def crash(proof: Numbers) -> list[str]:
    """Images per medium and protocol step, and the mutants."""
    media: Mapping[str, Any] = proof["media"]
    steps = list(next(iter(media.values()))["steps"])
    rows = []
    for medium, found in media.items():
        cells = [found["steps"][step] for step in steps]
        counts = [cell["images"] for cell in cells]
        bad = sum(cell["bad"] for cell in cells)
        unsummed = sum(cell["bad_unsummed"] for cell in cells)
        rows.append([medium, *counts, sum(counts), bad, unsummed])
    mutants = proof["mutants"]
    caught = sum(mutant["caught"] for mutant in mutants)
    return [
        f"Crash images, {proof['images']:,} in {proof['seconds']:.0f} s, by medium and by the step",
        "of the protocol in which the machine stops (`bad`: with checksums; `unsummed`: payload",
        "checksums ignored):",
        "",
        *table(["medium", *steps, "all", "bad", "unsummed"], rows),
        f"Mistakes made on purpose in the order of stores: {len(mutants)}, caught: {caught}.",
        "",
    ]


RENDERERS = {"crash": crash}


def render(proofs: Mapping[str, Numbers]) -> str:
    """The text between the markers."""
    lines = [line for subject, draw in RENDERERS.items() for line in draw(proofs[subject])]
    return "\n".join([BEGIN, "", *lines]) + END


def replaced(document: str, text: str) -> str:
    """The document with what stands between the markers replaced."""
    head, _, rest = document.partition(BEGIN)
    _, found, tail = rest.partition(END)
    if not found:
        raise ValueError(f"no {BEGIN} ... {END} in {DOCUMENT}: put the markers back")
    return head + text + tail


def main() -> int:
    """Exit 0 when the document is up to date, or has been brought up to date."""
    parser = argparse.ArgumentParser(prog="python tests/proof_table.py", description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if stale")
    check = parser.parse_args().check
    proofs: dict[str, Numbers] = json.loads(STORED.read_text()) if STORED.exists() else {}
    if not check:
        proofs |= {path.stem: json.loads(path.read_text()) for path in FOLDER.glob("*.json")}
        STORED.write_text(json.dumps(proofs, indent=1, sort_keys=True) + "\n")
    now = DOCUMENT.read_text()
    wanted = replaced(now, render(proofs))
    if check:
        return int(now != wanted)
    DOCUMENT.write_text(wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main())
