"""What the ranks of one job share from attach to close: due steps, fates, the last commit.

`Job` is capture's barrier over a `GlobalCommit`. It keeps the book of due steps, so that each is
opened or lost, and then committed or lost, exactly once, whatever the training loop does.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass

from lightck.capture.barrier import Alone, Barrier
from lightck.config import Config
from lightck.distributed.agreement import Identity, agree_on_attach
from lightck.distributed.announce import Calendar, Due
from lightck.distributed.closing import Closing
from lightck.distributed.divergence import Divergence, Marks, Samples
from lightck.distributed.fates import GlobalCommit, Limits
from lightck.distributed.ledger import Ledger
from lightck.distributed.meeting import Meeting
from lightck.distributed.topology import Topology, find
from lightck.distributed.words import Death
from lightck.errors import CoordinationError, LightckError
from lightck.policy import EverySteps
from lightck.region.claim import Claim
from lightck.region.region import Region
from lightck.types import Fate, Moment, Policy

_FATES_S = 10.0  # for fates, when all ranks have said what they had to say
_GONE_S = 2.0  # the same, when a rank or the store is gone
_REMEMBERED = 256  # due steps whose turn is over


def place_of(ranks: Meeting, config: Config, found: Claim) -> Topology:
    """This rank's place in the job, and the run that all belong to.

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


def begin(
    ranks: Meeting,
    topology: Topology,
    region: Region,
    config: Config,
    step: int,
    samples: Samples,
    restored: tuple[int, int] | None = None,
) -> tuple[int | None, Barrier]:
    """Agree on a timeline; nothing that a rank could refuse on its own may come after this.

    Args:
        ranks: the meeting, which ends here.
        topology: this rank's place.
        region: claimed, and large enough.
        config: of this rank.
        step: the last complete one.
        samples: of what every rank holds alike.
        restored: (timeline, step) that this process restored, also from other ranks' regions.

    Returns:
        The timeline's id, None if one rank draws its own; and the barrier.

    Raises:
        CoordinationError: what differs, or which rank failed and why; on every rank.
    """
    if ranks.rounds is None:
        return None, Alone()
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
    every = config.policy.n if isinstance(config.policy, EverySteps) else None
    job = Job(topology, Calendar(every=every, announced=every is None, start=step))
    job.start(ranks, timeline, restored, region, samples)
    region.reusable = job.reusable
    return timeline, job


def _in_words(policy: Policy) -> str:
    """The same text for the same policy in every process: no addresses."""
    kind = type(policy)
    return kind.__qualname__ if kind.__repr__ is object.__repr__ else repr(policy)


@dataclass(eq=False)
class _Turn:
    """What this rank has said of one due step."""

    due: Due
    opened: bool = False
    over: bool = False
    """Committed here, or lost."""

    @property
    def is_open(self) -> bool:
        """Nothing has been said of it yet."""
        return not (self.opened or self.over)


class Job:
    """The barrier of several ranks; see `capture.barrier.Barrier`.

    Thread: any. Its own lock is held for looks into memory only, and never while the global commit
    calls back.
    """

    alone = False

    def __init__(self, topology: Topology, calendar: Calendar) -> None:
        """Nothing is told yet; see `start`."""
        self.topology = topology
        self._calendar = calendar
        self._lock = threading.RLock()
        self._turns: dict[int, _Turn] = {}
        self._asked = calendar.start
        self._requests = 0
        self._deaths: dict[int, Death] = {}
        self._troubles: deque[LightckError] = deque()
        self._closing = self._parted = False
        self._last_whole: int | None = None
        self._form = b""  # of the newest snapshot here

    def start(
        self,
        ranks: Meeting,
        timeline: int,
        restored: tuple[int, int] | None,
        region: Region,
        samples: Samples,
    ) -> None:
        """Begin to keep in touch, below a prefix that belongs to this attach alone.

        Raises:
            StoreError: no connection.
        """
        store = ranks.store.below(f"t{timeline:x}")
        self._closing_round = Closing(store.below("close"), self.topology)
        ledger = Ledger(self.topology.rank, self.topology.world, restored, timeline)
        ledger.on_fate = self._note
        self._marks, self._samples = Marks(region), samples
        self._divergence = Divergence(
            store,
            self.topology.rank,
            self.topology.world,
            samples,
            self._marks,
            self._troubles.append,
        )
        ledger.compares, ledger.on_suspect = True, self._divergence.suspect
        self.commit = GlobalCommit(
            store, ledger, self._calendar, limits=Limits(), on_trouble=self._troubles.append
        )

    # ---- due steps ----

    def due(self, moment: Moment, policy: Policy) -> bool:
        """A pure period needs no word; any other policy is asked on rank 0, which announces."""
        with self._lock:
            # The step counter leaps where optimizers were found during a step.
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
        """What is published while the store is away would come late everywhere."""
        return self._calendar.announced and self.topology.rank == 0 and self.commit.reachable

    def request(self, step: int) -> bool:
        """The loop asks, on every rank at the same step: like a collective."""
        with self._lock:
            turn = self._turns.get(step)
            if turn is None:
                turn = self._turns[step] = _Turn(Due(step, self._requests, "r"))
                self._requests += 1
            return self._closing or turn.is_open

    def opening(self, step: int) -> str | None:
        """Not without the others' word: no rank acts where it could not learn the fate."""
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
        """Tell, unless the step is the last and of nobody's book."""
        with self._lock:
            self._form = form
            turn = self._turns.get(step)
            if turn is not None and turn.opened and not turn.over:
                turn.over = True
                sample = self._samples.of(step)
                self._marks.note(step)
                self.commit.committed(step, form, sample.digest if sample else b"")

    def lost(self, step: int, why: str, *, for_good: bool = False) -> None:
        """Tell once."""
        with self._lock:
            turn = self._turns.get(step)
            if turn is not None and not turn.over:
                turn.over = True
                self.commit.lost(turn.due, why, for_good=for_good)

    def sample(self, step: int) -> None:
        """Of a step in the book."""
        with self._lock:
            turn = self._turns.get(step)
            if turn is not None and turn.opened:
                self._samples.take(step, self._calendar.start + turn.due.ordinal)

    def compared(self) -> tuple[int, int]:
        """See `Stats`."""
        compared, not_alike = self.commit.compared
        return compared, not_alike + self._samples.skipped

    def fate(self, step: int) -> Fate:
        """From memory."""
        return Fate.WHOLE if step == self._last_whole else self.commit.fate(step)

    def why_dead(self, step: int) -> str:
        """In the words of the rank that said so."""
        death = self._deaths.get(step)
        return f"rank {death.rank}: {death.why}" if death else "its fate is not known"

    def reusable(self, timeline: int, step: int) -> bool:
        """Tell whether the slot that holds this snapshot may be overwritten."""
        return self.commit.reusable(timeline, step)

    def wait(self, step: int, seconds: float) -> None:
        """On the training thread only where the user waits."""
        if step != self._last_whole:
            self.commit.wait(step, seconds)

    def troubles(self) -> list[LightckError]:
        """A store that does not answer, once per outage; a rank that takes no more snapshots."""
        found: list[LightckError] = []
        while self._troubles:
            found.append(self._troubles.popleft())
        return found

    def _note(self, due: Due, fate: Fate, death: Death | None) -> None:
        """On a background thread."""
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
        """The last step has a snapshot on every rank, due or not; it is settled by a round."""
        self._closing = True

    def close(self, last: int | None, why: str, seconds: float) -> int | None:
        """Agree on the last step, settle what is open, leave. Bounded by `seconds`, about.

        Raises:
            CoordinationError: it does not count, and which rank is why.
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
        """Without a last step: the others need not wait for this rank. Idempotent."""
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


def _ahead(step: int, calendar: Calendar) -> range:
    """Steps of the next two periods that may be due; a period may be of any length."""
    every = calendar.every or 1
    first = (step // every + 1) * every
    return range(first, first + 2 * every + 1, every)
