"""NCCL's own tuning model: latencies, protocols, channels.

Constants of NCCL 2.30.7 tuning.cc and topo.h unless said otherwise. A protocol is how bytes travel: LL sends
a flag with every four bytes, LL128 one with every 120, Simple bare data behind a fence.
"""

from __future__ import annotations

from fractions import Fraction
from functools import cache
from typing import Literal

import msgspec

from emulator.plan.profile import PhaseProfile
from emulator.spec.device import Device

Protocol = Literal["LL", "LL128", "Simple"]
Family = Literal["ring", "tree"]

OVERHEAD: dict[Protocol, Fraction] = {"LL": Fraction(2), "LL128": Fraction(128, 120), "Simple": Fraction(1)}
"""Bytes on the wire for a byte of payload."""

_BASE_NS: dict[Family, dict[Protocol, int]] = {
    "tree": {"LL": 6800, "LL128": 14000, "Simple": 8400},
    "ring": {"LL": 6600, "LL128": 14000, "Simple": 8400},
}
"""Launch, once for each collective."""

_HOP_NS: dict[str, dict[Family, dict[Protocol, int]]] = {
    "nvlink": {
        "tree": {"LL": 600, "LL128": 1250, "Simple": 4000},
        "ring": {"LL": 600, "LL128": 1900, "Simple": 3400},
    },
    "pci": {
        "tree": {"LL": 1000, "LL128": 1900, "Simple": 4000},
        "ring": {"LL": 1000, "LL128": 2500, "Simple": 5700},
    },
    "net": {
        "tree": {"LL": 5000, "LL128": 8500, "Simple": 14000},
        "ring": {"LL": 2700, "LL128": 4000, "Simple": 14000},
    },
}
"""One hop. Those of the network hold proxy and flush, so they exceed what the wire takes."""

_NVLS_NS = 25000
_NET_OVERHEAD_NS = {"LL": 1000, "LL128": 1000, "Simple": 3000}
"""Least hop inside a node when the communicator has several: the proxy on an Intel host, thrice with
Simple."""

_TREE_EFFICIENCY: dict[Protocol, tuple[float, ...]] = {
    "LL": (1, 1, 1, 1, .9, .8, .7, .7, .7, .7, .6, .5, .4, .4, .5, .6, .7, .8, .9, 1, 1, 1, 1, 1),
    "LL128": (1, 1, 1, 1, 1, .9, .8, .8, .8, .7, .6, .6, .6, .6, .6, .6, .8, .9, .9, .9, .9, 1, 1, 1),
    "Simple": (
        .9, .9, .9, .9, .9, .9, .9, .8, .7, .6, .6, .5, .5, .5, .5, .6, .7, .8, .7, .7, .8, .9, .9, .9,
    ),
}  # fmt: skip
"""treeCorrectionFactor: what a tree reaches by size, in powers of two from 64 B."""

P2P_LL_BYTES = 16384
"""NCCL_P2P_LL_THRESHOLD: messages between two ranks up to this size go by LL."""
P2P_AT_ONCE = 8
"""NCCL_MAX_DEV_WORK_P2P_PER_BATCH: peers that one kernel serves at once."""


class Generation(msgspec.Struct, frozen=True, kw_only=True):
    """What NCCL's model knows of one GPU generation."""

    ll_max: tuple[int, int, int]
    """Bus bandwidth of a ring with LL, bytes per second, on one, two and more nodes (llMaxBws)."""
    ll128: bool = True
    nvls: float = 0.0
    """Fraction of the scale-up bandwidth that in-switch reduction reaches; 0 without it."""
    plateau: Fraction = Fraction(14, 10)
    """Factor on the latency of a large multi-node ring all_reduce with Simple."""


_VOLTA = Generation(ll_max=(39_000_000_000, 39_000_000_000, 20_400_000_000), plateau=Fraction(19, 10))
_OLDER = msgspec.structs.replace(_VOLTA, ll128=False)
_AMPERE = Generation(ll_max=(87_700_000_000, 22_500_000_000, 19_000_000_000))
_HOPPER = Generation(ll_max=(141_000_000_000, 45_000_000_000, 35_000_000_000), nvls=0.85)
_BLACKWELL = Generation(ll_max=(282_000_000_000, 90_000_000_000, 70_000_000_000), nvls=0.74)

_BY_TENSOR_WIDTH = {0: _OLDER, 1024: _VOLTA, 2048: _AMPERE, 4096: _HOPPER, 8192: _BLACKWELL}
"""By 16-bit FLOP per SM and cycle (whitepapers: V100 8 x 128, A100 4 x 512, H100 4 x 1024, B200 4 x 2048)."""

CHANNELS = (24, 16)
"""Channels of a communicator in one node and over several. NCCL's logs: 24 on A100s of one node
(NVIDIA/nccl#578), 16 over nodes ("16 coll channels"), taken for H100s too;
each is one thread block on one SM."""
NVLS_CHANNELS = 16
P2P_CHANNELS = (32, 2)
"""The same logs: "32 p2p channels per peer" in a node, 2 over nodes."""
_P2P_CHANNELS_ALL = (32, 16)
"""All p2p channels together, as the same logs count them: an all_to_all has many peers."""
_BYTES_PER_CHANNEL: dict[Protocol, int] = {"LL": 512 * 8, "LL128": 640 * 8, "Simple": 512 * 64}
"""A channel less as long as channels x threads x threshold exceeds the message; thresholds as logged:
"threadThresholds 8/8/64" bytes a thread. A ring with LL needs them once for every rank."""
_P2P_BYTES_PER_CHANNEL = 512 * 1024
"""A slice: 4 MiB of buffer over 8 steps."""


def generation(device: Device) -> Generation:
    """NCCL's constants for a device; Ampere's stand in where there is no NCCL (TPU, Trainium, Instinct)."""
    return _BY_TENSOR_WIDTH.get(device.tensor_flops_per_sm_cycle, _AMPERE)


def latency_ps(phase: PhaseProfile, family: Family, protocol: Protocol, device: Device) -> int:
    """Add up base and hops of one phase, as tuning.cc does.

    The hop between nodes is the tree's where a node has one rank; inside nodes a communicator over several
    nodes pays at least the proxy's overhead.
    """
    pci = device.scale_up_bytes_per_second <= device.host_link_bytes_per_second
    inside = _HOP_NS["pci" if pci else "nvlink"][family][protocol]
    if phase.nodes > 1:
        inside = max(inside, _NET_OVERHEAD_NS[protocol])
    between = _HOP_NS["net"]["tree" if phase.ranks == phase.nodes else family][protocol]
    hops = phase.scale_up_hops * inside + phase.network_hops * between
    return (_BASE_NS[family][protocol] + hops) * 1000


def p2p_latency_ps(phase: PhaseProfile, peers: int, protocol: Protocol, device: Device) -> int:
    """Latency of a send or an all_to_all: a hop for every batch of peers that a kernel serves at once."""
    batches = -(-peers // P2P_AT_ONCE)
    over = phase.network_hops > 0
    one = msgspec.structs.replace(
        phase, scale_up_hops=0 if over else batches, network_hops=batches if over else 0
    )
    return latency_ps(one, "ring", protocol, device)


def nvls_latency_ps() -> int:
    """One pass through the switch; NCCL has no base latency for it."""
    return _NVLS_NS * 1000


def ring_latency_factor(
    kind: str, size: int, phase: PhaseProfile, protocol: Protocol, device: Device
) -> Fraction:
    """Factor on a ring's latency: the plateau of a large multi-node all_reduce with Simple."""
    large = size >= 64 * channels_at_most(phase.nodes) * phase.ranks
    if kind == "all_reduce" and protocol == "Simple" and phase.nodes > 1 and large:
        return generation(device).plateau
    return Fraction(1)


def tree_fraction(size: int, phase: PhaseProfile, protocol: Protocol) -> Fraction:
    """Payload that a tree moves over what the links carry: protocol, and NCCL's correction by size.

    Between two powers of two the correction is a straight line: NCCL only chooses by the table, and its steps
    would let 4 MiB arrive a quarter sooner than a byte less.
    """
    correction = _tree_correction(size, protocol)
    if protocol == "LL":
        return correction / Fraction("3.8")
    if protocol == "LL128":
        return correction * (Fraction(7, 9) if phase.nodes == 1 else Fraction(120, 128))
    return correction * Fraction("0.92")


def nvls_fraction(device: Device) -> Fraction:
    """Fraction of the scale-up bandwidth that in-switch reduction reaches; one channel of 16 does no work."""
    efficiency = Fraction(repr(generation(device).nvls))
    return efficiency * Fraction(NVLS_CHANNELS - 1, NVLS_CHANNELS)


def _tree_correction(size: int, protocol: Protocol) -> Fraction:
    table = _tree_efficiency(protocol)
    step = max(0, size.bit_length() - 7)
    if step >= len(table):
        return Fraction(1)
    above = table[step + 1] if step + 1 < len(table) else Fraction(1)
    past = max(Fraction(0), Fraction(size, 64 << step) - 1)
    return table[step] + (above - table[step]) * past


@cache
def _tree_efficiency(protocol: Protocol) -> tuple[Fraction, ...]:
    return tuple(Fraction(repr(float(each))) for each in _TREE_EFFICIENCY[protocol])


LL128_RING_FRACTION = Fraction("0.92")
"""Payload that a ring moves with LL128; the limits per channel (36.7 GB/s on Hopper) never bind at 16."""


def ll_ring_limit(phase: PhaseProfile, device: Device) -> int:
    """Bus bandwidth that a ring with LL cannot exceed, bytes per second."""
    return generation(device).ll_max[min(phase.nodes, 3) - 1]


def channels_at_most(nodes: int) -> int:
    """Channels of a large collective."""
    return CHANNELS[nodes > 1]


def channels(size: int, phase: PhaseProfile, family: Family, protocol: Protocol) -> int:
    """SMs that a ring or tree of this size holds on each member."""
    unit = _BYTES_PER_CHANNEL[protocol]
    if family == "ring" and protocol == "LL":
        unit *= phase.ranks
    return max(1, min(channels_at_most(phase.nodes), size // unit))


def p2p_channels(size: int, peers: int, over_network: bool) -> int:
    """SMs that a rank holds while it exchanges `size` bytes with each of some peers."""
    most = min(peers * P2P_CHANNELS[over_network], _P2P_CHANNELS_ALL[over_network])
    return max(1, min(most, -(-peers * size // _P2P_BYTES_PER_CHANNEL)))
