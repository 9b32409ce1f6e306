"""The state that the ranks of one job share from attach to close: due steps, outcomes, last commit.

`DistributedBarrier` is the pipeline's commit barrier over a `CommitCoordinator`. It keeps the list
of due steps, so that each is opened or lost, and then committed or lost, exactly once, whatever the
training loop does. At the close the ranks hold a last round (`Closing`).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from lightck.config import Config
from lightck.distributed.commit.coordinator import CommitCoordinator, Limits
from lightck.distributed.commit.due_steps import DueCalendar, DueStep
from lightck.distributed.commit.protocol import UNLIKE, AbortReason, CommitProtocol
from lightck.distributed.divergence import Divergence, ReplicaSamples, SuspectMarks
from lightck.distributed.rendezvous import Rendezvous
from lightck.distributed.rounds import AgreementRounds, Identity, Said, agree_on_attach
from lightck.distributed.store import Store, bounded
from lightck.distributed.topology import Topology, find
from lightck.errors import CoordinationError, LightckError, StoreError
from lightck.pipeline.commit_barrier import CommitBarrier, SingleProcessBarrier
from lightck.policy import EverySteps
from lightck.region.claim import ClaimedLocation
from lightck.region.region import Region
from lightck.types import Fate, Moment, Policy

# ---- the round at close --------------------------------------------------------------------------
# The last step counts if every rank holds it, whatever its outcome was before. Restore counts the
# content of the regions. So a step that one rank lost while training went on, and has copied again
# at its close, counts.

_SEE_OFF_S = 5.0
_SHORT_S = 5.0


class Closing:
    """The closing round of one attach. Used on the training thread."""

    def __init__(self, store: Store, topology: Topology) -> None:
        """Use `store`, which must be below a prefix of its own."""
        self._store = store
        self._rounds = AgreementRounds(store, topology.rank, topology.world)

    def agree(self, last: int | None, form: bytes, why: str, seconds: float) -> int | None:
        """Agree on the last step with all ranks.

        Args:
            last: the step that this rank holds a durable snapshot of; None if it holds none.
            form: a digest of the state's form, which must be the same on every rank.
            why: why this rank holds no snapshot; empty if there was nothing to copy.
            seconds: how long to wait for the other ranks, about.

        Returns:
            The step that every rank holds; None if no rank had anything to copy.

        Raises:
            CoordinationError: a rank lacks the step, has other state, has left or did not come; on
                every rank.
        """
        self._rounds.timeout_s = seconds / 1.5  # the others wait half as long again as rank 0
        said = {
            "step": last,
            "form": form.hex() if last is not None else "",
            "why": why.encode("ascii", "replace").decode()[:1000],
        }
        answer = bounded(
            "close", seconds + _SHORT_S, lambda: self._rounds.agree("close", said, decide_close)
        )
        step = answer["step"]
        return None if step is None else int(step)

    def leave(self, why: str, seconds: float) -> None:
        """Tell the other ranks that this one takes no part in the round; waits for none."""
        # A store that is away cannot be reached; the others find out by their time-out.
        with suppress(CoordinationError):
            bounded("leave", min(seconds, _SHORT_S), lambda: self._rounds.fail("close", why))

    def see_off(self) -> None:
        """Count this rank as gone.

        Rank 0, whose process may serve the store, waits up to 5 s until all have read the decision.
        """
        with suppress(StoreError):
            bounded("close", _SEE_OFF_S + 1, self._see_off)

    def _see_off(self) -> None:
        rank, world = self._rounds.rank, self._rounds.world
        if self._store.add("gone") == world:
            self._store.set("empty", b"1")
        elif rank == 0:
            self._store.wait("empty", _SEE_OFF_S)


def decide_close(said: Sequence[Said]) -> Said:
    """Decide the closing round on rank 0: the common step, or an error that names the ranks."""
    steps = {each["step"] for each in said}
    if len(steps) == 1 and not any(each["why"] for each in said):
        if len({each["form"] for each in said}) > 1:
            raise CoordinationError(UNLIKE)
        return {"step": steps.pop()}
    found = [
        f"rank {rank}: {each['why'] or 'nothing to copy'}"
        if each["step"] is None
        else f"rank {rank} holds step {each['step']}"
        for rank, each in enumerate(said)
    ]
    more = f" and {len(found) - 16} more" if len(found) > 16 else ""
    raise CoordinationError("; ".join(found[:16]) + more)


# ---- attach, and the barrier ---------------------------------------------------------------------

_FATES_S = 10.0  # for outcomes, when all ranks have reported everything
_GONE_S = 2.0  # the same, when a rank or the store is gone
_REMEMBERED = 256  # due steps that are settled here


def place_of(ranks: Rendezvous, config: Config, found: ClaimedLocation) -> Topology:
    """Find this rank's place in the job, and the run that all ranks belong to.

    Args:
        ranks: the meeting.
        config: of this rank; its `run_id`, where one is stated, must be the same everywhere.
        found: where this rank's region is, or will be.
    """
    name = None if config.run_id == "default" else config.run_id
    run, reach = found.run_id, found.where.reach
    return ranks.agree(
        lambda rounds: find(rounds, name=name, found=run, kind=ranks.kind, reach=reach)
    )


def barrier_of(topology: Topology, policy: Policy, step: int) -> CommitBarrier:
    """Return the barrier of this job, from the last complete `step` on; `begin` starts it."""
    if topology.world == 1:
        return SingleProcessBarrier()
    every = policy.n if isinstance(policy, EverySteps) else None
    return DistributedBarrier(
        topology, DueCalendar(every=every, announced=every is None, start=step)
    )


def begin(
    barrier: CommitBarrier,
    ranks: Rendezvous,
    topology: Topology,
    region: Region,
    config: Config,
    step: int,
    samples: ReplicaSamples,
    restored: tuple[int, int] | None = None,
) -> int | None:
    """Agree on a timeline and start the barrier.

    No check that may fail on one rank alone may follow this call.

    Args:
        barrier: made by `barrier_of`.
        ranks: the meeting, which ends here.
        topology: this rank's place.
        region: this rank's region, claimed, and large enough.
        config: of this rank.
        step: the last complete step.
        samples: the sampling of the state that every rank holds alike.
        restored: (timeline, step) that this process restored, also from other ranks' regions.

    Returns:
        The timeline's id; None: a single rank draws its own.

    Raises:
        CoordinationError: what differs, or which rank failed and why; on every rank.
    """
    if not isinstance(barrier, DistributedBarrier):
        return None
    continued = region.continued
    # A rank that was given what it lacked continues an older snapshot of its own region.
    if continued is not None and (restored is None or continued.step >= restored[1]):
        restored = (continued.timeline, continued.step)
    identity = Identity(
        run_id=region.info.run_id,
        world=topology.world,
        path=region.place.common,
        slots=config.slots,
        policy=_in_words(config.policy),
        step=step,
        restored=restored,
    )
    timeline = ranks.agree(lambda rounds: agree_on_attach(rounds, identity) if rounds else 0)
    ranks.part()
    barrier.start(ranks, timeline, restored, region, samples)
    region.follow_ranks(barrier.reusable)
    return timeline


def _in_words(policy: Policy) -> str:
    """Describe a policy with a text that is the same in every process: no addresses."""
    kind = type(policy)
    return kind.__qualname__ if kind.__repr__ is object.__repr__ else repr(policy)


@dataclass(eq=False)
class _Turn:
    """The state of one due step on this rank."""

    due: DueStep
    opened: bool = False
    over: bool = False
    """True if the step was committed here, or lost."""

    @property
    def is_open(self) -> bool:
        """Tell whether nothing has been reported of the step yet."""
        return not (self.opened or self.over)


class DistributedBarrier:
    """The barrier of several ranks; see `pipeline.commit_barrier.CommitBarrier`.

    Threads: any. Its own lock is held only while memory is read or written, and never while the
    global commit calls back.
    """

    alone = False

    def __init__(self, topology: Topology, calendar: DueCalendar) -> None:
        """Prepare the barrier; it is used from `start` on."""
        self.topology = topology
        self._calendar = calendar
        self._lock = threading.RLock()
        self._turns: dict[int, _Turn] = {}
        self._asked = calendar.start
        self._requests = 0
        self._deaths: dict[int, AbortReason] = {}
        self._troubles: deque[LightckError] = deque()
        self._closing = self._parted = False
        self._last_whole: int | None = None
        self._form = b""  # the form of the newest snapshot here

    def start(
        self,
        ranks: Rendezvous,
        timeline: int,
        restored: tuple[int, int] | None,
        region: Region,
        samples: ReplicaSamples,
    ) -> None:
        """Start the global commit, below a store prefix that belongs to this attach alone.

        Raises:
            StoreError: no connection.
        """
        store = ranks.store.below(f"t{timeline:x}")
        self._closing_round = Closing(store.below("close"), self.topology)
        ledger = CommitProtocol(self.topology.rank, self.topology.world, restored, timeline)
        ledger.on_fate = self._note
        self._marks, self._samples = SuspectMarks(region), samples
        self._divergence = Divergence(
            store,
            self.topology.rank,
            self.topology.world,
            samples,
            self._marks,
            self._troubles.append,
        )
        ledger.compares, ledger.on_suspect = True, self._divergence.suspect
        self.commit = CommitCoordinator(
            store, ledger, self._calendar, limits=Limits(), on_trouble=self._troubles.append
        )

    # ---- due steps ----

    def due(self, moment: Moment, policy: Policy) -> bool:
        """Tell whether this step is due, and announce a later one if the policy wants a snapshot.

        A fixed period needs no message. Any other policy is asked on rank 0 only, which announces.
        """
        with self._lock:
            # The step counter skips numbers where optimizers were found during a step.
            for step in range(self._asked + 1, moment.step + 1):
                found = self.commit.due(step)
                if found is not None:
                    self._turns[step] = _Turn(found)
            self._asked = max(self._asked, moment.step)
            for step in [s for s, t in self._turns.items() if s < moment.step and t.is_open]:
                self.lost(step, "passed over")
            self._forget()
            turn = self._turns.get(moment.step)
        if turn is None and self._announces and policy.due(moment):
            self.commit.announce(moment.step, moment.step_s)
        return turn is not None and not turn.over

    @property
    def _announces(self) -> bool:
        """Tell whether this rank announces due steps: it is rank 0 and the store is reachable.

        An announcement published while the store is away would come late everywhere.
        """
        return self._calendar.announced and self.topology.rank == 0 and self.commit.reachable

    def request(self, step: int) -> bool:
        """Register a request by the loop; every rank makes it at the same step, as in a collective.

        Returns:
            Whether a snapshot of the step can still be opened here.
        """
        with self._lock:
            turn = self._turns.get(step)
            if turn is None:
                turn = self._turns[step] = _Turn(DueStep(step, self._requests, "r"))
                self._requests += 1
            return self._closing or turn.is_open

    def opening(self, step: int) -> str | None:
        """Report that a snapshot of `step` is being opened; return why it may not be, or None.

        It may not without contact to the other ranks: the outcome could not be learned.
        """
        with self._lock:
            turn = self._turns.get(step)
            if turn is None or turn.over:
                return None if self._closing else f"step {step} is not due on every rank"
            if not turn.opened:
                why = self.commit.why_not_open()
                if why is not None:
                    return why
                try:
                    self.commit.opened(turn.due)
                except ValueError as error:  # its announcement came late: it is lost already
                    turn.over = True
                    return None if self._closing else str(error)
                turn.opened = True
            return None

    # ---- what becomes of them ----

    def committed(self, step: int, form: bytes) -> None:
        """Report that `step` is committed here, if it is a due step; the last one may not be."""
        with self._lock:
            self._form = form
            turn = self._turns.get(step)
            if turn is not None and turn.opened and not turn.over:
                turn.over = True
                sample = self._samples.of(step)
                self._marks.note(step)
                self.commit.committed(step, form, sample.digest if sample else b"")

    def lost(self, step: int, why: str, *, for_good: bool = False) -> None:
        """Report that this rank has no snapshot of a due step; only the first report counts."""
        with self._lock:
            turn = self._turns.get(step)
            if turn is not None and not turn.over:
                turn.over = True
                self.commit.lost(turn.due, why, for_good=for_good)

    def sample(self, step: int) -> None:
        """Digest this step's sample of replicated state, if the step is due and opened."""
        with self._lock:
            turn = self._turns.get(step)
            if turn is not None and turn.opened:
                self._samples.take(step, self._calendar.start + turn.due.ordinal)

    def compared(self) -> tuple[int, int]:
        """Return how many due steps were compared, and how many could not be; see `Stats`."""
        compared, not_alike = self.commit.compared
        return compared, not_alike + self._samples.skipped

    def fate(self, step: int) -> Fate:
        """Return the outcome of a step, as far as it is known in memory."""
        return Fate.WHOLE if step == self._last_whole else self.commit.fate(step)

    def why_dead(self, step: int) -> str:
        """Return why a step is dead, as reported by the rank that claimed it."""
        death = self._deaths.get(step)
        return f"rank {death.rank}: {death.why}" if death else "its fate is not known"

    def reusable(self, timeline: int, step: int) -> bool:
        """Tell whether the slot that holds this snapshot may be overwritten."""
        return self.commit.reusable(timeline, step)

    def wait(self, step: int, seconds: float) -> None:
        """Wait up to `seconds` for a step's outcome.

        On the training thread only if the user waits.
        """
        if step != self._last_whole:
            self.commit.wait(step, seconds)

    def troubles(self) -> list[LightckError]:
        """Return the errors noted since the last call, such as that the store does not answer."""
        found: list[LightckError] = []
        while self._troubles:
            found.append(self._troubles.popleft())
        return found

    def _note(self, due: DueStep, fate: Fate, death: AbortReason | None) -> None:
        """Remember why a step is dead. Called on a background thread."""
        if death is not None:
            self._deaths[due.step] = death
            if len(self._deaths) > _REMEMBERED:
                del self._deaths[next(iter(self._deaths))]

    def _forget(self) -> None:
        for step in [*self._turns][:-_REMEMBERED]:
            if self._turns[step].over:
                del self._turns[step]

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
        self._parted = True
        with self._lock:
            for step in [*self._turns]:  # whatever is still open here never will be committed
                self.lost(step, "closed")
        try:
            if not self.commit.reachable:
                raise CoordinationError("the job's store does not answer")
            self._last_whole = self._closing_round.agree(last, self._form, why, seconds)
            self.commit.close(_FATES_S)
            self._divergence.close(_FATES_S)
            self._closing_round.see_off()
        except CoordinationError as error:
            self.commit.close(_GONE_S)
            raise CoordinationError(f"the last step does not count: {error}") from error
        return self._last_whole

    def leave(self, why: str, seconds: float) -> None:
        """Stop without a last step, so that the other ranks need not wait for this one.

        Idempotent.
        """
        if self._parted:
            return
        self._parted = True
        with self._lock:
            following = (self._calendar.periodic(s) for s in _ahead(self._asked, self._calendar))
            due = next((d for d in following if d is not None and d.step not in self._turns), None)
            for step in [*self._turns]:
                self.lost(step, why)
        if due is not None:
            self.commit.lost(due, why, for_good=True)
        if self.commit.reachable:
            self._closing_round.leave(why, seconds)
        self.commit.close(seconds if self.commit.reachable else _GONE_S)
        self._divergence.close(seconds if self.commit.reachable else 0.0)


def _ahead(step: int, calendar: DueCalendar) -> range:
    """Return the steps of the next two periods that may be due; a period may be of any length."""
    every = calendar.every or 1
    first = (step // every + 1) * every
    return range(first, first + 2 * every + 1, every)
