"""`lightck demo`: train, kill, restart, compare with an uninterrupted run, show the cost."""

from __future__ import annotations

import argparse
import os
import random
import secrets
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightck.cli.arguments import add_folder, run_folder
from lightck.cli.demo.runner import Kill, Run, Trainer, differences
from lightck.cli.output import BAD_DATA, OK, Refusal, pairs, print_json, progress, size, table
from lightck.examine import check, contents, regions

DESCRIPTION = """\
Train a small GPT on the sources of Python's standard library three times over:

 1. without interruption and without lightck, as the reference;
 2. with lightck and a snapshot every step, killed (SIGKILL) in the middle of a step after about a
    third, restored in a new process, killed again after about two thirds, restored again;
 3. then compare every loss and every tensor bit for bit, and show what a snapshot cost the training
    thread beside torch.save.

Needs PyTorch only; takes well under two minutes on two cores."""
EXAMPLES = """\
  lightck demo
  lightck demo --steps 100 --seed 7
  lightck demo --path /mnt/pmem/demo && lightck inspect /mnt/pmem/demo/region
"""
_FEWEST_STEPS = 9
_LATEST = 3  # steps after which a process waits to be killed, if this one is slow


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
    dice = random.Random(seed)
    kills = [Kill(steps * part // 3, dice.uniform(0.05, 0.95)) for part in (1, 2)]
    say: Callable[..., None] = _nothing if arguments.json else _say
    begin = time.monotonic()
    with run_folder(arguments.path, "demo") as folder:
        say(f"lightck demo: {steps} steps, seed {seed} (repeat with --seed {seed})\n")
        demo = _Demo(folder, steps, seed, say)
        reference = demo.reference()
        runs = demo.interrupted(kills)
        found = differences(reference, runs, steps)
        sound = [each["state"] for each in check(demo.region)]
        if sound.count("good") < len(sound) or not sound:
            found.append(f"snapshots do not verify: {sound}")
        document = demo.document(reference, runs, found)
        say(_verdict(document, runs))
        say(_cost(document))
        if arguments.path is not None:
            say(f"\nlook at the region: lightck ls {demo.region}")
    document["seconds"] = time.monotonic() - begin
    say(f"\n{document['seconds']:.0f} s in all")
    if arguments.json:
        print_json(document)
    return BAD_DATA if found else OK


def _say(text: str) -> None:
    print(text, flush=True)


def _nothing(text: str) -> None:
    pass


class _Demo:
    """The runs of one demo."""

    def __init__(self, folder: Path, steps: int, seed: int, say: Callable[[str], None]) -> None:
        self.folder, self.steps, self.say = folder, steps, say
        self.seed = seed
        self.region = folder / "region"
        # Leave one core for the copying thread. The number is the same in every process, because
        # it decides in which order sums are made.
        self.threads = max(1, min(4, len(os.sched_getaffinity(0)) - 1))
        self.arguments = [
            *("--steps", str(steps), "--seed", str(seed), "--threads", str(self.threads))
        ]

    def reference(self) -> Run:
        """Train without interruption and without lightck."""
        self.say("1. reference: without interruption, without lightck")
        with Trainer(self.folder, "reference", self.arguments) as trainer:
            run = self._follow(trainer, None, "reference")
        end = run.end or {}
        shape = end["shape"]
        rows = [
            (
                "model",
                f"GPT, {shape['layers']} layers of {shape['width']}, block {shape['block']},"
                f" dropout {shape['dropout']}, tied head, {end['parameters']:,} parameters",
            ),
            (
                "text",
                f"{end['text_files']} files of Python's standard library,"
                f" {size(end['text_bytes'])} as bytes",
            ),
            ("result", f"{_trained(run)}, {run.seconds:.1f} s with start-up"),
        ]
        self.say(pairs(rows, "   "))
        return run

    def interrupted(self, kills: list[Kill]) -> list[Run]:
        """Train the same in one process after another, all but the last killed."""
        self.say(f"\n2. with lightck, a snapshot every step, in {self.region}")
        runs = []
        for number, kill in enumerate([*kills, None], 1):
            name = f"process {number}"
            arguments = [*self.arguments, "--region", str(self.region)]
            if kill is not None:
                arguments += ["--hold-in", str(kill.after_step + _LATEST)]
            with Trainer(self.folder, f"process-{number}", arguments) as trainer:
                run = self._follow(trainer, kill, name)
            runs.append(run)
            start = "" if number == 1 else f"restored step {run.began_after}, "
            end = "to the end"
            if run.into_step is not None:
                end = f"SIGKILL {run.into_step:.2f} of a step after step {run.last} had ended"
            self.say(f"   {name}: {start}{_trained(run)}, {end}")
        return runs

    def _follow(self, trainer: Trainer, kill: Kill | None, name: str) -> Run:
        every = max(1, self.steps // 4)

        def plain(step: int, loss: str) -> None:
            if step % every == 0 and step < self.steps:
                self.say(f"   {name}: step {step} of {self.steps}, loss {_number(loss)}")

        if sys.stderr.isatty():
            with progress(f"   {name}", self.steps, unit="step") as more:
                done = 0

                def bar(step: int, loss: str) -> None:
                    nonlocal done
                    more(step - done)
                    done = step

                return trainer.follow(kill, bar)
        return trainer.follow(kill, plain)

    def document(self, reference: Run, runs: list[Run], found: list[str]) -> dict[str, Any]:
        """Return everything that was found and measured."""
        last = runs[-1].end or {}
        stats = last["stats"]
        held = contents(self.region).snapshot
        captured = max(1, stats["captured"])
        return {
            "equal": not found,
            "differences": found,
            "steps": self.steps,
            "seed": self.seed,
            "region": regions(self.region)[0],
            "snapshot_bytes": held["payload_bytes"],
            "snapshot_tensors": held["tensors"],
            "tensors_compared": len((reference.end or {})["digests"]),
            "losses_compared": sum(len(run.losses) for run in runs),
            "losses": {step: float.fromhex(loss) for step, loss in reference.losses.items()},
            "processes": [
                {
                    "began_after": run.began_after,
                    "last_finished": run.last,
                    "killed": run.killed,
                    "steps_into": run.into_step,
                    "seconds": run.seconds,
                }
                for run in runs
            ],
            "stats": stats,
            "snapshots_measured": stats["captured"],
            "stall_ms_per_snapshot": 1e3 * sum(stats["stall_s"].values()) / captured,
            "stall_ms_by_cause": {k: 1e3 * v / captured for k, v in stats["stall_s"].items()},
            "torch_save_ms": [1e3 * each for each in last["torch_save_s"]],
            "step_ms": 1e3 * statistics.median(last["step_s"]),
        }


def _trained(run: Run) -> str:
    first, last = min(run.losses, default=None), run.last
    if first is None:
        return "no step finished"
    losses = f"loss {_number(run.losses[first])} to {_number(run.losses[last])}"
    return f"steps {first} to {last}, {losses}"


def _number(loss: str) -> str:
    return f"{float.fromhex(loss):.4f}"


def _verdict(document: dict[str, Any], runs: list[Run]) -> str:
    lines = ["\n3. comparison, bit for bit"]
    if document["equal"]:
        repeated = document["losses_compared"] - document["steps"]
        lines += [
            f"   losses   all {document['steps']} equal, and those of {repeated} repeated steps",
            f"   tensors  all {document['tensors_compared']} equal (model, optimizer, generator,"
            " scheduler, counters)",
            "   region   every byte of its snapshots verified",
            f"   EQUAL: killed {sum(run.killed for run in runs)} times, nothing was lost",
        ]
    else:
        shown = document["differences"][:20]
        lines += [f"   {text}" for text in shown]
        lines.append(f"   DIFFERENT: {len(document['differences'])} differences")
    return "\n".join(lines)


def _cost(document: dict[str, Any]) -> str:
    saves = document["torch_save_ms"]
    median = statistics.median(saves)
    stall = document["stall_ms_per_snapshot"]
    region, count = document["region"], document["snapshots_measured"]
    causes = sorted(document["stall_ms_by_cause"].items(), key=lambda item: -item[1])
    rows = [
        [
            "lightck",
            f"{stall:.2f} ms",
            f"mean of {count} snapshots, each {size(document['snapshot_bytes'])}: "
            + ", ".join(f"{name} {ms:.2f}" for name, ms in causes),
        ],
        [
            "torch.save",
            f"{median:.2f} ms",
            f"median of {len(saves)} ({min(saves):.2f} to {max(saves):.2f}), same state and medium,"
            " no sync",
        ],
    ]
    slips = f"{document['stats']['slipped']} slipped, {document['stats']['torn']} torn"
    head = (
        f"\n4. what a snapshot costs the training thread, on {region['medium']}"
        f" (survives {region['survives']})"
    )
    step = f"   a step takes {document['step_ms']:.2f} ms with its snapshot (median); {slips}"
    body = table(["", "WAITS", "MEASURED"], rows).replace("\n", "\n   ")
    return f"{head}\n   {body}\n   {stall / median:.2f} of torch.save's time\n{step}"
