"""Make drawings that are the same bytes for the same content: a picture, and a part of a page.

On the page colours are CSS variables, light or dark as the reader's settings are.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

INK, FAINT, GRID = "#1f2328", "#656d76", "#d8dee4"
_BOTH = {
    "lightck": ("#0a7e74", "#2fc4b2"),
    "checkfreq": ("#c08a1e", "#e3b341"),
    "torch.save": ("#c4512d", "#f0825e"),
    "dcp": ("#3f6fb0", "#79a7ea"),
    "safetensors": ("#8a5fb0", "#b994e0"),
    "torchsnapshot": ("#c0508c", "#ea86b8"),
    "torch_checkpointing": ("#5b8a2e", "#93c55c"),
    "lm-resiliency": ("#8a5a3c", "#c8946f"),
    "blocking": ("#7d8590", "#9aa4ae"),
    "none": ("#a8b0b8", "#6e7781"),
}
"""The engines' colours on a light page and on a dark one, in the order of legends."""
ENGINES = {name: light for name, (light, _) in _BOTH.items()}
OTHERS = ENGINES["blocking"]
PARTS = (
    *(ENGINES[name] for name in ("dcp", "checkfreq", "lightck", "torch.save", "safetensors")),
    *(ENGINES[name] for name in ("torchsnapshot", "torch_checkpointing", "lm-resiliency")),
)
"""The colours of a stack's parts, from left to right; there are more than causes of a stall."""
_DARK = {INK: "#e6edf3", FAINT: "#9aa4ad", GRID: "#343b43", **dict(_BOTH.values())}


@dataclass(frozen=True)
class Drawing:
    """One chart: a picture on white, and one for a page that has `STYLE`."""

    png: bytes
    svg: str

    @property
    def alone(self) -> str:
        """Return the SVG as a file of its own."""
        start, end, rest = self.svg.partition(">")
        return f"{start}{end}<style>{STYLE}</style>{rest}\n"


def _variable(colour: str) -> str:
    return f"--chart-{colour[1:]}"


STYLE = (
    ":root{" + "".join(f"{_variable(c)}:{c};" for c in _DARK) + "}"
    "@media(prefers-color-scheme:dark){:root{"
    + "".join(f"{_variable(c)}:{dark};" for c, dark in _DARK.items())
    + "}}"
)
"""The CSS with the charts' colours on a light page and on a dark one."""


def made(draw: Callable[[Any, Any], None], what: Any) -> Drawing:
    """Return what `draw(axes, what)` draws; `draw` sets the figure's height.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib
    from matplotlib.figure import Figure

    settings = {"font.family": "DejaVu Sans", "font.size": 9, "text.color": INK}
    settings |= {"svg.fonttype": "none", "svg.hashsalt": "lightck", "axes.edgecolor": GRID}
    settings |= {"axes.labelcolor": FAINT, "legend.frameon": False, "path.simplify": False}
    with matplotlib.rc_context(settings):
        figure = Figure(figsize=(5.8, 2), layout="constrained")
        axes = figure.subplots()
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(colors=FAINT, labelcolor=INK, length=0)
        axes.set_axisbelow(True)
        draw(axes, what)
        picture, vector = io.BytesIO(), io.StringIO()
        figure.savefig(picture, format="png", dpi=150, facecolor="white", metadata=_NOTHING)
        figure.savefig(vector, format="svg", transparent=True, metadata=_UNDATED)
    return Drawing(picture.getvalue(), _embedded(vector.getvalue()))


_NOTHING = {"Software": None}
_UNDATED = {"Date": None, "Creator": None, "Format": None, "Type": None}


def _embedded(svg: str) -> str:
    """Return an SVG as a part of a page.

    It has the page's fonts and colours, and no ids of groups.
    """
    text = svg[svg.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.S)
    text = re.sub(r'<(g|text|svg)( [^>]*?)? id="[^"]*"', r"<\1\2", text)
    text = re.sub(r"font(-family)?: ([^;\"]*?)'DejaVu Sans'[^;\"]*", r"font\1: \2sans-serif", text)
    for colour in _DARK:
        text = text.replace(colour, f"var({_variable(colour)},{colour})")
    text = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", text, count=1)
    return re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text, count=1).strip()
