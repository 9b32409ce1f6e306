"""The inputs and results of collectives are kept while a recovery may need it, and no longer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from lightck.distributed.ddp_buckets import in_use
from lightck.inplace import inputs
from lightck.inplace.communicator import Communicator
from lightck.inplace.group import Group
from lightck.inplace.inputs import BucketInput, CopiedInput, Inputs
from lightck.inplace.operations import Operation, Unspoiled, described
from lightck.inplace.plan import PROGRAM, TORCH, Description
from support.inplace.simulated import Switch


def kept(communicator: Communicator, values: int, count: int) -> int:
    """Make collectives; return how many are kept of them."""
    before = len(list(communicator.window))
    for _ in range(count):
        tensor = torch.ones(values)
        form = Description("allreduce SUM", described([tensor]))
        made = communicator.run(form, [tensor], lambda b, t=tensor: b.allreduce([t]))
        communicator.wait(made)
    return len(list(communicator.window)) - before


@pytest.fixture
def communicator() -> Iterator[Communicator]:
    """A rank that is alone."""
    communicator = Communicator(0, 1)
    communicator.resume(Switch(1, 0).open(0))
    yield communicator
    communicator.end("the test is over")


def test_of_a_set_up_small_results_are_kept_and_no_large_ones(communicator: Communicator) -> None:
    assert kept(communicator, 4, 3) == 3
    assert kept(communicator, 100_000, 3) == 0


def test_a_set_up_that_never_ends_keeps_a_bounded_number(communicator: Communicator) -> None:
    assert kept(communicator, 1, 600) <= 257


def test_while_ranks_recover_everything_is_kept(communicator: Communicator) -> None:
    communicator.keep(recovers=True)
    assert kept(communicator, 100_000, 3) == 3


def test_where_in_place_is_off_nothing_is_kept(communicator: Communicator) -> None:
    communicator.keep(recovers=False)
    assert kept(communicator, 100_000, 3) == kept(communicator, 1, 3) == 0


@pytest.mark.parametrize(("values", "count"), [(1 << 20, 100), (1, 5000)])
def test_of_a_long_evaluation_a_bounded_part_is_kept_and_two_steps_later_it_is_over(
    communicator: Communicator, values: int, count: int
) -> None:
    communicator.keep(recovers=True)
    window = communicator.window
    window.step_ended(3)
    kept(communicator, values, count)
    every = [*window]
    assert len(every) <= 4096
    assert sum(each.results[0].nbytes for each in every) <= 256 << 20
    assert window.overflown
    for step in (3, 4):
        window.forward_started(step)
        assert window.overflown
        window.step_ended(step + 1)
    assert not window.overflown


def test_nothing_that_may_have_to_be_made_again_is_given_up(communicator: Communicator) -> None:
    communicator.keep(recovers=True)
    communicator.interrupt()
    tensor = torch.ones(1)
    form = Description("allreduce SUM", described([tensor]))
    for _ in range(5000):
        communicator.run(form, [tensor], lambda b: b.allreduce([tensor]))
    assert len(communicator.window.unfinished()) == 5000


CHANGES: dict[str, Callable[[torch.Tensor], Any]] = {
    "by .data": lambda result: result.data.div_(2),
    "as gloo writes": lambda result: result.numpy().fill(7),
    "in sight": lambda result: result.div_(2),
}


@pytest.mark.parametrize("values", [4, 100_000])
@pytest.mark.parametrize("how", CHANGES)
def test_no_result_that_was_changed_is_given_whatever_its_version_counter_says(
    communicator: Communicator, how: str, values: int
) -> None:
    communicator.keep(recovers=True)
    assert kept(communicator, values, 1) == 1
    operation = next(iter(communicator.window))
    assert operation.is_intact
    CHANGES[how](operation.results[0])
    if operation.is_intact:
        assert operation.result()[0].eq(1).all()
    else:
        assert values > 4


def _hook(group, bucket):  # type: ignore[no-untyped-def] # DDP checks annotations
    """Reduce as DDP itself does."""
    work = group.allreduce([bucket.buffer()])
    return work.get_future().then(lambda future: future.value()[0])


@pytest.mark.parametrize("hook", [None, _hook])
def test_ddp_s_own_buckets_need_no_checksum_and_those_that_a_hook_has_do(
    monkeypatch: pytest.MonkeyPatch, hook: Any
) -> None:
    communicator = Communicator(0, 1)
    gloo: Any = dist.ProcessGroupGloo
    backend = gloo(dist.HashStore(), 0, 1, timedelta(seconds=30))
    link: Any = SimpleNamespace(backend=backend, cut=lambda: None)
    communicator.keep(recovers=True)
    communicator.resume(link)
    keeper = Inputs(1)
    group = Group(communicator, keeper)
    model = DistributedDataParallel(torch.nn.Linear(300, 300), process_group=group)
    if hook is not None:
        model.register_comm_hook(group, hook)

    def reduced() -> Operation:
        model(torch.ones(1, 300)).sum().backward()
        return [o for o in communicator.window if o.form.kind == "allreduce SUM"][-1]

    reduced(), reduced()
    known = in_use(model)  # they are rebuilt
    monkeypatch.setattr(inputs, "known_buckets", lambda _: known)
    keeper.models.append(model)
    second = reduced()
    assert isinstance(second.kept, BucketInput)
    assert (second._digest is None) == (hook is None)
    assert second.is_intact
    third = reduced()
    assert third.results[0].data_ptr() == second.results[0].data_ptr()
    assert not second.is_intact
    assert third.is_intact
    communicator.end("the test is over")


def test_inputs_of_any_length_are_copied_into_memory_that_is_used_again() -> None:
    keeper = Inputs(2)
    for count in (*range(20_000, 20_100), *range(20_100, 20_000, -1)):
        tensor = torch.full((count,), float(count))
        kept = keeper.keep([tensor])
        tensor.zero_()
        assert kept.put_back() and tensor.eq(count).all()
        kept.release()
    assert keeper.copied_bytes == 4 * 20_100
    pair = [keeper.keep([torch.full((count,), 1.0 * count)]) for count in (20_000, 20_050)]
    for kept, count in zip(pair, (20_000, 20_050), strict=True):
        assert isinstance(kept, CopiedInput) and kept.copies[0].eq(count).all()
        kept.release()
    assert keeper.copied_bytes == 4 * (20_100 + 20_050)


def test_what_libraries_and_programs_make_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    communicator, forms = Communicator(0, 1), list[Description]()
    gloo: Any = dist.ProcessGroupGloo
    link: Any = SimpleNamespace(
        backend=gloo(dist.HashStore(), 0, 1, timedelta(seconds=30)), cut=lambda: None
    )
    communicator.resume(link)
    run_before = communicator.run

    def run(form: Description, *given: Any, **named: Any) -> Operation:
        forms.append(form)
        return run_before(form, *given, **named)

    monkeypatch.setattr(communicator, "run", run)
    group = Group(communicator, Inputs(1))
    group.allreduce([torch.ones(2)]).wait()
    DistributedDataParallel(torch.nn.Linear(2, 2), process_group=group)
    assert len(forms) > 1 and [form.maker for form in forms] == [PROGRAM] + [TORCH] * (
        len(forms) - 1
    )
    communicator.end("the test is over")


def test_what_another_thread_does_with_a_group_goes_by_connections_of_its_own() -> None:
    communicator = Communicator(0, 1)
    gloo: Any = dist.ProcessGroupGloo
    made = [gloo(dist.HashStore(), 0, 1, timedelta(seconds=30)) for _ in range(2)]
    link: Any = SimpleNamespace(backend=made[0], cut=lambda: None)
    communicator.resume(link)
    asked: list[int] = []
    connected = lambda: asked.append(1) or made[1]  # noqa: E731
    group = Group(communicator, Inputs(1), connected, threading.get_ident())
    group.barrier().wait()  # as a program may look whether all are there
    with ThreadPoolExecutor(1) as other:
        for _ in range(2):
            other.submit(group.allreduce, [torch.ones(1)]).result().wait()
            group.allreduce([torch.ones(1)]).wait()
    assert asked == [1] and communicator.window.next == 3
    first = Group(communicator, Inputs(1))
    with ThreadPoolExecutor(1) as other:
        other.submit(first.allreduce, [torch.ones(1)]).result().wait()
    assert communicator.window.next == 4
    communicator.end("the test is over")


@pytest.mark.parametrize("made_inside", [False, True])
def test_what_is_reduced_in_inference_mode_is_copied_and_complete(made_inside: bool) -> None:
    communicator, keeper = Communicator(0, 1), Inputs(1)
    gloo: Any = dist.ProcessGroupGloo
    backend = gloo(dist.HashStore(), 0, 1, timedelta(seconds=30))
    link: Any = SimpleNamespace(backend=backend, cut=lambda: None)
    communicator.keep(recovers=True)
    communicator.resume(link)
    group = Group(communicator, keeper)
    outside = torch.ones(30_000)
    with torch.inference_mode():
        work = group.allreduce([torch.ones(30_000) if made_inside else outside])
        assert work.wait()
    assert [operation.is_intact for operation in communicator.window] == [True]
    assert group.allreduce([outside]).wait() and keeper.copied_bytes == 120_000
    communicator.end("the test is over")


@pytest.mark.parametrize("broken", [False, True])
def test_a_commit_counts_before_the_training_that_waits_for_it_goes_on(
    communicator: Communicator, broken: bool
) -> None:
    seen: list[int] = []
    communicator.keep(recovers=True)

    def train() -> None:
        communicator.commit(7)
        seen.append(communicator.window.committed)

    if broken:
        communicator.interrupt()
    training = threading.Thread(target=train)
    training.start()
    if broken:
        while not (waiting := communicator.window.unfinished()):
            time.sleep(0.001)
        waiting[0].future.add_done_callback(lambda _: seen.append(communicator.window.committed))
        communicator.resume(Switch(1, 0).open(1))
    training.join()
    assert {*seen} == {7}


class _Hidden(Unspoiled):
    """The input of a bucket that DDP alone has, until a hook gets it."""

    hidden = True

    def is_hidden(self) -> bool:
        return self.hidden


class _Keeper(dict[int, _Hidden]):
    """One input for each bucket, as `Inputs` has once it is proved."""

    def keep(self, tensors: Sequence[torch.Tensor]) -> _Hidden:
        return self.setdefault(id(tensors[0]), _Hidden())


def test_each_buckets_reduction_says_its_own_form_every_time_and_a_hooks_says_its_operator() -> (
    None
):
    communicator, keeper = Communicator(0, 2), _Keeper()  # without a link collectives wait
    communicator.keep(recovers=True)
    group = Group(communicator, keeper)
    buckets = torch.zeros(3), torch.zeros(5, dtype=torch.float64)
    for _ in range(2):
        for bucket in buckets:
            group.allreduce([bucket])
    keeper[id(buckets[1])].hidden = False  # a comm hook gets the bucket from now on
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.MAX
    group.allreduce([buckets[1]], options)
    forms = [each.form for each in communicator.window]
    said = [("SUM", *described([each])) for each in buckets] * 2
    said.append(("MAX", *described([buckets[1]])))
    assert [(f.kind.split()[1], *f.tensors) for f in forms] == said
