"""Runs pages in forked children of one process that has imported torch once.

A request is one line of JSON on stdin, the wait status of its child the answer on stdout. A page is
one script: its blocks run in their order and share their names, in the folder that the request
names, after `setup`. Blocks of Python run in the child, those of a shell in a shell beside it.
"""

from __future__ import annotations

import importlib
import json
import os
import shlex
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

import lightck
import lightck.cli.main
from support import preload
from support.documents.blocks import PYTHON, SHELL, Block, blocks
from support.documents.setup import SETUP


def run_block(block: Block, page: str, names: dict[str, Any]) -> None:
    """Run a block as its page says; afterwards no handle of it is open."""
    if block.saved_as:
        Path(block.saved_as).write_text(block.text)
    elif block.language == SHELL:
        for line in block.text.splitlines():
            run_line(line)
    else:
        # With as many lines before it as on the page, so that a traceback leads there.
        code = compile("\n" * (block.line - 1) + block.text, page, "exec")
        exec(code, names)
        for each in [value for value in names.values() if isinstance(value, lightck.Handle)]:
            each.close()


def run_line(line: str) -> None:
    """Run a command, lightck's own in this process: a new one would import torch again."""
    words = shlex.split(line, comments=True)
    if words[:1] != ["lightck"]:
        subprocess.run(["bash", "-c", line], check=True)
        return
    # `top` goes on until somebody ends it; `rm` asks, and nobody can answer here.
    words += {"top": ["--once"], "rm": ["--yes"]}.get(words[1], [])
    status = lightck.cli.main.main(words[1:])
    if status != 0:
        raise subprocess.CalledProcessError(status, words)


def run_page(request: dict[str, Any]) -> None:
    """Run a page's blocks, or those that begin at some lines."""
    page = Path(request["page"])
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(SETUP["every page"] + SETUP.get(page.stem, ""), "setup", "exec"), names)
    exec(compile(request.get("more", ""), "more", "exec"), names)
    chosen = request.get("lines")
    for block in blocks(page):
        runs = block.language in (PYTHON, SHELL) and not block.not_run
        if runs and (chosen is None or block.line in chosen):
            print(f"{page.name}:{block.line}", flush=True)
            run_block(block, str(page), names)


def child(request: dict[str, Any]) -> None:
    """Run a page in this forked process; never returns."""
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    code = 1
    try:
        os.chdir(request["folder"])
        os.environ |= request.get("environment", {})
        run_page(request)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main() -> None:
    """Answer requests until there are no more."""
    preload.everything()
    for line in sys.stdin:
        request = json.loads(line)
        for module in request.get("imports", ()):
            importlib.import_module(module)
        pid = os.fork()
        if pid == 0:
            child(request)
        print(os.waitpid(pid, 0)[1], flush=True)


if __name__ == "__main__":
    main()
