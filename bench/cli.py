"""The command line of `python -m bench`, or `lightck-bench`: list, run, report, compare, README."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench import (
    charts,
    compare,
    definition,
    document,
    engines,
    execute,
    launch,
    page,
    picture,
    readme,
    record,
    report,
    verdict,
)
from bench.document import Block
from bench.drawing import Drawing
from bench.errors import BenchError, Unavailable
from bench.place import BUILD

_EXAMPLES = """\
examples:
  python -m bench list                          what there is
  python -m bench run                           the essential ones, minutes
  python -m bench run --full                    all of them, hours
  python -m bench run stress                    one definition
  python -m bench run stress --engines lightck,torch.save
  python -m bench run --full --tiny             all of them on a toy: does everything work?
  python -m bench report -o report.md           with report.html, from the newest results
  python -m bench report build/bench/stress.parquet -o stress.md
  python -m bench compare main                  micro-benchmarks of that commit and of this tree
  python -m bench readme --take                 store the results, render README and docs
  python -m bench picture                       README's picture, from a run of half a minute

Results go to build/bench/<definition>.parquet, with machine, versions, command and commit. Numbers
count only from a machine on which nothing else runs. How: bench/METHODOLOGY.md.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return the exit status.

    It is 0, 1 (a target is missed, with --check) or 2 (an error).
    """
    arguments = _parser().parse_args(argv)
    try:
        status: int = arguments.run(arguments)
        sys.stdout.flush()
    except BenchError as error:
        print(f"bench: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("bench: interrupted, nothing of what was running was kept", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader has closed our output, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return status


def _program() -> str:
    """Return the program's name as it was called."""
    name = Path(sys.argv[0]).name
    return name if name == "lightck-bench" else "python -m bench"


def _parser() -> argparse.ArgumentParser:
    shape = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog=_program(),
        description="Measure lightck and what people use instead, honestly.",
        epilog=_EXAMPLES,
        formatter_class=shape,
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    each = commands.add_parser("list", help="definitions, engines and targets")
    each.set_defaults(run=_list)
    each = commands.add_parser(
        "run", help="run definitions and store results", epilog=_EXAMPLES, formatter_class=shape
    )
    each.add_argument("definitions", nargs="*", help="names or TOML files; none: essential")
    each.add_argument("--full", action="store_true", help="all definitions there are")
    each.add_argument("--tiny", action="store_true", help="toy model, two samples: a smoke test")
    each.add_argument("--engines", help="labels separated by commas; the others are left out")
    each.add_argument("--out", type=Path, default=BUILD, help="folder for results (%(default)s)")
    each.set_defaults(run=_run)
    each = commands.add_parser(
        "report", help="render Markdown, charts and a page", epilog=_EXAMPLES, formatter_class=shape
    )
    each.add_argument(
        "files", nargs="*", type=Path, help="result files, or folders of them; none: build/bench"
    )
    each.add_argument("-o", "--output", type=Path, help="Markdown file (default: stdout)")
    each.add_argument("--no-charts", action="store_true", help="texts and tables only")
    each.add_argument("--check", action="store_true", help="status 1 unless every target is met")
    each.set_defaults(run=_report)
    each = commands.add_parser(
        "compare", help="micro-benchmarks of another commit and of this tree"
    )
    each.add_argument("base", help="the commit, as git names it")
    each.add_argument("--rounds", type=int, default=5, help="of both in turn (%(default)s)")
    each.add_argument("-k", dest="only", default="", help="choose benchmarks, as pytest's -k")
    each.set_defaults(run=_compare)
    each = commands.add_parser(
        "readme",
        help="render what README and docs say from the stored results",
    )
    each.add_argument("--take", action="store_true", help="first store the results of build/bench")
    each.add_argument("--check", action="store_true", help="change nothing; status 1 if stale")
    each.set_defaults(run=_readme)
    each = commands.add_parser("picture", help="trace GPT-2 small, draw README's picture")
    each.add_argument("-o", "--output", type=Path, default=picture.PICTURE, help="%(default)s")
    each.set_defaults(run=_picture)
    return parser


def _list(arguments: argparse.Namespace) -> int:
    for name in definition.names():
        loaded = definition.load(name)
        essential = ", essential" * loaded.essential
        print(f"{name} ({_minutes([loaded])}{essential}): {loaded.about}")
        for contender in loaded.contenders:
            print(f"    {contender.label} ({contender.engine}, {contender.medium})")
        for target in loaded.targets:
            print(f"    target: {target.row}")
    print("\nengines:")
    for name, kind in engines.KINDS.items():
        print(f"    {name}: {kind.about}")
        if why := engines.missing(name):
            print(f"        cannot run here: {why}")
    return 0


def _run(arguments: argparse.Namespace) -> int:
    chosen = [definition.load(name) for name in _chosen(arguments)]
    if arguments.engines:
        chosen = [_only(each, arguments.engines) for each in chosen]
    if arguments.tiny:
        chosen = [definition.tiny(each) for each in chosen]
    _require_writable(arguments.out)
    # What starts a process anew would compile all of lightck each time, unlike users' processes.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    if not (arguments.tiny or arguments.engines):
        print(f"{_minutes(chosen)} on two quiet cores", file=sys.stderr)
    for each in chosen:
        try:
            with _progress(each.name) as tell:
                result = execute.run(
                    each, _command(arguments), launch.in_processes_of_their_own, tell
                )
        except Unavailable as why:
            print(f"SKIPPED: {each.name}: {why}", file=sys.stderr)
            continue
        result.about["tiny"] = arguments.tiny
        path = arguments.out / f"{each.name}.parquet"
        record.write(result, path)
        for label, reason in result.about["absent"].items():
            print(f"{each.name}: {label} cannot run here: {reason}", file=sys.stderr)
        print(path)
        for found in verdict.verdicts([result]):
            print(f"    {found.state}: {found.target.row}")
    return 0


def _minutes(chosen: Sequence[definition.Definition]) -> str:
    """Return how long the definitions take together, as text."""
    unknown = " and more" * any(not each.minutes for each in chosen)
    return f"about {sum(each.minutes for each in chosen):.0f} minutes{unknown}"


def _require_writable(folder: Path) -> None:
    """Refuse a folder that cannot be written to, before hours of measuring."""
    there = next(each for each in (folder, *folder.absolute().parents) if each.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise BenchError(f"--out {folder}: nothing was run: {there} is no folder to write to")


def _chosen(arguments: argparse.Namespace) -> list[str]:
    names: list[str] = arguments.definitions
    if names and arguments.full:
        raise BenchError(
            f"--full runs all definitions, not {' '.join(names)}: give one or the other"
        )
    return names or (definition.names() if arguments.full else definition.essential())


def _only(whole: definition.Definition, labels: str) -> definition.Definition:
    """Return the definition with some of its engines; targets of the others stay, as not run.

    `labels` are separated by commas, and may have commas in them ("1,000 tensors").
    """
    known = [contender.label for contender in whole.contenders]
    chosen, left = [], f"{labels},"
    while left:
        found = max((label for label in known if left.startswith(f"{label},")), key=len, default="")
        if not found:
            odd = left.partition(",")[0]
            raise BenchError(f"{whole.name} has no engine {odd!r}; it has {', '.join(known)}")
        chosen.append(found)
        left = left[len(found) + 1 :]
    kept = tuple(contender for contender in whole.contenders if contender.label in chosen)
    return replace(whole, contenders=kept)


def _command(arguments: argparse.Namespace) -> str:
    words = ["python", "-m", "bench", "run", *arguments.definitions]
    words += ["--full"] if arguments.full else []
    words += ["--tiny"] if arguments.tiny else []
    words += ["--engines", arguments.engines] if arguments.engines else []
    return shlex.join(words)


@contextmanager
def _progress(name: str) -> Iterator[Callable[[str], None]]:
    """Yield a function that shows progress.

    It changes one line on a terminal with tqdm, else it prints a line per engine.
    """
    bar: Any = None
    if sys.stderr.isatty():
        try:
            from tqdm import tqdm
        except ModuleNotFoundError as missing:
            if missing.name != "tqdm":
                raise  # tqdm is installed but broken; if it is missing there is no bar
        else:
            bar = tqdm(desc=name, bar_format="{desc} {elapsed} {postfix}", leave=False)
    last = ""

    def tell(text: str) -> None:
        nonlocal last
        engine = text.partition(":")[0]
        if bar is not None:
            bar.set_postfix_str(text)
        elif engine != last:
            print(f"{name}: {engine}", file=sys.stderr)
        last = engine

    try:
        yield tell
    finally:
        if bar is not None:
            bar.close()


def _report(arguments: argparse.Namespace) -> int:
    results = [record.read(file) for file in _files(arguments.files) or _results()]
    output: Path | None = arguments.output
    if output is None:
        print(report.render(results, {}), end="")
    else:
        blocks = report.document(results)
        try:
            _publish(output, blocks, {} if arguments.no_charts else _charts(results))
        except OSError as error:
            raise BenchError(f"{output}: cannot be written: {error}") from error
    missed = any(found.state != verdict.MET for found in verdict.verdicts(results))
    return 1 if arguments.check and missed else 0


def _publish(output: Path, blocks: list[Block], drawings: Mapping[str, Drawing]) -> None:
    """Write Markdown, the page and the charts side by side."""
    output.parent.mkdir(parents=True, exist_ok=True)
    files = {name: f"{output.stem}-{name}.png" for name in drawings}
    for name, drawing in drawings.items():
        output.with_name(files[name]).write_bytes(drawing.png)
        output.with_name(files[name]).with_suffix(".svg").write_text(drawing.alone)
    output.write_text(document.markdown(blocks, files))
    shown = output.with_suffix(".html")
    shown.write_text(page.page(blocks, {name: each.svg for name, each in drawings.items()}))
    print(f"{output}\n{shown}")


def _compare(arguments: argparse.Namespace) -> int:
    if arguments.rounds < 1:
        raise BenchError(f"--rounds {arguments.rounds}: must be 1 or more")

    def tell(text: str) -> None:
        print(text, file=sys.stderr)

    print(compare.compare(arguments.base, arguments.rounds, arguments.only, tell))
    return 0


def _readme(arguments: argparse.Namespace) -> int:
    if arguments.take:
        for file in readme.take(_results()):
            print(file)
    wanted = readme.wanted(readme.stored())
    stale = {file: text for file, text in wanted.items() if readme.current(file) != text}
    if arguments.check:
        return int(bool(stale))
    readme.write(stale)
    return 0


def _picture(arguments: argparse.Namespace) -> int:
    picture.draw(arguments.output)
    print(arguments.output)
    return 0


def _results() -> list[Path]:
    return _in(BUILD)


def _files(given: Sequence[Path]) -> list[Path]:
    """Return the files that are meant; a folder stands for all results in it."""
    return [file for each in given for file in (_in(each) if each.is_dir() else [each])]


def _in(folder: Path) -> list[Path]:
    files = sorted(folder.glob("*.parquet"))
    if not files:
        raise BenchError(f"no results in {folder}: run `python -m bench run` first")
    return files


def _charts(results: list[record.Result]) -> dict[str, Drawing]:
    """Draw the charts that can be drawn, by name; none without matplotlib."""
    try:
        return charts.drawn(results)
    except ImportError as error:
        print(f"SKIPPED: charts ({error}): pip install '.[bench]'", file=sys.stderr)
        return {}
