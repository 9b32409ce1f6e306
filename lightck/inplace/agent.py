"""The agent of `lightck run`: torchrun's, but that it replaces the one worker that has ended.

The only file that touches torch elastic's private parts: `_start_workers` of the agent, `_poll` of
its subprocesses, and that this polls each worker's `Popen`. A worker that ends with another status
than 0 begins a generation, which tells every rank of the job; its replacement is a spare process,
if there is one. A replacement counts as one of `--max-restarts`. Where the ranks say that all have
to be restarted, torchrun's own way is taken.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import SubprocessContext

from lightck.errors import StoreError
from lightck.events import event
from lightck.inplace.generations import LIFE, RUN, Generations, connect
from lightck.inplace.spare import Spare

_LOOK_S = 0.5
"""Seconds between two looks at the job's store for workers that are to be ended."""
_AWAY_S = 30.0
WORKER_MODULE = "lightck.inplace.worker"


class WorkerProcess(subprocess.Popen[bytes]):
    """The process of a worker, whose agent is asked before its end counts."""

    agent: Agent
    local_rank: int
    asked = False
    replaced = False

    @classmethod
    def watched(cls, process: Any, agent: Agent, local_rank: int) -> WorkerProcess:
        """Return a process of torch's, or a spare, as one of these."""
        process.__class__ = cls
        process.agent, process.local_rank = agent, local_rank
        found: WorkerProcess = process
        return found

    def poll(self) -> int | None:
        """Return the exit status; None while it runs, and once another has taken its place."""
        code = super().poll()
        if code is not None and not self.asked:
            self.asked = True
            if code == 0:
                self.agent.note_end(self.local_rank)
            else:
                self.replaced = self.agent.replace(self.local_rank, code)
        return None if self.replaced else code


class ReplacingContext(SubprocessContext):
    """Torch's context of a node's workers, which ends workers that stand."""

    agent: Agent

    def _poll(self) -> Any:
        self.agent.end_standing()
        return super()._poll()

    def _close(self, *args: Any, **named: Any) -> None:
        self.agent.closing = True
        super()._close(*args, **named)


class Agent(LocalElasticAgent):
    """Torch's agent of one node, which replaces workers."""

    preload: Sequence[str] = ()
    """Modules that a spare imports."""
    folder: str = ""
    """Where workers look for modules first."""
    keeps_spare: bool = True

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.closing, self._starts = False, 0
        self._spare: Spare | None = None
        self._generations: Generations | None = None
        self._ends = 0
        self._look_at = 0.0

    def _start_workers(self, worker_group: Any) -> dict[int, Any]:
        self.closing, self._starts = False, self._starts + 1
        os.environ[RUN] = self._agreed_start(worker_group)
        started: dict[int, Any] = super()._start_workers(worker_group)
        context: Any = self._pcontext
        context.__class__ = ReplacingContext
        context.agent = self
        for local_rank, handler in context.subprocess_handlers.items():
            WorkerProcess.watched(handler.proc, self, local_rank)
        self._generations, self._ends = None, 0
        if self.keeps_spare and self._spare is None:
            self._spare = Spare(self.preload, self.folder)
        return started

    def _agreed_start(self, worker_group: Any) -> str:
        """Return the name of this start of all ranks, the same on every agent.

        An agent may have joined later than others: its own count says nothing.
        """
        static = worker_group.spec.rdzv_handler.get_backend() == "static"
        # A rendezvous has a store of its own, but a static one.
        key = f"lightck/start/{self._starts if static else ''}"
        if worker_group.group_rank == 0:
            worker_group.store.set(key, secrets.token_hex(4))
        return str(worker_group.store.get(key).decode())

    def _shutdown(self, *args: Any, **named: Any) -> None:
        self.closing = True
        if self._spare is not None:
            self._spare.end()
            self._spare = None
        super()._shutdown(*args, **named)

    def end_standing(self) -> None:
        """End workers that stand while all other ranks wait for them: they are replaced then."""
        group: Any = self._worker_group
        context: Any = self._pcontext
        now = time.monotonic()
        if self.closing or now < self._look_at:
            return
        self._look_at = now + _LOOK_S
        try:
            generations = self._job()
            if generations.ends_asked() == self._ends:
                return
            self._ends = generations.ends_asked()
            for local_rank, handler in context.subprocess_handlers.items():
                if generations.is_end_asked(group.workers[local_rank].global_rank):
                    handler.proc.kill()
        except (StoreError, RuntimeError):
            self._look_at = now + _AWAY_S  # the ranks say what becomes of them

    def replace(self, local_rank: int, code: int) -> bool:
        """Replace a worker that has ended; False if not all ranks can go on: it has failed."""
        group: Any = self._worker_group
        context: Any = self._pcontext
        if self.closing or self._remaining_restarts <= 0:
            return False
        rank = group.workers[local_rank].global_rank
        why = f"rank {rank} ended with status {code}"
        try:
            generations = self._job()
            if generations.refusal() or self._gave_up(generations, rank, code):
                return False
            generation = generations.claim((rank,), why)
        except (StoreError, RuntimeError) as error:
            event("not_replaced", logging.WARNING, rank=rank, why=str(error))
            return False
        self._remaining_restarts -= 1
        handler = context.subprocess_handlers[local_rank]
        environment = {**context.envs[local_rank], LIFE: str(generation.life(rank))}
        arguments = [str(each) for each in context.args[local_rank]]
        outputs = [getattr(each, "name", None) for each in (handler._stdout, handler._stderr)]
        successor = self._successor(environment, arguments, outputs)
        handler.proc = WorkerProcess.watched(successor, self, local_rank)
        group.workers[local_rank].id = handler.proc.pid
        left = self._remaining_restarts
        event("replaced", logging.WARNING, rank=rank, process=handler.proc.pid, left=left, why=why)
        return True

    def note_end(self, local_rank: int) -> None:
        """Say that a worker has ended well: no recovery must wait for it."""
        if self.closing:
            return
        rank = self._worker_group.workers[local_rank].global_rank
        with contextlib.suppress(StoreError, RuntimeError):  # then nobody is left to wait
            self._job().refuse(f"rank {rank} has left the training: it ended with status 0")

    def _job(self) -> Generations:
        """Return the generations of the job.

        Raises:
            StoreError, RuntimeError: its store does not answer.
        """
        if self._generations is None:
            group: Any = self._worker_group
            store = connect(group.master_addr, group.master_port, os.environ[RUN])
            self._generations = Generations(store)
        return self._generations

    @staticmethod
    def _gave_up(generations: Generations, rank: int, code: int) -> bool:
        """Have all restarted if a replacement has failed by itself before it had joined.

        Another one would come no further, and use up the restarts that are left.
        """
        if code < 0 or generations.is_member(rank, generations.update().life(rank)):
            return False
        why = f"the replacement of rank {rank} ended with status {code} before it had joined"
        event("in_place_refused", logging.WARNING, rank=rank, why=generations.refuse(why))
        return True

    def _successor(
        self, environment: dict[str, str], arguments: list[str], outputs: list[str | None]
    ) -> subprocess.Popen[bytes]:
        """Return the process of a worker: the spare, or a new one."""
        own = arguments[arguments.index(WORKER_MODULE) + 1 :]
        if self._spare is not None:
            process = self._spare.become(environment, own, outputs)
            self._spare = Spare(self.preload, self.folder)
            if process is not None:
                return process
        files = [open(path, "a") if path else None for path in outputs]  # noqa: SIM115
        try:
            return subprocess.Popen(
                [sys.executable, *arguments],
                env={**os.environ, **environment},
                stdout=files[0],
                stderr=files[1],
                start_new_session=True,
            )
        finally:
            for file in files:
                if file is not None:
                    file.close()


def agent_class(*, keeps_spare: bool, preload: Sequence[str], folder: str = "") -> type[Agent]:
    """Return the class of which torchrun makes the agent of this node."""
    own = {"keeps_spare": keeps_spare, "preload": tuple(preload), "folder": folder}
    return type("NodeAgent", (Agent,), own)
