"""Random number states: those of torch's, CUDA's, NumPy's and Python's global generators."""

from __future__ import annotations

import random
from array import array
from typing import Any

import numpy as np
import torch

from lightck.errors import CorruptSnapshotError, DeviceError, StateError
from lightck.state import boundary_codec

_NAMES = ("MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64")
_KINDS: dict[str, Any] = {name: getattr(np.random, name) for name in _NAMES}

_given: dict[str, dict[str, Any]] = {}  # the last answers


def capture() -> dict[str, Any]:
    """Return the states of all global generators, plain. Draws nothing; values are private copies.

    It is called at each instant: where the state of NumPy's or Python's generator equals the last
    one, bit by bit, it returns the same object as last time.

    Raises:
        StateError: NumPy's is of a kind that could not be restored.
        DeviceError: a CUDA device has failed.
    """
    states: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": _of_numpy(),
        "python": _again("python", packed(random.getstate())),
    }
    if torch.cuda.is_initialized() and torch.cuda.is_available():
        try:
            states["cuda"] = torch.cuda.get_rng_state_all()
        except RuntimeError as error:  # queues no work: only a lost device refuses
            raise DeviceError(f"CUDA's random generators cannot be read: {error}") from error
    return states


def _of_numpy() -> dict[str, Any]:
    state, last = np.random.get_state(legacy=False), _given.get("numpy")
    if last is not None and _is_same_twister(state, last):
        return last
    made: dict[str, Any] = boundary_codec.plain(state, "rng/numpy")
    if made["bit_generator"] not in _KINDS:
        raise StateError(
            f"NumPy's global generator is a {made['bit_generator']}, which a restore could not"
            f" make: call np.random.set_bit_generator with one of {', '.join(_KINDS)}",
            path="rng/numpy",
        )
    return _again("numpy", made)


def _is_same_twister(state: Any, last: dict[str, Any]) -> bool:
    """Tell whether NumPy's state is that of its usual generator, and the last one, bit by bit."""
    if state["bit_generator"] != "MT19937" or last["bit_generator"] != "MT19937":
        return False
    now, then, gauss = state["state"], last["state"], ("has_gauss", "gauss")
    return (
        now["pos"] == then["pos"]
        and now["key"].tobytes() == then["key"]["bytes"]
        and all(repr(state[each]) == repr(last[each]) for each in gauss)
    )


def _again(name: str, state: dict[str, Any]) -> dict[str, Any]:
    """Return the last answer if it equals this state, else this state."""
    last = _given.get(name)
    # The number that is kept for the next call may be 0.0 or -0.0, which are equal.
    if last is None or last != state or repr(last.get("gauss")) != repr(state.get("gauss")):
        last = _given[name] = state
    return last


def _set_numpy(state: Any) -> None:
    """Set NumPy's generator; one of another kind than the state's is replaced."""
    source: Any = np.random  # these functions have no type hints
    kind = _KINDS[state["bit_generator"]]
    if type(source.get_bit_generator()) is not kind:
        source.set_bit_generator(kind())
    source.set_state(state)


def packed(state: tuple[Any, ...]) -> dict[str, Any]:
    """Pack a `random.Random` state, its 625 integers as bytes: one value to encode, not 625."""
    version, internal, gauss = state
    return {"version": version, "internal": array("I", internal).tobytes(), "gauss": gauss}


def unpacked(state: dict[str, Any]) -> tuple[Any, ...]:
    """Undo `packed`."""
    internal = array("I")
    internal.frombytes(state["internal"])
    return state["version"], tuple(internal), state["gauss"]


def check(states: dict[str, Any]) -> None:
    """Show that generators accept `states`, on some that nobody draws from.

    Raises:
        CorruptSnapshotError: they do not.
    """
    try:
        torch.Generator().set_state(states["torch"])
        kind = _KINDS[states["numpy"]["bit_generator"]]
        np.random.RandomState(kind()).set_state(states["numpy"])
        random.Random().setstate(unpacked(states["python"]))
        held = states.get("cuda", [])
        fits = all(isinstance(each, torch.Tensor) and each.dtype == torch.uint8 for each in held)
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as e:
        raise CorruptSnapshotError(f"the random generators' state does not hold: {e!r}") from e
    if not fits:
        raise CorruptSnapshotError("the state of CUDA's random generators is not made of bytes")


def restore(states: dict[str, Any]) -> str:
    """Set the generators that `states` holds; return why CUDA's are not set, else "".

    They are not where the number of devices differs. NumPy's is made anew where it is of another
    kind now.
    """
    torch.set_rng_state(states["torch"])
    _set_numpy(states["numpy"])
    random.setstate(unpacked(states["python"]))
    cuda = states.get("cuda")
    if cuda is None:
        return ""
    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if len(cuda) != there:
        return f"of {len(cuda)} CUDA device(s) in the snapshot, {there} here: they stay as they are"
    torch.cuda.set_rng_state_all(cuda)
    return ""
