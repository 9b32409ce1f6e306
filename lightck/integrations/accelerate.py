"""Accelerate: checkpoints a loop of your own, and resumes it in the middle of an epoch.

    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    with Lightck(accelerator, "./run") as ck:
        for epoch in ck.epochs(10):
            for batch in ck.batches(loader):
                ...

The body of the loop stays as it is.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import IterableDataset, RandomSampler, Sampler

import lightck
from lightck.errors import ConfigError

try:
    from accelerate.utils import synchronize_rng_states
except ImportError as error:
    raise ImportError(
        "lightck.integrations.accelerate needs Accelerate: pip install 'lightck[accelerate]'"
    ) from error

_REFUSED = {
    "DEEPSPEED": "take lightck.integrations.deepspeed",
    "FSDP": "call lightck.restore and lightck.attach with a model of fully_shard",
    "MEGATRON_LM": "it was never tried",
    "XLA": "it was never tried",
}
"""Kinds of distribution that this module does not restore, and what to do."""


class Lightck:
    """Take snapshots of what an accelerator has prepared, and go on from the newest.

    Made after `accelerator.prepare`, it restores the newest whole snapshot below `path`, if there
    is one: the prepared models, optimizers and schedulers, what `register_for_checkpointing` was
    given, the gradient scaler, the generators and the place in the data. `epochs` and `batches`
    then go on with the batch that comes next. One line of the log, at INFO, says with which step.

    Thread: the training thread.
    """

    def __init__(
        self,
        accelerator: Any,
        path: str | os.PathLike[str] | None = None,
        *,
        extras: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        """Restore what is there, and attach.

        Args:
            accelerator: everything is prepared and registered.
            path: as for `lightck.attach`.
            extras: further state of yours, as for `lightck.attach`.
            **settings: further arguments of `lightck.attach`, `policy=10` for example.

        Raises:
            ConfigError: the loop could not be resumed exactly; it says why and what to write.
            LightckError: as `lightck.restore` and `lightck.attach` raise them.
        """
        self._accelerator = accelerator
        self._place = _Place()
        self._loader: Any = None
        """The loader that `batches` was given."""
        models, optimizers, own = _prepared(accelerator)
        own |= {
            "accelerate/place": lightck.at_step(_AtStep(self._place)),
            "accelerate/epoch": lightck.at_forward(_AtForward(self._place)),
            **(extras or {}),
        }
        self.info: lightck.RestoreInfo | None = lightck.restore(
            models, optimizers, path, extras=own, step="exact"
        )
        """The description of what was restored; None: nothing was there."""
        self.handle: lightck.Handle = lightck.attach(
            models, optimizers, path, extras=own, **settings
        )
        """The handle on the running engine."""

    @property
    def step(self) -> int:
        """Return the last complete step."""
        return self.handle.step

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the number of each epoch below `count`, from the restored one on."""
        while self._place.epoch < count:
            epoch = self._place.epoch
            yield epoch
            if self._place.epoch == epoch:  # the loop has left it early
                self._begin_next()

    def batches(self, loader: Any) -> Iterator[Any]:
        """Yield the batches of a pass over a prepared loader; of the restored one, what is left.

        Raises:
            ConfigError: the place in this loader could not be found again; it says what to write.
        """
        self._refuse(loader)
        place, sampler = self._place, _ordered(loader, self._place)
        if place.batch and not place.restored:  # the loop has left the last pass early
            self._begin_next()
        behind, place.restored = place.batch if place.restored else 0, False
        # The loader would do so itself where it begins: then the order that is noted here were
        # another on each rank, and a lost rank's replacement would meet nobody within a pass.
        if not behind and loader.rng_types is not None:
            synchronize_rng_states(loader.rng_types, loader.synchronized_generator)
        if isinstance(sampler, lightck.ResumableSampler):
            source = loader
        else:
            place.stand(sampler, anew=behind == 0)
            loader.set_epoch(place.epoch)
            source = self._accelerator.skip_first_batches(loader, behind) if behind else loader
        kept, source.rng_types = loader.rng_types, None
        try:
            for batch in source:
                loader.rng_types = kept  # the pass has begun: other passes agree by themselves
                place.batch += 1
                yield batch
        finally:
            loader.rng_types = kept  # of an empty pass, or one that fails at once
        self._begin_next()

    def _begin_next(self) -> None:
        self._place.begin(self._place.epoch + 1)
        self.handle.epoch()  # for policies that count them

    def close(self) -> None:
        """Commit the last step and detach; see `Handle.close`. Idempotent."""
        self._give_back()
        self.handle.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._give_back()
        self.handle.__exit__(kind, error, trace)

    # ---- inside ------------------------------------------------------------------------------

    def _give_back(self) -> None:
        """Give the loader its sampler back: passes draw their order, for the next `Lightck` too."""
        if isinstance(sampler := _sampler(self._loader), _Ordered):
            _batches_of(self._loader).sampler = sampler.given_back()

    def _refuse(self, loader: Any) -> None:
        """Refuse a loader in which the place could not be found again."""
        if self._loader is not None and loader is not self._loader:
            raise ConfigError(
                "batches() was given another loader before, and only one place is kept: train from"
                " one loader (a ConcatDataset's), and iterate over others, as for validation,"
                " without batches()"
            )
        kind = type(loader).__name__
        if not hasattr(loader, "base_dataloader"):
            raise ConfigError(
                f"batches() was given a {kind} that accelerator.prepare has not returned: prepare"
                " it"
            )
        if kind == "DataLoaderDispatcher":
            raise ConfigError(
                "the loader dispatches batches from one rank to the others, which lightck does not"
                " follow: take DataLoaderConfiguration(dispatch_batches=False)"
            )
        if getattr(loader, "use_stateful_dataloader", False):
            raise ConfigError(
                "the loader is prepared with use_stateful_dataloader=True, whose place Accelerate"
                " does not keep rightly: leave it out, lightck finds the place without it"
            )
        if isinstance(loader.dataset, IterableDataset):
            raise ConfigError(
                f"the place in a {type(loader.dataset).__name__} could not be found again exactly:"
                " take a dataset with a length and indices"
            )
        self._loader = loader


class _Place:
    """The place in the data: epoch, batches given, and what the epoch's order is drawn from."""

    def __init__(self) -> None:
        self.epoch = 0
        self.batch = 0
        self.order: dict[str, Any] = {}
        """The state of the sampler's generator from before the pass, or its seed."""
        self.restored = False
        """True if the next pass goes on from a place that was loaded."""

    def begin(self, epoch: int) -> None:
        """Stand at the beginning of an epoch."""
        self.epoch, self.batch, self.order, self.restored = epoch, 0, {}, False

    def stand(self, sampler: Any, *, anew: bool) -> None:
        """Note what a pass draws its order from, or set it to what it was."""
        generator = getattr(sampler, "generator", None)
        seeded = hasattr(sampler, "initial_seed")  # Accelerate's, by epoch
        if anew and not self.order:
            if seeded:
                self.order = {"seed": sampler.initial_seed}
            elif generator is not None:
                self.order = {"generator": generator.get_state()}
        elif "seed" in self.order and seeded:
            sampler.initial_seed = self.order["seed"]
        elif "generator" in self.order and generator is not None:
            generator.set_state(self.order["generator"])


class _Ordered(Sampler[int]):
    """Gives a shuffled pass its seed, drawn globally as the sampler itself would."""

    def __init__(self, inner: Any, place: _Place) -> None:
        self._inner, self._place = inner, place

    def __len__(self) -> int:
        return len(self._inner)

    def __iter__(self) -> Iterator[int]:
        order = self._place.order
        if "drawn" not in order:
            order = self._place.order = {"drawn": int(torch.empty((), dtype=torch.int64).random_())}
        self._inner.generator = torch.Generator()
        self._inner.generator.manual_seed(order["drawn"])
        yield from self._inner

    def given_back(self) -> Any:
        """Return the sampler inside, as it was."""
        self._inner.generator = None
        return self._inner


class _AtStep:
    """The place where the step ended."""

    def __init__(self, place: _Place) -> None:
        self._place = place

    def state_dict(self) -> dict[str, Any]:
        place = self._place
        return {"epoch": place.epoch, "batch": place.batch, "order": place.order}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        place = self._place
        place.begin(state["epoch"])
        place.batch, place.order = state["batch"], state["order"]
        place.restored = place.batch > 0


class _AtForward(_AtStep):
    """The epoch that the next forward belonged to.

    Where it is another one, the loop has done what it does between two epochs, and a resumed run
    begins with the new one.
    """

    def load_state_dict(self, state: dict[str, Any]) -> None:
        place = self._place
        if state["epoch"] != place.epoch:
            place.begin(state["epoch"])
            # What a pass draws where it begins, a resumed one draws there again.
            place.order = {} if "drawn" in state["order"] else state["order"]
            place.restored = True


def _ordered(loader: Any, place: _Place) -> Any:
    """Return the loader's sampler; one that draws its order's seed is wrapped first."""
    sampler = _sampler(loader)
    if isinstance(sampler, _Ordered):  # of the pass before, or of a `Lightck` that nobody closed
        sampler = sampler.given_back()
    if type(sampler) is RandomSampler and sampler.generator is None:
        sampler = _batches_of(loader).sampler = _Ordered(sampler, place)
    return sampler


def _distributed(model: nn.Module) -> nn.Module:
    """Return the DDP that `accelerator.prepare` has put around a model; the model if there is none.

    Accelerate keeps the model alone, and gives the DDP to the script, whose variable it is. It says
    which tensors are alike on all ranks, and what its buckets hold.
    """
    made = (each for each in gc.get_objects() if issubclass(type(each), DistributedDataParallel))
    return next((each for each in made if each.module is model), model)


def _prepared(accelerator: Any) -> tuple[list[Any], list[Any], dict[str, Any]]:
    """Return models, optimizers and extras: the one place that knows what Accelerate keeps.

    `tests/integrations/test_seams.py` names every attribute that is used here.
    """
    kind = accelerator.distributed_type.name
    if kind in _REFUSED:
        raise ConfigError(f"the accelerator distributes by {kind}: {_REFUSED[kind]}")
    models = [_distributed(each) for each in accelerator._models]
    if not models or not accelerator._optimizers:
        raise ConfigError(
            f"the accelerator has prepared {len(models)} models and"
            f" {len(accelerator._optimizers)} optimizers: call accelerator.prepare before Lightck"
        )
    extras: dict[str, Any] = {}
    for i, each in enumerate(accelerator._schedulers):
        extras[f"accelerate/scheduler/{i}"] = lightck.at_forward(each)
    for i, each in enumerate(accelerator._custom_objects):
        extras[f"accelerate/registered/{i}"] = lightck.at_forward(each)
    for i, loader in enumerate(accelerator._dataloaders):
        if isinstance(_sampler(loader), lightck.ResumableSampler):
            extras[f"accelerate/data/{i}"] = _sampler(loader)
    if accelerator.scaler is not None:
        extras["accelerate/scaler"] = accelerator.scaler
    return models, [each.optimizer for each in accelerator._optimizers], extras


def _sampler(loader: Any) -> Any:
    """Return the sampler that a prepared loader takes its indices from, or None."""
    return getattr(_batches_of(loader), "sampler", None)


def _batches_of(loader: Any) -> Any:
    """Return the sampler of batches that a prepared loader has, or has its rank's share of."""
    batches = getattr(loader, "batch_sampler", None)
    return getattr(batches, "batch_sampler", batches)
