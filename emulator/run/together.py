"""Levels of activities that contended resources connect, across devices and links.

Whoever is connected to a change is solved with everybody else who is: in Python if they are few, and what was
solved once is remembered; as a crowd, in compiled code, if they are many.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence

from emulator.run.activity import Running, ends_in_ps
from emulator.run.crowd import Crowd, compiled, fits
from emulator.run.island import MOST_KNOWN, Island, Link, users_of
from emulator.run.maxmin import solve
from emulator.run.tables import FAR

REMEMBERED = 256
"""Most activities of a solution that is kept: larger crowds hardly meet twice."""
CROWD_SIZE = 24
"""Activities levelled together from which on compiled code is faster: measured on 16 pipeline stages that
share one pod uplink. At 12 it is slower, as the step of a small component is mostly remembered."""
PATIENCE = 100_000
"""Activities levelled in components of that size before the compiler is loaded: 0.4 s of work, as long as
loading takes. (The first time on a machine, compiling takes ten seconds.)"""

Audit = Callable[[int, Running, int], None]
"""Called with (now, running, level)."""


class Together:
    """Levels those whom contended resources connect.

    island_of: the island of each resource. room: units << 62 of each that are not held; it changes.
    crowd_size: a component of so many activities goes to compiled code, which gives the same numbers.
    set_levels(runnings, levels) and end_at(running, time) let activities go on.
    """

    def __init__(
        self,
        island_of: Sequence[Island],
        room: Sequence[int],
        crowd_size: int,
        set_levels: Callable[[Iterable[Running], Iterable[int]], None],
        end_at: Callable[[Running, int], None],
        audit: Audit | None,
    ) -> None:
        self.solves = 0
        """Solutions that were not known before."""
        self.contended: set[int] = set()
        """Resources of which more was wanted than there was room when somebody was levelled here."""
        self.crowd: Crowd | None = None
        self.known: dict[tuple[object, ...], tuple[list[int], list[int]]] = {}
        self._island_of, self._room, self._crowd_size = island_of, room, crowd_size
        self._set_levels, self._end_at, self._audit = set_levels, end_at, audit
        self._missed = 0

    def settle(self, changed: Sequence[Island], now: int) -> None:
        """Level all who are connected to these changes."""
        reached, islands = self._reached(changed)
        if self._crowded(islands) or len(reached) >= self._crowd_size:
            if self._settle_crowd(changed, reached, now):
                return
            reached, islands = self._reached(changed)
        binding = [r for island in islands for r in island.full()]
        levels, stops = self._levels(reached, binding)
        self._set_levels(reached, levels)
        for running, stop in zip(reached, stops, strict=True):
            running.stopped_by = stop

    @staticmethod
    def _reached(changed: Iterable[Island]) -> tuple[list[Running], list[Island]]:
        """Activities connected to a change through tight islands, and these islands.

        A crowd is not entered: whatever is connected to it and not in it has changed as well.
        """
        reached: dict[Running, None] = {}
        islands = list(changed)
        seen = set(islands)
        for island in islands:  # it grows as we go
            for running in island.members:
                if running.member < 0 and running not in reached:
                    reached[running] = None
                    new = [other for other, _ in running.places if other.tight and other not in seen]
                    seen.update(new)
                    islands += new
        return list(reached), islands

    def _levels(self, reached: list[Running], binding: list[int]) -> tuple[list[int], list[int]]:
        """Levels of activities that share no contended resource but these, and which of them stopped each.

        A step repeats itself, so what was solved once is remembered by who runs and what room there is.
        """
        if not binding:
            return [running.bound for running in reached], [-1] * len(reached)
        room = self._room
        key = (*[running.activity for running in reached], *binding, *[room[r] for r in binding])
        found = self.known.get(key)
        if found is None:
            self.solves += 1
            self.contended.update(binding)
            stops: dict[Running, int] = {}
            solved = solve(users_of(reached, binding), {r: room[r] for r in binding}, stops)
            found = (
                [solved.get(running, running.bound) for running in reached],
                [stops.get(running, -1) for running in reached],
            )
            if len(self.known) >= MOST_KNOWN:
                self.known.clear()
            if len(reached) <= REMEMBERED:
                self.known[key] = found
        return found

    def _crowded(self, islands: Iterable[Island]) -> bool:
        """Whether the crowd uses one of these islands."""
        if not self.crowd:
            return False
        here = self.crowd.here.keys()
        return any(not here.isdisjoint(island.resources) for island in islands)

    def leave(self, running: Running) -> None:
        """Let an activity that has ended leave the crowd that it is in."""
        assert self.crowd
        self.crowd.leave(running)

    def _new_crowd(self, size: int) -> Crowd | None:
        """A crowd to begin with, if there is a compiler and it is loaded or has been missed enough."""
        if "emulator.run.compiled" not in sys.modules:
            self._missed += size
            if self._missed < PATIENCE:
                return None
        functions = compiled()
        return Crowd(functions) if functions else None

    def _settle_crowd(self, changed: Iterable[Island], reached: list[Running], now: int) -> bool:
        """Settle a crowd and those who were reached, as members of it; False if it is to be done without."""
        crowd = self.crowd or self._new_crowd(len(reached))
        if not crowd:
            return False
        self.crowd = crowd
        few = 2 * (crowd.size + len(reached)) < self._crowd_size
        if few or now >= FAR or not all(fits(running.activity) for running in reached):
            self._disband(crowd)
            return False
        for island in changed:
            crowd.change(island.resources, self._room, island.full())
        before = dict([*crowd.levels(), *((r, r.level) for r in reached)]) if self._audit else {}
        ends, due = crowd.next, crowd.due_ps
        for running in reached:
            for island, _ in running.places:
                if isinstance(island, Link):
                    del island.members[running]
            self.contended.update(r for r, _ in running.demands if self._is_full(r))
        crowd.join(reached, self._room, self._is_full)
        told = crowd.settle(now)
        self.solves += 1
        if self._audit:
            for running, level in crowd.levels():
                if level != before[running]:
                    self._audit(now, running, level)
        if not told:
            self._disband(crowd)
            return False
        if (crowd.next, crowd.due_ps) != (ends, due):
            for running in ends:
                running.end = -1
        for running in crowd.next:
            if running.end != crowd.due_ps:
                self._end_at(running, crowd.due_ps)
        return True

    def _is_full(self, resource: int) -> bool:
        return resource in self._island_of[resource].full()

    def _disband(self, crowd: Crowd) -> None:
        """Take the members of a crowd back."""
        self.crowd = None
        for running in crowd.disband():
            running.stopped_by = -1
            running.tight = sum(island.tight for island, _ in running.places)
            for island, _ in running.places:
                if isinstance(island, Link):
                    island.members[running] = None
            if running.level:
                if running.end == FAR:
                    running.end = running.since + ends_in_ps(running.left, running.level)
                self._end_at(running, running.end)
            else:
                running.end = -1
