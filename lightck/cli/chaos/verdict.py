"""Judge how a chaos run noticed each fault, what it saved and lost, and whether runs agree.

All are pure functions of the runs' events and files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import lightck
from lightck.cli.chaos.plan import spelled
from lightck.cli.chaos.runner import Event, Run, is_saved
from lightck.errors import LightckError
from lightck.failure.fault_plan import Fault

_ENDING = frozenset({"corrupt", "exception", "hang", "kill", "term"})
"""The faults after which a process is started again."""
_NO_MINIBATCH = frozenset({"between", "evaluation", "restore"})
"""The phases outside of an iteration."""


def rows(run: Run, reference: Run, faults: Sequence[Fault]) -> list[dict[str, Any]]:
    """Return one dict per fault, in the plan's order.

    `fired`; then `step`, `rank`; `detected_s` and `detected_by`; `saved` (step and `why`, as
    lightck says); `ended` (the job, or the rank alone, had to be started again); `replaced` (the
    ranks that were replaced in place, while the others went on); `resumed` (the step it went on
    from);
    `lost_steps` and `lost_s` (work that was done again, the broken minibatch included);
    `recovered_s` (from the fault until the first step that ended after attach); `identical` (of
    the losses up to the next fault; None: there are none). Seconds count from the fault.
    """
    events = sorted(run.events, key=lambda each: each["t"])
    fired = [e for e in events if e["event"] == "fault"]
    expected = losses(reference.losses)
    found = []
    for number, fault in enumerate(faults):
        own = [e for e in fired if e["number"] == number]
        row: dict[str, Any] = {"fault": spelled(fault), "kind": fault.kind, "fired": bool(own)}
        row |= {"step": fault.step, "rank": fault.rank, "phase": fault.phase}
        if own:
            later = [e for e in fired if e["t"] > own[0]["t"] and e["number"] != number]
            window = [e for e in events if e["t"] >= own[0]["t"]]
            if later:
                window = [e for e in window if e["t"] <= later[0]["t"]]
            row |= _of_fault(own[0], window, events, ends=fault.kind in _ENDING)
            end = later[0]["losses"] if later else None
            row["identical"] = _alike(run.losses, own[0]["losses"], end, expected)
        found.append(row)
    return found


def replacements(run: Run) -> set[int]:
    """Return the processes that have replaced one rank in place (`lightck run`)."""
    return {e["pid"] for e in run.events if _is_recovered(e) and e["rank"] in e["fields"]["ranks"]}


def restarts(run: Run) -> int:
    """Return how often all ranks were started again, by this command or by theirs."""
    but, starts = replacements(run), dict[int, set[int]]()
    for each in run.events:
        if each["event"] == "attaching" and each["pid"] not in but:
            starts.setdefault(each["rank"], set()).add(each["pid"])
    return max(map(len, starts.values()), default=1) - 1


def _of_fault(
    fault: Event, window: Sequence[Event], events: Sequence[Event], *, ends: bool
) -> dict[str, Any]:
    """Return the row of one fault.

    `window` holds the events from the fault to the next one; `ends` says whether the fault ends the
    process, perhaps not at once.
    """
    began: float = fault["t"]
    living = {e["pid"] for e in events if e["t"] <= began and e.get("pid")}
    attached = _attached(window, living)
    if not attached and (ends or any(e["event"] == "ended" and e["code"] for e in window)):
        # The next fault came before the job was up again, or (SIGTERM) before it had ended at all.
        after = [e for e in events if e["t"] > began]
        attached = _attached(after, living)
        window = after if attached else window
    row: dict[str, Any] = {"ended": bool(attached)}
    row["replaced"] = sorted({r for e in window if _is_recovered(e) for r in e["fields"]["ranks"]})
    until = attached[0]["t"] if attached else None
    row |= _detected(fault, window, until)
    row |= _saved([e for e in window if until is None or e["t"] < until])
    acts = [e for e in window if e["event"] == "acted"]
    if done := [e["what"] for e in acts if not e.get("why")]:
        row["acted"] = done
    if failed := [f"not done: {e['what']}: {e['why']}" for e in acts if e.get("why")]:
        row["failed"] = failed
    flipped = next((e for e in window if e["event"] == "flipped"), None)
    if flipped is not None:
        row["flipped"] = {k: v for k, v in flipped.items() if k in ("step", "tensor", "why")}
    if attached:
        resumed = int(attached[0]["fields"]["step"])
        # The other ranks, and a rank that is only warned, may have gone on for a while.
        further = [e for e in window if e["event"] == "step" and e["t"] < attached[0]["t"]]
        complete = max([fault["complete"], *(e["step"] for e in further)])
        # A fault inside an iteration loses that minibatch, too.
        inside = fault["phase"] not in _NO_MINIBATCH or complete > fault["complete"]
        row["resumed"], row["lost_steps"] = resumed, complete + inside - resumed
        last = max([began, *(e["t"] for e in further)])
        trained = fault["phase"] != "restore"
        row["lost_s"] = last - _when(resumed, last, events) if trained else 0.0
        began_again = attached[0]["t"]
    else:
        row |= {"resumed": None, "lost_steps": 0, "lost_s": 0.0}
        began_again = began
    steps = (e for e in window if e["event"] == "step" and e["t"] > began_again)
    ranked = (e for e in steps if attached or e["rank"] == fault["rank"])
    first = next(ranked, None)
    row["recovered_s"] = first["t"] - began if first else None
    return row


def _attached(events: Sequence[Event], living: set[int]) -> list[Event]:
    """Return the attach events of processes that started after the fault.

    Processes that lived at the fault are left out: one of their ranks may still be attaching then.
    """
    return [e for e in events if _is_attached(e) and e.get("pid") not in living]


def _detected(fault: Event, window: Sequence[Event], until: float | None) -> dict[str, Any]:
    """Return when and how the fault was noticed.

    That is by lightck in a process that lives on, by the end of another rank, or by the end of the
    whole job.
    """
    found: list[tuple[float, str]] = []
    for event in window:
        if until is not None and event["t"] >= until:
            break
        if is_saved(event):
            said = event["fields"]  # the event comes at the end of the save
            at = max(fault["t"], event["t"] - float(said.get("seconds") or 0.0))
            found.append((at, f"{said['reason']}, rank {event['rank']}"))
        elif event["event"] == "gone" and event["rank"] != fault["rank"]:
            found.append((event["t"], f"end of rank {event['rank']}"))
        elif event["event"] == "ended" and event["code"]:
            found.append((event["t"], "its end"))
    if not found:
        return {"detected_s": None, "detected_by": None}
    at, by = min(found)
    return {"detected_s": at - fault["t"], "detected_by": by}


def _saved(window: Sequence[Event]) -> dict[str, Any]:
    """Return the newest step of the just-in-time snapshots, and why one is not newer."""
    said = [e["fields"] for e in window if is_saved(e)]
    steps = [each["step"] for each in said if each.get("step") is not None]
    why = next((each["why"] for each in said if each.get("why")), "")
    return {"saved": max(steps, default=None), "why": why}


def _when(step: int, until: float, events: Sequence[Event]) -> float:
    """Return the time, up to `until`, at which the last rank reached a step."""
    times = [
        e["t"]
        for e in events
        if e["t"] <= until
        and (
            (e["event"] == "step" and e["step"] == step)
            or (_is_attached(e) and int(e["fields"]["step"]) == step)
        )
    ]
    begin: float = max(times, default=events[0]["t"])
    return begin


def _is_attached(event: Event) -> bool:
    return event["event"] == "log" and bool(event["name"] == "attached")


def _is_recovered(event: Event) -> bool:
    return event["event"] == "log" and bool(event["name"] == "recovered")


# ---- equality ------------------------------------------------------------------------------------


def losses(file: Path, begin: int = 0, end: int | None = None) -> list[tuple[str, str]]:
    """Return the lines of a file between two byte positions, split before the last word."""
    if not file.exists():
        return []
    with file.open("rb") as stream:
        stream.seek(begin)
        text = stream.read() if end is None else stream.read(end - begin)
    split = (line.rpartition(" ") for line in text.decode(errors="replace").splitlines())
    return [(key, value) for key, _, value in split]


def _alike(
    file: Path, begin: int, end: int | None, expected: Sequence[tuple[str, str]]
) -> bool | None:
    """Return whether every line is one of the undisturbed run's.

    Returns None if that run has written none.
    """
    known = dict(expected)
    found = losses(file, begin, end)
    return all(known.get(key) == value for key, value in found) if known else None


def differing_losses(reference: Run, run: Run) -> list[str]:
    """Return the lines that differ from the undisturbed run's."""
    known = dict(losses(reference.losses))
    return [
        f"loss of {key!r}: {value}, undisturbed {known.get(key, 'none')}"
        for key, value in losses(run.losses)
        if known.get(key) != value
    ]


def missing_losses(reference: Run, run: Run) -> list[str]:
    """Return the keys of lines that were never written.

    A process may end between a step and the line on its loss.
    """
    there = {key for key, _ in losses(run.losses)}
    return [key for key, _ in losses(reference.losses) if key not in there]


def unseeded(reference: Run, run: Run) -> list[str]:
    """Return the random generators that a run does not seed at its start.

    Nothing can restore what they drew.
    """
    first = [
        {e["rank"]: e["generators"] for e in reversed(each.events) if e["event"] == "attaching"}
        for each in (reference, run)
    ]
    ranks = first[0].keys() & first[1].keys()
    return sorted(
        {
            name
            for rank in ranks
            for name, digest in first[0][rank].items()
            if first[1][rank].get(name) != digest
        }
    )


def differences(
    reference: Path, path: Path, world: int, but: Sequence[str] = ()
) -> tuple[int, int, list[str]]:
    """Compare the newest snapshots of two runs, rank by rank and bit by bit.

    Args:
        reference: path of the undisturbed run's snapshots.
        path: path of the other run's snapshots.
        world: number of ranks.
        but: names of random generators to leave out.

    Returns:
        Their step, the number of tensors that were compared, and what differs.
    """
    compared, found, step = 0, [], 0
    for rank in range(world):
        try:
            ours = lightck.load(path, rank=rank)
            theirs = lightck.load(reference, rank=rank)
        except LightckError as error:
            found.append(f"rank {rank}: {error}")
            continue
        step = theirs["step"]
        if ours["step"] != step:
            found.append(f"rank {rank}: ends at step {ours['step']}, undisturbed {step}")
            continue
        tensors, differing = compare(ours, theirs)
        compared += tensors
        found += [
            f"rank {rank}: {name} differs after step {step}"
            for name in differing
            if not _is_free(name, but)
        ]
    return step, compared, found


def _is_free(name: str, but: Sequence[str]) -> bool:
    """Return whether a value may differ: a generator that is left out, or what a clock said.

    Generators are also in extras, those of a batch in hand; times are what an extra keeps as
    `clock`.
    """
    path = f"{name}/"
    return "/clock/" in path or any(f"/rng/{each}/" in path for each in but)


def compare(ours: Any, theirs: Any) -> tuple[int, list[str]]:
    """Compare two trees of state bit for bit; return the number of tensors, and what differs."""
    left, right = dict(_leaves(ours, "")), dict(_leaves(theirs, ""))
    tensors = sum(isinstance(value, torch.Tensor) for value in right.values())
    names = sorted(left.keys() | right.keys())
    return tensors, [name for name in names if not _same(left.get(name), right.get(name))]


def _leaves(tree: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(tree, Mapping):
        yield path, sorted(map(str, tree))
        for key, value in tree.items():
            yield from _leaves(value, f"{path}/{key}")
    elif isinstance(tree, list | tuple):
        yield path, (type(tree).__name__, len(tree))
        for i, value in enumerate(tree):
            yield from _leaves(value, f"{path}/{i}")
    else:
        yield path, tree


def _same(ours: Any, theirs: Any) -> bool:
    """Return whether two values are equal bit for bit: a NaN equals itself, and -0.0 is not 0.0."""
    if isinstance(ours, torch.Tensor) and isinstance(theirs, torch.Tensor):
        if (ours.dtype, ours.shape) != (theirs.dtype, theirs.shape):
            return False
        left, right = (each.contiguous().reshape(-1) for each in (ours, theirs))
        return torch.equal(left.view(torch.uint8), right.view(torch.uint8))
    if isinstance(ours, float) and isinstance(theirs, float):
        return ours.hex() == theirs.hex()
    if hasattr(ours, "tobytes") and hasattr(theirs, "tobytes"):  # NumPy's; its repr shortens
        return str(ours.dtype) == str(theirs.dtype) and ours.tobytes() == theirs.tobytes()
    return type(ours) is type(theirs) and repr(ours) == repr(theirs)
