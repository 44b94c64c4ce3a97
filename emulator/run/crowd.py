"""A crowd: the many activities of a large contended component, in arrays that compiled code works on.

The pool hands a component over when it has grown large, and takes it back when it has become small. The
crowd is solved as a whole, and only its next ends go back to the pool; levels do not depend on what is
solved together, so neither do they depend on who is in a crowd.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from emulator.run.activity import Activity, Running
from emulator.run.maxmin import FULL, LEVEL_BITS

Ints = NDArray[np.int64]

FAR = 1 << 61
"""A time, in ps, that is not told from never: 27 days."""
LOW = (1 << LEVEL_BITS) - 1
ALL = FULL + 1
"""Above every level."""
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


class Claims(NamedTuple):
    """What members ask of resources."""

    resource: Ints
    demand: Ints
    member: Ints
    after: Ints
    """The next claim on the same resource; -1 at the end."""


class Resources(NamedTuple):
    """Resources that some member uses or has used."""

    room: Ints
    """Units a second that are not held."""
    binds: Ints
    """1 if it is contended; what is not cannot stop anybody."""
    head: Ints
    """The first claim on it; -1 if there is none."""
    load: Ints
    """Sum of the demands on it."""


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
        self._gone: list[int] = []
        self._same = ALL
        """Levels below are as they were: what has changed since they were set stops no lower."""
        self._clear()

    def _clear(self) -> None:
        self._playing: list[Running] = []
        self._settled = 0
        self.here.clear()
        self.members = Members(*_columns((), len(Members._fields)))
        self.claims = Claims(*_columns((), len(Claims._fields)))
        self.resources = Resources(*_columns((), len(Resources._fields)))

    def join(self, joining: list[Running], room: Sequence[int], contended: Collection[int]) -> bool:
        """Take activities in, with room and state of their resources; False if there are too many."""
        if not joining:
            return True
        if len(self._playing) > 2 * self.size + SPARE:  # most rows are of those who are gone
            joining = [*self.disband(), *joining]
        n = len(self._playing)
        members, claims, resources = [], [], []
        base = begin = len(self.claims.member)
        for number, running in enumerate(joining, n):
            running.member = number
            self._playing.append(running)
            for resource, demand in running.activity.demands:
                if resource not in self.here:
                    self.here[resource] = len(self.here)
                    state = room[resource] >> LEVEL_BITS, resource in contended, -1, 0
                    resources.append(state)
                claims.append((self.here[resource], demand, number, -1))
            end = begin + len(running.activity.demands)
            left, due = running.left, min(running.end, FAR) if running.level else FAR
            now = running.level, running.since, due, running.activity.bound
            members.append((left >> LEVEL_BITS, left & LOW, *now, begin, end))
            begin = end
            running.end = -1
        self.size += len(members)
        self.members = Members(*_longer(self.members, members))
        self.claims = Claims(*_longer(self.claims, claims))
        self.resources = Resources(*_longer(self.resources, resources))
        self._by_bound = np.argsort(self.members.bound, kind="stable")
        return bool(self.functions.link(self.claims, self.resources, base, begin))

    def change(self, resource: int, room: int, contended: bool) -> None:
        """Note what became of a resource."""
        row = self.here.get(resource)
        if row is not None:
            if self.resources.room[row] != room >> LEVEL_BITS:
                self._same = 0
            self.resources.room[row] = room >> LEVEL_BITS
            self.resources.binds[row] = contended

    def leave(self, running: Running) -> None:
        """Let a member go at its end."""
        self._gone.append(running.member)
        running.member = -1
        self.size -= 1

    def settle(self, now: int) -> bool:
        """Level all members anew, and see who ends next; False if that is too far away to tell."""
        self._let_go()
        end = self.members.end
        state = self.members, self.claims, self.resources, self._by_bound, self._settled, self._same
        self.due_ps = self.functions.settle(now, *state)
        self._settled, self._same = len(end), ALL
        first = np.flatnonzero(end == self.due_ps).tolist() if self.due_ps < FAR else []
        self.next = [self._playing[m] for m in first]
        return self.due_ps < FAR or not self.members.level.any()

    def levels(self) -> list[tuple[Running, int]]:
        """Everybody's level as it is now."""
        self._let_go()
        return [
            (r, level)
            for r, level in zip(self._playing, self.members.level.tolist(), strict=True)
            if r.member >= 0
        ]

    def disband(self) -> list[Running]:
        """Give everybody the state that was kept here, and let all go; an end that is FAR is left open."""
        self._let_go()
        columns = zip(self._playing, *(column.tolist() for column in self.members[:5]), strict=True)
        members = []
        for running, high, low, level, since, end in columns:
            if running.member >= 0:
                running.left = (high << LEVEL_BITS) + low
                running.level, running.since, running.end = level, since, end
                running.member = -1
                members.append(running)
        self.size = 0
        self._clear()
        return members

    def _let_go(self) -> None:
        if self._gone:
            gone = np.array(self._gone, np.int64)
            least = self.functions.unlink(self.members, self.claims, self.resources, gone)
            self._same = min(self._same, least)
            self._gone.clear()


def _columns(rows: Sequence[tuple[int, ...]], width: int) -> list[Ints]:
    return list(np.ascontiguousarray(np.array(rows, np.int64).reshape(-1, width).T))


def _longer(columns: Sequence[Ints], rows: Sequence[tuple[int, ...]]) -> list[Ints]:
    added = _columns(rows, len(columns))
    return [np.concatenate(pair) for pair in zip(columns, added, strict=True)]
