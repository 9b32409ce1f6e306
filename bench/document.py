"""A report as blocks, which become Markdown here and a page in `bench.page`.

Texts may have `code` and **strong** in them, and no other marks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Heading:
    """Level 1 begins a report, level 2 a section of it; a page shows a folded one when asked to."""

    level: int
    text: str
    folded: bool = False


@dataclass(frozen=True)
class Text:
    """A paragraph."""

    text: str


@dataclass(frozen=True)
class Bullets:
    """A list, one paragraph each."""

    items: Sequence[str]


@dataclass(frozen=True)
class Cell:
    """Of a table: a quantity that rows can be sorted by.

    Attributes:
        text: the value.
        value: what to sort by.
        beside: what else stands there, such as an interval.
    """

    text: str
    value: float
    beside: str = ""

    def __str__(self) -> str:
        return f"{self.text} {self.beside}".rstrip()


@dataclass(frozen=True)
class Table:
    """Headings, and rows as long."""

    head: Sequence[str]
    rows: Sequence[Sequence[str | Cell]]


@dataclass(frozen=True)
class Chart:
    """A drawing by its name; whoever renders leaves it out if it was not drawn."""

    name: str
    title: str


Block = Heading | Text | Bullets | Table | Chart


def markdown(blocks: Sequence[Block], files: Mapping[str, str]) -> str:
    """The blocks in Markdown; `files`: charts' names to where their pictures are."""
    parts = [_markdown(block, files) for block in blocks]
    return "\n\n".join(part for part in parts if part) + "\n"


def _markdown(block: Block, files: Mapping[str, str]) -> str:
    match block:
        case Heading():
            return f"{'#' * block.level} {block.text}"
        case Text():
            return block.text
        case Bullets():
            return "\n".join(f"- {item}" for item in block.items)
        case Table():
            lines = [block.head, ["---"] * len(block.head), *block.rows]
            return "\n".join("| " + " | ".join(map(str, cells)) + " |" for cells in lines)
        case Chart():
            file = files.get(block.name)
            return f"![{block.title}]({file})" if file else ""
