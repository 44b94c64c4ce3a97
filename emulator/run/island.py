"""An island: the resources of one device, mostly settled without a look at anybody else.

Kernels and copies ask for nothing outside their device. What does, a collective or a transfer, couples it
with others only while a resource that it asks for elsewhere is contended. Its level is then that of the
fullest place it goes through; as long as that is elsewhere, and the island lets it have as much, the island
is settled under that level, and nobody else changes. This is exact: who is stopped elsewhere still is,
and all others on the island have what is left, as if they had been solved with everybody together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from operator import attrgetter

from emulator.run.activity import Activity, Demands, Running
from emulator.run.crowd import ALL
from emulator.run.maxmin import solve

Place = tuple["Island", tuple[int, ...]]
"""An island on which an activity has claims, and the resources that it claims elsewhere."""

_activity_of = attrgetter("activity")


class _Capped:
    """A stand-in for an activity that must not exceed the level it has elsewhere."""

    __slots__ = ("bound", "demands")

    def __init__(self, demands: Demands, bound: int) -> None:
        self.demands = demands
        self.bound = bound


class Island:
    """Resources of a device and who is on them. `solves` counts what was not known before."""

    __slots__ = ("_known", "held", "members", "resources", "solves")

    def __init__(self) -> None:
        self.resources: list[int] = []
        self.held: list[int] = []
        """Those of which parts have been held."""
        self.members: dict[Running, tuple[int, ...]] = {}
        """Activities with claims here, each with the resources that it claims elsewhere."""
        self.solves = 0
        self._known: dict[tuple[Activity | int, ...], list[int]] = {}

    def levels(
        self,
        room: Sequence[int],
        contended: AbstractSet[int],
        users: Sequence[Mapping[Running, int]],
    ) -> list[int] | None:
        """Level of each member; None where that would change what somebody has elsewhere."""
        caps: tuple[int, ...] = ()
        for outside in self.members.values():
            if outside and not contended.isdisjoint(outside):
                caps = self._caps(contended)
                if not caps:
                    return None
                break
        key = (*map(_activity_of, self.members), *map(room.__getitem__, self.held), *caps)
        levels = self._known.get(key)
        if levels is None:
            levels = self._known[key] = self._solved(room, contended, users, caps)
        if caps and any(level < cap < ALL for level, cap in zip(levels, caps, strict=True)):
            return None
        return levels

    def _caps(self, contended: AbstractSet[int]) -> tuple[int, ...]:
        """Most that each member may have here (ALL: anything); nothing if somebody was stopped here.

        Whoever also claims contended resources elsewhere may have its level of now, if it was stopped there
        or runs at its bound.
        """
        caps = []
        for running, outside in self.members.items():
            cap = ALL
            if outside and not contended.isdisjoint(outside):
                cap, stop = running.level, running.stopped_by
                if cap != running.bound and (stop < 0 or stop in self.resources):
                    return ()
            caps.append(cap)
        return tuple(caps)

    def _solved(
        self,
        room: Sequence[int],
        contended: AbstractSet[int],
        users: Sequence[Mapping[Running, int]],
        caps: Sequence[int],
    ) -> list[int]:
        self.solves += 1
        capped = {
            running: _Capped(running.demands, min(running.bound, cap))
            for running, cap in zip(self.members, caps or [ALL] * len(self.members), strict=True)
        }
        binding = [r for r in self.resources if r in contended]
        here = {r: {capped[running]: demand for running, demand in users[r].items()} for r in binding}
        levels = solve(here, {r: room[r] for r in binding})
        return [levels.get(each, each.bound) for each in capped.values()]
