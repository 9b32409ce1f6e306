"""Render what the proofs showed (build/proof/*.json) into docs/proof.md, between its markers.

    python -m tests.support.proof_table          take the last run's numbers into proof.json, render
    python -m tests.support.proof_table --check  say whether docs/proof.md is as it renders

Numbers are never typed by hand: a program that proves something writes its own file, this one sets
them in tables. A subject that the last run did not touch keeps the numbers of the run before.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from .proof import FOLDER

ROOT = Path(__file__).parents[2]
STORED = ROOT / "tests" / "data" / "proof.json"
DOCUMENT = ROOT / "docs" / "proof.md"
BEGIN, END = "<!-- {}:begin -->", "<!-- {}:end -->"

Numbers = Mapping[str, Any]


def table(head: Iterable[object], rows: Iterable[Iterable[object]]) -> list[str]:
    """Lines of a Markdown table; integers get thousands separators."""
    lines = [list(head), *(list(row) for row in rows)]
    text = [
        [f"{cell:,}" if isinstance(cell, int) else str(cell) for cell in line] for line in lines
    ]
    text.insert(1, ["---"] * len(text[0]))
    return ["| " + " | ".join(line) + " |" for line in text] + [""]


def crash(proof: Numbers, soak: Numbers) -> list[str]:
    """Images per medium and protocol step, and the mutants."""
    soaked = [cell for found in soak["media"].values() for cell in found["steps"].values()]
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
        f"The last `make soak`: {soak['images']:,} images,"
        f" {sum(cell['bad'] + cell['bad_unsummed'] for cell in soaked)} bad.",
        f"Mistakes made on purpose in the order of stores: {len(mutants)}, caught: {caught}.",
        "",
    ]


def order(proof: Numbers) -> list[str]:
    """Render what the release build's instructions did, per copy kernel."""
    columns = ["instructions", "stores", "nt_stores", "flushes", "fences", "undecoded"]
    rows = [
        [
            kernel,
            *(seen[column] for column in columns),
            "yes" if seen["same_order_as_shim"] else "NO",
            seen["images"],
            seen["bad"] + seen["bad_unsummed"],
        ]
        for kernel, seen in proof["kernels"].items()
    ]
    head = ["kernel", *columns, "order as traced", "images", "bad"]
    found = sum(mutant["found_out"] for mutant in proof["mutants"])
    return [
        "The release build, instruction by instruction (single steps; one commit on every kernel",
        "that this CPU has), against the trace that the images above come from:",
        "",
        *table([name.replace("_", " ") for name in head], rows),
        f"Mistakes made on purpose in instructions: {len(proof['mutants'])}, found out: {found}.",
        f"Never run: {', '.join(proof['not_run'])}.",
        "",
    ]


def python_images(proof: Numbers) -> list[str]:
    """Images of a real training job, restored by the whole package."""
    seen = proof["by_medium"].items()
    media = ", ".join(f"{medium} {found['images']:,}" for medium, found in seen)
    return [
        f"Images of real training, restored through Python and compared tensor by tensor:"
        f" {proof['images']:,} ({media}), bad: {proof['bad']}.",
        "",
    ]


def kill(proof: Numbers, native: Numbers) -> list[str]:
    """SIGKILL at random instants."""
    cycles = proof["cycles"] | native["cycles"]
    losses = proof["losses"] + native["losses"]
    return [
        "SIGKILL at random instants, each recovery compared with the golden trajectory:",
        "",
        *table(["killed on", *cycles, "losses"], [["cycles", *cycles.values(), losses]]),
        f"Two trainers racing for one region: {proof['races']} rounds, one owner and one told loser"
        " in each; the owner is killed, the other takes over.",
        "",
    ]


def damage(flips: Numbers, hypothesis: Numbers, fuzzer: Numbers) -> list[str]:
    """Bits flipped, and hostile bytes."""
    columns = ["tried", "detected", "harmless", "silently_wrong"]
    return [
        "Bits flipped in whole regions (harmless: in bytes that nothing reads):",
        "",
        *table([name.replace("_", " ") for name in columns], [[flips[c] for c in columns]]),
        f"Hostile regions with checksums made right: {hypothesis['hypothesis_examples']:,} by"
        f" hypothesis, {fuzzer['libfuzzer_executions']:,} by a coverage-guided fuzzer in its last"
        f" run; crashes: {hypothesis['crashes'] + fuzzer['crashes']}.",
        "",
    ]


def media(proof: Numbers) -> list[str]:
    """System calls and accesses that fail."""
    return [
        f"{proof['calls']} system calls on the medium failed at each of their calls, with"
        f" {proof['errnos']} errnos: {proof['cases']:,} cases; SIGBUS at each of"
        f" {proof['accesses_with_sigbus']} accesses; processes that died of it:"
        f" {proof['process_deaths']}.",
        "",
    ]


def guest(proof: Numbers) -> list[str]:
    """Render what a machine with emulated persistent memory showed."""
    columns = ["job", "medium", "granularity", "says_survives", "killed", "expected"]
    rows = [
        [
            *(job[column] or "-" for column in columns),
            f"{job['acknowledged']} / {job['recovered'] or 'nothing'}",
            "as expected" if job["passed"] else "FAILED",
        ]
        for job in proof["jobs"]
    ]
    head = ["job", "medium", "granularity", "says it survives", "what happened", "expected"]
    return [
        f"A Linux {proof['kernel']} in QEMU {proof['qemu']} with an emulated NVDIMM and CXL:",
        "",
        *table([*head, "acknowledged / recovered", "result"], rows),
        f"Images taken from the running machine and recovered outside: {proof['snapshots']},"
        f" bad: {proof['snapshots_bad']}.",
        "",
    ]


PLACES = ("forward", "backward", "allreduce", "fence", "commit", "update", "between", "evaluation")
PLACES += ("first", "twice", "last", "restore", "save")
ENDING, WHOM = ("kill", "exception", "term", "hang"), ("one", "next", "all")


def faults(proofs: Mapping[str, Numbers]) -> list[str]:
    """Render what each kind of fault cost in each place, in steps.

    Runs are `faults KIND POLICY PART`.
    """
    lost: dict[tuple[str, ...], dict[str, int]] = {}
    runs = [(name.split(), seen) for name, seen in proofs.items() if name.startswith("faults ")]
    for (_, kind, policy, _), seen in runs:
        lost.setdefault((kind, policy), {}).update(seen["lost"])

    def cell(kind: str, where: str) -> str:
        both = [lost.get((kind, policy), {}).get(where) for policy in ("off", "every")]
        said = [str(steps) for steps in dict.fromkeys(both) if steps is not None]
        return " / ".join(said) or "-"

    columns = [(kind, whom) for kind in ENDING for whom in WHOM]
    rows = [[place, *(cell(kind, f"{place} {whom}") for kind, whom in columns)] for place in PLACES]
    noticed = [
        f"{kind} {statistics.median(times):.2f} s, {max(times):.2f} at most"
        for kind in ENDING
        if (times := [t for (_, of, _, _), seen in runs if of == kind for t in seen["noticed_s"]])
    ]
    passed = [seen for (_, kind, _, _), seen in runs if kind == "passing"]
    waited = [seen["lost"][cell] for seen in passed for cell in seen["lost"] if "save" not in cell]
    count, saved = (sum(seen[name] for _, seen in runs) for name in ("faults", "saved"))
    return [
        *table(["steps lost", *(" ".join(each) for each in columns)], rows),
        f"Noticed after (median): {'; '.join(noticed)}.",
        f"Faults in all: {count}, saved just in time: {saved}, every trajectory golden. Of them",
        "such as pass (stop, gil, slow, full, network), in the same places:"
        f" {sum(seen['faults'] for seen in passed)}, steps lost: {sum(waited)}.",
        "",
        *frozen(proofs),
    ]


FROZEN = ("forward", "backward", "fence", "half", "updated", "step-end", "loop")


def frozen(proofs: Mapping[str, Numbers]) -> list[str]:
    """Render what a rank costs that stands still for good, in steps, by where it stands.

    Runs are `frozen PLACE`, and `frozen-anywhere` at random instants.
    """
    lost = [str(proofs.get(f"frozen {place}", {}).get("lost", "-")) for place in FROZEN]
    heads = ["half an update" if place == "half" else place.replace("-", " ") for place in FROZEN]
    stops = proofs.get("frozen-anywhere", {}).get("stops", 0)
    anywhere = [
        f"At random instants: {stops} stops, each back at what was saved whole, golden.",
        "",
    ]
    return [
        *table(["one of two ranks stands still for good in", *heads], [["steps lost", *lost]]),
        *(anywhere if stops else []),
    ]


RENDERERS: dict[str, tuple[Callable[..., list[str]], tuple[str, ...]]] = {
    "crash images": (crash, ("crash", "crash-soak")),
    "instructions": (order, ("order",)),
    "training": (python_images, ("python_images",)),
    "kills": (kill, ("kill", "kill-native")),
    "damage": (damage, ("flips", "fuzz", "fuzz-native")),
    "media": (media, ("media",)),
    "guest": (guest, ("guest",)),
}
"""These functions draw the parts, each from these subjects."""


def render(proofs: Mapping[str, Numbers]) -> dict[str, str]:
    """The text between each pair of markers."""
    lines = []
    for draw, subjects in RENDERERS.values():
        lines += draw(*(proofs[subject] for subject in subjects))
    return {"proof": "\n".join(lines), "faults": "\n".join(faults(proofs))}


def replaced(document: str, texts: Mapping[str, str]) -> str:
    """The document with what stands between the markers replaced."""
    for name, text in texts.items():
        begin, end = BEGIN.format(name), END.format(name)
        head, _, rest = document.partition(begin)
        _, found, tail = rest.partition(end)
        if not found:
            raise ValueError(f"no {begin} ... {end} in {DOCUMENT}: put the markers back")
        document = f"{head}{begin}\n\n{text}{end}{tail}"
    return document


def main() -> int:
    """Exit 0 when the document is up to date, or has been brought up to date."""
    parser = argparse.ArgumentParser(prog="python tests/proof_table.py", description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if stale")
    check = parser.parse_args().check
    proofs: dict[str, Numbers] = json.loads(STORED.read_text()) if STORED.exists() else {}
    if not check:
        proofs |= {path.stem: json.loads(path.read_text()) for path in FOLDER.glob("*.json")}
        STORED.write_text(json.dumps(proofs, indent=1) + "\n")
    now = DOCUMENT.read_text()
    wanted = replaced(now, render(proofs))
    if check:
        return int(now != wanted)
    DOCUMENT.write_text(wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main())
