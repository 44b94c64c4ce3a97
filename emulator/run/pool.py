"""The pool: every activity of a run, on every resource, woken by one live timer.

An activity has a length, the time it would take at level 1, and a demand on each resource: what it takes of
it in a second at level 1. While it runs at level y it completes y picoseconds of its length each picosecond.
Levels are max-min fair (`maxmin`); they change only where an activity starts or ends, or a part is held or
given back, on a resource that is contended, and they are solved once at the end of an instant in which that
happened.

A resource is *contended* while the activities on it, each at the level it would have alone and rounded up to
whole units, together want more than what is not held. All others cannot bind, so activities that meet no
contended resource run at the level they have alone and need no solve, and what must be solved together are
activities connected through contended resources.

Lengths and levels count units of 2**-62. An activity ends at now + max(1, ceil((left - SLACK) / level)): late
by less than a picosecond, early by at most SLACK, and nothing is lost, because what is left changes only when
the level does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from itertools import count
from operator import attrgetter
from typing import TYPE_CHECKING

import simpy
from simpy.events import NORMAL, EventPriority

from emulator.run.maxmin import FULL, LEVEL_BITS, solve

SLACK = 1 << (LEVEL_BITS - 16)
"""Length that may be missing at an end: 2**-16 ps. A level that is a quotient rounded down loses less than
one unit a picosecond: an activity that lasts up to 2**46 ps = 70 s, at whatever levels, does not end a whole
picosecond late by it."""
REMEMBERED = 256
"""Most activities of a solution that is kept: larger crowds hardly meet twice."""
END_OF_INSTANT = EventPriority(2)
"""SimPy priority after URGENT (0) and NORMAL (1): what is scheduled so runs when nothing else is left now."""

Callbacks = list[Callable[[simpy.Event], None]]
Demands = tuple[tuple[int, int], ...]
"""(resource, units a second at level 1) pairs."""


def ends_in_ps(left: int, level: int) -> int:
    """Picoseconds until an activity with this much of its length left ends, at a positive level."""
    return max(1, -((SLACK - left) // level))


class Clock(simpy.Environment):
    """SimPy's environment with a time that counts picoseconds: it starts at 0 and all delays are integers."""

    if TYPE_CHECKING:
        _now: int  # the same, without the call of a property

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
        self.claims = tuple((r, demand, -(-demand * bound >> LEVEL_BITS)) for r, demand in demands)
        self.fluid_ps = ends_in_ps(length, bound) if bound else 0
        self.alone_ps = delay_ps + self.fluid_ps


class Running(simpy.Event):
    """An activity that has been started. It is the event of its own end, unless `done` was given for that."""

    level = 0
    since = -1  # it has not touched its resources yet
    end = -1

    def __init__(self, env: Clock, activity: Activity, done: simpy.Event | None, number: int) -> None:
        self.env = env
        self.callbacks = []
        self.activity = activity
        self.left = activity.length
        self.done = done
        self.number = number

    @property
    def demands(self) -> Demands:
        """Those of the activity."""
        return self.activity.demands

    @property
    def bound(self) -> int:
        """That of the activity."""
        return self.activity.bound


class _Alarm(simpy.Event):
    """Calls back after a delay; at once, but after everything else of this instant, if it is for its end."""

    def __init__(
        self,
        env: Clock,
        callbacks: Callbacks,
        delay: int,
        priority: EventPriority = NORMAL,
    ) -> None:
        self.env = env
        self.callbacks = callbacks
        self._ok, self._value = True, None
        env.schedule(self, priority, delay)


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
        self._room = list(capacities)  # what is not held
        self._wanted = [0] * len(self.capacity)
        self._users: list[dict[Running, int]] = [{} for _ in self.capacity]
        self._contended: set[int] = set()  # where more is wanted than there is room
        self._changed: dict[int, None] = {}
        self._settling = False  # what changes now will be settled, and the timer armed, later in this instant
        self._known: dict[tuple[object, ...], list[int]] = {}
        self._due: dict[int, list[Running]] = {}  # time -> what ends then, or begins after its latency
        self._times: list[int] = []  # heap of the keys of _due
        self._timers: list[int] = []  # each earlier than the one before it; the last is the live one
        self._holders: dict[int, deque[tuple[int, simpy.Event]]] = {}
        self._numbers = 0
        self._on_time: Callbacks = [self._fire]
        self._at_end: Callbacks = [self._settle]

    def alone(self, demands: Demands, bound: int | None = None) -> int:
        """Level of an activity that has the pool to itself (0 if it loads a resource of no capacity)."""
        levels = [(self.capacity[r] << LEVEL_BITS) // demand for r, demand in demands]
        if bound is not None:
            levels.append(bound)
        assert levels, "an activity without demands needs a bound"
        return min(levels)

    def start(self, activity: Activity, done: simpy.Event | None = None) -> simpy.Event:
        """Start an activity and return the event of its end (`done`, if one is given)."""
        env = self.env
        if not activity.claims and activity.bound and not self._audit:  # nobody can slow it down
            if done is None:
                return simpy.Timeout(env, activity.alone_ps)
            done._ok, done._value = True, None
            env.schedule(done, NORMAL, activity.alone_ps)
            return done
        self._numbers += 1
        running = Running(env, activity, done, self._numbers)
        if activity.delay_ps:
            self._await(running, env._now + activity.delay_ps)
            if not self._settling:
                self._arm()
        else:
            self._enter(running)
        return done or running

    def hold(self, resource: int, amount: int) -> simpy.Event | None:
        """Take a fixed part of a resource, first come first served: None if it fits now, else its event."""
        queue = self._holders.setdefault(resource, deque())
        if not queue and amount <= self._room[resource]:
            self._take(resource, amount)
            return None
        assert amount <= self.capacity[resource], "a hold that can never fit"
        queue.append((amount, simpy.Event(self.env)))
        return queue[-1][1]

    def release(self, resource: int, amount: int) -> None:
        """Give back a held part; whoever waits and now fits holds it from this instant."""
        self._take(resource, -amount)
        queue = self._holders[resource]
        while queue and queue[0][0] <= self._room[resource]:
            waiting, fits = queue.popleft()
            self._take(resource, waiting)
            fits.succeed()

    def _take(self, resource: int, amount: int) -> None:
        self._room[resource] -= amount
        if self._wanted[resource] > self._room[resource] or resource in self._contended:
            self._changed[resource] = None
            self._settle_later()

    def _settle_later(self) -> None:
        if not self._settling:
            self._settling = True
            _Alarm(self.env, self._at_end, 0, END_OF_INSTANT)

    def _enter(self, running: Running) -> None:
        """Put an activity on its resources; it runs at once if all of them have room for it."""
        activity, users, wanted, room = running.activity, self._users, self._wanted, self._room
        running.since = now = self.env._now
        meets = False
        for resource, demand, want in activity.claims:
            users[resource][running] = demand
            wanted[resource] = total = wanted[resource] + want
            if total > room[resource]:
                meets = True
                self._changed[resource] = None
        if meets:
            self._settle_later()
        elif activity.bound:
            running.level = activity.bound
            if self._audit:
                self._audit(now, running, running.level)
            self._await(running, now + activity.fluid_ps)
            if not self._settling:
                self._arm()

    def _leave(self, running: Running) -> None:
        """Take an activity off its resources; whoever calls sees to it that this is settled."""
        users, wanted, contended = self._users, self._wanted, self._contended
        for resource, _, want in running.activity.claims:
            del users[resource][running]
            wanted[resource] -= want
            if resource in contended:
                self._changed[resource] = None
        if self._audit:
            self._audit(self.env.now, running, 0)

    def _await(self, running: Running, when: int) -> None:
        """Have an activity end, or begin, at a time; what was noted before no longer holds."""
        running.end = when
        there = self._due.get(when)
        if there is None:
            self._due[when] = [running]
            heappush(self._times, when)
        else:
            there.append(running)

    def _settle(self, _event: simpy.Event) -> None:
        """Level anew what the changes of this instant reach through contended resources."""
        self._settling = False
        changed, self._changed = self._changed, {}
        reached, constraints = self._reached(changed)
        now, audit = self.env._now, self._audit
        for running, level in zip(reached, self._levels(reached, constraints), strict=True):
            if level != running.level:
                running.left -= running.level * (now - running.since)
                running.since, running.level = now, level
                if audit:
                    audit(now, running, level)
                if level:
                    self._await(running, now + ends_in_ps(running.left, level))
                else:
                    running.end = -1
        self._arm()

    def _reached(self, changed: dict[int, None]) -> tuple[list[Running], list[int]]:
        """Activities connected to a change through contended resources, and these resources."""
        users, contended = self._users, self._contended
        for resource in changed:
            if self._wanted[resource] <= self._room[resource]:
                contended.discard(resource)
            elif resource not in contended:
                contended.add(resource)
                self.ever_contended.add(resource)
        reached: dict[Running, None] = {}
        frontier = list(changed)
        for resource in frontier:  # it grows as we go
            for running in users[resource]:
                if running not in reached:
                    reached[running] = None
                    for other, _, _ in running.activity.claims:
                        if other in contended and other not in changed:
                            changed[other] = None
                            frontier.append(other)
        return list(reached), [r for r in frontier if r in contended]

    def _levels(self, reached: list[Running], constraints: list[int]) -> list[int]:
        """Levels of activities that share no contended resource but these.

        A step repeats itself, so what was solved once is remembered by who runs and what room there is.
        """
        if not constraints:
            return [running.activity.bound for running in reached]
        key = (
            *[running.activity for running in reached],
            *constraints,
            *[self._room[r] for r in constraints],
        )
        levels = self._known.get(key)
        if levels is None:
            self.solves += 1
            room = {r: self._room[r] << LEVEL_BITS for r in constraints}
            solved = solve({r: self._users[r] for r in constraints}, room)
            levels = [solved.get(running, running.activity.bound) for running in reached]
            if len(reached) <= REMEMBERED:
                self._known[key] = levels
        return levels

    def _arm(self) -> None:
        """See to it that the live timer fires no later than the next thing that is due."""
        times, timers = self._times, self._timers
        while times:
            when = times[0]
            if timers and timers[-1] <= when:
                return
            for running in self._due[when]:
                if running.end == when:
                    timers.append(when)
                    _Alarm(self.env, self._on_time, when - self.env._now)
                    return
            del self._due[heappop(times)]  # their levels have changed since: they are due at other times

    def _fire(self, _timer: simpy.Event) -> None:
        """End and begin what is due now, and wake who waited for it.

        All ends come first, so that what follows an activity does not meet those that end with it. If
        nothing is left of this instant then, it is settled here, without an event of its own.
        """
        env = self.env
        now = env._now
        self._timers.pop()
        later, self._settling = self._settling, True
        due = self._due.pop(now, None)
        if due:
            heappop(self._times)
            if len(due) > 1:
                due.sort(key=_by_number)
            ended, begun = [], []
            for running in due:
                if running.end == now:
                    running.end = -1
                    if running.since < 0:
                        begun.append(running)
                    else:
                        self._leave(running)
                        ended.append(running.done or running)
            for running in begun:
                self._enter(running)
            if ended:
                _wake(ended)
        if later:
            return
        if not self._changed:
            self._settling = False
            self._arm()
        elif env.peek() == now:
            _Alarm(env, self._at_end, 0, END_OF_INSTANT)
        else:
            self._settle(_timer)


_by_number = attrgetter("number")


def _wake(events: list[simpy.Event]) -> None:
    """Process events here and now, as SimPy would if it found them next in its queue."""
    woken = 0
    try:
        for event in events:
            woken += 1
            event._ok, event._value = True, None
            callbacks, event.callbacks = event.callbacks, None  # type: ignore[assignment]  # as SimPy does
            for callback in callbacks:
                callback(event)
    finally:
        for event in events[woken:]:  # somebody stopped the simulation: they are next if it goes on
            event.succeed()


__all__ = ["FULL", "SLACK", "Activity", "Clock", "Demands", "Pool", "Running", "ends_in_ps"]
