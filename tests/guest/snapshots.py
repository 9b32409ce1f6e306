"""Images of the running machine's memory, each a crash: recovered outside, by the host."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.guest.kills import Bench, Case
from tests.guest.machine import GuestError
from tests.guest.verdict import Medium, Verdict, disagreement, kept, medium

FILESYSTEM_AT = 2 << 20
"""Where ndctl puts the data of an fsdax namespace with its page structures in memory."""


@dataclass(frozen=True)
class _Shot:
    file: Path
    acknowledged: int
    begun: int


def usable() -> str:
    """Why images cannot be mounted here; empty: they can."""
    if os.geteuid():
        return "not root: images of the running machine cannot be mounted"
    if not list(Path("/dev").glob("loop*")):
        return "no loop devices: images of the running machine cannot be mounted"
    return ""


def running(case: Case, bench: Bench, program: Path) -> Iterator[Verdict]:
    """Take images while the guest commits; one verdict over all of them."""
    started = time.monotonic()
    shots: list[_Shot] = []
    problems: list[str] = []
    with bench.boot(case.hardware, case.setup, "fresh", case.step("write")) as machine:
        machine.until("3 commits", lambda: machine.last(r"COMMITTED (\d+)") >= 3)
        said = medium(machine)
        for i in range(bench.snapshots):
            time.sleep(bench.random.uniform(0.02, 0.12))
            machine.freeze()
            machine.catch_up()
            shot = _Shot(
                bench.folder / f"image{i}",
                machine.last(r"COMMITTED (\d+)"),
                machine.last(r"BEGUN (\d+)"),
            )
            copy = ["cp", "--sparse=always", str(bench.folder / "nvdimm"), str(shot.file)]
            subprocess.run(copy, check=True)
            machine.thaw()
            shots.append(shot)
            # Images are large: each is judged and dropped before the next is taken.
            found = _recover(shot.file, bench.folder / "mounted", program)
            shot.file.unlink()
            lost = kept(shot.acknowledged, shot.begun, found)
            problems += [f"image {i}: {lost}"] if lost else []
    last = shots[-1]
    wrong = "; ".join(problems) or disagreement(said, True, "")
    if said != case.medium:
        wrong = f"taken for {said}, expected {case.medium}"
    yield _row(case, said, last, len(shots), len(problems), wrong, time.monotonic() - started)


def _row(
    case: Case, said: Medium, last: _Shot, images: int, bad: int, wrong: str, seconds: float
) -> Verdict:
    return Verdict(
        case.job,
        said.name,
        said.unit,
        said.survives,
        f"{images} images of the running machine, {bad} bad",
        last.acknowledged,
        last.begun,
        last.acknowledged if not bad else None,
        "nothing acknowledged is lost",
        wrong,
        seconds,
        images=images,
        bad_images=bad,
    )


def _recover(image: Path, folder: Path, program: Path) -> int | None:
    """Mount an image, in a mount namespace that ends with the command, and recover from it."""
    folder.mkdir(exist_ok=True)
    script = 'mount -o loop,offset="$1" "$2" "$3" && exec "$4" verify "$3/region"'
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", script, "sh"]
        + [str(FILESYSTEM_AT), str(image), str(folder), str(program)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    found = re.findall(r"^RECOVERED (\d+|none)$", done.stdout, re.M)
    if done.returncode or not found:
        raise GuestError(
            f"recovery of an image: exit {done.returncode}\n{done.stdout}{done.stderr}"
        )
    return None if found[-1] == "none" else int(found[-1])
