"""The steps that the histories of several ranks keep: rank 0 chooses, by way of the job's store.

Every rank holds each whole snapshot's slot until rank 0 has said whether it is kept, so that all of
them copy the same steps, however long each of them copies.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from lightck.distributed.store import KeyValueStore
from lightck.errors import StoreError

_KEY = "kept"
_REMEMBERED = 256
"""The newest steps that were chosen; no rank asks for an older one."""


@dataclass(eq=False)
class HistoryChoice:
    """The choice of one attach, see `lightck.history.history.KeepChoice`. Used by one thread."""

    store: KeyValueStore
    chooses: bool
    _kept: list[int] = field(default_factory=list)
    _up_to: int = -1

    def decide(self, step: int, keeps: bool) -> None:
        """Let the other ranks know whether a step is kept.

        Raises:
            StoreError: the store does not answer.
        """
        self._kept = [*self._kept, *([step] if keeps else [])][-_REMEMBERED:]
        self._up_to = max(self._up_to, step)
        self.store.set(_KEY, json.dumps([self._up_to, self._kept]).encode())

    def decided(self, step: int) -> bool | None:
        """Return what rank 0 has decided of a step; None: nothing yet.

        Raises:
            StoreError: the store does not answer, or has something else.
        """
        if step <= self._up_to:
            return step in self._kept
        found = self.store.read(_KEY)
        if found is None:
            return None
        try:
            self._up_to, self._kept = json.loads(found)
        except ValueError as error:
            raise StoreError(f"the job's store has {found[:40]!r} as the steps to keep") from error
        return step in self._kept if step <= self._up_to else None
