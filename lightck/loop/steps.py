"""Counts steps: one is complete when every optimizer has stepped once more.

That is I1 (when a step is complete), and every optimizer of the job counts.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import FrameType

from lightck.errors import ConfigError


@dataclass(eq=False)
class Steps:
    """Counts the steps of any number of optimizers, known by their index."""

    step: int = 0
    """The number of the last complete step."""
    boundary: int | None = None
    """The index of the optimizer that ends a step, when optimizers step at different rates."""
    marked: bool = False
    """True if the loop marks its updates itself: only its marks end a step."""
    settled: bool = True
    """True once all optimizers of the job are known; before that no step is complete."""
    counts: list[int] = field(default_factory=list)
    nested: set[int] = field(default_factory=set)
    """Optimizers that step inside another one's update: they count with it."""
    _inside: list[tuple[int, FrameType | None]] = field(default_factory=list)
    """Updates that have begun: (optimizer or MARK, the frame that runs the step)."""

    MARK = -1

    def add(self, *, late: bool = False) -> int:
        """Add an optimizer that has stepped as often as the others; return its index.

        `late`: it joins at the end of an iteration whose step the others have completed already.
        """
        joins_ended_step = late and self.counts and not self.between_updates
        self.counts.append(self.step - 1 if joins_ended_step else self.step)
        return len(self.counts) - 1

    def settle(self, *, during_step: bool = False) -> None:
        """Note that all optimizers are known.

        `during_step`: the last one was found when another began its next step; the step in which
        they were found counts as complete.
        """
        self.settled = True
        self.step += int(during_step)

    def mark_updates(self) -> None:
        """Note that the loop marks its updates itself: only its marks end a step from now on."""
        self.marked = self.settled = True

    @property
    def updating(self) -> bool:
        """Tell whether an update is running: the state is mixed."""
        return bool(self._inside)

    @property
    def between_updates(self) -> bool:
        """Tell whether some optimizers have stepped since the last complete step."""
        return any(count > self.step for count in self.counts)

    def gave_up(self, thread: int) -> bool:
        """Tell whether the update that `thread` has begun has raised: it never ends. Any thread."""
        begun = [*self._inside]
        if not begun or begun[-1][0] == self.MARK:
            return False
        frame, wanted = sys._current_frames().get(thread), begun[-1][1]
        while frame is not None and frame is not wanted:
            frame = frame.f_back
        return frame is None

    def begin(self, who: int, frame: FrameType | None = None) -> bool:
        """Begin an update; True unless it runs inside another one.

        An update that raised never ended: it is recognised by its frame having left the stack.

        Args:
            who: the optimizer, or MARK.
            frame: that runs its step; None: the caller's.

        Raises:
            ConfigError: an optimizer steps again before the others have: ambiguous.
        """
        frames = stack() if self._inside else [next(_frames(), None)]
        if who == self.MARK:
            self._inside.clear()
        while (
            self._inside and self._inside[-1][0] != self.MARK and self._inside[-1][1] not in frames
        ):
            self._inside.pop()
        outermost = not self._inside
        self._inside.append((who, frame or frames[0]))
        if outermost and who >= 0 and not self.marked and self.boundary is None:
            self._check_cadence(who)
        return outermost

    def end(self, who: int) -> bool:
        """End an update; True if that completes a step."""
        while self._inside and self._inside.pop()[0] != who:
            pass
        if self._inside:
            if self._inside[-1][0] != self.MARK:
                self.nested.add(who)
            return False  # an optimizer inside another one counts once, with the outer one
        if who >= 0:
            self.counts[who] += 1
        return self._complete(who)

    def go_on_from(self, step: int) -> None:
        """Go on from another step, whose state the live one is now, between two updates."""
        self.step, self.counts = step, [step] * len(self.counts)

    def skipped(self, who: int) -> bool:
        """Count an update that the gradient scaler left out; True if that completes a step."""
        self.counts[who] += 1
        return self._complete(who)

    def _complete(self, who: int) -> bool:
        if self.marked:
            complete = who == self.MARK
        elif self.boundary is not None:
            complete = who == self.boundary
        else:
            own = [count for i, count in enumerate(self.counts) if i not in self.nested]
            complete = self.settled and min(own or self.counts) > self.step
        if complete:
            self.step += 1
            if self.marked or self.boundary is not None:
                self.counts = [self.step] * len(self.counts)
            for i in self.nested:
                self.counts[i] = self.step
        return complete

    def _check_cadence(self, who: int) -> None:
        if self.counts[who] > self.step:
            late = [i for i, c in enumerate(self.counts) if c <= self.step and i not in self.nested]
            raise ConfigError(
                f"optimizer {who} steps again at step {self.step + 1} before optimizer"
                f" {late[0]} has: which one ends a step? Pass boundary=<optimizer> to attach,"
                " or call handle.before_update() and handle.after_update() in the loop; after"
                " making an optimizer anew, detach and attach again"
            )


def stack() -> list[FrameType | None]:
    """Return the caller's frames, innermost first, from the one that runs the optimizer's step."""
    return [*_frames()] or [None]


def _frames() -> Iterator[FrameType]:
    """Yield the caller's frames as `stack` returns them; looking at one costs, too."""
    frame: FrameType | None = sys._getframe(1)
    found = False
    while frame is not None:
        name = str(frame.f_globals.get("__name__", ""))
        found = found or not name.startswith(("lightck.", "torch._dynamo"))
        if found:
            yield frame
        frame = frame.f_back
