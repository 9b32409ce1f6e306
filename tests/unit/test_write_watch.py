"""The write watch sees what a thread writes, and nothing that it only reads."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lightck.pipeline.write_watch import WriteWatch

Use = Callable[[torch.Tensor], object]

WRITES: dict[str, Use] = {
    "in place": lambda t: t.add_(1),
    "data": lambda t: t.data.clamp_(0, 1),
    "an item": lambda t: t.__setitem__(0, 1.0),
    "a view": lambda t: t.view(-1)[3:5].zero_(),
    "a transposed view": lambda t: t.t().mul_(2),
    "an index": lambda t: t.index_fill_(0, torch.tensor([1]), 2.0),
    "a mask": lambda t: t.masked_fill_(t > 0, 0.0),
    "a copy": lambda t: t.copy_(torch.ones_like(t)),
    "an output": lambda t: torch.add(t, 1, out=t),
    "a list": lambda t: torch._foreach_mul_([torch.ones(2), t], 2.0),
    "a lerp": lambda t: t.lerp_(torch.ones_like(t), 0.5),
    "an initialization": lambda t: torch.nn.init.zeros_(t),
    "random numbers": lambda t: t.normal_(),
    "an array": lambda t: t.numpy(),
    "an array by its protocol": lambda t: np.asarray(t),
    "DLPack": lambda t: torch.from_dlpack(t),
    "a resize": lambda t: t.resize_(4),
    "a function": lambda t: t.apply_(lambda x: -x),
    "a function of its data": lambda t: t.data.apply_(lambda x: -x),
    "a function of two": lambda t: t.map_(torch.ones_like(t), lambda x, y: x + y),
}
READS: dict[str, Use] = {
    "arithmetic": lambda t: t + 1,
    "a copy": lambda t: t.clone(),
    "a sum": lambda t: t.sum().item(),
    "a view": lambda t: t.view(-1)[2:],
    "a product": lambda t: t @ t,
    "a comparison": lambda t: torch.equal(t, t),
    "a list": lambda t: torch._foreach_mul([t], 2.0),
    "a copy of it": lambda t: torch.ones_like(t).copy_(t),
    "its numbers": lambda t: t.tolist(),
    "its text": repr,
}


@pytest.fixture
def watch() -> Iterator[WriteWatch]:
    watch = WriteWatch()
    assert watch.begin()
    yield watch
    watch.end()
    assert torch._C._len_torch_dispatch_stack() == 0


def marked(watch: WriteWatch, tensor: torch.Tensor, offset: int = 0) -> bool:
    pointers = np.array([tensor.data_ptr() + offset], np.uint64)
    return bool(watch.wrote_to(pointers, np.array([tensor.nbytes - offset], np.uint64))[0])


@pytest.mark.parametrize("how", WRITES)
def test_a_write_is_seen(watch: WriteWatch, how: str) -> None:
    tensor, other = torch.rand(4, 4), torch.rand(4, 4)
    WRITES[how](tensor)
    assert marked(watch, tensor) and not marked(watch, other)


@pytest.mark.parametrize("how", READS)
def test_a_read_is_no_write(watch: WriteWatch, how: str) -> None:
    tensor = torch.rand(4, 4)
    READS[how](tensor)
    assert not marked(watch, tensor)


def test_a_write_to_one_of_several_in_one_storage_counts_for_all(watch: WriteWatch) -> None:
    flat = torch.zeros(10)
    flat[:5].add_(1)
    assert marked(watch, flat[5:])


def test_another_library_s_operation_may_have_written_anything(watch: WriteWatch) -> None:
    with torch.library._scoped_library("lightck_test", "DEF") as library:
        library.define("touch(Tensor x) -> ()")
        library.impl("touch", lambda x: None, "CPU")
        torch.ops.lightck_test.touch(torch.rand(3))
    assert not watch.gapless


def test_behind_its_end_nothing_is_noted() -> None:
    watch, tensor = WriteWatch(), torch.rand(3)
    assert watch.begin()
    watch.end()
    tensor.add_(1)
    tensor.numpy()
    assert not marked(watch, tensor) and watch.gapless


def test_it_begins_below_no_mode_of_others() -> None:
    class Other(TorchDispatchMode):
        pass

    with Other():
        assert not WriteWatch().begin()


def test_another_thread_can_end_it_and_its_own_takes_it_off() -> None:
    watch, depth = WriteWatch(), torch._C._len_torch_dispatch_stack
    assert watch.begin()
    thread = threading.Thread(target=watch.end)
    thread.start()
    thread.join()
    assert depth() == 1
    watch.settle()
    assert depth() == 0


def test_a_forward_of_an_evaluation_leaves_a_gap() -> None:
    watch = WriteWatch()
    assert watch.begin()
    watch.interrupt()
    assert not watch.gapless
    assert watch.begin() and watch.gapless
    watch.end()


def test_what_an_operation_wrote_before_it_failed_is_seen(watch: WriteWatch) -> None:
    tensor = torch.ones(3)
    with pytest.raises(RuntimeError):
        torch._foreach_mul_([tensor, torch.ones(3, dtype=torch.int64)], 0.5)
    assert marked(watch, tensor)


def test_a_subclass_of_tensor_leaves_a_gap_and_goes_on(watch: WriteWatch) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a prototype
        masked = torch.masked.masked_tensor(torch.rand(3), torch.tensor([True, False, True]))
        masked.add(1)
    assert not watch.gapless


def test_a_higher_order_operator_leaves_a_gap_and_goes_on(watch: WriteWatch) -> None:
    found = torch.cond(torch.tensor(True), lambda x: x + 1, lambda x: x - 1, (torch.ones(2),))
    assert found.tolist() == [2.0, 2.0] and not watch.gapless


def test_compiled_code_ends_the_watch_and_stays_compiled() -> None:
    calls = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., object]:
        def run(*arguments: torch.Tensor) -> object:
            calls.append(torch._C._len_torch_dispatch_stack())
            return graph.forward(*arguments)

        return run

    watch, compiled = WriteWatch(), torch.compile(lambda x: x + 1, backend=backend)
    for number in range(3):
        assert watch.begin()
        compiled(torch.ones(2))
        assert not watch.gapless and calls == [0] * (number + 1)
        watch.end()


def test_it_does_not_begin_within_compiled_code() -> None:
    began = []

    @torch.compiler.disable
    def inner() -> None:
        began.append(WriteWatch().begin())

    def outer(x: torch.Tensor) -> torch.Tensor:
        inner()
        return x + 1

    torch.compile(outer, backend="eager")(torch.ones(2))
    assert began == [False]


def test_torch_s_methods_are_as_they_were_behind_it() -> None:
    before = {
        name: vars(torch.Tensor).get(name) for name in ("numpy", "__dlpack__", "apply_", "map_")
    }
    watch = WriteWatch()
    assert watch.begin() and "numpy" in vars(torch.Tensor)
    watch.end()
    assert {name: vars(torch.Tensor).get(name) for name in before} == before
