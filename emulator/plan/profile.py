"""What the cost of a collective or a transfer depends on, whatever links are used.

Groups of thousands of shapes have few profiles, and what takes exact arithmetic is done once for each.
"""

from __future__ import annotations

from fractions import Fraction
from functools import lru_cache
from typing import Literal

import msgspec
import numpy as np

from emulator.plan.op import CollectiveKind
from emulator.plan.traffic import Algorithm, Traffic
from emulator.spec.fabric import LINKS_PER_GPU, Fabric


class PhaseProfile(msgspec.Struct, frozen=True, cache_hash=True):
    """All that the cost of a phase depends on. Seconds are those of a full link, for each byte of S."""

    ranks: int
    """Ranks of one communicator, and the nodes they sit on."""
    nodes: int
    scale_up_hops: int
    """Hops in sequence inside nodes, and between nodes."""
    network_hops: int
    link_seconds: Fraction
    """On the most loaded link."""
    port_seconds: Fraction
    """On the most loaded port of a GPU, scale-up or NIC."""
    scale_up_seconds: Fraction
    """On the most loaded scale-up port."""
    sent: Fraction
    """Most bytes, for each of S, that one GPU sends over its ports together."""


class Profile(msgspec.Struct, frozen=True, cache_hash=True):
    """All that costs depend on but the size: equal for groups that differ in links only."""

    kind: CollectiveKind | Literal["transfer"]
    algorithm: Algorithm
    ranks: int
    nodes: int
    phases: tuple[PhaseProfile, ...]

    @property
    def port_seconds(self) -> Fraction:
        """Seconds for each byte of S with the most loaded port of each phase full."""
        return sum((phase.port_seconds for phase in self.phases), Fraction(0))


@lru_cache(maxsize=1024)
def profile(moved: Traffic, fabric: Fabric) -> Profile:
    """Profile of some traffic on the links of a fabric."""
    phases = []
    for phase in moved.phases:
        most = [
            Fraction(units, capacity * phase.parts)
            for units, capacity in zip(phase.units.max(axis=1).tolist(), fabric.capacities, strict=True)
        ]
        out, _, nic, _ = phase.units[:LINKS_PER_GPU]
        phases.append(
            PhaseProfile(
                ranks=phase.ranks,
                nodes=phase.nodes,
                scale_up_hops=phase.scale_up_hops,
                network_hops=phase.network_hops,
                link_seconds=max(most),
                port_seconds=max(most[:LINKS_PER_GPU]),
                scale_up_seconds=max(most[:2]),
                sent=Fraction(int(np.max(out + nic)), phase.parts),
            )
        )
    return Profile(moved.kind, moved.algorithm, moved.ranks, moved.nodes, tuple(phases))
