"""Fluid collectives against the same algorithm played transfer by transfer."""

from __future__ import annotations

from fractions import Fraction
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emulator.plan.collectives import pattern
from emulator.run.activity import SLACK, Activity, Running
from emulator.run.clock import Clock
from emulator.run.maxmin import FULL
from emulator.run.network import Ideal, collective_wire, transfer_wire
from emulator.run.pool import Pool
from emulator.run.stepwise import RingKind, play_ring
from emulator.spec.cluster import Cluster
from emulator.spec.device import device
from emulator.spec.fabric import Fabric
from emulator.spec.units import PS_PER_SECOND

KINDS: tuple[RingKind, ...] = ("all_reduce", "all_gather", "reduce_scatter")


def world(nodes: int, gpus_per_node: int) -> Fabric:
    return Fabric(Cluster(device=device("h100-sxm"), nodes=nodes, gpus_per_node=gpus_per_node))


class Played(NamedTuple):
    """When a collective ended, and the bytes of its own that each link carried."""

    end_ps: int
    carried: dict[int, Fraction]


class Meter:
    """Audit of a pool: integrates what activities load on each link."""

    def __init__(self) -> None:
        self.carried: dict[int, int] = {}
        self.state: dict[Running, tuple[int, int]] = {}
        self.ignored: set[tuple[tuple[int, int], ...]] = set()

    def __call__(self, now: int, activity: Running, level: int) -> None:
        """Note a new level; what the old one has carried is added up."""
        since, before = self.state.get(activity, (now, 0))
        if activity.demands not in self.ignored:
            for link, demand in activity.demands:
                self.carried[link] = self.carried.get(link, 0) + demand * before * (now - since)
        self.state[activity] = (now, level)

    @property
    def bytes(self) -> dict[int, Fraction]:
        """Bytes that each link carried."""
        return {link: Fraction(load, FULL * PS_PER_SECOND) for link, load in self.carried.items()}


def play(
    fabric: Fabric,
    kind: RingKind,
    n: int,
    size: int,
    alpha_ps: int,
    stepwise: bool,
    others: tuple[tuple[int, int], ...] = (),
) -> Played:
    """Play a collective, fluid or stepwise, next to long transfers between pairs of GPUs."""
    clock, meter = Clock(), Meter()
    pool = Pool(clock, [fabric.capacity(link) for link in range(len(fabric))], meter)
    for src, dst in others:
        flow = transfer_wire(src, dst, 100 * size + 10**6, fabric, protocol=Ideal())
        # A hair apart in demand, so that the meter can tell them from the collective's own.
        demands = tuple((link, demand - 1) for link, demand in flow.demands)
        meter.ignored.add(demands)
        pool.start(Activity(demands, flow.length_q, pool.alone(demands)))
    if stepwise:
        end = play_ring(pool, kind, range(n), size, fabric, alpha_ps=alpha_ps)
    else:
        wire = collective_wire(kind, range(n), size, "ring", fabric, protocol=Ideal(alpha_ps))
        bound = pool.alone(wire.demands, wire.bound_q)
        end = pool.start(Activity(wire.demands, wire.length_q, bound, wire.alpha_ps))
    clock.run(end)
    return Played(clock.now, meter.bytes)


def steps(kind: RingKind, n: int) -> int:
    return (2 if kind == "all_reduce" else 1) * (n - 1)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(KINDS), st.integers(2, 12), st.integers(1, 10**9), st.integers(0, 10**7), st.booleans()
)
def test_fluid_equals_stepwise_alone_on_uniform_links(kind, n, size, alpha_ps, inside):
    """In one node, or with one rank a node: equal but for rounding each step up to a whole picosecond.

    k steps are late by less than k picoseconds together. The fluid end is rounded up as well, which leaves a
    difference of 0 to k - 1; the rounding of levels adds at most one either way.
    """
    fabric = world(1, n) if inside else world(n, 1)
    fluid = play(fabric, kind, n, size, alpha_ps, stepwise=False)
    step = play(fabric, kind, n, size, alpha_ps, stepwise=True)
    assert -1 <= step.end_ps - fluid.end_ps <= steps(kind, n)


@pytest.mark.parametrize("kind", KINDS)
def test_equal_to_the_picosecond_where_nothing_is_rounded(kind):
    """S/n and the rate chosen so that each step lasts whole picoseconds: no difference at all."""
    chip = device("h100-sxm")
    fabric = Fabric(Cluster(device=chip, nodes=8, gpus_per_node=1, nic_gbit_per_gpu=8000, nic_efficiency=1.0))
    fluid = play(fabric, kind, 8, 8 * 10**6, 2_700_000, stepwise=False)
    step = play(fabric, kind, 8, 8 * 10**6, 2_700_000, stepwise=True)
    assert fluid.end_ps == step.end_ps == steps(kind, 8) * (2_700_000 + 10**6)


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from(KINDS),
    st.sampled_from([(1, 4), (4, 1), (2, 4), (3, 2), (4, 2)]),
    st.integers(10**4, 10**8),
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)).filter(lambda p: p[0] != p[1]), max_size=3),
)
def test_under_contention_bytes_and_bounds_agree(kind, shape, size, others):
    """Beside other flows both carry the same bytes; neither beats being alone nor loses more than its share.

    m flows beside it leave a ring at least 1/(m+1) of every link: the time is at most m+1 times that alone.
    Where links differ, the steps of several rings meet in their ports and take no less than the fluid one.
    """
    nodes, g = shape
    n = nodes * g
    fabric = world(nodes, g)
    alone = {mode: play(fabric, kind, n, size, 0, mode).end_ps for mode in (False, True)}
    loads = pattern(kind, range(n), size, "ring", fabric).link_bytes
    k = steps(kind, n)
    assert alone[True] >= alone[False] - 1
    for mode in (False, True):
        beside = play(fabric, kind, n, size, 0, mode, tuple(others))
        assert alone[mode] - k <= beside.end_ps <= (len(others) + 1) * alone[mode] + k
        assert beside.carried.keys() == loads.keys()
        for link, count in loads.items():
            # Up to one picosecond of rounding for each transfer, at the link's rate; SLACK is far below.
            transfers = k * g + 1
            room = Fraction(transfers * fabric.capacity(link), PS_PER_SECOND) + Fraction(SLACK, FULL)
            assert abs(beside.carried[link] - count) <= room
