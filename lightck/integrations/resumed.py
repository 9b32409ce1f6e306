"""The result of integrations whose framework has no class of its own for checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self

from lightck.errors import ConfigError
from lightck.handle import Handle
from lightck.types import RestoreInfo


class Resumed:
    """A handle, and what was restored before it was attached; a context manager, as the handle is.

    Attributes:
        handle: the handle.
        info: what was restored; None where the run begins.

    Thread: the training thread, but for what the handle says.
    """

    def __init__(
        self, handle: Handle, info: RestoreInfo | None, leave: Callable[[], object] | None = None
    ) -> None:
        """Hold both; `leave` undoes what the integration has put into its framework."""
        self.handle, self.info, self._leave = handle, info, leave

    @property
    def step(self) -> int:
        """The last complete step."""
        return self.handle.step

    def close(self) -> None:
        """Commit the last complete step, due or not, and detach; idempotent.

        Raises what `Handle.close` raises.
        """
        self._undo()
        self.handle.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._undo()
        self.handle.__exit__(kind, error, trace)

    def _undo(self) -> None:
        leave, self._leave = self._leave, None
        if leave is not None:
            leave()


def joined(own: Mapping[str, Any], users: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return an integration's extras and the user's together.

    Raises:
        ConfigError: the user has given one a name that is the integration's.
    """
    if taken := sorted(own.keys() & (users or {}).keys()):
        raise ConfigError(
            f"extras[{taken[0]!r}] is a name of the integration's own: give it another"
        )
    return {**own, **(users or {})}
