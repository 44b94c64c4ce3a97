"""Rates of transfers: how long one takes alone, and what it asks of every link.

A wire is a fixed latency and then a fluid part. Level 1 of the fluid part is the payload rate (line rate x
efficiency) of the class of its most loaded GPU port (scale-up or NIC, whichever would take longer): never
that of its own route, so all transfers weigh what their class does, and one that shares a saturated HBM with
a kernel runs at capacity / demand, as the kernel does. Where an algorithm or a protocol stays below what the
links would give, the wire has a bound on its level.

With u units of S / parts bytes on a link, and p seconds on the most loaded port for each byte of S, a link is
asked for u / (parts x p) bytes per second at level 1: whatever S is, and whatever the protocol adds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Literal, NamedTuple

import msgspec
import numpy as np

from emulator.plan import nccl
from emulator.plan.nccl import Family, Protocol
from emulator.plan.op import CollectiveKind
from emulator.plan.profile import Profile, profile
from emulator.plan.traffic import Algorithm, Traffic, pair_levels, placed, shape_of, transfer_traffic
from emulator.plan.tuning import (
    IDEAL,
    Choice,
    Ideal,
    alpha_ps,
    choose,
    fluid_seconds,
    transfer_protocol,
    wire_bytes,
)
from emulator.run.activity import ends_in_ps
from emulator.run.maxmin import FULL, LEVEL_BITS
from emulator.spec.arrays import Int64
from emulator.spec.fabric import Fabric
from emulator.spec.units import PS_PER_SECOND

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

INT64_MAX = 2**63 - 1


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


CLASS_NOTHING = ClassWire(0, 0, FULL, (), 0, 0, "none", "none")


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

    "auto" takes the algorithm and the protocol of least time alone (`plan/tuning.py`). One rank alone takes
    no time.
    """
    return _collective(kind, tuple(ranks), size, algorithm, fabric, protocol, root)


def transfer_wire(
    src: int, dst: int, size: int, fabric: Fabric, *, protocol: Protocol | Ideal | Literal["auto"] = "auto"
) -> Wire:
    """Wire of one send with its receive, from GPU to GPU: alpha + S / rate."""
    fabric.level(src, dst)  # checks both numbers
    if src == dst or not size:
        return NOTHING
    ends = np.array([[src, dst]])
    moved = transfer_traffic(int(pair_levels(ends[:, 0], ends[:, 1], fabric)[0]))
    word = transfer_protocol(size) if protocol == "auto" else protocol
    return _wire(Choice(moved, profile(moved, fabric), word), ends, size, fabric)


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
    chosen = choose(kind, shape_of(ranks, fabric), size, algorithm, fabric, root, protocol)
    return _wire(chosen, np.array([ranks]), size, fabric)


def _wire(chosen: Choice, members: Int64, size: int, fabric: Fabric) -> Wire:
    timing = _timing(chosen.profile, size, chosen.protocol, fabric)
    return Wire(
        alpha_ps=timing.alpha_ps,
        length_q=timing.length_q,
        demands=_together([_Part(chosen.traffic, members)], fabric, None),
        bound_q=timing.bound_q,
        hbm=timing.hbm,
        sms=timing.sms,
        algorithm=chosen.traffic.algorithm,
        protocol=_word(chosen.protocol),
    )


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
        self.fabric = fabric
        self.onto, self.slower = onto, slower or {}
        self.placed = placed(groups, fabric)
        self._loads: dict[tuple[Traffic, ...], _Loads] = {}

    def wire(
        self, kind: CollectiveKind, size: int, algorithm: Algorithm | Literal["auto"], root: int = 0
    ) -> ClassWire:
        """Wire of a collective of `size` bytes (S of nccl-tests) that all of the groups do at once."""
        if len(self.placed[0].shape) == 1 or not size:
            return CLASS_NOTHING
        chosen = [choose(kind, each.shape, size, algorithm, self.fabric, root) for each in self.placed]
        moved = tuple(choice.traffic for choice in chosen)
        if moved not in self._loads:
            parts = [_Part(*part) for part in zip(moved, (p.members for p in self.placed), strict=True)]
            self._loads[moved] = _loads(parts, self.fabric, self.onto, self.slower)
        return _class_wire(chosen[0], self._loads[moved], size, self.fabric)


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
    if src[0] == dst[0] or not size:
        return CLASS_NOTHING
    level, ends = pair_levels(src, dst, fabric), np.stack([src, dst], axis=1)
    levels = dict.fromkeys([int(level[0]), *np.flatnonzero(np.bincount(level)).tolist()])
    parts = [_Part(transfer_traffic(each), ends[level == each]) for each in levels]
    first = parts[0].traffic
    chosen = Choice(first, profile(first, fabric), transfer_protocol(size))
    return _class_wire(chosen, _loads(parts, fabric, onto, slower or {}), size, fabric)


class _Part(NamedTuple):
    """Groups of a class whose traffic is the same, one row of members each."""

    traffic: Traffic
    members: Int64


class _Loads(NamedTuple):
    """What a class asks of links, whatever the size."""

    room: int
    """Level at which the first group's most loaded link is full."""
    demands: tuple[tuple[int, int], ...]


class _Timing(NamedTuple):
    """What depends on size and protocol, for all groups of a profile."""

    alpha_ps: int
    length_q: int
    bound_q: int
    hbm: int
    sms: int


def _class_wire(chosen: Choice, loads: _Loads, size: int, fabric: Fabric) -> ClassWire:
    timing = _timing(chosen.profile, size, chosen.protocol, fabric)
    return ClassWire(
        timing.alpha_ps,
        timing.length_q,
        min(timing.bound_q, loads.room),
        loads.demands,
        timing.hbm,
        timing.sms,
        chosen.traffic.algorithm,
        _word(chosen.protocol),
    )


def _loads(parts: list[_Part], fabric: Fabric, onto: Int64 | None, slower: Mapping[int, int]) -> _Loads:
    first = parts[0]
    rates = _rates(first.traffic, fabric)
    full = [
        (capacity, most)
        for capacity, most in zip(fabric.capacities, rates.max(axis=1).tolist(), strict=True)
        if most
    ]
    if slower:
        of = dict(_together([_Part(first.traffic, first.members[:1])], fabric, None))
        full += [(capacity, of[link]) for link, capacity in slower.items() if link in of]
    room = min((capacity << LEVEL_BITS) // most for capacity, most in full)
    return _Loads(room, _together(parts, fabric, onto))


def _together(parts: list[_Part], fabric: Fabric, onto: Int64 | None) -> tuple[tuple[int, int], ...]:
    """Demand of all groups on each link that is kept, sorted by link."""
    kept = np.ones(len(fabric), dtype=np.bool_) if onto is None else np.zeros(len(fabric), dtype=np.bool_)
    kept[onto] = True
    links, demands = [], []
    for moved, members in parts:
        for kind, row in enumerate(_rates(moved, fabric)):
            used = np.flatnonzero(row)
            here = fabric.links_of(members[:, used], kind)
            which = kept[here]
            links.append(here[which])
            demands.append(np.broadcast_to(row[used], here.shape)[which])
    return _summed(np.concatenate(links), np.concatenate(demands))


def _summed(links: Int64, demands: Int64) -> tuple[tuple[int, int], ...]:
    if not len(links):
        return ()
    order = np.argsort(links, kind="stable")
    links, demands = links[order], demands[order]
    begin = np.flatnonzero(np.concatenate([[True], links[1:] != links[:-1]]))
    if int(demands.max()) > INT64_MAX // len(demands):
        demands = demands.astype(np.object_)  # integers of any size
    sums = np.add.reduceat(demands, begin)
    return tuple(zip(links[begin].tolist(), sums.tolist(), strict=True))


@lru_cache(maxsize=128)
def _rates(moved: Traffic, fabric: Fabric) -> Int64:
    """Bytes per second at level 1 on each link, shaped like the units and rounded up in each phase."""
    per_byte = profile(moved, fabric).port_seconds
    total = np.zeros(moved.phases[0].units.shape, dtype=np.int64)
    for phase in moved.phases:
        # Symmetric ranks share few distinct loads: the exact division is done once for each.
        units, where = np.unique(phase.units, return_inverse=True)
        rates = np.array([_ceil(each / (phase.parts * per_byte)) for each in units.tolist()])
        total = total + rates[where.reshape(phase.units.shape)]
    return total


@lru_cache(maxsize=16384)
def _timing(moved: Profile, size: int, protocol: Protocol | Ideal, fabric: Fabric) -> _Timing:
    """Turn amounts into integers: lengths and demands are rounded up, the bound down."""
    phases = moved.phases
    nominal = wire_bytes(size, protocol) * moved.port_seconds
    alone = sum((fluid_seconds(moved, each, size, protocol, fabric) for each in phases), Fraction(0))
    links = wire_bytes(size, protocol) * phases[0].link_seconds if len(phases) == 1 else Fraction(0)
    sent = sum((phase.sent for phase in phases), Fraction(0))
    return _Timing(
        alpha_ps=alpha_ps(moved, size, protocol, fabric),
        length_q=_ceil(nominal * PS_PER_SECOND * FULL),
        bound_q=FULL if alone == links else int((nominal / alone) * FULL),
        hbm=_ceil(HBM_PER_WIRE_BYTE[moved.kind] * sent / moved.port_seconds),
        sms=_sms(moved, size, protocol),
    )


def _sms(moved: Profile, size: int, protocol: Protocol | Ideal) -> int:
    """Channels of the phase that needs most of them."""
    word: Protocol = "Simple" if isinstance(protocol, Ideal) else protocol
    if moved.algorithm == "nvls":
        return nccl.NVLS_CHANNELS
    if moved.algorithm == "direct":
        pair = size if moved.kind == "transfer" else -(-size // moved.ranks)
        return nccl.p2p_channels(pair, moved.ranks - 1, moved.nodes > 1)
    family: Family = "tree" if moved.algorithm == "tree" else "ring"
    return max(nccl.channels(size, phase, family, word) for phase in moved.phases)


def _word(protocol: Protocol | Ideal) -> str:
    return "ideal" if isinstance(protocol, Ideal) else protocol


def _ceil(value: Fraction) -> int:
    return -(-value.numerator // value.denominator)


__all__ = [
    "IDEAL",
    "NOTHING",
    "ClassWire",
    "GroupClass",
    "Ideal",
    "Wire",
    "alone_ps",
    "collective_wire",
    "transfer_class_wire",
    "transfer_wire",
]
