"""What a collective moves: bytes on every link and hops in sequence, by algorithm. Amounts only, no rates.

S is the size as nccl-tests counts it (`Collective` in `plan/program.py`), n the ranks of the group, N the
nodes they sit on. With one rank a node, the algorithms load a port with:

    ring all_reduce                     2(n-1)/n S     hops 2(n-1)
    ring all_gather, reduce_scatter      (n-1)/n S     hops n-1
    tree all_reduce                           2S       hops 2 ceil(log2 n)
    chain broadcast, reduce                    S       hops n-1
    direct all_to_all                    (n-1)/n S     hops n-1

Over nodes of several ranks a ring is cut in as many rings as ranks a node takes part with, and each enters
and leaves a node through other NICs, so that all NICs share the work (as NCCL's channel search does).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from fractions import Fraction
from functools import lru_cache
from math import gcd
from typing import Literal

import msgspec

from emulator.plan.program import CollectiveKind
from emulator.spec.errors import JobError
from emulator.spec.fabric import Fabric, Kind

Algorithm = Literal["ring", "tree", "hierarchical", "direct", "nvls"]

ALGORITHMS: dict[CollectiveKind, tuple[Algorithm, ...]] = {
    "all_reduce": ("ring", "tree", "hierarchical", "direct", "nvls"),
    "all_gather": ("ring", "hierarchical", "direct"),
    "reduce_scatter": ("ring", "hierarchical", "direct"),
    "broadcast": ("ring",),
    "reduce": ("ring",),
    "all_to_all": ("direct",),
}
"""Algorithms that exist for each kind; a chain along the ring is how broadcast and reduce go."""


class Phase(msgspec.Struct, frozen=True):
    """Traffic that flows all at once: on link l, units x S / parts bytes."""

    loads: tuple[tuple[int, int], ...]
    """(link, units), sorted by link."""
    parts: int
    scale_up_hops: int
    """Hops in sequence inside nodes, and between nodes."""
    network_hops: int
    ranks: int
    """Ranks of one communicator of this phase, and the nodes they sit on."""
    nodes: int


class Pattern(msgspec.Struct, frozen=True):
    """A collective's traffic: phases one after the other (one phase, but for the hierarchical algorithm)."""

    kind: CollectiveKind | Literal["transfer"]
    algorithm: Algorithm
    bytes: int
    ranks: int
    nodes: int
    phases: tuple[Phase, ...]

    @property
    def link_bytes(self) -> dict[int, Fraction]:
        """Bytes on every link that is used, over all phases."""
        total: dict[int, Fraction] = {}
        for phase in self.phases:
            for link, units in phase.loads:
                total[link] = total.get(link, Fraction(0)) + Fraction(units * self.bytes, phase.parts)
        return total

    @property
    def scale_up_hops(self) -> int:
        """Hops in sequence inside nodes."""
        return sum(phase.scale_up_hops for phase in self.phases)

    @property
    def network_hops(self) -> int:
        """Hops in sequence between nodes."""
        return sum(phase.network_hops for phase in self.phases)

    @property
    def hops(self) -> int:
        """All hops in sequence: what each alpha is paid for."""
        return self.scale_up_hops + self.network_hops

    def sent(self, gpu: int, fabric: Fabric) -> Fraction:
        """Bytes that a GPU puts on its wires, scale-up port and NIC together."""
        loads = self.link_bytes
        ports = (fabric.gpu_link(gpu, "scale_up.out"), fabric.gpu_link(gpu, "nic.out"))
        return sum((loads.get(port, Fraction(0)) for port in ports), Fraction(0))


def pattern(
    kind: CollectiveKind, ranks: Sequence[int], size: int, algorithm: Algorithm, fabric: Fabric, root: int = 0
) -> Pattern:
    """Traffic of a collective of `size` bytes (S) over `ranks`, GPU numbers in ring order.

    root: index in the group, for broadcast and reduce. One rank alone, or no bytes, moves nothing and has no
    phases. JobError if the kind has no such algorithm, a rank comes twice, or nodes are unequal where that
    matters.
    """
    members = tuple(ranks)
    if algorithm not in ALGORITHMS[kind]:
        known = ", ".join(ALGORITHMS[kind])
        raise JobError(f'algorithm = "{algorithm}": {kind} has {known}')
    phases = _phases(kind, members, algorithm, fabric, root)
    nodes = len(_by_node(members, fabric))
    return Pattern(kind, algorithm, size, len(members), nodes, phases if size else ())


def transfer_pattern(src: int, dst: int, size: int, fabric: Fabric) -> Pattern:
    """Traffic of one send and its receive: every link of the route carries the bytes once."""
    route = fabric.route(src, dst)
    across = fabric.level(src, dst) != "scale_up"
    nodes = 1 + across
    phase = Phase(tuple(sorted((link, 1) for link in route)), 1, int(not across), int(across), 2, nodes)
    return Pattern("transfer", "direct", size, 2, nodes, (phase,) if route and size else ())


def ring_orders(ranks: Sequence[int], fabric: Fabric) -> tuple[tuple[int, ...], ...]:
    """GPUs in the order in which each of the rings comes to them; every ring takes an equal share of S."""
    nodes = _by_node(tuple(ranks), fabric)
    return tuple(tuple(gpu for path in _paths(nodes, ring) for gpu in path) for ring in range(_rings(nodes)))


def busbw_factor(kind: CollectiveKind, ranks: int) -> Fraction:
    """Bus bandwidth over algorithm bandwidth S / seconds (nccl-tests PERFORMANCE.md)."""
    if kind == "all_reduce":
        return Fraction(2 * (ranks - 1), ranks)
    if kind in ("broadcast", "reduce"):
        return Fraction(1 if ranks > 1 else 0)
    return Fraction(ranks - 1, ranks)


def busbw(kind: CollectiveKind, ranks: int, size: int, seconds: float) -> float:
    """Bus bandwidth in bytes per second; 0 where nothing moves, so that one rank alone gives no NaN."""
    factor = busbw_factor(kind, ranks)
    return float(factor * size) / seconds if factor and size else 0.0


@lru_cache(maxsize=4096)
def _phases(
    kind: CollectiveKind, ranks: tuple[int, ...], algorithm: Algorithm, fabric: Fabric, root: int
) -> tuple[Phase, ...]:
    """Phases in shares of S, whatever S is."""
    if len(set(ranks)) != len(ranks):
        raise JobError(f"a group of {len(ranks)} ranks has only {len(set(ranks))} different GPUs")
    if len(ranks) == 1:
        return ()
    nodes = _by_node(ranks, fabric)
    if algorithm == "direct":
        phases = _direct(kind, ranks, fabric)
    elif algorithm == "hierarchical" and len(nodes) > 1:
        phases = _hierarchical(kind, nodes, fabric)
    elif algorithm == "tree":
        phases = (_tree(nodes, fabric),)
    elif algorithm == "nvls":
        phases = (_nvls(ranks, nodes, fabric),)
    elif kind in ("broadcast", "reduce"):
        phases = (_chain(kind, ranks, nodes, root, fabric),)
    else:
        phases = (_ring(nodes, _rounds(kind), fabric),)
    return phases


def _rounds(kind: CollectiveKind) -> int:
    """Count the ways around a ring: an all_reduce is a reduce_scatter and an all_gather."""
    return 2 if kind == "all_reduce" else 1


@lru_cache(maxsize=1024)
def _by_node(ranks: tuple[int, ...], fabric: Fabric) -> tuple[tuple[int, ...], ...]:
    """Members of each node, nodes in the order in which the group comes to them."""
    nodes: dict[int, list[int]] = {}
    for gpu in ranks:
        nodes.setdefault(fabric.cluster.node_of(gpu), []).append(gpu)
    return tuple(tuple(members) for members in nodes.values())


def _phase(loads: Counter[int], parts: int, hops: tuple[int, int], ranks: int, nodes: int) -> Phase:
    """Bring the loads to lowest terms."""
    common = gcd(parts, *loads.values())
    units = tuple(sorted((link, count // common) for link, count in loads.items() if count))
    return Phase(units, parts // common, *hops, ranks, nodes)


def _ports(gpus: Iterable[int], kind: Kind, units: int, loads: Counter[int], fabric: Fabric) -> None:
    for gpu in gpus:
        loads[fabric.gpu_link(gpu, kind)] += units


def _rings(nodes: Sequence[tuple[int, ...]]) -> int:
    """Rings that share the work: with one node the switch makes them all alike, so one is enough."""
    return min(len(members) for members in nodes) if len(nodes) > 1 else 1


def _path(members: Sequence[int], ring: int, backwards: bool) -> tuple[int, ...]:
    """Order in which a ring visits the GPUs of a node.

    It enters at GPU `ring` and leaves at the next one, or the other way round. Nodes alternate, so a ring
    leaves one node and enters the next on the same rail, and every NIC serves one ring each way.
    """
    start = ring % len(members)
    down = tuple(members[(start - step) % len(members)] for step in range(len(members)))
    return down[::-1] if backwards else down


def _paths(nodes: Sequence[tuple[int, ...]], ring: int) -> list[tuple[int, ...]]:
    if len(nodes) == 1:
        return [nodes[0]]
    return [_path(members, ring, index % 2 == 1) for index, members in enumerate(nodes)]


def _once_around(nodes: Sequence[tuple[int, ...]], fabric: Fabric) -> Counter[int]:
    """Hops that cross each link when something goes once around every ring."""
    loads: Counter[int] = Counter()
    for ring in range(_rings(nodes)):
        paths = _paths(nodes, ring)
        for path, after in zip(paths, paths[1:] + paths[:1], strict=True):
            _ports(path[:-1], "scale_up.out", 1, loads, fabric)
            _ports(path[1:], "scale_up.in", 1, loads, fabric)
            loads.update(fabric.route(path[-1], after[0]))
    return loads


def _ring(nodes: Sequence[tuple[int, ...]], rounds: int, fabric: Fabric) -> Phase:
    """Every hop of every ring carries n-1 of the n chunks of the ring's share, once or (all_reduce) twice."""
    n = sum(len(members) for members in nodes)
    steps = rounds * (n - 1)
    loads = _once_around(nodes, fabric)
    for link in loads:
        loads[link] *= steps
    between = rounds * (len(nodes) - 1)
    return _phase(loads, n * _rings(nodes), (steps - between, between), n, len(nodes))


def _chain(
    kind: CollectiveKind, ranks: tuple[int, ...], nodes: Sequence[tuple[int, ...]], root: int, fabric: Fabric
) -> Phase:
    """Pipelined chain: the ring without the hop that would come back to the root (leave it, for a reduce)."""
    loads = _once_around(nodes, fabric)
    orders = ring_orders(ranks, fabric)
    for order in orders:
        at = order.index(ranks[root])
        hop = (order[at - 1], order[at]) if kind == "broadcast" else (order[at], order[(at + 1) % len(order)])
        loads.subtract(fabric.route(*hop))
    between = len(nodes) - 1
    return _phase(loads, len(orders), (len(ranks) - 1 - between, between), len(ranks), len(nodes))


def _parents(count: int) -> list[int]:
    """Parent of each node of a binary tree in which odd numbers are leaves and 0 is the root (-1).

    Sanders, Speck, Traff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan" (2009).
    """
    parents = [-1]
    for node in range(1, count):
        bit = node & -node
        above = (node ^ bit) | (bit << 1)
        parents.append(above if above < count else node ^ bit)
    return parents


def _tree(nodes: Sequence[tuple[int, ...]], fabric: Fabric) -> Phase:
    """Double binary tree between nodes, chains inside, as NCCL has it: each tree reduces and broadcasts S/2.

    A node that is inside one tree is a leaf of the other: the second tree is the first mirrored, or shifted
    by one where the count is odd. One channel for every rank a node takes part with, each with its own head.
    """
    loads: Counter[int] = Counter()
    count = len(nodes)
    channels = min(len(members) for members in nodes)
    parents = _parents(count)
    edges = [(node, above) for node, above in enumerate(parents) if above >= 0]
    flip = [(node + 1) % count if count % 2 else count - 1 - node for node in range(count)]
    edges += [(flip[node], flip[above]) for node, above in edges]
    for channel in range(channels):
        heads = [members[channel % len(members)] for members in nodes]
        for node, above in edges:
            loads.update(fabric.route(heads[node], heads[above]))
            loads.update(fabric.route(heads[above], heads[node]))
        for members in nodes:
            head = channel % len(members)
            chain = (*members[head:], *members[:head])
            # Both trees go along the chain: up from all but the head, down from all but the tail.
            for port in ("scale_up.out", "scale_up.in"):
                _ports(chain[1:], port, 2, loads, fabric)
                _ports(chain[:-1], port, 2, loads, fabric)
    n = sum(len(members) for members in nodes)
    longest = max(len(members) for members in nodes)
    hops = (2 * (longest - 1), 2 * (count - 1).bit_length())
    return _phase(loads, 2 * channels, hops, n, count)


def _nvls(ranks: tuple[int, ...], nodes: Sequence[tuple[int, ...]], fabric: Fabric) -> Phase:
    """Reduction in the switch: it pulls S from every GPU, which multicasts its nth part of the result.

    So a port carries S + S/n each way, against 2(n-1)/n S in a ring.
    """
    if len(nodes) > 1:
        raise JobError(f'algorithm = "nvls" works inside one node; the group is on {len(nodes)}')
    loads: Counter[int] = Counter()
    n = len(ranks)
    for port in ("scale_up.out", "scale_up.in"):
        _ports(ranks, port, n + 1, loads, fabric)
    return _phase(loads, n, (1, 0), n, 1)


def _direct(kind: CollectiveKind, ranks: tuple[int, ...], fabric: Fabric) -> tuple[Phase, ...]:
    """Every ordered pair exchanges S/n by its own route; twice for an all_reduce.

    Pairs are counted, not listed: the members that a rank reaches in its node, past its leaf, past its pod.
    A rank has n-1 partners in turn in an all_to_all, and sends to all at once otherwise.
    """
    cluster = fabric.cluster
    n = len(ranks)
    in_node = Counter(cluster.node_of(gpu) for gpu in ranks)
    in_leaf = Counter(cluster.leaf_of(gpu) for gpu in ranks)
    in_both = Counter((cluster.node_of(gpu), cluster.leaf_of(gpu)) for gpu in ranks)
    in_pod = Counter(cluster.pod_of(gpu) for gpu in ranks)
    loads: Counter[int] = Counter()
    for gpu in ranks:
        node, leaf, pod = cluster.node_of(gpu), cluster.leaf_of(gpu), cluster.pod_of(gpu)
        past_node = n - in_node[node]
        past_leaf = past_node - in_leaf[leaf] + in_both[node, leaf]
        past_pod = n - in_pod[pod]
        for direction in (0, 1):
            loads[fabric.gpu_link(gpu, "scale_up.out") + direction] += in_node[node] - 1
            loads[fabric.gpu_link(gpu, "nic.out") + direction] += past_node
            if past_leaf:
                loads[fabric.first_leaf_link + 2 * leaf + direction] += past_leaf
            if past_pod:
                loads[fabric.first_pod_link + 2 * pod + direction] += past_pod
    hops = n - 1 if kind == "all_to_all" else 1
    between = len(in_node) > 1
    once = _phase(loads, n, (0 if between else hops, hops if between else 0), n, len(in_node))
    return (once,) * _rounds(kind)


def _hierarchical(
    kind: CollectiveKind, nodes: Sequence[tuple[int, ...]], fabric: Fabric
) -> tuple[Phase, ...]:
    """Reduce-scatter in each node, the collective between equal members of the nodes on S/g, all-gather back.

    An all_gather has no first phase, a reduce_scatter no last.
    """
    g = len(nodes[0])
    counts = sorted({len(members) for members in nodes})
    if len(counts) > 1:
        raise JobError(
            f'algorithm = "hierarchical" needs equal numbers of ranks on all nodes, not {counts[0]} on one '
            f"and {counts[-1]} on another"
        )
    inside: Counter[int] = Counter()
    between: Counter[int] = Counter()
    count = len(nodes)
    for members in nodes:
        _ports(members, "scale_up.out", g - 1, inside, fabric)
        _ports(members, "scale_up.in", g - 1, inside, fabric)
    steps = _rounds(kind) * (count - 1)
    for members, after in zip(nodes, [*nodes[1:], nodes[0]], strict=True):
        for source, target in zip(members, after, strict=True):
            for link in fabric.route(source, target):
                between[link] += steps
    across = (_phase(between, count * g, (0, steps), count, count),)
    if g == 1:
        return across
    local = (_phase(inside, g, (g - 1, 0), g, 1),)
    if kind == "all_reduce":
        return local + across + local
    return across + local if kind == "all_gather" else local + across
