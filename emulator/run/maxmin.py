"""Max-min fair levels, in integers.

Activity j runs at a level y_j; there it loads resource r with d_jr * y_j (d is its demand). The levels are
the unique solution of progressive filling, in which all levels rise together from zero:

    for every resource r:   sum over j of d_jr * y_j  <=  C_r          nothing is loaded past its capacity
    for every activity j:   y_j  <=  b_j                               nor driven past its bound
    for every activity j:   y_j = b_j, or j loads a resource that is full and on which no level exceeds y_j

Levels count units of 2**-62 and C_r is a capacity << 62, so "full" means that less than one more unit for
everybody who still rises would fit. In each round the lowest of `left_r // load_r` over the resources and of
b_j over the activities stops everybody it concerns at once; what they use is subtracted; the others rise on.
Only integer sums, quotients and comparisons occur, so the result depends neither on the order of activities
and resources nor on what is solved together: that is what makes a folded run equal to the unfolded one.
"""

from __future__ import annotations

from collections.abc import Mapping
from heapq import heapify, heappop, heappush
from typing import Protocol, TypeVar

LEVEL_BITS = 62
FULL = 1 << LEVEL_BITS
"""Level 1: the speed for which demands are stated."""


class Claimant(Protocol):
    """An activity, as far as the solver is concerned."""

    @property
    def demands(self) -> tuple[tuple[int, int], ...]:
        """(resource, demand at level 1) pairs; demands are positive and no resource comes twice."""

    @property
    def bound(self) -> int:
        """Highest level."""


A = TypeVar("A", bound=Claimant)


def solve(
    users: Mapping[int, Mapping[A, int]], room: Mapping[int, int], stops: dict[A, int] | None = None
) -> dict[A, int]:
    """Level of every activity that loads one of the given resources.

    users: resource -> {activity: its demand there}. room: resource -> capacity << 62, same keys. A demand on
    a resource that is not given is ignored: the caller knows that it cannot bind. `stops`, if given, is told
    for each activity that a resource has stopped, and not its bound, which one that was.
    """
    left = dict(room)
    load = {r: sum(there.values()) for r, there in users.items()}
    rising = [(left[r] // load[r], r) for r in users]
    heapify(rising)  # quotients never fall, so an outdated entry is a lower bound of the true one
    by_bound = sorted(dict.fromkeys(a for there in users.values() for a in there), key=lambda a: a.bound)
    levels: dict[A, int] = {}
    lowest = 0
    while len(levels) < len(by_bound):
        while by_bound[lowest] in levels:
            lowest += 1
        level = by_bound[lowest].bound
        full: list[int] = []
        while rising and rising[0][0] <= level:
            r = heappop(rising)[1]
            if not load[r]:
                continue
            quotient = left[r] // load[r]
            if (rising and quotient > rising[0][0]) or quotient > level:
                heappush(rising, (quotient, r))
                continue
            level = quotient
            full.append(r)
        stopped = dict.fromkeys(a for r in full for a in users[r] if a not in levels)
        if stops is not None:
            stops.update((a, r) for r in full for a in users[r] if a not in levels)
        for a in by_bound[lowest:]:
            if a.bound > level:
                break
            if a not in levels:
                stopped[a] = None
        for a in stopped:
            levels[a] = level
            for r, demand in a.demands:
                if r in left:
                    left[r] -= demand * level
                    load[r] -= demand
    return levels
