"""`lightck top` on a terminal: one view, in place, of a trainer that trains, dies, or is not there.

The terminal is a pty; what a user would see on it is worked out by a small emulator.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import struct
import sys
import termios
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lightck
from lightck.cli.main import main
from support import processes

_PATIENCE_S = 100.0


@dataclass
class Screen:
    """The screen is as much of a terminal as `top` uses: wrapping, scrolling, cursor up, erase."""

    width: int
    height: int
    lines: list[str] = field(default_factory=lambda: [""])
    """These lines are on the screen or above it; the cursor is at the end of `row`."""
    row: int = 0

    def feed(self, text: str) -> None:
        """Show this text."""
        for control, plain in re.findall(r"(\x1b\[\d*[A-Z]|\r\n)|([^\x1b\r\n]+)", text):
            if control == "\r\n":
                self._next()
            elif control:
                self._control(control)
            for character in plain:
                if len(self.lines[self.row]) == self.width:
                    self._next()
                self.lines[self.row] += character

    def _control(self, control: str) -> None:
        top = max(0, len(self.lines) - self.height)
        if control.endswith("F"):
            self.row = max(top, self.row - int(control[2:-1]))
        elif control == "\x1b[J":
            self.lines[self.row :] = [""]
        else:
            raise ValueError(f"top sent {control!r}, which this terminal does not know")

    def _next(self) -> None:
        self.row += 1
        if self.row == len(self.lines):
            self.lines.append("")

    @property
    def text(self) -> str:
        """Everything that has not been erased, scrolled out or not; wrapped lines joined."""
        joined = "".join(x + "\n" * (len(x) < self.width) for x in self.lines)
        return joined.rstrip("\n")


@dataclass
class Terminal:
    """A terminal with `lightck top` in it."""

    master: int
    top: processes.Child
    screen: Screen

    def see(self, wanted: Callable[[str], Any]) -> str:
        """Wait until the screen is as wanted; all of it."""
        end = time.monotonic() + _PATIENCE_S
        while not wanted(self.screen.text):
            left = end - time.monotonic()
            assert left > 0, f"after {_PATIENCE_S} s the screen is\n{self.screen.text}"
            if select.select([self.master], [], [], left)[0]:
                self.screen.feed(os.read(self.master, 1 << 16).decode())
        return self.screen.text

    def rest(self) -> str:
        """Return all of the screen once nothing has it open any more."""
        with contextlib.suppress(OSError):  # EIO, behind the last byte
            while True:
                self.screen.feed(os.read(self.master, 1 << 16).decode())
        return self.screen.text

    def press(self, key: bytes) -> None:
        """Press a key, as a user does."""
        os.write(self.master, key)


@pytest.fixture
def terminals() -> Iterator[Callable[..., Terminal]]:
    opened: list[Terminal] = []

    def make(path: Path, width: int = 120, height: int = 40) -> Terminal:
        master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))

        def code(parent: processes.Parent) -> int:
            os.close(master)
            os.setsid()
            fcntl.ioctl(slave, termios.TIOCSCTTY, 0)  # so that Ctrl-C is a signal to us
            for fd in (0, 1, 2):
                os.dup2(slave, fd)
            sys.stdout = sys.__stdout__ = open(1, "w", closefd=False)
            sys.stderr = open(2, "w", closefd=False)
            return main(["top", "--every", "0.05", str(path)])

        child = processes.start(code)
        os.close(slave)
        opened.append(Terminal(master, child, Screen(width, height)))
        return opened[-1]

    yield make
    for each in opened:
        os.close(each.master)
        each.top.kill()
        each.top.join()


@pytest.fixture
def trainer(region_dir: Path) -> Iterator[tuple[Path, processes.Child]]:
    """Trains two steps whenever it is let go, and tells the last one."""
    path = region_dir / "run"

    def code(parent: processes.Parent) -> None:
        what = nn.Linear(32, 4)
        optimizer = torch.optim.AdamW(what.parameters())
        with lightck.attach(what, optimizer, path, slots=4) as handle:
            while True:
                for _ in range(2):
                    what(torch.ones(2, 32)).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                parent.send(handle.step)
                parent.pause()

    child = processes.start(code)
    assert child.receive() == 2
    yield path, child
    child.kill()
    child.join()


def _step(number: int) -> Callable[[str], Any]:
    return lambda text: re.search(rf"^  step +{number}\b", text, re.M)


def _views(text: str) -> int:
    return len(re.findall(r"^  trainer ", text, re.M))


@pytest.mark.parametrize(
    ("width", "height"), [(120, 40), (40, 40), (120, 5)], ids=["roomy", "narrow", "low"]
)
def test_a_live_view_stays_one_view_whatever_the_terminal_s_size(
    trainer: tuple[Path, processes.Child],
    terminals: Callable[..., Terminal],
    width: int,
    height: int,
) -> None:
    path, child = trainer
    terminal = terminals(path, width, height)
    terminal.see(_step(2))
    for step in (4, 6, 8):
        child.let_go()
        assert child.receive() == step
        text = terminal.see(_step(step))
        if height > 9:  # on a lower one what has scrolled out stays in the terminal's history
            assert _views(text) == 1, text
            assert text.count("region-00000.lck") == 1, text
            assert "over the last" in text or "since attach" in text


def test_a_trainer_that_is_killed_while_one_watches_is_told_to_be_gone(
    trainer: tuple[Path, processes.Child], terminals: Callable[..., Terminal]
) -> None:
    path, child = trainer
    terminal = terminals(path)
    terminal.see(lambda text: ", running, last step ended" in text)
    child.kill()
    text = terminal.see(lambda text: f"process {child.pid} is gone without closing" in text)
    assert _views(text) == 1 and _step(2)(text), "its last words stay"


def test_ctrl_c_ends_watching_without_an_error(
    trainer: tuple[Path, processes.Child], terminals: Callable[..., Terminal]
) -> None:
    path, _ = trainer
    terminal = terminals(path)
    terminal.see(_step(2))
    terminal.press(b"\x03")
    assert terminal.top.receive() == 0
    text = terminal.rest()
    assert "error:" not in text and "Traceback" not in text


def test_a_region_that_vanishes_while_one_watches_is_an_error_that_names_it(
    trainer: tuple[Path, processes.Child], terminals: Callable[..., Terminal]
) -> None:
    path, child = trainer
    terminal = terminals(path)
    terminal.see(_step(2))
    child.kill()
    path.rename(path.with_name("elsewhere"))
    assert terminal.top.receive() != 0
    # Between finding the file and opening it, it is another error; it names the place, too.
    terminal.see(lambda text: str(path) in text.partition("lightck: error: ")[2])
