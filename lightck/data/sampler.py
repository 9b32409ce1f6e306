"""`ResumableSampler`: keeps the position in the data, with a plain `DataLoader` and any workers.

The order is a pure function of seed and epoch; the position is what the training thread was given,
not what workers have asked for. Random numbers drawn in workers are a function of the position.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sized
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler

from lightck.data import lookahead
from lightck.data.worker_seeds import SeedingIndex
from lightck.errors import ConfigError, RestoreMismatchError
from lightck.state import data_loaders

_SAVED = {"epoch", "consumed", "seed", "length", "shuffle"}


class ResumableSampler(Sampler[int], data_loaders.Telling):
    """Go on in the middle of an epoch with the batch that comes next, each sample exactly once.

        sampler = lightck.ResumableSampler(data, seed=1)
        loader = DataLoader(data, batch_size=32, sampler=sampler, num_workers=2)
        extras = {"data": sampler}
        lightck.restore(model, optimizer, path, extras=extras)
        with lightck.attach(model, optimizer, path, extras=extras):
            for epoch in range(sampler.epoch, 10):
                for x, y in loader:
                    optimizer.zero_grad()
                    F.cross_entropy(model(x), y).backward()
                    optimizer.step()

    Each rank goes through the share that torch's `DistributedSampler` would give it with the same
    seed and epoch. Iterating the loader begins the next epoch; only after a restore does it go on
    with the restored one, behind the last batch that was consumed when the step ended. A batch is
    consumed when the loop gets it: micro-batches and skipped batches count, what workers have
    prefetched does not. An epoch that the loop leaves early is over when the loader is iterated
    anew or `set_epoch` is called. A loop that draws a batch ahead of the step it is for loses it.

    Iterating the loader draws from no generator. What `dataset[i]` draws from torch's, NumPy's and
    Python's global generators is the same after a resume: in a worker they are seeded for each
    batch, from seed, epoch and position; without workers they stand where they stood. Generators
    that the dataset keeps itself are its own affair.

    On another number of ranks (or with another batch size) the rest of the epoch is shared out
    anew: each remaining sample comes once, padding apart. The restored order and epoch are the same
    on all ranks, and any rank's state serves.

    Works as `sampler=` and inside a `BatchSampler` given as `batch_sampler=`, in one loader.

    Thread: the training thread.
    """

    def __init__(
        self,
        data: Sized,
        *,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        rank: int | None = None,
        world: int | None = None,
    ) -> None:
        """Begin at epoch 0.

        Args:
            data: a dataset with a length, which must not change.
            seed: of the order and of what workers draw; the same on all ranks.
            shuffle: a new order for each epoch; False: the dataset's own.
            drop_last: leave out what cannot be shared out evenly over the ranks; False repeats the
                first samples instead. A last batch that is not full is the loader's `drop_last`.
            rank: default: torch.distributed's, else 0; asked for when it is needed first, so that
                the sampler may be made before `init_process_group`.
            world: number of ranks; default: torch.distributed's, else 1.

        Raises:
            ConfigError: the data have no indices or no length; rank and world do not fit.
        """
        if isinstance(data, IterableDataset) or not hasattr(data, "__len__"):
            lacks = "indices" if hasattr(data, "__len__") else "length"
            raise ConfigError(
                f"a {type(data).__name__} has no {lacks}, so that no position in it can be found"
                " again: use torchdata's StatefulDataLoader, with a dataset that has state_dict"
                " and load_state_dict"
            )
        self.length = len(data)
        self.seed, self.shuffle, self.drop_last = int(seed), bool(shuffle), bool(drop_last)
        self._place = _checked(rank, world)
        """Rank and number of ranks, once they are known for good; else None."""
        self._find_place()
        self._epoch = 0
        self._consumed = 0
        """The number of samples of this epoch that all ranks together have consumed."""
        self._pass: _Pass | None = None
        """The pass that the loop is in; None between passes."""
        self._restored = False
        """True if the next pass goes on from a position that was loaded."""
        self._goes_on = False
        """True from a load until a batch is given, or the loop says where it begins."""
        self._passed = 0
        """The number of epochs by which the loop counts behind, since it was started again."""
        data_loaders.wrap(DataLoader, "__iter__", _begun)
        lookahead.watch()

    # ---- for the loop ----------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """The rank of this process among those that share the data."""
        return self._known_place()[0]

    @property
    def world(self) -> int:
        """The number of processes that share the data."""
        return self._known_place()[1]

    @property
    def epoch(self) -> int:
        """The epoch that the loop is in, or that iterating the loader begins or goes on with."""
        return self._epoch

    @property
    def consumed(self) -> int:
        """The number of samples of this epoch that all ranks together have consumed."""
        return self._consumed

    def set_epoch(self, epoch: int) -> None:
        """Begin `epoch` when the loader is iterated next; go on with it if it was restored.

        After a loop has left an epoch early, this says so before the loader is iterated anew. An
        iterator of this epoch that has given nothing yet goes on: Lightning makes it first. An
        earlier epoch, said before the first batch behind a restore, is from a loop that counts its
        epochs from there again: it means the restored epoch, and the next ones those behind it.
        """
        ahead = data_loaders.running()
        if ahead is not None and self._restored:  # by Accelerate, whose own count is not restored
            ahead.loader.iteration = self._epoch
            return
        if self._goes_on and epoch < self._epoch:
            self._passed = self._epoch - int(epoch)
        self._goes_on = False
        epoch += self._passed
        begun = self._pass is not None and self._pass.given > 0
        if begun or epoch != self._epoch:
            waits = None if self._pass is None or self._pass.started else self._pass
            if waits is not None:  # its iterator gives this epoch's: Lightning makes none for it
                waits.epoch, waits.start = int(epoch), 0
            self._epoch, self._consumed, self._pass = int(epoch), 0, waits
            self._restored = False
            data_loaders.tell(self, drawing=False)

    def __len__(self) -> int:
        """Return the number of samples of a whole epoch on this rank, even in a restored one."""
        return self._share(0)

    def indices(self, epoch: int, start: int = 0) -> list[int]:
        """Return this rank's samples of an epoch, after the first `start` samples of all ranks."""
        if self._share(start) == 0:
            return []
        last = start + self._share(start) * self.world
        places = torch.arange(start + self.rank, last, self.world) % self.length
        if not self.shuffle:
            return places.tolist()
        source = torch.Generator().manual_seed(self.seed + epoch)
        return torch.randperm(self.length, generator=source)[places].tolist()

    def __iter__(self) -> Iterator[int]:
        """Yield the pass's indices, for a `DataLoader` only: iterating the loader begins a pass.

        Raises:
            ConfigError: something else iterates the sampler, so that nobody counts.
        """
        if self._pass is None:
            raise ConfigError(
                "a ResumableSampler is iterated by a torch.utils.data.DataLoader, as its sampler"
                " or within a torch BatchSampler, and not by anything else: who consumes the"
                " batches could not be seen (a StatefulDataLoader keeps its own position: give it"
                " an ordinary sampler and make the loader itself an extra; under Accelerate it"
                " needs no skip_first_batches, and with several processes the loader is not given"
                " to prepare, for the sampler shares the data out; for the order alone there is"
                " sampler.indices(epoch))"
            )
        return self._pass.indices()

    # ---- for extras ------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the position: the same on all ranks that have taken as many steps."""
        return {
            "epoch": self._epoch,
            "consumed": self._consumed,
            "seed": self.seed,
            "length": self.length,
            "shuffle": self.shuffle,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved position, with the saved seed.

        Raises:
            RestoreMismatchError: it is a position in other data or in another order; the sampler
                was not changed.
        """
        if not isinstance(state, dict) or state.keys() != _SAVED:
            raise RestoreMismatchError(
                f"a ResumableSampler's state has {sorted(_SAVED)}, found {state!r}"
            )
        live = {"length": self.length, "shuffle": self.shuffle}
        different = {k: f"saved {state[k]}, live {v}" for k, v in live.items() if state[k] != v}
        if different:
            raise RestoreMismatchError(
                "the sampler's position was saved in another order of samples", different=different
            )
        self.seed = state["seed"]
        self._epoch, self._consumed, self._pass = state["epoch"], state["consumed"], None
        self._restored = self._goes_on = True
        self._passed = 0

    # ---- inside ----------------------------------------------------------------------------

    def _find_place(self) -> None:
        if self._place is None and dist.is_available() and dist.is_initialized():
            self._place = dist.get_rank(), dist.get_world_size()

    def _known_place(self) -> tuple[int, int]:
        """Return rank and number of ranks: 0 and 1 for now, if there is no process group yet.

        Raises:
            ConfigError: several ranks were launched that do not know each other yet.
        """
        self._find_place()
        if self._place is not None:
            return self._place
        launched = int(os.environ.get("WORLD_SIZE", "1"))
        if launched > 1:
            raise ConfigError(
                f"WORLD_SIZE is {launched}, but torch.distributed is not initialized: use the"
                " sampler (its length, its loader) after init_process_group, or give rank= and"
                " world="
            )
        return 0, 1

    def _share(self, start: int) -> int:
        """Return the number of samples for each rank, of those after the first `start`."""
        rest = max(0, self.length - start)
        return rest // self.world if self.drop_last else -(-rest // self.world)

    def _begin(self, loader: DataLoader[Any], batch: int) -> _Pass:
        self._known_place()  # refused here, not inside the loader
        if self._pass is not None and self._pass.given > 0:  # the loop has left it early
            self._epoch, self._consumed = self._epoch + 1, 0
        self._pass = _Pass(self, self._epoch, self._consumed, batch, loader.num_workers > 0)
        self._restored = False
        data_loaders.tell(self, drawing=False)
        return self._pass


@dataclass(eq=False)
class _Pass:
    """One pass through an epoch or the rest of it, by one iterator of the loader."""

    sampler: ResumableSampler
    epoch: int
    start: int
    batch: int
    """The number of samples in a batch, the last one apart."""
    workers: bool
    given: int = 0
    """The number of batches that the loop has got."""
    started: bool = False
    """True once indices are drawn, by workers ahead of the loop."""

    def indices(self) -> Iterator[int]:
        """Yield the rest of the epoch; for workers, the first index of a batch seeds generators."""
        sampler, self.started = self.sampler, True
        for i, index in enumerate(sampler.indices(self.epoch, self.start)):
            if self.workers and i % self.batch == 0:
                place = self.start + i * sampler.world + sampler.rank
                yield SeedingIndex(index, f"{sampler.seed} {self.epoch} {place}")
            else:
                yield index

    def drawing(self) -> None:
        """Tell that a batch is drawn: the position is before it, and so are the generators."""
        if self.sampler._pass is not self:
            raise ConfigError(
                f"an iterator of epoch {self.epoch} is used after the sampler went on to epoch"
                f" {self.sampler.epoch}: a ResumableSampler has one position, for one iterator;"
                " where a loop begins anew over the same loader (a second fit), call"
                " sampler.set_epoch(0) before it makes its iterator"
            )
        data_loaders.tell(self.sampler, drawing=True)

    def drawn(self) -> None:
        """Count one batch more as consumed."""
        self.given += 1
        self.sampler._goes_on = False
        most = self.sampler._share(self.start)
        self.sampler._consumed = (
            self.start + min(self.given * self.batch, most) * self.sampler.world
        )
        data_loaders.tell_drawn(self.sampler)

    def ended(self) -> None:
        """End the epoch: what the loop does from here on belongs to its end."""
        sampler = self.sampler
        if sampler._pass is self:
            sampler._epoch, sampler._consumed, sampler._pass = self.epoch + 1, 0, None
            data_loaders.tell(sampler, drawing=False)


def _begun(original: Any) -> Any:
    def __iter__(loader: Any) -> Any:
        found = _behind(loader)
        if found is None:
            return original(loader)
        sampler, batch = found
        why = lookahead.unfollowed(loader)
        if why:
            raise ConfigError(f"a ResumableSampler counts what the loop is given: {why}")
        if loader.num_workers and not getattr(loader, "in_order", True):
            raise ConfigError(
                "a ResumableSampler needs in_order=True: batches that overtake each other leave"
                " no single position"
            )
        made = sampler._begin(loader, batch)
        with data_loaders.undrawn(loader.generator):
            iterator = original(loader)
        return data_loaders.follow(loader, iterator, made)

    return __iter__


def _behind(loader: Any) -> tuple[ResumableSampler, int] | None:
    """Return the `ResumableSampler` that a loader draws from, and its batch size; else None."""
    batches = loader.batch_sampler
    if batches is None:
        return (loader.sampler, 1) if isinstance(loader.sampler, ResumableSampler) else None
    # Another class may draw more or fewer indices per batch, or ahead: its `iter` is refused.
    if type(batches) is BatchSampler and isinstance(batches.sampler, ResumableSampler):
        return batches.sampler, batches.batch_size
    return None


def _checked(rank: int | None, world: int | None) -> tuple[int, int] | None:
    if (rank is None) != (world is None):
        raise ConfigError(f"rank={rank} and world={world}: give both or none")
    if rank is None or world is None:
        return None
    if not 0 <= rank < world:
        raise ConfigError(f"rank={rank} is not one of world={world}")
    return rank, world
