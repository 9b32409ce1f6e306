"""The plan of one recovery: from which step a replacement goes on, and which results it is given.

Every surviving rank says where it stands (`Standing`); each then computes the same plan from the
same standings, so that nobody leads. Pure: no store, no thread, no tensor.

A collective has a number, which counts alike on every rank. After a failure three cases are left:

- nobody has completed it: all make it again, and a replacement with them;
- somebody has: whoever lacks it is given the result, a replacement included;
- somebody had, and the result was changed in place since: the recovery is refused.

A replacement restores step T, the newest complete one, if a survivor has begun the forward behind
it: all that happened until then is in the restored state, and the replacement computes minibatch
T + 1 alone. If all survivors stand between the end of step T and that forward, in a collective of
the loop's own (a metric, a barrier), what the lost rank would have given to it is known to nobody.
Then the replacement restores step T - 1 and repeats step T from the results that it is given.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

SETTLED_STEP = 2
"""The first step that a replacement can go on from: until then DDP arranges its buckets."""
SPARSE = ", sparse"
"""The end of the kind of a collective whose result is sparse, and never given."""
CALLED_FROM = " < "
"""Stands between the places of a site."""
MAX_NAMED = 6
"""Numbers or ranks named in a reason at most."""


PROGRAM, TORCH, LIBRARY = "program", "torch", "library"


@dataclass(frozen=True, slots=True)
class Description:
    """The form of a collective, by which ranks notice that they make different ones."""

    kind: str
    """Its name, such as `allreduce`; with the root, operation or call site where it has one."""
    tensors: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """dtype and shape of each tensor of the result."""
    shared: bool = True
    """True if the result is the same on every rank, so that any of them can give it."""
    site: str = field(default="", compare=False)
    """File and line of the program, then those of its callers, which may well differ by rank."""
    maker: str = field(default="", compare=False)
    """The maker of it in a set-up: `PROGRAM`, `TORCH` (DDP, say) or `LIBRARY`; empty behind it."""

    @property
    def line(self) -> str:
        """Return the place of the site that makes the collective itself."""
        return self.site.partition(CALLED_FROM)[0]

    def to_message(self) -> list[Any]:
        """Return it as JSON values."""
        tensors = [[dtype, [*shape]] for dtype, shape in self.tensors]
        return [self.kind, tensors, self.shared, self.site, self.maker]

    @staticmethod
    def from_message(told: Sequence[Any]) -> Description:
        """Return what `to_message` has told."""
        kind, tensors, shared, site, maker = told
        found = tuple((dtype, tuple(shape)) for dtype, shape in tensors)
        return Description(kind, found, shared, site, maker)


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a surviving rank stands, once nothing of its communication moves any more.

    Attributes:
        rank: the rank.
        step: its last complete step; the same on all, since a step's commit is one for all.
        starts: forward start by step: the number of the first collective behind it. It has that of
            `step` only if training has come to that forward.
        ends: step end by step: the number of the first collective behind it.
        open: the collectives that it has begun and not completed, by number.
        intact: those it has completed, whose results are as they were.
        spoiled: those it has completed and whose results have been changed since.
        issued: the number of the first collective that it has not begun yet.
        unable: why it cannot go on with the others, behind its name; empty: it can.
    """

    rank: int
    step: int
    starts: Mapping[int, int] = field(default_factory=dict)
    ends: Mapping[int, int] = field(default_factory=dict)
    open: Mapping[int, Description] = field(default_factory=dict)
    intact: Mapping[int, Description] = field(default_factory=dict)
    spoiled: Mapping[int, Description] = field(default_factory=dict)
    issued: int = 0
    unable: str = ""

    @property
    def known(self) -> dict[int, Description]:
        """Every collective that it knows of, by number."""
        return {**self.open, **self.intact, **self.spoiled}

    @property
    def is_beyond(self) -> bool:
        """Tell whether its training has begun the forward behind the last step, and all before."""
        start = self.starts.get(self.step)
        return start is not None and all(number >= start for number in self.open)

    def to_message(self) -> dict[str, Any]:
        """Return it as JSON values."""
        tables = {
            name: [[n, each.to_message()] for n, each in getattr(self, name).items()]
            for name in ("open", "intact", "spoiled")
        }
        plain = {name: getattr(self, name) for name in ("rank", "step", "issued", "unable")}
        instants = {name: [*getattr(self, name).items()] for name in ("starts", "ends")}
        return {**plain, **instants, **tables}

    @staticmethod
    def from_message(told: Mapping[str, Any]) -> Standing:
        """Return what `to_message` has told."""
        tables: dict[str, Any] = {
            name: {int(n): Description.from_message(each) for n, each in told[name]}
            for name in ("open", "intact", "spoiled")
        }
        instants: dict[str, Any] = {
            name: {int(step): int(n) for step, n in told[name]} for name in ("starts", "ends")
        }
        plain = {name: told[name] for name in ("rank", "step", "issued", "unable")}
        return Standing(**plain, **instants, **tables)


@dataclass(frozen=True, slots=True)
class Plan:
    """The way in which the ranks go on together.

    Attributes:
        step: the step that replacements restore; None: nobody was lost, only connections.
        base: the number of the first collective that replacements make or are given.
        prelude: the collectives between the end of that step and its forward start, by number, if
            they can be given: a loop that begins with a collective begins with one of these.
        withheld: the forms of those before them, one of which nobody can give.
        donors: for each result that some rank lacks the rank that gives it, by number, ascending.
        forms: the form of each of these collectives.
    """

    step: int | None
    base: int
    donors: Mapping[int, int]
    forms: Mapping[int, Description]
    prelude: tuple[int, ...] = ()
    withheld: tuple[Description, ...] = ()


@dataclass(frozen=True, slots=True)
class PlanRefused:
    """The reason why all ranks have to be restarted."""

    why: str


def plan_of(standings: Iterable[Standing], lost: Iterable[int]) -> Plan | PlanRefused:
    """Return how the ranks go on, or why they cannot; the same on every rank.

    Args:
        standings: of all survivors.
        lost: the ranks whose processes have ended, and that are replaced.
    """
    every, gone = sorted(standings, key=lambda each: each.rank), sorted(lost)
    for each in every:
        if each.unable:
            return PlanRefused(f"rank {each.rank} {each.unable}")
    if not every:
        return PlanRefused("no rank is left")
    steps = {each.step for each in every}
    if len(steps) > 1:
        return PlanRefused(f"the ranks stand at different steps: {sorted(steps)}")
    forms = _forms(every)
    if isinstance(forms, PlanRefused):
        return forms
    if not gone:
        return _with_donors(every, forms, None, None)
    start = _start(every)
    if isinstance(start, PlanRefused):
        return start
    step, base = start
    alone = [n for n, form in forms.items() if n >= base and not form.shared]
    if alone:
        kinds = sorted({forms[n].kind for n in alone})
        return PlanRefused(
            f"rank(s) {gone} had a part in {', '.join(kinds)}, whose results differ by rank, and"
            " which cannot be given to their replacement"
        )
    return _with_donors(every, forms, step, base)


def _start(every: Sequence[Standing]) -> tuple[int, int] | PlanRefused:
    """Return the step that replacements restore, and the first collective behind it."""
    step = every[0].step
    beyond = any(each.is_beyond for each in every)
    wanted = step if beyond else step - 1
    if wanted < SETTLED_STEP:
        return PlanRefused(
            f"only {step} step(s) are complete: DDP settles its buckets in the first"
            f" {SETTLED_STEP}, and little is lost by a restart"
        )
    found = {each.starts[wanted] for each in every if wanted in each.starts}
    if len(found) != 1:
        numbers = sorted(found)
        return PlanRefused(
            f"the forward start of step {wanted} came before collective {numbers} on different"
            " ranks: they do not make the same collectives"
            if numbers
            else f"no rank knows the forward start of step {wanted} any more"
        )
    return wanted, found.pop()


def _forms(every: Sequence[Standing]) -> dict[int, Description] | PlanRefused:
    """Return the form of each collective that a rank knows of; refuse if ranks differ."""
    forms: dict[int, Description] = {}
    for each in every:
        for number, form in each.known.items():
            if forms.setdefault(number, form) != form:
                return PlanRefused(
                    f"collective {number} is {form.kind} {form.tensors} on rank {each.rank} and"
                    f" {forms[number].kind} {forms[number].tensors} on another"
                )
    return dict(sorted(forms.items()))


def _with_donors(
    every: Sequence[Standing],
    forms: Mapping[int, Description],
    step: int | None,
    base: int | None,
) -> Plan | PlanRefused:
    """Return the plan with a donor for each result that some rank, or a replacement, lacks."""
    donors: dict[int, int] = {}
    for number, form in forms.items():
        # A root may be through with a broadcast that another rank has not begun yet.
        lacked = any(number in each.open or number >= each.issued for each in every)
        lacked = lacked or (base is not None and number >= base)
        completed = any(number in each.intact or number in each.spoiled for each in every)
        if not (lacked and completed):
            continue  # nobody lacks it, or nobody has it: all make it again
        if not form.shared:
            return PlanRefused(f"{form.kind} has come to an end on some ranks only")
        holder = _holder(every, number)
        if holder is None:
            what = f"the result of {form.kind} {form.tensors[:MAX_NAMED]}"
            if form.kind.endswith(SPARSE):
                return PlanRefused(f"{what} is sparse, and cannot be given to who lacks it")
            return PlanRefused(f"{what} was changed before every rank had it")
        donors[number] = holder
    prelude, withheld = (
        ((), ()) if step is None or base is None else _prelude(every, forms, step, base)
    )
    for number in prelude:
        holder = _holder(every, number)
        assert holder is not None
        donors.setdefault(number, holder)
    donors = dict(sorted(donors.items()))
    return Plan(step, base or 0, donors, {n: forms[n] for n in donors}, prelude, withheld)


def _holder(every: Sequence[Standing], number: int) -> int | None:
    """Return the lowest rank that has a result as it was, or None."""
    return next((each.rank for each in every if number in each.intact), None)


def _prelude(
    every: Sequence[Standing], forms: Mapping[int, Description], step: int, base: int
) -> tuple[tuple[int, ...], tuple[Description, ...]]:
    """Return the last collectives before `base` that can be given, and the forms of those before.

    Back to the step's end. Where one is known to nobody none can be given: it may be any of them.
    """
    found: list[int] = []
    # Who has joined at this step does not know where it ended.
    end = min((each.ends[step] for each in every if step in each.ends), default=base)
    for number in range(base - 1, end - 1, -1):
        form = forms.get(number)
        if form is None or not form.shared or _holder(every, number) is None:
            break
        found.insert(0, number)
    before = [forms.get(number) for number in range(end, base - len(found))]
    withheld = tuple(form for form in before if form is not None)
    return (tuple(found), withheld) if len(withheld) == len(before) else ((), ())
