"""Times and shares as words, and back: `10 min`, `3.5 %`."""

from __future__ import annotations

from decimal import Decimal

UNITS = {"ms": "0.001", "s": "1", "min": "60", "h": "3600", "d": "86400"}
_LONG = {"second": "s", "sec": "s", "minute": "min", "hour": "h", "day": "d"}


def unit_of(word: str) -> str | None:
    """Return the unit that a word means (`minutes`: `min`); None if it is none."""
    unit = _LONG.get(word.removesuffix("s"), word)
    return unit if unit in UNITS else None


def seconds(number: str, unit: str) -> float:
    """Return so many units as seconds, to the nearest float."""
    return float(Decimal(number) * Decimal(UNITS[unit]))


def percent(number: str) -> float:
    """Return so many percent as a share, to the nearest float."""
    return float(Decimal(number) / 100)


def exact_time(value_s: float) -> str:
    """Return a time in words that mean exactly that float; NumPy's is one, with another repr."""
    whole = (u for u in ("d", "h", "min") if value_s and value_s % float(UNITS[u]) == 0)
    unit = next(whole, "s")
    return f"{_plain(Decimal(repr(float(value_s))) / Decimal(UNITS[unit]))} {unit}"


def exact_percent(share: float) -> str:
    """Return a share in words that mean exactly that float."""
    return f"{_plain(Decimal(repr(float(share))) * 100)} %"


def in_units(value_s: float) -> str:
    """Return a time for people, to three digits: `21 ms`, `4.5 min`."""
    unit = next((u for u in ("d", "h", "min", "s") if value_s >= float(UNITS[u])), "ms")
    return f"{to_three_digits(value_s / float(UNITS[unit]))} {unit}"


def to_three_digits(number: float) -> str:
    """Return a number for people, to three digits; large ones whole: `2,320`."""
    return f"{number:,.0f}" if 999.5 <= number < 1e9 else f"{number:.3g}"


def in_percent(share: float) -> str:
    """Return a share for people, to three digits."""
    return f"{share * 100:.3g} %"


def _plain(number: Decimal) -> str:
    number = number.normalize()
    return format(number, "f" if -6 <= number.adjusted() <= 12 else "E")
