"""Read benchmark definitions: TOML files in `definitions/`, checked before anything runs."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from bench import engines
from bench.emulated import DEVICES as EMULATED
from bench.errors import BenchError
from bench.models import MODELS
from bench.place import DEFINITIONS, MEDIA
from bench.work import OPTIMIZERS, Work

RANKS = ("idle", "ranks", "commit_ranks", "restore_ranks")
DEVICE = ("device_rate", "device_fence", "device_training", "device_restore")
KINDS = (
    "training",
    "native",
    "restore",
    "commit",
    "memory",
    "trace",
    "jit",
    "busy",
    "recovery",
    "restart",
    "in_place",
    "policies",
    "policies_real",
    *RANKS,
    *DEVICE,
)
WAITS = ("default", "passive", "active")
POLICIES = ("pairs", "blocks", "lone")
DEVICES = ("cpu", "cuda")

_T = TypeVar("_T")


@dataclass(frozen=True)
class Method:
    """The method by which an engine is measured: for how long, and in what pattern.

    Attributes:
        policy: `pairs` (every other step carries a snapshot) or `blocks` (blocks of steps with one
            each, between blocks without) or `lone` (one snapshot and as many steps as the engine
            works on it, between as many without; pairs, where it is one step).
        block: steps of a block; with several ranks also pairs in a row; for `restart` steps from
            one snapshot to the next.
        warmup: steps before the engine is attached.
        settle: pairs or blocks after attaching that are not counted.
        least: minimal number of samples (pairs, blocks, repetitions).
        most: maximal number of samples.
        seconds: maximal time, once there are `least` samples.
        patient: let each snapshot finish before the next is due, off the clock. Only for tiny
            models, whose steps may be shorter than a commit; real engines must keep up.
        fault: the failure, for `recovery`: a key of `bench.measures.recovery.FAULTS`.
        case: for `policies` a key of `bench.simulated.CASES`; for `policies_real` what is measured,
            a key of `bench.measures.policies_real.WAYS`; for `in_place` how the job is run, one of
            `bench.measures.in_place.CASES`.
    """

    policy: str = "pairs"
    block: int = 4
    warmup: int = 4
    settle: int = 2
    least: int = 10
    most: int = 400
    seconds: float = 90.0
    patient: bool = False
    fault: str = ""
    case: str = ""


@dataclass(frozen=True)
class Contender:
    """An engine with its settings, as one row of results.

    Attributes:
        label: unique in the definition; by default the engine's name.
        engine: a key of `bench.engines.KINDS`.
        medium: a key of `bench.place.MEDIA`.
        settings: settings of the engine.
        method: differences from the definition's method.
        work: differences from the definition's work.
        threads: number of torch's threads; 0: the definition's.
    """

    label: str
    engine: str
    medium: str = "tmpfs"
    threads: int = 0
    settings: Mapping[str, Any] = field(default_factory=dict)
    method: Mapping[str, Any] = field(default_factory=dict)
    work: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Target:
    """A requirement that must be met.

    Attributes:
        row: the requirement in words.
        measure: the measure of `engine`; empty with `unavailable`.
        engine: a contender's label.
        at_most: bound for the upper end of the interval.
        at_least: bound for the lower end.
        against: labels: the value is that of the best of them divided by `engine`'s.
        unavailable: the reason why it cannot be measured yet.
    """

    row: str
    measure: str = ""
    engine: str = ""
    at_most: float | None = None
    at_least: float | None = None
    against: tuple[str, ...] = ()
    unavailable: str = ""

    @property
    def bound(self) -> float | None:
        """Return the number to reach."""
        return self.at_least if self.at_most is None else self.at_most


@dataclass(frozen=True)
class Definition:
    """A benchmark: one work, one method, several engines, each in its own process.

    Attributes:
        name: the file's name without `.toml`.
        about: a sentence or two on what it shows.
        kind: the module of `bench.measures` that runs.
        work: the training to measure.
        threads: number of torch's threads.
        wait: OMP_WAIT_POLICY of the process.
        method: the method of measuring.
        contenders: the engines.
        targets: the requirements.
        minutes: minutes that it takes on two quiet cores, about; 0: not known.
        essential: it is one of the few that `make bench` runs.
    """

    name: str
    about: str
    kind: str
    work: Work
    threads: int
    wait: str
    method: Method
    contenders: tuple[Contender, ...]
    targets: tuple[Target, ...]
    minutes: float = 0.0
    essential: bool = False

    @property
    def packages(self) -> list[str]:
        """Return the packages that must be installed, in order."""
        needed = ["torch", "numpy", "pyarrow", "cffi"]
        needed += [p for c in self.contenders for p in engines.KINDS[c.engine].packages]
        models = [MODELS[self.work_of(contender).model] for contender in self.contenders]
        needed += [model.needs for model in models if model.needs]
        return list(dict.fromkeys(needed))

    def work_of(self, contender: Contender) -> Work:
        """Return the work of one engine."""
        return replace(self.work, **contender.work)

    def method_of(self, contender: Contender) -> Method:
        """Return the method of one engine."""
        return replace(self.method, **contender.method)

    def as_json(self) -> dict[str, Any]:
        """Return plain values, for the job file and the results' metadata."""
        return asdict(self)


_TINY = {"tensors": 64, "width": 64, "batch": 2, "sequence": 8, "step_ms": 5.0}  # upper limits


def tiny(definition: Definition) -> Definition:
    """Return the definition with a model of a few kilobytes and few samples, as a trial."""
    small: dict[str, Any] = {"least": 2, "most": 2, "warmup": 1, "settle": 1, "block": 2}
    small["patient"] = True

    def shrunk(contender: Contender) -> Contender:
        work: dict[str, Any] = dict(contender.work)
        for key, most in _TINY.items():
            if key in work:
                work[key] = min(work[key], most)
        work["link"] = 0
        if "model" in work:
            work["model"] = MODELS[work["model"]].tiny
        return replace(contender, work=work, method={**contender.method, **small}, threads=1)

    model = MODELS[definition.work.model].tiny
    work = replace(definition.work, model=model, batch=1, sequence=8, tensors=64, link=0)
    work = replace(work, step_ms=min(work.step_ms, 5.0), hogs=min(work.hogs, 1))
    contenders = tuple(map(shrunk, definition.contenders))
    return replace(definition, work=work, threads=1, contenders=contenders)


def on_device(definition: Definition, device: str) -> Definition:
    """Return the definition for another device; on a CPU there is no placement to choose."""

    def moved(contender: Contender) -> Contender:
        settings = dict(contender.settings)
        if device == "cpu":
            settings.pop("placement", None)
        work = {k: v for k, v in contender.work.items() if k != "device"}
        return replace(contender, settings=settings, work=work)

    contenders = tuple(map(moved, definition.contenders))
    return replace(definition, work=replace(definition.work, device=device), contenders=contenders)


def names() -> list[str]:
    """Return the names of all definitions."""
    return sorted(file.stem for file in DEFINITIONS.glob("*.toml"))


def essential() -> list[str]:
    """Return the names of definitions that take minutes and are enough to compare."""
    return [name for name in names() if load(name).essential]


def load(name: str) -> Definition:
    """Read and check a definition, given its name or the path of a TOML file.

    Raises:
        BenchError: there is none, or it is wrong; the message has file, key and what is allowed.
    """
    file = Path(name) if name.endswith(".toml") else DEFINITIONS / f"{name}.toml"
    try:
        table = tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise BenchError(
            f"no definition {name!r} ({file}); there are {', '.join(names())}"
        ) from error
    except (OSError, ValueError) as error:
        raise BenchError(f"{file}: cannot be read: {error}") from error
    try:
        return _definition(file.stem, table)
    except BenchError as error:
        raise BenchError(f"{file}: {error}") from None


def _definition(name: str, table: dict[str, Any]) -> Definition:
    known = {"about", "kind", "threads", "wait", "work", "method", "engine", "target"}
    _only(table, known | {"minutes", "essential"}, "top level")
    minutes, essential = table.get("minutes", 0.0), table.get("essential", False)
    if not isinstance(minutes, int | float) or minutes < 0 or not isinstance(essential, bool):
        raise BenchError(f"minutes = {minutes!r}, essential = {essential!r}: a number, a bool")
    about = table.get("about", "")
    kind = _choice("kind", table.get("kind"), KINDS)
    wait = _choice("wait", table.get("wait", "passive"), WAITS)
    work = _made(Work, table.get("work", {}), "[work]")
    method = _made(Method, table.get("method", {}), "[method]")
    contenders = tuple(_contender(each) for each in table.get("engine", []))
    if not contenders:
        raise BenchError("no [[engine]]")
    threads = table.get("threads", 2)
    if not isinstance(threads, int) or threads < 1:
        raise BenchError(f"threads = {threads!r}: must be 1 or more")
    labels = [c.label for c in contenders]
    for label in labels:
        if labels.count(label) > 1:
            raise BenchError(f"two engines are labelled {label!r}")
    targets = tuple(_target(each, contenders) for each in table.get("target", []))
    made = Definition(
        *(name, about, kind, work, threads, wait, method, contenders, targets),
        *(float(minutes), essential),
    )
    for contender in contenders:
        _check_contender(made, contender)
    return made


def _contender(table: dict[str, Any]) -> Contender:
    return _made(Contender, {"label": table.get("engine", ""), **table}, "[[engine]]")


def _check_contender(definition: Definition, contender: Contender) -> None:
    where = f"[[engine]] {contender.label}"
    engines.check(contender.engine, contender.settings)
    _choice(f"{where}: medium", contender.medium, tuple(MEDIA))
    _only(contender.work, {f.name for f in fields(Work)}, f"{where}: work")
    _only(contender.method, {f.name for f in fields(Method)}, f"{where}: method")
    work, method = definition.work_of(contender), definition.method_of(contender)
    _choice(f"{where}: model", work.model, tuple(MODELS))
    _choice(f"{where}: optimizer", work.optimizer, tuple(OPTIMIZERS))
    _choice(f"{where}: device", work.device, DEVICES)
    if work.device != "cpu" and definition.kind not in DEVICE:
        raise BenchError(f"{where}: device = {work.device}: only {', '.join(DEVICE)} take it")
    _choice(f"{where}: policy", method.policy, POLICIES)
    if work.world < 1 or (work.world > 1 and definition.kind not in RANKS):
        raise BenchError(f"{where}: world = {work.world}: only {', '.join(RANKS)} take several")
    _check_emulated(where, contender, work)
    if work.link and work.world != 2:
        raise BenchError(f"{where}: link = {work.link} joins two ranks, not world = {work.world}")


def _check_emulated(where: str, contender: Contender, work: Work) -> None:
    if not work.emulated:
        return
    _choice(f"{where}: emulated", work.emulated, tuple(EMULATED))
    if work.step_ms <= 0 or work.world > 1 or work.forks:
        raise BenchError(f"{where}: an emulated device takes step_ms, and one rank")
    if "emulated" not in contender.label:
        raise BenchError(f"{where}: on an emulated device, which its label must say: 'emulated'")


def _target(table: dict[str, Any], contenders: Iterable[Contender]) -> Target:
    target = _made(Target, {**table, "against": tuple(table.get("against", ()))}, "[[target]]")
    where = f"[[target]] {target.row!r}"
    if target.unavailable:
        return target
    if (target.at_most is None) == (target.at_least is None):
        raise BenchError(f"{where}: exactly one of at_most and at_least")
    labels = [c.label for c in contenders]
    for label in (target.engine, *target.against):
        if label not in labels:
            raise BenchError(f"{where}: no engine is labelled {label!r}; there are {labels}")
    return target


def _made(kind: type[_T], table: Mapping[str, Any], where: str) -> _T:
    """Make a dataclass from a table; each value must be of its field's type."""
    shapes = {f.name: f for f in fields(kind)}  # type: ignore[arg-type]
    _only(table, shapes.keys(), where)
    for key, value in table.items():
        expected = str(shapes[key].type)
        good = {
            "str": isinstance(value, str),
            "bool": isinstance(value, bool),
            "int": isinstance(value, int) and not isinstance(value, bool),
            "float": isinstance(value, int | float) and not isinstance(value, bool),
            "float | None": isinstance(value, int | float) and not isinstance(value, bool),
            "Mapping[str, Any]": isinstance(value, dict),
            "tuple[str, ...]": isinstance(value, tuple) and all(isinstance(v, str) for v in value),
        }[expected]
        if not good:
            raise BenchError(f"{where}: {key} = {value!r}, expected {expected}")
    missing = [key for key in ("row", "label", "model") if key in shapes and key not in table]
    if missing:
        raise BenchError(f"{where}: {missing[0]} is missing")
    return kind(**table)


def _only(table: Mapping[str, Any], known: Iterable[str], where: str) -> None:
    odd = sorted(set(table) - set(known))
    if odd:
        raise BenchError(f"{where}: unknown {odd[0]!r}; known are {', '.join(sorted(known))}")


def _choice(what: str, value: object, allowed: tuple[str, ...]) -> str:
    if isinstance(value, str) and value in allowed:
        return value
    raise BenchError(f"{what} = {value!r}: must be one of {', '.join(allowed)}")
