"""An island: a device or a link, and who is on it. A device is mostly settled without a look at anybody else.

Kernels and copies ask for nothing outside their device. What does, a collective or a transfer, couples it
with others only while a resource that it asks for elsewhere is contended. Its level is then that of the
fullest place it goes through; as long as that is elsewhere, and the device lets it have as much, the device
is settled under that level, and nobody else changes:

    cap_j = y_j            for every member j that is stopped elsewhere (or runs at its bound), y_j its level
    cap_j = bound_j        for the others
    levels of the device alone, under these caps, stand if all who are stopped elsewhere keep y_j

This is exact: who is stopped elsewhere still is, and all others on the device have what is left, as if they
had been solved with everybody together.

A step repeats itself, on one device and on others like it. Who is there and what is held is therefore a
`State` that equal devices share: it knows the levels of its members, and the states that follow it when
somebody comes or goes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from emulator.run.activity import Activity, Demands, Running
from emulator.run.maxmin import LEVEL_BITS, A, solve

MOST_KNOWN = 4096
"""States of a make, or solutions under caps of a state, that are kept: where a level of elsewhere is part of
what is known, it may never come again."""
ANYTHING = -1
"""No cap."""


def users_of(activities: Iterable[A], resources: Iterable[int]) -> dict[int, dict[A, int]]:
    """Who loads each of these resources, with the demand there."""
    users: dict[int, dict[A, int]] = {resource: {} for resource in resources}
    for activity in activities:
        for resource, demand in activity.demands:
            if resource in users:
                users[resource][activity] = demand
    return users


class Share:
    """What activities of a kind ask of one island: its resources, counted from its first, and the demands."""

    __slots__ = ("bound", "demands", "guest", "want")

    def __init__(self, demands: Demands, bound: int, guest: bool) -> None:
        self.demands = demands
        self.bound = bound
        self.guest = guest
        """Whether they ask for something on other islands, too."""
        self.want = demands[0][1] * bound
        """What they want of the first resource at their bound: of a link, that is all."""


class _Capped:
    """A stand-in for an activity that must not exceed the level it has elsewhere."""

    __slots__ = ("bound", "demands")

    def __init__(self, demands: Demands, bound: int) -> None:
        self.demands = demands
        self.bound = bound


class Make:
    """What equal devices have in common: shares and states are the same objects if they are equal."""

    def __init__(self, capacities: tuple[int, ...]) -> None:
        self.solves = 0
        """Solutions that were not known before."""
        self._shares: dict[tuple[Demands, int, bool], Share] = {}
        self._states: dict[tuple[tuple[Share, ...], tuple[int, ...]], State] = {}
        self.idle = State(self, (), tuple(c << LEVEL_BITS for c in capacities))

    def share(self, demands: Demands, bound: int, guest: bool) -> Share:
        """The share with these demands."""
        return self._shares.setdefault((demands, bound, guest), Share(demands, bound, guest))

    def state(self, shares: tuple[Share, ...], room: tuple[int, ...]) -> State:
        """The state in which these are there."""
        key = shares, room
        if key not in self._states:
            if len(self._states) >= MOST_KNOWN:
                for state in (self.idle, *self._states.values()):
                    state.forget()
                self._states.clear()
            self._states[key] = State(self, shares, room)
        return self._states[key]


class State:
    """Who is on a device, in the order in which they came, and what is not held of each of its resources.

    For whoever comes or goes it knows the state that follows, and whether that touches a contended resource.
    """

    __slots__ = ("_known", "_make", "entered", "full", "left", "levels", "room", "shares", "taken", "tight")

    def __init__(self, make: Make, shares: tuple[Share, ...], room: tuple[int, ...]) -> None:
        self._make = make
        self.shares = shares
        self.room = room
        wanted = [0] * len(room)
        for share in shares:
            for r, demand in share.demands:
                wanted[r] += demand * share.bound
        self.full = frozenset(r for r, want in enumerate(wanted) if want > room[r])
        """Resources that are contended, counted from the device's first."""
        self.tight = bool(self.full)
        self.forget()

    def forget(self) -> None:
        """Forget what follows, and the levels under caps."""
        self.levels: list[int] = []
        """Level of each member with nobody held back elsewhere; empty if it has not been asked for."""
        self.entered: dict[Share, tuple[State, bool]] = {}
        self.left: dict[int, tuple[State, bool]] = {}
        self.taken: dict[tuple[int, int], tuple[State, bool]] = {}
        self._known: dict[tuple[int, ...], list[int]] = {}

    def _meets(self, share: Share) -> bool:
        return any(r in self.full for r, _ in share.demands)

    def enter(self, share: Share) -> tuple[State, bool]:
        """The state after somebody with this share has come, and whether he meets a contended resource."""
        after = self._make.state((*self.shares, share), self.room)
        self.entered[share] = found = after, after._meets(share)
        return found

    def leave(self, place: int) -> tuple[State, bool]:
        """The state after the one at this place has gone, and whether he was on a contended resource."""
        after = self._make.state(self.shares[:place] + self.shares[place + 1 :], self.room)
        self.left[place] = found = after, self._meets(self.shares[place])
        return found

    def take(self, resource: int, amount: int) -> tuple[State, bool]:
        """The state after so much more is held of a resource, and whether it was contended or is now."""
        room = list(self.room)
        room[resource] -= amount << LEVEL_BITS
        after = self._make.state(self.shares, tuple(room))
        self.taken[resource, amount] = found = after, resource in self.full | after.full
        return found

    def alone(self) -> list[int]:
        """Level of each member with nobody held back elsewhere."""
        self.levels = self._solved([share.bound for share in self.shares])
        return self.levels

    def under(self, caps: tuple[int, ...]) -> list[int]:
        """Level of each member where none may exceed its cap."""
        levels = self._known.get(caps)
        if levels is None:
            if len(self._known) >= MOST_KNOWN:
                self._known.clear()
            bounds = [
                share.bound if cap == ANYTHING else min(share.bound, cap)
                for share, cap in zip(self.shares, caps, strict=True)
            ]
            levels = self._known[caps] = self._solved(bounds)
        return levels

    def _solved(self, bounds: list[int]) -> list[int]:
        if not self.full:
            return bounds
        self._make.solves += 1
        capped = [_Capped(share.demands, bound) for share, bound in zip(self.shares, bounds, strict=True)]
        levels = solve(users_of(capped, sorted(self.full)), {r: self.room[r] for r in self.full})
        return [levels.get(each, each.bound) for each in capped]


class Device:
    """An island that can be settled by itself."""

    __slots__ = ("guests", "make", "members", "resources", "seen", "state", "tight")

    def __init__(self, resources: list[int], make: Make) -> None:
        self.resources = resources
        self.make = make
        self.state = make.idle
        self.members: list[Running] = []
        """Activities with claims here, in the order of the state's shares."""
        self.guests: list[Running] = []
        """Those of them that have claims elsewhere, too."""
        self.tight = False
        """Whether some resource is contended, as far as everybody knows: who is here may be stopped here."""
        self.seen: set[frozenset[int]] = set()
        """What was contended when it was settled by itself."""

    def share(self, activity: Activity, guest: bool) -> Share:
        """What an activity asks for here; `guest` if it does elsewhere, too."""
        here = tuple((self.resources.index(r), d) for r, d in activity.demands if r in self.resources)
        return self.make.share(here, activity.bound, guest)

    def enter(self, running: Running, share: Share) -> bool:
        """Take an activity in; returns whether it meets a contended resource."""
        state = self.state
        self.state, meets = state.entered.get(share) or state.enter(share)
        self.members.append(running)
        if share.guest:
            self.guests.append(running)
            if self.tight:
                running.tight += 1
        return meets

    def leave(self, running: Running, share: Share) -> bool:
        """Let an activity go; returns whether it was on a contended resource."""
        members, state = self.members, self.state
        place = members.index(running)
        del members[place]
        self.state, met = state.left.get(place) or state.leave(place)
        if share.guest:
            self.guests.remove(running)
        return met

    def take(self, resource: int, amount: int) -> bool:
        """Hold so much more; returns whether the resource was contended or is now."""
        key = self.resources.index(resource), amount
        self.state, meets = self.state.taken.get(key) or self.state.take(*key)
        return meets

    def see(self) -> None:
        """See whether it is tight, and let everybody who is here know."""
        if self.tight != self.state.tight:
            self.tight = self.state.tight
            for running in self.guests:
                running.tight += 1 if self.tight else -1

    def full(self) -> list[int]:
        """Resources that are contended."""
        return [self.resources[r] for r in self.state.full]

    def levels(self) -> Sequence[int] | None:
        """Level of each member; None where that would change what somebody has elsewhere."""
        state, tight = self.state, self.tight
        self.seen.add(state.full)
        for running in self.guests:
            if running.tight > tight:
                caps = self._caps()
                if not caps:
                    return None
                levels = state.under(caps)
                if any(level < cap for level, cap in zip(levels, caps, strict=True)):
                    return None
                return levels
        return state.levels or state.alone()

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


class Link:
    """An island of a single resource, which is never settled by itself: crowds are on links."""

    __slots__ = ("_shares", "members", "resource", "resources", "room", "tight", "wanted")

    def __init__(self, resource: int, capacity: int) -> None:
        self.resource = resource
        self.resources = [resource]
        self._shares: dict[tuple[int, int, bool], Share] = {}
        self.room = capacity << LEVEL_BITS
        """What is not held."""
        self.wanted = 0
        """By everybody at its bound, a crowd included."""
        self.members: dict[Running, None] = {}
        """Activities with claims here, less those in a crowd."""
        self.tight = False
        """As for a device."""

    def share(self, activity: Activity, guest: bool) -> Share:
        """What an activity asks for here; `guest` if it does elsewhere, too."""
        demand = next(demand for resource, demand in activity.demands if resource == self.resource)
        key = demand, activity.bound, guest
        share = self._shares.get(key)
        if share is None:
            share = self._shares[key] = Share(((0, demand),), activity.bound, guest)
        return share

    def enter(self, running: Running, share: Share) -> bool:
        """Take an activity in; returns whether the link is contended then."""
        self.wanted += share.want
        self.members[running] = None
        if self.tight:
            running.tight += 1
        return self.wanted > self.room

    def leave(self, running: Running, share: Share) -> bool:
        """Let an activity go; returns whether the link was contended."""
        wanted = self.wanted
        self.wanted = wanted - share.want
        if running.member < 0:
            del self.members[running]
        return wanted > self.room

    def take(self, _resource: int, amount: int) -> bool:
        """Hold so much more; returns whether the link was contended or is now."""
        before = self.room
        self.room = now = before - (amount << LEVEL_BITS)
        return self.wanted > min(before, now)

    def see(self) -> None:
        """See whether it is tight, and let everybody who is here know."""
        tight = self.wanted > self.room
        if tight != self.tight:
            self.tight = tight
            for running in self.members:
                running.tight += 1 if tight else -1

    def full(self) -> list[int]:
        """Resources that are contended."""
        return self.resources if self.wanted > self.room else []

    def levels(self) -> None:
        """None: whoever is here may be elsewhere, too."""


Island = Device | Link
Places = tuple[tuple[Island, Share], ...]
"""Islands on which an activity has claims, with its shares there."""


def places_of(activity: Activity, island_of: Sequence[Island]) -> Places:
    """Where an activity has claims."""
    islands = dict.fromkeys([island_of[resource] for resource, _ in activity.demands])
    return tuple([(island, island.share(activity, len(islands) > 1)) for island in islands])
