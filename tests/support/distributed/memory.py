"""A store in memory, with failures to order, for the protocols' tests."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from lightck.errors import StoreError

Fault = Callable[[str, str], str | None]
"""Given (operation, key): `before`, `after` (it had its effect, the answer is lost) or None."""


@dataclass
class Server:
    """All clients share one server, which holds what the store has."""

    values: dict[str, bytes] = field(default_factory=dict)
    changed: threading.Condition = field(default_factory=threading.Condition)
    messages: Counter[str] = field(default_factory=Counter)


@dataclass
class MemoryStore:
    """A client; `fault` decides for each call whether it fails."""

    server: Server = field(default_factory=Server)
    fault: Fault = lambda operation, key: None

    def _do(self, operation: str, key: str, effect: Callable[[dict[str, bytes]], object]) -> object:
        how = self.fault(operation, key)
        if how == "before":
            raise StoreError(f"{operation} {key}: lost on the way there")
        with self.server.changed:
            self.server.messages[operation] += 1
            result = effect(self.server.values)
            self.server.changed.notify_all()
        if how == "after":
            raise StoreError(f"{operation} {key}: lost on the way back")
        return result

    def read(self, key: str) -> bytes | None:
        return self._do("read", key, lambda v: v.get(key))  # type: ignore[return-value]

    def read_many(self, keys: Sequence[str]) -> list[bytes]:
        return [self._do("read", key, lambda v, k=key: v[k]) for key in keys]  # type: ignore

    def set(self, key: str, value: bytes) -> None:
        self._do("set", key, lambda v: v.__setitem__(key, value))

    def claim(self, key: str, value: bytes) -> bytes:
        return self._do("claim", key, lambda v: v.setdefault(key, value))  # type: ignore

    def add(self, key: str, amount: int = 1) -> int:
        def effect(values: dict[str, bytes]) -> int:
            values[key] = str(int(values.get(key, b"0")) + amount).encode()
            return int(values[key])

        return self._do("add", key, effect)  # type: ignore[return-value]

    def wait(self, key: str, seconds: float) -> bool:
        if self.fault("wait", key):
            raise StoreError(f"wait {key}: lost")
        with self.server.changed:
            self.server.messages["wait"] += 1
            return self.server.changed.wait_for(lambda: key in self.server.values, seconds)

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            self._do("delete", key, lambda v, k=key: v.pop(k, None))  # type: ignore[misc]

    def clone(self) -> MemoryStore:
        return MemoryStore(self.server, lambda operation, key: self.fault(operation, key))
