"""Check the arguments of policies; an error names the key, the value and what is allowed."""

from __future__ import annotations

import math

from lightck.errors import ConfigError


def positive_int(key: str, value: object) -> None:
    """Refuse what is no integer of 1 or more."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{key} = {value!r}: must be an integer of 1 or more")


def positive_number(key: str, value: object) -> None:
    """Refuse what is no finite number above 0."""
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf:
        return
    raise ConfigError(f"{key} = {value!r}: must be a finite number above 0")


def share(key: str, value: object) -> None:
    """Refuse what is no number above 0, 1 at most."""
    positive_number(key, value)
    if isinstance(value, int | float) and value > 1:
        raise ConfigError(f"{key} = {value!r}: is a share, 1 at most")


def metric(key: str, name: object, mode: object) -> None:
    """Refuse what is no metric's name, and a mode that is neither `min` nor `max`."""
    if not isinstance(name, str) or not name:
        raise ConfigError(f"{key}: metric = {name!r}: must be the name of a metric")
    if mode not in ("min", "max"):
        raise ConfigError(f"{key}: mode = {mode!r}: must be 'min' or 'max'")
