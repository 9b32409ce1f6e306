"""What is heard of a job's gradients on their way to other ranks: copies are paced by it.

Who hears it (`distributed/communication.py`) lives a floor above; with a trace it is noted, too.
"""

from __future__ import annotations

from dataclasses import dataclass

from lightck.capture.recorder import Recorder
from lightck.capture.trace import Trace, now_ns


@dataclass(eq=False)
class Traffic:
    """Told by the thread that runs the backward, except `landed`: any thread. Never raises."""

    recorder: Recorder

    @property
    def trace(self) -> Trace | None:
        """Where it is noted; None while nobody wants to know."""
        return self.recorder.pipeline.trace if self.recorder.enabled else None

    def launched(self, bucket: int, size: int, share: float, *, seen: bool) -> None:
        """A bucket's gradients are on their way.

        Args:
            bucket: its number.
            size: its bytes.
            share: of this backward's gradient bytes, how much is under way or done, 0 to 1.
            seen: `landed` will be told of it.
        """
        if not self.recorder.enabled:
            return
        pipeline = self.recorder.pipeline
        if pipeline.trace is not None and not seen:
            pipeline.trace.bucket(bucket, size, now_ns())
        pipeline.pace(lambda: pipeline.schedule.flies(share))

    def landed(self, bucket: int, size: int, begin_ns: int) -> None:
        """A bucket that was launched at `begin_ns` is reduced."""
        trace = self.trace
        if trace is not None:
            trace.bucket(bucket, size, begin_ns, now_ns())

    def waits(self) -> None:
        """The backward is over but for what other ranks have to add."""
        if self.recorder.enabled:
            self.recorder.pipeline.pace(self.recorder.pipeline.schedule.waits)

    def waited(self, begin_ns: int) -> None:
        """It has waited since `begin_ns`."""
        trace = self.trace
        if trace is not None:
            trace.note("wait", "wait", begin_ns, now_ns())
