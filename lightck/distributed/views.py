"""What one rank sees of the snapshots that are there, as it says it to the others."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

from lightck.distributed.exchange import Said
from lightck.distributed.lineage import Key, Lineage, age

MAX_OFFERS = 16  # per rank: slots of one region, or a few regions of a larger former world
MAX_HALVES = 4
MAX_ANCESTORS = 16  # as in a superblock
_SPOKEN = 4  # problems that a rank tells
_LETTERS = 250  # of each
_PLACE = 60  # letters of a region's name
_PATH_END = 200  # what is compared of a path


@dataclass(frozen=True, slots=True)
class Offer:
    """A snapshot that a rank can put together wholly.

    Attributes:
        key: which.
        early: finished before the boundary instant (b).
        suspect: replicas were found to differ.
        alike: by its own word every rank held the same parameters and optimizer state, so that any
            rank that offers it can give them to any other.
        size: bytes of all tensors, as this rank has them.
    """

    key: Key
    early: bool = False
    suspect: bool = False
    alike: bool = False
    size: int = 0

    def said(self) -> list[int]:
        """As JSON."""
        return [*self.key, self.early | self.suspect << 1 | self.alike << 2, self.size]

    @classmethod
    def heard(cls, said: list[int]) -> Offer:
        """The inverse of `said`."""
        flags, size = said[3:]
        return cls(Key(*said[:3]), bool(flags & 1), bool(flags & 2), bool(flags & 4), size)


@dataclass(frozen=True, slots=True)
class View:
    """What one rank sees.

    Attributes:
        path: the path that it was given.
        step: the only step that is wanted; None for the newest.
        offers: snapshots that it can put together, of what counts in the regions they come from.
        lineage: of the regions it reads; None if it has none.
        problems: what is there and cannot be put together, and why.
        wide: it has looked into every region below the path, not only its own and its peers'.
        lacking: its own region is not there or empty, while others lie below the path.
        void: nothing was ever written in what it sees.
        overtaken: a trainer has overwritten what it found.
        young: the newest timeline of its own region, if that continues nothing and nothing is
            committed in it yet but at a failure (what older ones left was given up then); else 0.
        halves: snapshots of which it has what is its own (buffers, generators, data position), but
            not the rest: (which, of the early instant).
        broken: why its own region cannot even be opened; empty if it can, or is not there.
    """

    path: str
    step: int | None
    offers: tuple[Offer, ...] = ()
    lineage: Lineage | None = None
    problems: tuple[str, ...] = ()
    wide: bool = False
    lacking: bool = False
    void: bool = False
    overtaken: bool = False
    young: int = 0
    halves: tuple[tuple[Key, bool], ...] = ()
    broken: str = ""

    def offer(self, key: Key) -> Offer | None:
        """Its offer of one snapshot."""
        return next((offer for offer in self.offers if offer.key == key), None)

    def said(self) -> Said:
        """As JSON; the newest offers and the first problems only."""
        newest = sorted(self.offers, key=lambda o: (age(self.lineage, o.key), -o.key.step))
        halves = sorted(self.halves, key=lambda h: (age(self.lineage, h[0]), -h[0].step))
        lineage = self.lineage and asdict(self.lineage)
        if lineage:
            lineage["ancestors"] = [list(a) for a in lineage["ancestors"][:MAX_ANCESTORS]]
            lineage["where"] = plain(lineage["where"])[:_PLACE]
        return {
            "path": plain(self.path)[-_PATH_END:],
            "step": self.step,
            "offers": [offer.said() for offer in newest[:MAX_OFFERS]],
            "halves": [[*key, int(early)] for key, early in halves[:MAX_HALVES]],
            "lineage": lineage,
            "problems": [plain(text)[:_LETTERS] for text in self.problems[:_SPOKEN]],
            "flags": [self.wide, self.lacking, self.void, self.overtaken, self.young],
            "broken": plain(self.broken)[:_LETTERS],
        }

    @classmethod
    def heard(cls, said: Said) -> View:
        """The inverse of `said`."""
        lineage = said["lineage"] and Lineage(
            **{
                **said["lineage"],
                "ancestors": tuple((t, s) for t, s in said["lineage"]["ancestors"]),
            }
        )
        offers = tuple(map(Offer.heard, said["offers"]))
        halves = tuple((Key(*each[:3]), bool(each[3])) for each in said["halves"])
        problems = tuple(said["problems"])
        found = cls(said["path"], said["step"], offers, lineage, problems, *said["flags"])
        return replace(found, halves=halves, broken=said["broken"])


def plain(text: str) -> str:
    """As many bytes in JSON as letters."""
    plain = text.encode("ascii", "replace").decode()
    return "".join(each if each.isprintable() and each not in '"\\' else "?" for each in plain)
