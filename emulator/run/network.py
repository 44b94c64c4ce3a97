"""Rates of transfers: how long one takes alone, and what it asks of every link.

A wire is a fixed latency and then a fluid part. Level 1 of the fluid part is the payload rate (line rate x
efficiency) of the class of its most loaded GPU port (scale-up or NIC, whichever would take longer): never
that of its own route, so all transfers weigh what their class does, and one that shares a saturated HBM with
a kernel runs at capacity / demand, as the kernel does. Where an algorithm or a protocol stays below what the
links would give, the wire has a bound on its level.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Literal, NamedTuple

import msgspec

from emulator.plan.body import Int64
from emulator.plan.collectives import (
    ALGORITHMS,
    Algorithm,
    Pattern,
    Phase,
    pattern,
    transfer_pattern,
)
from emulator.plan.program import CollectiveKind
from emulator.run import nccl
from emulator.run.maxmin import FULL, LEVEL_BITS
from emulator.run.nccl import OVERHEAD, Family, Protocol
from emulator.run.pool import ends_in_ps
from emulator.spec.fabric import LINKS_PER_GPU, Fabric, Kind, Level
from emulator.spec.units import PS_PER_SECOND


class Ideal(msgspec.Struct, frozen=True):
    """Closed-form world: every hop takes alpha, payload flows at the links' capacity, nothing else costs."""

    alpha_ps: int = 0


IDEAL = Ideal()

PROTOCOLS: tuple[Protocol, ...] = ("LL", "LL128", "Simple")

HBM_PER_WIRE_BYTE: dict[str, Fraction] = {
    "all_gather": Fraction(2),
    "broadcast": Fraction(2),
    "all_to_all": Fraction(2),
    "transfer": Fraction(2),
    "reduce_scatter": Fraction(3),
    "reduce": Fraction(3),
    "all_reduce": Fraction(5, 2),
}
"""HBM bytes on a member for each byte it sends. A copy is written when it comes and read to be sent on;
a reduction reads its own operand besides; an all_reduce does both in turn. NCCL's maintainers say 2 to
3 (NVIDIA/nccl#1428)."""

UNSENT_CHUNK = Fraction(1, 2)
"""Time of the chunk that a rank handles but does not send, over that of one it sends.

A rank of a ring works on n chunks a round and sends n-1: one is only copied between its own buffers. So
k sends reach k / (k + 1/2) of the link rate: 0.67, 0.86, 0.93 in an all_gather on 2, 4, 8 GPUs of a
node. Measured there, extra bytes over extra time from 256 to 512 MiB (tests/data/collectives.csv): 158,
202, 219 of 240 GB/s on A100s, 274, 332, 349 of 371 on H100s, 459, 586, 638 of 722 on B200s."""


class Wire(msgspec.Struct, frozen=True, kw_only=True):
    """A transfer or a collective as the pool plays it."""

    alpha_ps: int
    """Latency before the fluid part."""
    length_q: int
    """Time of the fluid part at level 1, in units of 2**-62 ps; 0 where nothing moves."""
    demands: tuple[tuple[int, int], ...]
    """(link id, bytes per second at level 1), sorted by link."""
    bound_q: int
    """Highest level, in units of 2**-62."""
    hbm: int
    """HBM bytes per second at level 1, on each member."""
    sms: int
    """Channels, each an SM, held on each member from its arrival to the end."""
    algorithm: str
    protocol: str


NOTHING = Wire(
    alpha_ps=0, length_q=0, demands=(), bound_q=FULL, hbm=0, sms=0, algorithm="none", protocol="none"
)


def alone_ps(wire: Wire, capacity: Callable[[int], int]) -> int:
    """Duration with the links to itself; capacity: bytes per second of a link id."""
    if not wire.length_q:
        return wire.alpha_ps
    level = min([wire.bound_q, *((capacity(link) << LEVEL_BITS) // demand for link, demand in wire.demands)])
    return wire.alpha_ps + ends_in_ps(wire.length_q, level)


def collective_wire(
    kind: CollectiveKind,
    ranks: Sequence[int],
    size: int,
    algorithm: Algorithm | Literal["auto"],
    fabric: Fabric,
    *,
    protocol: Protocol | Ideal | Literal["auto"] = "auto",
    root: int = 0,
) -> Wire:
    """Wire of a collective of `size` bytes (S of nccl-tests) over GPU numbers in ring order.

    "auto" takes the algorithm (ring; for all_reduce also tree and, in one node of Hopper or later,
    NVLS) and the protocol of least time alone, as NCCL does; an algorithm that the kind does not have
    means "auto" too, as with NCCL_ALGO. One rank alone takes no time.
    """
    return _collective(kind, tuple(ranks), size, algorithm, fabric, protocol, root)


def transfer_wire(
    src: int, dst: int, size: int, fabric: Fabric, *, protocol: Protocol | Ideal | Literal["auto"] = "auto"
) -> Wire:
    """Wire of one send with its receive, from GPU to GPU: alpha + S / rate."""
    known, what = _transfers(fabric), (fabric.level(src, dst), size, protocol)
    if src == dst or not size:
        return NOTHING
    if what not in known:
        if protocol == "auto":
            protocol = "LL" if size <= nccl.P2P_LL_BYTES else "Simple"
        known[what] = _build(transfer_pattern(src, dst, size, fabric), protocol, fabric)
    # Each link of a route carries all the bytes, so transfers that climb as far differ in its links only.
    rate = known[what].demands[0][1]
    route = tuple((link, rate) for link in sorted(fabric.route(src, dst)))
    return msgspec.structs.replace(known[what], demands=route)


@lru_cache(maxsize=16)
def _transfers(_fabric: Fabric) -> dict[tuple[Level, int, Protocol | Ideal | str], Wire]:
    """Wires of a fabric's transfers by level, size and protocol, as far as they have been asked for."""
    return {}


@lru_cache(maxsize=4096)
def _collective(
    kind: CollectiveKind,
    ranks: tuple[int, ...],
    size: int,
    algorithm: Algorithm | Literal["auto"],
    fabric: Fabric,
    protocol: Protocol | Ideal | Literal["auto"],
    root: int,
) -> Wire:
    if len(ranks) == 1 or not size:
        return NOTHING
    patterns = [
        pattern(kind, ranks, size, name, fabric, root) for name in _algorithms(kind, ranks, algorithm, fabric)
    ]
    candidates: list[tuple[Pattern, Protocol | Ideal]] = [
        (traffic, word) for traffic in patterns for word in _protocols(traffic, protocol, fabric)
    ]
    best = min(candidates, key=lambda each: _predicted(each[0], each[1], fabric))
    return _build(*best, fabric)


def _algorithms(
    kind: CollectiveKind, ranks: tuple[int, ...], algorithm: Algorithm | Literal["auto"], fabric: Fabric
) -> tuple[Algorithm, ...]:
    known = ALGORITHMS[kind]
    if algorithm != "auto" and algorithm in known:
        return (algorithm,)
    if kind != "all_reduce":
        return (known[0],)
    nodes = {fabric.cluster.node_of(gpu) for gpu in ranks}
    # NCCL leaves NVLS out for two GPUs, where it could save nothing.
    nvls = len(nodes) == 1 and len(ranks) > 2 and nccl.generation(fabric.cluster.device).nvls > 0
    return ("ring", "tree", "nvls") if nvls else ("ring", "tree")


def _protocols(
    traffic: Pattern, protocol: Protocol | Ideal | Literal["auto"], fabric: Fabric
) -> tuple[Protocol | Ideal, ...]:
    if isinstance(protocol, Ideal):
        return (protocol,)
    if traffic.algorithm == "nvls":
        return ("Simple",)
    if protocol != "auto":
        return (protocol,)
    if traffic.algorithm == "direct":
        return ("LL" if traffic.bytes <= nccl.P2P_LL_BYTES * traffic.ranks else "Simple",)
    if nccl.generation(fabric.cluster.device).ll128:
        return PROTOCOLS
    return ("LL", "Simple")


class _Most(NamedTuple):
    """The links of one class in a phase: units on the most loaded one, and any of them."""

    units: int
    link: int


@lru_cache(maxsize=1024)
def _classes(phase: Phase, fabric: Fabric) -> tuple[dict[Kind, _Most], int]:
    """Most loaded link of each class, and the most units that one GPU sends over its ports together."""
    most: dict[Kind, _Most] = {}
    sent: dict[int, int] = {}
    for link, units in phase.loads:
        kind = fabric.kind(link)
        if kind not in most or most[kind].units < units:
            most[kind] = _Most(units, link)
        if kind in ("scale_up.out", "nic.out"):
            gpu = link // LINKS_PER_GPU
            sent[gpu] = sent.get(gpu, 0) + units
    return most, max(sent.values())


def _unit(traffic: Pattern, phase: Phase, protocol: Protocol | Ideal) -> Fraction:
    """Bytes on the wire for one unit of a phase's loads."""
    overhead = Fraction(1) if isinstance(protocol, Ideal) else OVERHEAD[protocol]
    return overhead * traffic.bytes / phase.parts


def _at_level_1(traffic: Pattern, phase: Phase, protocol: Protocol | Ideal, fabric: Fabric) -> Fraction:
    """Seconds of a phase at level 1: its most loaded GPU port at the payload rate of its class."""
    most, _ = _classes(phase, fabric)
    ports = [each for kind, each in most.items() if kind.startswith(("scale_up", "nic"))]
    return _unit(traffic, phase, protocol) * max(Fraction(p.units, fabric.capacity(p.link)) for p in ports)


def _links_seconds(traffic: Pattern, phase: Phase, protocol: Protocol | Ideal, fabric: Fabric) -> Fraction:
    """Seconds of a phase with its most loaded link full."""
    most, _ = _classes(phase, fabric)
    units = max(Fraction(each.units, fabric.capacity(each.link)) for each in most.values())
    return _unit(traffic, phase, protocol) * units


def _fluid_seconds(traffic: Pattern, phase: Phase, protocol: Protocol | Ideal, fabric: Fabric) -> Fraction:
    """Seconds of a phase alone: its links, or what algorithm and protocol make of them if that is longer."""
    links = _links_seconds(traffic, phase, protocol, fabric)
    if isinstance(protocol, Ideal) or traffic.algorithm == "direct":
        return links
    device = fabric.cluster.device
    bare = links / OVERHEAD[protocol]
    if traffic.algorithm == "nvls":
        return bare / nccl.nvls_fraction(device)
    if traffic.algorithm == "tree":
        return max(links, bare / nccl.tree_fraction(traffic.bytes, phase, protocol))
    most, sent = _classes(phase, fabric)
    limits = [links]
    if protocol == "LL":
        limits.append(Fraction(sent * traffic.bytes, phase.parts) / nccl.ll_ring_limit(phase, device))
    elif protocol == "LL128":
        limits.append(bare / nccl.LL128_RING_FRACTION)
    if traffic.kind in ("all_reduce", "all_gather", "reduce_scatter"):
        sends = phase.scale_up_hops + phase.network_hops
        ports = [Fraction(p.units, fabric.capacity(p.link)) for kind, p in most.items() if "scale_up" in kind]
        copying = _unit(traffic, phase, protocol) * max(ports, default=Fraction(0))
        limits.append(copying * (sends + UNSENT_CHUNK) / sends)
    return max(limits)


def _alpha_ps(traffic: Pattern, protocol: Protocol | Ideal, fabric: Fabric) -> int:
    """Add up the fixed latencies of all phases."""
    if isinstance(protocol, Ideal):
        return traffic.hops * protocol.alpha_ps
    device = fabric.cluster.device
    total = 0
    for phase in traffic.phases:
        if traffic.algorithm == "nvls":
            total += nccl.nvls_latency_ps()
        elif traffic.algorithm == "direct":
            total += nccl.p2p_latency_ps(phase, traffic.ranks - 1, protocol, device)
        elif traffic.algorithm == "tree":
            total += nccl.latency_ps(phase, "tree", protocol, device)
        else:
            factor = nccl.ring_latency_factor(traffic.kind, traffic.bytes, phase, protocol, device)
            total += int(nccl.latency_ps(phase, "ring", protocol, device) * factor)
    return total


def _predicted(traffic: Pattern, protocol: Protocol | Ideal, fabric: Fabric) -> Fraction:
    """Seconds alone, latency included: what "auto" compares."""
    fluid = sum(_fluid_seconds(traffic, phase, protocol, fabric) for phase in traffic.phases)
    return fluid + Fraction(_alpha_ps(traffic, protocol, fabric), PS_PER_SECOND)


def _sms(traffic: Pattern, protocol: Protocol | Ideal) -> int:
    """Channels of the phase that needs most of them."""
    word: Protocol = "Simple" if isinstance(protocol, Ideal) else protocol
    if traffic.algorithm == "nvls":
        return nccl.NVLS_CHANNELS
    if traffic.algorithm == "direct":
        peers, pair = traffic.ranks - 1, traffic.bytes
        if traffic.kind != "transfer":
            pair = -(-traffic.bytes // traffic.ranks)
        return nccl.p2p_channels(pair, peers, traffic.nodes > 1)
    family: Family = "tree" if traffic.algorithm == "tree" else "ring"
    return max(nccl.channels(traffic.bytes, phase, family, word) for phase in traffic.phases)


def _build(traffic: Pattern, protocol: Protocol | Ideal, fabric: Fabric) -> Wire:
    """Turn amounts into integers: lengths and demands are rounded up, the bound down."""
    if not traffic.phases:
        return NOTHING
    nominal = sum((_at_level_1(traffic, phase, protocol, fabric) for phase in traffic.phases), Fraction(0))
    alone = sum((_fluid_seconds(traffic, phase, protocol, fabric) for phase in traffic.phases), Fraction(0))
    demands: dict[int, int] = {}
    for phase in traffic.phases:
        rate = _unit(traffic, phase, protocol) / nominal
        # Symmetric ranks share few distinct loads: the exact division is done once for each.
        rates = {units: _ceil(units * rate) for units in {units for _, units in phase.loads}}
        for link, units in phase.loads:
            demands[link] = demands.get(link, 0) + rates[units]
    one_phase = len(traffic.phases) == 1
    links = _links_seconds(traffic, traffic.phases[0], protocol, fabric) if one_phase else Fraction(0)
    sent = sum(_unit(traffic, phase, protocol) * _classes(phase, fabric)[1] for phase in traffic.phases)
    return Wire(
        alpha_ps=_alpha_ps(traffic, protocol, fabric),
        length_q=_ceil(nominal * PS_PER_SECOND * FULL),
        demands=tuple(sorted(demands.items())),
        bound_q=FULL if alone == links else int((nominal / alone) * FULL),
        hbm=_ceil(HBM_PER_WIRE_BYTE[traffic.kind] * sent / nominal),
        sms=_sms(traffic, protocol),
        algorithm=traffic.algorithm,
        protocol="ideal" if isinstance(protocol, Ideal) else protocol,
    )


def _ceil(value: Fraction) -> int:
    return -(-value.numerator // value.denominator)


class ClassWire(NamedTuple):
    """Collectives or transfers of one class, as the pool plays them all at once; the first stands for all."""

    alpha_ps: int
    """Latency before the fluid part."""
    length_q: int
    """Time of the fluid part at level 1, in units of 2**-62 ps; 0 where nothing moves."""
    level: int
    """Level of the first alone on its links, in units of 2**-62."""
    demands: tuple[tuple[int, int], ...]
    """(link id, bytes per second at level 1 of all members together), sorted by link."""
    hbm: int
    """HBM bytes per second at level 1, on each rank that takes part."""
    sms: int
    """Channels, each an SM, held on each rank from its arrival to the end."""
    algorithm: str
    protocol: str


class GroupClass:
    """Groups of one class: the wires of their collectives, the first group standing for all."""

    def __init__(
        self,
        groups: Sequence[Sequence[int]],
        fabric: Fabric,
        onto: Int64 | None = None,
        slower: Mapping[int, int] | None = None,
    ) -> None:
        """groups: GPU numbers in ring order, of every group.

        onto: ascending links to keep demands on (None: all). slower: bytes per second of degraded links.
        """
        self.groups, self.fabric = groups, fabric
        self.onto = None if onto is None else set(onto.tolist())
        self.slower = slower or {}

    def wire(
        self, kind: CollectiveKind, size: int, algorithm: Algorithm | Literal["auto"], root: int = 0
    ) -> ClassWire:
        """Wire of a collective of `size` bytes (S of nccl-tests) that all of the groups do at once."""
        wires = [collective_wire(kind, each, size, algorithm, self.fabric, root=root) for each in self.groups]
        return _of_class(wires, self.fabric, self.onto, self.slower)


def class_wire(
    kind: CollectiveKind,
    groups: Sequence[Sequence[int]],
    size: int,
    algorithm: Algorithm | Literal["auto"],
    fabric: Fabric,
    *,
    root: int = 0,
    onto: Int64 | None = None,
    slower: Mapping[int, int] | None = None,
) -> ClassWire:
    """One wire of a class of groups; `GroupClass` keeps what several wires have in common."""
    return GroupClass(groups, fabric, onto, slower).wire(kind, size, algorithm, root)


def transfer_class_wire(
    src: Int64,
    dst: Int64,
    size: int,
    fabric: Fabric,
    *,
    onto: Int64 | None = None,
    slower: Mapping[int, int] | None = None,
) -> ClassWire:
    """Wire of transfers of `size` bytes from each src to its dst, all at once; the first stands for all."""
    wires = [transfer_wire(*ends, size, fabric) for ends in zip(src.tolist(), dst.tolist(), strict=True)]
    return _of_class(wires, fabric, None if onto is None else set(onto.tolist()), slower or {})


def _of_class(
    wires: list[Wire], fabric: Fabric, onto: set[int] | None, slower: Mapping[int, int]
) -> ClassWire:
    first = wires[0]
    rooms = [(slower.get(link, fabric.capacity(link)) << LEVEL_BITS) // d for link, d in first.demands]
    total: dict[int, int] = {}
    for wire in wires:
        for link, demand in wire.demands:
            if onto is None or link in onto:
                total[link] = total.get(link, 0) + demand
    return ClassWire(
        first.alpha_ps,
        first.length_q,
        min([first.bound_q, *rooms]),
        tuple(sorted(total.items())),
        first.hbm,
        first.sms,
        first.algorithm,
        first.protocol,
    )
