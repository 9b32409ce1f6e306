"""Implement `base.Device` for CUDA devices, through torch and a few calls of the driver."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, cached_property
from threading import Thread
from typing import Any

import torch

from lightck.device import base
from lightck.errors import DeviceError, LightckError

MARGIN = 16
"""The device's memory divided by this is left free beside the training's peak."""
_PORTABLE = 1
"""cudaHostRegisterPortable: register for every device, not for the current one alone."""
_PRELOAD_BYTES = 64
_MORE = 3
"""Number of further streams, for saves while earlier ones wait for what hangs."""
_RELAXED = 2
"""CU_STREAM_CAPTURE_MODE_RELAXED."""
_NON_BLOCKING = 1
"""CU_STREAM_NON_BLOCKING: the stream runs beside the default stream, not in turns with it."""
_LOWEST = 0
"""Lowest priority of a stream; higher ones are negative."""
_devices: dict[int, Cuda] = {}


@contextmanager
def _told(name: str, doing: str) -> Iterator[None]:
    """Raise the device's error as one of lightck's; a failed device fails every later call, too."""
    try:
        yield
    except RuntimeError as error:  # torch.AcceleratorError is one
        said = str(error).partition("\n")[0]
        if "out of memory" in said:  # it may have room again
            raise LightckError(f"{name} had no memory while {doing}: {error}") from error
        if "captur" in said:  # a graph is being recorded, and will be done
            raise LightckError(f"{name} recorded a graph while {doing}: {error}") from error
        raise DeviceError(f"{name} failed while {doing}: {error}") from error


class _Event:
    """CUDA event in a stream. Waiting for it sleeps, and takes no CPU from the training."""

    def __init__(self, name: str, stream: torch.cuda.Stream) -> None:
        """Record the event at the end of the stream's queue."""
        self.name, self.stream, self.event = name, stream, torch.cuda.Event(blocking=True)
        self.event.record(stream)

    def query(self) -> bool:
        """See `base.DeviceEvent`."""
        with _told(self.name, "a copy was under way"), torch.cuda.device(self.stream.device):
            return bool(self.event.query())

    def synchronize(self) -> None:
        """See `base.DeviceEvent`."""
        with _told(self.name, "a copy was under way"), torch.cuda.device(self.stream.device):
            self.event.synchronize()


class Cuda:
    """One CUDA device; see `base.Device`."""

    def __init__(self, index: int) -> None:
        """Name the device; nothing is asked of it yet."""
        self.index, self.name = index, f"cuda:{index}"

    @cached_property
    def _copying(self) -> torch.cuda.Stream:
        return self._made_stream()

    @cached_property
    def _saving(self) -> torch.cuda.Stream:
        """Stream for threads in `side_stream`."""
        return self._made_stream()

    @cached_property
    def _more_saving(self) -> list[torch.cuda.Stream]:
        """Streams for threads in `side_stream` that come while earlier ones wait."""
        return [self._made_stream() for _ in range(_MORE)]

    def _made_stream(self) -> torch.cuda.Stream:
        """Make a stream that nobody else has; without the driver's call it is one of torch's.

        torch deals out 32 in turns, and any of them may hang.
        """
        made = ctypes.c_void_p()
        with _told(self.name, "a stream was made"):
            torch.cuda.mem_get_info(self.index)  # so that this thread has the device's context
            with torch.cuda.device(self.index):
                make = _driver("cuStreamCreateWithPriority")
                if make is None or make(ctypes.byref(made), _NON_BLOCKING, _LOWEST) != 0:
                    return torch.cuda.Stream(self.index, priority=_LOWEST)
            return torch.cuda.ExternalStream(made.value, device=self.index)

    @contextmanager
    def _on(self, stream: torch.cuda.Stream) -> Iterator[None]:
        """Make the calling thread queue to this stream, inside the block.

        The device is made current first: else torch would go back to a stream of the thread's on
        another, mostly device 0, and initialize that device for this process.
        """
        with torch.cuda.device(self.index), torch.cuda.stream(stream):
            yield

    def stream(self) -> torch.cuda.Stream:
        """See `base.Device`."""
        return torch.cuda.current_stream(self.index)

    def record_event(self, stream: Any = None) -> base.DeviceEvent:
        """See `base.Device`."""
        with _told(self.name, "an event was recorded"):
            return _Event(self.name, stream or self.stream())

    @contextmanager
    def side_stream(self, event: Any) -> Iterator[None]:
        """See `base.Device`."""
        with _told(self.name, "a stream was made"):
            # Behind what an earlier save waits for, a later one would wait, too.
            ours = (self._saving, *self._more_saving)
            mine = next((each for each in ours if each.query()), ours[-1])
            mine.wait_event(event.event)
        with self._on(mine):
            yield

    def make_stream_wait(self, event: Any) -> None:
        """See `base.Device`."""
        with _told(self.name, "the next update was made to wait"):
            self.stream().wait_event(event.event)

    def copy_stream_wait(self, event: Any) -> None:
        """See `base.Device`."""
        with _told(self.name, "the copies were made to wait"):
            self._copying.wait_event(event.event)

    def copy(
        self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]
    ) -> base.DeviceEvent:
        """See `base.Device`. One call queues all copies, without the GIL."""
        with _told(self.name, "copies were queued"), self._on(self._copying):
            torch._foreach_copy_(list(targets), list(sources), non_blocking=True)
            return _Event(self.name, self._copying)

    def fetch(self, target: torch.Tensor, source: torch.Tensor) -> base.DeviceEvent:
        """See `base.Device`."""
        with _told(self.name, "a copy was queued"):
            target.copy_(source, non_blocking=True)
        return self.record_event()

    def empty(
        self, shape: Sequence[int], dtype: torch.dtype, strides: Sequence[int]
    ) -> torch.Tensor:
        """See `base.Device`."""
        where = f"cuda:{self.index}"
        with _told(self.name, "memory was asked for"):
            return torch.empty_strided(tuple(shape), tuple(strides), dtype=dtype, device=where)

    def private(
        self, source: torch.Tensor, shape: Sequence[int], strides: Sequence[int]
    ) -> torch.Tensor:
        """See `base.Device`."""
        with _told(self.name, "a tensor was copied"):
            return self.empty(shape, source.dtype, strides).copy_(source)

    def allocate_spare(self, size: int) -> torch.Tensor | None:
        """See `base.Device`. Memory that training once had, and gave back, counts as its own."""
        with _told(self.name, "memory was asked for"):
            if size > self._left():
                return None
            try:
                return self._room(self._copying, size)
            except torch.cuda.OutOfMemoryError:
                return None

    def is_low_on_memory(self) -> bool:
        """See `base.Device`."""
        with _told(self.name, "memory was asked for"):
            return self._left() < 0

    def _left(self) -> int:
        """Return the bytes that are left beside the training's peak and the margin."""
        free, total = torch.cuda.mem_get_info(self.index)
        reserved = torch.cuda.memory_reserved(self.index)
        regrown = torch.cuda.max_memory_reserved(self.index) - reserved
        return free - regrown - total // MARGIN

    def reserve(self, sizes: Sequence[int]) -> list[torch.Tensor]:
        """See `base.Device`. torch keeps memory that was freed for the stream that had it."""
        with _told(self.name, "memory was asked for"):
            return [self._room(self._saving, size) for size in sizes]

    def _room(self, stream: torch.cuda.Stream, size: int) -> torch.Tensor:
        with self._on(stream):
            return torch.empty(size, dtype=torch.uint8, device=f"cuda:{self.index}")

    def pinned(self, size: int) -> torch.Tensor:
        """See `base.Device`."""
        with _told(self.name, "DRAM was pinned"):
            return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)

    def register(self, address: int, length: int) -> str:
        """See `base.Device`."""
        runtime = torch.cuda.cudart()
        return self._on_own_thread(lambda: runtime.cudaHostRegister(address, length, _PORTABLE))

    def unregister(self, address: int) -> None:
        """See `base.Device`. The result is of no use: the mapping is removed next."""
        runtime = torch.cuda.cudart()
        self._on_own_thread(lambda: runtime.cudaHostUnregister(address))

    def preload(self) -> None:
        """See `base.Device`. It copies memory that nobody has written, whatever is in it."""
        place = self.pinned(_PRELOAD_BYTES)
        with _told(self.name, "memory was asked for"), self._on(self._copying):
            where = f"cuda:{self.index}"
            one, other = torch.empty(2, _PRELOAD_BYTES, dtype=torch.uint8, device=where)
        self.copy([other, other[:1]], [one, one[:1]])
        self.copy([place], [other]).synchronize()
        for each in (self._saving, *self._more_saving):
            self.record_event(each)

    def enter_thread(self) -> None:
        """See `base.Device`. Querying an event, say, would end recordings in the global mode."""
        _relax()

    def recording(self) -> bool:
        """See `base.Device`."""
        try:
            if torch.cuda.current_device() == self.index:
                return torch.cuda.is_current_stream_capturing()
            with torch.cuda.device(self.index):  # else torch asks, and initializes, another
                return torch.cuda.is_current_stream_capturing()
        except RuntimeError:
            return False  # it has failed: the next call that needs it says so

    def _on_own_thread(self, call: Callable[[], Any]) -> str:
        """Call the runtime on a thread of its own; return the error, empty if there is none.

        The runtime keeps an error of such a call for the thread that made it, and torch finds it
        after the next kernel that this thread starts. It is gone when the thread ends.
        """
        said: list[str] = []

        def work() -> None:
            try:
                self.enter_thread()
                with torch.cuda.device(self.index):
                    said.append(_error_of(call()))
            except Exception as error:  # noqa: BLE001 - whatever it is, it means no
                said.append(repr(error))

        thread = Thread(target=work, name="lightck-register")
        thread.start()
        thread.join()
        return said[0] if said else "the thread that registers memory ended"


@cache
def _driver(name: str) -> Any:
    try:
        return getattr(ctypes.CDLL("libcuda.so.1"), name)
    except (OSError, AttributeError):  # no driver of NVIDIA's
        return None


def _relax() -> None:
    exchange = _driver("cuThreadExchangeStreamCaptureMode")
    if exchange is not None:
        exchange(ctypes.byref(ctypes.c_int(_RELAXED)))  # the mode before is of no use


def _error_of(code: Any) -> str:
    value = int(code)
    return "" if value == 0 else f"{torch.cuda.CudaError(value)}"


def of(tensor: torch.Tensor) -> Cuda | None:
    """Return the tensor's CUDA device; None: it is on none."""
    if not tensor.is_cuda:
        return None
    index = tensor.device.index
    if index not in _devices:
        _devices[index] = Cuda(index)
    return _devices[index]
