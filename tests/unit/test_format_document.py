"""docs/design.md's offset tables are those of native/src/format.h, as the compiler sees them."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROW = re.compile(r"^\| (\d+) \| (\d+) \| `(\w+)` \|", re.M)


def documented(structure: str) -> list[tuple[int, int, str]]:
    """Rows (offset, bytes, field) of a structure's table in docs/design.md."""
    text = (ROOT / "docs" / "design.md").read_text()
    section = text.split(f"### {structure}\n", 1)[1].split("\n### ", 1)[0]
    return [(int(offset), int(size), name) for offset, size, name in ROW.findall(section)]


def compiled(structure: str, fields: list[str], folder: Path) -> tuple[list[tuple[int, int]], int]:
    """(offset, bytes) of each field, and the size of the structure."""
    prints = "".join(
        f'printf("%zu %zu\\n", offsetof({structure}, {name}), sizeof((({structure} *)0)->{name}));'
        for name in fields
    )
    source = folder / "offsets.c"
    source.write_text(
        '#include <stdio.h>\n#include "format.h"\n'
        f'int main(void) {{ {prints} printf("%zu\\n", sizeof({structure})); return 0; }}\n'
    )
    program = folder / "offsets"
    includes = ["-I", str(ROOT / "native/include"), "-I", str(ROOT / "native/src")]
    subprocess.run(["gcc", "-std=c11", *includes, str(source), "-o", str(program)], check=True)
    lines = subprocess.run([program], check=True, capture_output=True, text=True).stdout.split("\n")
    pairs = [(int(a), int(b)) for a, b in (line.split() for line in lines[: len(fields)])]
    return pairs, int(lines[len(fields)])


@pytest.mark.parametrize(
    "structure",
    ["superblock_disk", "record_disk", "journal_disk", "statistics_disk", "lck_statistics"],
)
def test_the_documented_offsets_are_the_compiled_ones_without_gaps(
    structure: str, tmp_path: Path
) -> None:
    rows = documented(structure)
    assert rows, "no table"
    pairs, size = compiled(structure, [name for _, _, name in rows], tmp_path)
    assert [(offset, length) for offset, length, _ in rows] == pairs
    ends = [offset + length for offset, length in pairs]
    assert [offset for offset, _ in pairs] == [0, *ends[:-1]], "a field is missing"
    assert ends[-1] == size
