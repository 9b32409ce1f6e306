"""The commit barrier of several ranks, which asks the commit protocol and does its I/O.

Which steps are due, which may be opened and what became of them over all ranks is decided in
memory: by `DueCalendar` and by `CommitProtocol`, which know neither store nor threads. The barrier
makes the calls that these have for the job's store, on a background thread. A second thread only
waits for the oldest outcome that other ranks decide, on a connection of its own, so that the
outcome is known as soon as the store has it, and the wait does not delay this rank's own reports.
No collective is used, and the training thread waits for neither thread, but in `wait` and `close`.
"""

from __future__ import annotations

import re
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from lightck.config import Config
from lightck.distributed.commit.closing_round import ClosingRound
from lightck.distributed.commit.due_steps import (
    DueAnnouncer,
    DueCalendar,
    DueStep,
    announcement_key,
)
from lightck.distributed.commit.protocol import (
    UNLIKE,
    AbortReason,
    Add,
    Call,
    Claim,
    CommitProtocol,
    Delete,
    Read,
)
from lightck.distributed.divergence import Divergence, ReplicaSamples, SuspectMarks
from lightck.distributed.rendezvous import Rendezvous
from lightck.distributed.rounds import Identity, Message, agree_on_attach
from lightck.distributed.store import KeyValueStore
from lightck.errors import CoordinationError, LightckError, StoreError
from lightck.policy import EverySteps
from lightck.region.region import Region
from lightck.types import Fate, Moment, Policy

LATE = "not known in time"  # of a step that a rank passed before it read the announcement
_IDLE_S = 60.0  # longest sleep of the thread without an event
_WATCH_S = 600.0  # one wait for an outcome; torch prints two lines when it ends without one
_FATES_S = 10.0  # for outcomes, when all ranks have reported everything
_GONE_S = 2.0  # the same, when a rank or the store is gone
_REMEMBERED = 256  # due steps that are settled here


@dataclass(eq=False)
class _LocalStep:
    """The state of one due step on this rank."""

    due: DueStep
    opened: bool = False
    over: bool = False
    """True if the step was committed here, or lost."""

    @property
    def is_new(self) -> bool:
        """Tell whether nothing has been reported of the step yet."""
        return not (self.opened or self.over)


class DistributedBarrier:
    """The barrier of several ranks; see `pipeline.commit_barrier.CommitBarrier`.

    Each due step is opened or lost, and then committed or lost, exactly once, whatever the training
    loop does. Threads: any; the lock is held only while memory is read or written.
    """

    alone = False

    def __init__(
        self,
        ranks: Rendezvous,
        region: Region,
        config: Config,
        step: int,
        samples: ReplicaSamples,
        restored: tuple[int, int] | None = None,
        *,
        answer_s: float = 10.0,
        patience_s: float = 300.0,
    ) -> None:
        """Prepare the barrier, which is used from `begin` on.

        Args:
            ranks: the meeting at attach, which `begin` ends.
            region: this rank's region, claimed, and large enough.
            config: of this rank.
            step: the last complete step.
            samples: the sampling of the state that every rank holds alike.
            restored: (timeline, step) that this process restored, also from other ranks' regions.
            answer_s: a store whose call has had no answer for so many seconds counts as
                unreachable.
            patience_s: a step without an outcome for so many seconds is claimed dead by any rank
                that waits for it.
        """
        self._ranks, self._region, self._config = ranks, region, config
        self._restored, self._answer_s, self._patience_s = restored, answer_s, patience_s
        self._samples, self._marks = samples, SuspectMarks(region)
        every = config.policy.n if isinstance(config.policy, EverySteps) else None
        self._calendar = DueCalendar(every=every, announced=every is None, start=step)
        self._announcer = DueAnnouncer(self._calendar)
        self._changed = threading.Condition()  # all of this but `_troubles`; reentrant
        self._steps: dict[int, _LocalStep] = {}
        self._passed = step  # the last step that was asked for
        self._requests = 0
        self._aborts: dict[int, AbortReason] = {}
        self._troubles: deque[LightckError] = deque()
        self._suspects: list[tuple[int, int]] = []  # not marked yet: step, where replicas differed
        self._unlike = False  # reported already, and no step has become whole since
        self._ended: set[int] = set()  # ranks that take no more snapshots
        self._outbox: deque[Claim] = deque()  # announcements of rank 0
        self._poll_at_s = 0.0
        self._call_began_s: float | None = None
        self._broken: BaseException | None = None
        self._closing = self._left = self._ending = self._stopped = False
        self._last_whole: int | None = None
        self._form = b""  # the form of the newest snapshot here

    def begin(self) -> int:
        """Agree on a timeline with all ranks, end the meeting, and start; return the timeline.

        No check that may fail on one rank alone may follow this call.

        Raises:
            CoordinationError: what differs, or which rank failed and why; on every rank.
            StoreError: no connection.
        """
        continued, restored = self._region.continued, self._restored
        # A rank that was given what it lacked continues an older snapshot of its own region.
        if continued is not None and (restored is None or continued.step >= restored[1]):
            restored = (continued.timeline, continued.step)
        identity = Identity(
            run_id=self._region.info.run_id,
            world=self._ranks.world,
            path=self._region.place.common,
            slots=self._config.slots,
            policy=policy_text(self._config.policy),
            step=self._calendar.start,
            restored=restored,
        )
        timeline = self._ranks.agree(
            lambda rounds: agree_on_attach(rounds, identity) if rounds else 0
        )
        self._ranks.leave()
        self.start(self._ranks.store.below(f"t{timeline:x}"), timeline, restored)
        self._region.follow_ranks(self.reusable)
        return timeline

    def progress(self) -> Message:
        """Return what the barrier of a rank goes on from that joins this timeline now."""
        with self._changed:
            return {
                "start": self._calendar.start,
                "learned": self._calendar.learned,
                "ahead": self._calendar.ahead,
                "requests": self._requests,
                "unsettled": self._protocol.unsettled,
                "restored": self._protocol.restored,
                "whole": self._protocol.newest_whole,
            }

    def _join(self, told: Message) -> None:
        """Go on from another rank's progress, for a rank that replaces a lost one."""
        store, step = self._store, self._passed
        restored = None if told["restored"] is None else tuple(told["restored"])
        self._calendar = DueCalendar(
            every=self._calendar.every, announced=self._calendar.announced, start=told["start"]
        )
        self._calendar.rejoin(step, told["learned"], told["ahead"])
        while (value := store.read(announcement_key(self._calendar.learned))) is not None:
            self._calendar.learn(int(value), time.monotonic())
        self._announcer = DueAnnouncer(self._calendar, self._calendar.learned)
        self._requests = told["requests"]
        self._protocol.rejoin(step, restored, told["whole"])
        # Nobody else can still count the lost rank in.
        dead = AbortReason(self._ranks.rank, "the rank was replaced").encode()
        for open_step in told["unsettled"]:
            if open_step <= step:
                store.claim(f"f/{open_step}", dead)

    def start(
        self, store: KeyValueStore, timeline: int, restored: tuple[int, int] | None = None
    ) -> None:
        """Start the threads over `store`, below a prefix that belongs to this attach alone."""
        rank, world = self._ranks.rank, self._ranks.world
        self._store, self._watcher_store = store, store.clone()
        self._closing_round = ClosingRound(store.below("close"), rank, world)
        self._divergence = Divergence(
            store, rank, world, self._samples, self._marks.mark, self._troubles.append
        )
        self._protocol = CommitProtocol(
            rank, world, restored, timeline, patience_s=self._patience_s, compares=True
        )
        self._threads = [
            threading.Thread(target=self._guard, args=(run,), name=f"lightck-{name}", daemon=True)
            for name, run in (("commit", self._make_calls), ("watch", self._watch))
        ]
        joining = self._ranks.joining
        if joining is not None:
            self._join(joining.progress)
        for thread in self._threads:
            thread.start()

    # ---- due steps ----

    def due(self, moment: Moment, policy: Policy) -> bool:
        """Tell whether this step is due, and announce a later one if the policy wants a snapshot.

        A fixed period needs no message. Any other policy is asked on rank 0 only, which announces.
        """
        with self._changed:
            # The step counter skips numbers where optimizers were found during a step.
            for step in range(self._passed + 1, moment.step + 1):
                due = self._calendar.at(step)
                if due is not None:
                    self._steps[step] = _LocalStep(due)
            self._passed = max(self._passed, moment.step)
            for step in [s for s, each in self._steps.items() if s < moment.step and each.is_new]:
                self.lost(step, "passed over")
            for step in [*self._steps][:-_REMEMBERED]:
                if self._steps[step].over:
                    del self._steps[step]
            now = self._steps.get(moment.step)
            # An announcement published while the store is away would come late everywhere.
            announces = self._calendar.announced and self._ranks.rank == 0 and self.reachable
        if now is None and announces and policy.due(moment):
            self.announce(moment.step, moment.step_s)
        return now is not None and not now.over

    def announce(self, step: int, step_s: float | None = None) -> int | None:
        """Publish, on rank 0, the step that shall have the snapshot that is wanted as `step` ends.

        Returns:
            The step to come; None if a step that every rank knows is due no later.

        Raises:
            ValueError: this is not rank 0.
        """
        if self._ranks.rank != 0:
            raise ValueError(f"rank {self._ranks.rank} announces nothing: rank 0 decides")
        with self._changed:
            ordinal = self._announcer.count
            target = self._announcer.choose(step, step_s, time.monotonic())
            if target is not None:
                self._outbox.append(Claim(announcement_key(ordinal), str(target).encode()))
                self._changed.notify_all()
            return target

    def request(self, step: int) -> bool:
        """Register a request by the loop; every rank makes it at the same step, as in a collective.

        Returns:
            Whether a snapshot of the step can still be opened here.
        """
        with self._changed:
            if step not in self._steps:
                self._steps[step] = _LocalStep(DueStep(step, self._requests, "r"))
                self._requests += 1
            return self._closing or self._steps[step].is_new

    def opening(self, step: int) -> str | None:
        """Report that a snapshot of `step` is being opened; return why it may not be, or None.

        It may not without contact to the other ranks: the outcome could not be learned.
        """
        with self._changed:
            local = self._steps.get(step)
            if local is None or local.over:
                return None if self._closing else f"step {step} is not due on every rank"
            if not local.opened:
                why = self.why_not_open()
                if why is not None:
                    return why
                try:
                    self._protocol.opened(local.due, time.monotonic())
                except ValueError as error:  # its announcement came late: it is lost already
                    local.over = True
                    return None if self._closing else str(error)
                local.opened = True
            return None

    def why_not_open(self) -> str | None:
        """Return why no snapshot may be opened now; None if one may."""
        with self._changed:
            if self._ending:
                return "closed"
            if self._broken:
                return f"the thread of the global commit ended: {self._broken!r}"
            if self._protocol.ended:
                return f"rank {self._protocol.ended.rank} takes no more: {self._protocol.ended.why}"
            if self._hung_s > self._answer_s:
                return f"the job's store has not answered for {self._hung_s:.0f} s"
            return None if self._protocol.reachable else "the job's store does not answer"

    @property
    def reachable(self) -> bool:
        """Tell whether the store answers, as far as is known."""
        with self._changed:
            hangs = self._hung_s > self._answer_s
            return self._protocol.reachable and not hangs and self._broken is None

    @property
    def _hung_s(self) -> float:
        """Return how long the call to the store that is under way has had no answer."""
        return 0.0 if self._call_began_s is None else time.monotonic() - self._call_began_s

    # ---- what becomes of them ----

    def sample(self, step: int) -> None:
        """Digest this step's sample of replicated state, if the step is due and opened."""
        with self._changed:
            local = self._steps.get(step)
        if local is not None and local.opened:
            self._samples.take(step, self._calendar.start + local.due.ordinal)

    def committed(self, step: int, form: bytes) -> None:
        """Report that `step` is committed here, if it is a due step; the last one may not be."""
        with self._changed:
            self._form = form
            local = self._steps.get(step)
            if local is not None and local.opened and not local.over:
                local.over = True
                sample = self._samples.sample(step)
                self._marks.note(step)
                digest = sample.digest if sample else b""
                self._protocol.committed(step, time.monotonic(), form, digest)
                self._changed.notify_all()

    def lost(self, step: int, why: str, *, for_good: bool = False) -> None:
        """Report that this rank has no snapshot of a due step; only the first report counts."""
        with self._changed:
            local = self._steps.get(step)
            if local is not None and not local.over:
                local.over = True
                self._protocol.lost(local.due, why, time.monotonic(), for_good=for_good)
                self._changed.notify_all()

    def compared(self) -> tuple[int, int]:
        """Return how many due steps were compared, and how many could not be; see `Stats`.

        The counters change one at a time: they are read without waiting for the lock.
        """
        protocol = self._protocol
        return protocol.compared, protocol.incomparable + self._samples.skipped

    def fate(self, step: int) -> Fate:
        """Return the outcome of a step, as far as it is known in memory."""
        with self._changed:
            return Fate.WHOLE if step == self._last_whole else self._protocol.fate(step)

    def why_dead(self, step: int) -> str:
        """Return why a step is dead, as reported by the rank that claimed it."""
        abort = self._aborts.get(step)
        return f"rank {abort.rank}: {abort.why}" if abort else "its fate is not known"

    def reusable(self, timeline: int, step: int) -> bool:
        """Tell whether the slot that holds this snapshot may be overwritten."""
        with self._changed:
            return self._protocol.reusable(timeline, step)

    def wait(self, step: int, seconds: float) -> None:
        """Wait up to `seconds` for a step's outcome.

        On the training thread only if the user waits.
        """
        with self._changed:
            self._changed.wait_for(lambda: self.fate(step) is not Fate.UNKNOWN, seconds)

    def abandon(self, step: int) -> None:
        """Claim that a step without an outcome is dead: its slot is needed."""
        with self._changed:
            self._protocol.abandon_step(step, "its outcome did not come, and its slot was needed")
            self._changed.notify_all()

    def troubles(self) -> list[LightckError]:
        """Return the errors noted since the last call, such as that the store does not answer."""
        found: list[LightckError] = []
        while self._troubles:
            found.append(self._troubles.popleft())
        return found

    # ---- the end ----

    def begin_close(self) -> None:
        """Begin the close: from now on the last step is settled by a round, due or not."""
        self._closing = True

    def close(self, last: int | None, why: str, seconds: float) -> int | None:
        """Agree on the last step, settle all open steps, and stop. Takes about `seconds` at most.

        Returns:
            The last step, if there was anything to copy.

        Raises:
            CoordinationError: the step does not count; says which rank is the reason.
        """
        self._left = True
        for step in [*self._steps]:  # whatever is still open here never will be committed
            self.lost(step, "closed")
        try:
            if not self.reachable:
                raise CoordinationError("the job's store does not answer")
            self._last_whole = self._closing_round.agree(last, self._form, why, seconds)
            self._settle(_FATES_S)
            self._divergence.close(_FATES_S)
            self._closing_round.await_readers()
        except CoordinationError as error:
            self._settle(_GONE_S)
            raise CoordinationError(f"the last step does not count: {error}") from error
        return self._last_whole

    def leave(self, why: str, seconds: float) -> None:
        """Stop without a last step, so that the other ranks need not wait for this one.

        Idempotent.
        """
        if self._left:
            return
        self._left = True
        with self._changed:
            following = map(self._calendar.periodic, self._calendar.next_steps(self._passed))
            due = next((d for d in following if d is not None and d.step not in self._steps), None)
            for step in [*self._steps]:
                self.lost(step, why)
            if due is not None:
                self._protocol.lost(due, why, time.monotonic(), for_good=True)
                self._changed.notify_all()
        if self.reachable:
            self._closing_round.leave(why, seconds)
        self._settle(seconds if self.reachable else _GONE_S)
        self._divergence.close(seconds if self.reachable else 0.0)

    def give_up(self) -> None:
        """Stop, and say nothing: for the other ranks this one goes on, in another process.

        What it said would stand in the store for good: that it lost steps that its successor may
        hold, and an answer in the closing round, in which its successor takes part.
        """
        self._left = True
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(self._answer_s)
        self._divergence.close(0.0)

    def _settle(self, seconds: float) -> list[int]:
        """Wait for the outcomes of the steps committed here, then end the threads. Idempotent.

        A step that other ranks have not settled in half of the time is claimed dead, so that no
        rank is waited for beyond it. Returns the steps whose outcome this rank never learned.
        """

        def settled() -> bool:
            return self._broken is not None or not (self._protocol.unsettled or self._outbox)

        with self._changed:
            self._ending = True
            self._changed.notify_all()
            self._changed.wait_for(settled, seconds / 2)
            self._protocol.abandon(f"rank {self._ranks.rank} closed")
            self._changed.notify_all()
            self._changed.wait_for(settled, seconds / 2)
            self._stopped = True
            self._changed.notify_all()
            unsettled = self._protocol.unsettled
        for thread in self._threads:
            # A thread is left running, as a daemon, only if the server hangs.
            thread.join(1.0 if unsettled else self._answer_s)
        return unsettled

    # ---- the threads ----

    def _guard(self, run: Callable[[], None]) -> None:
        try:
            run()
        except BaseException as error:
            with self._changed:
                self._broken = error
                self._changed.notify_all()
            raise  # to threading.excepthook: a defect here

    def _make_calls(self) -> None:
        """Make the calls that the protocol and the announcements need, one at a time."""
        while True:
            with self._changed:
                now = time.monotonic()
                call = self._protocol.next_call(now)
                announcement = None if call else self._announcement_call(now)
                chosen = call or announcement
                if chosen is None:
                    if self._stopped:
                        return
                    self._changed.wait(self._sleep_s(now))
                    continue
                self._call_began_s = now
            try:
                answer, failure = self._ask(chosen), None
            except StoreError as error:
                answer, failure = None, error
            with self._changed:
                self._call_began_s, now = None, time.monotonic()
                if failure is not None:
                    self._note_outage(failure, now, counts=call is not None)
                elif call is not None:
                    self._protocol.answered(answer, now)
                else:
                    self._announcement_answered(chosen, answer, now)
                self._note_outcomes()
            self._mark_suspects()

    def _sleep_s(self, now: float) -> float:
        times = [now + _IDLE_S]
        wake = self._protocol.wake_at_s()
        times += [wake] if wake is not None else []
        times += [self._poll_at_s] if self._polls and self._protocol.reachable else []
        return max(0.001, min(times) - now)

    @property
    def _polls(self) -> bool:
        """Tell whether this rank polls for announcements; rank 0 knows what it published."""
        return self._calendar.announced and self._ranks.rank != 0 and not self._ending

    def _announcement_call(self, now: float) -> Call | None:
        """Return the call that publishes an announcement, or looks for the next one."""
        if not self._protocol.reachable:
            return None
        if self._outbox:
            return self._outbox[0]
        if not self._polls or now < self._poll_at_s:
            return None
        return Read(announcement_key(self._calendar.learned))

    def _announcement_answered(self, call: Call, answer: object, now: float) -> None:
        assert isinstance(call, Claim | Read) and isinstance(answer, bytes | None)
        if isinstance(call, Claim):
            self._outbox.popleft()
            if answer != call.value:
                text = f"{call.key} is {answer!r}, not {call.value!r}: it is another's"
                self._troubles.append(CoordinationError(text))
        if answer is not None and call.key == announcement_key(self._calendar.learned):
            late = self._calendar.learn(int(answer), now)
            if late is not None:
                self._protocol.lost(late, LATE, now)
        self._poll_at_s = now + self._calendar.poll_s(now)

    def _ask(self, call: Call) -> object:
        match call:
            case Add():
                return self._store.add(call.key, call.amount)
            case Claim():
                return self._store.claim(call.key, call.value)
            case Read():
                return self._store.read(call.key)
            case Delete():
                self._store.delete(call.keys)
                return None

    def _watch(self) -> None:
        """Wait for the oldest outcome that others decide, again and again."""

        def ready() -> bool:
            watches = self._protocol.reachable and self._protocol.watched is not None
            return self._stopped or watches

        while True:
            with self._changed:
                self._changed.wait_for(ready)
                step = self._protocol.watched
                if self._stopped or step is None:
                    return
            name = f"f/{step}"
            try:
                there = self._watcher_store.wait(name, min(_WATCH_S, self._patience_s))
                value = self._watcher_store.read(name) if there else None
            except StoreError as error:
                with self._changed:
                    self._note_outage(error, time.monotonic(), counts=False)
                    self._changed.notify_all()
                continue
            with self._changed:
                if value is not None:
                    self._protocol.outcome_read(step, value)
                self._note_outcomes()
            self._mark_suspects()

    def _note_outage(self, error: StoreError, now: float, *, counts: bool) -> None:
        """Note that the store did not answer; `counts`: the call was one of the protocol's."""
        if self._protocol.reachable:
            self._troubles.append(error)
        if counts:
            self._protocol.failed(now)
        else:
            self._protocol.unanswered(now)

    def _note_outcomes(self) -> None:
        """Note what the protocol has learned of steps, and wake who waits for it."""
        for outcome in self._protocol.take_outcomes():
            step, abort = outcome.due.step, outcome.abort
            if outcome.differed is not None:
                self._suspects.append((step, outcome.differed))
            if abort is None:
                self._unlike = False
                continue
            self._aborts[step] = abort
            if len(self._aborts) > _REMEMBERED:
                del self._aborts[next(iter(self._aborts))]
            if abort.why == LATE:
                self._announcer.came_late()
            if abort.why == UNLIKE and not self._unlike:
                self._unlike = True
                self._troubles.append(CoordinationError(f"step {step} is in no snapshot: {UNLIKE}"))
            if abort.for_good and abort.rank not in self._ended:
                self._ended.add(abort.rank)
                text = f"rank {abort.rank} takes no more snapshots: {abort.why}"
                self._troubles.append(CoordinationError(text))
        self._changed.notify_all()

    def _mark_suspects(self) -> None:
        """Mark suspect steps in the region. It blocks on the medium: no lock is held."""
        with self._changed:
            suspects, self._suspects = self._suspects, []
        for step, differed in suspects:
            self._divergence.suspect(step, differed)


_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def policy_text(policy: Policy) -> str:
    """Describe a policy with a text that is the same in every process: no addresses."""
    return _ADDRESS.sub("", repr(policy))  # of a user's own, also within a combination
