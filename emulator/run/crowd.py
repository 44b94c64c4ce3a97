"""A crowd: the many activities of a large contended component, in tables that compiled code works on.

The pool hands a component over when it has grown large, and takes it back when it has become small. The
crowd is solved as a whole, and only its next ends go back to the pool; levels do not depend on what is
solved together, so neither do they depend on who is in a crowd.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from functools import cache
from importlib import import_module
from types import ModuleType

import numpy as np

from emulator.run.activity import Activity, Running
from emulator.run.maxmin import FULL, LEVEL_BITS
from emulator.run.tables import ALL, ASIDE, BINDS, END, FAR, LEVEL, LIST, LOW, ROOM, STATE, Resources, Tables

SPARE = 64
"""Rows of members that are gone for which it does not pay to tidy up."""


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
        self._playing: list[Running] = []
        self._claims = 0
        self._tables = Tables.empty()
        self._state = np.zeros(STATE, np.int64)
        self._gone: list[int] = []
        self._changed: list[int] = []
        self._clear()

    def _clear(self) -> None:
        self._playing.clear()
        self._claims = 0
        self._gone.clear()
        self._changed.clear()
        self._room: list[int] = []  # what the tables say of each resource
        self._binds: list[bool] = []
        self._same = ALL  # levels below are as they were: no room that has changed since stops lower
        self._settled = self._linked = 0  # members and claims that have been taken into account
        self.here.clear()

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
        tables.members[before : number + 1] = members
        tables.lists[END, before : number + 1] = ends
        tables.claims[begin - len(claims) : begin] = claims
        if len(here) > known:
            new = Resources(*tables.resources[:, known : len(here)])
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
                binds = resource in full
                if self._room[row] != room[resource] or self._binds[row] < binds:
                    self._same = 0  # of a level that depends on a room, or will from now on, nothing is known
                if self._room[row] != room[resource]:
                    self._room[row] = room[resource]
                    self._tables.resources[ROOM, row] = room[resource] >> LEVEL_BITS
                if self._binds[row] != binds:
                    self._binds[row] = binds
                    self._tables.resources[BINDS, row] = binds

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
        self.next = [self._playing[m] for m in self._tables.lists[LIST, :count].tolist()]
        return True

    def levels(self) -> list[tuple[Running, int]]:
        """Everybody's level as it is now."""
        levels = self._tables.members[: len(self._playing), LEVEL].tolist()
        return [(r, level) for r, level in zip(self._playing, levels, strict=True) if r.member >= 0]

    def disband(self) -> list[Running]:
        """Give everybody the state that was kept here, and let all go; an end that is FAR is left open."""
        members = []
        rows = self._tables.members[: len(self._playing), LEVEL:].tolist()
        ends = self._tables.lists[END, : len(self._playing)].tolist()
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
