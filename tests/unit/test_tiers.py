"""The tiers name tests and files that exist, and `make test` keeps a part of each."""

from __future__ import annotations

from pathlib import Path

import pytest

import tiers

TESTS = Path(__file__).parents[1]
EVERY = [(file, name, kept) for file, names in tiers.KEPT.items() for name, kept in names.items()]


@pytest.mark.parametrize(("file", "name", "kept"), EVERY, ids=[name for _, name, _ in EVERY])
def test_what_is_left_to_the_full_tests_is_a_test(file: str, name: str, kept: int) -> None:
    assert f"def {name}(" in (TESTS / file).read_text()
    assert kept >= 0


@pytest.mark.parametrize("path", tiers.CHECKED)
def test_what_is_checked_first_is_there(path: str) -> None:
    assert (TESTS / path).exists()


@pytest.mark.parametrize("file", tiers.KEPT)
def test_no_file_is_left_to_the_full_tests_as_a_whole(file: str) -> None:
    text = (TESTS / file).read_text()
    names = [
        line[4:].partition("(")[0] for line in text.splitlines() if line.startswith("def test")
    ]
    left = {name for name, kept in tiers.KEPT[file].items() if kept == 0}
    assert not set(names) <= left or file == "e2e/test_readme.py"
