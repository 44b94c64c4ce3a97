"""Folding: ranks that do the same at the same instants become one class, played once.

The classes are an equitable partition, found by colour refinement of a graph of ranks, groups, directed edges
of point-to-point transfers, and the links that can bind. Each begins with a colour of what is known of it
alone: a rank's template and the speed of its device, the shape of a group's algorithm, the kind of a link and
its capacity. In each round it takes on the colours of its neighbours, counted and not ordered (the order
inside a ring must not leak), until no class splits any more:

    group   the colours of its members, and of the links it loads with what it puts on each
    edge    its two ends, and the links of its route
    link    the groups and edges that load it, with what they load it with
    rank    its groups and edges, each with the name it has for them

Two members of a class then meet, in every round of the future, the same crowd on the same links, so the
unique max-min levels are equal and one member speaks for all. Links that can never bind are left out: the
NICs of the job beneath a leaf or a pod stay, all together, within what its uplink carries.

Colours are integers in arrays. A crowd is told from another by the sum of the hashes of who is in it, so a
round is a few array operations; that no two were taken for the same is checked once, exactly, at the end.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from emulator.plan.collectives import ALGORITHMS, pattern
from emulator.plan.program import Collective, Folding, Program, Seats, Transfer
from emulator.spec.fabric import GPU_KINDS, Fabric
from emulator.spec.faults import left_of

Int64 = npt.NDArray[np.int64]
UInt64 = npt.NDArray[np.uint64]


def fold(program: Program) -> Program:
    """Merge the classes of a program in which every rank is a class of its own.

    The result plays the same: its trace, expanded to all ranks, is the trace of the program given.
    """
    graph = _Graph(program)
    graph.refine()
    members: dict[int, list[int]] = defaultdict(list)
    for rank, colour in enumerate(graph.ranks.tolist()):
        members[colour].append(rank)
    seats = program.classes
    classes = tuple(
        msgspec.structs.replace(seats[ranks[0]], members=tuple(ranks)) for ranks in members.values()
    )
    links = graph.link_ids
    folding = Folding(Seats.of(seats), _first_of(graph.groups), links, links[_first_of(graph.links)])
    return msgspec.structs.replace(program, classes=classes, folding=folding)


def _first_of(colours: Int64) -> Int64:
    """For each index the first index of the same colour."""
    _, first, inverse = np.unique(colours, return_index=True, return_inverse=True)
    return first[inverse]


def _numbered(keys: Iterable[Hashable]) -> Int64:
    """Equal keys get equal numbers, counted in the order in which they first come."""
    number: dict[Hashable, int] = {}
    return np.array([number.setdefault(key, len(number)) for key in keys], dtype=np.int64)


def _mixed(values: Int64 | UInt64) -> UInt64:
    """Scatter 64-bit values so that sums of them tell crowds apart (the finalizer of SplitMix64)."""
    x = values.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class _Relation(NamedTuple):
    """Who is next to whom: rows of an entity, a neighbour and a tag that says how."""

    owner: Int64
    other: Int64
    tag: Int64

    @classmethod
    def of(cls, rows: Iterable[tuple[int, int, int]]) -> _Relation:
        """Relation of these rows."""
        table = np.array(list(rows), dtype=np.int64).reshape(-1, 3)
        return cls(*table.T)

    def turned(self) -> _Relation:
        """The same, seen from the neighbours."""
        return _Relation(self.other, self.owner, self.tag)


def _recoloured(colours: Int64, neighbours: Sequence[tuple[_Relation, Int64]]) -> Int64:
    """Colours that tell apart what has another colour or other neighbours, counted and not ordered."""
    hashes = _mixed(colours)
    for relation, theirs in neighbours:
        crowds = np.zeros(len(colours), dtype=np.uint64)
        # Mixed once more often than the tag, or a colour and a tag could change places.
        who = _mixed(_mixed(_mixed(theirs)[relation.other]) ^ _mixed(relation.tag))
        np.add.at(crowds, relation.owner, who)
        hashes = _mixed(hashes ^ _mixed(crowds))
    return np.unique(hashes, return_inverse=True)[1].astype(np.int64)


def _alike(colours: Int64, relation: _Relation, theirs: Int64) -> bool:
    """Whether all entities of a colour have the same crowd of neighbours: exactly, without hashes."""
    code = relation.tag * (int(theirs.max(initial=0)) + 1) + theirs[relation.other]
    order = np.lexsort((code, relation.owner))
    owner, code = relation.owner[order], code[order]
    count = np.bincount(owner, minlength=len(colours))
    begin = np.cumsum(count) - count
    first = _first_of(colours)
    if not np.array_equal(count, count[first]):
        return False
    place = np.arange(len(owner)) - begin[owner]
    return np.array_equal(code, code[begin[first[owner]] + place])


class _Graph:
    """Ranks, groups, edges and links of an unfolded program, and their colours."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.fabric = Fabric(program.job.cluster)
        seats = program.classes
        assert all(seat.members == (rank,) for rank, seat in enumerate(seats)), "already folded"
        self.works = [self._works(template) for template in range(len(program.templates))]
        self.binding = self._binding(len(seats))
        edges = [
            (rank, seat.peers[peer], peer)
            for rank, seat in enumerate(seats)
            for peer in self.works[seat.template][1]
        ]
        loads = [self._group_loads(g) for g in range(len(program.groups))]
        # The transfers of a teaching world take the time that is given for them, whatever their way.
        given = program.job.fixed_times is not None
        routes = [
            () if given else tuple(filter(self._may_bind, self.fabric.route(src, dst)))
            for src, dst, _ in edges
        ]
        used = sorted({link for each in (*loads, *routes) for link in each})
        self.link_ids = np.array(used, dtype=np.int64)
        at = {link: i for i, link in enumerate(used)}
        word: dict[Hashable, int] = {}

        def tag(of: Hashable) -> int:
            return word.setdefault(of, len(word))

        self.members = _Relation.of(
            (g, rank, tag(name)) for rank, seat in enumerate(seats) for name, g in seat.groups.items()
        )
        self.loads = _Relation.of(
            (g, at[link], tag(what)) for g, load in enumerate(loads) for link, what in load.items()
        )
        self.sources = _Relation.of((e, src, tag(("to", peer))) for e, (src, _, peer) in enumerate(edges))
        self.targets = _Relation.of((e, dst, tag(("from", peer))) for e, (_, dst, peer) in enumerate(edges))
        self.routes = _Relation.of((e, at[link], 0) for e, route in enumerate(routes) for link in route)
        self._begin(edges)

    def _begin(self, edges: Sequence[tuple[int, int, str]]) -> None:
        """Colour everything by what is known of it alone."""
        job, fabric = self.program.job, self.fabric
        slow, degraded = left_of(job.faults, "straggler"), left_of(job.faults, "nic")
        self.ranks = _numbered((s.template, slow.get(r, 1)) for r, s in enumerate(self.program.classes))
        self.groups = _numbered(self._group_shape(g) for g in range(len(self.program.groups)))
        # Latency knows only whether a transfer leaves its node.
        self.edges = _numbered((peer, fabric.level(src, dst) == "scale_up") for src, dst, peer in edges)
        self.links = _numbered(
            (fabric.kind(link), degraded.get(fabric.gpu_of_nic(link), 1)) for link in self.link_ids.tolist()
        )
        self.beginning = (self.ranks, self.groups, self.edges, self.links)

    def _works(self, template: int) -> tuple[dict[str, tuple[Collective, ...]], tuple[str, ...]]:
        """Distinct collectives of a template by group name, and the names of peers it sends to."""
        by_group: dict[str, dict[Collective, None]] = defaultdict(dict)
        peers: dict[str, None] = {}
        for op in self.program.templates[template].ops:
            if isinstance(op.work, Collective):
                # Size changes how much, not where; what differs in kind or root has another pattern.
                by_group[op.work.group][msgspec.structs.replace(op.work, bytes=1)] = None
            elif isinstance(op.work, Transfer) and op.work.kind == "send":
                peers[op.work.peer] = None
        return {name: tuple(works) for name, works in by_group.items()}, tuple(peers)

    def _binding(self, ranks: int) -> set[str]:
        """Kinds of switch links that the NICs of this job could fill; ports of GPUs always count."""
        fabric = self.fabric
        kinds: set[str] = set()
        beneath: Counter[int] = Counter()
        for gpu in range(ranks):
            cluster = fabric.cluster
            if fabric.leaves > 1:
                beneath[fabric.first_leaf_link + 2 * cluster.leaf_of(gpu)] += 1
            if fabric.pods > 1:
                beneath[fabric.first_pod_link + 2 * cluster.pod_of(gpu)] += 1
        nic = fabric.capacity(fabric.gpu_link(0, "nic.out"))
        for link, gpus in beneath.items():
            if gpus * nic > fabric.capacity(link):
                kinds |= {fabric.kind(link), fabric.kind(link + 1)}
        return kinds

    def _may_bind(self, link: int) -> bool:
        kind = self.fabric.kind(link)
        return kind in GPU_KINDS or kind in self.binding

    def _collectives(self, group: int) -> tuple[Collective, ...]:
        """Distinct collectives of a group (all members have the same)."""
        rank = self.program.groups[group].ranks[0]
        seat = self.program.classes[rank]
        name = next(name for name, index in seat.groups.items() if index == group)
        return self.works[seat.template][0].get(name, ())

    def _algorithms(self, work: Collective) -> tuple[str, ...]:
        wanted = self.program.job.collective_algorithm
        known = ALGORITHMS[work.kind]
        if wanted != "auto" and wanted in known:
            return (wanted,)
        return ("ring", "tree", "nvls") if work.kind == "all_reduce" else known[:1]

    def _group_loads(self, group: int) -> dict[int, tuple[Hashable, ...]]:
        """What the group puts on each link that may bind: units of each of its patterns."""
        ranks = self.program.groups[group].ranks
        onto: dict[int, tuple[Hashable, ...]] = {}
        for work in self._collectives(group):
            for algorithm in self._algorithms(work):
                if algorithm == "nvls" and not self._one_node(ranks):
                    continue
                traffic = pattern(work.kind, ranks, 1, algorithm, self.fabric, work.root)  # type: ignore[arg-type]
                for number, phase in enumerate(traffic.phases):
                    for kind, row in enumerate(phase.units):
                        links = self.fabric.links_of(traffic.gpus[row > 0], kind)
                        for link, units in zip(links.tolist(), row[row > 0].tolist(), strict=True):
                            if self._may_bind(link):
                                what = (work.kind, work.root, algorithm, number, units)
                                onto[link] = (*onto.get(link, ()), what)
        return onto

    def _one_node(self, ranks: Sequence[int]) -> bool:
        node = self.fabric.cluster.node_of
        return len({node(rank) for rank in ranks}) == 1

    def _group_shape(self, group: int) -> Hashable:
        """What latency depends on: how many ranks of the group sit together on how many nodes."""
        node = self.fabric.cluster.node_of
        here = self.program.groups[group]
        together = Counter(Counter(node(rank) for rank in here.ranks).values())
        return here.axis, frozenset(together.items()), self._collectives(group)

    def refine(self) -> None:
        """Colour until nothing splits: at most one round for each class that there is in the end."""
        while True:
            before = self._counts()
            self._round()
            if self._counts() == before:
                break
        assert self._equitable(), "two crowds had the same hash"

    def _counts(self) -> tuple[int, ...]:
        return tuple(len(np.unique(each)) for each in (self.ranks, self.groups, self.edges, self.links))

    def _round(self) -> None:
        """Everybody takes on the colours of his neighbours."""
        self.groups = _recoloured(self.groups, self._next_to_groups())
        self.edges = _recoloured(self.edges, self._next_to_edges())
        self.links = _recoloured(self.links, self._next_to_links())
        self.ranks = _recoloured(self.ranks, self._next_to_ranks())

    def _next_to_groups(self) -> list[tuple[_Relation, Int64]]:
        return [(self.members, self.ranks), (self.loads, self.links)]

    def _next_to_edges(self) -> list[tuple[_Relation, Int64]]:
        return [(self.sources, self.ranks), (self.targets, self.ranks), (self.routes, self.links)]

    def _next_to_links(self) -> list[tuple[_Relation, Int64]]:
        return [(self.loads.turned(), self.groups), (self.routes.turned(), self.edges)]

    def _next_to_ranks(self) -> list[tuple[_Relation, Int64]]:
        ends = [(self.sources.turned(), self.edges), (self.targets.turned(), self.edges)]
        return [(self.members.turned(), self.groups), *ends]

    def _equitable(self) -> bool:
        """Whether all that has one colour began with one, and has the same neighbours."""
        colours_now = (self.ranks, self.groups, self.edges, self.links)
        kept = all(
            np.array_equal(first, first[_first_of(now)])
            for first, now in zip(self.beginning, colours_now, strict=True)
        )
        return kept and all(
            _alike(colours, relation, theirs)
            for colours, neighbours in (
                (self.groups, self._next_to_groups()),
                (self.edges, self._next_to_edges()),
                (self.links, self._next_to_links()),
                (self.ranks, self._next_to_ranks()),
            )
            for relation, theirs in neighbours
        )
