"""A saver for tests of the watchdog: one rank, nothing to say, nothing to stop."""

from __future__ import annotations

from typing import Any


class LoneSaver:
    """A `JitSaver` of one rank without a checkpointer; the tests say the rest."""

    def snapshot_cost(self, usable_s: float) -> Any:
        """Nothing is known of it."""
        return None

    def pause_training(self, until: float | None) -> None:
        """Nothing trains."""

    def new_peer_failure(self) -> str | None:
        """No peer fails."""
        return None

    def ends_hang(self, position: object) -> bool:
        return False

    def is_settled(self) -> bool:
        """No peer has anything to say."""
        return True

    def hung_device(self) -> Any:
        """No device hangs."""
        return None
