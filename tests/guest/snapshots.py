"""Images of the running machine's memory, each a crash: recovered outside, by the host."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from tests.guest.kills import Bench, Case
from tests.guest.machine import GuestError
from tests.guest.verdict import Verdict, disagreement, judge, kept, misread, see

FILESYSTEM_AT = 2 << 20
"""ndctl puts the data of an fsdax namespace with its page structures in memory here."""


def usable() -> str:
    """Return why images cannot be mounted here; empty: they can."""
    if os.geteuid():
        return "not root: images of the running machine cannot be mounted"
    if not list(Path("/dev").glob("loop*")):
        return "no loop devices: images of the running machine cannot be mounted"
    return ""


def running(case: Case, bench: Bench, program: Path) -> Iterator[Verdict]:
    """Take images while the guest commits; one verdict, with the numbers of the last image.

    They are large: each is judged and dropped before the next is taken.
    """
    started = time.monotonic()
    problems: list[str] = []
    with bench.boot(case.hardware, case.setup, "fresh", case.step("write")) as machine:
        machine.until("3 commits", lambda: machine.last(r"COMMITTED (\d+)") >= 3)
        for i in range(bench.images):
            time.sleep(bench.random.uniform(0.02, 0.12))
            machine.freeze()
            machine.catch_up()
            seen = see(machine, "", started)
            image = bench.folder / f"image{i}"
            copy = ["cp", "--sparse=always", str(bench.folder / "nvdimm"), str(image)]
            subprocess.run(copy, check=True)
            machine.thaw()
            number = _recover(image, bench.folder / "mounted", program)
            image.unlink()
            lost = kept(seen.acknowledged, seen.begun, number)
            problems += [f"image {i}: {lost}"] if lost else []
    seen = replace(seen, killed=f"{bench.images} images of the running machine")
    reasons = (misread(seen.said, case.medium), disagreement(seen.said, True, "; ".join(problems)))
    verdict = judge(case.job, seen, number, "nothing acknowledged is lost", *problems, *reasons)
    yield replace(verdict, images=bench.images, bad_images=len(problems))


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
