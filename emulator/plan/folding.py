"""Folding: ranks that do the same at the same instants become one class, played once.

The classes are an equitable partition, found by colour refinement of a graph of ranks, groups, directed edges
of point-to-point transfers, and the links that can bind. Each begins with a colour of what is known of it
alone: a rank's template and the speed of its device, what latency and rates of a group's collectives depend
on, the kind of a link, its capacity and what groups put on it. In each round it takes on the colours of its
neighbours, counted and not ordered (the order inside a ring must not leak), until no class splits any more:

    group   the colours of its members, and of the links it loads with what it puts on each
    edge    its two ends, and the links of its route; its ends see each other where it has no such links
    link    the groups and edges that load it
    rank    its groups and edges, each with the name it has for them

Two members of a class then meet, in every round of the future, the same crowd on the same links, so the
unique max-min levels are equal and one member speaks for all. Links that can never bind are left out: the
NICs of the job beneath a leaf or a pod stay, all together, within what its uplink carries.

Everything is in columns over ranks, groups, edges or links. A port, the link of one GPU, has its users in
columns, if it is not left out as one that tells no more than its rank; only groups and the links of leaves
and pods have crowds.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from emulator.plan.body import Template
from emulator.plan.loads import Edges, GroupLoads, Words, edges, may_bind, routes, who_passes
from emulator.plan.program import Folding, Group, Program, Seats
from emulator.plan.refine import Column, Crowd, Family, lanes, numbered, pairs, refine
from emulator.spec.arrays import Int64
from emulator.spec.fabric import KINDS, LINKS_PER_GPU, Fabric
from emulator.spec.faults import left_of
from emulator.spec.job import Job


def fold(program: Program) -> Program:
    """Merge the classes of a program in which every rank is a class of its own.

    The result plays the same: its trace, expanded to all ranks, is the trace of the program given.
    """
    return folded(program.job, program.templates, program.groups, Seats.of(program.classes))


def folded(job: Job, templates: Sequence[Template], groups: Sequence[Group], seats: Seats) -> Program:
    """Program whose classes are as large as can be, for ranks on these seats."""
    graph = _Graph(job, templates, groups, seats)
    graph.refine()
    classes = tuple(seats.seat(members[0], members) for members in _members(graph.ranks.colours))
    folding = Folding(seats, graph.groups.colours, *graph.link_classes())
    return Program(job, tuple(templates), classes, tuple(groups), folding)


def _members(colours: Int64) -> list[tuple[int, ...]]:
    """Indices of each class, ascending, in order of their first."""
    numbers = numbered(colours)
    count = np.bincount(numbers)
    # Sixteen bits are sorted by radix.
    order = np.argsort(numbers.astype(np.uint16) if len(count) < 2**16 else numbers, kind="stable")
    return [tuple(each.tolist()) for each in np.split(order, np.cumsum(count)[:-1])]


def _by_name(of: Edges) -> list[Int64]:
    """Edges of each name."""
    return [np.flatnonzero(of.name == name) for name in range(int(of.name.max(initial=-1)) + 1)]


class _Graph:
    """Ranks, groups, edges and links of a job, and their colours."""

    def __init__(
        self, job: Job, templates: Sequence[Template], groups: Sequence[Group], seats: Seats
    ) -> None:
        self.job, self.seats, self.words = job, seats, Words()
        self.fabric = Fabric(job.cluster)
        self.group_loads = GroupLoads(job, templates, groups, seats, self.words)
        self.transfers = edges(templates, seats, self.fabric)
        kinds = may_bind(len(seats), self.fabric)
        self.implied = [kind for kind in kinds if self._is_implied(kind)]
        self.kinds = [kind for kind in kinds if kind not in self.implied]
        self.loads = self.group_loads.loads(self.kinds)
        self.edge_rows, self.direct, self.routes = self._split(self._routes(self.kinds))
        self.link_ids, self.at = self._used(self.loads.link, self.routes)
        self.ranks = Family(self._rank_beginning())
        self.groups = Family(self.group_loads.beginning)
        # Latency knows only whether a transfer leaves its node.
        self.edges = Family(pairs(self.edge_rows.name, self.edge_rows.level.clip(max=1)))
        self.links = Family(self._link_beginning())
        self.groups.neighbours = self._next_to_groups()
        self.edges.neighbours = self._next_to_edges()
        self.links.neighbours = self._next_to_links()
        self.ranks.neighbours = self._next_to_ranks()

    def _is_implied(self, kind: int) -> bool:
        """Whether a port's colour would follow from that of its rank.

        It does where no group tells its members' ports apart and no NIC is slower than the others: who
        loads a port then follows from the groups and edges of the rank.
        """
        degraded = kind >= 2 and any(fault.kind == "nic" for fault in self.job.faults)
        return kind < LINKS_PER_GPU and not degraded and self.group_loads.same_for_all(kind)

    def _routes(self, kinds: Sequence[int]) -> list[Int64]:
        """Links of each edge by kind; -1 for none."""
        # The transfers of a teaching world take the time that is given for them, whatever their way.
        return routes(self.transfers, kinds, self.fabric) if self.job.fixed_times is None else []

    def _split(self, ways: Sequence[Int64]) -> tuple[Edges, Edges, list[Int64]]:
        """Transfers that come by links of the graph, those that do not, and the links of the former."""
        coloured = np.zeros(len(self.transfers.src), dtype=np.bool_)
        for way in ways:
            coloured |= way >= 0
        through, direct = (Edges(*(c[which] for c in self.transfers)) for which in (coloured, ~coloured))
        return through, direct, [way[coloured] for way in ways]

    def _used(self, loaded: Int64, ways: Sequence[Int64]) -> tuple[Int64, Int64]:
        """Links that somebody loads, ascending; and the index of each link among them, -1 for none."""
        used = np.zeros(len(self.fabric) + 1, dtype=np.bool_)
        for link in (loaded, *ways):
            used[link] = True
        used[-1] = False  # where a route has no such link
        return np.flatnonzero(used), np.where(used, np.cumsum(used) - 1, -1)

    def link_classes(self) -> tuple[Int64, Int64]:
        """Links that may bind, ascending, and for each of them the first of its class."""
        first = np.full(len(self.fabric), -1, dtype=np.int64)
        first[self.link_ids] = self.link_ids[self.links.colours]
        for kind in self.implied:
            used = self.group_loads.who_loads(kind)
            if self.job.fixed_times is None:
                used = np.concatenate([used, who_passes(self.transfers, kind)])
            ports = self.fabric.links_of(self.ranks.colours[used], kind)
            first[self.fabric.links_of(used, kind)] = ports
        links = np.flatnonzero(first >= 0)
        return links, first[links]

    @property
    def families(self) -> tuple[Family, ...]:
        """In the order in which a round recolours them."""
        return self.groups, self.edges, self.links, self.ranks

    def refine(self) -> None:
        """Colour until no class splits any more."""
        refine(self.families)
        assert self._equitable(), "two crowds had the same hash"

    def _equitable(self) -> bool:
        """Whether all that has one colour began with one, and has the same neighbours."""
        return all(family.is_equitable() for family in self.families)

    def _rank_beginning(self) -> Int64:
        """What a rank does, and how fast its device is."""
        known = self.seats.template.copy()
        for rank, left in left_of(self.job.faults, "straggler").items():
            known[rank] = -1 - self.words[known[rank], left]
        return known - int(known.min())

    def _link_beginning(self) -> Int64:
        """Of what kind a link is, and what is left of its capacity."""
        fabric, known = self.fabric, self.fabric.kinds()
        for rank, left in left_of(self.job.faults, "nic").items():
            for nic in (fabric.gpu_link(rank, "nic.out"), fabric.gpu_link(rank, "nic.in")):
                known[nic] = len(KINDS) + self.words[known[nic], left]
        return known[self.link_ids]

    def _next_to_groups(self) -> list[Column | Crowd]:
        """Members by the name they have for the group, and links by what it puts on them."""
        crowds: list[Column | Crowd] = []
        for place, column in enumerate(self.seats.groups.values()):
            rank = np.flatnonzero(column >= 0)
            crowds.append(Crowd(self.ranks, column[rank], rank, np.full(len(rank), place)))
        group, link, what = self.loads
        return [*crowds, Crowd(self.links, group, self.at[link], what)]

    def _next_to_edges(self) -> list[Column | Crowd]:
        """Both ends, and the links of the route."""
        ends = [Column(self.ranks, end) for end in (self.edge_rows.src, self.edge_rows.dst)]
        return [*ends, *(Column(self.links, self.at[route]) for route in self.routes)]

    def _next_to_links(self) -> list[Column | Crowd]:
        """Who loads a port, by the name that its rank has for them; all who load a link of a switch."""
        group, link, what = self.loads
        own, at = link < self.fabric.first_leaf_link, self.at[link]
        columns: list[Column | Crowd] = []
        for name in range(len(self.seats.groups)):
            rows = np.flatnonzero(own & (self.group_loads.name[group] == name))
            for lane in lanes(at[rows], rows, len(self.links)):
                self.links.begin_with(np.append(what, -1)[lane])
                columns.append(Column(self.groups, np.append(group, -1)[lane]))
        ports = [route for kind, route in zip(self.kinds, self.routes, strict=False) if kind < LINKS_PER_GPU]
        for edge in _by_name(self.edge_rows) if ports else ():
            owner = self.at[np.concatenate([port[edge] for port in ports])]
            who = np.tile(edge, len(ports))[owner >= 0]
            columns += [Column(self.edges, lane) for lane in lanes(owner[owner >= 0], who, len(self.links))]
        columns.append(Crowd(self.groups, at[~own], group[~own], what[~own]))
        for route in self.routes[len(ports) :]:
            edge = np.flatnonzero(route >= 0)
            columns.append(Crowd(self.edges, self.at[route[edge]], edge, np.zeros_like(edge)))
        return columns

    def _next_to_ranks(self) -> list[Column | Crowd]:
        """Groups, edges, and other ends of transfers that have no colour, by their names."""
        columns = [Column(self.groups, column) for column in self.seats.groups.values()]
        through, direct = self.edge_rows, self.direct
        for edge in _by_name(through):
            for end in (through.src, through.dst):
                columns += [Column(self.edges, lane) for lane in lanes(end[edge], edge, len(self.seats))]
        for edge in _by_name(direct):
            for own, other in ((direct.src, direct.dst), (direct.dst, direct.src)):
                for lane in lanes(own[edge], edge, len(self.seats)):
                    self.ranks.begin_with(np.append(direct.level.clip(max=1), -1)[lane])
                    columns.append(Column(self.ranks, np.append(other, -1)[lane]))
        return list(columns)
