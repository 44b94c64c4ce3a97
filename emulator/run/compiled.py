"""The levels of `maxmin`, and the ends that follow from them, in machine code: for hundreds of activities.

Every number is the one that Python's integers give: what has up to 124 bits is a pair (high, low) that stands
for high * 2**62 + low with 0 <= low < 2**62, and all else is below 2**63. `crowd.fits` says for which
activities this holds; a pool plays others in Python.
"""

from __future__ import annotations

from collections.abc import Callable
from math import floor
from typing import NamedTuple, ParamSpec, TypeVar, cast

import numba
import numpy as np

from emulator.run.activity import SLACK
from emulator.run.crowd import ALL, FAR, Claims, Ints, Members, Resources
from emulator.run.maxmin import FULL, LEVEL_BITS

P = ParamSpec("P")
R = TypeVar("R")

BASE = 2.0**LEVEL_BITS
LOW = (1 << LEVEL_BITS) - 1
HALF_BITS = LEVEL_BITS // 2
HALF = (1 << HALF_BITS) - 1


def compiled(function: Callable[P, R]) -> Callable[P, R]:
    """The function in machine code, which is kept on disk from run to run."""
    return cast("Callable[P, R]", numba.njit(cache=True, error_model="numpy")(function))


@compiled
def times(a: int, b: int) -> tuple[int, int]:
    """Product of a and b as a pair, for 0 <= a, b <= 2**62.

    By halves of 31 bits; a half is at most 2**31, and if it is that much the other one is 0:

        a1 * b0 + a0 * b1  <  2 * 2**31 * 2**31  =  2**63
        a0 * b0 + (31 bits << 31)  <  2**62 + 2**62  =  2**63
    """
    a1, a0, b1, b0 = a >> HALF_BITS, a & HALF, b >> HALF_BITS, b & HALF
    middle = a1 * b0 + a0 * b1
    low = a0 * b0 + ((middle & HALF) << HALF_BITS)
    return a1 * b1 + (middle >> HALF_BITS) + (low >> LEVEL_BITS), low & LOW


@compiled
def minus(high: int, low: int, less_high: int, less_low: int) -> tuple[int, int]:
    """The difference of two pairs; its high part has its sign."""
    low -= less_low
    return high - less_high + (low >> LEVEL_BITS), low & LOW


@compiled
def quotient(high: int, low: int, divisor: int) -> int:
    """min(pair // divisor, 2**62), for a pair >= 0 and 1 <= divisor <= 2**62.

    Guessed in floating point and mended until  0 <= pair - q * divisor < divisor,  which has one solution: a
    guess of 53 good bits leaves a remainder that takes at most a few more. A remainder is negative, or no
    less than the divisor, in floating point too (subtracting 2**62 first keeps -1 from rounding to 0), so
    that q moves towards the solution each time.
    """
    if high >= divisor:
        return FULL
    q = int(min((high * BASE + low) / divisor, BASE))
    while True:
        less_high, less_low = times(q, divisor)
        rest_high, rest_low = minus(high, low, less_high, less_low)
        if rest_high == 0 and rest_low < divisor:
            return q
        if rest_high < 0:
            q += floor(((rest_high + 1) * BASE + (rest_low - FULL)) / divisor)
        else:
            q += floor((rest_high * BASE + rest_low) / divisor)


@compiled
def ends_in(high: int, low: int, level: int) -> int:
    """`pool.ends_in_ps` of a length left and a level >= 1, at most 2**62.

    max(1, ceil((left - SLACK) / level)), where ceil(x / y) = floor((x + y - 1) / y).
    """
    low += level - 1 - SLACK
    high += low >> LEVEL_BITS
    if high < 0:
        return 1
    return max(1, quotient(high, low & LOW, level))


@compiled
def sink(heap: Ints, size: int, at: int, key: Ints) -> None:
    """Move an entry of a heap down until  key[heap[i]] <= key[heap[2i + 1]], key[heap[2i + 2]]  again."""
    entry = heap[at]
    while 2 * at + 1 < size:
        child = 2 * at + 1
        if child + 1 < size and key[heap[child + 1]] < key[heap[child]]:
            child += 1
        if key[heap[child]] >= key[entry]:
            break
        heap[at] = heap[child]
        at = child
    heap[at] = entry


class Filling(NamedTuple):
    """Where progressive filling stands on each resource."""

    left_high: Ints
    left_low: Ints
    rising: Ints
    """Sum of the demands of those who still rise."""
    key: Ints
    """left // rising as it was when last looked at; it never falls, so this is a lower bound."""
    stale: Ints
    """1 if left and rising have changed since."""
    heap: Ints
    """Resources by key; the first `size` count."""
    full: Ints
    """Resources that are full at the level of this round."""


@compiled
def link(claims: Claims, resources: Resources, begin: int, end: int) -> bool:
    """Put new claims on their resources; False if the demands on one come to more than 2**62."""
    for c in range(begin, end):
        r = claims.resource[c]
        claims.after[c] = resources.head[r]
        resources.head[r] = c
        resources.load[r] += claims.demand[c]
        if resources.load[r] > FULL:
            return False
    return True


@compiled
def unlink(members: Members, claims: Claims, resources: Resources, gone: Ints) -> int:
    """Take members off their resources and return the lowest level that one had; at most ALL.

    Their claims stay in the lists, and are passed over.
    """
    least = ALL
    for i in range(len(gone)):
        m = gone[i]
        least = min(least, members.level[m])
        for c in range(members.first[m], members.last[m]):
            resources.load[claims.resource[c]] -= claims.demand[c]
        members.last[m] = members.first[m]
        members.level[m] = 0
        members.end[m] = FAR
    return least


@compiled
def begin(members: Members, claims: Claims, resources: Resources, level: Ints) -> tuple[Filling, int]:
    """The state when those who have a level >= 0 have stopped, and how many resources are in the heap."""
    n = len(resources.room)
    filling = Filling(
        resources.room.copy(),
        np.zeros(n, np.int64),
        resources.load.copy(),
        np.zeros(n, np.int64),
        np.zeros(n, np.int64),
        np.empty(n, np.int64),
        np.empty(n, np.int64),
    )
    for m in range(len(level)):
        if level[m] >= 0:
            stop(members, claims, filling, m, level[m])
    size = 0
    for r in range(n):
        filling.stale[r] = 0
        if resources.binds[r] and filling.rising[r]:
            filling.key[r] = quotient(filling.left_high[r], filling.left_low[r], filling.rising[r])
            filling.heap[size] = r
            size += 1
    for at in range(size // 2 - 1, -1, -1):
        sink(filling.heap, size, at, filling.key)
    return filling, size


@compiled
def lowest(filling: Filling, size: int, level: int) -> tuple[int, int, int]:
    """Level of the next round, at most the given one; resources full there; resources left in the heap."""
    heap, key, full = filling.heap, filling.key, 0
    while size and key[heap[0]] <= level:
        r = heap[0]
        if filling.stale[r] and filling.rising[r]:
            filling.stale[r] = 0
            key[r] = quotient(filling.left_high[r], filling.left_low[r], filling.rising[r])
            sink(heap, size, 0, key)
            continue
        size -= 1
        heap[0] = heap[size]
        sink(heap, size, 0, key)
        if filling.rising[r]:
            level = key[r]
            filling.full[full] = r
            full += 1
    return level, full, size


@compiled
def stop(members: Members, claims: Claims, filling: Filling, member: int, level: int) -> None:
    """What a member uses at its level is no longer there for those who still rise."""
    for c in range(members.first[member], members.last[member]):
        r = claims.resource[c]
        used_high, used_low = times(claims.demand[c], level)
        filling.left_high[r], filling.left_low[r] = minus(
            filling.left_high[r], filling.left_low[r], used_high, used_low
        )
        filling.rising[r] -= claims.demand[c]
        filling.stale[r] = 1


@compiled
def levels(
    members: Members, claims: Claims, resources: Resources, by_bound: Ints, new: int, same: int
) -> Ints:
    """Max-min fair levels of all members, 0 for those who are gone.

    Members from `new` on have just joined; levels below `same` of those before them are as they were.

    Progressive filling as in `maxmin.solve`: in each round the lowest of left // rising over the resources
    and of the bound over those who rise stops everybody it concerns, at once. What changes takes no part in
    a round below the lowest level that it had or can have, so those rounds need not be played again.
    """
    n = len(members.bound)
    level = np.empty(n, np.int64)
    rising = 0
    for m in range(n):
        if members.first[m] == members.last[m]:
            level[m] = 0
        elif m < new and members.level[m] < same:
            level[m] = members.level[m]
        else:
            level[m] = -1
            rising += 1
    stopped = np.empty(rising, np.int64)
    filling, size = begin(members, claims, resources, level)
    b = 0
    while rising:
        while level[by_bound[b]] >= 0:
            b += 1
        now, full, size = lowest(filling, size, members.bound[by_bound[b]])
        count = 0
        for i in range(full):
            c = resources.head[filling.full[i]]
            while c >= 0:
                m = claims.member[c]
                if level[m] < 0:
                    level[m] = now
                    stopped[count] = m
                    count += 1
                c = claims.after[c]
        while b < n and members.bound[by_bound[b]] <= now:
            m = by_bound[b]
            if level[m] < 0:
                level[m] = now
                stopped[count] = m
                count += 1
            b += 1
        for i in range(count):
            stop(members, claims, filling, stopped[i], now)
        rising -= count
    return level


@compiled
def least_share(members: Members, claims: Claims, resources: Resources, new: int, same: int) -> int:
    """The lowest level, at most `same`, at which a member from `new` on can stop.

    That is its bound, or  room // load  of a resource, as that quotient never falls while others stop.
    """
    for m in range(new, len(members.bound)):
        same = min(same, members.bound[m])
        for c in range(members.first[m], members.last[m]):
            r = claims.resource[c]
            if resources.binds[r]:
                same = min(same, quotient(resources.room[r], 0, resources.load[r]))
    return same


@compiled
def settle(
    now: int, members: Members, claims: Claims, resources: Resources, by_bound: Ints, new: int, same: int
) -> int:
    """Level members anew at a time; the earliest end. What is left changes only where the level does."""
    same = least_share(members, claims, resources, new, same)
    level = levels(members, claims, resources, by_bound, new, same)
    earliest = FAR
    for m in range(len(level)):
        if level[m] != members.level[m]:
            done_high, done_low = times(members.level[m], now - members.since[m])
            high, low = minus(members.left_high[m], members.left_low[m], done_high, done_low)
            members.left_high[m], members.left_low[m] = high, low
            members.since[m], members.level[m] = now, level[m]
            members.end[m] = min(FAR, now + ends_in(high, low, level[m])) if level[m] else FAR
        earliest = min(earliest, members.end[m])
    return earliest
