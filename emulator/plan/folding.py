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
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Sequence

import msgspec

from emulator.plan.collectives import ALGORITHMS, pattern
from emulator.plan.program import Collective, Program, Transfer
from emulator.spec.fabric import GPU_KINDS, Fabric
from emulator.spec.faults import left_of

Loads = tuple[tuple[int, Hashable], ...]
"""(link, what is put on it) pairs."""


def fold(program: Program) -> Program:
    """Merge the classes of a program in which every rank is a class of its own.

    The result plays the same: its trace, expanded to all ranks, is the trace of the program given.
    """
    graph = _Graph(program)
    graph.refine()
    members: dict[int, list[int]] = defaultdict(list)
    for rank, colour in enumerate(graph.rank_colour):
        members[colour].append(rank)
    seats = program.classes
    classes = tuple(
        msgspec.structs.replace(seats[ranks[0]], members=tuple(ranks)) for ranks in members.values()
    )
    return msgspec.structs.replace(
        program,
        classes=classes,
        seats=seats,
        group_class=tuple(_first_of(graph.group_colour)),
        link_class=dict(
            zip(graph.links, (graph.links[i] for i in _first_of(graph.link_colour)), strict=True)
        ),
    )


def _first_of(colours: Sequence[int]) -> Iterable[int]:
    """For each index the first index of the same colour."""
    first: dict[int, int] = {}
    return [first.setdefault(colour, index) for index, colour in enumerate(colours)]


def _numbered(keys: Iterable[Hashable]) -> list[int]:
    """Equal keys get equal numbers, counted in the order in which they first come."""
    number: dict[Hashable, int] = {}
    return [number.setdefault(key, len(number)) for key in keys]


def _crowd(colours: Iterable[Hashable]) -> frozenset[tuple[Hashable, int]]:
    """A multiset as a value: what there is, and how often."""
    return frozenset(Counter(colours).items())


class _Graph:
    """Ranks, groups, edges and links of an unfolded program, and their colours."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.fabric = Fabric(program.job.cluster)
        seats = program.classes
        assert all(seat.members == (rank,) for rank, seat in enumerate(seats)), "already folded"
        self.works = [self._works(template) for template in range(len(program.templates))]
        self.binding = self._binding(len(seats))
        self.edges = [
            (rank, seat.peers[peer], peer)
            for rank, seat in enumerate(seats)
            for peer in self.works[seat.template][1]
        ]
        self.group_loads = [self._group_loads(g) for g in range(len(program.groups))]
        self.edge_loads: list[Loads] = [
            tuple((link, 1) for link in self.fabric.route(src, dst) if self._may_bind(link))
            for src, dst, _ in self.edges
        ]
        loads = [link for loads in (*self.group_loads, *self.edge_loads) for link, _ in loads]
        self.links = sorted(set(loads))
        self._index = {link: i for i, link in enumerate(self.links)}
        slow = left_of(program.job.faults, "straggler")
        self.rank_colour = _numbered((seat.template, slow.get(r, 1)) for r, seat in enumerate(seats))
        self.group_colour = _numbered(self._group_shape(g) for g in range(len(program.groups)))
        self.edge_colour = _numbered(self._edge_shape(*edge) for edge in self.edges)
        degraded = left_of(program.job.faults, "nic")
        self.link_colour = _numbered(
            (self.fabric.kind(link), degraded.get(self.fabric.gpu_of_nic(link), 1)) for link in self.links
        )

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

    def _group_loads(self, group: int) -> Loads:
        """What the group puts on each link that may bind: units of each of its patterns."""
        ranks = self.program.groups[group].ranks
        onto: dict[int, list[Hashable]] = defaultdict(list)
        for work in self._collectives(group):
            for algorithm in self._algorithms(work):
                if algorithm == "nvls" and not self._one_node(ranks):
                    continue
                traffic = pattern(work.kind, ranks, 1, algorithm, self.fabric, work.root)  # type: ignore[arg-type]
                for number, phase in enumerate(traffic.phases):
                    for link, units in phase.loads:
                        if self._may_bind(link):
                            onto[link].append((work.kind, work.root, algorithm, number, units))
        return tuple((link, tuple(each)) for link, each in sorted(onto.items()))

    def _one_node(self, ranks: Sequence[int]) -> bool:
        node = self.fabric.cluster.node_of
        return len({node(rank) for rank in ranks}) == 1

    def _group_shape(self, group: int) -> Hashable:
        """What latency depends on: how many ranks of the group sit together on how many nodes."""
        node = self.fabric.cluster.node_of
        here = self.program.groups[group]
        together = Counter(node(rank) for rank in here.ranks)
        return here.axis, _crowd(together.values()), tuple(self._collectives(group))

    def _edge_shape(self, src: int, dst: int, peer: str) -> Hashable:
        return peer, self.fabric.level(src, dst)

    def refine(self) -> None:
        """Colour until nothing splits: at most one round for each class that there is in the end."""
        while True:
            before = self._counts()
            self._round()
            if self._counts() == before:
                return

    def _counts(self) -> tuple[int, ...]:
        colours = (self.rank_colour, self.group_colour, self.edge_colour, self.link_colour)
        return tuple(len(set(each)) for each in colours)

    def _round(self) -> None:
        """Everybody takes on the colours of his neighbours."""
        rank, link, at = self.rank_colour, self.link_colour, self._index
        groups = _numbered(
            (
                self.group_colour[g],
                _crowd(rank[r] for r in group.ranks),
                _crowd((link[at[each]], load) for each, load in self.group_loads[g]),
            )
            for g, group in enumerate(self.program.groups)
        )
        edges = _numbered(
            (
                self.edge_colour[e],
                rank[src],
                rank[dst],
                _crowd(link[at[each]] for each, _ in self.edge_loads[e]),
            )
            for e, (src, dst, _) in enumerate(self.edges)
        )
        on_link: list[list[Hashable]] = [[] for _ in self.links]
        for g, loads in enumerate(self.group_loads):
            for each, load in loads:
                on_link[at[each]].append((0, groups[g], load))
        for e, loads in enumerate(self.edge_loads):
            for each, _ in loads:
                on_link[at[each]].append((1, edges[e]))
        near: list[list[Hashable]] = [
            [(name, groups[g]) for name, g in sorted(seat.groups.items())] for seat in self.program.classes
        ]
        for e, (src, dst, peer) in enumerate(self.edges):
            near[src].append(("to", peer, edges[e]))
            near[dst].append(("from", peer, edges[e]))
        self.group_colour, self.edge_colour = groups, edges
        self.link_colour = _numbered((link[i], _crowd(there)) for i, there in enumerate(on_link))
        self.rank_colour = _numbered((rank[r], _crowd(there)) for r, there in enumerate(near))
