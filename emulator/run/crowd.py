"""A crowd: the many activities of a large contended component, in arrays that compiled code works on.

The pool hands a component over when it has grown large, and takes it back when it has become small. The
crowd is solved as a whole, and only its next ends go back to the pool; levels do not depend on what is
solved together, so neither do they depend on who is in a crowd.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
"""A row for each field of Members, Claims or Resources, so that compiled code is handed one array."""

FAR = 1 << 61
"""A time, in ps, that is not told from never: 27 days."""
LOW = (1 << LEVEL_BITS) - 1
ALL = FULL + 1
"""Above every level."""
ASIDE = -2
STATE = 5
"""Numbers in the state of a sweep."""
SPARE = 64
"""Rows of members that are gone for which it does not pay to tidy up."""


class Members(NamedTuple):
    """Those in the crowd, in the order in which they joined. What is left is high * 2**62 + low."""

    left_high: Ints
    left_low: Ints
    level: Ints
    since: Ints
    end: Ints
    bound: Ints
    first: Ints
    """Its claims are first..last; there are none when it is gone."""
    last: Ints
    target: Ints
    """Its new level; ASIDE while it is not in a sweep."""
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


class Claims(NamedTuple):
    """What members ask of resources."""

    resource: Ints
    demand: Ints
    member: Ints
    after: Ints
    """The next claim on the same resource; -1 at the end."""


class Resources(NamedTuple):
    """Resources that a member uses or has used."""

    room: Ints
    """Units a second that are not held."""
    binds: Ints
    """1 if it is contended: what is not cannot stop anybody."""
    head: Ints
    """The first claim on it; -1 if there is none."""
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
        self._state = np.zeros(STATE, np.int64)
        self._gone: list[int] = []
        self._changed: list[int] = []
        self._clear()

    def _clear(self) -> None:
        self._playing: list[Running] = []
        self._gone.clear()
        self._changed.clear()
        self._same = ALL  # levels below are as they were: no room that has changed since stops lower
        self._settled = self._linked = 0  # members and claims that have been taken into account
        self.here.clear()
        self._tables = _table(Members, []), _table(Claims, []), _table(Resources, [])
        self._name_rows()

    def _name_rows(self) -> None:
        members, _, resources = self._tables
        self._members, self._resources = Members(*members), Resources(*resources)

    def join(
        self, joining: list[Running], room: Sequence[int], is_full: Callable[[int], bool]
    ) -> None:
        """Take activities in, with the room of their resources, and which of these are contended."""
        if not joining:
            return
        if len(self._playing) > 2 * self.size + SPARE:  # most rows are of those who are gone
            joining = [*self.disband(), *joining]
        members, claims, resources = [], [], []
        begin = self._tables[1].shape[1]
        for number, running in enumerate(joining, len(self._playing)):
            running.member = number
            for resource, demand in running.activity.demands:
                if resource not in self.here:
                    self.here[resource] = len(self.here)
                    state = room[resource] >> LEVEL_BITS, is_full(resource), -1, 0, ALL, 0, 0, -1
                    resources.append((*state, 0, 0, 0, 0, 0, 0, 0, 0, 0))
                claims.append((self.here[resource], demand, number, -1))
            end = begin + len(running.activity.demands)
            now = running.level, running.since, min(running.end, FAR) if running.level else FAR
            left = running.left >> LEVEL_BITS, running.left & LOW
            members.append((*left, *now, running.activity.bound, begin, end, ASIDE, 0, 0, 0, 0, 0))
            begin = end
            running.end = -1
        self.size += len(joining)
        self._playing += joining
        old_members, old_claims, old_resources = self._tables
        self._tables = (
            np.hstack([old_members, _table(Members, members)]),
            np.hstack([old_claims, _table(Claims, claims)]),
            np.hstack([old_resources, _table(Resources, resources)]),
        )
        self._name_rows()

    def change(self, resource: int, room: int, contended: bool) -> None:
        """Note what became of a resource."""
        row = self.here.get(resource)
        if row is not None:
            rows = self._resources
            self._changed.append(row)
            if rows.room[row] != room >> LEVEL_BITS:
                self._same = 0  # of a level that depends on a room, nothing is known
            rows.room[row] = room >> LEVEL_BITS
            rows.binds[row] = contended

    def leave(self, running: Running) -> None:
        """Let a member go at its end."""
        self._gone.append(running.member)
        running.member = -1
        self.size -= 1

    def settle(self, now: int) -> bool:
        """Level members anew, and see who ends next; False if the numbers do not hold all that."""
        gone, changed = np.array(self._gone, np.int64), np.array(self._changed, np.int64)
        new = self._settled, self._linked
        self.due_ps, count = self.functions.settle(
            now, *self._tables, self._state, gone, changed, *new, self._same
        )
        self._gone.clear()
        self._changed.clear()
        self._settled, self._linked, self._same = len(self._playing), self._tables[1].shape[1], ALL
        if not 0 <= self.due_ps < FAR:
            self.next = []
            return self.due_ps == FAR and not self._members.level.any()
        self.next = [self._playing[m] for m in self._members.list[:count].tolist()]
        return True

    def levels(self) -> list[tuple[Running, int]]:
        """Everybody's level as it is now."""
        level = self._members.level.tolist()
        return [(r, level) for r, level in zip(self._playing, level, strict=True) if r.member >= 0]

    def disband(self) -> list[Running]:
        """Give everybody the state that was kept here, and let all go; an end that is FAR is left open."""
        members = []
        for running, row in zip(self._playing, self._tables[0][:5].T.tolist(), strict=True):
            if running.member >= 0:
                high, low, running.level, running.since, running.end = row
                running.left = (high << LEVEL_BITS) + low
                running.member = -1
                members.append(running)
        self.size = 0
        self._clear()
        return members


def _table(kind: type[Members] | type[Claims] | type[Resources], columns: Sequence[tuple[int, ...]]) -> Table:
    return np.ascontiguousarray(np.array(columns, np.int64).reshape(-1, len(kind._fields)).T)
