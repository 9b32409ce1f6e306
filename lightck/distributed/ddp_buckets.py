"""The arrangement of DDP's buckets, as boundary state: seen, kept, and brought to a fresh DDP.

From three ranks on a sum depends on where in which bucket a gradient lies. A fresh DDP reduces in
its initial buckets first. After its first backward it arranges them anew, in the order in which
rank 0's gradients became ready, and broadcasts that at the next forward. A restarted job would do
so again: one step is summed otherwise than in the run that goes on, and another order may be found.

So a snapshot says what the next backward reduces in. In the step of the first backward DDP itself
does not know it yet: it is computed as DDP will, from the order that hooks have seen. Restore lets
DDP rebuild at once, and answers its broadcasts with what the snapshot says: nothing is sent, no
gradient is made, no comm hook runs, no generator moves. Ranks agree beforehand: all do it alike, or
none.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import operator
import os
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from lightck.distributed.ddp_communication import logged_buckets, reduced_parameters
from lightck.distributed.rendezvous import Rendezvous
from lightck.distributed.rounds import Message
from lightck.errors import CorruptSnapshotError, LightckError
from lightck.events import event
from lightck.loop.hooks import untraced
from lightck.state.modules import strip

KEY = "buckets"
"""Key of the arrangements among the values of forward start."""
Buckets = list[list[int]]
"""For each bucket the indices of its parameters, as `reduced_parameters` numbers them."""


@dataclass(frozen=True)
class Arrangement:
    """The buckets in which one DDP module reduces, and what they follow from."""

    rebuilt: bool
    """True if the next backward reduces in rebuilt buckets; DDP rebuilds them once."""
    limits: list[int]
    """Bytes at which DDP closes the first rebuilt bucket, and each one after it."""
    sizes: list[int]
    """Bytes of each bucket."""
    buckets: Buckets


# ---- what torch keeps to itself: everything private of DDP that is used here -------------------

_c10d: Any = torch._C._distributed_c10d
_PRIVATE = (
    (_c10d.Reducer, "_get_zeros_like_grad_buckets"),
    (_c10d.Reducer, "_push_all_rebuilt_params"),
    (_c10d.Reducer, "_rebuild_buckets"),
    (_c10d.Reducer, "_reset_state"),
    (_c10d.Reducer, "_update_process_group"),
    (_c10d, "_compute_bucket_assignment_by_size"),
    (_c10d, "_create_work_from_future"),
    (_c10d, "_DEFAULT_FIRST_BUCKET_BYTES"),
)
_ATTRIBUTES = ("_has_rebuilt_buckets", "bucket_bytes_cap", "bucket_bytes_cap_default", "reducer")
_LAST_IS_SMALL = "DDP_SET_LAST_BUCKET_CAP"
"""Environment variable with which torch fills rebuilt buckets from the other end."""


def lacking(module: DistributedDataParallel) -> list[str]:
    """Return what this torch lacks of the private names that are used here; empty: nothing."""
    found = [f"{owner.__name__}.{name}" for owner, name in _PRIVATE if not hasattr(owner, name)]
    return found + [f"DDP.{name}" for name in _ATTRIBUTES if not hasattr(module, name)]


def _has_buckets(module: DistributedDataParallel) -> bool:
    """Tell whether the module reduces in buckets, as it does but in two modes."""
    other = ("_use_python_reducer", "_delay_all_reduce_all_params")
    return not any(getattr(module, name, False) for name in other)


def _rebuilds(module: DistributedDataParallel) -> bool:
    return bool(module.static_graph) or not module.find_unused_parameters


def _limits(module: DistributedDataParallel) -> list[int]:
    own = [*getattr(module, "bucket_bytes_cap_list", ())]
    cap: Any = module.bucket_bytes_cap
    default: Any = module.bucket_bytes_cap_default
    return own or [_c10d._DEFAULT_FIRST_BUCKET_BYTES if default else cap, cap]


def _assigned(
    module: DistributedDataParallel, order: Sequence[int], limits: Sequence[int]
) -> Buckets:
    """Fill buckets as DDP does, with the gradients in this order."""
    every = reduced_parameters(module)
    sparse = {
        id(p)
        for m in module.modules()
        if isinstance(m, nn.Embedding | nn.EmbeddingBag) and m.sparse
        for p in m.parameters(recurse=False)
    }
    found = _c10d._compute_bucket_assignment_by_size(
        [every[i] for i in order], [*limits], [id(p) in sparse for p in every], [*order]
    )
    return [[*bucket] for bucket in found[0]]


def _initial(module: DistributedDataParallel) -> Buckets:
    """Return the buckets that the module had when it was made."""
    own = [*getattr(module, "bucket_bytes_cap_list", ())]
    most = 2**63 - 1
    limits = own or ([most] if _rebuilds(module) else sorted({*_limits(module)}))
    every = range(len(reduced_parameters(module)))
    filled = sorted(_assigned(module, every, limits), key=min)
    return filled[::-1]


def in_use(module: DistributedDataParallel) -> Buckets | None:
    """Read the buckets from DDP, which makes zeros of the gradients' size; None if memory lacks."""
    index = {id(p): i for i, p in enumerate(reduced_parameters(module))}
    reducer: Any = module.reducer
    try:
        buckets = reducer._get_zeros_like_grad_buckets()
    except RuntimeError:  # out of memory: DDP's log tells in time
        return None
    return [[index[id(p)] for p in bucket.parameters()] for bucket in buckets]


class _Answering(dist.ProcessGroup):
    """A group of which every broadcast gives what is known already, in order."""

    def __init__(self, group: dist.ProcessGroup, answers: Sequence[list[int]]) -> None:
        super().__init__(group.rank(), group.size())  # type: ignore[call-arg]
        self.answers = [*answers]

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return "lightck"

    def broadcast(self, tensors: list[torch.Tensor], *_: Any) -> Any:  # type: ignore[override]
        """Answer at once."""
        answer = torch.tensor(self.answers.pop(0), dtype=torch.int32)
        tensors[0].copy_(answer)
        done: Any = torch.futures.Future()
        done.set_result(tensors)
        return _c10d._create_work_from_future(done)


def _arrange(module: DistributedDataParallel, wanted: Arrangement) -> None:
    """Make a module that has not rebuilt reduce in these buckets from its next backward on.

    One that has rebuilt cannot be changed: torch then names a bucket's parameters from a cache that
    it never clears, and comm hooks would be told of others' gradients.

    Raises:
        LightckError: torch has not done so.
    """
    reducer: Any = module.reducer
    reducer._reset_state()  # what was to be rebuilt at the next forward counts no more
    if not wanted.rebuilt:
        return
    # DDP asks rank 0 for the indices and their number of buckets, then for the buckets' sizes.
    buckets, group = wanted.buckets, module.process_group
    answers = [[*chain.from_iterable(buckets), len(buckets)], [*map(len, buckets)]]
    answering = _Answering(group, answers)
    reducer._update_process_group(answering)
    try:
        reducer._push_all_rebuilt_params()
        done = reducer._rebuild_buckets() and not answering.answers
    finally:
        reducer._update_process_group(group)
    if not done:
        raise LightckError(
            f"DDP did not take the {len(buckets)} buckets of {wanted.sizes} bytes that the snapshot"
            f" has: torch {torch.__version__} rebuilds them in another way"
        )
    module._has_rebuilt_buckets = True


# ---- seen while training, for the boundary state -----------------------------------------------

_known: weakref.WeakKeyDictionary[DistributedDataParallel, Buckets] = weakref.WeakKeyDictionary()
"""The rebuilt buckets of each module where they are known for certain, and need not be read."""
_TRIES = 16
"""Number of looks at DDP's log, which tells of rebuilt buckets one forward later, if at all."""


def known_buckets(module: DistributedDataParallel) -> Buckets | None:
    """Return the rebuilt buckets of a module where they are known for certain, else None."""
    return _known.get(module)


def by_path(model: nn.Module) -> dict[str, DistributedDataParallel]:
    """Return the model's DDP modules that reduce in buckets, by path."""
    return {
        strip(name): module
        for name, module in model.named_modules()
        if isinstance(module, DistributedDataParallel) and _has_buckets(module)
    }


@dataclass(eq=False)
class _Watched:
    """One DDP module and the order in which its gradients become ready until it has rebuilt."""

    module: DistributedDataParallel
    _order: dict[int, None] = field(default_factory=dict)
    """Indices of the parameters in the order of their last gradients, as keys."""
    _stage: str = ""
    _tries: int = _TRIES
    _taken: dict[str, Any] | None = None
    _handles: list[RemovableHandle] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Hook the parameters, unless the module has rebuilt already or never will."""
        if lacking(self.module) or self.module._has_rebuilt_buckets or not _rebuilds(self.module):
            return
        for i, parameter in enumerate(reduced_parameters(self.module)):
            hook = untraced(functools.partial(self._ready, i))
            self._handles.append(parameter.register_post_accumulate_grad_hook(hook))

    def _ready(self, index: int, _: torch.Tensor) -> None:
        if self.module.require_forward_param_sync:  # else under no_sync: DDP does not count it
            self._order.pop(index, None)
            self._order[index] = None

    def taken(self) -> dict[str, Any] | None:
        """Return the arrangement, plain; the same object as long as it is the same."""
        stage = self._now()
        if stage == self._stage and (stage != "rebuilt" or not self._tries):
            return self._taken
        buckets = _initial(self.module) if stage == "initial" else self._rebuilt_buckets(stage)
        if buckets is None:
            return None
        if stage == "rebuilt":
            self.remove()
        known = self._taken
        if known is None or known["buckets"] != buckets or known["rebuilt"] != (stage != "initial"):
            found = Arrangement(
                stage != "initial",
                _limits(self.module),
                _sizes(self.module, buckets),
                buckets,
            )
            self._taken = asdict(found)
        self._stage = stage
        return self._taken

    def _now(self) -> str:
        """Return `initial`, `pending` (DDP rebuilds at the next forward) or `rebuilt`."""
        if self.module._has_rebuilt_buckets:
            return "rebuilt"
        # A static graph is rebuilt after its second backward.
        pending = self._has_order() and not self.module.static_graph
        return "pending" if pending else "initial"

    def _has_order(self) -> bool:
        count = len(reduced_parameters(self.module))
        return bool(self._order) and len(self._order) == count and _LAST_IS_SMALL not in os.environ

    def _rebuilt_buckets(self, stage: str) -> Buckets | None:
        """Return the rebuilt buckets: known, computed from the order seen, logged or read."""
        known = _known.get(self.module)
        if stage == "rebuilt" and known is not None:
            self._tries = 0
            return known
        seen = (
            _assigned(self.module, [*self._order], _limits(self.module))
            if self._has_order()
            else None
        )
        if stage == "pending":
            return seen
        # Rank 0's order is what DDP takes. The others read theirs as soon as DDP's log has it.
        group: Any = self.module.process_group
        certain = seen if group.rank() == 0 else None
        certain = certain or logged_buckets(self.module) or (None if seen else in_use(self.module))
        if certain is not None:
            self._tries, _known[self.module] = 0, certain
        else:
            self._tries -= 1
        return certain or seen

    def remove(self) -> None:
        """Take off the hooks. Idempotent."""
        while self._handles:
            self._handles.pop().remove()


class Arrangements:
    """The arrangements of a model's DDP modules, for the boundary state, while it trains."""

    def __init__(self, model: nn.Module) -> None:
        """Watch every DDP module in the model."""
        self._watched = {
            path: _Watched(module) for path, module in by_path(model).items() if not lacking(module)
        }
        self._last: dict[str, Any] = {}

    @property
    def exist(self) -> bool:
        """Tell whether there is anything to keep."""
        return bool(self._watched)

    def __call__(self) -> dict[str, Any]:
        """Return each arrangement by the module's path, plain; empty: there is nothing to keep.

        It is the same object while nothing has changed.
        """
        every = {path: watched.taken() for path, watched in self._watched.items()}
        found = {path: taken for path, taken in every.items() if taken is not None}
        if found.keys() != self._last.keys() or any(
            map(operator.is_not, found.values(), self._last.values())
        ):
            self._last = found
        return self._last

    def remove(self) -> None:
        """Stop watching. Idempotent."""
        for each in self._watched.values():
            each.remove()


def _sizes(module: DistributedDataParallel, buckets: Buckets) -> list[int]:
    every = [p.numel() * p.element_size() for p in reduced_parameters(module)]
    return [sum(every[i] for i in bucket) for bucket in buckets]


# ---- brought to the modules at restore ---------------------------------------------------------


def opened(forward_start: Mapping[str, Any], *, context: str) -> dict[str, Arrangement]:
    """Return the arrangements that a snapshot has, checked; empty if it has none.

    Raises:
        CorruptSnapshotError: they do not have the form in which they were written.
    """
    try:
        rows = forward_start.get(KEY, {}).items()
        found = {path: Arrangement(**told) for path, told in rows}
        good = all(map(_is_whole, found.values())) and all(type(path) is str for path in found)
    except (AttributeError, TypeError) as error:
        raise CorruptSnapshotError(f"{context}: no arrangement of buckets: {error}") from error
    if not good:
        raise CorruptSnapshotError(f"{context}: no arrangement of buckets: indices or sizes lack")
    return found


def _is_whole(told: Arrangement) -> bool:
    """Tell whether every index is in one bucket: DDP would read memory that is not its own."""
    lists = (told.limits, told.sizes, told.buckets, *told.buckets)
    if type(told.rebuilt) is not bool or not all(type(each) is list for each in lists):
        return False
    indices = [*chain.from_iterable(told.buckets)]
    if not all(type(i) is int for i in (*indices, *told.limits, *told.sizes)):
        return False
    return (
        bool(indices)
        and all(told.buckets)
        and len(told.sizes) == len(told.buckets)
        and sorted(indices) == [*range(len(indices))]
    )


def bring(ranks: Rendezvous, model: nn.Module, saved: Mapping[str, Arrangement]) -> None:
    """Bring the model's DDP modules to the saved arrangements; every rank calls this.

    What does not fit any module here changes nothing, on no rank, and one warning says why.

    Raises:
        CoordinationError: another rank failed or did not come; on every rank.
        LightckError: torch has not done what it was asked for.
    """
    modules = by_path(model)
    if not modules:
        return
    why = _misfit(modules, saved)
    rounds = ranks.rounds
    if rounds is not None:
        message = {"why": why[:_LETTERS], "digest": _digest(saved)}
        answer = ranks.agree(lambda _: rounds.agree("restore: buckets", message, decide))
        why = answer["why"]
        if not why and not answer["alike"]:
            saved = _of_first_ranks(ranks, modules, saved)
    if why:
        event("buckets_differ", logging.WARNING, why=why, text=_OTHERWISE)
        return
    for path, wanted in saved.items():
        module = modules[path]
        if not module._has_rebuilt_buckets:
            _arrange(module, wanted)
            if wanted.rebuilt:
                _known[module] = wanted.buckets


_LETTERS = 1000
_OTHERWISE = (
    "gradients are summed in other buckets than in the run that is restored: from three ranks on"
    " the last bit of a sum may differ"
)


def decide(messages: Sequence[Message]) -> Message:
    """Decide the round on rank 0: the first reason against it, and whether all ranks say alike."""
    why = next((f"rank {r}: {each['why']}" for r, each in enumerate(messages) if each["why"]), "")
    return {"why": why, "alike": len({each["digest"] for each in messages}) == 1}


def _digest(saved: Mapping[str, Arrangement]) -> str:
    return hashlib.blake2b(_as_json(saved).encode(), digest_size=16).hexdigest()


def _as_json(saved: Mapping[str, Arrangement]) -> str:
    return json.dumps({path: asdict(each) for path, each in sorted(saved.items())})


def _misfit(
    modules: Mapping[str, DistributedDataParallel], saved: Mapping[str, Arrangement]
) -> str:
    """Return why the modules cannot be brought to what was saved, with both values; "" if not."""
    for path, wanted in saved.items():
        module, label = modules.get(path), f"DDP module {path!r}"
        if module is None:
            return f"{label} is in the snapshot, here are {[*modules]}"
        missing = lacking(module)
        if missing:
            return f"torch {torch.__version__} has no {', '.join(missing)}"
        if module._has_rebuilt_buckets:
            if _are_others(module, wanted):
                return f"{label} has rebuilt its buckets, which DDP does only once: wrap anew"
            continue
        found, limits = len(reduced_parameters(module)), _limits(module)
        saved_count = sum(map(len, wanted.buckets))
        if saved_count != found:
            return f"{label} reduces {found} parameters, in the snapshot {saved_count}"
        if limits != wanted.limits:
            return f"{label} closes buckets at {limits} bytes, in the snapshot at {wanted.limits}"
        sizes = _sizes(module, wanted.buckets)
        if sizes != wanted.sizes:
            return f"{label} has buckets of {sizes} bytes, in the snapshot of {wanted.sizes}"
        if wanted.rebuilt and not _rebuilds(module):
            return f"{label} has find_unused_parameters=True and keeps its first buckets"
        if not wanted.rebuilt and wanted.buckets != _initial(module):
            return f"{label} begins with other buckets than the {wanted.sizes} of the snapshot"
    return ""


def _are_others(module: DistributedDataParallel, wanted: Arrangement) -> bool:
    """Tell whether a module that has rebuilt sums otherwise; two ranks sum alike in any buckets."""
    group: Any = module.process_group
    if group.size() < 3:
        return False
    used = _known.get(module) or logged_buckets(module) or in_use(module)
    return not wanted.rebuilt or used != wanted.buckets


def _of_first_ranks(
    ranks: Rendezvous,
    modules: Mapping[str, DistributedDataParallel],
    saved: Mapping[str, Arrangement],
) -> dict[str, Arrangement]:
    """Return the arrangements that the first rank of each module's group has, which DDP takes.

    Until DDP has rebuilt, each rank knows its own order only.
    """
    groups: dict[str, Any] = {path: module.process_group for path, module in modules.items()}
    first = {path: dist.get_global_rank(group, 0) for path, group in groups.items()}
    store, rounds = ranks.store, ranks.rounds
    assert rounds is not None
    key = f"{KEY}/{rounds.number}"

    def told(_: object) -> dict[int, Any]:
        if ranks.rank in first.values():
            store.set(f"{key}/{ranks.rank}", _as_json(saved).encode())
        rounds.agree("restore: buckets told", {}, lambda _: {})
        return {r: json.loads(store.read_many([f"{key}/{r}"])[0]) for r in {*first.values()}}

    every = ranks.agree(told)
    return {
        path: Arrangement(**every[rank][path])
        for path, rank in first.items()
        if path in every[rank]
    }
