"""Jobs of `lightck run`: survivors stay, the lost are replaced, and the end is golden."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch

import lightck
from lightck.failure.fault_plan import Fault
from support.inplace import jobs

STEPS, LONG = 9, 18
AT = 5
MANY = ("--max-restarts=9",)


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> jobs.Golden:
    """The undisturbed jobs."""
    return jobs.Golden(tmp_path_factory.mktemp("golden"))


# ---- fault x phase -------------------------------------------------------------------------------

PHASES = ("forward", "backward", "allreduce", "fence", "commit", "update", "between")


@pytest.mark.parametrize("policy", ("policy=1000", "policy=1"))
@pytest.mark.parametrize("rank", (0, -1))
@pytest.mark.parametrize("kind", ("kill", "exception"))
@pytest.mark.parametrize("world", (2, 3, 4))
def test_a_rank_that_is_lost_in_any_phase_is_replaced_and_no_other(
    tmp_path: Path, golden: jobs.Golden, world: int, kind: str, rank: int, policy: str
) -> None:
    """Seven times in one job; steps lie between two faults, so that each meets a settled job."""
    faults = [Fault(kind, 3 + 2 * at, phase, rank % world) for at, phase in enumerate(PHASES)]
    job = jobs.run(tmp_path, world, LONG, policy, faults=faults, more=MANY)
    jobs.assert_in_place(job, golden.of(world, LONG, policy))


SEQUENCES = {
    "two ranks in one step": [Fault("exception", 5, "backward", 1), Fault("kill", 5, "fence", 2)],
    "every phase, another rank each time": [
        Fault("kill", 3 + 2 * at, phase, at % 3) for at, phase in enumerate(PHASES)
    ],
    "twice in a row, the same rank": [
        Fault("kill", 5, "backward", 1),
        Fault("kill", 6, "fence", 1),
    ],
    "twice in a row, another rank": [Fault("kill", 5, "backward", 1), Fault("kill", 6, "fence", 2)],
    "the same rank again in its first step": [
        Fault("kill", 5, "backward", 1),
        Fault("kill", 5, "allreduce", 1),
    ],
    "two ranks at one moment": [Fault("kill", 5, "allreduce", 1), Fault("kill", 5, "allreduce", 2)],
    "all but one at one moment": [
        Fault("kill", 5, "forward", 0),
        Fault("kill", 5, "forward", 2),
    ],
    "the replacement in its restore": [
        Fault("kill", 5, "backward", 1),
        Fault("kill", 4, "restore", 1),
    ],
    "a survivor in its save": [Fault("kill", 5, "backward", 1), Fault("kill", 4, "save", 2)],
}


@pytest.mark.parametrize("name", SEQUENCES)
def test_ranks_are_lost_one_after_the_other_and_only_they_are_replaced(
    tmp_path: Path, golden: jobs.Golden, name: str
) -> None:
    faults = SEQUENCES[name]
    steps = LONG if len(faults) > 2 else STEPS
    job = jobs.run(tmp_path, 3, steps, faults=faults, more=MANY)
    jobs.assert_golden(job, golden.of(3, steps))
    jobs.assert_fired(job)
    assert not job.refusals(), jobs.told(job)
    for rank in {0, 1, 2} - {fault.rank for fault in faults}:
        assert len(job.pids(rank)) == 1, jobs.told(job)


@pytest.mark.parametrize("phase", ("update", "backward", "fence"))
def test_a_rank_that_is_lost_in_the_last_step_is_replaced(
    tmp_path: Path, golden: jobs.Golden, phase: str
) -> None:
    job = jobs.run(tmp_path, 2, STEPS, faults=[Fault("kill", STEPS, phase, 1)])
    # Behind its commit the others are at their close, and have said what they have counted.
    counted = 0 if phase == "update" else None
    jobs.assert_in_place(job, golden.of(2, STEPS), counted)


def test_a_rank_that_stands_is_ended_for_the_others_and_replaced(
    tmp_path: Path, golden: jobs.Golden
) -> None:
    options = ("hang",)
    faults = [Fault("stop", 6, "backward", 1)]
    job = jobs.run(tmp_path, 2, STEPS, *options, faults=faults, hold_s=3600)
    jobs.assert_in_place(job, golden.of(2, STEPS, *options))


@pytest.mark.parametrize("rank", (0, 1))
def test_a_rank_that_is_lost_in_an_evaluation_is_replaced(
    tmp_path: Path, golden: jobs.Golden, rank: int
) -> None:
    options = ("eval", "policy=1")
    job = jobs.run(tmp_path, 2, STEPS, *options, faults=[Fault("kill", 6, "evaluation", rank)])
    assert_in_place_if_saved(job, golden.of(2, STEPS, *options))


def assert_in_place_if_saved(job: jobs.Job, golden: jobs.Job) -> None:
    """Assert that all was in place, or that all were restarted since a snapshot had slipped.

    A rank that is lost behind an update needs the step before, which a busy machine may not have.
    """
    if job.refusals():
        jobs.assert_restarted(job, golden, "cannot restore step")
    else:
        jobs.assert_in_place(job, golden)


# ---- what the training does ----------------------------------------------------------------------

OPTIONS = (
    "wide",
    "views",
    "buffers",
    "metric policy=1",
    "top policy=1",
    "eval policy=1",
    "accumulate",
    "clip",
    "objects policy=1",
    "scaler",
    "wide views buffers clip accumulate",
    "top objects metric buffers policy=1",
    "helper policy=1",
)


@pytest.mark.parametrize("given", OPTIONS)
def test_a_rank_is_replaced_whatever_the_training_does(
    tmp_path: Path, golden: jobs.Golden, given: str
) -> None:
    options = given.split()
    places = ((4, "backward"), (6, "between"), (8, "commit"))
    faults = [Fault("kill", step, phase, 1) for step, phase in places]
    job = jobs.run(tmp_path, 2, STEPS, *options, faults=faults, more=MANY)
    check = assert_in_place_if_saved if "policy=1" in options else jobs.assert_in_place
    check(job, golden.of(2, STEPS, *options))


def test_a_replacement_s_modules_have_read_its_own_rank(
    tmp_path: Path, golden: jobs.Golden, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though the spare that takes its place has imported them before there was one."""
    (tmp_path / "path").mkdir()
    module = "import os\nRANK = int(os.getenv('RANK', 0))\n"
    (tmp_path / "path/ranked.py").write_text(module)
    known = os.environ.get("PYTHONPATH", "")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "path"), known]))
    faults = [Fault("kill", AT, "backward", 1)]
    job = jobs.run(tmp_path, 2, STEPS, "ranked", faults=faults, more=["--preload=ranked"])
    jobs.assert_in_place(job, golden.of(2, STEPS))
    assert job.log.count("lightck: spare_not_used") == 1, jobs.told(job)


# ---- connections that break ----------------------------------------------------------------------


@pytest.mark.parametrize("given", ("", "wide", "wide views"))
@pytest.mark.parametrize("rank", (0, 2))
def test_connections_are_cut_and_nothing_is_replaced_or_lost(
    tmp_path: Path, golden: jobs.Golden, rank: int, given: str
) -> None:
    options = given.split()
    job = jobs.run(tmp_path, 3, STEPS, f"cut={AT}:{rank}", *options)
    jobs.assert_in_place(job, golden.of(3, STEPS, *options), recoveries=1)


# ---- where all are restarted ---------------------------------------------------------------------

REFUSALS: dict[str, tuple[Sequence[str], Sequence[Fault], str]] = {
    "the first step": ((), [Fault("kill", 1, "backward", 1)], "step(s) are complete"),
    "the second step": ((), [Fault("kill", 2, "backward", 1)], "step(s) are complete"),
    "left": (("leaves",), [], "has left the training"),
    "gather": (("gather",), [Fault("kill", AT, "backward", 1)], "results differ by rank"),
    "spoiled": (
        ("spoil",),
        [Fault("kill", AT, "backward", 1)],
        "was changed before every rank had it",
    ),
    "spoiled out of sight": (
        ("hidden",),
        [Fault("kill", AT, "backward", 1)],
        "was changed before every rank had it",
    ),
    "transfers": (
        ("send",),
        [Fault("kill", AT, "backward", 1)],
        "makes transfers between two ranks",
    ),
    "many": (("many",), [Fault("kill", AT, "backward", 1)], "its set-up makes a broadcast from 0"),
    "metric": (("metric",), [Fault("kill", AT, "between", 1)], "cannot restore step 4"),
    "objects": (("objects",), [Fault("kill", AT, "between", 1)], "cannot restore step 4"),
    "own state": (
        ("draws",),
        [Fault("kill", AT, "between", 1)],
        "its own state at the forward of step 5 is not known",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_cannot_be_recovered_in_place_restarts_all_ranks_with_its_reason(
    tmp_path: Path, golden: jobs.Golden, name: str
) -> None:
    options, faults, why = REFUSALS[name]
    job = jobs.run(tmp_path, 2, STEPS, *options, faults=faults)
    jobs.assert_restarted(job, golden.of(2, STEPS, *options), why)


def test_sparse_gradients_are_reduced_again_and_never_given(
    tmp_path: Path, golden: jobs.Golden
) -> None:
    faults = [Fault("kill", 4, "backward", 1), Fault("kill", 7, "fence", 1)]
    job = jobs.run(tmp_path, 2, STEPS, "sparse", faults=faults)
    assert job.events("recovered"), jobs.told(job)
    jobs.assert_restarted(job, golden.of(2, STEPS, "sparse"), "is sparse")


@pytest.mark.parametrize("given", ("off=failure policy=1", "off=keep"))
def test_where_recovery_in_place_is_off_all_ranks_are_restarted(
    tmp_path: Path, golden: jobs.Golden, given: str
) -> None:
    options = given.split()
    job = jobs.run(tmp_path, 2, STEPS, *options, faults=[Fault("kill", AT, "backward", 1)])
    jobs.assert_fired(job)
    assert job.events("in_place_off"), jobs.told(job)
    assert all(len(job.pids(rank)) > 1 for rank in range(2)), jobs.told(job)
    jobs.assert_golden(job, golden.of(2, STEPS, *options))


def test_all_ranks_that_are_lost_at_once_are_restarted(tmp_path: Path, golden: jobs.Golden) -> None:
    job = jobs.run(tmp_path, 2, STEPS, "policy=1", faults=[Fault("kill", AT, "forward", None)])
    assert all(len(job.pids(rank)) > 1 for rank in range(2)), jobs.told(job)
    jobs.assert_golden(job, golden.of(2, STEPS, "policy=1"))


def test_a_job_without_restarts_left_fails_and_goes_on_when_it_is_started_again(
    tmp_path: Path, golden: jobs.Golden
) -> None:
    faults = [Fault("kill", 4, "backward", 1), Fault("kill", 6, "backward", 0)]
    job = jobs.run(tmp_path, 2, STEPS, faults=faults, more=["--max-restarts=1"])
    assert job.status != 0, jobs.told(job)
    jobs.assert_fired(job)
    assert [len(job.pids(rank)) for rank in range(2)] == [1, 2], jobs.told(job)
    again = jobs.run(tmp_path, 2, STEPS, faults=faults, more=["--max-restarts=1"])
    jobs.assert_golden(again, golden.of(2, STEPS))


def test_a_rank_that_ends_early_with_status_0_is_not_waited_for(
    tmp_path: Path, golden: jobs.Golden
) -> None:
    job = jobs.run(tmp_path, 2, STEPS, f"early={AT}:1")
    jobs.assert_restarted(job, golden.of(2, STEPS), "ended with status 0")


# ---- two agents ----------------------------------------------------------------------------------


@contextmanager
def namespace() -> Iterator[int]:
    """A network namespace; the process that keeps it."""
    keeper = subprocess.Popen(
        ["unshare", "--net", "sh", "-c", "echo here; exec cat"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert keeper.stdin and keeper.stdout
    try:
        if keeper.stdout.readline() != "here\n":
            pytest.skip("no network namespace can be made: not root")
        yield keeper.pid
    finally:
        keeper.kill()
        keeper.wait()
        keeper.stdin.close()
        keeper.stdout.close()


@pytest.fixture
def nodes() -> Iterator[list[tuple[str, ...]]]:
    """For each of two joined network namespaces the words that run a command there."""
    if missing := [each for each in ("unshare", "nsenter", "ip") if shutil.which(each) is None]:
        pytest.skip(f"no network namespaces without {', '.join(missing)}")
    with ExitStack() as stack:
        pids = [stack.enter_context(namespace()) for _ in range(2)]
        enter = [("nsenter", "-t", str(pid), "--net") for pid in pids]
        peer = ("type", "veth", "peer", "name", "lck0", "netns", str(pids[1]))
        commands = [(*enter[0], "ip", "link", "add", "lck0", *peer)]
        for number, words in enumerate(enter, 1):
            address = f"10.0.0.{number}/24"
            commands.append((*words, "ip", "address", "add", address, "dev", "lck0"))
            commands.append((*words, "ip", "link", "set", "lo", "up"))
            commands.append((*words, "ip", "link", "set", "lck0", "up"))
        for command in commands:
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                pytest.skip(f"{' '.join(command)}: {done.stderr.strip()}")
        yield enter


@pytest.mark.parametrize("rank", (0, 3))
def test_a_rank_of_one_of_two_nodes_is_replaced_by_its_node_s_agent(
    tmp_path: Path, golden: jobs.Golden, nodes: list[tuple[str, ...]], rank: int
) -> None:
    """Rank 0's node serves the store, the other does not."""
    faults = [Fault("kill", AT, "backward", rank), Fault("kill", 7, "update", 3 - rank)]
    jobs.prepare(tmp_path, faults)
    launch = ["--nnodes=2", "--nproc-per-node=2", "--rdzv-backend=c10d", "--rdzv-id=7"]
    launch += ["--rdzv-endpoint=10.0.0.1:29500"]
    env = {**jobs.environment(tmp_path), "GLOO_SOCKET_IFNAME": "lck0"}
    with ExitStack() as stack:
        agents = []
        for number, words in enumerate(nodes):
            host = f"--rdzv-conf=is_host={1 - number}"  # torchrun would ask for the host's name
            own = [*launch, host, f"--local-addr=10.0.0.{number + 1}"]
            command = [*words, *jobs.command(tmp_path, 4, STEPS, [], own)]
            agents.append(stack.enter_context(jobs.started(command, tmp_path, f"{number}", env)))
        statuses = [each.wait(jobs.MOST_S) for each in agents]
    job = jobs.Job(tmp_path, 4, STEPS, faults, max(statuses, key=abs))
    jobs.assert_in_place(job, golden.of(4, STEPS))


# ---- what is not recovered in place passes through its group unharmed ----------------------------

OTHERS = Path(__file__).parents[1] / "support/inplace/others.py"
TORCHRUN = ["torch.distributed.run"]
LIGHTCK = ["lightck.cli", "run"]
OTHER_STEPS = 6


def ranks_of(kind: str) -> int:
    """Return the number of ranks of a training."""
    return 3 if kind == "groups" else 2


def trained(command: list[str], folder: Path, kind: str, *death: str) -> str:
    """Run all ranks to their end; return the log."""
    folder.mkdir()
    world = ranks_of(kind)
    done = subprocess.run(
        [sys.executable, "-m", *command, "--standalone", f"--nproc-per-node={world}",
         "--max-restarts=3", str(OTHERS), kind, str(folder), str(OTHER_STEPS), *death],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-5000:]
    return done.stdout


def said(folder: Path, rank: int, what: str) -> list[str]:
    """Return what a rank has said of something, in order; a repeated line counts once."""
    lines = (folder / f"{rank}.said").read_text().splitlines()
    return list(dict.fromkeys(line for line in lines if line.startswith(f"{what} ")))


@pytest.mark.timeout(500)
@pytest.mark.parametrize(
    "kind", ["fsdp", "objects", "compiled", "powersgd", "nested", "join", "threads"]
)
def test_a_training_gives_the_bits_that_it_gives_under_torchrun(tmp_path: Path, kind: str) -> None:
    trained(TORCHRUN, tmp_path / "torchrun", kind)
    trained(LIGHTCK, tmp_path / "lightck", kind)
    for rank in range(2):
        steps = said(tmp_path / "lightck", rank, "step")
        assert len(steps) == OTHER_STEPS + (kind == "threads")
        assert steps == said(tmp_path / "torchrun", rank, "step")


RESTARTS = {
    "groups": ("in_place_off", "a process group of rank(s) 0, 1"),
    "fsdp": ("in_place_off", "alike on all ranks"),
    "nested": ("in_place_off", "a callback of a collective's future"),
    "two": ("in_place_refused", "between the first update of step 5 and that step's end"),
    "between": ("in_place_off", "comes between restore and attach"),
    "unrestored": ("in_place_refused", "the script attaches what it has not restored"),
}


@pytest.mark.timeout(500)
@pytest.mark.parametrize("kind", RESTARTS)
def test_what_cannot_be_repeated_restarts_all_ranks_in_words_and_gives_the_same_bits(
    tmp_path: Path, kind: str
) -> None:
    trained(LIGHTCK, tmp_path / "plain", kind)
    log = trained(LIGHTCK, tmp_path / "killed", kind, "4")
    assert all(each in log for each in RESTARTS[kind]), log[-4000:]
    for rank in range(ranks_of(kind)):
        assert said(tmp_path / "killed", rank, "step") == said(tmp_path / "plain", rank, "step")
        assert len(said(tmp_path / "killed", rank, "pid")) >= 2


@pytest.mark.timeout(500)
def test_a_replacement_restores_of_another_run_what_the_first_life_did(tmp_path: Path) -> None:
    """The step of the job is there, too, in that run."""
    teacher = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(teacher.parameters(), lr=0.1)
    with lightck.attach(teacher, optimizer, tmp_path / "teacher", policy=1, slots=8) as handle:
        for _ in range(6):
            teacher(torch.ones(1, 8)).sum().backward()
            optimizer.step()
            handle.wait()
    trained(LIGHTCK, tmp_path / "plain", "teacher")
    log = trained(LIGHTCK, tmp_path / "killed", "teacher", "4")
    assert "lightck: recovered" in log and "in_place_refused" not in log, log[-4000:]
    for rank in range(2):
        assert said(tmp_path / "killed", rank, "step") == said(tmp_path / "plain", rank, "step")
    assert len(said(tmp_path / "killed", 0, "pid")) == 1
