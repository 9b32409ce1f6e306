"""Tiny training runs, their stores traced: `python -m support.traced FOLDER MUTANT GRANULARITY...`.

Loads the trace build (`make build/native/lightck-trace.so`) through LIGHTCK_NATIVE and writes to
FOLDER/GRANULARITY the trace, as `crash --replay` reads it, and the state after every step. MUTANT
is 0, or a mistake in the commit order (native/src/mutant.h).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from cffi import FFI
from torch import nn

import lightck
from lightck.region._ffi import library_path

STEPS = 6
MARK, STARTED, ACKED, SEGMENTS = 10, 1, 2, 5
"""LCK_TRACE_MARK of native/src/trace.h; MARK_* of native/crash/crash.h."""

_ffi: Any = FFI()
_ffi.cdef(
    "typedef struct { void *events; unsigned char *bytes;"
    "  uint64_t event_count, byte_count, event_room, byte_room; } lck_trace_log;"
    "void lck_trace_start(lck_trace_log *log); void lck_trace_stop(void);"
    "void lck_trace_force(int granularity); extern int lck_mutant;"
    "void lck_trace(int op, void *region, uint64_t offset, uint64_t length);"
)
EVENT_BYTES = 32

State = tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model and optimizer of the run, the same at every call."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(7, 11), nn.BatchNorm1d(11), nn.ReLU(), nn.Linear(11, 3))
    return model, torch.optim.Adam(model.parameters(), lr=0.01)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, before_update: Any) -> None:
    """One step on random data; `before_update()` runs when the snapshot before it is open."""
    optimizer.zero_grad()
    model(torch.randn(5, 7)).square().mean().backward()
    before_update()
    optimizer.step()


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    """Copies of every tensor of the model and of the optimizer, by name."""
    moments = {
        f"{index}/{name}": value.clone()
        for index, slots in optimizer.state_dict()["state"].items()
        for name, value in slots.items()
    }
    return {name: value.clone() for name, value in model.state_dict().items()}, moments


def same(one: State, other: State) -> bool:
    """Say whether two states hold the same tensors, bit for bit."""
    return all(
        a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
        for a, b in zip(one, other, strict=True)
    )


def trace(folder: Path, granularity: int) -> None:
    """Train, and write down what was stored and what the states were."""
    folder.mkdir()
    native: Any = _ffi.dlopen(library_path())
    log = _ffi.new("lck_trace_log *")

    def mark(which: int, value: int) -> None:
        native.lck_trace(MARK, _ffi.NULL, which, value)

    native.lck_trace_force(granularity)
    model, optimizer = build()
    states: dict[int, State] = {}
    native.lck_trace_start(log)
    handle = lightck.attach(model, optimizer, folder / "run")
    mark(SEGMENTS, 1 << 32 | 1)
    for step in range(1, STEPS + 1):

        def before_update(opened: int = step - 1) -> None:
            if opened and opened % 3:  # every third is left to the background
                handle.wait()
            if handle.last_committed_step:
                mark(ACKED, handle.last_committed_step)
                mark(STARTED, opened)

        mark(STARTED, step - 1)
        train_step(model, optimizer, before_update)
        states[step] = state_of(model, optimizer)
    mark(STARTED, STEPS)
    handle.close()
    mark(ACKED, STEPS)
    native.lck_trace_stop()
    with (folder / "trace").open("wb") as out:
        out.write(log.event_count.to_bytes(8, "little") + log.byte_count.to_bytes(8, "little"))
        out.write(_ffi.buffer(log.events, log.event_count * EVENT_BYTES))
        out.write(_ffi.buffer(log.bytes, log.byte_count))
    torch.save(states, folder / "states")


if __name__ == "__main__":
    _ffi.dlopen(library_path()).lck_mutant = int(sys.argv[2])
    for argument in sys.argv[3:]:
        trace(Path(sys.argv[1]) / argument, int(argument))
