"""Run torchrun, or `lightck run`, in this process; it ends with the one that has started it.

    python -m bench.in_place.launch torchrun|lightck FOLDER [ARGUMENT...]

In FOLDER/agent.marks are the moments in which lightck's agent has seen that a worker has ended.
"""

from __future__ import annotations

import ctypes
import signal
import sys
from collections.abc import Sequence
from typing import Any
from unittest import mock

_SIGNAL_WITH_PARENT = 1  # PR_SET_PDEATHSIG


def main(launcher: str, folder: str, arguments: Sequence[str]) -> int:
    """Run it."""
    ctypes.CDLL(None).prctl(_SIGNAL_WITH_PARENT, signal.SIGTERM)  # it ends its workers then
    # After that: they take seconds, in which the parent may end.
    import torch.distributed.run as torchrun

    from bench.in_place.common import Marks
    from lightck.cli import run
    from lightck.inplace.agent import Agent

    if launcher == "torchrun":
        torchrun.main([*arguments])
        return 0
    marks, replace = Marks(folder, "agent"), Agent.replace

    def noticed(agent: Any, local_rank: int, code: int) -> Any:
        marks.mark("noticed", rank=local_rank)
        return replace(agent, local_rank, code)

    with mock.patch.object(Agent, "replace", noticed):
        return run.main(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], sys.argv[3:]))
