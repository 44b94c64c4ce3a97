"""Integers of up to 124 bits, and heaps, in machine code.

A pair (high, low) stands for high * 2**62 + low with 0 <= low < 2**62; all else is below 2**63. Every result
is the one that Python's integers give.
"""

from __future__ import annotations

from collections.abc import Callable
from math import floor
from typing import Any, ParamSpec, TypeVar, cast

import numba

from emulator.run.activity import SLACK
from emulator.run.maxmin import FULL, LEVEL_BITS
from emulator.run.tables import LOW, Ints

P = ParamSpec("P")
R = TypeVar("R")

BASE = 2.0**LEVEL_BITS
HALF_BITS = LEVEL_BITS // 2
HALF = (1 << HALF_BITS) - 1
OPTIONS: dict[str, Any] = {"error_model": "numpy", "_nrt": False}
"""Nothing is allocated here, so arrays need no counts of references (nrt), which took half of the time."""


def compiled(function: Callable[P, R]) -> Callable[P, R]:
    """The function in machine code."""
    return cast("Callable[P, R]", numba.njit(forceinline=True, **OPTIONS)(function))


def kept(function: Callable[P, R]) -> Callable[P, R]:
    """The function, and all that it calls, in machine code that is kept on disk from run to run.

    Where there is no place to write, it is compiled anew in each run.
    """
    try:
        return cast("Callable[P, R]", numba.njit(cache=True, **OPTIONS)(function))
    except RuntimeError:
        return compiled(function)


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
    """`activity.ends_in_ps` of a length left and a level >= 1, at most 2**62.

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


@compiled
def push(heap: Ints, size: int, entry: int, key: Ints) -> int:
    """Add an entry to a heap; the size then."""
    at = size
    while at and key[heap[(at - 1) // 2]] > key[entry]:
        heap[at] = heap[(at - 1) // 2]
        at = (at - 1) // 2
    heap[at] = entry
    return size + 1


@compiled
def pop(heap: Ints, size: int, key: Ints) -> int:
    """Drop the first entry, which has the lowest key; the size then."""
    heap[0] = heap[size - 1]
    sink(heap, size - 1, 0, key)
    return size - 1
