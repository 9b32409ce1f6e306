"""Make a slow network between two ranks: a namespace each, a veth pair, token buckets at both ends.

The namespaces have no names: each lives as long as a process in it does. A keeper process holds one
open until its standard input ends, that is, until its maker is done or dead. So there is nothing
to clean up after a kill, and two runs at a time do not see each other.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from bench.errors import Unavailable

_TOOLS = ("ip", "tc", "unshare", "nsenter")
_DEVICE = "lck0"
_LOOPBACK = "127.0.0.1"
# The bucket holds a few of the 64 KB segments that TCP hands down; what a full queue holds (this
# much time's worth) is more than TCP keeps under way, so that nothing is dropped and sent again.
_BURST = "256kb"
_QUEUE = "200ms"


@dataclass(frozen=True)
class Door:
    """The way of one rank to the network.

    Attributes:
        command: words to put before the rank's command.
        interface: its network device.
        address: its own address.
    """

    command: tuple[str, ...] = ()
    interface: str = "lo"
    address: str = _LOOPBACK


@contextmanager
def between(world: int, mbit: int) -> Iterator[list[Door]]:
    """Yield a door for each rank, onto a link of so many Mbit/s each way; 0: plain loopback.

    A link joins two ranks.

    Raises:
        Unavailable: this machine or user cannot do that; the message has the command that failed.
    """
    if mbit == 0:
        yield [Door()] * world
        return
    if missing := [tool for tool in _TOOLS if shutil.which(tool) is None]:
        raise Unavailable(
            f"a link of {mbit} Mbit/s needs {', '.join(missing)}: apt-get install iproute2"
            " util-linux"
        )
    with ExitStack() as keepers:
        pids = [keepers.enter_context(_namespace()) for _ in range(world)]
        yield _joined(pids, mbit)


def _joined(pids: Sequence[int], mbit: int) -> list[Door]:
    inside = [("nsenter", "-t", str(pid), "--net") for pid in pids]
    _run(*inside[0], "ip", "link", "add", _DEVICE, "type", "veth", "peer", "name", _DEVICE,
         "netns", str(pids[1]))  # fmt: skip
    doors = []
    for rank, enter in enumerate(inside):
        address = f"10.0.0.{rank + 1}"
        _run(*enter, "ip", "address", "add", f"{address}/24", "dev", _DEVICE)
        _run(*enter, "ip", "link", "set", "lo", "up")
        _run(*enter, "ip", "link", "set", _DEVICE, "up")
        _run(*enter, "tc", "qdisc", "add", "dev", _DEVICE, "root", "tbf", "rate", f"{mbit}mbit",
             "burst", _BURST, "latency", _QUEUE)  # fmt: skip
        doors.append(Door(enter, _DEVICE, address))
    return doors


@contextmanager
def _namespace() -> Iterator[int]:
    """Make a network namespace; yield the id of the process that keeps it."""
    keeper = subprocess.Popen(
        ["unshare", "--net", "sh", "-c", "echo here; exec cat"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C is for the ranks; this one ends after them
    )
    assert keeper.stdin and keeper.stdout and keeper.stderr
    try:
        if keeper.stdout.readline() != "here\n":
            raise Unavailable(f"no network namespace: {keeper.stderr.read().strip()}")
        yield keeper.pid
    finally:
        keeper.kill()
        keeper.wait()
        keeper.stdin.close()
        keeper.stdout.close()
        keeper.stderr.close()


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise Unavailable(f"`{' '.join(command)}`: {done.stderr.strip()}")
