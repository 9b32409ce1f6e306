"""Choose which engines are compared: those on the same model, best first.

It also tells which rows are easy.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bench.record import Record, Result

EASY = 0.05  # share of a step: where a blocking copy costs less, low overhead says little
SHARING = ("training", "ranks")  # kinds in which steps carry snapshots
SORTED_BY = {  # less is better
    "training": "extra",
    "restore": "restore",
    "commit": "commit",
    "memory": "extra_dram",
    "restart": "restart_s",
    "ranks": "extra",
    "commit_ranks": "commit",
    "restore_ranks": "restore",
    "device_training": "extra",
    "device_restore": "restore",
}
BESIDE = {  # less is better, too
    "training": ("stall_s", "cpu_s", "extra_dram_bytes", "written_bytes"),
    "restart": ("lost_work_s",),
}


def by_model(definition: Mapping[str, Any]) -> dict[str, list[Mapping[str, Any]]]:
    """Group the contenders of a stored definition by what they train, in its order.

    What they train is the whole work if each work has several engines: models of one kind and
    several sizes are then named by the common start of their labels. Else it is the model alone.
    """
    models: dict[str, list[Mapping[str, Any]]] = {}
    works: dict[str, list[Mapping[str, Any]]] = {}
    for contender in definition["contenders"]:
        work = {**definition["work"], **contender["work"]}
        models.setdefault(work["model"], []).append(contender)
        works.setdefault(json.dumps(work, sort_keys=True), []).append(contender)
    if len(works) == len(models) or any(len(each) == 1 for each in works.values()):
        return models
    return {prefix(each) or key: each for key, each in works.items()}


def prefix(contenders: Sequence[Mapping[str, Any]]) -> str:
    """Return the common start of several labels, in whole words; empty for one."""
    words = [contender["label"].split(" ")[:-1] for contender in contenders]
    return " ".join(os.path.commonprefix(words)) if len(words) > 1 else ""


def best_first(result: Result, labels: Sequence[str]) -> list[str]:
    """Order the labels, the winner first, even if it is not lightck; unmeasured ones last."""
    measure = SORTED_BY.get(result.about["definition"]["kind"])
    if measure is None:
        return list(labels)

    def value(label: str) -> float:
        record = result.of(label, measure)
        return math.inf if record is None else record.value

    return sorted(labels, key=value)


def lost(result: Result) -> list[tuple[str, Record, Record]]:
    """List model, winner and lightck wherever the winner is another; the main measure first.

    For lightck counts the first of its rows, the one with its defaults. Only engines that train the
    same are compared. The engine `none` takes no part: nothing is faster than no snapshots.
    """
    kind = result.about["definition"]["kind"]
    measures = (SORTED_BY.get(kind, ""), *BESIDE.get(kind, ()))
    return [each for measure in measures for each in _lost(result, measure)]


def _lost(result: Result, measure: str) -> Iterator[tuple[str, Record, Record]]:
    for model, contenders in by_model(result.about["definition"]).items():
        works: list[Mapping[str, Any]] = []
        for ours in contenders:
            if ours["engine"] != "lightck" or ours["work"] in works:
                continue
            works.append(ours["work"])
            record = result.of(ours["label"], measure)
            others = [
                other
                for c in contenders
                if c["engine"] not in ("none", "lightck") and c["work"] == ours["work"]
                if (other := result.of(c["label"], measure)) is not None
            ]
            winner = min(others, key=lambda r: r.value, default=record)
            if record is not None and winner is not None and winner.value < record.value:
                yield model, winner, record


def copy_share(result: Result, label: str) -> float | None:
    """Return a plain copy of the state / a step without a snapshot, in that engine's process."""
    copy, step = result.of(label, "sync_copy"), result.of(label, "step")
    return None if copy is None or step is None else copy.value / step.value


def easy(result: Result, label: str) -> bool:
    """Return whether even a blocking copy would cost less than a twentieth of a step."""
    share = copy_share(result, label)
    return share is not None and share < EASY
