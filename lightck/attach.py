"""The composition root: `attach` builds and connects state, region, pipeline, ranks and hooks."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Never

from torch import nn
from torch.optim import Optimizer

from lightck.config import Config, setting_names
from lightck.device import lookup
from lightck.distributed.commit import distributed_barrier
from lightck.distributed.ddp import CommObserver, Communication
from lightck.distributed.divergence import ReplicaSamples
from lightck.distributed.rendezvous import Rendezvous, meeting
from lightck.distributed.sharding import ReplicatedTensors, SharePartitioner
from lightck.events import Subscriber, event
from lightck.failure.jit_save import JitSaver
from lightck.failure.jit_save_ranks import RankJitSaver
from lightck.handle import Components, Handle, release
from lightck.journal.boundary_state import BoundaryState
from lightck.journal.device_lag import DeviceLag
from lightck.journal.pre_fence import PreFencePredictor
from lightck.journal.step_journal import StepJournal
from lightck.layerwise.checkpointer import Kinds
from lightck.layerwise.ddp import finality
from lightck.loop import state_prediction
from lightck.loop.checkpointer import Checkpointer
from lightck.loop.hooks import Hooks, Listener, Watched, layers
from lightck.loop.outcomes import ErrorReporter, Outcomes
from lightck.loop.publisher import StatusPublisher
from lightck.loop.requests import gradients_complete
from lightck.loop.steps import Steps
from lightck.pipeline.schedule import schedule
from lightck.reader.fill import install_pending, tell_unfilled
from lightck.region import claim
from lightck.region.region import Region
from lightck.restore import progress
from lightck.state.arguments import check, refuse_unknown
from lightck.state.extras import Extra, is_loader, must_be_known, parse
from lightck.state.inventory import Inventory
from lightck.state.module_extra_state import extra_states
from lightck.state.tensor_layout import tell_synchronous
from lightck.types import Policy


class _EveryStep(int):
    """The default policy, which differs from a given 1 so that a config file can replace it."""


EVERY_STEP = _EveryStep(1)
_ARGUMENTS = ("model", "optimizer", "path", "policy", "extras", "boundary", "on_event", "config")
CHAOS = "LIGHTCK_CHAOS"
"""The environment variable that `lightck chaos` alone sets: see `failure/fault_plan.py`."""


def attach(
    model: nn.Module | Sequence[nn.Module],
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    path: str | os.PathLike[str] | None = None,
    *more: Never,
    policy: int | Policy = EVERY_STEP,
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
        path: folder for the regions, one per rank (made if only its last part is missing), a
            libpmemobj pool or a devdax device; default `$LIGHTCK_PATH`, else `./lightck-run`.
        *more: nothing; further arguments are given by name.
        policy: a snapshot every so many steps, or a policy object.
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
        chosen = {} if policy is EVERY_STEP else {"policy": policy}
        resolved = Config.resolve(config, path=path, **chosen, **settings)
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
        self.ranks, self.config = ranks, config
        self.undo: list[Callable[[], object]] = []
        self.reporter = ErrorReporter(config.on_error)
        self.progress = progress(model)
        self.inventory = Inventory(model, [], extras)
        self.watched = Watched(model)
        self.watched.refresh()

    def subscribe(self, on_event: Callable[[str, dict[str, Any]], object] | None) -> None:
        """Tell `on_event` of every event from here on, until all else is released."""
        if on_event is not None:
            self.undo.append(Subscriber(on_event, self.reporter.not_told).stop)

    def compose(self, optimizers: list[Optimizer], ends_step: Optimizer | None) -> Components:
        """Build all parts and return them as `Components`."""
        steps = self._take_in(optimizers, ends_step)
        final = partial(finality, self.inventory.model)
        kinds = Kinds.of(self.config.update, self.inventory, ends_step is not None, final)
        tell_synchronous(self.inventory.collect().lives)
        region = self._claim()
        self._tell_left_out(region)
        return self._wire(region, steps, kinds)

    def _tell_left_out(self, region: Region) -> None:
        """Warn of extras that the run's snapshots had, and the next ones will not have."""
        names = frozenset(extra.name for extra in self.inventory.extras)
        if region.continued is not None and (lacking := sorted(self.progress.extras - names)):
            why = "the run's snapshots have them, attach was not given them: the next have not"
            event(
                "extras_left_out", logging.WARNING, path=region.place.path, names=lacking, why=why
            )
        self.progress.extras = names

    def _take_in(self, optimizers: list[Optimizer], ends_step: Optimizer | None) -> Steps:
        """Return a step counter, with the known optimizers and the step that the model is at."""
        inventory, known = self.inventory, self.progress
        if ends_step is not None and not any(ends_step is o for o in optimizers):
            optimizers = [*optimizers, ends_step]
        now = max((s.step for s in known.attached), default=known.step)
        steps = Steps(step=now, settled=bool(optimizers))
        for each in optimizers:
            inventory.optimizers.append(each)
            steps.add()
        steps.boundary = optimizers.index(ends_step) if ends_step is not None else None
        # A parameter that no given optimizer holds may have its own, found when that one steps.
        steps.settled = ends_step is not None or inventory.covered()
        for i, each in enumerate(optimizers):
            install_pending(known.pending, i, each, inventory.names())
        tell_unfilled(known.pending)
        return steps

    def _claim(self) -> Region:
        """Return this rank's region, with room for its share, once all ranks know the topology."""
        found = claim.find(self.config, self.ranks.rank, self.progress.continuation)
        self.undo.append(found.close)
        self.topology = distributed_barrier.place_of(self.ranks, self.config, found)
        replicas = ReplicatedTensors(self.inventory, self.topology.world)
        self.inventory.share = SharePartitioner(self.topology, replicas)
        self.samples = ReplicaSamples(self.inventory.found, replicas)
        self.inventory.depends = replicas.hooks
        self.inventory.invalidate()
        entries, manifest_bytes = state_prediction.expected(self.inventory)
        run_id = self.topology.run_id if self.topology.world > 1 else None
        seat = claim.RankIdentity(self.topology.rank, self.topology.world, run_id)
        room = (manifest_bytes, state_prediction.journal_bytes(self.inventory))
        return claim.take(found, self.config, seat, entries, *room)

    def _wire(self, region: Region, steps: Steps, kinds: Kinds) -> Components:
        config, reporter, inventory, undo = self.config, self.reporter, self.inventory, self.undo
        collected = inventory.collect()
        communication = Communication(inventory.model)
        count = len({v.layer for v in inventory.everything() if v.role == "parameter"})
        release_when = schedule(config.schedule, count, communicates=bool(communication.buckets))
        pipeline = kinds.pipeline.start(region, release_when, config)
        outcomes = Outcomes(pipeline, inventory, steps, reporter, reporter.surface)
        pipeline.offload.engine.sealed = outcomes.seal_arrived
        instants = BoundaryState(inventory)
        habit = PreFencePredictor(instants, lambda: outcomes.lock, len([*layers(inventory.model)]))
        armed = config.failure != "off"
        journaled = StepJournal(instants, region, outcomes.region_lost, habit, pipeline.stand)
        checkpointer = kinds.checkpointer(
            inventory=inventory,
            instants=instants,
            journaled=journaled if armed else None,
            behind=DeviceLag(journaled, pipeline.offload) if armed else None,
            pipeline=pipeline,
            steps=steps,
            cadence=kinds.due(config.policy),
            watched=self.watched,
            outcomes=outcomes,
            settled=steps.settled,
            on_found=self._found,
        )
        habit.on_last = partial(gradients_complete, checkpointer)
        sight = StatusPublisher(config, checkpointer, reporter, self.watched)
        undo += [sight.write_wanted, outcomes.stop, sight.ended]
        pipeline.on_torn = sight.torn
        loaders = tuple(e.subject for e in inventory.extras if is_loader(e.subject))
        at_gradient = [communication.came] if communication.buckets else []
        at_gradient += [habit.gradient] if armed and self.topology.world > 1 else []
        recording = lookup.recording(live.local for live in collected.lives)
        listener, heard = self._listener(sight), (loaders, at_gradient, recording)
        hooks = Hooks(listener, self.watched, *heard, kinds.defers, inventory.optimizers)
        checkpointer.arm = lambda on: hooks.arm_forward() if on else hooks.disarm_forward()
        undo += [kinds.stop, hooks.remove, communication.remove, sight.remove]
        checkpointer.start()
        checkpointer.check_state(collected)
        known = self.progress
        checkpointer.cadence.early = known.early and known.step == steps.step and not known.attached
        at = (steps.step, self.samples, known.restored)
        timeline, barrier = distributed_barrier.begin(
            self.ranks, self.topology, region, config, *at
        )
        undo.append(lambda: barrier.leave("attach failed", 1.0))
        pipeline.barrier = checkpointer.cadence.barrier = barrier
        region.begin_timeline(region.continued, timeline)
        if checkpointer.journaled is not None:
            checkpointer.journaled.begin(steps.step, peers=not barrier.alone)
        hooks.install()
        communication.install(CommObserver(checkpointer))
        sight.install()
        rescue = self._rescue(checkpointer, timeline) if armed else None
        return Components(
            config, region, checkpointer, reporter, hooks, sight, self.progress, rescue, undo
        )

    def _rescue(self, checkpointer: Checkpointer, timeline: int | None) -> JitSaver:
        """Return what saves the last complete step.

        With several ranks it also completes it for dead ranks.
        """
        if timeline is None:
            return JitSaver(checkpointer)
        store = self.ranks.store.below(f"t{timeline:x}/failure")
        durable = self.config.durability == "process"
        rescue = RankJitSaver.among(checkpointer, self.topology, store, process_durable=durable)
        self.undo.append(rescue.stop)
        return rescue

    def _listener(self, sight: StatusPublisher) -> Listener:
        """Return the object that the hooks call.

        `lightck chaos` puts its fault injector before it.
        """
        if CHAOS not in os.environ:
            return sight.listener
        from lightck.failure import fault_injector

        return fault_injector.stand_before(sight.listener, sight.checkpointer, self.config)

    def _found(self, i: int, optimizer: Optimizer) -> None:
        """Install the state that restore kept for an optimizer that is about to step first."""
        install_pending(self.progress.pending, i, optimizer, self.inventory.names())
