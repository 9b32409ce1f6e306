"""Say where results were measured: machines, with letters where there are several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bench.record import Result


def machine(result: Result) -> str:
    """Describe what a result was measured with; rows of two of them are not to be compared."""
    versions = result.about["versions"]
    return f"{host(result)}; Python {versions.get('python')}, torch {versions.get('torch')}"


def host(result: Result) -> str:
    """Describe the machine of a result, without the software that ran on it."""
    found = result.about["machine"]
    memory = f"{found['memory_bytes'] / 2**30:.0f} GiB"
    return f"{found['cpu']}, {found['cores']} cores, {memory}, Linux {found['kernel']}"


def letters(results: Sequence[Result]) -> Mapping[str, str]:
    """Return a letter for every machine, in the order of the results.

    The letter is empty if there is only one machine.
    """
    found = list(dict.fromkeys(map(machine, results)))
    if len(found) < 2:
        return dict.fromkeys(found, "")
    return {each: _letter(i) for i, each in enumerate(found)}


def _letter(number: int) -> str:
    return (_letter(number // 26 - 1) if number >= 26 else "") + chr(ord("A") + number % 26)


def mark(result: Result, results: Sequence[Result]) -> str:
    """Return what follows a result's name in a table of several results: ` (A)`, or nothing."""
    letter = letters(results)[machine(result)]
    return f" ({letter})" if letter else ""


def origins(results: Sequence[Result]) -> list[str]:
    """List the machines with versions and commits, a line per machine."""
    where: dict[str, dict[str, list[str]]] = {}
    for result in results:
        about = result.about
        commit = f"commit {about['commit']}, {about['started'][:10]}"
        names = where.setdefault(machine(result), {}).setdefault(commit, [])
        names.append(f"`{about['definition']['name']}`")
    known = letters(results)
    lines = []
    for each, commits in where.items():
        told = "; ".join(f"{', '.join(names)} ({commit})" for commit, names in commits.items())
        lines.append(f"{f'**{known[each]}**: ' if known[each] else ''}{each}: {told}")
    return lines
