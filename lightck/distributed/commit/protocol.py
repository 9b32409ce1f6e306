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
then claims `dead`, which is right in either pending. A lost claim is simply repeated.
"""

from __future__ import annotations

import enum
from collections import deque
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


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """The outcome of a step over all ranks, as this rank has just learned it.

    Attributes:
        due: the step.
        fate: whole or dead.
        abort: the reason why it is dead; None if it is whole.
        differed: the step whose digests differed, if this one is suspect; else None.
    """

    due: DueStep
    fate: Fate
    abort: AbortReason | None = None
    differed: int | None = None


# ---- the protocol --------------------------------------------------------------------------------

UNLIKE = (
    "replicated state differs between the ranks in names, shapes or dtypes"  # an abort's reason
)
_COUNT_BITS = 20  # bits of a sum that count ranks
_FORM_BITS = 22  # bits of one form: the sum of a million of them and the count stay below 2^63
_READ_S = 1.0  # between two reads of the newest outcome, while an older one does not come
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
    abort: AbortReason | None = None
    form: int = 0
    digest: bytes = b""
    differs: bool = False
    """True if this rank's digest differs from the first one reported."""
    report_key: str = "x"
    """The key prefix under which to report that this rank differs; empty if the others can know."""
    read_key: str = "x"
    """The key prefix to read, once counted last, for another rank's report; empty when done."""
    differed: int | None = None
    """The step at which some rank's digest differed; None if no report is known."""


@dataclass
class CommitProtocol:
    """The knowledge of one rank about outcomes, and the calls that it has still to make.

    Give it events (`opened`, `committed`, `lost`, `outcome_read`); make the calls that `next_call`
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
    compares: bool = False
    """True if ranks hold replicas, and report digests; the same on every rank."""
    differed: int | None = None
    """The first step at which this rank's digest was not the first one reported."""
    compared: int = 0
    """Number of steps at which this rank's digest was compared with the first one reported."""
    incomparable: int = 0
    """Number of steps at which the two digests were of different samples."""
    reachable: bool = True
    ended: AbortReason | None = None
    """The reason by which a rank ended: no later step can become whole any more."""
    _ended_step: int = -1
    _pending: dict[int, _PendingStep] = field(default_factory=dict)
    _blocks: dict[str, list[int]] = field(default_factory=dict)
    _fates: dict[int, Fate] = field(default_factory=dict)
    _outcomes: list[StepOutcome] = field(default_factory=list)
    _newest: tuple[bool, int] | None = None
    """(is trusted, step) of the newest whole step; trusted ones go before suspect ones."""
    _cleanup: deque[Call] = field(default_factory=deque)
    _current: tuple[Call, _PendingStep | None] | None = None
    _highest: int = -1
    _newest_read_s: float = 0.0
    _retry_at_s: float = 0.0
    _pause_s: float = _RETRY_S[0]

    def rejoin(self, step: int, restored: tuple[int, int] | None, whole: int | None) -> None:
        """Go on behind `step`, for a rank that replaces a lost one: what came before is settled.

        Args:
            step: the last complete step.
            restored: as for the other ranks.
            whole: this timeline's newest whole step.
        """
        self._highest, self.restored = step, restored
        if whole is not None:
            self._newest = True, whole
            self._fates[whole] = Fate.WHOLE

    # ---- events from this rank ----

    def opened(self, due: DueStep, now_s: float) -> None:
        """Record that this rank invalidates a slot for `due` and begins to copy."""
        if due.step in self._pending or due.step <= self._highest:
            raise ValueError(f"step {due.step} is not above {self._highest}, the last one noted")
        self._highest = due.step
        self._pending[due.step] = _PendingStep(due, _Stage.OPEN, now_s)

    def committed(self, step: int, now_s: float, form: bytes = b"", digest: bytes = b"") -> None:
        """Note that this rank's record of `step` is durable; see `DistributedBarrier.committed`."""
        pending = self._pending.get(step)
        if pending is None and step > self._highest:
            raise ValueError(f"step {step} was never opened; the last one noted is {self._highest}")
        # Not open any more: it was abandoned meanwhile, and is dead whatever this rank commits.
        if pending is not None and pending.stage is _Stage.OPEN:
            pending.stage, pending.since_s = _Stage.COMPARE if digest else _Stage.REPORT, now_s
            pending.digest = digest
            pending.form = int.from_bytes(form[:4], "little") % (1 << _FORM_BITS)

    def lost(self, due: DueStep, why: str, now_s: float, *, for_good: bool = False) -> None:
        """Record that this rank has no snapshot of `due`: skipped, torn, failed or not known."""
        pending = self._pending.get(due.step)
        if pending is None:
            self._highest = max(self._highest, due.step)
            pending = self._pending[due.step] = _PendingStep(due, _Stage.LOSE, now_s)
        elif pending.due.source != due.source:
            return  # announced late, but the loop has requested this very step itself
        elif pending.stage is not _Stage.OPEN:
            raise ValueError(f"step {due.step} cannot be lost: it is {pending.stage.value}")
        pending.stage, pending.abort = _Stage.LOSE, AbortReason(self.rank, why, for_good)

    def outcome_read(self, step: int, value: bytes) -> None:
        """Record the outcome of a step that was read where it was waited for."""
        pending = self._pending.get(step)
        if pending is not None:
            self._settle(pending, value)

    def abandon(self, why: str) -> None:
        """Claim every step that this rank waits for as dead, now and later, because it ends."""
        self.patience_s = 0.0
        for pending in self._pending.values():
            if pending.stage in (_Stage.AWAIT, _Stage.OPEN):
                self._abort(pending, why)

    def abandon_step(self, step: int, why: str) -> None:
        """Claim a step that this rank waits for as dead; ignored if it waits for none such."""
        pending = self._pending.get(step)
        if pending is not None and pending.stage is _Stage.AWAIT:
            self._abort(pending, why)

    # ---- questions ----

    def take_outcomes(self) -> list[StepOutcome]:
        """Return the outcomes learned since the last call; each is returned once."""
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def fate(self, step: int) -> Fate:
        """Return the outcome of a step of this timeline; `UNKNOWN` if not read or forgotten."""
        return self._fates.get(step, Fate.UNKNOWN)

    def reusable(self, timeline: int, step: int) -> bool:
        """Tell whether the slot that holds this snapshot may be overwritten.

        By I6 (old before new) a slot of unknown outcome is never overwritten, nor the newest whole
        one. A suspect snapshot replaces none that is trusted.
        """
        if timeline != self.timeline:
            trusted = self._newest is not None and self._newest[0]
            return trusted or (timeline, step) != self.restored
        if step in self._pending or step > self._highest:
            return False
        return step != self.newest_whole

    @property
    def newest_whole(self) -> int | None:
        """Return this timeline's newest whole step; a suspect one only if there is no other."""
        return self._newest[1] if self._newest else None

    @property
    def unsettled(self) -> list[int]:
        """Return the steps of unknown outcome, oldest first."""
        return sorted(self._pending)

    @property
    def watched(self) -> int | None:
        """Return the step whose fate key the watcher waits for: the oldest that others decide."""
        return min((s for s, c in self._pending.items() if c.stage is _Stage.AWAIT), default=None)

    def wake_at_s(self) -> float | None:
        """Return when `next_call` may have something new; None if only after an event."""
        if not self.reachable:
            return self._retry_at_s
        awaiting = self._awaiting()
        times = [pending.since_s + self.patience_s for pending in awaiting]
        times += [self._read_at_s(pending) for pending in awaiting[1:]]
        return min(times, default=None)

    # ---- calls ----

    def next_call(self, now_s: float) -> Call | None:
        """Return the call to make now; None if there is none. One at a time."""
        if self._current is not None:
            raise RuntimeError(f"{self._current[0]} has not been answered yet")
        if not self.reachable and now_s < self._retry_at_s:
            return None
        self._current = self._choose(now_s)
        return self._current[0] if self._current else None

    def _choose(self, now_s: float) -> tuple[Call, _PendingStep | None] | None:
        for pending in self._pending.values():
            if pending.stage is _Stage.AWAIT and now_s - pending.since_s >= self.patience_s:
                self._abort(pending, f"no fate within {self.patience_s:.0f} s")
        # A call that completes or ends a step for every rank goes first. No step is counted while
        # an older one is to be compared, so that a difference found there is known at this one,
        # too.
        for stage in (_Stage.FINISH, _Stage.COMPARE, _Stage.REPORT, _Stage.LOSE):
            for step, pending in self._pending.items():
                if pending.stage is stage:
                    return self._call_for(step, pending), pending
        if self._cleanup:
            return self._cleanup[0], None
        # The oldest outcome is waited for elsewhere. If it does not come, the newest may settle it.
        for pending in self._awaiting()[:0:-1]:
            if now_s >= self._read_at_s(pending):
                self._newest_read_s = now_s
                return Read(f"f/{pending.due.step}"), pending
        return None if self.reachable else (Read("probe"), None)

    def _call_for(self, step: int, pending: _PendingStep) -> Call:
        if pending.stage is _Stage.COMPARE:
            return Claim(f"d/{step}", pending.digest)
        if pending.stage is _Stage.REPORT:
            if self.differed is None or self.differed > step or not pending.report_key:
                return Add(f"c/{step}", 1 + (pending.form << _COUNT_BITS))
            differed = step if pending.differs else self.differed
            return Claim(f"{pending.report_key}/{step}", b"%d" % differed)
        if pending.abort:
            return Claim(f"f/{step}", pending.abort.encode())
        if self.compares and pending.read_key:
            return Read(f"{pending.read_key}/{step}")
        suspicion = None if pending.differed is None else SUSPECT + str(pending.differed).encode()
        return Claim(f"f/{step}", suspicion or WHOLE)

    def answered(self, answer: object, now_s: float) -> None:
        """Process the answer to the call."""
        call, pending = self._take_current()
        self.reachable, self._pause_s = True, _RETRY_S[0]
        if pending is None:
            self._cleaned_up(call, answer)
        elif isinstance(call, Add):
            assert isinstance(answer, int)
            self._counted(pending, answer, now_s)
        elif isinstance(call, Read):
            assert isinstance(answer, bytes | None)
            self._read(call, pending, answer)
        else:
            assert isinstance(call, Claim)
            assert isinstance(answer, bytes)
            self._claimed(call, pending, answer)

    def _read(self, call: Read, pending: _PendingStep, value: bytes | None) -> None:
        if call.key[0] in "xy":
            pending.differed = pending.differed if value is None else int(value)
            older = pending.differed not in (None, pending.due.step)
            pending.read_key = "y" if older and pending.read_key == "x" else ""
        elif value is not None:
            self._settle(pending, value)

    def _claimed(self, call: Claim, pending: _PendingStep, value: bytes) -> None:
        match call.key[0]:
            case "d":
                pending.stage = _Stage.REPORT
                self._compare(pending, value)
            case "x" | "y":
                pending.report_key = (
                    "y" if pending.differs and int(value) != pending.due.step else ""
                )
            case _:
                self._settle(pending, value)

    def _compare(self, pending: _PendingStep, first: bytes) -> None:
        if pending.digest.partition(b":")[0] != first.partition(b":")[0]:
            self.incomparable += 1
            return
        self.compared += 1
        pending.differs = pending.digest != first
        if pending.differs and self.differed is None:
            self.differed = pending.due.step

    def _counted(self, pending: _PendingStep, total: int, now_s: float) -> None:
        count, forms = total % (1 << _COUNT_BITS), total >> _COUNT_BITS
        if count > self.world:
            self._abort(
                pending, f"counted {count} commits of {self.world} ranks; keys of another attach?"
            )
        elif forms != count * pending.form:
            self._abort(pending, UNLIKE)
        elif count < self.world and self.ended and self._is_left_out(pending):
            self._abort(pending, _no_more(self.ended))
        elif count < self.world:
            # `outcome_read` may have settled it meanwhile: then nobody looks at it.
            pending.stage, pending.since_s = _Stage.AWAIT, now_s
        else:
            pending.stage = _Stage.FINISH

    def failed(self, now_s: float) -> None:
        """Process a call without an answer: it may or may not have had its effect."""
        call, pending = self._take_current()
        self.unanswered(now_s)
        if isinstance(call, Add):
            if pending is None:
                self._cleanup.popleft()  # the block stays in the store: a second add ends it early
            else:
                self._abort(pending, "its count had no answer from the store")

    def unanswered(self, now_s: float) -> None:
        """Note that the store did not answer; the next call is delayed by a pause."""
        self.reachable = False
        self._retry_at_s = now_s + self._pause_s
        self._pause_s = min(2 * self._pause_s, _RETRY_S[1])

    def _awaiting(self) -> list[_PendingStep]:
        return [c for _, c in sorted(self._pending.items()) if c.stage is _Stage.AWAIT]

    def _read_at_s(self, pending: _PendingStep) -> float:
        return max(pending.since_s, self._newest_read_s) + _READ_S

    def _abort(self, pending: _PendingStep, why: str) -> None:
        pending.stage, pending.abort = _Stage.LOSE, AbortReason(self.rank, why)

    def _take_current(self) -> tuple[Call, _PendingStep | None]:
        if self._current is None:
            raise RuntimeError("no call is under way")
        taken, self._current = self._current, None
        return taken

    def _settle(self, pending: _PendingStep, value: bytes) -> None:
        step = pending.due.step
        if self._pending.pop(step, None) is None:
            return
        abort = AbortReason.decode(value)
        differed = int(value.removeprefix(SUSPECT)) if value.startswith(SUSPECT) else None
        if abort is None:
            trusted = differed is None
            self._newest = max((trusted, step), self._newest or (trusted, step))
            self._abort_older(step)
        elif abort.for_good:
            self.ended, self._ended_step = abort, step
            for other in self._awaiting():
                if self._is_left_out(other):
                    self._abort(other, _no_more(abort))
        fate = Fate.DEAD if abort else Fate.WHOLE
        self._fates[step] = fate
        if len(self._fates) > 2 * BLOCK:
            del self._fates[next(iter(self._fates))]
        self._close_block(pending.due)
        self._outcomes.append(StepOutcome(pending.due, fate, abort, differed))

    def _is_left_out(self, pending: _PendingStep) -> bool:
        """Tell whether the rank that has ended will never count this step.

        It has reported every older step, unless the step was requested by the loop.
        """
        return pending.due.step > self._ended_step or pending.due.source == "r"

    def _abort_older(self, newer: int) -> None:
        """Stop waiting for older steps: every rank has already reported on them.

        Ranks count their commits in the order of the steps, and all have counted `newer`. An
        outcome that was set before is not changed by the claim.
        """
        for pending in self._awaiting():
            if pending.due.step < newer:
                self._abort(pending, f"not committed on every rank when step {newer} was")

    def _close_block(self, due: DueStep) -> None:
        # Counted only when this rank knows all outcomes of the block, so that it never touches
        # these keys again: a claim on a deleted key would give a step a second outcome.
        steps = self._blocks.setdefault(due.block, [])
        steps.append(due.step)
        if len(steps) == due.block_size:
            self._cleanup.append(Add(f"b/{due.block}"))

    def _cleaned_up(self, call: Call, answer: object) -> None:
        if isinstance(call, Read):
            return
        self._cleanup.popleft()
        if isinstance(call, Add):
            block = call.key.partition("/")[2]
            steps = self._blocks.pop(block)
            if answer == self.world:
                kinds = "cfdxy" if self.compares else "cf"
                keys = [f"{kind}/{step}" for step in steps for kind in kinds]
                self._cleanup.append(Delete((*keys, call.key)))


def _no_more(reason: AbortReason) -> str:
    """Return the reason for a step that the ended rank has not committed and never will."""
    return f"rank {reason.rank} takes no more snapshots"
