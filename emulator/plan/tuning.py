"""How long a collective or a transfer would take alone, and which algorithm and protocol NCCL would choose.

To choose is to plan: NCCL chooses when a collective is enqueued, from tables, and never looks at what is on
the links. The algorithm decides which links a group loads, and folding must know that before anything runs.
The times here are nominal and serve to compare; none goes into the Program, and what a collective takes
among others is for `run` to find.

A choice follows from the size and from the *profile* of the traffic, which is all that costs depend on,
whatever links are used. It is made once for all groups of a profile, in exact fractions.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Literal, NamedTuple

import msgspec

from emulator.plan import nccl
from emulator.plan.collectives import ALGORITHMS
from emulator.plan.nccl import OVERHEAD, Protocol
from emulator.plan.op import CollectiveKind
from emulator.plan.profile import PhaseProfile, Profile, profile
from emulator.plan.traffic import Algorithm, Shape, Traffic, traffic
from emulator.spec.fabric import Fabric
from emulator.spec.units import PS_PER_SECOND


class Ideal(msgspec.Struct, frozen=True):
    """Closed-form world: every hop takes alpha, payload flows at the links' capacity, nothing else costs."""

    alpha_ps: int = 0


IDEAL = Ideal()

PROTOCOLS: tuple[Protocol, ...] = ("LL", "LL128", "Simple")

UNSENT_CHUNK = Fraction(1, 2)
"""Time of the chunk that a rank handles but does not send, over that of one it sends.

A rank of a ring works on n chunks a round and sends n-1: one is only copied between its own buffers. So
k sends reach k / (k + 1/2) of the link rate: 0.67, 0.86, 0.93 in an all_gather on 2, 4, 8 GPUs of a
node. Measured there, extra bytes over extra time from 256 to 512 MiB (tests/data/collectives.csv): 158,
202, 219 of 240 GB/s on A100s, 274, 332, 349 of 371 on H100s, 459, 586, 638 of 722 on B200s."""


class Choice(NamedTuple):
    """What a group does for a collective of one size."""

    traffic: Traffic
    profile: Profile
    protocol: Protocol | Ideal


@lru_cache(maxsize=4096)
def choose(
    kind: CollectiveKind,
    shape: Shape,
    size: int,
    algorithm: Algorithm | Literal["auto"],
    fabric: Fabric,
    root: int = 0,
    protocol: Protocol | Ideal | Literal["auto"] = "auto",
) -> Choice:
    """Traffic and protocol of a collective of `size` bytes (S of nccl-tests) on a group of this shape.

    "auto" takes the algorithm (ring; for all_reduce also tree and, in one node of Hopper or later, NVLS) and
    the protocol of least time alone, as NCCL does; an algorithm that the kind does not have means "auto" too,
    as with NCCL_ALGO. JobError where nodes are unequal and the algorithm needs them equal.
    """
    names = _algorithms(kind, shape, algorithm, fabric)
    moved = [traffic(kind, shape, name, root) for name in names]
    profiles = tuple(profile(each, fabric) for each in moved)
    best, word = _best(profiles, size, fabric, protocol)
    return Choice(moved[best], profiles[best], word)


def transfer_protocol(size: int) -> Protocol:
    """Protocol of a send and its receive."""
    return "LL" if size <= nccl.P2P_LL_BYTES else "Simple"


@lru_cache(maxsize=16384)
def _best(
    profiles: tuple[Profile, ...], size: int, fabric: Fabric, protocol: Protocol | Ideal | Literal["auto"]
) -> tuple[int, Protocol | Ideal]:
    """Candidate of least time alone, by its place, and its protocol; the first of equals."""
    candidates = [
        (place, word)
        for place, each in enumerate(profiles)
        for word in _protocols(each, size, protocol, fabric)
    ]
    if len(candidates) == 1:
        return candidates[0]
    return min(candidates, key=lambda each: predicted(profiles[each[0]], size, each[1], fabric))


def _algorithms(
    kind: CollectiveKind, shape: Shape, algorithm: Algorithm | Literal["auto"], fabric: Fabric
) -> Sequence[Algorithm]:
    known = ALGORITHMS[kind]
    if algorithm != "auto" and algorithm in known:
        return (algorithm,)
    if kind != "all_reduce":
        return known[:1]
    # NCCL leaves NVLS out for two GPUs, where it could save nothing.
    one_node = len(shape.nodes.sizes) == 1
    nvls = one_node and len(shape) > 2 and nccl.generation(fabric.cluster.device).nvls > 0
    return ("ring", "tree", "nvls") if nvls else ("ring", "tree")


def _protocols(
    moved: Profile, size: int, protocol: Protocol | Ideal | Literal["auto"], fabric: Fabric
) -> Sequence[Protocol | Ideal]:
    if isinstance(protocol, Ideal):
        return (protocol,)
    if moved.algorithm == "nvls":
        return ("Simple",)
    if protocol != "auto":
        return (protocol,)
    if moved.algorithm == "direct":
        return ("LL" if size <= nccl.P2P_LL_BYTES * moved.ranks else "Simple",)
    if nccl.generation(fabric.cluster.device).ll128:
        return PROTOCOLS
    return ("LL", "Simple")


def wire_bytes(size: int, protocol: Protocol | Ideal) -> Fraction:
    """Bytes on the wire for a payload of `size`."""
    return size * (Fraction(1) if isinstance(protocol, Ideal) else OVERHEAD[protocol])


def fluid_seconds(
    moved: Profile, phase: PhaseProfile, size: int, protocol: Protocol | Ideal, fabric: Fabric
) -> Fraction:
    """Seconds of a phase alone: its links, or what algorithm and protocol make of them if that is longer."""
    per_byte = _seconds_per_byte(moved, phase, protocol, fabric)
    if moved.algorithm == "tree" and not isinstance(protocol, Ideal):
        per_byte = max(per_byte, phase.link_seconds / nccl.tree_fraction(size, phase, protocol))
    return size * per_byte


@lru_cache(maxsize=4096)
def _seconds_per_byte(
    moved: Profile, phase: PhaseProfile, protocol: Protocol | Ideal, fabric: Fabric
) -> Fraction:
    """Seconds of a phase for each byte of S, as far as they do not depend on S."""
    overhead = wire_bytes(1, protocol)
    links, device = overhead * phase.link_seconds, fabric.cluster.device
    if isinstance(protocol, Ideal) or moved.algorithm in ("direct", "tree"):
        return links
    if moved.algorithm == "nvls":
        return phase.link_seconds / nccl.nvls_fraction(device)
    limits = [links]
    if protocol == "LL":
        limits.append(phase.sent / nccl.ll_ring_limit(phase, device))
    elif protocol == "LL128":
        limits.append(phase.link_seconds / nccl.LL128_RING_FRACTION)
    if moved.kind in ("all_reduce", "all_gather", "reduce_scatter"):
        sends = phase.scale_up_hops + phase.network_hops
        limits.append(overhead * phase.scale_up_seconds * (sends + UNSENT_CHUNK) / sends)
    return max(limits)


def alpha_ps(moved: Profile, size: int, protocol: Protocol | Ideal, fabric: Fabric) -> int:
    """Add up the fixed latencies of all phases."""
    if isinstance(protocol, Ideal):
        return sum(phase.scale_up_hops + phase.network_hops for phase in moved.phases) * protocol.alpha_ps
    device = fabric.cluster.device
    total = 0
    for phase in moved.phases:
        if moved.algorithm == "nvls":
            total += nccl.nvls_latency_ps()
        elif moved.algorithm == "direct":
            total += nccl.p2p_latency_ps(phase, moved.ranks - 1, protocol, device)
        elif moved.algorithm == "tree":
            total += nccl.latency_ps(phase, "tree", protocol, device)
        else:
            factor = nccl.ring_latency_factor(moved.kind, size, phase, protocol, device)
            total += int(nccl.latency_ps(phase, "ring", protocol, device) * factor)
    return total


def predicted(moved: Profile, size: int, protocol: Protocol | Ideal, fabric: Fabric) -> Fraction:
    """Seconds alone, latency included: what "auto" compares."""
    fluid = sum(fluid_seconds(moved, phase, size, protocol, fabric) for phase in moved.phases)
    return fluid + Fraction(alpha_ps(moved, size, protocol, fabric), PS_PER_SECOND)
