"""Members of a crowd, what they claim, and the resources they use, as tables that compiled code works on."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from emulator.run.maxmin import FULL, LEVEL_BITS

Ints = NDArray[np.int64]
Table = NDArray[np.int64]
"""Numbers of many, so that compiled code is handed few arrays. There is room for more than there are."""

FAR = 1 << 61
"""A time, in ps, that is not told from never: 27 days."""
LOW = (1 << LEVEL_BITS) - 1
ALL = FULL + 1
"""Above every level."""
ASIDE, GONE = -2, -3
"""Targets of who is not in a sweep, and of who has ended."""
STATE = 5
"""Numbers in the state of a sweep."""


class Members(NamedTuple):
    """Those in the crowd, in the order in which they joined. What is left is high * 2**62 + low."""

    bound: Ints
    first: Ints
    """Its claims are first..last; there are none when it is gone."""
    last: Ints
    target: Ints
    """Its new level; ASIDE, or GONE."""
    level: Ints
    since: Ints
    left_high: Ints
    left_low: Ints
    end: Ints
    after: Ints
    """The next who waits with the same resource; -1 at the end."""
    list: Ints
    """The rest is room to work in: those in the sweep,"""
    heap: Ints
    """those who wait for their bounds, by bound,"""
    stopped: Ints
    """those who stop in a round,"""
    passing: Ints
    """and those who rise past the level that they had."""


LEVEL, OF_MEMBER = map(Members._fields.index, ("level", "end"))
END, LIST = (Members._fields.index(field) - OF_MEMBER for field in ("end", "list"))


class Claims(NamedTuple):
    """What members ask of resources."""

    resource: Ints
    demand: Ints


class Users(NamedTuple):
    """The same claims by resource."""

    member: Ints
    demand: Ints


class Resources(NamedTuple):
    """Resources that a member uses or has used."""

    room: Ints
    """Units a second that are not held."""
    binds: Ints
    """1 if it is contended: what is not cannot stop anybody."""
    first: Ints
    """Its users are first..last: some of them may be gone."""
    last: Ints
    load: Ints
    """Sum of the demands on it."""
    level: Ints
    """Where it is full; ALL if it is not."""
    touched: Ints
    """1 while it is in a sweep. The rest is the state of that."""
    before: Ints
    """Where it was full when the sweep began."""
    waiting: Ints
    """The first of its users in the sweep who stopped there; -1 if there is none."""
    left_high: Ints
    """What those who have stopped leave of it."""
    left_low: Ints
    rising: Ints
    """Sum of the demands of those who have not stopped yet."""
    key: Ints
    """left // rising when last looked at."""
    stale: Ints
    """1 if they have changed since."""
    list: Ints
    """Room to work in: those that are touched,"""
    heap: Ints
    """those of them with users who rise, by key,"""
    events: Ints
    """those with which users wait, by where they were full,"""
    full: Ints
    """and those that are full in a round."""


ROOM, BINDS = map(Resources._fields.index, ("room", "binds"))


class Tables(NamedTuple):
    """What compiled code works on."""

    members: Table
    """A row for each member, of the first OF_MEMBER fields: they are looked at together."""
    lists: Table
    """A row for each other field."""
    claims: Table
    """A row for each claim."""
    users: Table
    """A row for each field."""
    resources: Table
    """A row for each field."""

    @classmethod
    def empty(cls) -> Tables:
        """Tables without room for anybody."""
        shapes = (
            (0, OF_MEMBER),
            (len(Members._fields) - OF_MEMBER, 0),
            (0, len(Claims._fields)),
            (len(Users._fields), 0),
            (len(Resources._fields), 0),
        )
        return cls(*(np.zeros(shape, np.int64) for shape in shapes))

    def grown(self, members: int, claims: int, resources: int) -> Tables:
        """Tables with room for so many."""
        sizes = members, members, claims, claims, resources
        return Tables(*map(_grown, self, (0, 1, 0, 1, 1), sizes))

    def named(self, members: int, claims: int, resources: int) -> tuple[Members, Claims, Resources]:
        """The fields by their names, of so many."""
        return (
            Members(*self.members[:members].T, *self.lists[:, :members]),
            Claims(*self.claims[:claims].T),
            Resources(*self.resources[:, :resources]),
        )


def _grown(table: Table, axis: int, size: int) -> Table:
    """The table, if there is room for so many along an axis, or a copy in which there is."""
    has = table.shape[axis]
    if has >= size:
        return table
    more = [(0, 0), (0, 0)]
    more[axis] = 0, 2 * size - has
    return np.pad(table, more)
