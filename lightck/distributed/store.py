"""The job's key-value store as the ranks' protocols use it, and its implementation over torch's."""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from operator import methodcaller
from typing import Any, Protocol, TypeVar

import torch.distributed as dist

from lightck.errors import CoordinationError, StoreError

_ABSENT = "?"  # the result of a read for a missing key; no value that lightck stores starts with it
_BATCH = 512  # keys in one multi_get: a reply of some 100 KB

T = TypeVar("T")


class KeyValueStore(Protocol):
    """The key-value store that the protocols need; every call may raise `StoreError`.

    A call that raised may or may not have had its effect: only `read`, `claim`, `set` and `delete`
    can simply be repeated; `add` cannot.
    """

    def read(self, key: str) -> bytes | None:
        """Return the value now; None if there is no such key. Does not wait for it."""
        ...

    def read_many(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of keys that are known to exist."""
        ...

    def set(self, key: str, value: bytes) -> None:
        """Set the key to the value."""
        ...

    def claim(self, key: str, value: bytes) -> bytes:
        """Set the key unless it has a value; return the value in force.

        Write-once by convention.
        """
        ...

    def add(self, key: str, amount: int = 1) -> int:
        """Add to the key; return the sum, which starts from 0 and stays below 2^63."""
        ...

    def wait(self, key: str, seconds: float) -> bool:
        """Wait until the key exists; False after `seconds`. Blocks this client's other callers."""
        ...

    def delete(self, keys: Iterable[str]) -> None:
        """Delete keys that no rank will touch again."""
        ...

    def clone(self) -> KeyValueStore:
        """Open another connection to the same store, whose waits block no other caller."""
        ...

    def below(self, part: str) -> KeyValueStore:
        """Open another connection, whose keys have one more part in front."""
        ...


class JobStore:
    """The default store of torch.distributed, or any torch store, under one prefix of ours.

    It has its own connection: a blocking wait in a shared client would block its other callers,
    among them torch's own. A connection that failed is replaced at the next call, since torch's
    client never reconnects by itself.

    Threads: one at a time. Every call blocks on the network; a server that hangs without closing
    its sockets can hold `add`, `claim` and `read` beyond any time-out of torch's client, so they
    are made on background threads, or inside `bounded`.
    """

    def __init__(self, store: Any, prefix: str = "lightck", *, timeout_s: float = 30.0):
        """Connect a client of our own.

        Args:
            store: a store of torch's, which names the server; it is only connected to anew.
            prefix: put in front of every key.
            timeout_s: the time-out of one call, as far as torch's client observes it.

        Raises:
            StoreError: no connection.
        """
        self._origin = store
        self._prefix = prefix
        self._timeout_s = timeout_s
        self._client: Any = None
        self._call("connect", "", lambda client: None)

    def read(self, key: str) -> bytes | None:
        """See `KeyValueStore`. One message: a compare that never matches returns what is there."""
        name = self._name(key)
        value = self._call("read", key, lambda c: c.compare_set(name, _ABSENT, _ABSENT))
        return None if value == _ABSENT.encode() else bytes(value)

    def read_many(self, keys: Sequence[str]) -> list[bytes]:
        """See `KeyValueStore`."""
        found: list[bytes] = []
        for start in range(0, len(keys), _BATCH):
            names = [self._name(key) for key in keys[start : start + _BATCH]]
            found += self._call("read", keys[start], methodcaller("multi_get", names))
        return found

    def set(self, key: str, value: bytes) -> None:
        """See `KeyValueStore`."""
        self._call("set", key, lambda c: c.set(self._name(key), value.decode()))

    def claim(self, key: str, value: bytes) -> bytes:
        """See `KeyValueStore`."""
        name = self._name(key)
        return bytes(self._call("claim", key, lambda c: c.compare_set(name, "", value.decode())))

    def add(self, key: str, amount: int = 1) -> int:
        """See `KeyValueStore`."""
        return int(self._call("add to", key, lambda c: c.add(self._name(key), amount)))

    def wait(self, key: str, seconds: float) -> bool:
        """See `KeyValueStore`. torch's client prints two lines on stderr when the time is over."""
        limit = timedelta(milliseconds=max(1, round(seconds * 1000)))
        try:
            self._call("wait for", key, lambda c: c.wait([self._name(key)], limit))
            return True
        except StoreError:
            # A time-out and a broken connection look alike: an answered read tells them apart.
            return self.read(key) is not None

    def delete(self, keys: Iterable[str]) -> None:
        """See `KeyValueStore`."""
        for key in keys:
            self._call("delete", key, methodcaller("delete_key", self._name(key)))

    def clone(self) -> JobStore:
        """See `KeyValueStore`."""
        return JobStore(self._origin, self._prefix, timeout_s=self._timeout_s)

    def below(self, part: str) -> JobStore:
        """See `KeyValueStore`."""
        return JobStore(self._origin, self._name(part), timeout_s=self._timeout_s)

    def plain(self, part: str) -> Any:
        """Open another connection as a torch store, for torch's own groups; keys as for `below`."""
        return dist.distributed_c10d.PrefixStore(self._name(part), _connected(self._origin))

    def _name(self, key: str) -> str:
        return f"{self._prefix}/{key}"

    def _call(self, what: str, key: str, ask: Callable[[Any], T]) -> T:
        began = time.monotonic()
        try:
            if self._client is None:
                self._client = _connected(self._origin)
                self._client.set_timeout(timedelta(seconds=self._timeout_s))
            return ask(self._client)
        except (RuntimeError, ValueError) as error:
            self._client = None
            took = time.monotonic() - began
            raise StoreError(
                f"the job's store did not {what} {self._name(key)!r} after {took:.1f} s: {error}; "
                "see whether the process that hosts it (torchrun's agent, else rank 0) lives and "
                "whether this host reaches it"
            ) from error


def _connected(store: Any) -> Any:
    """Return another connection to a store's server; keys as in the store.

    Raises:
        RuntimeError: the server does not answer.
    """
    if hasattr(store, "clone"):
        return store.clone()
    # Torch 2.6 can not, nor say what a store's prefix is. In torchrun's store, which outlives a
    # restart of all ranks, it would be the number of the attempt.
    stores: Any = dist
    plain = getattr(store, "_underlying_non_prefix_store", store)
    if isinstance(plain, stores.TCPStore):
        plain = stores.TCPStore(plain.host, plain.port, is_master=False, wait_for_workers=False)
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return stores.PrefixStore(f"attempt_{attempt}", plain)


def bounded(what: str, seconds: float, ask: Callable[[], T]) -> T:
    """Run `ask` on a thread and wait for it, so that a hung server cannot hang the caller.

    Args:
        what: names the action in the error, such as `agree on a timeline`.
        seconds: how long to wait.
        ask: may raise; its exception is raised here. If it never returns, its daemon thread stays.

    Raises:
        StoreError: it took longer.
    """
    result: list[T] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            result.append(ask())
        except BaseException as error:  # noqa: BLE001 - handed to the caller below
            failure.append(error)

    thread = threading.Thread(target=run, name="lightck-agree", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # the interpreter exits (3.12 starts no thread then), or none is left
        return ask()
    thread.join(seconds)
    if failure:
        raise failure[0]
    if not result:
        raise StoreError(
            f"{what}: the job's store gave no answer within {seconds:.0f} s; the process that "
            "hosts it (torchrun's agent, else rank 0) hangs or cannot be reached"
        )
    return result[0]


def default_store(prefix: str = "lightck", *, timeout_s: float = 30.0) -> JobStore:
    """Connect to the store of `torch.distributed.init_process_group`.

    Raises:
        CoordinationError: torch.distributed is not initialized.
        StoreError: no connection.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise CoordinationError(
            "torch.distributed is not initialized, so that there is no store over which the ranks "
            "could agree; call torch.distributed.init_process_group() before lightck"
        )
    warn_of_shared_store(os.environ)
    # torch has no public way to get it; the name is the same from 2.0 to 2.13.
    store = dist.distributed_c10d._get_default_store()
    return JobStore(store, prefix, timeout_s=timeout_s)


_warned = False


def warn_of_shared_store(environment: Any) -> bool:
    """Warn once if a restart inside the job may fail to reconnect (pytorch issue 135712).

    torchrun then serves workers from its own rendezvous store, whose keys outlive a restart.

    Returns:
        Whether this call warned.
    """
    global _warned
    shared = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    restarts = environment.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
    ours = environment.get("LIGHTCK_RUN")  # `lightck run`: each start has keys of its own
    if not (shared and restarts) or _warned or ours:
        return False
    _warned = True
    warnings.warn(
        "torchrun shares its rendezvous store with the workers: after an in-job restart they often "
        "fail to connect (pytorch issue 135712); start torchrun with "
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in its environment",
        RuntimeWarning,
        stacklevel=3,
    )
    return True
