"""A device in this process: memory that only its streams touch, streams that are threads.

Work that is queued to a stream runs in order, on that stream's thread, as late as its delays make
it; events order streams. Memory that is let go of serves the next that asks for it, at once, and
the stream that computes fills it with garbage first, in its order, as a new owner would. The memory
cannot be read or written but by work of a stream: whoever else touches it dies of SIGSEGV.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from lightck.device import lookup
from lightck.errors import DeviceError

GARBAGE = 0xDD
_PATIENCE_S = 120.0
_DETACH_S = 30.0
_registered: dict[int, int] = {}
"""Address and length of what devices read and write by themselves: all of them, as CUDA's."""
_libc = ctypes.CDLL(None, use_errno=True)


class Event:
    """A place in a stream's order."""

    def __init__(self) -> None:
        self._there = threading.Event()
        self.error: BaseException | None = None

    def reach(self) -> None:
        self._there.set()

    def query(self) -> bool:
        self._raise()
        return self._there.is_set()

    def synchronize(self) -> None:
        assert self._there.wait(_PATIENCE_S), "an event that never comes"
        self._raise()

    def _raise(self) -> None:
        if self.error is not None:
            raise DeviceError(f"emulated: {self.error}")


class Stream:
    """A thread that does what is queued, in order."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._work: deque[Callable[[], None] | None] = deque()
        self._more = threading.Condition()
        self._thread = threading.Thread(target=self._run, name=f"emulated-{name}", daemon=True)
        self._thread.start()
        self.failure: BaseException | None = None

    def queue(self, work: Callable[[], None] | None) -> None:
        with self._more:
            self._work.append(work)
            self._more.notify()

    def record(self) -> Event:
        event = Event()
        event.error = self.failure
        self.queue(event.reach)
        return event

    def follow(self, event: Event) -> None:
        self.queue(event.synchronize)

    def finish(self) -> None:
        self.record().synchronize()

    def _run(self) -> None:
        while True:
            with self._more:
                while not self._work:
                    self._more.wait()
                work = self._work.popleft()
            if work is None:
                return
            try:
                work()
            except BaseException as error:  # noqa: BLE001 - told when somebody asks
                self.failure = error


class _Block(ctypes.Structure):
    """A tensor's storage holds on to this."""

    owner: EmulatedDevice
    place: tuple[int, int]

    def __del__(self) -> None:
        self.owner.give_back(*self.place)


class _Reserved:
    """Memory that serves the next that asks for it when this is let go of, as it is."""

    def __init__(self, owner: EmulatedDevice, room: int) -> None:
        self.owner, self.place = owner, (room, owner.taken(room))

    def __del__(self) -> None:
        room, at = self.place
        self.owner._free.setdefault(room, []).insert(0, at)


class EmulatedDevice:
    """See `lightck.device.base.Device`."""

    def __init__(self, name: str = "emulated:0", memory_bytes: int = 64 << 20) -> None:
        self.name = name
        self.compute, self.copying = Stream(f"{name}-compute"), Stream(f"{name}-copy")
        self.copy_s = 0.0
        """Each copy takes this long at least."""
        self.spare_bytes = 0
        self.short = False
        """The training has grown into its copy."""
        self.refuses = ""
        """Memory cannot be registered for this reason; empty: it can."""
        self.most_pieces = 1 << 30
        self.most_bytes = 1 << 31
        """A call takes fewer bytes than this of one tensor."""
        self.registered = _registered
        self.said: list[str] = []
        self.in_graph = False
        self.broken = ""
        """Every call fails for this reason; empty: none does."""
        self.hangs = False
        """Whoever asks a driver for something would not come back."""
        self._memory = mmap.mmap(-1, memory_bytes)
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._size, self._used = memory_bytes, 0
        self._free: dict[int, list[int]] = {}
        self._touching = threading.RLock()
        self._depth = 0
        self._here = threading.local()
        self._protect(mmap.PROT_READ * 0)

    # ---- memory ----------------------------------------------------------------------------

    def _protect(self, how: int) -> None:
        assert _libc.mprotect(ctypes.c_void_p(self._base), self._size, how) == 0, "mprotect"

    @contextmanager
    def touching(self) -> Iterator[None]:
        """Open the memory, for work of streams alone."""
        with self._touching:
            self._depth += 1
            if self._depth == 1:
                self._protect(mmap.PROT_READ | mmap.PROT_WRITE)
            try:
                yield
            finally:
                self._depth -= 1
                if self._depth == 0:
                    self._protect(0)

    def holds(self, tensor: torch.Tensor) -> bool:
        return self._base <= tensor.untyped_storage().data_ptr() < self._base + self._size

    def empty(
        self, shape: Sequence[int], dtype: torch.dtype = torch.float32, strides: Any = None
    ) -> torch.Tensor:
        """Device memory with whatever it holds."""
        count = 1
        for each in shape:
            count *= each
        size = max(1, count * dtype.itemsize)
        room = _rounded(size)
        at = self.taken(room)
        kind = type("Block", (_Block,), {"_fields_": [("bytes", ctypes.c_char * size)]})
        block = kind.from_address(self._base + at)
        block.owner, block.place = self, (at, room)
        flat = torch.frombuffer(block, dtype=dtype, count=count)
        return flat.as_strided(tuple(shape), tuple(strides or _row_major(shape)))

    def taken(self, room: int) -> int:
        """Memory that is nobody's."""
        with self._touching:
            if self._free.get(room):
                return self._free[room].pop(0)
            self._asked()
            at, self._used = self._used, self._used + room
            assert self._used <= self._size, "the emulated device is full"
            return at

    def _asked(self) -> None:
        assert not self.hangs, "a driver is asked for something, and the device hangs"

    def give_back(self, at: int, room: int) -> None:
        """Give memory to the next that asks, which writes there in the computing stream's order."""

        def garbage() -> None:
            with self.touching():
                ctypes.memset(self._base + at, GARBAGE, room)

        self.current.queue(garbage)
        self._free.setdefault(room, []).append(at)

    # ---- work ------------------------------------------------------------------------------

    @property
    def current(self) -> Stream:
        """The calling thread's stream."""
        return getattr(self._here, "stream", self.compute)

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        """The calling thread computes on another stream."""
        before, self._here.stream = self.current, stream
        try:
            yield
        finally:
            self._here.stream = before

    def run(self, work: Callable[[], None], seconds: float = 0.0) -> None:
        """Queue work that touches device memory to the calling thread's stream."""

        def late() -> None:
            time.sleep(seconds)
            with self.touching():
                work()

        self.current.queue(late)

    def overwrite(self, tensor: torch.Tensor, content: torch.Tensor, seconds: float = 0.0) -> None:
        """Queue a write that the tensor's version counter does not see."""
        there, size = tensor.data_ptr(), content.nbytes
        self.run(lambda: ctypes.memmove(there, content.data_ptr(), size) and None, seconds)

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return what a tensor holds once everything queued here has run."""
        found: list[torch.Tensor] = []
        self.run(lambda: found.append(tensor.detach().clone()))
        self.current.finish()
        return found[0]

    # ---- the protocol ----------------------------------------------------------------------

    def _check(self) -> None:
        if self.broken:
            raise DeviceError(f"{self.name}: {self.broken}")

    def stream(self) -> Stream:
        return self.current

    def record_event(self, stream: Any = None) -> Event:
        self._check()
        self.said.append("record_event")
        return (stream or self.current).record()

    @contextmanager
    def side_stream(self, event: Any) -> Iterator[None]:
        self.said.append("side_stream")
        fresh = Stream(f"{self.name}-apart")
        fresh.follow(event)
        with self.on(fresh):
            yield
        fresh.queue(None)

    def make_stream_wait(self, event: Any) -> None:
        self.said.append("make_stream_wait")
        self.current.follow(event)

    def copy_stream_wait(self, event: Any) -> None:
        self.said.append("copy_stream_wait")
        self.copying.follow(event)

    def copy(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> Event:
        self._check()
        if threading.current_thread().name.startswith("lightck-"):
            assert getattr(self._here, "entered", False), "it would end others' recordings"
        pairs = [(t, s.detach()) for t, s in zip(targets, sources, strict=True)]
        for target, source in pairs:
            assert target.dtype is source.dtype is torch.uint8
            assert target.numel() == source.numel() < self.most_bytes
            host = source if self.holds(target) else target
            assert self.holds(target) or self.holds(source), "a copy beside the device"
            assert self.holds(host) or self._reaches(host), "pageable memory: the copy would block"
        # The queue keeps no memory alive, as a device's does not: places are all that it has.
        places = [(t.data_ptr(), s.data_ptr(), t.numel()) for t, s in pairs]

        def move() -> None:
            for target, source, size in places:
                half = size // 2
                for begin, end in ((0, half), (half, size)):
                    time.sleep(self.copy_s / 2)
                    with self.touching():
                        ctypes.memmove(target + begin, source + begin, end - begin)

        self.copying.queue(move)
        return self.copying.record()

    def private(
        self, source: torch.Tensor, shape: Sequence[int], strides: Sequence[int]
    ) -> torch.Tensor:
        made = self.empty(shape, source.dtype, strides)
        held = made.detach()

        def work() -> None:
            held.copy_(source.detach())

        self.run(work)
        return made

    def fetch(self, target: torch.Tensor, source: torch.Tensor) -> Event:
        self._check()
        assert not source.requires_grad, "the copy would be part of the graph"
        assert self._reaches(target), "pageable memory: the copy would block"
        assert (target.dtype, target.shape) == (source.dtype, source.shape)
        there, at, size = source.data_ptr(), target.data_ptr(), source.nbytes
        self.run(lambda: ctypes.memmove(at, there, size) and None)
        return self.record_event()

    def allocate_spare(self, size: int) -> torch.Tensor | None:
        return self.empty((size,), torch.uint8) if size <= self.spare_bytes else None

    def is_low_on_memory(self) -> bool:
        return self.short

    def reserve(self, sizes: Sequence[int]) -> list[Any]:
        self.said.append("reserve")
        return [_Reserved(self, _rounded(size)) for size in sizes]

    def pinned(self, size: int) -> torch.Tensor:
        self._asked()
        made = torch.full((size,), GARBAGE, dtype=torch.uint8)
        self.registered[made.data_ptr()] = size
        return made

    def register(self, address: int, length: int) -> str:
        self._asked()
        self.said.append("register")
        if self.said.count("register") > self.most_pieces:
            return "too many pieces"
        if not self.refuses:
            self.registered[address] = length
        return self.refuses

    def unregister(self, address: int) -> None:
        self.registered.pop(address, None)  # of a handle that outlives its test: cleared already

    def preload(self) -> None:
        self._asked()
        self.said.append("preload")

    def enter_thread(self) -> None:
        self._here.entered = True

    def recording(self) -> bool:
        return self.in_graph

    def _reaches(self, tensor: torch.Tensor) -> bool:
        begin, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        return any(at <= begin and end <= at + size for at, size in self.registered.items())

    def close(self) -> None:
        for stream in (self.compute, self.copying):
            stream.finish()
            stream.queue(None)
            assert stream.failure is None, stream.failure


def _rounded(size: int) -> int:
    return (size + 255) // 256 * 256


def _row_major(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(1, size)
    return tuple(reversed(strides))


attached: list[Any] = []
"""Handles that must not outlive their devices: later trainings would be told to them."""


def _let_go() -> None:
    """Detach what a failed test has left; a device that hangs keeps nobody from going on."""
    for handle in attached:
        thread = threading.Thread(target=handle.detach, daemon=True)
        thread.start()
        thread.join(_DETACH_S)
    attached.clear()


@contextmanager
def devices(*made: EmulatedDevice) -> Iterator[None]:
    """Their memory is known to lightck inside."""

    def find(tensor: torch.Tensor) -> Any:
        return next((device for device in made if device.holds(tensor)), None)

    lookup.finders.append(find)
    try:
        yield
    finally:
        _let_go()
        lookup.finders.remove(find)
        _registered.clear()
        for device in made:
            device.close()
