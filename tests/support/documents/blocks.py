"""The code blocks of README and of the guide, and what a comment above one says about it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[3]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs" / "guide").glob("*.md")))

PYTHON, SHELL, SHOWN = "python", "sh", "text"
"""Languages: run in Python, run in a shell, and only shown, as output is."""

_BLOCK = re.compile(
    r"(?:^<!-- (?P<key>not run|saved as): (?P<value>[^\n]*?) -->\n\n?)?"
    r"^```(?P<language>\S*)\n(?P<text>.*?)^```$",
    re.M | re.S,
)


@dataclass(frozen=True)
class Block:
    """One fenced block.

    `not_run` says why it is not run; `saved_as` names the file that the page tells to save it in.
    """

    line: int
    language: str
    text: str
    not_run: str = ""
    saved_as: str = ""


def blocks(page: Path) -> list[Block]:
    """Return the blocks of a page in their order."""
    text = page.read_text()
    found = []
    for each in _BLOCK.finditer(text):
        said = {each["key"]: each["value"]} if each["key"] else {}
        found.append(
            Block(
                line=text.count("\n", 0, each.start("text")) + 1,
                language=each["language"],
                text=each["text"],
                not_run=said.get("not run", ""),
                saved_as=said.get("saved as", ""),
            )
        )
    return found


def below(page: Path, heading: str) -> Block:
    """Return the first block of Python below a heading."""
    text = page.read_text()
    line = 1 + text[: text.index(f"\n## {heading}\n") + 1].count("\n")
    return next(each for each in blocks(page) if each.line > line and each.language == PYTHON)
