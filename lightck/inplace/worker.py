"""A worker of `lightck run`: the user's script, with process groups that recover in place.

    python -m lightck.inplace.worker [-m] SCRIPT [ARGUMENTS]

The only file that touches how torch.distributed makes its groups: one private function of it is
wrapped, so that a gloo group of all ranks is lightck's; with another group in place is off. Two
functions are wrapped to notice what a replacement could not do again: comm hooks with a state of
their own, and uneven inputs.
`tests/distributed/test_in_place_seams.py` fails by name where a new torch has others.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import logging
import os
import runpy
import sys
import threading
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from lightck.events import event
from lightck.inplace import runtime
from lightck.inplace.generations import RUN
from lightck.inplace.plan import MAX_NAMED

BACKEND = "lightck"
_c10d: Any = dist.distributed_c10d


def install() -> None:
    """Make gloo groups of all ranks lightck's, in this process. Idempotent."""
    made = _c10d._new_process_group_helper
    if getattr(made, "is_lightck", False):
        return
    dist.Backend.register_backend(BACKEND, runtime.make_group, devices=["cpu"])

    def helper(
        size: int, rank: int, ranks: Any, backend: Any, store: Any, *more: Any, **named: Any
    ) -> Any:
        if not ranks and RUN in os.environ:
            # Torchrun's store outlives a restart of all ranks: each start needs keys of its own.
            store = _c10d.PrefixStore(f"run/{os.environ[RUN]}", store)
        # In another order its ranks would have other numbers than the communicator's.
        every = not ranks or [*ranks] == [*range(_world_size(size, ranks))]
        if not (every and _is_gloo(str(backend))):
            if ranks and size > 1:
                runtime.turn_off(_why_off(ranks, str(backend)))
            elif not ranks and size > 1:
                why = f"the default process group is {backend}: only gloo recovers in place"
                event("in_place_off", logging.WARNING, why=why)
            return made(size, rank, ranks, backend, store, *more, **named)
        group, own = made(size, rank, ranks, dist.Backend(BACKEND), store, *more, **named)
        if isinstance(group, dist.ProcessGroup):
            _c10d._world.pg_map[group] = ("gloo", own)
        return group, own

    helper.is_lightck = True  # type: ignore[attr-defined]
    _c10d._new_process_group_helper = helper
    _watch_hooks()
    _watch_joins()


def _watch_hooks() -> None:
    """Turn in place off at a comm hook with a state of its own: a replacement has it anew."""
    of_ddp: Any = DistributedDataParallel
    made = of_ddp.register_comm_hook

    @functools.wraps(made)
    def register_comm_hook(self: Any, state: object, hook: Any) -> None:
        if state is not None and not isinstance(state, dist.ProcessGroup):
            name = getattr(hook, "__qualname__", type(hook).__name__)
            kind = type(state).__qualname__
            runtime.turn_off(
                f"the comm hook {name} has a state of its own ({kind}), and what that"
                " holds no replacement has"
            )
        made(self, state, hook)

    of_ddp.register_comm_hook = register_comm_hook


def _watch_joins() -> None:
    """Turn in place off where ranks may run out of inputs: who has makes none of lightck's commits.

    Those would be taken for the reductions by which the others say that they go on.
    """
    of_join: Any = Join
    made = of_join.__init__

    @functools.wraps(made)
    def init(self: Any, joinables: Any, enable: bool = True, *more: Any, **named: Any) -> None:
        if enable:
            why = "join(): a rank that has run out of inputs makes no updates with the others"
            runtime.turn_off(why, commits=False)
        made(self, joinables, enable, *more, **named)

    of_join.__init__ = init


def _why_off(ranks: Sequence[int], backend: str) -> str:
    named = ", ".join(map(str, ranks[:MAX_NAMED])) + (", ..." if len(ranks) > MAX_NAMED else "")
    return (
        f"a process group of rank(s) {named} ({backend}) beside that of all: who is replaced would"
        " make it anew, and the others would not"
    )


def _world_size(size: int, ranks: Any) -> int:
    return dist.get_world_size() if ranks and dist.is_initialized() else size


def _is_gloo(backend: str) -> bool:
    """Tell whether torch would take gloo for this."""
    if backend in ("gloo", "cpu:gloo"):
        return True
    return backend in ("undefined", "cpu:gloo,cuda:nccl") and not torch.cuda.is_available()


def main(arguments: Sequence[str]) -> None:
    """Run a script or module as torchrun would, with `install`ed groups."""
    install()
    as_module = arguments[0] == "-m"
    script, *rest = arguments[1:] if as_module else arguments
    sys.argv = [script, *rest]
    if as_module:
        sys.path[0] = os.getcwd()
        runpy.run_module(script, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = os.path.dirname(os.path.abspath(script))
        runpy.run_path(script, run_name="__main__")


def run(arguments: Sequence[str]) -> NoReturn:
    """Run a script as `main` does, and end the process as Python would, but for its destructors.

    Threads that come out of torch's C++ while the interpreter is taken down end the process by
    SIGABRT, and DDP's destructor may wait for one of gloo's threads for ever (torch 2.13). So there
    is no such time: what the script has registered runs, and the process is gone.
    """
    status = 0
    try:
        main(arguments)
    except KeyboardInterrupt:
        raise  # ends by the signal
    except SystemExit as left:
        status = left.code if isinstance(left.code, int) else int(left.code is not None)
        if status and not isinstance(left.code, int):
            print(left.code, file=sys.stderr)
    except BaseException:  # noqa: BLE001 - whatever a script raises
        status = 1
        sys.excepthook(*sys.exc_info())
    threading._shutdown()  # type: ignore[attr-defined] # threads that are no daemons end first
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or none
            stream.flush()
    ctypes.CDLL(None).fflush(None)  # what C code has printed
    os._exit(status & 0xFF)


if __name__ == "__main__":
    run(sys.argv[1:])
