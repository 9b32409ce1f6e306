"""Say where the sources break a rule of this project that no other tool knows.

    python tools/lint_tree.py          check the tree; `make lint` does
    python tools/lint_tree.py FILE...  check these files only

Prints `path:line: what is wrong` and exits 1 if there is anything. A warning alone exits 0. A rule
is a function from a source to findings and a line in `RULES`.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TREE = (
    *(f"{folder}/**/*.py" for folder in ("lightck", "bench", "tests", "tools")),
    *(f"{folder}/**/*.[ch]" for folder in ("native", "bench", "tests")),
    *("*.md", "docs/**/*.md", "bench/*.md"),
)

PYTHON, C, MARKDOWN = "python", "c", "markdown"
KINDS = {".py": PYTHON, ".c": C, ".h": C, ".md": MARKDOWN}

FILE_LINES = 800
PYTHON_FUNCTION_LINES = 60
C_FUNCTION_LINES = 80

_NAMES = (
    "when a step is complete",
    "the two instants",
    "window and fence",
    "captured before the forward",
    "never commit a torn snapshot",
    "old before new",
    "durable, atomic, visible",
    "native owns byte order and durability",
    "the training thread waits only at the fence",
    "the boundary journal",
)
INVARIANTS = {f"I{number}": name for number, name in enumerate(_NAMES, 1)}
FIRST_WORDS = {"Of", "What", "That", "Likewise", "As", "Who", "Which", "Whether"}

_MAKERS = {"cls", "copy", "deepcopy", "replace", "__new__", "new", "cast"}
"""Functions, beside classes, whose result belongs to the caller; the last two are cffi's."""

FOREIGN: dict[str, tuple[str, str]] = {
    "lightck/__init__.py": ("__class__", "the module's own class"),
    "lightck/cli/chaos/command.py": ("usage", "argparse's"),
    "lightck/cli/demo/train.py": ("weight", "torch's: the head is tied"),
    "lightck/cli/run.py": (
        "prog description epilog formatter_class training_script training_script_args module"
        " LocalElasticAgent",
        "argparse's; torchrun's agent",
    ),
    "lightck/data/lookahead.py": ("generator iteration", "torch's sampler; Accelerate's loader"),
    "lightck/data/sampler.py": ("iteration", "Accelerate's loader"),
    "lightck/distributed/ddp_buckets.py": ("_has_rebuilt_buckets", "DDP's"),
    "lightck/distributed/ddp_communication.py": ("__doc__", "a function's"),
    "lightck/failure/fault_injector.py": ("open", "faults on purpose replace it"),
    "lightck/failure/fault_plan.py": ("read", "faults on purpose replace it"),
    "lightck/failure/signals.py": ("mask", "of this thread"),
    "lightck/failure/triggers.py": ("excepthook", "Python's"),
    "lightck/inplace/agent.py": ("__class__ agent proc id", "of torch elastic's workers"),
    "lightck/inplace/worker.py": (
        "is_lightck _new_process_group_helper register_comm_hook __init__ argv",
        "torch's maker of groups, DDP's hooks, its join; the script's arguments",
    ),
    "lightck/integrations/accelerate.py": (
        "initial_seed generator sampler rng_types",
        "a loader's, and its samplers'",
    ),
    "lightck/integrations/lightning.py": (
        "_restarting restarting reset should_stop _last_train_dl_reload_epoch _first_loop_iter"
        " _current_fx _progress_bar_metrics _logged_metrics _callback_metrics _update_count"
        " _computed _forward_cache",
        "of Lightning's loops, and of torchmetrics' metrics",
    ),
    "lightck/loop/hooks.py": ("__name__ __doc__", "a wrapper's"),
    "lightck/loop/state_prediction.py": ("grad", "torch's"),
    "lightck/region/backends/libpmemobj.py": ("made", "a native structure's"),
    "lightck/region/stats_page.py": (
        "process_start boot_id began_ns began_step cause ns",
        "a native structure's",
    ),
    "lightck/state/data_loaders.py": (
        "top dl_state_dict __name__ __doc__",
        "of this thread; torchdata's; a wrapper's",
    ),
    "lightck/state/extras.py": ("state", "NumPy's bit generator"),
}
"""Assignments to other objects' attributes that are right: by file, the attributes and whose."""

_NAME = re.compile(r"utils?\b|helper|manager", re.I)
_LETTER = re.compile(r"(?<![\w\])])\([ab]\)")  # not f(a), which is a call
_INVARIANT = re.compile(r"\bI(?:10|[1-9])\b")
_ELSEWHERE = re.compile(r"\.\./shared\b|\bshared/design\.md")
_C_WORDS = re.compile(r"""/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'""", re.S)
_GAP = r"\s+(?:[#*]+\s+)?"  # a line break inside a comment has the comment's mark behind it


# ---- what is read ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Finding:
    """One place where a rule is broken or, as a `warning`, should be looked at."""

    path: str
    line: int
    text: str
    warning: bool = False

    def __str__(self) -> str:
        """Give the line that an editor can jump to."""
        return f"{self.path}:{self.line}: {'warning: ' if self.warning else ''}{self.text}"


@dataclass(frozen=True)
class Block:
    """Words for people that belong together: a comment of one or more lines, a string, a page."""

    line: int
    text: str

    def line_of(self, position: int) -> int:
        """Return the number of the line in the file that this position is on."""
        return self.line + self.text.count("\n", 0, position)


@dataclass(frozen=True)
class Source:
    """One file, taken apart as its kind needs it."""

    path: str
    kind: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        """Parse Python."""
        return ast.parse(self.text)

    @cached_property
    def docstrings(self) -> list[ast.Constant]:
        """Collect what stands as a statement of its own: docstrings, those of attributes too."""
        return [
            node.value
            for node in ast.walk(self.tree)
            if isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ]

    @cached_property
    def words(self) -> list[Block]:
        """Collect what is for people to read: comments and strings, or all of a document."""
        if self.kind == MARKDOWN:
            return [Block(1, self.text)]
        if self.kind == C:
            found = _C_WORDS.finditer(self.text)
            return [Block(self.text.count("\n", 0, m.start()) + 1, m.group()) for m in found]
        return [*_python_comments(self.text), *_python_strings(self.tree)]

    def finding(self, line: int, text: str, *, warning: bool = False) -> Finding:
        """Make a finding in this file."""
        return Finding(self.path, line, text, warning)


def _python_comments(text: str) -> Iterator[Block]:
    """Yield comments; lines that follow each other at the same column are one."""
    begin = column = 0
    lines: list[str] = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type != tokenize.COMMENT:
            continue
        if lines and token.start == (begin + len(lines), column):
            lines.append(token.string)
            continue
        if lines:
            yield Block(begin, "\n".join(lines))
        (begin, column), lines = token.start, [token.string]
    if lines:
        yield Block(begin, "\n".join(lines))


def _python_strings(tree: ast.Module) -> Iterator[Block]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield Block(node.lineno, node.value)


# ---- the rules ---------------------------------------------------------------------------------


def file_length(source: Source) -> Iterator[Finding]:
    """Warn about a file that is likely to hold more than one idea."""
    lines = source.text.count("\n")
    if lines > FILE_LINES:
        yield source.finding(1, f"{lines} lines, over {FILE_LINES}: is it one idea?", warning=True)


def python_function_length(source: Source) -> Iterator[Finding]:
    """Refuse a function that does not fit on a screen, in tests too."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > PYTHON_FUNCTION_LINES:
                said = f"{node.name} has {lines} lines, over {PYTHON_FUNCTION_LINES}"
                yield source.finding(node.lineno, said)


def c_function_length(source: Source) -> Iterator[Finding]:
    """Refuse a C function over its limit."""
    start = 0
    signature = ""
    for number, line in enumerate(source.text.splitlines(), 1):
        # clang-format puts a function's signature and its closing brace at the left margin.
        if re.match(r"[A-Za-z_].*\(", line) and not line.endswith(";"):
            start, signature = number, line
        if line == "}" and start:
            lines = number - start + 1
            if lines > C_FUNCTION_LINES:
                said = f"{signature} {lines} lines, over {C_FUNCTION_LINES}"
                yield source.finding(start, said)
            start = 0


def ascii_only(source: Source) -> Iterator[Finding]:
    """Refuse characters that not every terminal shows."""
    for number, line in enumerate(source.text.split("\n"), 1):
        odd = sorted({c for c in line if not c.isascii()})
        if odd:
            yield source.finding(number, f"not ASCII: {', '.join(map(ascii, odd))}")


def banned_names(source: Source) -> Iterator[Finding]:
    """Refuse names of files and classes that do not say what is inside."""
    stem = Path(source.path).stem
    if _NAME.search(stem):
        yield source.finding(1, f"{stem} does not say what is in the file")
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ClassDef) and _NAME.search(node.name):
            yield source.finding(node.lineno, f"{node.name} does not say what the class is")


def lettered_instants(source: Source) -> Iterator[Finding]:
    """Refuse letters as names of the two instants, which have words."""
    for block in source.words:
        for found in _LETTER.finditer(block.text):
            said = f"{found.group()} as an instant's name: say step end, or forward start"
            yield source.finding(block.line_of(found.start()), said)


def bare_invariants(source: Source) -> Iterator[Finding]:
    """Refuse an invariant's number without its name, where a text mentions it first."""
    for block in source.words:
        known: set[str] = set()
        for found in _INVARIANT.finditer(block.text):
            number, line = found.group(), block.line_of(found.start())
            if number in known:
                continue
            known.add(number)
            if not _named(number).match(block.text, found.end()):
                named = f"{number} ({INVARIANTS[number]})"
                yield source.finding(line, f"{number} without its name: say {named}")


def _named(number: str) -> re.Pattern[str]:
    words = _GAP.join(map(re.escape, INVARIANTS[number].split()))
    cell = r"[ ]*\|[ ]*"  # in a table
    return re.compile(rf"[*`]*(?:{_GAP}\(|{cell}){words}\b", re.I)


def references_elsewhere(source: Source) -> Iterator[Finding]:
    """Refuse references to what is not in the repository."""
    for number, line in enumerate(source.text.split("\n"), 1):
        found = _ELSEWHERE.search(line)
        if found:
            yield source.finding(number, f"{found.group()} is not in this repository")


def first_words(source: Source) -> Iterator[Finding]:
    """Refuse a docstring whose first word makes it a fragment of a sentence."""
    for docstring in source.docstrings:
        said = re.match(r"\s*(\w+)", str(docstring.value))
        if said and said.group(1) in FIRST_WORDS:
            text = f"the docstring begins with {said.group(1)!r}: begin with a subject or a verb"
            yield source.finding(docstring.lineno, text)


def foreign_attributes(source: Source) -> Iterator[Finding]:
    """Refuse to set another object's attribute after the object is made.

    A function may set the attributes of what it makes itself, and a file those that its own classes
    declare, as of records that only its classes use.
    """
    if not source.path.startswith("lightck/"):
        return
    foreign, _ = FOREIGN.get(source.path, ("", ""))
    right = set(foreign.split())
    declared = set(_declared(source.tree))
    for scope in ast.walk(source.tree):
        if isinstance(scope, ast.Module | ast.FunctionDef | ast.AsyncFunctionDef):
            made = _made(scope)
            for node in _within(scope):
                if not isinstance(node, ast.Attribute) or isinstance(node.ctx, ast.Load):
                    continue
                if node.attr not in right | declared and not _is_own(node.value, made):
                    said = f"{ast.unparse(node)} is set after the object is made"
                    yield source.finding(node.lineno, f"{said}: give it to the constructor")


def _declared(tree: ast.Module) -> Iterator[str]:
    """Yield the attributes that the classes of a file declare, in their bodies or on `self`."""
    for each in ast.walk(tree):
        if isinstance(each, ast.ClassDef):
            fields = (node.target for node in each.body if isinstance(node, ast.AnnAssign))
            yield from (field.id for field in fields if isinstance(field, ast.Name))
            for node in ast.walk(each):
                if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                    if isinstance(node.value, ast.Name) and node.value.id == "self":
                        yield node.attr


def _within(scope: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a function or module, without those of functions inside it."""
    for node in ast.iter_child_nodes(scope):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node
            yield from _within(node)


def _made(scope: ast.AST) -> set[str]:
    """Return the names that a scope binds to objects it makes, and to nothing else."""
    bound, made = Counter[str](), Counter[str]()
    for node in _within(scope):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            bound[node.id] += 1
        elif isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Call):
            maker = ast.unparse(node.value.func).rpartition(".")[2]
            if maker in _MAKERS or maker.lstrip("_")[:1].isupper():
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                made.update(each.id for each in targets if isinstance(each, ast.Name))
    return {name for name, times in made.items() if times == bound[name]}


def _is_own(value: ast.expr, made: set[str]) -> bool:
    return isinstance(value, ast.Name) and value.id in {"self", "cls", *made}


def lambda_fields(source: Source) -> Iterator[Finding]:
    """Refuse a field for a function that is a lambda until somebody sets it."""
    if not source.path.startswith("lightck/"):
        return
    for node in ast.walk(source.tree):
        if (
            isinstance(node, ast.AnnAssign)
            and isinstance(node.value, ast.Lambda)
            and isinstance(node.target, ast.Name)
        ):
            said = f"{node.target.id} is a lambda until it is set: give it to the constructor"
            yield source.finding(node.lineno, said)


def names_of_classes(sources: Iterable[Source]) -> Iterator[Finding]:
    """Refuse a second class of one name in the package; each framework has a face of its own."""
    first: dict[str, str] = {}
    for source in sources:
        if source.kind != PYTHON or not source.path.startswith("lightck/"):
            continue
        if source.path.startswith("lightck/integrations/"):
            continue
        for node in ast.walk(source.tree):
            if isinstance(node, ast.ClassDef):
                there = first.setdefault(node.name, f"{source.path}:{node.lineno}")
                if there != f"{source.path}:{node.lineno}":
                    said = f"a class {node.name} is in {there}, too: one class of one name"
                    yield source.finding(node.lineno, said)


@dataclass(frozen=True)
class Rule:
    """A check, and the kinds of files that it is for."""

    check: Callable[[Source], Iterable[Finding]]
    kinds: frozenset[str]


_CODE = frozenset({PYTHON, C})
_TEXT = frozenset({PYTHON, C, MARKDOWN})
RULES = (
    Rule(file_length, _CODE),
    Rule(python_function_length, frozenset({PYTHON})),
    Rule(c_function_length, frozenset({C})),
    Rule(ascii_only, _CODE),
    Rule(banned_names, frozenset({PYTHON})),
    Rule(lettered_instants, _TEXT),
    Rule(bare_invariants, _TEXT),
    Rule(references_elsewhere, _TEXT),
    Rule(first_words, frozenset({PYTHON})),
    Rule(foreign_attributes, frozenset({PYTHON})),
    Rule(lambda_fields, frozenset({PYTHON})),
)


# ---- the command -------------------------------------------------------------------------------


def read(file: Path) -> Source:
    """Read a file whose kind is known by its name."""
    path = file.resolve()
    shown = path.relative_to(ROOT) if path.is_relative_to(ROOT) else file
    return Source(str(shown), KINDS[file.suffix], file.read_text("utf-8", "replace"))


def check(source: Source) -> list[Finding]:
    """Return what is wrong with one file, by line."""
    found: list[Finding] = []
    try:
        for rule in RULES:
            if source.kind in rule.kinds:
                found += rule.check(source)
    except SyntaxError as error:
        found.append(source.finding(error.lineno or 1, f"no Python: {error.msg}"))
    return sorted(found, key=lambda finding: finding.line)


def tree() -> list[Path]:
    """List every file that the rules are about."""
    return sorted({file for pattern in TREE for file in ROOT.glob(pattern)})


def main(arguments: Sequence[str] | None = None) -> int:
    """Check, print what is found and return the exit status."""
    parser = argparse.ArgumentParser(
        description="Say where the sources break a rule of this project that no other tool knows.",
        epilog="rules:\n" + "\n".join(f"  {rule.check.__doc__}" for rule in RULES),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("files", nargs="*", type=Path, help="default: the whole tree")
    chosen = parser.parse_args(arguments)
    for file in chosen.files:
        if file.suffix not in KINDS:
            parser.error(f"{file}: no rule for this kind of file")
    sources = [read(file) for file in chosen.files or tree()]
    found = [*chain.from_iterable(map(check, sources)), *names_of_classes(sources)]
    for each in found:
        print(each)
    return int(any(not each.warning for each in found))


if __name__ == "__main__":
    sys.exit(main())
