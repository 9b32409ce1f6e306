"""The snapshots that one rank sees, and the message that tells the other ranks."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

from lightck.distributed.restore.lineage import Key, Lineage, age
from lightck.distributed.rounds import Said

MAX_OFFERS = 16  # per rank: slots of one region, or a few regions of a larger former world
MAX_HALVES = 4
MAX_ANCESTORS = 16  # as in a superblock
_SPOKEN = 4  # problems in a message
_LETTERS = 250  # characters of each
_PLACE = 60  # characters of a region's name
_PATH_END = 200  # characters at the end of a path that are compared


@dataclass(frozen=True, slots=True)
class Offer:
    """A snapshot that a rank can put together completely.

    Attributes:
        key: the snapshot.
        early: it was finished before forward start.
        suspect: replicas were found to differ.
        alike: the snapshot states that every rank held the same parameters and optimizer state, so
            that any rank that offers it can send them to any other.
        size: bytes of all tensors, as this rank has them.
    """

    key: Key
    early: bool = False
    suspect: bool = False
    alike: bool = False
    size: int = 0

    def said(self) -> list[int]:
        """Encode it for JSON."""
        return [*self.key, self.early | self.suspect << 1 | self.alike << 2, self.size]

    @classmethod
    def heard(cls, said: list[int]) -> Offer:
        """Decode the result of `said`."""
        flags, size = said[3:]
        return cls(Key(*said[:3]), bool(flags & 1), bool(flags & 2), bool(flags & 4), size)


@dataclass(frozen=True, slots=True)
class View:
    """The view of one rank.

    Attributes:
        path: the path that it was given.
        step: the only step that is wanted; None for the newest.
        offers: snapshots that it can put together, among those that count in the regions they come
            from.
        lineage: of the regions it reads; None if it has none.
        problems: snapshots or regions that are there and cannot be used, and why.
        wide: it has read every region below the path, not only its own and its peers'.
        lacking: its own region is missing or empty, while others lie below the path.
        void: nothing was ever written in the regions that it sees.
        overtaken: a running job has overwritten a snapshot that it found.
        young: the newest timeline of its own region, if that continues no other and no due snapshot
            is committed in it yet, only ones saved at a failure (older timelines' snapshots were
            given up then); else 0.
        halves: snapshots of which it has the rank-local state (buffers, generators, data position),
            but not the rest: (key, whether of the early instant).
        broken: why its own region cannot be opened; empty if it can, or does not exist.
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
        """Return its offer of one snapshot; None if there is none."""
        return next((offer for offer in self.offers if offer.key == key), None)

    def said(self) -> Said:
        """Encode it for JSON; the newest offers and the first problems only."""
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
        """Decode the result of `said`."""
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
    """Replace characters that JSON would escape, so that a text has one byte per character."""
    plain = text.encode("ascii", "replace").decode()
    return "".join(each if each.isprintable() and each not in '"\\' else "?" for each in plain)
