"""`lightck demo`: train, kill, restart, compare with an uninterrupted run, show the cost."""

from __future__ import annotations

import argparse
import os
import random
import re
import secrets
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from lightck.cli.arguments import add_folder, run_folder
from lightck.cli.chaos.verdict import compare
from lightck.cli.output import (
    BAD_DATA,
    OK,
    Refusal,
    print_json,
    progress,
    size,
    table,
    teller,
)
from lightck.examine import check
from lightck.failure.fault_plan import VARIABLE, Fault, write_plan
from lightck.watch import readings

DESCRIPTION = """\
Train a small GPT on the sources of Python's standard library three times over:

 1. without interruption and without lightck, as the reference;
 2. with lightck and a snapshot every step, killed (SIGKILL) in the middle of a step after about a
    third, restored in a new process, killed again after about two thirds, restored again;
 3. then compare every loss and every tensor bit for bit, and show what a snapshot cost the training
    thread beside torch.save.

The training is lightck/cli/demo/train.py, to read and to copy. Needs PyTorch only; takes well under
two minutes on two cores."""
EXAMPLES = """\
  lightck demo
  lightck demo --steps 100 --seed 7
  lightck demo --path /mnt/pmem/demo && lightck inspect /mnt/pmem/demo/region
"""
_FEWEST_STEPS = 9
_PHASES = ("forward", "backward", "fence", "commit", "update")
"""Where in a step the process is killed: one of these, drawn from the seed."""
_SAVES = 9
"""How often torch.save is timed; the median counts."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("--steps", type=int, default=40, metavar="N", help="default: 40")
    parser.add_argument(
        "--seed", type=int, metavar="S", help="of the training and of the kills; default: random"
    )
    add_folder(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run the command; return the exit status."""
    steps: int = arguments.steps
    if steps < _FEWEST_STEPS:
        raise Refusal(f"--steps {steps}: at least {_FEWEST_STEPS}, for two kills")
    seed = secrets.randbits(31) if arguments.seed is None else arguments.seed
    tell = teller(arguments)
    begin = time.monotonic()
    with run_folder(arguments.path, "demo") as folder:
        tell(f"lightck demo: {steps} steps, seed {seed} (repeat with --seed {seed})\n")
        reference, lives = _train(folder, steps, seed, tell)
        tell("\n3. comparison, bit for bit")
        document = _compared(folder, reference, lives, steps)
        tell(_verdict(document))
        document |= _measured(folder)
        tell(_cost(document))
        if arguments.path is not None:
            tell(f"\nlook at the region: lightck ls {folder / 'region'}")
    document |= {"seed": seed, "seconds": time.monotonic() - begin}
    tell(f"\n{document['seconds']:.0f} s in all")
    if arguments.json:
        print_json(document)
    return OK if document["equal"] else BAD_DATA


# ---- training, and killing it --------------------------------------------------------------------


@dataclass
class Life:
    """The record of one training process."""

    began_after: int = 0
    """The step that the process was restored to; 0: it started from the beginning."""
    losses: dict[int, str] = field(default_factory=dict)
    """The loss of each step, exactly, as it was printed."""
    killed: bool = False
    seconds: float = 0.0
    """The time from the start of the process to its end."""

    @property
    def last(self) -> int:
        """Return the last step that the process finished."""
        return max(self.losses, default=self.began_after)


def _train(
    folder: Path, steps: int, seed: int, tell: Callable[[str], None]
) -> tuple[Life, list[Life]]:
    """Train without interruption and without lightck, then with both; return all lives."""
    dice = random.Random(seed)
    kills = [Fault("kill", steps * part // 3 + 1, dice.choice(_PHASES)) for part in (1, 2)]
    write_plan(folder, kills, hold_s=0.0)
    both = ["--steps", str(steps), "--seed", str(seed)]
    # One core is left for the copying thread. The number decides in which order sums are made.
    threads = max(1, min(4, len(os.sched_getaffinity(0)) - 1))
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}

    def life(name: str, words: Sequence[object], **more: str) -> Life:
        with progress(f"   {name}", steps, unit="step") as done:

            def follow(step: int) -> None:
                done(1)
                if step % (steps // 4) == 0 and not sys.stderr.isatty():  # there is no bar
                    tell(f"   {name}: step {step} of {steps}")

            found = live(folder, name, [*both, *map(str, words)], environment | more, follow)
        losses = [*found.losses.values()]
        trained = f"steps {min(found.losses)} to {found.last}" if losses else "no step finished"
        if losses:
            trained += f", loss {float(losses[0]):.4f} to {float(losses[-1]):.4f}"
        start = f"restored step {found.began_after}, " if found.began_after else ""
        tell(f"   {name}: {start}{trained}, {found.seconds:.1f} s with start-up")
        return found

    tell("1. without interruption, without lightck")
    reference = life("reference", ["--without-lightck", "--out", folder / "reference.pt"])
    tell(f"\n2. with lightck, a snapshot every step, in {folder / 'region'}")
    words = ["--path", folder / "region", "--out", folder / "resumed.pt"]
    lives = []
    for number, kill in enumerate(kills, 1):
        # The plan makes the process kill itself there, so that it is never too late.
        lives.append(life(f"process {number}", words, **{VARIABLE: str(folder)}))
        if not lives[-1].killed:
            raise Refusal(f"process {number} ended before its kill in step {kill.step}", BAD_DATA)
        tell(f"      SIGKILL in step {kill.step}: {kill.phase}")
    lives.append(life(f"process {len(kills) + 1}", words))
    return reference, lives


def live(
    folder: Path,
    name: str,
    words: Sequence[str],
    environment: Mapping[str, str],
    on_step: Callable[[int], object],
) -> Life:
    """Run one training process to its end, which may be SIGKILL, and read what it prints.

    Raises:
        Refusal: the process failed; the message has the end of its output.
    """
    found, begin = Life(), time.monotonic()
    command = [sys.executable, "-m", "lightck.cli.demo.train", *words]
    errors = folder / f"{name.replace(' ', '-')}.err"
    with (
        errors.open("wb") as stream,
        subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stream,
            env=environment,
            text=True,
        ) as process,
    ):
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if restored := re.fullmatch(r"goes on after step (\d+)\n", line):
                    found.began_after = int(restored[1])
                elif trained := re.fullmatch(r"step (\d+) loss (\S+)\n", line):
                    found.losses[int(trained[1])] = trained[2]
                    on_step(int(trained[1]))
        finally:
            if process.poll() is None and sys.exc_info()[0] is not None:
                process.kill()
    found.seconds = time.monotonic() - begin
    found.killed = process.returncode == -signal.SIGKILL
    if process.returncode and not found.killed:
        text = errors.read_text(errors="replace").strip()[-4000:]
        raise Refusal(f"the training failed (exit status {process.returncode}):\n{text}", BAD_DATA)
    return found


# ---- the verdict ---------------------------------------------------------------------------------


def _compared(folder: Path, reference: Life, lives: list[Life], steps: int) -> dict[str, Any]:
    """Compare losses, the states at the end, and every byte in the region with its checksum."""
    found = differences(reference, lives, steps)
    resumed, undisturbed = (
        torch.load(folder / f"{name}.pt", weights_only=True) for name in ("resumed", "reference")
    )
    tensors, differing = compare(resumed, undisturbed)
    found += [f"{name} differs at the end" for name in differing]
    sound = [each["state"] for each in check(folder / "region")]
    if not sound or set(sound) != {"good"}:
        found.append(f"snapshots do not verify: {sound}")
    return {
        "equal": not found,
        "differences": found,
        "steps": steps,
        "tensors_compared": tensors,
        "losses_compared": sum(len(life.losses) for life in lives),
        "losses": {step: float(loss) for step, loss in reference.losses.items()},
        "processes": [
            {k: v for k, v in asdict(life).items() if k != "losses"} | {"last_finished": life.last}
            for life in lives
        ],
    }


def differences(reference: Life, lives: Sequence[Life], steps: int) -> list[str]:
    """List how the losses differ from the uninterrupted run's.

    Every loss of every process counts, those of repeated steps as well. The reference itself must
    be whole, and each process after the first must have been restored from a snapshot.
    """
    found = []
    wanted = range(1, steps + 1)
    if sorted(reference.losses) != list(wanted):
        found.append(f"the reference has steps {sorted(reference.losses)}, expected 1 to {steps}")
    missing = set(wanted).difference(*(life.losses for life in lives))
    if missing:
        found.append(f"no process trained steps {sorted(missing)}")
    for number, life in enumerate(lives, 1):
        if number > 1 and not 0 < life.began_after <= lives[number - 2].last:
            found.append(f"process {number} began after step {life.began_after}, not at a snapshot")
        for step, loss in life.losses.items():
            expected = reference.losses.get(step)
            if loss != expected:
                found.append(f"process {number}, step {step}: loss {loss}, expected {expected}")
    return found


def _verdict(document: dict[str, Any]) -> str:
    found = document["differences"]
    if found:
        lines = [*found[:20], f"DIFFERENT: {len(found)} differences"]
    else:
        repeated = document["losses_compared"] - document["steps"]
        kills = sum(each["killed"] for each in document["processes"])
        lines = [
            f"losses   all {document['steps']} equal, and those of {repeated} repeated steps",
            f"tensors  all {document['tensors_compared']} equal (model, optimizer, generator)",
            "region   every byte of its snapshots verified",
            f"EQUAL: killed {kills} times, nothing was lost",
        ]
    return "\n".join(f"   {line}" for line in lines)


# ---- the cost ------------------------------------------------------------------------------------


def _measured(folder: Path) -> dict[str, Any]:
    """Return what the last process tells of its snapshots, and the times of torch.save here."""
    (region,) = readings(folder / "region")
    said = region["published"]
    captured = max(1, said["captured"])
    state = torch.load(folder / "resumed.pt", weights_only=True)
    saves_ms = []
    for _ in range(_SAVES):
        begin = time.perf_counter()
        torch.save(state, folder / "torch-save.pt")
        saves_ms.append(1e3 * (time.perf_counter() - begin))
    (folder / "torch-save.pt").unlink()
    return {
        "region": region,
        "stall_ms_per_snapshot": 1e3 * sum(said["stall_s"].values()) / captured,
        "stall_ms_by_cause": {k: 1e3 * v / captured for k, v in said["stall_s"].items()},
        "torch_save_ms": saves_ms,
    }


def _cost(document: dict[str, Any]) -> str:
    region, saves = document["region"], document["torch_save_ms"]
    said, median = region["published"], statistics.median(saves)
    stall = document["stall_ms_per_snapshot"]
    causes = sorted(document["stall_ms_by_cause"].items(), key=lambda item: -item[1])
    snapshots = f"mean of {said['captured']} snapshots, each {size(said['payload_bytes'])}: "
    spread = f"median of {len(saves)} ({min(saves):.2f} to {max(saves):.2f})"
    rows = [
        ["lightck", f"{stall:.2f} ms", snapshots + ", ".join(f"{c} {ms:.2f}" for c, ms in causes)],
        ["torch.save", f"{median:.2f} ms", f"{spread}, same state and medium, no sync"],
    ]
    lines = [
        *table(["", "WAITS", "MEASURED"], rows).splitlines(),
        f"{stall / median:.2f} of torch.save's time",
        f"a step takes {1e3 * said['step_s']:.2f} ms with its snapshot;"
        f" {said['slipped']} slipped, {said['torn']} torn",
    ]
    where = f"on {region['medium']} (survives {region['survives']})"
    head = f"\n4. what a snapshot costs the training thread, {where}"
    return "\n".join([head, *(f"   {line}" for line in lines)])
