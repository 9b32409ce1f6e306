"""The process group that stands before gloo: every collective goes to the communicator.

To scripts, DDP and DeepSpeed its back end is `gloo` (`torch.distributed.get_backend`). Groups of
all ranks share one communicator, since one thread makes their collectives in one order. What
another thread does with a group goes by gloo's own connections, and in place is off. Collectives
whose results differ by rank are numbered with the others, and repeated if no rank has completed
them; transfers between two ranks are not.
"""

from __future__ import annotations

import functools
import math
import os
import site
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.futures import Future

from lightck.errors import CoordinationError
from lightck.inplace.communicator import Communicator, completes
from lightck.inplace.operations import NOT_KEPT, UNSPOILED, KeptInput, Operation, described
from lightck.inplace.plan import CALLED_FROM, LIBRARY, PROGRAM, SPARSE, TORCH, Description
from lightck.loop.hooks import untraced

_torch: Any = torch._C._distributed_c10d
_NOT_THE_PROGRAM = tuple(
    f"{folder}{os.sep}" for folder in (Path(torch.__file__).parent, Path(__file__).parents[1])
)

_INSTALLED = tuple(
    f"{folder}{os.sep}"
    for folder in (
        *(sysconfig.get_path(name) for name in ("purelib", "platlib")),
        *(site.getusersitepackages(), *site.getsitepackages()),
        *(path for path in sys.path if path.endswith("dist-packages")),
    )
)
"""Folders of libraries; a program that is installed itself counts as one."""
_DDP = f"{Path(torch.nn.__file__).parent}{os.sep}"

MOST_FRAMES = 12
"""Places of the program by which a collective is known: Accelerate has up to ten of its own."""


class InputKeeper(Protocol):
    """Keeps the inputs of collectives that overwrite them."""

    def keep(self, tensors: Sequence[torch.Tensor]) -> KeptInput:
        """Keep the values of these tensors until their collective is complete."""
        ...


@functools.cache
def _is_programs(path: str) -> bool:
    return not path.startswith(_NOT_THE_PROGRAM)


@functools.cache
def _maker_at(path: str) -> str:
    if path.startswith(_DDP):
        return TORCH
    if path.startswith(_NOT_THE_PROGRAM):
        return ""  # passes it on
    return LIBRARY if path.startswith(_INSTALLED) else PROGRAM


def _maker() -> str:
    """Return who makes this collective: what torch's functions and ours pass on is their caller's.

    DDP and other libraries send models, which are restored; what a program sends may be anything.
    """
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if found := _maker_at(frame.f_code.co_filename):
            return found
        frame = frame.f_back
    return ""


_sites: dict[tuple[Any, ...], str] = {}


def _site() -> str:
    """Return file and line of the program that makes the collective, then those of its callers.

    A helper, or a library's one line, makes collectives for many places: its callers tell them
    apart. By instructions, since Python counts the lines of a function from its first one each
    time.
    """
    frame: FrameType | None = sys._getframe(2)
    frames: list[FrameType] = []
    at: list[tuple[str, int, int]] = []
    while frame is not None and len(frames) < MOST_FRAMES:
        code = frame.f_code
        if _is_programs(code.co_filename):
            frames.append(frame)
            at.append((code.co_filename, code.co_firstlineno, frame.f_lasti))
            if code.co_name == "<module>":
                break
        frame = frame.f_back
    key = tuple(at)
    found = _sites.get(key)
    if found is None:
        places = [f"{os.path.basename(f.f_code.co_filename)}:{f.f_lineno}" for f in frames]
        found = _sites[key] = CALLED_FROM.join(places)
    return found


_ProcessGroup: Any = dist.ProcessGroup


_Work: Any = dist.Work


class CollectiveWork(_Work):  # type: ignore[misc]
    """A collective as torch is given it; its waits raise if recovery in place has ended.

    Torch's own work over a future returns from `wait` as if all were well.
    """

    def __init__(self, communicator: Communicator, operation: Operation) -> None:
        super().__init__()
        self._communicator, self._operation = communicator, operation

    def wait(self, timeout: Any = None) -> bool:
        """Wait until the collective is complete; it has no time-out: it may be made again.

        Raises:
            CoordinationError: recovery in place has ended.
        """
        self._communicator.wait(self._operation)
        return True

    def synchronize(self) -> None:
        """Wait as `wait` does."""
        self.wait()

    def is_completed(self) -> bool:
        """Tell whether the collective is complete, or has failed."""
        return self._operation.future.done()

    def result(self) -> Any:
        """Return the collective's tensors."""
        self.wait()
        return self._operation.future.value()

    def get_future(self) -> Future[Any]:
        """Return the future, whose failure torch's C++ notices by `FailedCollective`."""
        return self._operation.future


@dataclass(frozen=True, slots=True)
class _Works:
    """The works of one collective that gloo makes of several, for want of a coalesced one."""

    works: Sequence[Any]

    def wait(self, *timeout: timedelta) -> None:
        """Wait until all are complete, for each no longer than the time-out."""
        for each in self.works:
            each.wait(*timeout)


def _one(works: Iterable[Any]) -> Any:
    every = [*works]
    return every[0] if len(every) == 1 else _Works(every)


class Group(_ProcessGroup):  # type: ignore[misc] # torch's own names say less than they take
    """A process group of all ranks of the job."""

    def __init__(
        self,
        communicator: Communicator,
        inputs: InputKeeper,
        apart: Callable[[], Any] | None = None,
        thread: int = 0,
    ) -> None:
        """Make a group.

        Args:
            communicator: of this rank.
            inputs: keeps what collectives overwrite.
            apart: connects all ranks by gloo alone, for what other threads do with this group;
                None: this is the program's first group, which is the training's.
            thread: on which the first group was made.
        """
        super().__init__(communicator.rank, communicator.world)
        self._communicator, self._inputs = communicator, inputs
        self._apart, self._thread = apart, thread
        self._own: Any = None
        """Gloo's own group, for all that other threads do; None: none has done anything."""
        self._name = self._description = ""
        self._bucket_forms: dict[KeptInput, Description] = {}
        """Forms of the reductions that DDP alone makes, always alike; finding one takes longest."""

    # ---- what torch asks of a group ----------------------------------------------------------

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """Return the name for torch's C++, which would look into gloo; scripts are told `gloo`."""
        return "lightck"

    @property
    def supports_splitting(self) -> bool:
        """Tell that this group cannot be split."""
        return False

    @property
    def group_name(self) -> str:
        """Return the name that torch gave the group."""
        return self._name

    def getGroupName(self) -> str:  # noqa: N802
        """Return the name that torch gave the group."""
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    setGroupName = _set_group_name  # noqa: N815

    @property
    def group_desc(self) -> str:
        """Return torch's description of the group."""
        return self._description

    def _set_group_desc(self, description: str) -> None:
        self._description = description

    def getGroupDesc(self) -> str:  # noqa: N802
        """Return torch's description of the group."""
        return self._description

    # ---- results that are the same on every rank ---------------------------------------------

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        """Reduce in place; torch's arguments."""
        reduces = _listed(tensors)
        opts = _options(opts, _torch.AllreduceOptions)
        kept = self._kept(reduces)
        hidden = kept.is_hidden()
        form = self._bucket_forms.get(kept) if hidden else None
        if form is None:
            kind = f"allreduce {_operator(opts)}{_sparse(reduces)}"
            form = Description(kind, described(reduces), site=_site(), maker=self._maker())
            if hidden:
                self._bucket_forms[kept] = form
        start = lambda backend: backend.allreduce(reduces, opts)  # noqa: E731
        return self._work(form, reduces, start, kept=kept, value=reduces)

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> Any:
        """Reduce several tensors in place; torch's arguments."""
        reduces = _listed(tensors)
        opts = _options(opts, _torch.AllreduceCoalescedOptions)
        return self._run(
            f"allreduce_coalesced {_operator(opts)}",
            reduces,
            lambda backend: backend.allreduce_coalesced(reduces, opts),
            kept=self._kept(reduces),
        )

    def broadcast(self, tensors: Any, opts: Any = None) -> Any:
        """Give every rank the root's tensor; torch's arguments."""
        given, opts = _listed(tensors), _options(opts, _torch.BroadcastOptions)
        return self._run(
            f"broadcast from {opts.rootRank}",
            given,
            lambda backend: backend.broadcast(given, opts),
        )

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        """Give every rank all ranks' tensors; torch's arguments."""
        opts = _options(opts, _torch.AllgatherOptions)
        start = lambda backend: backend.allgather(outputs, inputs, opts)  # noqa: E731
        return self._run("allgather", _flat(outputs), start, own=list(inputs), value=outputs)

    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        """Give every rank all ranks' tensors; torch's arguments."""
        opts = _options(opts, _torch.AllgatherOptions)
        return self._run(
            "allgather_coalesced",
            _flat(outputs),
            lambda backend: backend.allgather_coalesced(outputs, inputs, opts),
            own=list(inputs) * len(outputs),  # a row of each rank
            value=outputs,
        )

    def _allgather_base(self, output: Any, own: Any, opts: Any = None) -> Any:
        return self.allgather_into_tensor_coalesced([output], [own], opts)

    all_gather_single: Any = _allgather_base

    def allgather_into_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        """Give every rank all ranks' tensors; torch's arguments."""
        opts = _options(opts, _torch.AllgatherOptions)
        pairs = [*zip(outputs, inputs, strict=True)]
        return self._run(
            "allgather_into_tensor",
            list(outputs),
            lambda backend: _one(backend._allgather_base(*pair, opts) for pair in pairs),
            own=list(inputs),
        )

    all_gather_single_coalesced: Any = allgather_into_tensor_coalesced

    def barrier(self, opts: Any = None) -> Any:
        """Wait for every rank; torch's arguments."""
        opts = _options(opts, _torch.BarrierOptions)
        return self._run("barrier", [], lambda backend: backend.barrier(opts))

    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """Wait for every rank; torch's arguments.

        Raises:
            RuntimeError: not all came in time; which did not is not known here.
        """
        if (backend := self._of_another_thread()) is not None:
            backend.monitored_barrier(timeout, wait_all_ranks)
            return
        work = self.barrier()
        end = math.inf if timeout is None else time.monotonic() + timeout.total_seconds()
        while timeout is not None and not work.is_completed():
            if time.monotonic() > end:
                raise RuntimeError(f"monitored_barrier: not all ranks came within {timeout}")
            time.sleep(0.001)
        work.wait()

    # ---- results that differ by rank ---------------------------------------------------------

    def reduce(self, tensors: Any, opts: Any = None) -> Any:
        """Reduce onto one rank; torch's arguments."""
        reduces, opts = _listed(tensors), _options(opts, _torch.ReduceOptions)
        return self._alone("reduce", reduces, lambda b: b.reduce(reduces, opts), spoils=reduces)

    def gather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        """Give one rank all ranks' tensors; torch's arguments."""
        opts = _options(opts, _torch.GatherOptions)
        return self._alone("gather", _flat(outputs), lambda b: b.gather(outputs, inputs, opts))

    def gather_into_tensor(self, output: Any, own: Any, opts: Any = None) -> Any:
        """Give one rank all ranks' tensors as one; torch's arguments, from torch 2.15 on."""
        opts = _options(opts, _torch.GatherOptions)
        return self._alone("gather", [output], lambda b: b.gather_into_tensor(output, own, opts))

    gather_single: Any = gather_into_tensor

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        """Give each rank a tensor of one rank's; torch's arguments."""
        opts = _options(opts, _torch.ScatterOptions)
        return self._alone("scatter", list(outputs), lambda b: b.scatter(outputs, inputs, opts))

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        """Reduce, and give each rank a part; torch's arguments."""
        opts, spoils = _options(opts, _torch.ReduceScatterOptions), _flat(inputs)
        return self._alone(
            "reduce_scatter",
            list(outputs),
            lambda b: b.reduce_scatter(outputs, inputs, opts),
            spoils=spoils,
        )

    def _reduce_scatter_base(self, output: Any, own: Any, opts: Any = None) -> Any:
        return self.reduce_scatter_tensor_coalesced([output], [own], opts)

    reduce_scatter_single: Any = _reduce_scatter_base

    def reduce_scatter_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        """Reduce, and give each rank a part; torch's arguments."""
        opts = _options(opts, _torch.ReduceScatterOptions)
        pairs = [*zip(outputs, inputs, strict=True)]
        return self._alone(
            "reduce_scatter_tensor",
            list(outputs),
            lambda b: _one(b._reduce_scatter_base(*pair, opts) for pair in pairs),
            spoils=list(inputs),
        )

    reduce_scatter_single_coalesced: Any = reduce_scatter_tensor_coalesced

    def alltoall_base(self, output: Any, own: Any, *more: Any) -> Any:
        """Give each rank a part of each rank's tensor; torch's arguments."""
        if len(more) < 3:
            more = (*more, _torch.AllToAllOptions())
        return self._alone("alltoall", [output], lambda b: b.alltoall_base(output, own, *more))

    all_to_all_single: Any = alltoall_base

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        """Give each rank a tensor of each rank's; torch's arguments."""
        opts = _options(opts, _torch.AllToAllOptions)
        return self._alone("alltoall", list(outputs), lambda b: b.alltoall(outputs, inputs, opts))

    # ---- transfers between two ranks ---------------------------------------------------------

    def send(self, tensors: Any, peer: int, tag: int = 0) -> Any:
        """Send to one rank; torch's arguments."""
        return self._between_two("send").send(tensors, peer, tag)

    def recv(self, tensors: Any, peer: int, tag: int = 0) -> Any:
        """Receive from one rank; torch's arguments."""
        return self._between_two("recv").recv(tensors, peer, tag)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> Any:
        """Receive from any rank; torch's arguments."""
        return self._between_two("recv").recv_anysource(tensors, tag)

    # ---- inside ------------------------------------------------------------------------------

    def _between_two(self, kind: str) -> Any:
        own = self._of_another_thread()
        return self._communicator.between_two(kind) if own is None else own

    def _kept(self, tensors: Sequence[torch.Tensor]) -> KeptInput:
        return self._inputs.keep(tensors) if self._communicator.recovers else NOT_KEPT

    def _run(
        self,
        kind: str,
        results: list[torch.Tensor],
        start: Callable[[Any], Any],
        *,
        kept: KeptInput = UNSPOILED,
        own: Sequence[torch.Tensor] = (),
        value: Any = None,
        shared: bool = True,
    ) -> Any:
        form = Description(kind, described(results), shared, _site(), self._maker())
        given = results if value is None else value
        return self._work(form, results, start, kept=kept, own=own, value=given)

    def _maker(self) -> str:
        return "" if self._communicator.recovers else _maker()

    def _work(
        self,
        form: Description,
        results: list[torch.Tensor],
        start: Callable[[Any], Any],
        **named: Any,
    ) -> Any:
        if (backend := self._of_another_thread()) is not None:
            return start(backend)
        return CollectiveWork(
            self._communicator, self._communicator.run(form, results, start, **named)
        )

    def _of_another_thread(self) -> Any:
        """Return gloo's own group if another thread than the training's calls; else None.

        Every rank makes a call on the same thread. A callback of a collective's future is of that.
        """
        if self._apart is None or threading.get_ident() == self._thread or completes():
            return None
        if self._own is None:
            self._own = self._apart()
        return self._own

    def _alone(
        self,
        kind: str,
        results: list[torch.Tensor],
        start: Callable[[Any], Any],
        spoils: Sequence[torch.Tensor] = (),
    ) -> Any:
        # Forms of such collectives differ by rank, too: only their kind is compared.
        kept = self._kept(spoils) if spoils else UNSPOILED
        form = Description(kind, (), shared=False, site=_site(), maker=self._maker())
        return self._work(form, results, start, kept=kept, value=results)


def _listed(tensors: Any) -> list[torch.Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def _flat(rows: Any) -> list[torch.Tensor]:
    return [each for row in rows for each in row]


def _sparse(tensors: Sequence[torch.Tensor]) -> str:
    return SPARSE if any(each.layout != torch.strided for each in tensors) else ""


def _options(opts: Any, kind: Any) -> Any:
    """Return torch's options; some callers give an operator, a root or nothing in their place."""
    if isinstance(opts, kind):
        return opts
    made = kind()
    if opts is None:
        return made
    name = "rootRank" if isinstance(opts, int) else "reduceOp"
    if not hasattr(made, name):
        raise CoordinationError(f"{kind.__name__} takes no {opts!r}")
    setattr(made, name, opts)
    return made


def _operator(opts: Any) -> str:
    op = opts.reduceOp
    if op == _SUM:  # the usual one; naming it takes longer than the rest of a collective
        return "SUM"
    return str(getattr(op, "op", op)).rpartition(".")[2]


_SUM: Any = dist.ReduceOp.SUM

# Dynamo would trace them when torch's C++ calls them inside of a compiled forward.
for _name in (
    "allreduce",
    "allreduce_coalesced",
    "broadcast",
    "allgather",
    "_allgather_base",
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
    "barrier",
    "reduce",
    "gather",
    "gather_into_tensor",
    "scatter",
    "reduce_scatter",
    "_reduce_scatter_base",
    "reduce_scatter_tensor_coalesced",
    "alltoall_base",
    "alltoall",
):
    setattr(Group, _name, untraced(vars(Group)[_name]))
