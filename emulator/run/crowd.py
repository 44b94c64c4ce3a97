"""A crowd: the many activities of a large contended component, in arrays that compiled code works on.

The pool hands a component over when it has grown large, and takes it back when it has become small. The
crowd is solved as a whole, and only its next ends go back to the pool; levels do not depend on what is
solved together, so neither do they depend on who is in a crowd.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from emulator.run.activity import Activity, Running
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
STATE = 5
"""Numbers in the state of a sweep."""
SPARE = 64
"""Rows of members that are gone for which it does not pay to tidy up."""


class Members(NamedTuple):
    """Those in the crowd, in the order in which they joined. What is left is high * 2**62 + low."""

    bound: Ints
    first: Ints
    """Its claims are first..last; there are none when it is gone."""
    last: Ints
    target: Ints
    """Its new level; ASIDE while it is not in a sweep; GONE for good."""
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


OF_MEMBER = Members._fields.index("end")
"""So many fields of Members lie side by side for each member, the others in arrays of their own."""
LISTS = len(Members._fields) - OF_MEMBER


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
    """Where it was full."""
    waiting: Ints
    """The first of its users in the sweep who stopped there; -1 if there is none."""
    left_high: Ints
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


@cache
def compiled() -> ModuleType | None:
    """The compiled functions; None where there is no compiler for them."""
    try:
        return import_module("emulator.run.compiled")
    except ImportError:
        return None


def fits(activity: Activity) -> bool:
    """Whether compiled code can play an activity: see `compiled` for what its numbers hold."""
    return (
        activity.length >> 2 * LEVEL_BITS == 0
        and activity.bound <= FULL
        and all(demand < FULL for _, demand in activity.demands)
    )


class Tables(NamedTuple):
    """What compiled code works on. Fields of a member, or a claim, lie side by side: it goes from one to another."""

    members: Table
    lists: Table
    """A row for each field of Members that is not in `members`."""
    claims: Table
    users: Table
    """A row for each field."""
    resources: Table
    """A row for each field."""

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


class Crowd:
    """The members of a crowd, and what they use."""

    def __init__(self, functions: ModuleType) -> None:
        self.functions = functions
        self.size = 0
        self.due_ps = FAR
        self.next: list[Running] = []
        """Who ends at due_ps, which is the earliest end."""
        self.here: dict[int, int] = {}
        """Resource of the pool -> its row."""
        self._playing: list[Running] = []
        self._claims = 0
        self._tables = Tables(
            *(np.zeros(shape, np.int64) for shape in ((0, OF_MEMBER), (LISTS, 0), (0, len(Claims._fields)), (len(Users._fields), 0), (len(Resources._fields), 0)))
        )
        self._state = np.zeros(STATE, np.int64)
        self._gone: list[int] = []
        self._changed: list[int] = []
        self._clear()

    def _clear(self) -> None:
        self._playing.clear()
        self._claims = 0
        self._gone.clear()
        self._changed.clear()
        self._same = ALL  # levels below are as they were: no room that has changed since stops lower
        self._settled = self._linked = 0  # members and claims that have been taken into account
        self.here.clear()
        self._room: list[int] = []
        self._binds: list[bool] = []

    def join(self, joining: list[Running], room: Sequence[int], is_full: Callable[[int], bool]) -> None:
        """Take activities in, with the room of their resources, and which of these are contended."""
        if not joining:
            return
        if len(self._playing) > 2 * self.size + SPARE:  # most rows are of those who are gone
            joining = [*self.disband(), *joining]
        here = self.here
        members, ends, claims = [], [], []
        before, known, begin = len(self._playing), len(here), self._claims
        for number, running in enumerate(joining, before):
            activity = running.activity
            for resource, demand in activity.demands:
                if resource not in here:
                    here[resource] = len(here)
                    self._room.append(room[resource])
                    self._binds.append(is_full(resource))
                claims.append((here[resource], demand))
            end = begin + len(activity.demands)
            left = running.left >> LEVEL_BITS, running.left & LOW
            members.append((activity.bound, begin, end, ASIDE, running.level, running.since, *left))
            ends.append(min(running.end, FAR) if running.level else FAR)
            begin = end
            running.member = number
            running.end = -1
        self.size += len(joining)
        self._playing += joining
        self._claims = begin
        tables = self._tables = self._tables.grown(len(self._playing), begin, len(here))
        tables.members[before:number + 1] = members
        tables.lists[0, before:number + 1] = ends
        tables.claims[begin - len(claims):begin] = claims
        if len(here) > known:
            new = Resources(*tables.resources[:, known:len(here)])
            new.room[:] = [units >> LEVEL_BITS for units in self._room[known:]]
            new.binds[:] = self._binds[known:]
            new.first[:] = new.last[:] = 0
            new.waiting[:] = -1
            new.level[:] = ALL
            new.load[:] = new.touched[:] = 0

    def change(self, resources: Iterable[int], room: Sequence[int], full: Container[int]) -> None:
        """Note what became of resources: the room on them, and which are contended."""
        for resource in resources:
            row = self.here.get(resource)
            if row is not None:
                self._changed.append(row)
                if self._room[row] != room[resource]:
                    self._same = 0  # of a level that depends on a room, nothing is known
                    self._room[row] = room[resource]
                    self._tables.resources[0, row] = room[resource] >> LEVEL_BITS
                binds = resource in full
                if self._binds[row] != binds:
                    self._binds[row] = binds
                    self._tables.resources[1, row] = binds

    def leave(self, running: Running) -> None:
        """Let a member go at its end."""
        self._gone.append(running.member)
        running.member = -1
        self.size -= 1

    def settle(self, now: int) -> bool:
        """Level members anew, and see who ends next; False if the numbers do not hold all that."""
        changed, gone = np.array(self._changed + self._gone, np.int64), len(self._gone)
        sizes = len(self._playing), self._claims, len(self.here)
        self.due_ps, count = self.functions.settle(
            now, *self._tables, *sizes, self._state, changed, gone, self._settled, self._linked, self._same
        )
        self._gone.clear()
        self._changed.clear()
        self._settled, self._linked, self._same = *sizes[:2], ALL
        if not 0 <= self.due_ps < FAR:
            self.next = []
            return self.due_ps == FAR and not any(level for _, level in self.levels())
        self.next = [self._playing[m] for m in self._tables.lists[2, :count].tolist()]
        return True

    def levels(self) -> list[tuple[Running, int]]:
        """Everybody's level as it is now."""
        levels = self._tables.members[: len(self._playing), 4].tolist()
        return [(r, level) for r, level in zip(self._playing, levels, strict=True) if r.member >= 0]

    def disband(self) -> list[Running]:
        """Give everybody the state that was kept here, and let all go; an end that is FAR is left open."""
        members = []
        rows = self._tables.members[: len(self._playing), 4:].tolist()
        ends = self._tables.lists[0, : len(self._playing)].tolist()
        for running, row, end in zip(self._playing, rows, ends, strict=True):
            if running.member >= 0:
                running.level, running.since, high, low = row
                running.left = (high << LEVEL_BITS) + low
                running.end = end
                running.member = -1
                members.append(running)
        self.size = 0
        self._clear()
        return members


def _grown(table: Table, axis: int, size: int) -> Table:
    """The table, if there is room for so many along an axis, or a copy in which there is."""
    has = table.shape[axis]
    if has >= size:
        return table
    more = [(0, 0), (0, 0)]
    more[axis] = 0, 2 * size - has
    return np.pad(table, more)
