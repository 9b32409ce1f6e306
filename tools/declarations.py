"""Make `lightck/region/_declarations.py` of the native library's header, for cffi.

    python tools/declarations.py         write it; do so after every change of the header
    python tools/declarations.py FILE    write it elsewhere

cffi could read the header's text when lightck is imported, but its C parser would cost every import
about 15 ms.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from cffi import FFI

ROOT = Path(__file__).resolve().parents[1]
HEADER = ROOT / "native/include/lightck.h"
MODULE = "lightck.region._declarations"
MADE = ROOT / (MODULE.replace(".", "/") + ".py")
DOCSTRING = (
    '"""Declare the native library to cffi; made by tools/declarations.py, never by hand."""'
)


def declarations() -> str:
    """Return the header without comments and preprocessor lines, except what cffi can use."""
    text = re.sub(r"/\*.*?\*/", "", HEADER.read_text(), flags=re.S)
    lines = []
    for line in text.splitlines():
        constant = re.fullmatch(r"#define (LCK_\w+) (\d+)u?\s*", line)
        if constant:
            lines.append(f"#define {constant[1]} {constant[2]}")
        elif not line.startswith("#"):
            lines.append(line)
    return "\n".join(lines)


def write(path: Path) -> None:
    """Write the module."""
    ffi = FFI()
    ffi.cdef(declarations())
    ffi.set_source(MODULE, None)
    ffi.emit_python_code(str(path))
    made = path.read_text().removeprefix("# auto-generated file\n")
    path.write_text(f"{DOCSTRING}\n\n{made}")


if __name__ == "__main__":
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else MADE)
