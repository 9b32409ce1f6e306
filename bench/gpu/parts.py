"""List the parts of a check, in order, with the time that each may take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bench import definition
from bench.definition import Contender, Definition
from bench.errors import BenchError
from bench.place import ROOT

TESTS = "tests"


@dataclass(frozen=True)
class Part:
    """A part of a check.

    Attributes:
        name: the name to ask for it: `tests:FILE`, a definition, or a definition and a model.
        least_s: the part is not begun with less time left.
        most_s: the part is stopped then; what it has found is kept.
    """

    name: str
    least_s: float
    most_s: float

    @property
    def group(self) -> str:
        """Return the definition, or `tests`."""
        return self.name.partition(":")[0]

    @property
    def rest(self) -> str:
        """Return the model to measure (empty: all), or the file of tests."""
        return self.name.partition(":")[2]


# Seconds on an H100; guesses for `gpu-restore` and for models but ResNet-18. The slow parts last.
PARTS = (
    Part("tests:resume", 30, 90),
    Part("tests:ordering", 20, 80),
    Part("tests:faults", 20, 90),
    Part("tests:others", 15, 60),
    Part("gpu-rate", 20, 75),
    Part("gpu-fence", 25, 110),
    Part("gpu-restore", 20, 80),
    Part("gpu-models:resnet18", 15, 35),
    Part("gpu-models:gpt2", 20, 60),
    Part("gpu-models:vgg16", 15, 50),
    Part("gpu-models:alexnet", 15, 40),
    Part("gpu-models:inception-v3", 15, 40),
    Part("gpu-models:gpt2-medium", 30, 90),
    Part("gpu-models:bert-large", 30, 90),
)


def chosen(names: Sequence[str]) -> list[Part]:
    """Return the parts that are meant by their names or groups; all without a name.

    Raises:
        BenchError: there is no such part; the message lists those there are.
    """
    for name in names:
        if not any(name in (part.name, part.group) for part in PARTS):
            raise BenchError(
                f"no part {name!r}; there are {', '.join(part.name for part in PARTS)}, and all"
                f" of a kind: {', '.join(dict.fromkeys(part.group for part in PARTS))}"
            )
    return [p for p in PARTS if not names or p.name in names or p.group in names]


def files_of(part: Part) -> list[str]:
    """Return the test files of a part: its own file, or those that no other part names."""
    named = {f"test_gpu_{p.rest}.py" for p in PARTS if p.group == TESTS}
    own = f"test_gpu_{part.rest}.py"
    there = sorted(file.name for file in (ROOT / "tests" / "gpu").glob("test_*.py"))
    return [n for n in there if (n == own if own in there else n not in named)]


def seconds_of(part: Part, behind: Sequence[Part], left_s: float) -> float:
    """Return how long a part may take: those after it must keep their minimum.

    It is 0 if there is no time to begin it. If the time is too short for all, the first have
    theirs.
    """
    if left_s < part.least_s:
        return 0.0
    room = left_s - sum(each.least_s for each in behind)
    return min(part.most_s, room if room >= part.least_s else left_s)


def definition_of(part: Part, *, device: str, small: bool) -> Definition:
    """Return what a part measures: its whole definition, on a device.

    With `small` it has tiny models, to see that it works. A CPU has none of a GPU's modes.
    """
    whole = definition.load(f"gpu/{part.group}")
    if small:
        whole = definition.tiny(whole)
    return definition.on_device(whole, device)


def contenders_of(part: Part, whole: Definition) -> list[Contender]:
    """Return the engines that a part measures."""
    named = definition.load(f"gpu/{part.group}")  # where models still have their own names
    wanted = {c.label for c in named.contenders if part.rest in ("", named.work_of(c).model)}
    return [each for each in whole.contenders if each.label in wanted]
