"""Interval algebra in integer picoseconds.

A set of intervals is an int64 array of shape (n, 2): half-open [start, end) rows. A *merged* set is sorted,
disjoint, without empty or touching rows; every function here returns one.
"""

from __future__ import annotations

import numpy as np

from emulator.spec.arrays import Int64

EMPTY: Int64 = np.empty((0, 2), dtype=np.int64)
EMPTY.setflags(write=False)


def pairs(starts: Int64, ends: Int64) -> Int64:
    """Rows [start, end) of two columns, not yet merged."""
    return np.stack([starts, ends], axis=1)


def union(rows: Int64) -> Int64:
    """Instants that lie in any of the rows."""
    rows = rows[rows[:, 1] > rows[:, 0]]
    if not len(rows):
        return EMPTY
    rows = rows[np.argsort(rows[:, 0], kind="stable")]
    reach = np.maximum.accumulate(rows[:, 1])
    first = np.concatenate([[True], rows[1:, 0] > reach[:-1]])
    last = np.concatenate([first[1:], [True]])
    return pairs(rows[first, 0], reach[last])


def length(merged: Int64) -> int:
    """Total duration of a merged set."""
    return int((merged[:, 1] - merged[:, 0]).sum())


def complement(merged: Int64, start: int, end: int) -> Int64:
    """Instants of [start, end) that lie in no row of a merged set."""
    inner = clip(merged, start, end)
    edges = np.concatenate([[start], inner.ravel(), [end]]).reshape(-1, 2)
    return edges[edges[:, 1] > edges[:, 0]]


def clip(merged: Int64, start: int, end: int) -> Int64:
    """Cut a merged set to [start, end)."""
    rows = np.clip(merged, start, end)
    return rows[rows[:, 1] > rows[:, 0]]


def intersection(one: Int64, other: Int64) -> Int64:
    """Instants that lie in both merged sets."""
    if not len(one) or not len(other):
        return EMPTY
    start = int(min(one[0, 0], other[0, 0]))
    end = int(max(one[-1, 1], other[-1, 1]))
    return complement(
        union(np.concatenate([complement(one, start, end), complement(other, start, end)])), start, end
    )


def difference(one: Int64, other: Int64) -> Int64:
    """Instants of a merged set that do not lie in another merged set."""
    if not len(one):
        return EMPTY
    return intersection(one, complement(other, int(one[0, 0]), int(one[-1, 1])))
