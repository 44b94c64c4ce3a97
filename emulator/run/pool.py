"""The pool: every activity of a run, on every resource, woken by one live timer.

An activity has a length, the time it would take at level 1, and a demand on each resource: what it takes of
it in a second at level 1. While it runs at level y it completes y picoseconds of its length each picosecond.
Levels are max-min fair (`maxmin`); they change only where an activity starts or ends, or a part is held or
given back, on a resource that is contended, and they are solved once at the end of an instant in which that
happened.

A resource is *contended* while the activities on it, each at the level it would have alone, together want
more than what is not held. All others cannot bind, so activities that meet no contended resource run at the
level they have alone and need no solve, and what must be solved together are activities connected through
contended resources.

Lengths and levels count units of 2**-62. An activity ends at now + max(1, ceil((left - SLACK) / level)): late
by less than a picosecond, early by at most SLACK, and nothing is lost, because what is left changes only when
the level does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from heapq import heappop, heappush
from itertools import count
from typing import TYPE_CHECKING

import simpy
from simpy.events import EventPriority

from emulator.run.maxmin import FULL, LEVEL_BITS, solve

SLACK = 1 << (LEVEL_BITS - 16)
"""Length that may be missing at an end: 2**-16 ps. A level that is a quotient rounded down loses less than
one unit a picosecond: an activity that lasts up to 2**46 ps = 70 s, at whatever levels, does not end a whole
picosecond late by it."""
REMEMBERED = 256
"""Most activities of a solution that is kept: larger crowds hardly meet twice."""
END_OF_INSTANT = EventPriority(2)
"""SimPy priority after URGENT (0) and NORMAL (1): what is scheduled so runs when nothing else is left now."""


Demands = tuple[tuple[int, int], ...]
"""(resource, units a second at level 1) pairs."""


def ends_in_ps(left: int, level: int) -> int:
    """Picoseconds until an activity with this much of its length left ends, at a positive level."""
    return max(1, -((SLACK - left) // level))


class Clock(simpy.Environment):
    """SimPy's environment with a time that counts picoseconds: it starts at 0 and all delays are integers."""

    if TYPE_CHECKING:

        @property
        def now(self) -> int:
            """The time, in picoseconds."""


class Activity:
    """What takes time, as often as it is started: a latency, a length, and demands on resources.

    demands: (resource, positive integer units a second at level 1) pairs, no resource twice; length: > 0, in
    units of 2**-62 ps at level 1; bound: the level it has with nobody else there; delay_ps: the latency,
    which passes before it touches any resource. alone_ps is how long all of it takes at the bound.
    """

    __slots__ = ("alone_ps", "bound", "claims", "delay_ps", "demands", "fluid_ps", "length", "serial")
    _serials = count()

    def __init__(self, demands: Demands, length: int, bound: int, delay_ps: int = 0) -> None:
        self.demands = demands
        self.length = length
        self.bound = bound
        self.delay_ps = delay_ps
        self.serial = next(self._serials)
        self.claims = tuple((r, demand, demand * bound) for r, demand in demands)
        self.fluid_ps = ends_in_ps(length, bound) if bound else 0
        self.alone_ps = delay_ps + self.fluid_ps


class Running:
    """An activity that has been started. `done` fires when it has ended."""

    __slots__ = ("activity", "bound", "demands", "done", "end", "left", "level", "number", "since")

    def __init__(self, activity: Activity, done: simpy.Event, number: int) -> None:
        self.activity = activity
        self.demands = activity.demands
        self.bound = activity.bound
        self.left = activity.length
        self.done = done
        self.number = number
        self.level = 0
        self.since = 0
        self.end = -1


class _Settle(simpy.Event):
    """Runs its callback after everything else of this instant."""

    def __init__(self, env: simpy.Environment, callback: Callable[[simpy.Event], None]) -> None:
        super().__init__(env)
        self._ok, self._value = True, None
        self.callbacks = [callback]
        env.schedule(self, priority=END_OF_INSTANT)


class Pool:
    """Resources and the activities on them.

    capacities: integer units per second, one per resource. `audit`, if given, is called with (now, running,
    level) whenever a level changes and with level 0 at the end, so that a checker can replay the run.
    """

    def __init__(
        self,
        env: Clock,
        capacities: Sequence[int],
        audit: Callable[[int, Running, int], None] | None = None,
    ) -> None:
        self.env = env
        self.capacity = list(capacities)
        self.solves = 0
        self.ever_contended: set[int] = set()
        self._audit = audit
        self._room = [c << LEVEL_BITS for c in capacities]  # capacity that is not held, in solver units
        self._wanted = [0] * len(self.capacity)
        self._users: list[dict[Running, int]] = [{} for _ in self.capacity]
        self._contended: set[int] = set()
        self._changed: dict[int, None] = {}
        self._settling = False
        self._known: dict[tuple[object, ...], dict[int, int]] = {}
        self._agenda: list[tuple[int, int, Running]] = []  # ends, and begins of delayed activities
        self._timers: list[int] = []  # each earlier than the one before it; the last is the live one
        self._holders: dict[int, deque[tuple[int, simpy.Event]]] = {}
        self._numbers = 0

    def alone(self, demands: Demands, bound: int | None = None) -> int:
        """Level of an activity that has the pool to itself (0 if it loads a resource of no capacity)."""
        levels = [(self.capacity[r] << LEVEL_BITS) // demand for r, demand in demands]
        if bound is not None:
            levels.append(bound)
        assert levels, "an activity without demands needs a bound"
        return min(levels)

    def start(self, activity: Activity, done: simpy.Event | None = None) -> simpy.Event:
        """Start an activity and return the event of its end (`done`, if one is given)."""
        self._numbers += 1
        running = Running(activity, done or simpy.Event(self.env), self._numbers)
        if activity.delay_ps:
            running.end = self.env.now + activity.delay_ps
            heappush(self._agenda, (running.end, running.number, running))
            self._arm()
        else:
            self._enter(running)
        return running.done

    def hold(self, resource: int, amount: int) -> simpy.Event | None:
        """Take a fixed part of a resource, first come first served: None if it fits now, else its event."""
        queue = self._holders.setdefault(resource, deque())
        if not queue and amount << LEVEL_BITS <= self._room[resource]:
            self._take(resource, amount)
            return None
        assert amount <= self.capacity[resource], "a hold that can never fit"
        queue.append((amount, simpy.Event(self.env)))
        return queue[-1][1]

    def release(self, resource: int, amount: int) -> None:
        """Give back a held part; whoever waits and now fits holds it from this instant."""
        self._take(resource, -amount)
        queue = self._holders[resource]
        while queue and queue[0][0] << LEVEL_BITS <= self._room[resource]:
            waiting, fits = queue.popleft()
            self._take(resource, waiting)
            fits.succeed()

    def _take(self, resource: int, amount: int) -> None:
        self._room[resource] -= amount << LEVEL_BITS
        self._weigh(resource)

    def _weigh(self, resource: int) -> bool:
        """Note what a change on a resource means: is it contended, must anybody be levelled anew."""
        if self._wanted[resource] > self._room[resource]:
            self._contended.add(resource)
            self.ever_contended.add(resource)
        elif resource in self._contended:
            self._contended.remove(resource)
        else:
            return False
        self._changed[resource] = None
        if not self._settling:
            self._settling = True
            _Settle(self.env, self._settle)
        return resource in self._contended

    def _enter(self, running: Running) -> None:
        now = running.since = self.env.now
        activity, wanted = running.activity, self._wanted
        meets = False
        for resource, demand, want in activity.claims:
            self._users[resource][running] = demand
            wanted[resource] += want
            if wanted[resource] > self._room[resource] or resource in self._contended:
                meets |= self._weigh(resource)
        if not meets and activity.bound:
            running.level = activity.bound
            running.end = now + activity.fluid_ps
            heappush(self._agenda, (running.end, running.number, running))
            if self._audit:
                self._audit(now, running, running.level)
            self._arm()

    def _leave(self, running: Running) -> None:
        for resource, _, want in running.activity.claims:
            del self._users[resource][running]
            self._wanted[resource] -= want
            if resource in self._contended:
                self._weigh(resource)
        if self._audit:
            self._audit(self.env.now, running, 0)
        running.done.succeed()

    def _set_level(self, running: Running, level: int) -> None:
        now = self.env.now
        running.left -= running.level * (now - running.since)
        running.since, running.level = now, level
        if self._audit:
            self._audit(now, running, level)
        if level:
            running.end = now + ends_in_ps(running.left, level)
            heappush(self._agenda, (running.end, running.number, running))
        else:
            running.end = -1

    def _settle(self, _event: simpy.Event) -> None:
        """Level anew what the changes of this instant reach through contended resources."""
        self._settling = False
        reached: dict[Running, None] = {}
        constraints: list[int] = []
        frontier = list(self._changed)
        self._changed.clear()
        seen = set(frontier)
        while frontier:
            resource = frontier.pop()
            users = self._users[resource]
            if resource in self._contended and users:
                constraints.append(resource)
            for running in users:
                if running not in reached:
                    reached[running] = None
                    for other, _ in running.demands:
                        if other in self._contended and other not in seen:
                            seen.add(other)
                            frontier.append(other)
        levels = self._levels(reached, constraints)
        for running in reached:
            level = levels.get(running.activity.serial, running.bound)
            if level != running.level:
                self._set_level(running, level)
        self._arm()

    def _levels(self, reached: Collection[Running], constraints: list[int]) -> dict[int, int]:
        """Levels of those on contended resources, by the serial of their activity: twins have the same.

        A step repeats itself, so what was solved once is remembered by who runs and what room there is.
        """
        if not constraints:
            return {}
        room = {r: self._room[r] for r in sorted(constraints)}
        key = (tuple(sorted([running.activity.serial for running in reached])), *room.items())
        levels = self._known.get(key)
        if levels is None:
            self.solves += 1
            solved = solve({r: self._users[r] for r in constraints}, room)
            levels = {running.activity.serial: level for running, level in solved.items()}
            if len(reached) <= REMEMBERED:
                self._known[key] = levels
        return levels

    def _arm(self) -> None:
        """See to it that the live timer fires no later than the next entry of the agenda."""
        agenda = self._agenda
        while agenda and agenda[0][2].end != agenda[0][0]:
            heappop(agenda)  # its level has changed since: another entry says when it ends
        if agenda and (not self._timers or agenda[0][0] < self._timers[-1]):
            when = agenda[0][0]
            self._timers.append(when)
            timer = self.env.timeout(when - self.env.now)
            timer.callbacks.append(self._fire)

    def _fire(self, _event: simpy.Event) -> None:
        """Begin and end what is due now."""
        now = self.env.now
        self._timers.pop()
        agenda = self._agenda
        while agenda and agenda[0][0] == now:
            running = heappop(agenda)[2]
            if running.end != now:
                continue
            running.end = -1
            if running.level:
                self._leave(running)
            else:
                self._enter(running)
        self._arm()


__all__ = ["FULL", "SLACK", "Activity", "Clock", "Demands", "Pool", "Running", "ends_in_ps"]
