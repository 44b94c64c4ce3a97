"""What the groups and transfers of a job put on links that may bind: for folding, in columns."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from emulator.plan.body import Template
from emulator.plan.op import Collective, Transfer
from emulator.plan.program import Group, Seats
from emulator.plan.refine import first_of, lanes, pairs
from emulator.plan.traffic import Placed, Traffic, pair_levels, placed
from emulator.plan.tuning import choose
from emulator.spec.arrays import Int64
from emulator.spec.fabric import KINDS, LINKS_PER_GPU, Fabric
from emulator.spec.job import Job

Moved = dict[tuple[str, int, str], Traffic]
"""Traffic by kind, root and algorithm."""


class Words:
    """Numbers of what arrays cannot hold, in the order in which it first comes."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}

    def __getitem__(self, word: Hashable) -> int:
        return self._numbers.setdefault(word, len(self._numbers))


class Edges(NamedTuple):
    """Transfers from a rank to its peer of a name, one element each."""

    name: Int64
    """Number of the name; at most one edge of a name leaves a rank, and at most one arrives."""
    src: Int64
    dst: Int64
    level: Int64
    """Index into PAIRS."""


class Loads(NamedTuple):
    """What groups put on links, one element for each group and link."""

    group: Int64
    link: Int64
    what: Int64
    """Number of the units of each of the group's collectives there."""


def may_bind(ranks: int, fabric: Fabric) -> list[int]:
    """Kinds of links, as indices of KINDS, that this many GPUs could fill.

    Ports of GPUs always count; a leaf's or a pod's links do where the NICs beneath carry more.
    """
    kinds, gpus = list(range(LINKS_PER_GPU)), np.arange(ranks)
    nic = fabric.capacities[KINDS.index("nic.out")]
    for up, switches in ((KINDS.index("leaf.up"), fabric.leaves), (KINDS.index("pod.up"), fabric.pods)):
        if switches > 1:
            links = fabric.links_of(gpus, up)
            beneath = np.bincount(links - links[0])
            kinds += [up, up + 1] if int(beneath.max()) * nic > fabric.capacities[up] else []
    return kinds


def edges(templates: Sequence[Template], seats: Seats, fabric: Fabric) -> Edges:
    """Every transfer from a rank to a peer, name by name; a receive is the other end of one.

    Senders of one name to one rank are told apart: a class sends to another once.
    """
    rows = [(np.zeros(0, dtype=np.int64),) * 3]
    for name, peer in seats.peers.items():
        sends = np.array([_sends(template, name) for template in templates], dtype=np.bool_)
        src = np.flatnonzero(sends[seats.template])
        for lane in lanes(peer[src], src, len(seats)):
            dst = np.flatnonzero(lane >= 0)
            rows.append((np.full(len(dst), len(rows) - 1), lane[dst], dst))
    number, src, dst = (np.concatenate(column) for column in zip(*rows, strict=True))
    return Edges(number, src, dst, pair_levels(src, dst, fabric))


def _sends(template: Template, peer: str) -> bool:
    transfers = (work for work in template.body.works if isinstance(work, Transfer))
    return any(work.kind == "send" and work.peer == peer for work in transfers)


def routes(of: Edges, kinds: Sequence[int], fabric: Fabric) -> list[Int64]:
    """Link of each kind on the way of each edge, -1 where the route has none."""
    columns = []
    for kind in kinds:
        end = of.dst if kind % 2 else of.src
        columns.append(np.where(_passes(of, kind), fabric.links_of(end, kind), -1))
    return columns


def who_passes(of: Edges, kind: int) -> Int64:
    """GPU of each edge whose route has a port of this kind."""
    return (of.dst if kind % 2 else of.src)[_passes(of, kind)]


def _passes(of: Edges, kind: int) -> npt.NDArray[np.bool_]:
    """Whether a route has a link of this kind: of the switch, or of NIC, leaf, pod from its level on."""
    by: npt.NDArray[np.bool_] = of.level == 0 if kind < 2 else of.level >= kind // 2
    return by & np.not_equal(of.src, of.dst)


class _Part(NamedTuple):
    """Groups that put the same on their links."""

    groups: Int64
    members: Int64
    """GPU numbers, one row for each group."""
    what: Int64
    """Numbers of what is put on links, shaped like the units of their traffic; -1 for nothing."""


class GroupLoads:
    """What latency and rates of groups depend on, and what they put on links."""

    def __init__(
        self, job: Job, templates: Sequence[Template], groups: Sequence[Group], seats: Seats, words: Words
    ) -> None:
        """Ask for what follows: attributes, and `loads`."""
        self.job, self.fabric, self.words = job, Fabric(job.cluster), words
        self.beginning = np.array([words[group.axis] for group in groups], dtype=np.int64)
        """Equal for groups whose collectives have the same latency and rates."""
        self.name = np.full(len(groups), -1, dtype=np.int64)
        """Place in the seats' columns of the name that a group's first member has for it."""
        self._parts: list[_Part] = []
        self._numbers: dict[tuple[Hashable, ...], Int64] = {}
        for each in placed([group.ranks for group in groups], self.fabric) if groups else ():
            first = each.members[:, 0]
            for place, column in reversed(list(enumerate(seats.groups.values()))):
                self.name[each.groups[column[first] == each.groups]] = place
            known = pairs(self.name[each.groups] + 1, self.beginning[each.groups])
            bound = pairs(seats.template[first], known)
            for same in np.unique(first_of(bound)).tolist():
                alike = np.flatnonzero(bound == bound[same])
                name = [None, *seats.groups][int(self.name[each.groups[same]]) + 1]
                works = _collectives(templates[int(seats.template[first[same]])], name)
                self._add(works, each._replace(groups=each.groups[alike], members=each.members[alike]))

    def _add(self, works: Sequence[Collective], each: Placed) -> None:
        """Note groups of one shape that do the same."""
        key, moved = self._chosen(works, each)
        what = self._what(moved, len(each.shape))
        port = what[:LINKS_PER_GPU]
        alike = tuple(np.where(port.min(axis=1) == port.max(axis=1), port[:, 0], -2).tolist())
        self.beginning[each.groups] = self.words[int(self.beginning[each.groups[0]]), key, alike]
        self._parts.append(_Part(each.groups, each.members, what))

    def same_for_all(self, kind: int) -> bool:
        """Whether all members of each group put the same on links of this kind."""
        return all(part.what[kind].min() == part.what[kind].max() for part in self._parts)

    def who_loads(self, kind: int) -> Int64:
        """GPUs whose ports of this kind groups load, where all members of a group do or none."""
        there = [part.members.ravel() for part in self._parts if part.what[kind, 0] >= 0]
        return np.concatenate([np.zeros(0, dtype=np.int64), *there])

    def loads(self, kinds: Sequence[int]) -> Loads:
        """What groups put on links of these kinds."""
        rows = [(np.zeros(0, dtype=np.int64),) * 3]
        for groups, members, what in self._parts:
            for kind in kinds:
                used = np.flatnonzero(what[kind] >= 0)
                link = self.fabric.links_of(members[:, used], kind)
                group, here = np.broadcast_arrays(groups[:, None], what[kind][used])
                rows.append((group.ravel(), link.ravel(), here.ravel()))
        return Loads(*(np.concatenate(column) for column in zip(*rows, strict=True)))

    def _chosen(self, works: Sequence[Collective], each: Placed) -> tuple[Hashable, Moved]:
        """Size and profile of every collective of groups of one shape, and what they move."""
        key: list[Hashable] = []
        moved: Moved = {}
        for work in works:
            key.append((work.kind, work.root, work.bytes))
            if work.bytes:
                algorithm = self.job.collective_algorithm
                chosen = choose(work.kind, each.shape, work.bytes, algorithm, self.fabric, work.root)
                key.append((chosen.profile, chosen.protocol))
                moved[work.kind, work.root, chosen.traffic.algorithm] = chosen.traffic
        return tuple(key), moved

    def _what(self, moved: Moved, ranks: int) -> Int64:
        """Number of what is put on each link, shaped like the units; -1 for nothing."""
        key = tuple(moved.items())
        if key not in self._numbers:
            names = [(*name, i) for name, traffic in moved.items() for i in range(len(traffic.phases))]
            units = [phase.units.ravel() for traffic in moved.values() for phase in traffic.phases]
            nothing = np.full(len(KINDS) * ranks, -1, dtype=np.int64)
            number = self._number(names, units) if units else nothing
            self._numbers[key] = number.reshape(len(KINDS), ranks)
        return self._numbers[key]

    def _number(self, names: Sequence[Hashable], units: Sequence[Int64]) -> Int64:
        """Number the columns of units, with one row for each of the names; -1 for nothing but zeros."""
        together = np.zeros_like(units[0])
        for row in units:
            together = pairs(together, row)
        first = first_of(together)
        number = np.full(len(together), -1, dtype=np.int64)
        for place in np.unique(first).tolist():
            here = [(name, int(row[place])) for name, row in zip(names, units, strict=True) if row[place]]
            if here:
                number[place] = self.words[tuple(here)]
        return number[first]


def _collectives(template: Template, group: str | None) -> list[Collective]:
    """Distinct collectives of a template in the group of this name."""
    works = template.body.works
    return [work for work in works if isinstance(work, Collective) and work.group == group]
