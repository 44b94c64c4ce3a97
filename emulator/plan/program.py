"""The Program: for every rank class, streams of ops with explicit dependencies. No clock, no rates.

A Program prints as readable text and can be checked without being run.

A *template* is what one kind of rank does in one step: ops in the order in which the host issues them. Ops
of one stream run in that order; across streams an op waits for the ops it names. A *rank class* binds a
template to ranks that do it, and its group names to groups.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from emulator.plan.body import Template
from emulator.plan.op import (
    COMPUTE,
    Buffer,
    Collective,
    CollectiveKind,
    Fixed,
    HostCopy,
    Kernel,
    Load,
    Op,
    Phase,
    Transfer,
    Work,
)
from emulator.spec.arrays import Int64
from emulator.spec.job import Job


class Group(msgspec.Struct, frozen=True):
    """Ranks that communicate along one axis, in ring order."""

    axis: str
    ranks: Sequence[int]
    """A range where the mesh makes them so, else a tuple."""


class RankClass(msgspec.Struct, frozen=True):
    """Ranks that do the same at the same instants; the first member represents them."""

    members: tuple[int, ...]
    template: int
    groups: dict[str, int]
    """The template's group names to indices in Program.groups."""
    peers: dict[str, int]
    """The template's peer names to ranks."""


class Seats(msgspec.Struct, frozen=True, eq=False):
    """What each rank alone is bound to, as columns over the ranks; -1: it has no such group or peer."""

    template: Int64
    groups: dict[str, Int64]
    peers: dict[str, Int64]

    @classmethod
    def of(cls, classes: Sequence[RankClass]) -> Seats:
        """Columns of classes of one rank each, in order of their ranks."""
        assert all(c.members == (rank,) for rank, c in enumerate(classes)), "already folded"

        def columns(bound: list[dict[str, int]]) -> dict[str, Int64]:
            names = dict.fromkeys(name for each in bound for name in each)
            return {n: np.array([each.get(n, -1) for each in bound], dtype=np.int64) for n in names}

        template = np.array([c.template for c in classes], dtype=np.int64)
        return cls(template, columns([c.groups for c in classes]), columns([c.peers for c in classes]))

    def __len__(self) -> int:
        return len(self.template)

    def seat(self, rank: int, members: tuple[int, ...] = ()) -> RankClass:
        """Class that stands on this rank's seat; by default it has no other members."""
        return RankClass(
            members or (rank,),
            int(self.template[rank]),
            {name: int(column[rank]) for name, column in self.groups.items() if column[rank] >= 0},
            {name: int(column[rank]) for name, column in self.peers.items() if column[rank] >= 0},
        )


class Program(msgspec.Struct, frozen=True, eq=False):
    """All that happens in one step of a job, and who does it."""

    job: Job
    templates: tuple[Template, ...]
    classes: tuple[RankClass, ...]
    groups: tuple[Group, ...]
    """All groups of the job, whatever is folded."""
    folding: Folding | None = None
    """How the classes were found; None where every rank is a class of its own."""

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Program):
            return NotImplemented
        mine = self.job, self.classes, self.groups, self.templates
        return mine == (other.job, other.classes, other.groups, other.templates)

    def __hash__(self) -> int:
        return hash((len(self.classes), self.templates))

    @property
    def ranks(self) -> int:
        """Ranks of all classes together."""
        return sum(len(rank_class.members) for rank_class in self.classes)

    def class_of_ranks(self) -> Int64:
        """For every rank the index of its class; -1 where a program written by hand has no such rank."""
        last = max((max(c.members) for c in self.classes), default=-1)
        found = np.full(last + 1, -1, dtype=np.int64)
        for i, rank_class in enumerate(self.classes):
            found[np.asarray(rank_class.members, dtype=np.int64)] = i
        return found

    def seat(self, rank: int) -> RankClass:
        """What this rank alone is bound to; IndexError for a rank that the program lacks."""
        there = len(self.folding.seats) if self.folding else len(self.classes)
        if not 0 <= rank < there:
            raise IndexError(f"rank {rank} is not in the program: it has ranks 0..{there - 1}")
        return self.folding.seats.seat(rank) if self.folding else self.classes[rank]

    def class_of_group(self, group: int) -> int:
        """The group that stands for this one."""
        return int(self.folding.group_class[group]) if self.folding else group


class Folding(msgspec.Struct, frozen=True, eq=False):
    """Who stands for whom, as columns."""

    seats: Seats
    """Every rank as it is bound by itself."""
    group_class: Int64
    """For each group the first of its class."""
    links: Int64
    """Links that may bind, ascending."""
    link_class: Int64
    """For each of them the first of its class."""


__all__ = [
    "COMPUTE",
    "Buffer",
    "Collective",
    "CollectiveKind",
    "Fixed",
    "Folding",
    "Group",
    "HostCopy",
    "Kernel",
    "Load",
    "Op",
    "Phase",
    "Program",
    "RankClass",
    "Seats",
    "Template",
    "Transfer",
    "Work",
]
