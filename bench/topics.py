"""The pages of docs/benchmarks: each answers one question from the definitions that ask it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bench.record import Result


@dataclass(frozen=True)
class Topic:
    """One page.

    Attributes:
        name: of the file, without its suffix.
        title: above the page.
        question: which its definitions answer, in one sentence.
        definitions: their names, in the page's order.
    """

    name: str
    title: str
    question: str
    definitions: tuple[str, ...] = ()


TOPICS = (
    Topic(
        "models",
        "Six models, a snapshot at every step",
        "What does a snapshot at every step cost the training, and what do the other engines cost?",
        ("essential", "essential-bert", "seed-batches", "batch"),
    ),
    Topic(
        "intervals",
        "How often a snapshot may be taken",
        "How many steps apart must snapshots be to cost at most 1 % or 5 % of the training?",
        ("intervals",),
    ),
    Topic(
        "scaling",
        "Small and large states",
        "How does the cost grow with the bytes of the state and with the number of its tensors?",
        ("scaling",),
    ),
    Topic(
        "stress",
        "Short steps, slow media, busy machines",
        "What is left when there is little to hide behind?",
        (
            *("stress", "essential-stress", "stress-one-thread", "stress-openmp", "streamed"),
            *("throttled", "busy-hogs", "busy-workers"),
        ),
    ),
    Topic(
        "pieces",
        "What each piece is worth",
        "What does overlap, working by layers, and each other piece save, and what else is there?",
        ("ablation", "peers"),
    ),
    Topic(
        "ranks",
        "Several ranks",
        "What do snapshots cost distributed training, and how fast do they commit and restore?",
        (
            *("ddp-compute", "ddp-ranks", "ddp-link-gpt2", "ddp-link-vgg16"),
            *("ddp-commit", "ddp-restore"),
        ),
    ),
    Topic(
        "failures",
        "Failure and restart",
        "How fast is the state saved when training fails, and how fast does training go on?",
        ("jit", "recovery", "in-place", "restart"),
    ),
    Topic(
        "policies",
        "When to save",
        "Do papers' claims on when to save hold, and lightck's own? Rows say what is simulated.",
        ("policies-real", "policies-hour", "policies", "policies-coci", "policies-jit"),
    ),
    Topic(
        "restore",
        "Restore",
        "How fast does a snapshot come back into live tensors?",
        ("essential-restore", "restore"),
    ),
    Topic(
        "overhead",
        "Fixed costs",
        "What do the hooks, the armed failure path, a trace, a commit and memory cost?",
        ("idle", "armed", "trace", "commit", "memory"),
    ),
    Topic(
        "native",
        "The native writer",
        "How close does the writer come to the best copy that the machine can do?",
        ("native",),
    ),
    Topic(
        "emulated-gpus",
        "Emulated GPUs",
        "What would snapshots cost beside a GPU that is emulated on the CPU? No GPU ran here.",
        ("emulated-h100", "emulated-v100"),
    ),
)
OTHERS = Topic("others", "Other benchmarks", "What has no page of its own.")


def topic(name: str) -> Topic:
    """The page of a definition; `OTHERS` for one that no page names."""
    return next((each for each in TOPICS if name in each.definitions), OTHERS)


def by_topic(results: Sequence[Result]) -> dict[Topic, list[Result]]:
    """The results of each page that has some, in the order of `TOPICS`."""
    found: dict[Topic, list[Result]] = {}
    for each in (*TOPICS, OTHERS):
        of_it = [r for r in results if topic(name_of(r)) == each]
        if of_it:
            order = each.definitions or tuple(map(name_of, of_it))
            found[each] = sorted(of_it, key=lambda r: order.index(name_of(r)))
    return found


def name_of(result: Result) -> str:
    """The name of the definition that a result was measured by."""
    return str(result.about["definition"]["name"])
