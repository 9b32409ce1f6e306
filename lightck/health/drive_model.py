"""A small network that gives a drive's hazard from its SMART values; its file, and its inputs."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lightck.errors import LightckError

SMART = (1, 3, 5, 7, 9, 10, 187, 188, 194, 197, 198, 199, 241, 242)
"""The SMART attributes that a model takes, by number."""
WIDTHS = (3 * len(SMART), 32, 16, 1)
DAY_S = 86400.0
_KIND = "lightck drive model 1"


def inputs(values: Mapping[int, float], earlier: Mapping[int, float]) -> list[float]:
    """Return a network's inputs, in the order in which it learned them.

    Args:
        values: raw SMART values by number; those that the drive lacks are left out.
        earlier: the same of its oldest reading within seven days; it may be this one.
    """
    now = [math.log1p(max(values.get(number, 0.0), 0.0)) for number in SMART]
    known = [float(number in values) for number in SMART]
    grown = [
        new - math.log1p(max(earlier[number], 0.0)) if has and number in earlier else 0.0
        for number, new, has in zip(SMART, now, known, strict=True)
    ]
    return [*now, *known, *grown]


@dataclass(frozen=True)
class DriveModel:
    """A trained network.

    Attributes:
        mean: of each input in the training.
        scale: its deviation.
        layers: weights, by output and input, and biases, of each layer; ReLU between them.
        shift: is added to the result, because few healthy days were learned from.
        alarm: failures a day from which on a drive counts as failing.
        trained_on: what it was trained on, for people.
    """

    mean: Sequence[float]
    scale: Sequence[float]
    layers: Sequence[tuple[Sequence[Sequence[float]], Sequence[float]]]
    shift: float
    alarm: float
    trained_on: str

    def hazard(self, values: Mapping[int, float], earlier: Mapping[int, float]) -> float:
        """Return the expected failures a day; the arguments are those of `inputs`."""
        found = [
            (value - mean) / scale
            for value, mean, scale in zip(
                inputs(values, earlier), self.mean, self.scale, strict=True
            )
        ]
        for number, (weights, biases) in enumerate(self.layers, 1):
            found = [
                sum(w * x for w, x in zip(row, found, strict=True)) + bias
                for row, bias in zip(weights, biases, strict=True)
            ]
            if number < len(self.layers):
                found = [max(0.0, each) for each in found]
        return 1.0 / (1.0 + math.exp(-max(-50.0, min(50.0, found[0] + self.shift))))

    def as_json(self) -> str:
        """Return the text of the model's file."""
        return json.dumps({"kind": _KIND, "smart": SMART, **asdict(self)})

    @classmethod
    def read(cls, file: Path) -> DriveModel:
        """Read a model from a file of `lightck health --fit`.

        Raises:
            LightckError: there is none, or it is no such file; what is expected.
        """
        try:
            return cls._from_plain(json.loads(file.read_text()))
        except OSError as error:
            raise LightckError(f"{file}: cannot read the drive model: {error.strerror}") from error
        except (ArithmeticError, LookupError, RecursionError, TypeError, ValueError) as error:
            raise LightckError(
                f"{file} is no drive model of this version ({type(error).__name__}:"
                f" {str(error)[:200]}); make one with"
                " `lightck health --fit CSV... -o drives.json`"
            ) from error

    @classmethod
    def _from_plain(cls, plain: Any) -> DriveModel:
        if not isinstance(plain, dict):
            raise TypeError("no JSON object")
        if plain["kind"] != _KIND or tuple(plain["smart"]) != SMART:
            raise ValueError(f"kind {plain['kind']!r}, SMART {plain['smart']}")
        layers = [
            ([_numbers(row, wide) for row in _items(weights, out)], _numbers(biases, out))
            for (weights, biases), wide, out in zip(
                plain["layers"], WIDTHS, WIDTHS[1:], strict=False
            )
        ]
        _items(plain["layers"], len(WIDTHS) - 1)
        shift, alarm = _numbers([plain["shift"], plain["alarm"]], 2)
        scale = _numbers(plain["scale"], WIDTHS[0])
        if not (0 < alarm < 1 and min(scale) > 0):
            raise ValueError(f"alarm {alarm}, least scale {min(scale)}")
        mean = _numbers(plain["mean"], WIDTHS[0])
        return cls(mean, scale, layers, shift, alarm, str(plain["trained_on"]))


def _items(found: Any, count: int) -> list[Any]:
    if not isinstance(found, list) or len(found) != count:
        raise ValueError(f"expected a list of {count}")
    return found


def _numbers(found: Any, count: int) -> list[float]:
    numbers = [float(each) for each in _items(found, count)]
    if not all(map(math.isfinite, numbers)):
        raise ValueError("a number is not finite")
    return numbers
