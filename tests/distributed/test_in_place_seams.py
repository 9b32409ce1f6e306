"""Parts of torch that recovery in place relies on: a torch without one fails here, by name."""

from __future__ import annotations

import inspect
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.launcher.api as launcher
import torch.distributed.run as torchrun
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.elastic.agent.server.api import SimpleElasticAgent, WorkerGroup
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, start_processes
from torch.distributed.elastic.multiprocessing.api import SubprocessContext
from torch.nn.parallel import DistributedDataParallel

from lightck.cli import run
from lightck.cli.output import Refusal
from lightck.cli.run import SHARED_STORE
from lightck.errors import CoordinationError
from lightck.inplace import runtime, worker
from lightck.inplace.agent import Agent, ReplacingContext, WorkerProcess
from lightck.inplace.communicator import Communicator
from lightck.inplace.generations import RUN
from lightck.inplace.group import Group
from lightck.inplace.inputs import Inputs
from lightck.inplace.operations import FailedCollective
from support.distributed import ranks

c10d: Any = dist.distributed_c10d


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Give back the signal handlers that torch elastic replaces when it starts processes."""
    every = signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT
    kept = {each: signal.getsignal(each) for each in every}
    yield
    for each, handler in kept.items():
        signal.signal(each, handler)


def parameters(of: Callable[..., Any]) -> list[str]:
    """The names of a function's parameters."""
    return [*inspect.signature(of).parameters]


# ---- agent.py: torch elastic ---------------------------------------------------------------------


def test_the_launcher_makes_its_agent_of_the_class_that_it_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class MadeError(Exception):
        pass

    def made(*_: Any, **named: Any) -> None:
        raise MadeError(sorted(named))

    monkeypatch.setattr(launcher, "LocalElasticAgent", made)
    config = launcher.LaunchConfig(
        1, 1, 1, run_id="seam", rdzv_backend="static", rdzv_endpoint="127.0.0.1:29400"
    )
    config.rdzv_configs["rank"] = 0
    with pytest.raises(MadeError):
        launcher.launch_agent(config, "true", [])


def test_the_agent_starts_its_workers_by_the_function_that_is_overridden() -> None:
    assert parameters(LocalElasticAgent._start_workers) == ["self", "worker_group"]
    assert "self._start_workers(worker_group)" in inspect.getsource(
        SimpleElasticAgent._initialize_workers
    )
    assert "_shutdown" in vars(LocalElasticAgent), "_shutdown"
    for name in ("_start_workers", "_shutdown"):
        assert name in vars(Agent), f"agent.py no longer overrides {name}"


def test_the_agent_has_the_attributes_that_a_replacement_goes_by() -> None:
    source = inspect.getsource(SimpleElasticAgent.__init__)
    for name in ("_worker_group", "_remaining_restarts"):
        assert f"self.{name} = " in source, name
    assert "self._pcontext" in inspect.getsource(LocalElasticAgent.__init__)
    group = inspect.getsource(WorkerGroup.__init__)
    for name in ("workers", "master_addr", "master_port"):
        assert f"self.{name}" in group, name
    fields = inspect.getsource(torch.distributed.elastic.agent.server.api.Worker.__init__)
    for name in ("global_rank", "id"):
        assert f"self.{name}" in fields, name
    # The agent compares these with its processes at each look.
    assert "worker_pids != pc_pids" in inspect.getsource(LocalElasticAgent._monitor_workers)


def test_the_context_of_processes_polls_each_one_as_it_is_at_its_look(tmp_path: Path) -> None:
    looks: list[int] = []

    class Asked(SubprocessContext):  # type: ignore[misc]
        def _poll(self) -> Any:
            looks.append(1)
            return super()._poll()

    class Process(subprocess.Popen):  # type: ignore[type-arg]
        def poll(self) -> int | None:
            return super().poll() and 7

    started: Any = start_processes(
        "seam", "false", {0: ("x",)}, {0: {"A": "b"}}, DefaultLogsSpecs(str(tmp_path))
    )
    assert type(started) is SubprocessContext
    started.__class__ = Asked
    try:
        assert started.args[0] == ("x",)
        assert started.envs[0]["A"] == "b"
        handler = started.subprocess_handlers[0]
        assert hasattr(handler, "_stdout")
        assert hasattr(handler, "_stderr")
        assert type(handler.proc) is subprocess.Popen
        assert handler.proc.wait(60) == 1
        handler.proc.__class__ = Process
        result = started.wait(0)
    finally:
        started.close()
    assert looks
    assert result is not None
    assert result.failures[0].exitcode == 7
    assert parameters(SubprocessContext._close)[:2] == ["self", "death_sig"]
    for name in ("_poll", "_close"):
        assert name in vars(ReplacingContext), f"agent.py no longer overrides {name}"


@pytest.mark.parametrize("version", ["2.6.0+cu124", "2.12.1"])
def test_an_older_torch_is_refused_before_anything_starts(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    with pytest.raises(Refusal, match="use torchrun"):
        run.main(["--standalone", "x.py"])


def test_torchrun_has_the_functions_and_options_that_lightck_run_takes_over() -> None:
    found = torchrun.get_args_parser().parse_args(["--standalone", "x.py", "--own"])
    for name in ("max_restarts", "monitor_interval", "training_script", "training_script_args"):
        assert hasattr(found, name), name
    for name in ("module", "no_python", "run_path", "start_method"):
        assert hasattr(found, name), name
    assert (found.training_script, found.training_script_args) == ("x.py", ["--own"])
    assert parameters(torchrun.run) == ["args"]
    static = torch.distributed.elastic.rendezvous
    sources = [Path(each).read_text() for each in Path(static.__path__[0]).glob("*.py")]
    assert any(SHARED_STORE in each for each in sources), SHARED_STORE


# ---- worker.py and group.py: torch.distributed ---------------------------------------------------


def test_groups_are_made_by_the_function_that_is_wrapped() -> None:
    first = ["group_size", "group_rank", "global_ranks_in_group", "backend", "store"]
    assert parameters(c10d._new_process_group_helper)[:5] == first

    def train(me: ranks.Me) -> list[Any]:
        made, seen = c10d._new_process_group_helper, []

        def helper(size: int, rank: int, which: Any, backend: Any, *more: Any, **named: Any) -> Any:
            group, store = made(size, rank, which, backend, *more, **named)
            told = c10d._world.pg_map[group]
            seen.append((size, rank, which, str(backend), isinstance(group, dist.ProcessGroup)))
            assert told[0] == "gloo", told
            return group, store

        c10d._new_process_group_helper = helper
        store = dist.HashStore()
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        dist.new_group([0])
        dist.destroy_process_group()
        return seen

    with ranks.started(1, train, initialized=False) as job:
        (seen,) = job.results()
    assert seen == [(1, 0, [], "gloo", True), (1, 0, [0], "gloo", True)]


def test_install_wraps_that_function_once() -> None:
    def train(_: ranks.Me) -> tuple[bool, bool]:
        plain = c10d._new_process_group_helper
        worker.install()
        wrapped = c10d._new_process_group_helper
        worker.install()
        return wrapped is not plain, c10d._new_process_group_helper is wrapped

    with ranks.started(1, train, initialized=False) as job:
        assert job.results() == [(True, True)]


@pytest.mark.parametrize(
    ("given", "off"),
    [([0, 1], True), ([0, 2], True), ([3, 2, 1, 0], True), ([0], False), ([0, 1, 2, 3], True)],
)
def test_a_group_that_is_not_lightck_s_turns_in_place_off(given: list[int], off: bool) -> None:
    """One rank alone lacks nobody; here a group of all in order is of another back end."""

    def train(_: ranks.Me) -> list[str]:
        worker.install()
        told: list[str] = []
        runtime.turn_off = told.append
        store, named = dist.HashStore(), {"timeout": timedelta(seconds=30)}
        dist.init_process_group("fake", store=store, rank=0, world_size=4)
        place = given.index(0)
        c10d._new_process_group_helper(len(given), place, given, "fake", store, "seam", **named)
        return told

    with ranks.started(1, train, initialized=False) as job:
        (told,) = job.results()
    named = ", ".join(map(str, given))
    assert [f"a process group of rank(s) {named} (fake)" in each for each in told] == [True] * off


@pytest.mark.parametrize(
    ("state", "off"), [(None, False), (dist.ProcessGroup, False), (object(), True)]
)
def test_a_comm_hook_with_a_state_of_its_own_turns_in_place_off(state: Any, off: bool) -> None:
    def train(_: ranks.Me) -> list[str]:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        worker.install()
        told: list[str] = []
        runtime.turn_off = told.append
        model = DistributedDataParallel(torch.nn.Linear(2, 1))
        given = dist.group.WORLD if state is dist.ProcessGroup else state
        model.register_comm_hook(given, noop_hook)
        dist.destroy_process_group()
        return told

    assert parameters(DistributedDataParallel.register_comm_hook) == ["self", "state", "hook"]
    with ranks.started(1, train, initialized=False) as job:
        (told,) = job.results()
    assert bool(told) == off
    assert all("noop_hook has a state of its own" in each for each in told)


@pytest.mark.parametrize("enable", [True, False])
def test_a_join_of_uneven_inputs_turns_in_place_and_its_commits_off(enable: bool) -> None:
    def train(_: ranks.Me) -> list[Any]:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        worker.install()
        told: list[Any] = []
        runtime.turn_off = lambda why, commits: told.append((why, commits))
        model = DistributedDataParallel(torch.nn.Linear(2, 1))
        with model.join(enable=enable):
            assert len(told) == enable
        dist.destroy_process_group()
        return told

    assert parameters(Join.__init__)[:3] == ["self", "joinables", "enable"]
    with ranks.started(1, train, initialized=False) as job:
        (told,) = job.results()
    assert [("join()" in why, commits) for why, commits in told] == [(True, False)] * enable


PASSED_ON = (
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
    "scatter",
    "reduce_scatter",
    "_reduce_scatter_base",
    "reduce_scatter_tensor_coalesced",
    "alltoall_base",
    "alltoall",
    "send",
    "recv",
    "recv_anysource",
)


NOT_OF_GLOO = ("allgather_into_tensor_coalesced", "reduce_scatter_tensor_coalesced")
"""Torch's Python has these for groups only: the group makes several collectives of gloo's."""


@pytest.mark.parametrize("name", PASSED_ON)
def test_gloo_has_the_collective_and_the_group_overrides_torch_s(name: str) -> None:
    assert hasattr(dist.ProcessGroup, name), name
    if name not in NOT_OF_GLOO:
        assert hasattr(dist.ProcessGroupGloo, name), name
    assert name in vars(Group), name


def test_no_collective_of_torch_s_group_is_missing_in_lightck_s() -> None:
    """A new collective of torch's would go to a back end that the group does not have."""
    kinds = ("reduce", "gather", "broadcast", "scatter", "barrier", "send", "recv", "alltoall")
    of_torch = {
        name
        for name in dir(dist.ProcessGroup)
        if not name.startswith("__") and any(kind in name for kind in (*kinds, "all_to_all"))
    }
    assert of_torch <= {*vars(Group)}


def test_a_future_that_has_failed_gives_torch_s_code_no_tensors() -> None:
    """DDP takes a bucket's tensors out of its future's value as this function does."""
    with pytest.raises(CoordinationError, match="all ranks have to be restarted"):
        torch._jit_internal._extract_tensors(FailedCollective("all ranks have to be restarted"))


@pytest.mark.parametrize(
    ("name", "attribute"),
    [
        ("AllreduceOptions", "reduceOp"),
        ("AllreduceCoalescedOptions", "reduceOp"),
        ("BroadcastOptions", "rootRank"),
        ("BroadcastOptions", "rootTensor"),
        ("ReduceOptions", "rootRank"),
        ("ReduceOptions", "reduceOp"),
        ("GatherOptions", "rootRank"),
        ("ScatterOptions", "rootRank"),
        ("ReduceScatterOptions", "reduceOp"),
        ("AllgatherOptions", "asyncOp"),
        ("AllToAllOptions", "timeout"),
        ("BarrierOptions", "device_ids"),
    ],
)
def test_options_of_collectives_have_the_attributes_that_the_group_sets(
    name: str, attribute: str
) -> None:
    made = getattr(torch._C._distributed_c10d, name)()
    assert hasattr(made, attribute), f"{name}.{attribute}"


# ---- what agent.py does with it ------------------------------------------------------------------


def test_a_worker_that_ends_while_another_is_replaced_is_replaced_as_well(tmp_path: Path) -> None:
    """Torch's look goes from one to the next: who ends meanwhile is asked about as well."""
    standing = ("-c", "exec sleep 1000")
    started: Any = start_processes(
        "seam",
        "sh",
        {0: standing, 1: ("-c", "exit 3")},
        {0: {}, 1: {}},
        DefaultLogsSpecs(str(tmp_path)),
    )
    replaced: list[tuple[int, int]] = []

    def watch(process: Any, local_rank: int) -> WorkerProcess:
        return WorkerProcess.watched(process, started.agent, local_rank)

    class Replacer:
        closing = False

        def end_standing(self) -> None:
            """No rank stands."""

        def replace(self, local_rank: int, code: int) -> bool:
            if self.closing:
                return False
            replaced.append((local_rank, code))
            handler = started.subprocess_handlers[local_rank]
            process = subprocess.Popen(["sh", *standing], start_new_session=True)
            handler.proc = watch(process, local_rank)
            if local_rank == 1:
                other = started.subprocess_handlers[0].proc
                other.kill()
                other.wait()
            return True

    started.__class__ = ReplacingContext
    started.agent = Replacer()
    for local_rank, handler in started.subprocess_handlers.items():
        watch(handler.proc, local_rank)
    try:
        started.subprocess_handlers[1].proc.wait(60)
        assert started.wait(0) is None
        assert started.wait(0) is None
        assert replaced == [(1, 3), (0, -9)]
    finally:
        started.close()


def test_each_start_of_all_ranks_has_keys_of_its_own_in_a_store_that_outlives_it() -> None:
    """Torchrun's store has the keys of the start before: lightck's rounds would find them."""

    def train(_: ranks.Me) -> list[bool]:
        found = []
        store, made = dist.HashStore(), c10d._new_process_group_helper
        worker.install()
        for start in ("1", "2"):
            os.environ[RUN] = start
            # A back end that needs no connections; keys are those of any other.
            dist.init_process_group("fake", store=store, rank=0, world_size=2)
            own = c10d._get_default_store()
            found.append(own.check(["round"]))
            own.set("round", "1")
            dist.destroy_process_group()
        c10d._new_process_group_helper = made
        return found

    with ranks.started(1, train, initialized=False) as job:
        assert job.results() == [[False, False]]


def test_coalesced_collectives_give_what_one_for_each_tensor_gives() -> None:
    store = dist.HashStore()
    found: dict[int, list[torch.Tensor]] = {}

    def run(rank: int) -> None:
        gloo: Any = dist.ProcessGroupGloo
        communicator = Communicator(rank, 2)
        communicator.resume(_Link(gloo(store, rank, 2, timedelta(seconds=30))))
        group = Group(communicator, Inputs(2))
        own = [torch.full((2,), 1.0 + rank), torch.full((4,), 3.0 + rank)]
        gathered = [torch.empty(4), torch.empty(8)]
        group.allgather_into_tensor_coalesced(gathered, own).wait()
        parts = [torch.empty(1), torch.empty(2)]
        group.reduce_scatter_tensor_coalesced(parts, own).wait()
        found[rank] = [*gathered, *parts]
        communicator.end("the test is over")

    threads = [threading.Thread(target=run, args=[rank]) for rank in range(2)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    for rank in range(2):
        first, second, one, two = found[rank]
        assert first.tolist() == [1, 1, 2, 2]
        assert second.tolist() == [3, 3, 3, 3, 4, 4, 4, 4]
        assert (one.tolist(), two.tolist()) == ([3], [7, 7])


@dataclass
class _Link:
    """The connections of one rank in a test of one process."""

    backend: Any

    def cut(self) -> None:
        """Nobody cuts them."""


ENDS = {
    "end": ("", 0, "", ""),
    "exception": ("raise ValueError('wrong')", 1, "", "ValueError: wrong"),
    "status": ("raise SystemExit(3)", 3, "", ""),
    "text": ("raise SystemExit('a reason')", 1, "", "a reason"),
    "none": ("raise SystemExit", 0, "", ""),
    "ctrl-c": ("raise KeyboardInterrupt", -signal.SIGINT, "", "KeyboardInterrupt"),
    "atexit": ("import atexit; atexit.register(print, 'left')", 0, "left", ""),
    "thread": (
        "import threading, time\n"
        "threading.Thread(target=lambda: (time.sleep(0.3), print('done'))).start()",
        0,
        "done",
        "",
    ),
    "output of C": ("import ctypes; ctypes.CDLL(None).puts(b'printed')", 0, "printed", ""),
    "output": ("print('x' * 100000, end='')", 0, "x" * 100000, ""),
}


@pytest.mark.parametrize("name", ENDS)
def test_a_worker_ends_as_python_does_though_nothing_is_destroyed(
    name: str, tmp_path: Path
) -> None:
    code, status, out, err = ENDS[name]
    script = tmp_path / "script.py"
    script.write_text(
        "class Never:\n    def __del__(self): print('destroyed')\n"
        f"never = Never()\nnever.itself = never\n{code}\n"
    )
    command = [sys.executable, "-m", "lightck.inplace.worker", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == status, done.stderr
    assert done.stdout.strip() == out + ("destroyed" if name == "ctrl-c" else "")
    assert err in done.stderr
