"""Decide which snapshots a history keeps, by pure functions of what is there.

Any object with a method `keep(kept) -> frozenset[int]` will do. Those here combine with `|` and
`&`, and can be written as words: `newest 3 or best val_loss`. Above them stand the rules of
`steps_to_keep`, which no policy can turn off.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from lightck.errors import ConfigError
from lightck.policy import checks, quantities


@dataclass(frozen=True, slots=True)
class Kept:
    """The values by which a policy decides whether a snapshot is kept.

    Attributes:
        step: the step whose state it is.
        time_s: when it was committed, seconds since 1970.
        epoch: the epochs that the loop had marked with `handle.epoch()`.
        metrics: what `handle.report` was given of this step.
        pinned: whether it is kept whatever the policy says.
    """

    step: int
    time_s: float
    epoch: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)
    pinned: bool = False


@runtime_checkable
class Keep(Protocol):
    """The choice of the snapshots that a history keeps."""

    def keep(self, kept: Sequence[Kept]) -> frozenset[int]:
        """Return the steps to keep, of those that are there, which come oldest first.

        It must be pure: the same snapshots give the same answer.
        """
        ...


def steps_to_keep(policy: Keep, kept: Iterable[Kept]) -> frozenset[int]:
    """Return the steps to keep: the newest one, those that are pinned, and what the policy says."""
    there = sorted(kept, key=lambda each: each.step)
    always = {each.step for each in there if each.pinned} | {each.step for each in there[-1:]}
    return (policy.keep(there) & {each.step for each in there}) | always


def would_keep(policy: Keep, kept: Iterable[Kept], new: Kept) -> bool:
    """Return whether the policy itself would keep `new`, were it among those that are there."""
    others = (each for each in kept if each.step != new.step)
    return new.pinned or new.step in policy.keep(sorted((*others, new), key=lambda k: k.step))


def keeps_for_metrics(policy: Keep, kept: Iterable[Kept], new: Kept) -> bool:
    """Return whether `new` would be kept for its metrics, and not only because it is new."""
    if not metrics_of(policy):
        return False
    if isinstance(policy, KeptByAny):
        there = [*kept]
        return any(keeps_for_metrics(each, there, new) for each in policy.policies)
    return would_keep(policy, kept, new)


def metrics_of(policy: Keep) -> frozenset[str]:
    """Return the names of the metrics that a policy looks at; none if it does not say."""
    return frozenset(getattr(policy, "metrics", ()))


# ---- combinations --------------------------------------------------------------------------------


class CombinableKeep:
    """The operators of a keep policy: `|` (kept by either) and `&` (kept by both)."""

    metrics: frozenset[str] = frozenset()
    """The names of the metrics that it looks at."""

    def keep(self, kept: Sequence[Kept]) -> frozenset[int]:
        """Return the steps to keep; see `Keep.keep`."""
        raise NotImplementedError

    def __or__(self, other: Keep) -> KeptByAny:
        return KeptByAny((self, other)) if _is_keep(other) else NotImplemented

    def __and__(self, other: Keep) -> KeptByAll:
        return KeptByAll((self, other)) if _is_keep(other) else NotImplemented


def _is_keep(value: object) -> bool:
    return isinstance(value, Keep) and not isinstance(value, type)


@dataclass(frozen=True)
class KeptByAny(CombinableKeep):
    """A policy that keeps what at least one of the policies keeps."""

    policies: tuple[Keep, ...]

    @property
    def metrics(self) -> frozenset[str]:  # type: ignore[override]
        """Return the names of the metrics that the policies look at."""
        return frozenset().union(*map(metrics_of, self.policies))

    def keep(self, kept: Sequence[Kept]) -> frozenset[int]:
        """Return the steps that one of the policies keeps; see `Keep.keep`."""
        return frozenset().union(*(policy.keep(kept) for policy in self.policies))

    def __str__(self) -> str:
        return " or ".join(map(str, self.policies))


@dataclass(frozen=True)
class KeptByAll(CombinableKeep):
    """A policy that keeps what every one of the policies keeps."""

    policies: tuple[Keep, ...]

    @property
    def metrics(self) -> frozenset[str]:  # type: ignore[override]
        """Return the names of the metrics that the policies look at."""
        return frozenset().union(*map(metrics_of, self.policies))

    def keep(self, kept: Sequence[Kept]) -> frozenset[int]:
        """Return the steps that all of the policies keep; see `Keep.keep`."""
        first, *others = (policy.keep(kept) for policy in self.policies)
        return first.intersection(*others)

    def __str__(self) -> str:
        each = (f"({p})" if isinstance(p, KeptByAny) else str(p) for p in self.policies)
        return " and ".join(each)


# ---- single policies -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Newest(CombinableKeep):
    """A policy that keeps the `n` newest snapshots.

    Args:
        n: 1 or more.

    Raises:
        ConfigError: `n` is not such a number.
    """

    n: int = 1

    def __post_init__(self) -> None:
        checks.positive_int("newest", self.n)

    def keep(self, kept: Sequence[Kept]) -> frozenset[int]:
        """Return the newest steps; see `Keep.keep`."""
        return frozenset(each.step for each in kept[-self.n :])

    def __str__(self) -> str:
        return f"newest {self.n}"


@dataclass(frozen=True)
class Best(CombinableKeep):
    """A policy that keeps the `n` snapshots with the best values of a metric.

    A snapshot of which the metric was not reported, or is not a number, is none of them. Of equal
    values the older one is better.

    Args:
        n: 1 or more.
        metric: the name under which `handle.report` is given it.
        mode: `min` (less is better) or `max`.

    Raises:
        ConfigError: one of these is something else.
    """

    n: int
    metric: str
    mode: str = "min"

    def __post_init__(self) -> None:
        checks.positive_int("best", self.n)
        checks.metric("best", self.metric, self.mode)

    @property
    def metrics(self) -> frozenset[str]:  # type: ignore[override]
        """Return the metric's name."""
        return frozenset({self.metric})

    def keep(self, kept: Sequence[Kept]) -> frozenset[int]:
        """Return the best steps; see `Keep.keep`."""
        sign = 1 if self.mode == "min" else -1
        known = (
            (sign * value, each.step)
            for each in kept
            if not math.isnan(value := each.metrics.get(self.metric, math.nan))
        )
        return frozenset(step for _, step in sorted(known)[: self.n])

    def __str__(self) -> str:
        words = ["best", *([] if self.n == 1 else [str(self.n)])]
        return " ".join([*words, *([] if self.mode == "min" else ["max"]), self.metric])


@dataclass(frozen=True, kw_only=True)
class Every(CombinableKeep):
    """A policy that keeps the first snapshot of each span of steps, seconds or epochs.

    Spans count from 0 (seconds from 1970), and not from a snapshot, so that a later choice is the
    same: with `steps=100` the first at or after 0, at or after 100, at or after 200.

    Args:
        steps: length of a span in steps.
        seconds: the same in seconds.
        epochs: the same in epochs, as marked with `handle.epoch()`.

    Raises:
        ConfigError: not exactly one of them is given, or it is no number above 0.
    """

    steps: int | None = None
    seconds: float | None = None
    epochs: int | None = None

    def __post_init__(self) -> None:
        given = [name for name in ("steps", "seconds", "epochs") if getattr(self, name) is not None]
        if len(given) != 1:
            found = ", ".join(given) or "none"
            raise ConfigError(f"every: needs one of steps, seconds, epochs; found {found}")
        if self.seconds is not None:
            checks.positive_number("every: seconds", self.seconds)
        else:
            checks.positive_int(f"every: {given[0]}", getattr(self, given[0]))

    def _span(self, each: Kept) -> int:
        if self.seconds is not None:
            return math.floor(each.time_s / self.seconds)
        if self.steps is not None:
            return each.step // self.steps
        return each.epoch // (self.epochs or 1)

    def keep(self, kept: Sequence[Kept]) -> frozenset[int]:
        """Return the first step of each span; see `Keep.keep`."""
        first: dict[int, int] = {}
        for each in kept:
            first.setdefault(self._span(each), each.step)
        return frozenset(first.values())

    def __str__(self) -> str:
        if self.seconds is not None:
            return f"every {self.seconds:.12g} s"
        return f"every {self.steps} steps" if self.steps else f"every {self.epochs} epochs"


@dataclass(frozen=True)
class Within(CombinableKeep):
    """A policy that keeps the snapshots of so many seconds before the newest one.

    Args:
        seconds: above 0.

    Raises:
        ConfigError: it is no such number.
    """

    seconds: float

    def __post_init__(self) -> None:
        checks.positive_number("within", self.seconds)

    def keep(self, kept: Sequence[Kept]) -> frozenset[int]:
        """Return the steps of that time; see `Keep.keep`."""
        newest = max(kept, key=lambda each: each.step, default=None)  # a clock may have been ahead
        since = (newest.time_s if newest is not None else 0.0) - self.seconds
        return frozenset(each.step for each in kept if each.time_s >= since)

    def __str__(self) -> str:
        return f"within {self.seconds:.12g} s"


@dataclass(frozen=True, init=False)
class GivenSteps(CombinableKeep):
    """A policy that keeps the snapshots of the given steps.

    Args:
        *steps: at least one, each 1 or more.

    Raises:
        ConfigError: they are not such numbers.
    """

    steps: frozenset[int]

    def __init__(self, *steps: int) -> None:
        if not steps:
            raise ConfigError("steps: needs at least one step")
        for step in steps:
            checks.positive_int("steps", step)
        object.__setattr__(self, "steps", frozenset(steps))

    def keep(self, kept: Sequence[Kept]) -> frozenset[int]:
        """Return those of the steps that are there; see `Keep.keep`."""
        return self.steps & {each.step for each in kept}

    def __str__(self) -> str:
        return " ".join(["steps", *map(str, sorted(self.steps))])


Steps = GivenSteps


# ---- the value of a setting ----------------------------------------------------------------------

_ALLOWED = (
    "newest N, best [N] [min|max] METRIC, every N steps|epochs|s|min|h|d, within N s|min|h|d,"
    " steps N ..., joined by 'or' and 'and'"
)


def parse_keep(value: object) -> Keep | None:
    """Turn the value of a setting into a keep policy.

    Args:
        value: a policy; an int (so many of the newest; 0: no history); or words, such as
            `newest 3 or best val_loss`. `and` binds closer than `or`.

    Returns:
        The policy, `value` itself when it is one; None for no history.

    Raises:
        ConfigError: it is none of these; the message names the word and what is allowed.
    """
    if value is None or (type(value) is int and value == 0):
        return None
    if isinstance(value, int) and not isinstance(value, bool):
        return Newest(value)
    if isinstance(value, str):
        return _from_words(value)
    if _is_keep(value):
        assert isinstance(value, Keep)
        return value
    raise ConfigError(f"must be a number of snapshots, a policy, or words: {_ALLOWED}")


def _from_words(text: str) -> Keep:
    either = [
        _joined([_single(part) for part in _parts(words, "and")], KeptByAll)
        for words in _parts(text.replace(",", " ").split(), "or")
    ]
    return _joined(either, KeptByAny)


def _joined(policies: list[Keep], kind: Callable[[tuple[Keep, ...]], Keep]) -> Keep:
    return policies[0] if len(policies) == 1 else kind(tuple(policies))


def _parts(words: Sequence[str], by: str) -> list[list[str]]:
    parts: list[list[str]] = [[]]
    for word in words:
        if word == by:
            parts.append([])
        else:
            parts[-1].append(word)
    return parts


def _single(words: Sequence[str]) -> Keep:
    if not words:
        raise ConfigError(f"a policy is missing beside 'or' or 'and'; allowed: {_ALLOWED}")
    name, *rest = words
    make = _MAKERS.get(name)
    if make is None:
        raise ConfigError(f"unknown word {name!r}; allowed: {_ALLOWED}")
    return make(rest)


def _number(name: str, words: Sequence[str]) -> int:
    if len(words) != 1 or not words[0].isdecimal():
        raise ConfigError(f"{name!r} is followed by {' '.join(words)!r}; allowed: {_ALLOWED}")
    return int(words[0])


def _newest(words: Sequence[str]) -> Keep:
    return Newest(_number("newest", words) if words else 1)


def _best(words: Sequence[str]) -> Keep:
    *before, metric = words or [""]
    n = int(before.pop(0)) if before and before[0].isdecimal() else 1
    mode = before.pop(0) if before and before[0] in ("min", "max") else "min"
    if before or not metric or metric.isdecimal() or metric in ("min", "max"):
        found = " ".join(words)
        raise ConfigError(f"'best' is followed by {found!r}; allowed: {_ALLOWED}")
    return Best(n, metric, mode)


def _every(words: Sequence[str]) -> Keep:
    if len(words) == 2 and words[1] in ("step", "steps"):
        return Every(steps=_number("every", words[:1]))
    if len(words) == 2 and words[1] in ("epoch", "epochs"):
        return Every(epochs=_number("every", words[:1]))
    return Every(seconds=_duration("every", words))


def _duration(name: str, words: Sequence[str]) -> float:
    unit = quantities.unit_of(words[1]) if len(words) == 2 else None
    try:
        return quantities.seconds(words[0], unit or "")
    except (IndexError, KeyError, ArithmeticError):
        found = " ".join(words)
        raise ConfigError(f"{name!r} is followed by {found!r}; allowed: {_ALLOWED}") from None


def _steps(words: Sequence[str]) -> Keep:
    return Steps(*(_number("steps", [word]) for word in words))


_MAKERS: dict[str, Callable[[Sequence[str]], Keep]] = {
    "newest": _newest,
    "best": _best,
    "every": _every,
    "within": lambda words: Within(_duration("within", words)),
    "steps": _steps,
}
