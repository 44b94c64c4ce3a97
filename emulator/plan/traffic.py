"""What a collective moves: units on every link, for all groups of one shape at once.

A *shape* is how the members of a group lie to each other: who shares a node, a leaf, a pod with whom. Traffic
follows from it, so the thousands of groups of a mesh, of a few shapes, cost as much as these few. Units are a
matrix: row k stands for links of KINDS[k], column i for the port of member i, or for the leaf or the pod of
which i is the first member.

    ring         every hop of every ring carries the n-1 chunks that its end lacks, twice for an all_reduce
    chain        the ring without the hop that would come back to the root: broadcast, reduce
    tree         double binary tree between nodes, chains inside
    nvls         reduction in the switch of one node
    direct       every ordered pair exchanges S/n by its own route
    hierarchical in the node, between equal members of the nodes, in the node
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, lru_cache
from itertools import chain
from math import gcd
from typing import Literal, NamedTuple

import msgspec
import numpy as np

from emulator.plan.op import CollectiveKind
from emulator.spec.arrays import Int64
from emulator.spec.errors import JobError
from emulator.spec.fabric import KINDS, Fabric

Algorithm = Literal["ring", "tree", "hierarchical", "direct", "nvls"]
Hops = tuple[int, int]
"""Hops in sequence inside nodes, and between nodes."""


class Nodes(NamedTuple):
    """Members sorted by node, nodes in the order in which the group comes to them."""

    order: Int64
    begin: Int64
    sizes: Int64


class Shape:
    """How the members of a group lie to each other.

    near: three rows (node, leaf, pod), for each member the first one that shares it. Equal shapes are equal.
    """

    def __init__(self, near: Int64) -> None:
        self.near = near
        self._key = near.tobytes()

    def __len__(self) -> int:
        return int(self.near.shape[1])

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Shape):
            return NotImplemented
        return self is other or self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __repr__(self) -> str:
        return f"<Shape: {len(self)} ranks on {len(self.nodes.sizes)} nodes>"

    @cached_property
    def nodes(self) -> Nodes:
        """Members sorted by node; where each node begins and how many it has."""
        order = np.argsort(self.near[0], kind="stable")
        _, begin, sizes = np.unique(self.near[0][order], return_index=True, return_counts=True)
        return Nodes(order, begin, sizes)


class Placed(NamedTuple):
    """Groups of one shape."""

    shape: Shape
    groups: Int64
    """Their indices, ascending."""
    members: Int64
    """GPU numbers in ring order, one row for each group."""


class Phase(msgspec.Struct, frozen=True, eq=False):
    """Traffic that flows all at once: units x S / parts bytes on a link."""

    units: Int64
    parts: int
    scale_up_hops: int
    """Hops in sequence inside nodes, and between nodes."""
    network_hops: int
    ranks: int
    """Ranks of one communicator of this phase, and the nodes they sit on."""
    nodes: int


class Traffic(msgspec.Struct, frozen=True, eq=False):
    """Phases one after the other (one, but for the hierarchical algorithm and direct all_reduce)."""

    kind: CollectiveKind | Literal["transfer"]
    algorithm: Algorithm
    ranks: int
    nodes: int
    phases: tuple[Phase, ...]


def placed(groups: Sequence[Sequence[int]], fabric: Fabric) -> list[Placed]:
    """Shapes of all groups and who has them, in order of their first groups."""
    length = np.fromiter(map(len, groups), dtype=np.int64, count=len(groups))
    begin = np.cumsum(length) - length
    gpus = _flat(groups, length, begin)
    found: list[Placed] = []
    for n in np.unique(length).tolist():
        alike = np.flatnonzero(length == n)
        members = gpus[begin[alike][:, None] + np.arange(n)]
        near = _nearest(fabric.places(members))
        for rows in _equal_rows(near):
            found.append(Placed(_known(Shape(near[:, rows[0]].copy())), alike[rows], members[rows]))
    return sorted(found, key=lambda each: int(each.groups[0]))


def shape_of(ranks: Sequence[int], fabric: Fabric) -> Shape:
    """Shape of one group; JobError if a rank comes twice."""
    if len(set(ranks)) != len(ranks):
        raise JobError(f"a group of {len(ranks)} ranks has only {len(set(ranks))} different GPUs")
    return placed([ranks], fabric)[0].shape


PAIRS = tuple(
    Shape(np.array([[0, level > 0], [0, level > 1], [0, level > 2]], dtype=np.int64)) for level in range(4)
)
"""Shapes of a pair by what it does not share: nothing, the node, the leaf too, the pod too."""


def pair_levels(src: Int64, dst: Int64, fabric: Fabric) -> Int64:
    """Which of PAIRS each source and its target are; rails of one node are apart and meet in its switch."""
    node, leaf, pod = (fabric.places(src) != fabric.places(dst)).view(np.int8)
    level: Int64 = (node * (1 + leaf + pod)).astype(np.int64)
    return level


@lru_cache(maxsize=1024)
def _known(shape: Shape) -> Shape:
    """The first of equal shapes, so that two of thousands of ranks need not be compared again."""
    return shape


def _flat(groups: Sequence[Sequence[int]], length: Int64, begin: Int64) -> Int64:
    """Members of all groups, one after the other."""
    total = int(length.sum())
    ranges = [each for each in groups if isinstance(each, range)]
    if len(ranges) < len(groups):
        return np.fromiter(chain.from_iterable(groups), dtype=np.int64, count=total)
    start = np.array([each.start for each in ranges], dtype=np.int64)
    step = np.array([each.step for each in ranges], dtype=np.int64)
    return np.repeat(start - begin * step, length) + np.arange(total) * np.repeat(step, length)


def _nearest(places: Int64) -> Int64:
    """For each element the first index along the last axis that has the same value."""
    indices = np.arange(places.shape[-1])
    changes = places[..., 1:] != places[..., :-1]
    ascending = bool((places[..., 1:] >= places[..., :-1]).all())
    if not ascending:
        order = np.argsort(places, axis=-1, kind="stable")
        ordered = np.take_along_axis(places, order, -1)
        changes = ordered[..., 1:] != ordered[..., :-1]
    first = np.zeros(places.shape, dtype=np.int64)
    first[..., 1:] = np.where(changes, indices[1:], 0)
    np.maximum.accumulate(first, axis=-1, out=first)
    if ascending:
        return first
    nearest: Int64 = np.empty_like(first)
    np.put_along_axis(nearest, order, np.take_along_axis(order, first, -1), -1)
    return nearest


def _equal_rows(near: Int64) -> list[Int64]:
    """Indices of groups (the second axis) that are equal in all else, each ascending."""
    left, found = np.arange(near.shape[1]), []
    while len(left):
        same = (near[:, left] == near[:, left[:1]]).all(axis=(0, 2))
        found.append(left[same])
        left = left[~same]
    return found


@lru_cache(maxsize=128)
def traffic(kind: CollectiveKind, shape: Shape, algorithm: Algorithm, root: int = 0) -> Traffic:
    """Traffic of a collective over a group of this shape, whatever S is.

    root: index in the group, for broadcast and reduce. One rank alone moves nothing and has no phases.
    JobError if nodes are unequal, or several, where that matters.
    """
    nodes = len(shape.nodes.sizes)
    if len(shape) == 1:
        phases: tuple[Phase, ...] = ()
    elif algorithm == "direct":
        phases = _direct(kind, shape)
    elif algorithm == "hierarchical" and nodes > 1:
        phases = _hierarchical(kind, shape)
    elif algorithm == "tree":
        phases = (_tree(shape),)
    elif algorithm == "nvls":
        phases = (_nvls(shape),)
    elif kind in ("broadcast", "reduce"):
        phases = (_chain(kind, shape, root),)
    else:
        phases = (_ring(kind, shape),)
    return Traffic(kind, algorithm, len(shape), nodes, phases)


@lru_cache(maxsize=len(PAIRS))
def transfer_traffic(level: int) -> Traffic:
    """Traffic of one send and its receive, by its level in PAIRS: every link of the route carries it once."""
    units = _routed(np.array([0]), np.array([1]), PAIRS[level])
    across = int(level > 0)
    return Traffic(
        "transfer", "direct", 2, 1 + across, (_phase(units, 1, (1 - across, across), 2, 1 + across),)
    )


def orders(shape: Shape) -> Int64:
    """Members in the order in which each ring comes to them, one row a ring; each has an equal share of S.

    With one node the switch makes all rings alike, so one is enough. Else there is one for every rank that
    all nodes have; it enters a node at member `ring` and leaves at the next one, or the other way round.
    Nodes alternate, so a ring leaves one node and enters the next on the same rail, and every NIC serves one
    ring each way.
    """
    order, begin, sizes = shape.nodes
    if len(sizes) == 1:
        return order[None]
    node = np.repeat(np.arange(len(sizes)), sizes)
    place = np.arange(len(shape)) - begin[node]
    ring = np.arange(sizes.min())[:, None]
    at = np.where(node % 2 == 1, ring + 1 + place, ring - place) % sizes[node]
    rings: Int64 = order[begin[node] + at]
    return rings


def _rounds(kind: CollectiveKind) -> int:
    """Count the ways around a ring: an all_reduce is a reduce_scatter and an all_gather."""
    return 2 if kind == "all_reduce" else 1


def _phase(units: Int64, parts: int, hops: Hops, ranks: int, nodes: int) -> Phase:
    """Bring the units to lowest terms."""
    common = gcd(parts, int(np.gcd.reduce(units, axis=None)))
    return Phase(units // common, parts // common, *hops, ranks, nodes)


def _routed(src: Int64, dst: Int64, shape: Shape) -> Int64:
    """How often the routes from each source to its target come by each link."""
    node, leaf, pod = shape.near
    outside = node[src] != node[dst]
    past_leaf = outside & (leaf[src] != leaf[dst])
    past_pod = past_leaf & (pod[src] != pod[dst])
    ends = [end[which] for which in (~outside, outside) for end in (src, dst)]
    ends += [leaf[end[past_leaf]] for end in (src, dst)] + [pod[end[past_pod]] for end in (src, dst)]
    return np.stack([np.bincount(end, minlength=len(shape)) for end in ends])


def _ports(units: Int64, shape: Shape) -> Int64:
    """Put units on both directions of the members' scale-up ports, and nothing else."""
    matrix = np.zeros((len(KINDS), len(shape)), dtype=np.int64)
    matrix[:2] = units
    return matrix


def _ring(kind: CollectiveKind, shape: Shape) -> Phase:
    """Every hop of every ring carries n-1 of the n chunks of the ring's share, once or (all_reduce) twice."""
    n, nodes, rings = len(shape), len(shape.nodes.sizes), orders(shape)
    steps = _rounds(kind) * (n - 1)
    units = steps * _routed(rings.ravel(), np.roll(rings, -1, axis=1).ravel(), shape)
    between = _rounds(kind) * (nodes - 1)
    return _phase(units, n * len(rings), (steps - between, between), n, nodes)


def _chain(kind: CollectiveKind, shape: Shape, root: int) -> Phase:
    """Pipelined chain: the ring without the hop that would come back to the root (leave it, for a reduce)."""
    n, nodes, rings = len(shape), len(shape.nodes.sizes), orders(shape)
    after = np.roll(rings, -1, axis=1)
    kept = (after if kind == "broadcast" else rings) != root
    units = _routed(rings[kept], after[kept], shape)
    return _phase(units, len(rings), (n - nodes, nodes - 1), n, nodes)


def _parents(count: int) -> Int64:
    """Parents of nodes 1, 2, ... of a binary tree in which odd numbers are leaves and 0 is the root.

    Sanders, Speck, Traff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan" (2009).
    """
    node = np.arange(1, count)
    bit = node & -node
    above = (node ^ bit) | (bit << 1)
    return np.where(above < count, above, node ^ bit)


def _tree(shape: Shape) -> Phase:
    """Double binary tree between nodes, chains inside, as NCCL has it: each tree reduces and broadcasts S/2.

    A node that is inside one tree is a leaf of the other: the second tree is the first mirrored, or shifted
    by one where the count is odd. One channel for every rank a node takes part with, each with its own head.
    """
    order, begin, sizes = shape.nodes
    nodes = len(sizes)
    channel = np.arange(sizes.min())[:, None]
    flip = (np.arange(nodes) + 1) % nodes if nodes % 2 else np.arange(nodes)[::-1]
    low, high = np.arange(1, nodes), _parents(nodes)
    low, high = np.concatenate([low, flip[low]]), np.concatenate([high, flip[high]])
    heads = order[begin + channel % sizes]
    down, up = heads[:, high].ravel(), heads[:, low].ravel()
    units = _routed(np.concatenate([up, down]), np.concatenate([down, up]), shape)
    # Both trees go along each chain: up from all but the head, down from all but the tail.
    node = np.repeat(np.arange(nodes), sizes)
    place = (np.arange(len(shape)) - begin[node] - channel) % sizes[node]
    along = np.zeros(len(shape), dtype=np.int64)
    along[order] = (2 * (place > 0) + 2 * (place < sizes[node] - 1)).sum(axis=0)
    hops = (2 * (int(sizes.max()) - 1), 2 * (nodes - 1).bit_length())
    return _phase(units + _ports(along, shape), 2 * len(channel), hops, len(shape), nodes)


def _nvls(shape: Shape) -> Phase:
    """Reduction in the switch: it pulls S from every GPU, which multicasts its nth part of the result.

    So a port carries S + S/n each way, against 2(n-1)/n S in a ring.
    """
    n, nodes = len(shape), len(shape.nodes.sizes)
    if nodes > 1:
        raise JobError(f'algorithm = "nvls" works inside one node; the group is on {nodes}')
    return _phase(_ports(np.full(n, n + 1), shape), n, (1, 0), n, 1)


def _direct(kind: CollectiveKind, shape: Shape) -> tuple[Phase, ...]:
    """Every ordered pair exchanges S/n by its own route; twice for an all_reduce.

    Pairs are counted, not listed: the members that a rank reaches in its node, past its leaf, past its pod.
    A rank has n-1 partners in turn in an all_to_all, and sends to all at once otherwise.
    """
    n = len(shape)
    node, leaf, pod = shape.near
    both = np.unique(node * n + leaf, return_inverse=True)[1]
    in_node, in_leaf, in_pod, in_both = (np.bincount(each)[each] for each in (node, leaf, pod, both))
    past_node = n - in_node
    past_leaf = past_node - in_leaf + in_both
    # Sums of counts below 2**53 are exact in floating point.
    on_leaf = np.bincount(leaf, past_leaf, minlength=n).astype(np.int64)
    on_pod = np.bincount(pod, n - in_pod, minlength=n).astype(np.int64)
    units = np.repeat(np.stack([in_node - 1, past_node, on_leaf, on_pod]), 2, axis=0)
    hops = n - 1 if kind == "all_to_all" else 1
    nodes = len(shape.nodes.sizes)
    once = _phase(units, n, (0, hops) if nodes > 1 else (hops, 0), n, nodes)
    return (once,) * _rounds(kind)


def _hierarchical(kind: CollectiveKind, shape: Shape) -> tuple[Phase, ...]:
    """Reduce-scatter in each node, the collective between equal members of the nodes on S/g, all-gather back.

    An all_gather has no first phase, a reduce_scatter no last.
    """
    order, _, sizes = shape.nodes
    if sizes.min() < sizes.max():
        raise JobError(
            f'algorithm = "hierarchical" needs equal numbers of ranks on all nodes, not {sizes.min()} on one '
            f"and {sizes.max()} on another"
        )
    nodes, g = len(sizes), int(sizes[0])
    after = np.roll(order.reshape(nodes, g), -1, axis=0).ravel()
    steps = _rounds(kind) * (nodes - 1)
    across = (_phase(steps * _routed(order, after, shape), nodes * g, (0, steps), nodes, nodes),)
    if g == 1:
        return across
    inside = _ports(np.full(len(shape), g - 1), shape)
    local = (_phase(inside, g, (g - 1, 0), g, 1),)
    if kind == "all_reduce":
        return local + across + local
    return across + local if kind == "all_gather" else local + across
