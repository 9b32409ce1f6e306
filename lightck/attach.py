"""The composition root: `attach` builds and connects state, region, pipeline, ranks and hooks."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Never

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightck.config import Config, setting_names
from lightck.device import lookup
from lightck.distributed.commit.distributed_barrier import DistributedBarrier
from lightck.distributed.ddp_buckets import Arrangements
from lightck.distributed.ddp_communication import DdpCommunication, ddp_modules
from lightck.distributed.divergence import ReplicaSamples
from lightck.distributed.history_choice import HistoryChoice
from lightck.distributed.rendezvous import Rendezvous, meeting
from lightck.distributed.rounds import AgreementRounds
from lightck.distributed.sharding import ReplicatedTensors, SharePartitioner
from lightck.distributed.symptom_reports import watch_symptoms
from lightck.distributed.topology import Topology, agree_on_topology
from lightck.errors import CoordinationError, LightckError
from lightck.events import Subscriber, event
from lightck.failure.hang import HangWatch
from lightck.failure.jit_save import JitSaver
from lightck.failure.jit_save_ranks import RankJitSaver
from lightck.handle import Components, Handle, release
from lightck.history import item
from lightck.history.history import History, history_of, holds, leave_behind
from lightck.inplace import runtime
from lightck.journal.boundary_state import BoundaryState
from lightck.journal.device_lag import DeviceLag
from lightck.journal.pre_fence import PreFencePredictor
from lightck.journal.step_journal import StepJournal
from lightck.loop import state_prediction
from lightck.loop.checkpointer import Checkpointer
from lightck.loop.due import DueCheck
from lightck.loop.extra_movement import Movement
from lightck.loop.hooks import Hooks, Listener, Watched, layers
from lightck.loop.loss_observer import LossObserver
from lightck.loop.outcomes import ErrorReporter, Outcomes
from lightck.loop.policy_state import PolicyState, SavedPolicyState, learns
from lightck.loop.publisher import StallTimer, StatusPublisher
from lightck.loop.steps import Steps
from lightck.loop.stream_checkpointer import StreamCheckpointer
from lightck.loop.trace_listener import TraceListener
from lightck.pipeline.commit_barrier import CommitBarrier, SingleProcessBarrier
from lightck.pipeline.schedule import schedule
from lightck.pipeline.streamed import StreamPipeline
from lightck.policy.combination import needs_of
from lightck.policy.due import counts_epochs
from lightck.reader.fill import install_pending, tell_unfilled
from lightck.region import claim, failure_region, stats_page
from lightck.region.claim import ClaimedLocation
from lightck.region.native_region import RECORD_JIT
from lightck.region.region import Region, new_timeline
from lightck.restore import progress
from lightck.state.arguments import check, refuse_unknown, unwrapped
from lightck.state.extras import Epochs, Extra, is_loader, must_be_known, parse
from lightck.state.inventory import Inventory, all_covered, names_of
from lightck.state.module_extra_state import extra_states
from lightck.state.tensor_layout import tell_synchronous
from lightck.tracing import perfetto
from lightck.tracing.trace import Trace
from lightck.types import Failure, Policy

_ARGUMENTS = ("model", "optimizer", "path", "policy", "extras", "boundary", "on_event", "config")
CHAOS = "LIGHTCK_CHAOS"
"""The environment variable that `lightck chaos` alone sets: see `failure/fault_plan.py`."""


def attach(
    model: nn.Module | Sequence[nn.Module],
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    path: str | os.PathLike[str] | None = None,
    *more: Never,
    policy: int | str | Policy | None = None,
    extras: Mapping[str, Any] | None = None,
    boundary: Optimizer | None = None,
    on_event: Callable[[str, dict[str, Any]], object] | None = None,
    config: Config | str | Path | None = None,
    **settings: Any,
) -> Handle:
    """Checkpoint a training job from now on, in the background, layer by layer.

    On return the region is allocated and owned, a new timeline is durable, and hooks are installed;
    nothing is captured yet. The model, its optimizers (found when they first step, unless given),
    the random generators and `extras` make up a snapshot.

    Args:
        model: a module, or several.
        optimizer: one or several.
        path: folder for the regions, one per rank (made if only its last part is missing), pool or
            devdax device; default `$LIGHTCK_PATH`, else `./lightck-run`.
        *more: nothing; further arguments are given by name.
        policy: a number (every so many steps), words (`"3.5 %"`, `"500 steps or best val_loss"`)
            or a policy object; None: what `config` says, else `"auto"`.
        extras: name to object: state_dict/load_state_dict, generators, dicts of counters. Objects
            that are neither torch's own nor hand out batches need `at_step` or `at_forward`.
        boundary: the optimizer that ends a step, when several step at different rates.
        on_event: called with name and fields of every event of this process: see `Subscriber`.
        config: a `Config`, a TOML file or the name of a preset.
        **settings: any field of `Config`; they take precedence.

    Returns:
        The handle; a context manager.

    Raises:
        ConfigError: an argument is wrong, misplaced or unknown, or a setting impossible; it says
            what was found and what to write. StateError: state that could not be restored.
        UnrestoredError: snapshots there were neither restored into this model nor recorded from it.
        RegionFullError: bytes needed and free. RegionBusyError: another process owns the region.
        RegionError: the place is not safe, not writable or not a region.
        CoordinationError: another rank failed (with its reason), did not come, or differs.

    Thread: the training thread; may block on the medium, and on the other ranks for two minutes.
    With several ranks (`torch.distributed` is initialized) every rank calls this, in the same order
    as its other calls of attach and restore. If one cannot attach, none does.
    """
    with meeting("attach") as ranks:
        refuse_unknown("attach", settings, _ARGUMENTS + setting_names()[2:])
        given = (model, optimizer, path, extras, more)
        root, optimizers = check("attach", *given, on_event=on_event, boundary=boundary)
        resolved = Config.resolve(config, path=path, policy=policy, **settings)
        parts = _Parts(ranks, resolved, root, _all_extras(extras, root))
        try:
            parts.subscribe(on_event)
            return Handle(parts.compose(optimizers, boundary))
        except BaseException as error:
            release(parts.undo, error)
            raise


def _all_extras(given: Mapping[str, Any] | None, root: nn.Module) -> tuple[Extra, ...]:
    """Return the user's extras, each with a known instant, and the modules' own extra state."""
    extras = parse(given)
    must_be_known(extras)
    return extras + extra_states(root)


class _Parts:
    """The parts that attach builds, in this order.

    The functions in `undo` release them in reverse.
    """

    def __init__(
        self, ranks: Rendezvous, config: Config, model: nn.Module, extras: tuple[Extra, ...]
    ) -> None:
        """Prepare attach: nothing is owned yet, and nothing of the user's has changed."""
        self.ranks, self.config, self.model, self.extras = ranks, config, model, extras
        self.undo: list[Callable[[], object]] = []
        self.reporter = ErrorReporter(config.on_error)
        self.progress = progress(model)
        self.learned = SavedPolicyState(self.progress.learned) if learns(config.policy) else None
        self.epochs = Epochs(self.progress.epochs)
        own = [self.learned.extra] if self.learned is not None else []
        if config.keep is not None or counts_epochs(config.policy):
            own.append(self.epochs.extra)
        self.saved_extras = (*extras, *own)
        self.watched = Watched(model)
        self.watched.refresh()

    def subscribe(self, on_event: Callable[[str, dict[str, Any]], object] | None) -> None:
        """Tell `on_event` of every event from here on, until all else is released."""
        if on_event is not None:
            self.undo.append(Subscriber(on_event, self.reporter.not_told).stop)

    def compose(self, optimizers: list[Optimizer], ends_step: Optimizer | None) -> Components:
        """Build all parts and return them as `Components`."""
        ends_step = ends_step if ends_step is None else unwrapped(ends_step)
        if ends_step is not None and not any(ends_step is each for each in optimizers):
            optimizers = [*optimizers, ends_step]
        # What could not be brought in restore, which the model has been wrapped since.
        self.progress.bring_arrangements(self.ranks, self.model)
        steps = self._steps(optimizers, ends_step)
        # Nothing is claimed before the state is known to be one that can be taken.
        seen = Inventory(self.model, optimizers, self.saved_extras)
        tell_synchronous(seen.collect().lives)
        joining = self.ranks.joining
        if joining is not None and steps.step != joining.step:
            raise CoordinationError(
                f"its model is at step {steps.step}, and theirs behind step {joining.step}: the"
                " script attaches what it has not restored"
            )
        topology, replicas, inventory, region = self._claim(optimizers)
        self._tell_left_out(region)
        return self._start(steps, topology, replicas, inventory, region)

    def _tell_left_out(self, region: Region) -> None:
        """Warn of extras that the run's snapshots had, and the next ones will not have."""
        names = frozenset(extra.name for extra in self.extras)
        if region.continued is not None and (lacking := sorted(self.progress.extras - names)):
            why = "the run's snapshots have them, attach was not given them: the next have not"
            event(
                "extras_left_out", logging.WARNING, path=region.place.path, names=lacking, why=why
            )
        self.progress.has_extras(names)

    def _steps(self, optimizers: list[Optimizer], ends_step: Optimizer | None) -> Steps:
        """Return a counter at the step that the model is at.

        The optimizers are given the state that restore has kept for them.
        """
        known, names = self.progress, names_of(self.model)
        for i, each in enumerate(optimizers):
            install_pending(known.pending, i, each, names)
        tell_unfilled(known.pending)
        now = max((s.step for s in known.attached), default=known.step)
        return Steps(
            step=now,
            boundary=optimizers.index(ends_step) if ends_step is not None else None,
            # A parameter that no given optimizer holds may have its own, found when that one steps.
            settled=ends_step is not None or all_covered(self.model, optimizers),
            counts=[now] * len(optimizers),
        )

    def _claim(
        self, optimizers: list[Optimizer]
    ) -> tuple[Topology, ReplicatedTensors, Inventory, Region]:
        """Return this rank's region, with room for its share, once all ranks know the topology."""
        item.require_run(self.config.path)
        found = claim.find(self.config, self.ranks.rank, self.progress.continuation)
        self.undo.append(found.close)
        topology = self.ranks.agree(partial(self._topology, found))
        replicas = ReplicatedTensors(self.model, optimizers, topology.world)
        arrangements = Arrangements(self.model)
        self.undo.append(arrangements.remove)
        inventory = Inventory(
            self.model,
            optimizers,
            self.saved_extras,
            division=SharePartitioner(topology, replicas) if topology.world > 1 else None,
            buckets=arrangements if arrangements.exist else None,
        )
        entries, manifest_bytes = state_prediction.expected(inventory)
        run_id = topology.run_id if topology.world > 1 else None
        seat = claim.RankIdentity(topology.rank, topology.world, run_id)
        room = (manifest_bytes, state_prediction.journal_bytes(inventory))
        self._require_failures_restored(found)
        region = claim.take(found, self.config, seat, entries, *room)
        return topology, replicas, inventory, region

    def _require_failures_restored(self, found: ClaimedLocation) -> None:
        """Refuse to give up a step that was saved at a failure and that this model has not."""
        known = self.progress.continuation
        continues = self.progress.restored is not None or known.newest or known.began_anew
        if not (continues or self.config.overwrite):
            failure_region.require_restored(found.where)

    def _topology(self, found: ClaimedLocation, rounds: AgreementRounds | None) -> Topology:
        """Return this rank's place in the job, and the run that all ranks belong to."""
        name = None if self.config.run_id == "default" else self.config.run_id
        reach = found.where.reach
        return agree_on_topology(
            rounds, name=name, found=found.run_id, kind=self.ranks.kind, reach=reach
        )

    def _start(
        self,
        steps: Steps,
        topology: Topology,
        replicas: ReplicatedTensors,
        inventory: Inventory,
        region: Region,
    ) -> Components:
        """Build what follows the loop, agree with the other ranks, and install the hooks."""
        config, known, undo = self.config, self.progress, self.undo
        collected, modules = inventory.collect(), ddp_modules(self.model)
        barrier = self._barrier(region, steps.step, ReplicaSamples(inventory.found, replicas))
        count = len({v.layer for v in inventory.everything() if v.role == "parameter"})
        released = schedule(config.schedule, count, communicates=bool(modules))
        pipeline = StreamPipeline.start(region, released, barrier, config, steps.step)
        hooks = self._hooks(inventory)
        checkpointer = self._checkpointer(steps, topology, inventory, pipeline, hooks)
        publisher, trace = checkpointer.publisher, pipeline.trace
        undo += [partial(self._write_trace, trace), checkpointer.outcomes.stop, publisher.ended]
        undo.append(hooks.remove)
        checkpointer.start()
        checkpointer.check_state(collected)
        timeline = barrier.begin()  # the last that may fail on one rank alone
        undo.append(partial(barrier.leave, "attach failed", 1.0))
        chosen = timeline or new_timeline()
        if self.ranks.joining is not None:
            region.rejoin_timeline(region.continued, chosen)
        else:
            self._begin_timeline(steps, topology, region, chosen)
        if checkpointer.outcomes.history is not None:
            choice = None
            if timeline is not None:
                store = self.ranks.store.below(f"t{timeline:x}/history")
                choice = HistoryChoice(store, chooses=topology.rank == 0)
            checkpointer.outcomes.history.begin(
                [s.record for s in region.slots if s.record], choice
            )
        if checkpointer.step_journal is not None:
            checkpointer.step_journal.start(steps.step)
        rescue = None
        if config.failure != "off":
            rescue = self._rescue(checkpointer, topology, timeline)
        self._listen(checkpointer, modules, rescue)
        publisher.publish()
        self._watch_symptoms(checkpointer.due_check.state, region, topology, timeline)
        return Components(config, region, checkpointer, hooks, known, rescue, self.learned, undo)

    def _listen(
        self,
        checkpointer: Checkpointer,
        modules: Sequence[DistributedDataParallel],
        rescue: JitSaver | None,
    ) -> None:
        """Install the hooks: the checkpointer follows the loop from now on."""
        trace, undo, worker = checkpointer.pipeline.trace, self.undo, runtime.WORKER
        listener: Listener = checkpointer
        if trace is not None:
            listener = traced = TraceListener(checkpointer, trace, self.watched)
            undo.append(traced.remove)
        if worker is not None:
            listener = worker.follow(listener, self.model, rescue)
            undo.append(partial(worker.detached, "its handle is closed"))
        communication = DdpCommunication(modules, checkpointer)
        undo.append(communication.remove)
        # Each layer's gradient matters to who counts, paces by or shows them.
        counted = checkpointer.predictor is not None or bool(modules) or trace is not None
        checkpointer.hooks.install(
            self._tested(listener, checkpointer),
            communication.gradient if modules else None,
            every_layer=counted or self.config.schedule == "backward",
        )
        if worker is not None:
            worker.attached()

    def _begin_timeline(
        self, steps: Steps, topology: Topology, region: Region, chosen: int
    ) -> None:
        if topology.rank == min(topology.peers):
            at = steps.step if region.written_here else -1
            failure_region.begin_timeline(region, self.progress.restored, at, chosen)
            leave_behind(region.place.path, max(at, self._kept_step(region, steps)))
        region.begin_timeline(region.continued, chosen)

    def _barrier(self, region: Region, step: int, samples: ReplicaSamples) -> CommitBarrier:
        if self.ranks.world == 1:
            return SingleProcessBarrier()
        restored = self.progress.restored
        return DistributedBarrier(self.ranks, region, self.config, step, samples, restored)

    def _hooks(self, inventory: Inventory) -> Hooks:
        subjects = (extra.subject for extra in self.extras)
        return Hooks(
            self.watched,
            loaders=tuple(subject for subject in subjects if is_loader(subject)),
            recording=lookup.recording(live.local for live in inventory.collect().lives),
            optimizers=inventory.optimizers,
        )

    def _checkpointer(
        self,
        steps: Steps,
        topology: Topology,
        inventory: Inventory,
        pipeline: StreamPipeline,
        hooks: Hooks,
    ) -> Checkpointer:
        """Build the checkpointer and all that it calls."""
        known, boundary_state = self.progress, BoundaryState(inventory)
        history = self._history(topology, pipeline.region)
        outcomes = Outcomes(pipeline, inventory, steps, self.reporter, history)
        is_restored = known.step == steps.step and not known.attached
        joins = self.ranks.joining is not None
        early = (known.early and is_restored) or joins
        state = self._policy_state(topology, pipeline.region)
        due_check = DueCheck(
            self.config.policy,
            pipeline.barrier,
            early,
            state,
            topology.world,
            self.epochs,
            healed=known.healed and is_restored and not joins,  # the others ask for nothing then
        )
        stall_timer, movement = StallTimer(pipeline.trace), Movement(self.extras)
        predictor = step_journal = device_lag = None
        if self.config.failure != "off":
            if topology.world > 1:
                count = len([*layers(self.model)])
                predictor = PreFencePredictor(boundary_state, pipeline.lock, count)
            step_journal = StepJournal(boundary_state, pipeline, outcomes.region_failed, predictor)
            device_lag = DeviceLag(step_journal, pipeline.offload)
        return StreamCheckpointer(
            inventory=inventory,
            boundary_state=boundary_state,
            pipeline=pipeline,
            steps=steps,
            due_check=due_check,
            watched=self.watched,
            outcomes=outcomes,
            hooks=hooks,
            publisher=StatusPublisher(
                pipeline,
                outcomes,
                steps,
                stall_timer,
                due_check,
                movement,
                step_journal,
                None if state is None else state.began_ns,
            ),
            stall_timer=stall_timer,
            movement=movement,
            pending=known.pending,
            step_journal=step_journal,
            device_lag=device_lag,
            predictor=predictor,
        )

    def _policy_state(self, topology: Topology, region: Region) -> PolicyState | None:
        """Return what the policy learns from, with the life before this one."""
        if self.learned is None:
            return None
        config, losses = self.config, None
        if "loss" in needs_of(config.policy):
            losses = LossObserver()
            self.undo.append(losses.stop)
        jit, known = config.failure != "off", self.progress
        state = PolicyState(
            config.policy, self.learned, world=topology.world, jit=jit, losses=losses
        )
        if known.restored is not None or known.learned is not None:
            record, step = region.continued, known.restored[1] if known.restored else known.step
            # A step that its own region has not was saved by another rank, at the failure.
            own = record is not None and record.step == step
            just_in_time = not own or bool(record is not None and record.flags & RECORD_JIT)
            page = stats_page.read(region.native)
            in_place = known.restored_from == region.place.path
            state.follows(page, step, just_in_time=just_in_time, in_place=in_place)
        return state

    def _watch_symptoms(
        self, state: PolicyState | None, region: Region, topology: Topology, timeline: int | None
    ) -> None:
        """Begin to watch for symptoms of failures, if the policy goes by them."""
        if state is None or "health" not in needs_of(self.config.policy):
            return
        store = None
        if timeline is not None:
            store = self.ranks.store.below(f"t{timeline:x}/symptoms")
        failure = self.config.failure
        notice = failure.notice if isinstance(failure, Failure) else None
        symptoms = watch_symptoms(
            self.config.policy, region.place.file, topology, store, notice=notice
        )
        self.undo.append(symptoms.stop)
        state.watch(symptoms)

    def _kept_step(self, region: Region, steps: Steps) -> int:
        """Return the step that was restored from this run's history, if the model is at it."""
        restored = self.progress.restored
        if restored is None or restored[1] != steps.step:
            return -1
        return restored[1] if holds(region.place, restored) else -1

    def _history(self, topology: Topology, region: Region) -> History | None:
        """Return what keeps snapshots beyond the slots, if the config asks for it."""
        peers = tuple(sorted(topology.peers))
        found = history_of(region, self.config, topology.rank, peers)
        if found is not None:
            self.undo.append(partial(found.close, self.config.close_timeout_s))
        return found

    def _rescue(
        self, checkpointer: Checkpointer, topology: Topology, timeline: int | None
    ) -> JitSaver:
        """Return what saves the last complete step.

        With several ranks it also completes it for dead ranks.
        """
        config, world = self.config, topology.world
        assert isinstance(config.failure, Failure), "armed"
        hang = HangWatch.of_world(config.failure, world)
        saver = JitSaver(checkpointer, hang, config.write_limit)
        if timeline is None:
            return saver
        store = self.ranks.store.below(f"t{timeline:x}/failure")
        durable = config.durability == "process"
        worker = runtime.WORKER
        among = RankJitSaver.create(
            saver,
            topology,
            store,
            process_durable=durable,
            joins=self.ranks.joining is not None,
            in_place=worker.end_standing if worker is not None else None,
        )
        self.undo.append(among.stop)
        among.whole_saver.reserve()
        return among

    def _tested(self, listener: Listener, checkpointer: Checkpointer) -> Listener:
        """Return the object that the hooks call.

        `lightck chaos` puts its fault injector before it.
        """
        if CHAOS not in os.environ:
            return listener
        from lightck.failure import fault_injector

        return fault_injector.with_faults(listener, checkpointer, self.config)

    def _write_trace(self, trace: Trace | None) -> None:
        """Write the trace to the file that the config names; a failure is a background error."""
        file, rank = self.config.trace, self.ranks.rank
        if isinstance(file, Path):
            if self.ranks.world > 1:  # the config is the same on all
                file = file.with_name(f"{file.stem}.rank{rank}{file.suffix}")
            try:
                perfetto.save(trace, file)
            except LightckError as error:
                self.reporter(error)
