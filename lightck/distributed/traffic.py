"""Paces copies by a job's gradients on their way to other ranks.

The observer (`distributed/ddp.py`) is in a higher layer; with a trace, what it sees is
noted, too.
"""

from __future__ import annotations

from dataclasses import dataclass

from lightck.loop.checkpointer import Recorder
from lightck.tracing.trace import Trace, now_ns


@dataclass(eq=False)
class Traffic:
    """Is told of gradient communication, paces copies by it, and notes it for the trace.

    Called by the thread that runs the backward, except `landed`: any thread. Never raises.
    """

    recorder: Recorder

    @property
    def trace(self) -> Trace | None:
        """The trace that communication is noted in; None while nobody wants it."""
        return self.recorder.pipeline.trace if self.recorder.enabled else None

    def launched(self, bucket: int, size: int, share: float, *, seen: bool) -> None:
        """Take note that a bucket's gradients are on their way, and let copies run.

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
        """Note that a bucket that was launched at `begin_ns` is reduced."""
        trace = self.trace
        if trace is not None:
            trace.bucket(bucket, size, begin_ns, now_ns())

    def waits(self) -> None:
        """Let copies run as the schedule says when the backward only waits for other ranks."""
        if self.recorder.enabled:
            self.recorder.pipeline.pace(self.recorder.pipeline.schedule.waits)

    def waited(self, begin_ns: int) -> None:
        """Note that the backward has waited for other ranks since `begin_ns`."""
        trace = self.trace
        if trace is not None:
            trace.note("wait", "wait", begin_ns, now_ns())
