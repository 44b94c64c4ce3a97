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

import sys
from collections import deque
from collections.abc import Iterable, Sequence
from heapq import heapify, heappop, heappush

import simpy
from simpy.events import NORMAL

from emulator.run.activity import SLACK, Activity, Demands, Running
from emulator.run.clock import FIRST, NEVER, Clock
from emulator.run.island import Device, Island, Link, Make, Places, places_of
from emulator.run.maxmin import FULL, LEVEL_BITS
from emulator.run.together import CROWD_SIZE, Audit, Together

MOST_DUE = 1000
"""Entries of what is due for which it does not pay to tidy up: some times what a step of 16 stages has."""


class Pool:
    """Resources and the activities on them.

    capacities: integer units per second, one per resource. `audit`, if given, is called with (now, running,
    level) whenever a level changes and with level 0 at the end, so that a checker can replay the run.
    crowd_size: a component of so many activities goes to compiled code, which gives the same numbers.
    islands: for each resource the device that it is a part of, -1 for none, as for a link.
    """

    def __init__(
        self,
        env: Clock,
        capacities: Sequence[int],
        audit: Audit | None = None,
        crowd_size: int = CROWD_SIZE,
        islands: Sequence[int] = (),
    ) -> None:
        self.env = env
        self.capacity = list(capacities)
        self._audit = audit
        self._room = [c << LEVEL_BITS for c in capacities]  # what is not held, in the solver's units
        self._changed: dict[Island, None] = {}  # where somebody may get another level
        self._settling = False  # what changes now will be settled, and the alarm set, later in this instant
        self._due: list[tuple[int, int, Running]] = []  # heap of when what ends, or begins after its latency
        self._most_due = MOST_DUE
        self._holders: dict[int, deque[tuple[int, simpy.Event]]] = {}
        self._numbers = 0
        self._makes: dict[tuple[int, ...], Make] = {}
        self._island_of = self._islands(islands)
        if max(capacities, default=0) > FULL:
            crowd_size = sys.maxsize
        self._together = Together(
            self._island_of, self._room, crowd_size, self._set_levels, self._await, audit
        )
        self._places: dict[Activity, Places] = {}
        assert not hasattr(env, "ring"), "a clock has one pool"
        env.ring, env.close = self._ring, self._settle

    def _islands(self, device_of: Sequence[int]) -> list[Island]:
        """The island of each resource."""
        parts: dict[int, list[int]] = {}
        for resource, number in enumerate(device_of):
            if number >= 0:
                parts.setdefault(number, []).append(resource)
        islands: list[Island] = [Link(r, capacity) for r, capacity in enumerate(self.capacity)]
        for resources in parts.values():
            capacities = tuple(self.capacity[r] for r in resources)
            device = Device(resources, self._makes.setdefault(capacities, Make(capacities)))
            for resource in resources:
                islands[resource] = device
        return islands

    @property
    def solves(self) -> int:
        """Solutions that were not known before."""
        return self._together.solves + sum(make.solves for make in self._makes.values())

    @property
    def ever_contended(self) -> set[int]:
        """Resources of which more was wanted than there was room, at the end of some instant."""
        devices = (island for island in self._island_of if isinstance(island, Device))
        return self._together.contended | {d.resources[r] for d in devices for full in d.seen for r in full}

    @property
    def idle(self) -> bool:
        """Whether nobody is on any resource, and nothing is held."""
        return self._room == [c << LEVEL_BITS for c in self.capacity] and not any(
            island.state.shares if isinstance(island, Device) else island.wanted for island in self._island_of
        )

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
        if not activity.demands and activity.bound and not self._audit:  # nobody can slow it down
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
                self._set_alarm()
        else:
            self._enter(running)
        return done or running

    def hold(self, resource: int, amount: int) -> simpy.Event | None:
        """Take a fixed part of a resource, first come first served: None if it fits now, else its event."""
        queue = self._holders.get(resource)
        if queue is None:
            queue = self._holders[resource] = deque()
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
        island = self._island_of[resource]
        if island.take(resource, amount):
            self._changed[island] = None
            if not self._settling:
                self._settle_later()

    def _settle_later(self) -> None:
        self._settling = self.env.closing = True

    def _enter(self, running: Running) -> None:
        """Put an activity on its resources; it runs at once if all of them have room for it."""
        activity = running.activity
        running.since = now = self.env._now
        running.places = places = self._places.get(activity) or self._placed(activity)
        meets = False
        for island, share in places:
            if island.enter(running, share):
                meets = True
                self._changed[island] = None
        if meets:
            if not self._settling:
                self._settle_later()
        elif activity.bound:
            running.level = activity.bound
            if self._audit:
                self._audit(now, running, running.level)
            running.end = end = now + activity.fluid_ps
            heappush(self._due, (end, running.number, running))
            if not self._settling:
                self._set_alarm()

    def _placed(self, activity: Activity) -> Places:
        """Where an activity has claims."""
        self._places[activity] = places = places_of(activity, self._island_of)
        return places

    def _await(self, running: Running, when: int) -> None:
        """Have an activity end, or begin, at a time; what was noted before no longer holds."""
        running.end = when
        heappush(self._due, (when, running.number, running))

    def _settle(self) -> None:
        """Level anew what the changes of this instant reach."""
        self._settling = self.env.closing = False
        changed, self._changed = self._changed, {}
        for island in changed:
            island.see()
        together: list[Island] = []
        crowd = self._together.crowd
        for island in changed:
            levels = None if crowd else island.levels()
            if levels is None:
                together.append(island)
            else:
                self._set_levels(island.members, levels)
        if together:  # comes last, for it may reach islands that have been settled
            self._together.settle(together, self.env._now)
        if len(self._due) > self._most_due:
            self._tidy_up()
        self._set_alarm()

    def _tidy_up(self) -> None:
        """Forget what is due at another time by now: what lasts leaves an entry at each change of level."""
        self._due = [entry for entry in dict.fromkeys(self._due) if entry[0] == entry[2].end]
        heapify(self._due)
        self._most_due = MOST_DUE + 2 * len(self._due)

    def _set_levels(self, runnings: Iterable[Running], levels: Iterable[int]) -> None:
        """Let activities go on at these levels, from now on."""
        now, audit, due = self.env._now, self._audit, self._due
        for running, level in zip(runnings, levels, strict=True):
            before = running.level
            if level != before:
                left = running.left
                if before:
                    running.left = left = left - before * (now - running.since)
                running.since, running.level, running.stopped_by = now, level, -1
                if audit:
                    audit(now, running, level)
                if level:
                    running.end = end = now + (-((SLACK - left) // level) if left > SLACK else 1)
                    heappush(due, (end, running.number, running))
                else:
                    running.end = -1

    def _set_alarm(self) -> None:
        """Set the alarm for what is due next."""
        due = self._due
        while due:
            when, _, running = due[0]
            if running.end == when:
                self.env.alarm_ps = when
                return
            heappop(due)  # its level has changed since: it is due at another time
        self.env.alarm_ps = NEVER

    def _ring(self) -> None:
        """End and begin what is due now, and wake who waited for it.

        All ends come first, so that what follows an activity does not meet those that end with it. If
        nothing is left of this instant then, it is settled at once.
        """
        env = self.env
        self._settling = True
        ended = iter(self._end_and_begin(env._now))
        try:
            for event in ended:  # as SimPy would if it found them next in its queue
                event._ok, event._value = True, None
                callbacks, event.callbacks = event.callbacks, None  # type: ignore[assignment]  # as SimPy does
                for callback in callbacks:
                    callback(event)
        except BaseException as stop:  # if the simulation goes on, the rest is next
            rest = list(ended)
            if isinstance(stop, simpy.core.StopSimulation):
                event.callbacks = callbacks[callbacks.index(callback) + 1 :]
                rest.insert(0, event)
            for event in rest:
                event._ok, event._value = True, None
                env.schedule(event, FIRST)
            env.closing = True
            raise
        queue = env._queue
        if queue and queue[0][0] == env._now:
            env.closing = True
        elif self._changed:
            self._settle()
        else:
            self._settling = False
            self._set_alarm()

    def _end_and_begin(self, now: int) -> list[simpy.Event]:
        """Take off their resources who end now, and then put on theirs who begin; the events of the ends."""
        due, changed = self._due, self._changed
        ended: list[simpy.Event] = []
        begun: list[Running] = []
        while due and due[0][0] == now:
            running = heappop(due)[2]
            if running.end != now:
                continue
            running.end = -1
            if running.since < 0:
                begun.append(running)
                continue
            for island, share in running.places:
                if island.leave(running, share):
                    changed[island] = None
            if running.member >= 0:
                self._together.leave(running)
                changed[running.places[0][0]] = None  # to see who ends next, contended or not
            if self._audit:
                self._audit(now, running, 0)
            ended.append(running.done or running)
        for running in begun:
            self._enter(running)
        return ended
