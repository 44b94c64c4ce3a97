"""What one collective moves: bytes on every link and hops in sequence, by algorithm. Amounts only, no rates.

S is the size as nccl-tests counts it (`Collective` in `plan/op.py`), n the ranks of the group, N the
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

from collections.abc import Sequence
from fractions import Fraction
from typing import Literal

import msgspec
import numpy as np

from emulator.plan.op import CollectiveKind
from emulator.plan.traffic import (
    Algorithm,
    Phase,
    Traffic,
    orders,
    pair_levels,
    shape_of,
    traffic,
    transfer_traffic,
)
from emulator.spec.arrays import Int64
from emulator.spec.errors import JobError
from emulator.spec.fabric import Fabric

ALGORITHMS: dict[CollectiveKind, tuple[Algorithm, ...]] = {
    "all_reduce": ("ring", "tree", "hierarchical", "direct", "nvls"),
    "all_gather": ("ring", "hierarchical", "direct"),
    "reduce_scatter": ("ring", "hierarchical", "direct"),
    "broadcast": ("ring",),
    "reduce": ("ring",),
    "all_to_all": ("direct",),
}
"""Algorithms that exist for each kind; a chain along the ring is how broadcast and reduce go."""


class Pattern(msgspec.Struct, frozen=True, eq=False):
    """A collective's traffic: phases one after the other (none where nothing moves)."""

    kind: CollectiveKind | Literal["transfer"]
    algorithm: Algorithm
    bytes: int
    ranks: int
    nodes: int
    phases: tuple[Phase, ...]
    gpus: Int64
    """In ring order."""
    fabric: Fabric

    @property
    def link_bytes(self) -> dict[int, Fraction]:
        """Bytes on every link that is used, over all phases."""
        total: dict[int, Fraction] = {}
        for phase in self.phases:
            for kind, row in enumerate(phase.units):
                links = self.fabric.links_of(self.gpus[row > 0], kind)
                for link, units in zip(links.tolist(), row[row > 0].tolist(), strict=True):
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
    if algorithm not in ALGORITHMS[kind]:
        known = ", ".join(ALGORITHMS[kind])
        raise JobError(f'algorithm = "{algorithm}": {kind} has {known}')
    return _of(traffic(kind, shape_of(ranks, fabric), algorithm, root), np.array(ranks), size, fabric)


def transfer_pattern(src: int, dst: int, size: int, fabric: Fabric) -> Pattern:
    """Traffic of one send and its receive: every link of the route carries the bytes once."""
    fabric.level(src, dst)  # checks both numbers
    ends = np.array([src, dst])
    level = int(pair_levels(ends[:1], ends[1:], fabric)[0])
    return _of(transfer_traffic(level), ends, size if src != dst else 0, fabric)


def _of(moved: Traffic, gpus: Int64, size: int, fabric: Fabric) -> Pattern:
    phases = moved.phases if size else ()
    return Pattern(moved.kind, moved.algorithm, size, moved.ranks, moved.nodes, phases, gpus, fabric)


def ring_orders(ranks: Sequence[int], fabric: Fabric) -> tuple[tuple[int, ...], ...]:
    """GPUs in the order in which each of the rings comes to them; every ring takes an equal share of S."""
    gpus = np.array(ranks)
    return tuple(map(tuple, gpus[orders(shape_of(ranks, fabric))].tolist()))


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
