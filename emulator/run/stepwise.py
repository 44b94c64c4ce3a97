"""The ring algorithms played transfer by transfer: the oracle that the fluid collectives are tested against.

A rank sends a chunk of S/n to the next rank of the ring, n-1 times (twice that for an all_reduce); it
sends the next one when its own send is through and it has received what it must pass on. Alone on uniform
links this takes as long as the one fluid activity, but that each step ends on a whole picosecond: with k
steps it is late by less than k picoseconds.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from fractions import Fraction
from typing import Literal

import simpy

from emulator.plan.collectives import ring_orders
from emulator.run.activity import Activity
from emulator.run.maxmin import FULL
from emulator.run.pool import Pool
from emulator.spec.fabric import Fabric
from emulator.spec.units import PS_PER_SECOND

RingKind = Literal["all_reduce", "all_gather", "reduce_scatter"]


def play_ring(
    pool: Pool,
    kind: RingKind,
    ranks: Sequence[int],
    size: int,
    fabric: Fabric,
    *,
    alpha_ps: int = 0,
) -> simpy.Event:
    """Play a collective of `size` bytes (S of nccl-tests) step by step and return the event of its end.

    pool: resource l is link l of the fabric. Over nodes of several ranks there is a ring for each rank of
    a node, all at once, and each carries its share. alpha_ps: latency of every transfer.
    """
    env = pool.env
    orders = ring_orders(ranks, fabric)
    steps = (2 if kind == "all_reduce" else 1) * (len(ranks) - 1)
    chunk = Fraction(size, len(ranks) * len(orders))
    players: list[simpy.Event] = []
    for order in orders:
        arrivals = [[env.event() for _ in range(steps)] for _ in order]
        for place, gpu in enumerate(order):
            after = (place + 1) % len(order)
            demands, length = _transfer(gpu, order[after], chunk, fabric)
            player = _play(pool, demands, length, alpha_ps, arrivals[after], arrivals[place])
            players.append(env.process(player))
    return env.all_of(players)


def _transfer(src: int, dst: int, size: Fraction, fabric: Fabric) -> tuple[tuple[tuple[int, int], ...], int]:
    """Demands and length of one transfer at the line rate of the ports it goes by."""
    route = fabric.route(src, dst)
    rate = fabric.capacity(route[0])
    picoseconds = size * PS_PER_SECOND * FULL / rate
    return tuple((link, rate) for link in route), -(-picoseconds.numerator // picoseconds.denominator)


def _play(
    pool: Pool,
    demands: tuple[tuple[int, int], ...],
    length: int,
    alpha_ps: int,
    to_next: list[simpy.Event],
    from_previous: list[simpy.Event],
) -> Generator[simpy.Event, None, None]:
    """Play one rank: in each step send, tell the next rank of its arrival, wait for the own receive."""
    bound = pool.alone(demands)
    for there, here in zip(to_next, from_previous, strict=True):
        yield pool.start(Activity(demands, length, bound, alpha_ps))
        there.succeed()
        yield here
