"""Checkpoint a DeepSpeed engine of ZeRO stage 0, 1 or 2, and go on where it was.

with lightck.integrations.deepspeed.attach(engine, "./run", extras={"data": sampler}) as run:
    while engine.global_steps < 10_000:
        for batch in loader: ...

Each rank's snapshot has its copy of the model, its part of the optimizer's state, and the engine's
counters and schedule. Tried with DeepSpeed 0.19.8.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Literal

import torch.distributed as dist

import lightck
from lightck.distributed.sharding import keeps_alike
from lightck.errors import ConfigError
from lightck.handle import Handle
from lightck.integrations.resumed import Resumed, joined

_COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")
_USED = (
    *_COUNTERS,
    *("module", "basic_optimizer", "lr_scheduler", "training_dataloader", "step"),
    *("is_gradient_accumulation_boundary", "zero_optimization_stage", "zero_offload_optimizer"),
    *("optimizer", "dp_world_size", "has_moe_layers"),
    *("fp16_enabled", "torch_autocast_enabled", "data_efficiency_enabled", "zenflow"),
)
"""Names of an engine that are used here; all are without an underscore, none is documented."""
_INSTEAD = "; or checkpoint with engine.save_checkpoint"


def attach(
    engine: Any,
    path: str | os.PathLike[str] | None = None,
    *,
    extras: Mapping[str, Any] | None = None,
    step: int | Literal["latest", "exact"] = "latest",
    **settings: Any,
) -> Resumed:
    """Restore what is at `path` into the engine, and checkpoint it from now on.

    On return the engine stands behind the restored step, with its counters and schedule, and a
    step is one update of the engine: `handle.step` counts as `engine.global_steps` does.

    Args:
        engine: what `deepspeed.initialize` has returned first.
        path: as for `lightck.attach`.
        extras: as for `lightck.attach`; the position in the data is one. The engine's schedule and
            counters are taken without being given.
        step: as for `lightck.restore`.
        **settings: as for `lightck.attach`.

    Raises:
        ConfigError: what the engine does could not be resumed exactly; says what to do instead.
        LightckError: as `lightck.restore` and `lightck.attach` raise.

    Thread: the training thread of each rank, behind `deepspeed.initialize`.
    """
    require_exact(engine)
    own = {"deepspeed": lightck.at_step(_Counters(engine))}
    if engine.lr_scheduler is not None:
        own["deepspeed.lr_scheduler"] = lightck.at_forward(engine.lr_scheduler)
    given = joined(own, extras)
    model, optimizer = engine.module, engine.basic_optimizer
    _leave_training_to_the_model(engine)
    if _is_replicated(engine):
        keeps_alike(model)
    info = lightck.restore(model, optimizer, path, extras=given, step=step)
    handle = lightck.attach(model, optimizer, path, extras=given, **settings)
    if handle.step != engine.global_steps:  # the engine has loaded a checkpoint of its own
        handle.replaced(engine.global_steps)
    return Resumed(handle, info, _MarkedStep(engine, handle).remove)


def _leave_training_to_the_model(engine: Any) -> None:
    """Let the model alone say whether a forward trains.

    `engine.eval()` leaves the engine itself, a module too, in training, in which DeepSpeed does not
    look. A validation would be taken for the next training forward.
    """
    vars(engine)["training"] = False


def _is_replicated(engine: Any) -> bool:
    """Tell whether every rank has the whole model and steps all of it: ZeRO-0, without a wrapper.

    In bf16 stage 0 divides the optimizer's state, too; experts have groups of their own.
    """
    plain = engine.zero_optimization_stage() == 0 and engine.optimizer is engine.basic_optimizer
    world = dist.get_world_size() if dist.is_initialized() else 1
    return plain and engine.dp_world_size == world and not engine.has_moe_layers


class _Counters:
    """The counters of an engine, which its own `load_checkpoint` restores, too."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self._engine, name) for name in _COUNTERS}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in _COUNTERS:
            setattr(self._engine, name, state[name])


class _MarkedStep:
    """Stands before `engine.step`, so that the whole of it is one update.

    ZeRO's optimizer writes the model behind the inner optimizer's step, and the engine advances
    its schedule and counters behind that. In between the state is of no step, and a failure there
    must not save it.
    """

    def __init__(self, engine: Any, handle: Handle) -> None:
        self._engine, self._handle, self._step = engine, handle, engine.step
        vars(engine)["step"] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._engine.is_gradient_accumulation_boundary():
            return self._step(*args, **kwargs)
        self._handle.before_update()
        result = self._step(*args, **kwargs)
        self._handle.after_update()  # not after an error: then the update never ends
        return result

    def remove(self) -> None:
        """Let the engine step by itself again."""
        if vars(self._engine).get("step") is self:
            del vars(self._engine)["step"]


def require_exact(engine: Any) -> None:
    """Refuse an engine that could not be resumed exactly, or that is no engine.

    Raises:
        ConfigError: says which of its settings, and what to do instead.
    """
    from deepspeed import DeepSpeedEngine, PipelineEngine, __version__

    if not isinstance(engine, DeepSpeedEngine):
        raise ConfigError(
            f"engine must be what deepspeed.initialize returns first, found an object of type"
            f" {type(engine).__name__}"
        )
    lacking = [name for name in _USED if not hasattr(engine, name)]
    if lacking:
        raise ConfigError(
            f"DeepSpeed {__version__}: its engine has no {', '.join(lacking)}, which lightck reads:"
            " it was tried with 0.19.8"
        )
    if isinstance(engine, PipelineEngine) or type(engine) is not DeepSpeedEngine:
        raise ConfigError(
            f"a {type(engine).__name__} of DeepSpeed cannot be checkpointed: take the engine of"
            f" deepspeed.initialize without pipeline and hybrid settings{_INSTEAD}"
        )
    why = _inexact(engine)
    if why:
        raise ConfigError(f"the DeepSpeed engine could not be resumed exactly: {why}{_INSTEAD}")


def _inexact(engine: Any) -> str:
    """Say what of the engine's settings has state that is not saved; empty if nothing has."""
    stage = engine.zero_optimization_stage()
    optimizer = engine.basic_optimizer
    kind = type(optimizer)
    if stage > 2:
        return (
            f"ZeRO stage {stage} keeps the model in flat buffers over all ranks: take stage 0, 1"
            " or 2, or torch's fully_shard (FSDP2)"
        )
    if optimizer is None:
        return "it has no optimizer: give deepspeed.initialize one, or name one in its config"
    if kind.__module__.startswith("deepspeed.") and kind.__name__ != "FusedAdam":
        return (
            f"{kind.__name__} has state outside of its state_dict: give deepspeed.initialize a"
            " torch.optim optimizer (zero_allow_untested_optimizer)"
        )
    if engine.zero_offload_optimizer() is not None:
        return "offload_optimizer was not tried: leave it out"
    if engine.fp16_enabled() or engine.torch_autocast_enabled():
        return "fp16 and torch_autocast scale the loss, which was not tried: take bf16 or fp32"
    if engine.training_dataloader is not None:
        return (
            "the position of its own loader is not known: leave out training_data=, and iterate a"
            " DataLoader with sampler=lightck.ResumableSampler(...), an extra"
        )
    for name, used in (
        ("zenflow", engine.zenflow),
        ("data_efficiency", engine.data_efficiency_enabled()),
    ):
        if used:
            return f"{name} has state of its own: leave it out"
    return ""
