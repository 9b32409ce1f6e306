"""python3 -m tests.guest: run lightck's region code in machines that are killed; `make pmem-guest`.

Every job has an expectation; a job that fails to show it fails the run. One line per kill.
"""

from __future__ import annotations

import argparse
import os
import random
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.guest import image, jobs
from tests.guest.kills import Bench
from tests.guest.machine import GuestError
from tests.guest.verdict import Verdict
from tests.support.proof import record

ROOM_BYTES = 3 << 30
"""The memory of two machines and an image may take this much."""


def main() -> int:
    """Run the chosen jobs; 0 when every one showed what it must."""
    options = _parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    chosen = jobs.choose(options.jobs)
    print(f"guest: {len(chosen)} jobs, seed {options.seed}, kernel ", end="", flush=True)
    booted = image.build(options.kernel, "cloud", options.programs, options.folder)
    print(booted.version, flush=True)
    started = time.monotonic()
    scratch = Path(tempfile.mkdtemp(prefix="lightck-guest-", dir=_roomy(options.folder)))
    try:
        verdicts, failed, skipped = _run_all(options, chosen, booted, scratch)
    finally:
        shutil.rmtree(scratch)
    _write_proof(options, booted, verdicts, skipped)
    bad = [verdict.job for verdict in verdicts if not verdict.passed] + failed
    print(
        f"guest: {len(verdicts)} verdicts, {sum(v.images for v in verdicts)} images,"
        f" {len(bad)} failed, {len(skipped)} skipped, {time.monotonic() - started:.0f} s"
    )
    if bad:
        print(f"FAILED: {' '.join(sorted(set(bad)))}; again with SEED={options.seed}")
    return 1 if bad else 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tests.guest", description=__doc__)
    parser.add_argument(
        "jobs", nargs="*", help="names of jobs, their beginnings, or core; default: all"
    )
    parser.add_argument("--folder", type=Path, required=True, help="for what is built")
    parser.add_argument("--kernel", type=Path, required=True, help="the decode_entry cloud kernel")
    parser.add_argument("--programs", type=Path, nargs="+", required=True, help="for the guest")
    parser.add_argument("--python", required=True, help="with numpy, pyarrow and cffi")
    parser.add_argument("--library", type=Path, required=True, help="what that python loads")
    parser.add_argument("--kills", type=int, default=3, help="of each persistent medium")
    parser.add_argument("--images", type=int, default=30, help="of the running machine")
    parser.add_argument("--seed", type=int, default=None)
    options = parser.parse_args()
    if options.seed is None:
        options.seed = secrets.randbits(32)
    return options


def _roomy(folder: Path) -> Path:
    """Memory for the machines' memory where there is enough, a disk otherwise."""
    shm = Path("/dev/shm")
    if shm.is_dir() and shutil.disk_usage(shm).free > ROOM_BYTES and _available() > ROOM_BYTES:
        return shm
    return folder


def _available() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return 0


def _run_all(
    options: argparse.Namespace, chosen: list[jobs.Job], booted: image.Image, scratch: Path
) -> tuple[list[Verdict], list[str], dict[str, str]]:
    verdicts: list[Verdict] = []
    failed: list[str] = []
    skipped: dict[str, str] = {}

    def run(job: jobs.Job) -> None:
        why = job.unusable(options)
        if why:
            skipped[job.name] = why
            print(f"SKIPPED: guest {job.name}: {why}", flush=True)
            return
        folder = scratch / job.name
        folder.mkdir()
        rng = random.Random(f"{options.seed} {job.name}")
        bench = Bench(booted, folder, rng, options.kills, options.images)
        try:
            for verdict in job.run(bench, options):
                verdicts.append(verdict)
                print(_line(verdict), flush=True)
        except GuestError as error:
            failed.append(job.name)
            print(f"guest {job.name}: FAILED: {error}", flush=True)
        finally:
            shutil.rmtree(folder)

    with ThreadPoolExecutor(max_workers=min(2, os.cpu_count() or 1)) as pool:
        for future in [pool.submit(run, job) for job in chosen]:
            future.result()
    return verdicts, failed, skipped


def _line(verdict: Verdict) -> str:
    found = "nothing" if verdict.recovered is None else verdict.recovered
    return (
        f"guest {verdict.job} ({verdict.medium}, {verdict.granularity}): {verdict.killed};"
        f" {verdict.acknowledged} acknowledged, {verdict.begun} begun, {found} recovered"
        + (f"; FAILED: {verdict.wrong}" if verdict.wrong else f"; ok: {verdict.expected}")
    )


def _write_proof(
    options: argparse.Namespace,
    booted: image.Image,
    verdicts: list[Verdict],
    skipped: dict[str, str],
) -> None:
    qemu = subprocess.run(["qemu-system-x86_64", "--version"], capture_output=True, text=True)
    record(
        "guest",
        {
            "kernel": booted.version,
            "qemu": qemu.stdout.split("version ")[-1].split()[0],
            "seed": options.seed,
            "jobs": [verdict.row() for verdict in sorted(verdicts, key=lambda v: v.job)],
            "snapshots": sum(verdict.images for verdict in verdicts),
            "snapshots_bad": sum(verdict.bad_images for verdict in verdicts),
            "skipped": skipped,
        },
    )


if __name__ == "__main__":
    sys.exit(main())
