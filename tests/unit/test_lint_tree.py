"""Each rule of tools/lint_tree.py fails on a file that breaks it and passes on a right one."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "lint_tree.py"
sys.path.append(str(TOOL.parent))
lint_tree = importlib.import_module("lint_tree")

A, B = "({})".format("a"), "({})".format("b")  # spelled out they would be found here, too
FIVE = "I" + "5"
NAMED = f"{FIVE} (never commit a torn snapshot)"


@pytest.fixture
def said(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Check one file of this name and text; returns its lines of output, without the path."""

    def run(name: str, text: str, fails: bool = True) -> list[str]:
        file = tmp_path / name
        file.write_text(text)
        assert lint_tree.main([str(file)]) == fails
        return [line.removeprefix(f"{file}:") for line in capsys.readouterr().out.splitlines()]

    return run


def test_a_right_file_of_each_kind_is_passed_over(said) -> None:
    assert (
        said("right.py", '"""Says what it does."""\n\n\ndef f(a):\n    return f(a)\n', fails=False)
        == []
    )
    assert said("right.c", "int f(int a) {\n  return f(a); /* again */\n}\n", fails=False) == []
    assert said("right.md", f"{NAMED}; `f(b)`. After that {FIVE} alone.\n", fails=False) == []


def test_a_long_file_is_a_warning_that_does_not_fail(said) -> None:
    for name, line in (("long.py", "a = 1\n"), ("long.h", "extern int a;\n")):
        assert said(name, line * 800, fails=False) == []
        assert said(name, line * 801, fails=False) == [
            "1: warning: 801 lines, over 800: is it one idea?"
        ]


@pytest.mark.parametrize("start", ["def f():", "async def f():"])
def test_a_python_function_has_60_lines_at_most(said, start: str) -> None:
    assert said("f.py", f"x = 1\n{start}\n" + "    pass\n" * 59, fails=False) == []
    assert said("f.py", f"x = 1\n{start}\n" + "    pass\n" * 60) == ["2: f has 61 lines, over 60"]


def test_a_c_function_has_80_lines_at_most(said) -> None:
    body = "static int f(void) {{\n{}}}\nint g(void);\n"
    assert said("f.c", body.format("  g();\n" * 78), fails=False) == []
    assert said("f.c", body.format("  g();\n" * 79)) == [
        "1: static int f(void) { 81 lines, over 80"
    ]


@pytest.mark.parametrize("name", ["odd.py", "odd.c", "odd.h"])
def test_sources_are_ascii(said, name: str) -> None:
    mark = "#" if name.endswith(".py") else "//"
    assert said(name, f"{mark} one\n{mark} two \u2013 three\n") == [r"2: not ASCII: '\u2013'"]
    assert said("odd.md", "one \u2013 two\n", fails=False) == []


def test_names_that_say_nothing_are_refused(said) -> None:
    for name in ("utils.py", "byte_util.py", "helpers.py", "file_manager.py"):
        assert said(name, "x = 1\n") == [f"1: {name[:-3]} does not say what is in the file"]
    text = "class {}:\n    pass\n"
    assert said("x.py", text.format("SlotManager")) == [
        "1: SlotManager does not say what the class is"
    ]
    assert said("utility_of_waste.py", text.format("Slots"), fails=False) == []


@pytest.mark.parametrize("letter", [A, B])
def test_instants_have_words_not_letters(said, letter: str) -> None:
    wrong = f"{letter} as an instant's name: say step end, or forward start"
    for text, line in (
        (f'"""Takes {letter}."""\n', 1),
        (f'"""Takes one.\n\nThat is {letter}.\n"""\n', 3),
        (f'x = 1\n"""At {letter}."""\n', 2),
        (f"x = 1  # behind {letter}\n", 1),
        (f"# First\n# {letter}.\n", 2),
        (f'x = "copied at {letter}"\n', 1),
        (f'x = f"{letter} {{1}}"\n', 1),
    ):
        assert said("x.py", text) == [f"{line}: {wrong}"], text
    assert said("x.c", f"/* at\n * {letter} */\n") == [f"2: {wrong}"]
    assert said("x.h", f"int x; // {letter}\n") == [f"1: {wrong}"]
    assert said("x.c", f'char *x = "{letter} harmed";\n') == [f"1: {wrong}"]
    assert said("x.md", f"Once.\n`{letter}` is one.\n") == [f"2: {wrong}"]


@pytest.mark.parametrize("letter", [A, B])
def test_calls_and_parentheses_of_code_are_no_instants(said, letter: str) -> None:
    assert said("x.py", f"x = {letter}\n# f{letter}\n", fails=False) == []
    assert said("x.c", f"int x = {letter}; /* free{letter} */\n", fails=False) == []


def test_an_invariant_is_named_where_a_text_first_cites_it(said) -> None:
    wrong = f"{FIVE} without its name: say {NAMED}"
    for right in (
        f'"""Obeys {NAMED}; so {FIVE} is kept."""\n',
        f"# {FIVE} (never commit a\n# torn snapshot)\nx = 1\n",
        f'"""Obeys {FIVE} (never\n\n    commit a torn snapshot)."""\n',
        f"I{5} = 1\n",
        'x = "<I55 HI5"\n',
    ):
        assert said("x.py", right, fails=False) == [], right
    for text, line in (
        (f'"""Obeys one.\n\nIt is {FIVE}.\n"""\n', 3),
        (f'"""Obeys {FIVE}, I mean {NAMED}."""\n', 1),
        (f"# {FIVE}'s\n", 1),
        (f'x = f"{FIVE} {{1}}"\n', 1),
        (f"x = 1  # {NAMED}\n\n# {FIVE}\n", 3),
        (f"# {FIVE} (old before new)\n", 1),
    ):
        assert said("x.py", text) == [f"{line}: {wrong}"], text
    assert said("x.c", f"/* See\n * {FIVE}. */\n") == [f"2: {wrong}"]
    assert said("x.h", f"/* {FIVE} (never commit a\n * torn snapshot) */\n", fails=False) == []


def test_a_document_names_an_invariant_once(said) -> None:
    assert said("x.md", f"| {FIVE} | never commit a torn snapshot |\n{FIVE}\n", fails=False) == []
    assert said("x.md", f"**{FIVE}** (never commit a torn snapshot)\n", fails=False) == []
    found = said("x.md", f"One.\n({FIVE})\n{NAMED}\nI{6}\n")
    assert [line[:5] for line in found] == [f"2: {FIVE}", f"4: I{6}"]


@pytest.mark.parametrize("name", ["x.py", "x.c", "x.md"])
@pytest.mark.parametrize("place", ["../{}/reference", "{}/design.md"])
def test_what_is_not_in_the_repository_is_not_referred_to(said, name: str, place: str) -> None:
    place = place.format("shared")
    mark = {"x.py": "# ", "x.c": "// ", "x.md": ""}[name]
    (found,) = said(name, f"{mark}Once\n{mark}see {place}.\n")
    assert re.fullmatch(r"2: \S+ is not in this repository", found)
    assert said(name, f"{mark}DESIGN.md, tests/distributed/shared.py\n", fails=False) == []


@pytest.mark.parametrize("word", sorted(lint_tree.FIRST_WORDS))
def test_a_docstring_begins_with_a_subject_or_a_verb(said, word: str) -> None:
    attribute = '    y = 1\n    """{0}."""\n'
    text = '"""{0} it is."""\n\n\nclass X:\n    """\n    {0} it has."""\n\n' + attribute
    wrong = f"the docstring begins with '{word}': begin with a subject or a verb"
    assert said("x.py", text.format(word)) == [f"{line}: {wrong}" for line in (1, 5, 9)]
    assert said("x.py", text.format(f"{word}ever"), fails=False) == []
    assert said("x.py", f'x = 1  # {word}\ny = "{word}"\n', fails=False) == []


def _of_package(check, text: str, path: str = "lightck/x.py") -> list[str]:
    return [str(each) for each in check(lint_tree.Source(path, lint_tree.PYTHON, text))]


@pytest.mark.parametrize(
    "line",
    [
        "each.x = 1",
        "each.x += 1",
        "del each.x",
        "self.y.x = 1",
        "each.y[0].x = 1",
        "each.y, each.x = 1, 2",
        "for each.x in (): pass",
        "made = Y(); made = each; made.x = 1",  # it may be another's
        "made = found(); made.x = 1",
        "made = Y(); made.y.x = 1",
    ],
)
def test_no_attribute_of_another_object_is_set(line: str) -> None:
    text = f"class Z:\n    def f(self, each):\n        {line}\n"
    found = _of_package(lint_tree.foreign_attributes, text)
    assert found and all(each.startswith("lightck/x.py:3: ") for each in found)
    assert found[-1].endswith(".x is set after the object is made: give it to the constructor")
    assert _of_package(lint_tree.foreign_attributes, text, "tests/x.py") == []


@pytest.mark.parametrize(
    "line",
    [
        "self.x = 1",
        "cls.x = 1",
        "made = Y(); made.x = 1",
        "made = cls(); made.x = 1",
        "made: Y = replace(each); made.x = 1",
        "made = ffi.new('y *'); made.x = 1",
        "each.declared = 1",
        "each.on_self = 1",
        "each['x'] = 1",
        "each.x(1)",
    ],
)
def test_what_a_function_makes_and_a_file_declares_may_be_set(line: str) -> None:
    text = f"class Z:\n    declared: int\n    def f(self, cls, each):\n        {line}\n"
    text += "    def __init__(self):\n        self.on_self = 1\n"
    assert _of_package(lint_tree.foreign_attributes, text) == []


def test_exceptions_are_of_one_file_and_attribute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(lint_tree.FOREIGN, "lightck/x.py", ("grad y", "torch's"))
    text = "def f(p):\n    p.grad = p.y = 1\n    p.z = 1\n"
    assert [each[:16] for each in _of_package(lint_tree.foreign_attributes, text)] == [
        "lightck/x.py:3: "
    ]
    assert len(_of_package(lint_tree.foreign_attributes, text, "lightck/y.py")) == 3


def test_a_field_is_no_lambda_until_it_is_set() -> None:
    text = "class X:\n    f: Callable[[], int] = lambda: 0\n    g: list = field(default=None)\n"
    said = "f is a lambda until it is set: give it to the constructor"
    assert _of_package(lint_tree.lambda_fields, text) == [f"lightck/x.py:2: {said}"]


def test_there_is_one_class_of_one_name() -> None:
    def found(*files: tuple[str, str]) -> list[str]:
        sources = [lint_tree.Source(path, lint_tree.PYTHON, text) for path, text in files]
        return [str(each) for each in lint_tree.names_of_classes(sources)]

    one, other = "class X: ...\n", "\nclass Y: ...\nclass X: ...\n"
    said = "a class X is in lightck/a.py:1, too: one class of one name"
    assert found(("lightck/a.py", one), ("lightck/b.py", other)) == [f"lightck/b.py:3: {said}"]
    assert found(("lightck/a.py", one), ("tests/b.py", other)) == []


def test_what_is_no_python_is_said_so(said) -> None:
    assert said("x.py", "x = 1\ndef f(:\n") == ["2: no Python: invalid syntax"]


def test_the_command_says_where_and_exits_1(tmp_path: Path) -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, TOOL, *arguments], capture_output=True, text=True)

    file = tmp_path / "x.py"
    file.write_text(f"# {A}\n")
    done = run(str(file))
    assert done.returncode == 1
    assert done.stdout.startswith(f"{file}:1: {A} as an instant's name")
    shown = run("--help").stdout
    for rule in lint_tree.RULES:
        assert rule.check.__doc__ in shown
    assert run(str(tmp_path / "x.txt")).returncode == 2
