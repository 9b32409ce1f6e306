"""Make tables across definitions: models side by side, and how often snapshots may be taken."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench import origin, rivals
from bench.document import Cell, Table
from bench.models import MODELS
from bench.quantity import cell, digits, quantity
from bench.record import Record, Result
from bench.statistics import Estimate, ratio

_SAVING = ("training", "device_training")  # kinds with a snapshot every step, on one rank
WITHIN_1 = "interval_1pct_steps"
_WITHIN = {WITHIN_1: "1 %", "interval_5pct_steps": "5 %", "interval": "2 %"}
_OURS, _NOBODY = "lightck", "none"


def device(result: Result) -> str:
    """Return the name of the accelerator that trained, or of the emulated one.

    It is empty for the CPU.
    """
    work = result.about["definition"]["work"]
    if name := str(work.get("emulated", "")):
        return f"an emulated {name.upper()}"
    if str(work.get("device", "")).startswith("cuda"):
        return str(result.about["machine"].get("gpu", "a GPU that is not named"))
    return ""


def by_device(results: Sequence[Result]) -> dict[str, list[Result]]:
    """Group results by the device that trained, the CPU first.

    Numbers of two of them share no table.
    """
    found: dict[str, list[Result]] = {}
    for result in sorted(results, key=lambda each: device(each) != ""):
        found.setdefault(device(result), []).append(result)
    return found


@dataclass(frozen=True)
class Row:
    """The engines of one definition that train the same.

    Attributes:
        name: name of the model, as the labels have it.
        result: result of the definition.
        labels: each engine's name without the model, to its label.
        engines: each engine's name without the model, to the kind of engine.
    """

    name: str
    result: Result
    labels: Mapping[str, str]
    engines: Mapping[str, str]

    @property
    def ours(self) -> str | None:
        """Return the first of lightck's rows, the one with its defaults."""
        return next((n for n, engine in self.engines.items() if engine == _OURS), None)

    @property
    def peers(self) -> list[str]:
        """Return the short names of the engines that lightck is compared with."""
        return [name for name, engine in self.engines.items() if engine not in (_OURS, _NOBODY)]

    def of(self, name: str, measure: str) -> Record | None:
        """Return the record of an engine by its short name."""
        return self.result.of(self.labels[name], measure) if name in self.labels else None


def rows(result: Result) -> Iterator[Row]:
    """Yield a row per model of a definition."""
    for model, contenders in rivals.by_model(result.about["definition"]).items():
        common = rivals.prefix(contenders) or _alone(contenders[0])
        names = [c["label"].removeprefix(common).lstrip() for c in contenders]
        yield Row(
            common or model,
            result,
            dict(zip(names, (c["label"] for c in contenders), strict=True)),
            dict(zip(names, (c["engine"] for c in contenders), strict=True)),
        )


def _alone(contender: Mapping[str, Any]) -> str:
    """Return what the label of an engine without rivals says of the model."""
    name, _, engine = contender["label"].rpartition(" ")
    return name if engine == contender["engine"] else ""


def batch(work: Mapping[str, Any]) -> str:
    """Return the batch of a step as text: pictures, or sequences and the tokens of each."""
    model = MODELS.get(work["model"])
    tokens = f" x {work['sequence']}" if model is None or model.vocabulary else ""
    return f"{work['batch']}{tokens}"


def models(results: Sequence[Result]) -> Table | None:
    """Compare models and engines: what a snapshot adds to the training, and how much that is.

    The table is of the definitions that compare several models and of their companions
    (`essential`, `essential-bert`); None where there is none.
    """
    found = compared(results)
    peers = list(dict.fromkeys(name for row in found for name in row.peers))
    if not found:
        return None
    head = ["model", "state", "copy / step", _OURS, "of a plain copy", *peers]
    return Table(head, [_against(row, peers, origin.mark(row.result, results)) for row in found])


def overheads(results: Sequence[Result]) -> Table | None:
    """Show what a snapshot at every step costs lightck alone, in definitions of several models.

    Beside each share of a step is its ratio to a plain copy. The last share is that without any
    snapshot, where it was measured: the method's own error. None where there is no such definition.
    """
    found = [row for row in _several(results, lone=False) if not row.peers]
    if not found:
        return None
    head = ["model", "batch", "state", "step without", "copy / step", "lightck, of a step"]
    head += ["of a plain copy", "longer by, per snapshot", "none, of a step"]
    return Table(head, [_overhead(row, origin.mark(row.result, results)) for row in found])


def _overhead(row: Row, mark: str) -> list[str | Cell]:
    given, ours = row.result.about["definition"], row.ours or ""
    contender = next(c for c in given["contenders"] if c["label"] == row.labels[ours])
    nobody = next((n for n, engine in row.engines.items() if engine == _NOBODY), "")
    return [
        *(row.name + mark, batch({**given["work"], **contender["work"]})),
        *(cell(row.of(ours, "state")), cell(row.of(ours, "step")), _share(row)),
        *(cell(row.of(ours, each)) for each in ("overhead", "cost_ratio", "extra")),
        cell(row.of(nobody, "overhead")),
    ]


def compared(results: Sequence[Result], *, lone: bool = False) -> list[Row]:
    """Return the rows of the table of models, the smallest state first.

    With `lone` the rows are those of single snapshots.
    """
    return [row for row in _several(results, lone=lone) if row.peers]


def _several(results: Sequence[Result], *, lone: bool) -> list[Row]:
    """Return the rows of definitions of several models and of their companions."""
    saving = [
        result
        for result in results
        if _given(result)["kind"] in _SAVING and (_policy(result) == "lone") is lone
    ]
    several = {
        _given(r)["name"]: set(rivals.by_model(_given(r))) for r in saving if _models_in(r) > 1
    }
    found = [
        row
        for result in saving
        for row in rows(result)
        if row.ours is not None
        and row.of(row.ours, "extra") is not None
        and _belongs(_given(result)["name"], set(rivals.by_model(_given(result))), several)
    ]
    return sorted(found, key=lambda row: _value(row, "state"))


def _models_in(result: Result) -> int:
    given = _given(result)
    return len({{**given["work"], **each["work"]}["model"] for each in given["contenders"]})


def _belongs(name: str, known: set[str], several: Mapping[str, set[str]]) -> bool:
    """Return whether a definition has several models, or is the companion of one that has.

    A companion's name begins with the other's, and it has none of the other's models.
    """
    return any(
        name == other or (name.startswith(other) and not known & there)
        for other, there in several.items()
    )


def _policy(result: Result) -> str:
    return str(_given(result)["method"]["policy"])


def _given(result: Result) -> Mapping[str, Any]:
    given: Mapping[str, Any] = result.about["definition"]
    return given


def _value(row: Row, measure: str) -> float:
    record = row.of(row.ours or "", measure)
    return 0.0 if record is None else record.value


def _share(row: Row) -> str | Cell:
    """Return which share of a step a plain copy of the state is, in lightck's process."""
    share = rivals.copy_share(row.result, row.labels[row.ours or ""])
    if share is None:
        return ""
    return Cell(f"{digits(100 * share)} %", share, "easy" if share < rivals.EASY else "")


def _against(row: Row, peers: Sequence[str], mark: str) -> list[str | Cell]:
    assert row.ours is not None
    ours = row.of(row.ours, "extra")
    cells: list[str | Cell] = [row.name + mark, cell(row.of(row.ours, "state")), _share(row)]
    best = min((r for p in peers if (r := row.of(p, "extra"))), key=lambda r: r.value, default=ours)
    cells += [cell(ours), cell(row.of(row.ours, "cost_ratio"))]
    for peer in peers:
        record = row.of(peer, "extra")
        if record is None or ours is None:
            label, about = row.labels.get(peer), row.result.about
            cells.append("cannot run here" if label in about.get("absent", {}) else "")
            if label in about.get("slipped", {}):
                cells[-1] = "no number"
            continue
        text = quantity(record.value, record.unit)
        wins = record is best and record.value < ours.value
        cells.append(Cell(f"**{text}**" if wins else text, record.value, times(record, ours)))
    return cells


def times(theirs: Record, ours: Record) -> str:
    """Return how many times ours theirs is at least, as text.

    It is their interval's near end divided by the far end of ours.
    """
    found = ratio(
        Estimate(theirs.value, theirs.low, theirs.high), Estimate(ours.value, ours.low, ours.high)
    )
    if found.low != found.low or theirs.low <= 0:
        return "(not told apart)"
    return f"(>= {digits(found.low)} x)" if found.low != float("inf") else "(any times)"


def pieces(result: Result) -> Table | None:
    """Show what settings other than lightck's defaults cost or save, and variants, best first.

    None where lightck does not have several rows that train the same, with its defaults first.
    """
    kind = _given(result)["kind"]
    found: list[list[str | Cell]] = []
    for row in rows(result) if kind in _SAVING else ():
        ours = row.of(row.ours or "", "extra")
        if ours is None or list(row.engines.values()).count(_OURS) < 3:
            continue
        if any(c["settings"] for c in _given(result)["contenders"] if c["label"] == ours.engine):
            continue
        others = [
            record
            for name, engine in row.engines.items()
            if engine != _NOBODY and name != row.ours and (record := row.of(name, "extra"))
        ]
        for record in sorted(others, key=lambda each: each.value):
            low, high = record.low - ours.high, record.high - ours.low
            longer = Record("", "extra", "s", record.value - ours.value, low, high)
            found.append([record.engine, cell(record), cell(longer), times(record, ours)])
    head = ["", "extra per snapshot", "longer than lightck with its defaults by", "times that"]
    return Table(head, found) if found else None


def intervals(results: Sequence[Result]) -> Table | None:
    """Compare models and engines: how often a snapshot may be taken; None where that is not known.

    The table has the far end of each interval, so that it is enough; from the cost of single
    snapshots, where that was measured.
    """
    found = known_intervals(results)
    names = dict.fromkeys(n for row in found for n, e in row.engines.items() if e != _NOBODY)
    if not found:
        return None
    return Table(
        ["model", *names],
        [
            [row.name + origin.mark(row.result, results), *(_within(row, n) for n in names)]
            for row in found
        ],
    )


def known_intervals(results: Sequence[Result]) -> list[Row]:
    """The rows of that table: of a model the one with single snapshots, where it was measured."""
    known = [
        row
        for row in [*compared(results, lone=True), *compared(results)]
        if any(row.of(n, m) for n in row.labels for m in _WITHIN)
    ]
    single = [row.name for row in known if _policy(row.result) == "lone"]
    return [r for r in known if _policy(r.result) == "lone" or r.name not in single]


def apart(results: Sequence[Result]) -> Table | None:
    """Models against engines: the smallest interval within 1 % with its bounds, and the state."""
    found = [row for row in known_intervals(results) if row.of(row.ours or "", WITHIN_1)]
    names = dict.fromkeys(n for row in found for n, e in row.engines.items() if e != _NOBODY)
    if not found:
        return None
    used = list({id(row.result): row.result for row in found}.values())
    return Table(
        ["model", "state", *names],
        [
            [
                row.name + origin.mark(row.result, used),
                cell(row.of(row.ours or "", "state")),
                *(_apart(row.of(name, WITHIN_1)) for name in names),
            ]
            for row in found
        ],
    )


def _apart(record: Record | None) -> str | Cell:
    if record is None:
        return ""
    text, low, high = (f"{x:,.0f}" for x in (record.value, record.low, record.high))
    return Cell(text, record.value, f"[{low}, {high}]" if low != high else "")


def _within(row: Row, name: str) -> str | Cell:
    known = [(r, share) for m, share in _WITHIN.items() if (r := row.of(name, m)) is not None]
    if not known:
        return ""
    words = [f"{quantity(r.high, r.unit, r.measure)} within {share}" for r, share in known]
    return Cell(words[0], known[0][0].high, "".join(f"({word})" for word in words[1:]))
