from __future__ import annotations

import pickle
import re
from pathlib import Path

import pytest

from lightck import errors

_HEADER = Path(__file__).parents[2] / "native/include/lightck.h"
_CLASSES = [
    value
    for value in vars(errors).values()
    if isinstance(value, type) and issubclass(value, errors.LightckError)
]
_EXPECTED = {
    "LCK_E_INVALID": errors.RegionError,
    "LCK_E_IO": errors.RegionIOError,
    "LCK_E_PREVIOUS": errors.PreviousPersistError,
    "LCK_E_FORMAT": errors.RegionFormatError,
    "LCK_E_CORRUPT": errors.CorruptSnapshotError,
    "LCK_E_EMPTY": errors.NoSnapshotError,
    "LCK_E_BUSY": errors.RegionBusyError,
    "LCK_E_LEASED": errors.RegionBusyError,
    "LCK_E_FULL": errors.RegionFullError,
    "LCK_E_TIMEOUT": errors.WaitTimeoutError,
    "LCK_E_NOMEM": errors.RegionError,
    "LCK_E_FORKED": errors.RegionError,
    "LCK_E_MISMATCH": errors.TornSnapshotError,
    "LCK_E_STATE": errors.RegionError,
}


def _header_codes() -> dict[str, int]:
    return {
        name: int(code)
        for name, code in re.findall(r"^\s*(LCK_E_\w+) = (-\d+),", _HEADER.read_text(), re.M)
    }


def test_every_native_code_has_an_expected_class() -> None:
    assert _header_codes().keys() == _EXPECTED.keys()


@pytest.mark.parametrize("name", _EXPECTED)
def test_native_code_becomes_its_class(name: str) -> None:
    code = _header_codes()[name]
    error = errors.from_native(code, "4096 bytes short", context="open region /x")
    assert type(error) is _EXPECTED[name]
    assert error.code == code
    assert "open region /x" in str(error)
    assert "4096 bytes short" in str(error)


def test_unknown_native_code_falls_back_to_the_parent() -> None:
    error = errors.from_native(-99, "", context="open region /x")
    assert type(error) is errors.RegionError
    assert "-99" in str(error)


@pytest.mark.parametrize("kind", _CLASSES, ids=lambda kind: kind.__name__)
def test_errors_survive_pickling(kind: type[errors.LightckError]) -> None:
    error = kind("slot 1: 3 != 4")
    error.code = -5
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind
    assert str(copy) == str(error)
    assert copy.code == -5


def test_attributes_survive_pickling() -> None:
    mismatch = errors.RestoreMismatchError(
        "step 3", missing=["a"], unexpected=("b",), different={"c": "saved [4], live [5]"}
    )
    copy = pickle.loads(pickle.dumps(mismatch))
    assert (copy.missing, copy.unexpected) == (("a",), ("b",))
    assert copy.different == {"c": "saved [4], live [5]"}
    state = pickle.loads(pickle.dumps(errors.StateError("no", path="extras.x[2]")))
    assert state.path == "extras.x[2]"
    torn = pickle.loads(pickle.dumps(errors.TornSnapshotError("no", names=["w"])))
    assert torn.names == ("w",)
    differs = errors.DivergenceError("no", step=7, names=["w"], ranks=[1])
    copy = pickle.loads(pickle.dumps(differs))
    assert (copy.step, copy.names, copy.ranks) == (7, ("w",), (1,))


def test_mismatch_lists_names_and_counts_what_it_leaves_out() -> None:
    error = errors.RestoreMismatchError("step 3", missing=[f"w{i}" for i in range(12)])
    text = str(error)
    assert "step 3" in text
    assert "(12): w0, w1," in text
    assert text.endswith("and 2 more")


@pytest.mark.parametrize(
    ("kind", "builtin"),
    [
        (errors.ConfigError, ValueError),
        (errors.StateError, TypeError),
        (errors.RegionIOError, OSError),
        (errors.WaitTimeoutError, TimeoutError),
        (errors.CoordinationError, TimeoutError),
        (errors.PreviousPersistError, errors.PersistError),
        (errors.UnrestoredError, errors.RegionError),
    ],
)
def test_errors_are_also_what_callers_already_catch(
    kind: type[Exception], builtin: type[Exception]
) -> None:
    assert issubclass(kind, builtin)
