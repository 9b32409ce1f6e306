"""A report as blocks, which become Markdown here and a page in `bench.page`.

Texts may contain `code` and **strong**, and no other marks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Heading:
    """A heading: level 1 begins a report, level 2 a section.

    A page shows a folded one on demand.
    """

    level: int
    text: str
    folded: bool = False


@dataclass(frozen=True)
class Text:
    """A paragraph of text."""

    text: str


@dataclass(frozen=True)
class Bullets:
    """A list with one paragraph per item."""

    items: Sequence[str]


@dataclass(frozen=True)
class Cell:
    """A cell of a table: a quantity that rows can be sorted by.

    Attributes:
        text: the value as text.
        value: the number to sort by.
        beside: further text, such as an interval.
    """

    text: str
    value: float
    beside: str = ""

    def __str__(self) -> str:
        return f"{self.text} {self.beside}".rstrip()


@dataclass(frozen=True)
class Table:
    """A table: headings, and rows of the same length."""

    head: Sequence[str]
    rows: Sequence[Sequence[str | Cell]]


@dataclass(frozen=True)
class Chart:
    """A drawing by its name; a renderer leaves it out if it was not drawn."""

    name: str
    title: str


Block = Heading | Text | Bullets | Table | Chart


def markdown(blocks: Sequence[Block], files: Mapping[str, str]) -> str:
    """Render the blocks as Markdown; `files` maps charts' names to their pictures' paths."""
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
