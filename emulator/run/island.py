"""An island: the resources of one device, mostly settled without a look at anybody else.

Kernels and copies ask for nothing outside their device. What does, a collective or a transfer, couples it
with others only while a resource that it asks for elsewhere is contended. Its level is then that of the
fullest place it goes through; as long as that is elsewhere, and the island lets it have as much, the island
is settled under that level, and nobody else changes:

    cap_j = y_j            for every member j that is stopped elsewhere (or runs at its bound), y_j its level
    cap_j = bound_j        for the others
    levels of the island alone, under these caps, stand if all who are stopped elsewhere keep y_j

This is exact: who is stopped elsewhere still is, and all others on the island have what is left, as if they
had been solved with everybody together.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter

from emulator.run.activity import Activity, Demands, Running
from emulator.run.maxmin import A, solve

MOST_KNOWN = 4096
"""Solutions that are kept: a step repeats itself, but where a level of elsewhere is part of what is known, it
may never come again."""
ANYTHING = -1
"""No cap."""

_activity_of = attrgetter("activity")


def users_of(activities: Iterable[A], resources: Iterable[int]) -> dict[int, dict[A, int]]:
    """Who loads each of these resources, with the demand there."""
    users: dict[int, dict[A, int]] = {resource: {} for resource in resources}
    for activity in activities:
        for resource, demand in activity.demands:
            if resource in users:
                users[resource][activity] = demand
    return users


class _Capped:
    """A stand-in for an activity that must not exceed the level it has elsewhere."""

    __slots__ = ("bound", "demands")

    def __init__(self, demands: Demands, bound: int) -> None:
        self.demands = demands
        self.bound = bound


class Island:
    """Resources of a device, or a single link, and who is on them. A link is never settled by itself."""

    __slots__ = ("_known", "contended", "held", "link", "members", "resources", "solves", "tight")

    def __init__(self, link: bool = False) -> None:
        self.link = link
        self.resources: dict[int, None] = {}
        """Those that somebody has claimed so far."""
        self.held: list[int] = []
        """Those of which parts have been held."""
        self.members: dict[Running, tuple[Island, ...]] = {}
        """Activities with claims here, each with all islands on which it has claims."""
        self.tight = False
        """Whether more is wanted of some resource than there is room: who is here may be stopped here."""
        self.contended: set[int] = set()
        """Resources that were contended when it was settled by itself."""
        self.solves = 0
        """Solutions that were not known before."""
        self._known: dict[tuple[tuple[Activity, ...], tuple[int, ...], tuple[int, ...]], list[int]] = {}

    def see(self, wanted: Sequence[int], room: Sequence[int]) -> None:
        """See whether it is tight, and let everybody who is here know."""
        tight = False
        for resource in self.resources:
            if wanted[resource] > room[resource]:
                tight = True
        if tight != self.tight:
            self.tight = tight
            for running in self.members:
                running.tight += 1 if tight else -1

    def levels(self, wanted: Sequence[int], room: Sequence[int]) -> list[int] | None:
        """Level of each member; None where that would change what somebody has elsewhere."""
        caps: tuple[int, ...] = ()
        for running in self.members:
            if running.tight > self.tight:
                caps = self._caps()
                if not caps:
                    return None
                break
        key = tuple(map(_activity_of, self.members)), tuple([room[r] for r in self.held]), caps
        levels = self._known.get(key)
        if levels is None:
            if len(self._known) >= MOST_KNOWN:
                self._known.clear()
            levels = self._known[key] = self._solved(wanted, room, caps)
        if caps and any(level < cap for level, cap in zip(levels, caps, strict=True)):
            return None
        return levels

    def _caps(self) -> tuple[int, ...]:
        """Most that each member may have here (-1: anything); nothing if somebody was stopped here.

        Whoever is also on tight islands elsewhere may have its level of now, if it was stopped there or runs
        at its bound.
        """
        caps = []
        for running in self.members:
            cap = ANYTHING
            if running.tight > self.tight:
                cap, stop = running.level, running.stopped_by
                if cap != running.bound and (stop < 0 or stop in self.resources):
                    return ()
            caps.append(cap)
        return tuple(caps)

    def _solved(self, wanted: Sequence[int], room: Sequence[int], caps: Sequence[int]) -> list[int]:
        binding = [r for r in self.resources if wanted[r] > room[r]]
        capped = []
        for running, cap in zip(self.members, caps or [ANYTHING] * len(self.members), strict=True):
            demand_on = running.activity.demand_on
            here = tuple((r, demand_on[r]) for r in binding if r in demand_on)
            capped.append(_Capped(here, running.bound if cap == ANYTHING else min(running.bound, cap)))
        if not binding:
            return [each.bound for each in capped]
        self.solves += 1
        self.contended.update(binding)
        levels = solve(users_of(capped, binding), {r: room[r] for r in binding})
        return [levels.get(each, each.bound) for each in capped]
