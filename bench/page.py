"""Render a report as one HTML page: no other file, no network; light or dark, wide or narrow."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Iterator, Mapping, Sequence

from bench.document import Block, Bullets, Cell, Chart, Heading, Table, Text
from bench.drawing import STYLE
from bench.verdict import ABSENT, MET, MISSED, OPEN

_STATES = {MISSED: "missed", OPEN: "open", ABSENT: "absent", MET: "met"}
_CSS = """\
:root{color-scheme:light dark;--page:#fff;--card:#f6f8fa;--ink:#1f2328;--faint:#59636e;
--line:#d8dee4;--accent:#0a7e74;--bad:#b3261e;--good:#1a7f37;--doubt:#8a5a00}
@media(prefers-color-scheme:dark){:root{--page:#0f1418;--card:#171d23;--ink:#e6edf3;--faint:#9aa4ae;
--line:#2c343c;--accent:#2fc4b2;--bad:#ff8f85;--good:#5fd07a;--doubt:#e3b341}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);font:16px/1.55 system-ui,sans-serif}
main{max-width:64rem;margin:0 auto;padding:1.5rem 1rem 4rem}
h1{font-size:1.7rem;line-height:1.2;margin:1.5rem 0 .5rem;border-top:4px solid var(--accent);
padding-top:1rem}
h2{font-size:1.2rem;margin:2.2rem 0 .6rem}h3{font-size:1rem;margin:1.4rem 0 .4rem}
p{margin:.5rem 0;max-width:46rem}ul{padding-left:1.1rem}
li{margin:.2rem 0;overflow-wrap:anywhere}.small,ul{font-size:.82rem;color:var(--faint)}
code{font:.9em ui-monospace,monospace;background:var(--card);padding:.05em .3em;border-radius:4px}
.wide{overflow-x:auto;margin:.8rem 0;border:1px solid var(--line);border-radius:8px}
table{border-collapse:collapse;width:100%;font-size:.86rem;font-variant-numeric:tabular-nums}
th,td{padding:.42rem .7rem;text-align:left;vertical-align:top}
tbody tr{border-top:1px solid var(--line)}tbody tr:hover{background:var(--card)}
th{background:var(--card);font-weight:600;white-space:nowrap}
th button{all:unset;cursor:pointer}th button:focus-visible{outline:2px solid var(--accent)}
th[data-d="1"] button::after{content:" \\2191"}th[data-d="-1"] button::after{content:" \\2193"}
td.n{white-space:nowrap}td small{display:block;color:var(--faint);font-size:.85em}
td:first-child,td code{white-space:nowrap}
.state{font-size:.8em;font-weight:600;padding:.1em .55em;border-radius:1em;border:1px solid;
white-space:nowrap}
.missed{color:var(--bad)}.met{color:var(--good)}.open{color:var(--doubt)}.absent{color:var(--faint)}
tr:has(.missed) td:first-child{box-shadow:inset 3px 0 var(--bad)}
td strong{color:var(--bad)}
@media(max-width:40rem){td:not(.n):not(:first-child){min-width:11rem}}
figure{margin:1rem 0;overflow-x:auto}figure svg{display:block;width:100%;min-width:22rem;
max-width:46rem;height:auto}
figcaption{font-size:.86rem;font-weight:600;margin-bottom:.3rem}
details{border:1px solid var(--line);border-radius:8px;margin:.6rem 0;padding:0 1rem}
details[open]{padding-bottom:1rem}summary{cursor:pointer;padding:.6rem 0}
summary h2{display:inline;font-size:1rem;margin:0}
"""
_SORT = """\
for(const h of document.querySelectorAll("th"))h.onclick=()=>{
const b=h.closest("table").tBodies[0],i=h.cellIndex,d=h.dataset.d=="1"?-1:1;
for(const o of h.parentNode.cells)delete o.dataset.d;h.dataset.d=d;
const k=r=>{const c=r.cells[i];return c.dataset.v===undefined?c.textContent:+c.dataset.v};
[...b.rows].sort((p,q)=>{const x=k(p),y=k(q);if(x===""||y==="")return(x==="")-(y==="");
return d*(typeof x==typeof y&&typeof x=="number"?x-y:String(x).localeCompare(String(y)))})
.forEach(r=>b.append(r))}
"""


def page(blocks: Sequence[Block], drawings: Mapping[str, str]) -> str:
    """Return the whole page.

    Args:
        blocks: the report.
        drawings: charts' names to SVG; charts that are missing are left out.
    """
    title = next((b.text for b in blocks if isinstance(b, Heading)), "")
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width,initial-scale=1">',
            f"<title>{html.escape(title)}</title>",
            f"<style>{_CSS}{STYLE if drawings else ''}</style></head><body><main>",
            *_body(blocks, drawings),
            f"</main><script>{_SORT}</script></body></html>\n",
        ]
    )


def _body(blocks: Sequence[Block], drawings: Mapping[str, str]) -> Iterator[str]:
    folded = False
    for block in blocks:
        if isinstance(block, Heading) and block.level < 3:
            yield from ["</details>"] * folded
            folded = block.folded
        if isinstance(block, Heading) and folded and block.level < 3:
            yield f"<details><summary><h2>{_inline(block.text)}</h2></summary>"
        else:
            yield from _html(block, drawings)
    yield from ["</details>"] * folded


def _html(block: Block, drawings: Mapping[str, str]) -> Iterator[str]:
    match block:
        case Heading():
            yield f"<h{block.level}>{_inline(block.text)}</h{block.level}>"
        case Text():
            yield f"<p>{_inline(block.text)}</p>"
        case Bullets():
            yield "<ul>"
            yield from (f"<li>{_inline(item)}</li>" for item in block.items)
            yield "</ul>"
        case Table():
            yield from _table(block)
        case Chart():
            if block.name in drawings:
                title = _inline(block.title)
                yield f'<figure role="img" aria-label="{html.escape(block.title)}">'
                yield f"<figcaption>{title}</figcaption>{drawings[block.name]}</figure>"


def _table(table: Table) -> Iterator[str]:
    yield '<div class="wide"><table><thead><tr>'
    yield from (f"<th><button>{_inline(each)}</button></th>" for each in table.head)
    yield "</tr></thead><tbody>"
    for row in table.rows:
        yield "<tr>" + "".join(_cell(each) for each in row) + "</tr>"
    yield "</tbody></table></div>"


def _cell(cell: str | Cell) -> str:
    if isinstance(cell, Cell):
        value = {math.inf: "Infinity", -math.inf: "-Infinity"}.get(cell.value, f"{cell.value}")
        beside = f" <small>{_inline(cell.beside)}</small>" if cell.beside else ""
        return f'<td class="n" data-v="{value}">{_inline(cell.text)}{beside}</td>'
    if state := _STATES.get(cell.strip("*")):
        return f'<td><span class="state {state}">{_inline(cell.strip("*"))}</span></td>'
    return f"<td>{_inline(cell)}</td>"


def _inline(text: str) -> str:
    """Return escaped text, with `code` and **strong** as elements."""
    escaped = html.escape(text)
    escaped = re.sub(r"`([^`]+)`", r"<code>\1</code>", escaped)
    return re.sub(r"\*\*([^*]+)\*\*", r"<strong>\1</strong>", escaped)
