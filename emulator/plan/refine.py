"""Colour refinement in arrays: the coarsest classes whose members have equal neighbours.

Entities come in families. The colour of an entity is the index of the first one of its class, so an entity
belongs to its class if it agrees with that one in everything: a round compares, and only what differs is
numbered anew. A *column* names one neighbour for each entity. A *crowd* is any number of neighbours, each
with a tag that says how, counted and not ordered. Columns are compared exactly, crowds by the sum of the
hashes of who is in them; that no two crowds were taken for the same is checked once, exactly, at the end.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from emulator.spec.arrays import Int64

UInt64 = npt.NDArray[np.uint64]


def numbered(values: Int64) -> Int64:
    """Number the distinct values, which are not negative, from 0 on in ascending order."""
    most = int(values.max(initial=0))
    if most > 8 * len(values) + 1024:
        return np.unique(values, return_inverse=True)[1].astype(np.int64)
    # No sort where a table of all that could come is small.
    there = np.zeros(most + 1, dtype=np.bool_)
    there[values] = True
    numbers: Int64 = (np.cumsum(there) - 1)[values]
    return numbers


def pairs(one: Int64, other: Int64) -> Int64:
    """Codes of pairs of values, which are not negative: equal where both are."""
    one, other = numbered(one), numbered(other)
    return one * (int(other.max(initial=0)) + 1) + other


def first_of(values: Int64) -> Int64:
    """For each index the first index of the same value; values are not negative."""
    numbers = numbered(values)
    first = np.empty(int(numbers.max(initial=-1)) + 1, dtype=np.int64)
    # Of several assignments to one place the last stays.
    first[numbers[::-1]] = np.arange(len(values))[::-1]
    return first[numbers]


def lanes(owner: Int64, who: Int64, owners: int) -> list[Int64]:
    """Columns over the owners that list who they have, -1 for nobody; one column if none has several."""
    columns = []
    while len(owner):
        column = np.full(owners, -1, dtype=np.int64)
        column[owner] = who
        columns.append(column)
        left = column[owner] != who
        owner, who = owner[left], who[left]
    return columns


class Family:
    """Entities of one kind, coloured."""

    def __init__(self, beginning: Int64) -> None:
        """beginning: for each entity a number of what is known of it alone, not negative."""
        self.colours = first_of(beginning)
        self.beginning = self.colours.copy()
        self.version = 0
        self.neighbours: list[Column | Crowd] = []

    def __len__(self) -> int:
        return len(self.colours)

    def begin_with(self, column: Int64) -> None:
        """Tell apart what differs in a column that never changes; -1 stands for nothing."""
        self._split(column)
        self.beginning = self.colours.copy()

    def refine(self) -> bool:
        """Tell apart what has other neighbours; whether any class was split."""
        before = self.version
        for each in self.neighbours:
            # What agreed when the neighbours' colours were the same agrees now.
            if each.seen != each.theirs.version:
                each.seen = each.theirs.version
                self._split(each.values(self.colours))
        return self.version > before

    def _split(self, column: Int64) -> None:
        differ = np.flatnonzero(column != column[self.colours])
        if len(differ):
            keys = pairs(self.colours[differ], column[differ] + 1)
            self.colours[differ] = differ[first_of(keys)]
            self.version += 1

    def is_equitable(self) -> bool:
        """Whether all of one colour began with one and have the same crowds: exactly, without hashes."""
        kept = np.array_equal(self.beginning, self.beginning[self.colours])
        crowds = [each for each in self.neighbours if isinstance(each, Crowd)]
        return kept and all(each.agrees(self.colours) for each in crowds)


class Column:
    """One neighbour of each entity: an index into its family, -1 where there is none."""

    def __init__(self, theirs: Family, index: Int64) -> None:
        self.theirs = theirs
        self.index = index
        self.seen = -1

    def values(self, _colours: Int64) -> Int64:
        """Colour of each entity's neighbour."""
        return np.append(self.theirs.colours, -1)[self.index]


class Crowd:
    """Any number of neighbours of each entity: rows of an owner, a neighbour and a tag of at least 0."""

    def __init__(self, theirs: Family, owner: Int64, other: Int64, tag: Int64) -> None:
        self.theirs = theirs
        self.owner, self.other, self.tag = owner, other, tag
        self.seen = -1

    def values(self, colours: Int64) -> Int64:
        """Numbers of the crowds, by the sums of the hashes of who is in them."""
        owner, code = self._rows(colours)
        sums = np.zeros(len(colours), dtype=np.uint64)
        np.add.at(sums, owner, _mixed(code))
        return np.unique(sums, return_inverse=True)[1].astype(np.int64)

    def agrees(self, colours: Int64) -> bool:
        """Whether all of one colour have the same crowd."""
        owner, code = self._rows(colours)
        order = np.lexsort((code, owner))
        owner, code = owner[order], code[order]
        count = np.bincount(owner, minlength=len(colours))
        begin = np.cumsum(count) - count
        place = np.arange(len(owner)) - begin[owner]
        return np.array_equal(count, count[colours]) and np.array_equal(
            code, code[begin[colours[owner]] + place]
        )

    def _rows(self, colours: Int64) -> tuple[Int64, Int64]:
        """What each row says, in one number, and whose it is; who is alone in its class needs no crowd."""
        shared = (np.bincount(colours, minlength=len(colours)) > 1)[colours][self.owner]
        owner, other, tag = self.owner[shared], self.other[shared], self.tag[shared]
        return owner, self.theirs.colours[other] * (int(tag.max(initial=0)) + 1) + tag


def refine(families: Sequence[Family]) -> None:
    """Colour until nothing splits: at most one round for each class that there is in the end."""
    while sum(family.refine() for family in families):
        pass


def _mixed(values: Int64) -> UInt64:
    """Scatter 64-bit values so that sums of them tell crowds apart (the finalizer of SplitMix64)."""
    x = values.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
