"""One write-once outcome per opened snapshot: the commit protocol as a state machine, without I/O.

Keys: `c/STEP` counts local commits, `f/STEP` is the outcome (the fate key), `b/BLOCK` counts the
ranks that know every outcome of a block of due steps. The rank whose `add` completes `c` claims `f`
as `whole`; a rank that skips the step, has a torn snapshot, fails or loses patience claims it as
`dead`. The first claim stands for ever, so that no order of messages gives a step two outcomes, and
no rank acts on an outcome before having read it.

Where ranks hold replicas, `d/STEP` is the first rank's digest of them. A rank whose digest differs
reports so in `x/STEP` before it counts itself, there and at every later step: the rank that
completes `c` has only to read that, and the outcome tells every rank that the step is suspect.
Where another rank's report of an older step was first in `x/STEP`, `y/STEP` says that replicas
differ at this step, too.

A rank adds 1 to `c`, and in the higher bits a number derived from the form of the state that all
ranks hold alike. The sum shows whether every form was the same: ranks that hold other tensors make
no step whole.

An `add` is sent at most once. If its answer is lost, nobody can know whether it counted: the rank
then claims `dead`, which is right in either case. A lost claim is simply repeated.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from lightck.distributed.commit.due_steps import BLOCK, DueStep
from lightck.types import Fate

# ---- the calls that the protocol makes to the job's store ----------------------------------------
# All of them may be repeated, except `Add`.


@dataclass(frozen=True, slots=True)
class Add:
    """Add `amount` to `key`; must not be repeated."""

    key: str
    amount: int = 1


@dataclass(frozen=True, slots=True)
class Claim:
    """Set `key` to `value` unless it has one."""

    key: str
    value: bytes


@dataclass(frozen=True, slots=True)
class Read:
    """Read `key` without waiting for it."""

    key: str


@dataclass(frozen=True, slots=True)
class Delete:
    """Delete keys that no rank will touch again."""

    keys: tuple[str, ...]


Call = Add | Claim | Read | Delete


@dataclass(slots=True)
class StoreStats:
    """Counts of the calls that this rank has made to the store so far."""

    reports: int = 0
    claims: int = 0
    watches: int = 0
    looks: int = 0
    deletions: int = 0
    failures: int = 0


# ---- the values of a fate key: whole, whole but suspect, or dead and why -------------------------


@dataclass(frozen=True, slots=True)
class AbortReason:
    """The reason why a step is dead.

    Attributes:
        rank: the rank that claimed it.
        why: the reason, in words.
        for_good: that rank takes no more snapshots.
    """

    rank: int
    why: str
    for_good: bool = False

    def encode(self) -> bytes:
        """Return the value of the fate key."""
        return f"dead {self.rank} {int(self.for_good)} {self.why}".encode("ascii", "replace")[:200]

    @staticmethod
    def decode(value: bytes) -> AbortReason | None:
        """Decode a fate key's value; None if the step is whole.

        Raises:
            ValueError: the value is not that of a fate key.
        """
        if value == WHOLE or value.startswith(SUSPECT):
            return None
        word, rank, for_good, why = value.decode("ascii").split(" ", 3)
        if word != "dead":
            raise ValueError(f"a fate must be 'whole' or 'dead ...', not {value!r}")
        return AbortReason(int(rank), why, for_good == "1")


WHOLE = b"whole"
SUSPECT = b"whole suspect "
"""The prefix of a whole but suspect step; the step whose digests differed follows."""


# ---- the protocol --------------------------------------------------------------------------------

UNLIKE = "replicated state differs between the ranks in names, shapes or dtypes"  # a death's reason
_COUNT_BITS = 20  # bits of a sum that count ranks
_FORM_BITS = 22  # bits of one form: the sum of a million of them and the count stay below 2^63
_LOOK_S = 1.0  # between two reads of the newest outcome, while an older one does not come
_RETRY_S = (0.1, 5.0)  # pause after a failed call: the first, and the longest of its doublings


class _Stage(enum.Enum):
    OPEN = "being copied"
    COMPARE = "to be compared"
    REPORT = "to be counted"
    FINISH = "counted last"
    AWAIT = "waiting for the other ranks"
    LOSE = "lost here"


@dataclass(slots=True)
class _PendingStep:
    due: DueStep
    stage: _Stage
    since_s: float
    death: AbortReason | None = None
    form: int = 0
    digest: bytes = b""
    differs: bool = False
    """True if this rank's digest differs from the first one reported."""
    accuse: str = "x"
    """The key prefix under which to report that this rank differs; empty if the others can know."""
    look: str = "x"
    """The key prefix to read, once counted last, for another rank's report; empty when done."""
    differed: int | None = None
    """The step at which some rank's digest differed; None if no report is known."""


@dataclass
class CommitProtocol:
    """The knowledge of one rank about outcomes, and the calls that it has still to make.

    Give it events (`opened`, `committed`, `lost`, `heard`); make the calls that `next_call`
    returns, one at a time, and pass the result of each to `answered`, or call `failed`.

    Threads: none of its own; the caller holds one lock around every call.
    """

    rank: int
    world: int
    restored: tuple[int, int] | None = None
    """The (timeline, step) that is protected until the first whole step of this timeline."""
    timeline: int = 0
    patience_s: float = 300.0
    """Seconds without an outcome after which a step that this rank committed is claimed dead."""
    on_fate: Callable[[DueStep, Fate, AbortReason | None], None] = lambda due, fate, death: None
    compares: bool = False
    """True if ranks hold replicas, and report digests; the same on every rank."""
    on_suspect: Callable[[int, int], None] = lambda step, differed: None
    """Called with each suspect step, before its outcome, and the step whose digests differed."""
    differed: int | None = None
    """The first step at which this rank's digest was not the first one reported."""
    compared: int = 0
    """Number of steps at which this rank's digest was compared with the first one reported."""
    incomparable: int = 0
    """Number of steps at which the two digests were of different samples."""
    reachable: bool = True
    ended: AbortReason | None = None
    """The death by which a rank ended: no later step can become whole any more."""
    _ended_step: int = -1
    _cases: dict[int, _PendingStep] = field(default_factory=dict)
    _blocks: dict[str, list[int]] = field(default_factory=dict)
    _fates: dict[int, Fate] = field(default_factory=dict)
    _best: tuple[bool, int] | None = None
    """(is trusted, step) of the newest whole step; trusted ones go before suspect ones."""
    _chores: deque[Call] = field(default_factory=deque)
    _call: tuple[Call, _PendingStep | None] | None = None
    _highest: int = -1
    _looked_s: float = 0.0
    _retry_at_s: float = 0.0
    _pause_s: float = _RETRY_S[0]

    # ---- events from this rank ----

    def opened(self, due: DueStep, now_s: float) -> None:
        """Record that this rank invalidates a slot for `due` and begins to copy."""
        if due.step in self._cases or due.step <= self._highest:
            raise ValueError(f"step {due.step} is not above {self._highest}, the last one noted")
        self._highest = due.step
        self._cases[due.step] = _PendingStep(due, _Stage.OPEN, now_s)

    def committed(self, step: int, now_s: float, form: bytes = b"", digest: bytes = b"") -> None:
        """Note that this rank's record of `step` is durable; see `CommitCoordinator.committed`."""
        case = self._cases.get(step)
        if case is None and step > self._highest:
            raise ValueError(f"step {step} was never opened; the last one noted is {self._highest}")
        # Not open any more: it was abandoned meanwhile, and is dead whatever this rank commits.
        if case is not None and case.stage is _Stage.OPEN:
            case.stage, case.since_s = _Stage.COMPARE if digest else _Stage.REPORT, now_s
            case.digest = digest
            case.form = int.from_bytes(form[:4], "little") % (1 << _FORM_BITS)

    def lost(self, due: DueStep, why: str, now_s: float, *, for_good: bool = False) -> None:
        """Record that this rank has no snapshot of `due`: skipped, torn, failed or not known."""
        case = self._cases.get(due.step)
        if case is None:
            self._highest = max(self._highest, due.step)
            case = self._cases[due.step] = _PendingStep(due, _Stage.LOSE, now_s)
        elif case.due.source != due.source:
            return  # announced late, but the loop has requested this very step itself
        elif case.stage is not _Stage.OPEN:
            raise ValueError(f"step {due.step} cannot be lost: it is {case.stage.value}")
        case.stage, case.death = _Stage.LOSE, AbortReason(self.rank, why, for_good)

    def heard(self, step: int, value: bytes) -> None:
        """Record an outcome that the watcher has read."""
        case = self._cases.get(step)
        if case is not None:
            self._settle(case, value)

    def abandon(self, why: str) -> None:
        """Claim every step that this rank still waits for as dead, because it ends."""
        for case in self._cases.values():
            if case.stage in (_Stage.AWAIT, _Stage.OPEN):
                self._lose(case, why)

    # ---- questions ----

    def fate(self, step: int) -> Fate:
        """Return the outcome of a step of this timeline; `UNKNOWN` if not read or forgotten."""
        return self._fates.get(step, Fate.UNKNOWN)

    def reusable(self, timeline: int, step: int) -> bool:
        """Tell whether the slot that holds this snapshot may be overwritten.

        By I6 (old before new) a slot of unknown outcome is never overwritten, nor the newest whole
        one. A suspect snapshot replaces none that is trusted.
        """
        if timeline != self.timeline:
            trusted = self._best is not None and self._best[0]
            return trusted or (timeline, step) != self.restored
        if step in self._cases or step > self._highest:
            return False
        return step != self.newest_whole

    @property
    def newest_whole(self) -> int | None:
        """Return this timeline's newest whole step; a suspect one only if there is no other."""
        return self._best[1] if self._best else None

    @property
    def unsettled(self) -> list[int]:
        """Return the steps of unknown outcome, oldest first."""
        return sorted(self._cases)

    @property
    def watched(self) -> int | None:
        """Return the step whose fate key the watcher waits for: the oldest that others decide."""
        return min((s for s, c in self._cases.items() if c.stage is _Stage.AWAIT), default=None)

    def wake_at_s(self) -> float | None:
        """Return when `next_call` may have something new; None if only after an event."""
        if not self.reachable:
            return self._retry_at_s
        awaiting = self._awaiting()
        times = [case.since_s + self.patience_s for case in awaiting]
        times += [self._look_at_s(case) for case in awaiting[1:]]
        return min(times, default=None)

    # ---- calls ----

    def next_call(self, now_s: float) -> Call | None:
        """Return the call to make now; None if there is none. One at a time."""
        if self._call is not None:
            raise RuntimeError(f"{self._call[0]} has not been answered yet")
        if not self.reachable and now_s < self._retry_at_s:
            return None
        self._call = self._choose(now_s)
        return self._call[0] if self._call else None

    def _choose(self, now_s: float) -> tuple[Call, _PendingStep | None] | None:
        for case in self._cases.values():
            if case.stage is _Stage.AWAIT and now_s - case.since_s >= self.patience_s:
                self._lose(case, f"no fate within {self.patience_s:.0f} s")
        # A call that completes or ends a step for every rank goes first. No step is counted while
        # an older one is to be compared, so that a difference found there is known at this one,
        # too.
        for stage in (_Stage.FINISH, _Stage.COMPARE, _Stage.REPORT, _Stage.LOSE):
            for step, case in self._cases.items():
                if case.stage is stage:
                    return self._call_for(step, case), case
        if self._chores:
            return self._chores[0], None
        # A watcher waits for the oldest outcome. If that does not come, the newest may settle it.
        for case in self._awaiting()[:0:-1]:
            if now_s >= self._look_at_s(case):
                self._looked_s = now_s
                return Read(f"f/{case.due.step}"), case
        return None if self.reachable else (Read("probe"), None)

    def _call_for(self, step: int, case: _PendingStep) -> Call:
        if case.stage is _Stage.COMPARE:
            return Claim(f"d/{step}", case.digest)
        if case.stage is _Stage.REPORT:
            if self.differed is None or self.differed > step or not case.accuse:
                return Add(f"c/{step}", 1 + (case.form << _COUNT_BITS))
            said = step if case.differs else self.differed
            return Claim(f"{case.accuse}/{step}", b"%d" % said)
        if case.death:
            return Claim(f"f/{step}", case.death.encode())
        if self.compares and case.look:
            return Read(f"{case.look}/{step}")
        suspicion = None if case.differed is None else SUSPECT + str(case.differed).encode()
        return Claim(f"f/{step}", suspicion or WHOLE)

    def answered(self, answer: object, now_s: float) -> None:
        """Process the answer to the call."""
        call, case = self._taken()
        self.reachable, self._pause_s = True, _RETRY_S[0]
        if case is None:
            self._chore_done(call, answer)
        elif isinstance(call, Add):
            assert isinstance(answer, int)
            self._counted(case, answer, now_s)
        elif isinstance(call, Read):
            assert isinstance(answer, bytes | None)
            self._read(call, case, answer)
        else:
            assert isinstance(call, Claim)
            assert isinstance(answer, bytes)
            self._claimed(call, case, answer)

    def _read(self, call: Read, case: _PendingStep, value: bytes | None) -> None:
        if call.key[0] in "xy":
            case.differed = case.differed if value is None else int(value)
            older = case.differed not in (None, case.due.step)
            case.look = "y" if older and case.look == "x" else ""
        elif value is not None:
            self._settle(case, value)

    def _claimed(self, call: Claim, case: _PendingStep, value: bytes) -> None:
        match call.key[0]:
            case "d":
                case.stage = _Stage.REPORT
                self._compare(case, value)
            case "x" | "y":
                case.accuse = "y" if case.differs and int(value) != case.due.step else ""
            case _:
                self._settle(case, value)

    def _compare(self, case: _PendingStep, first: bytes) -> None:
        if case.digest.partition(b":")[0] != first.partition(b":")[0]:
            self.incomparable += 1
            return
        self.compared += 1
        case.differs = case.digest != first
        if case.differs and self.differed is None:
            self.differed = case.due.step

    def _counted(self, case: _PendingStep, total: int, now_s: float) -> None:
        count, forms = total % (1 << _COUNT_BITS), total >> _COUNT_BITS
        if count > self.world:
            self._lose(
                case, f"counted {count} commits of {self.world} ranks; keys of another attach?"
            )
        elif forms != count * case.form:
            self._lose(case, UNLIKE)
        elif count < self.world and self.ended and self._is_left_out(case):
            self._lose(case, _no_more(self.ended))
        elif count < self.world:
            # The watcher, or `heard`, may have settled it meanwhile: then nobody looks at it.
            case.stage, case.since_s = _Stage.AWAIT, now_s
        else:
            case.stage = _Stage.FINISH

    def failed(self, now_s: float) -> None:
        """Process a call without an answer: it may or may not have had its effect."""
        call, case = self._taken()
        self.unanswered(now_s)
        if isinstance(call, Add):
            if case is None:
                self._chores.popleft()  # the block stays in the store: a second add ends it early
            else:
                self._lose(case, "its count had no answer from the store")

    def unanswered(self, now_s: float) -> None:
        """Note that the store did not answer; the next call is delayed by a pause."""
        self.reachable = False
        self._retry_at_s = now_s + self._pause_s
        self._pause_s = min(2 * self._pause_s, _RETRY_S[1])

    def _awaiting(self) -> list[_PendingStep]:
        return [c for _, c in sorted(self._cases.items()) if c.stage is _Stage.AWAIT]

    def _look_at_s(self, case: _PendingStep) -> float:
        return max(case.since_s, self._looked_s) + _LOOK_S

    def _lose(self, case: _PendingStep, why: str) -> None:
        case.stage, case.death = _Stage.LOSE, AbortReason(self.rank, why)

    def _taken(self) -> tuple[Call, _PendingStep | None]:
        if self._call is None:
            raise RuntimeError("no call is under way")
        taken, self._call = self._call, None
        return taken

    def _settle(self, case: _PendingStep, value: bytes) -> None:
        step = case.due.step
        if self._cases.pop(step, None) is None:
            return
        death = AbortReason.decode(value)
        if death is None:
            self._stands(step, value)
            self._pass_over(step)
        elif death.for_good:
            self.ended, self._ended_step = death, step
            for other in self._awaiting():
                if self._is_left_out(other):
                    self._lose(other, _no_more(death))
        fate = Fate.DEAD if death else Fate.WHOLE
        self._fates[step] = fate
        if len(self._fates) > 2 * BLOCK:
            del self._fates[next(iter(self._fates))]
        self._close_block(case.due)
        self.on_fate(case.due, fate, death)

    def _is_left_out(self, case: _PendingStep) -> bool:
        """Tell whether the rank that has ended will never count this step.

        It has reported every older step, unless the step was requested by the loop.
        """
        return case.due.step > self._ended_step or case.due.source == "r"

    def _pass_over(self, newer: int) -> None:
        """Stop waiting for older steps: every rank has already reported on them.

        Ranks count their commits in the order of the steps, and all have counted `newer`. An
        outcome that was set before is not changed by the claim.
        """
        for case in self._awaiting():
            if case.due.step < newer:
                self._lose(case, f"not committed on every rank when step {newer} was")

    def _stands(self, step: int, value: bytes) -> None:
        trusted = not value.startswith(SUSPECT)
        self._best = max((trusted, step), self._best or (trusted, step))
        if not trusted:
            self.on_suspect(step, int(value.removeprefix(SUSPECT)))

    def _close_block(self, due: DueStep) -> None:
        # Counted only when this rank knows all outcomes of the block, so that it never touches
        # these keys again: a claim on a deleted key would give a step a second outcome.
        steps = self._blocks.setdefault(due.block, [])
        steps.append(due.step)
        if len(steps) == due.block_size:
            self._chores.append(Add(f"b/{due.block}"))

    def _chore_done(self, call: Call, answer: object) -> None:
        if isinstance(call, Read):
            return
        self._chores.popleft()
        if isinstance(call, Add):
            block = call.key.partition("/")[2]
            steps = self._blocks.pop(block)
            if answer == self.world:
                kinds = "cfdxy" if self.compares else "cf"
                keys = [f"{kind}/{step}" for step in steps for kind in kinds]
                self._chores.append(Delete((*keys, call.key)))


def _no_more(death: AbortReason) -> str:
    """Return the reason for a step that the ended rank has not committed and never will."""
    return f"rank {death.rank} takes no more snapshots"
