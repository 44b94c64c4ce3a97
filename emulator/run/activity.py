"""Activities: what takes time and resources, and the state of one that runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import simpy

from emulator.run.clock import Clock
from emulator.run.maxmin import LEVEL_BITS

if TYPE_CHECKING:
    from emulator.run.island import Places

SLACK = 1 << (LEVEL_BITS - 16)
"""Length that may be missing at an end: 2**-16 ps. A level that is a quotient rounded down loses less than
one unit a picosecond: an activity that lasts up to 2**46 ps = 70 s, at whatever levels, does not end a whole
picosecond late by it."""

Demands = tuple[tuple[int, int], ...]
"""(resource, units a second at level 1) pairs."""


def ends_in_ps(left: int, level: int) -> int:
    """Picoseconds until an activity with this much of its length left ends, at a positive level."""
    return -((SLACK - left) // level) if left > SLACK else 1


class Activity:
    """What takes time, as often as it is started: a latency, a length, and demands on resources.

    demands: (resource, positive integer units a second at level 1) pairs, no resource twice; length: > 0, in
    units of 2**-62 ps at level 1; bound: the level it has with nobody else there; delay_ps: the latency,
    which passes before it touches any resource. alone_ps is how long all of it takes at the bound.
    """

    __slots__ = ("alone_ps", "bound", "delay_ps", "demands", "fluid_ps", "length")

    def __init__(self, demands: Demands, length: int, bound: int, delay_ps: int = 0) -> None:
        self.demands = demands
        self.length = length
        self.bound = bound
        self.delay_ps = delay_ps
        self.fluid_ps = ends_in_ps(length, bound) if bound else 0
        self.alone_ps = delay_ps + self.fluid_ps


class Running(simpy.Event):
    """An activity that has been started. It is the event of its own end, unless `done` was given for that."""

    level = 0
    since = -1
    """When its level last changed; -1: it has not touched its resources yet."""
    end = -1
    """When it ends at this level, or touches its resources; -1: not while nothing changes."""
    tight = 0
    """How many of the islands that it is on are tight."""
    stopped_by = -1
    """The resource that stopped it when it was last levelled with others; -1: none, or unknown."""
    places: Places = ()
    """Where it has claims."""
    member = -1
    """Its row in a crowd, which then keeps left, level, since and end; -1: it is in none."""

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
