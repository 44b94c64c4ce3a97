"""Program to planned ops: amounts of work become lengths and demands on numbered resources.

Resources of the pool: first `PER_DEVICE` for each rank class, then the fabric links that some op loads. A
resource that could not bind even if everything that may load it did so at once is dropped here: it would
change no level and only cost time.

What classes have in common is worked out once for each body: which op comes when, after what, and what it
asks of a device. A class adds where its device is in the pool, and whom it meets.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from fractions import Fraction
from functools import cache
from typing import NamedTuple

import numpy as np

from emulator.plan.body import Body
from emulator.plan.program import Collective, Fixed, HostCopy, Kernel, Load, Program, Transfer, Work
from emulator.run.activity import Activity, Demands
from emulator.run.cost import MICRO_SM, device_capacities, kernel_cost
from emulator.run.maxmin import FULL, LEVEL_BITS
from emulator.run.meetings import HBM, PER_DEVICE, SM, Meeting, Meetings
from emulator.spec.faults import left_of
from emulator.spec.units import PS_PER_SECOND, to_ps

TENSOR, VECTOR, H2D, D2H, LOADER = 1, 2, 4, 5, 6
CLOCKED = (SM, TENSOR, VECTOR)
"""What runs at the device's clock, and so slows down with it."""
RESOURCE_NAMES = ("sm", "tensor", "vector", "hbm", "copy_h2d", "copy_d2h", "loader")


class Planned(NamedTuple):
    """One op of one rank class, ready to be played."""

    op_index: int
    waits: tuple[int, ...]
    issue_ps: int
    """When the host has issued it, after the host began with the step; -1 if no host issues it."""
    activity: Activity | None
    """What it plays as soon as it has begun; None for nothing, or where others must come first."""
    meeting: int
    """Index of its meeting; -1 if none."""
    hold: int
    """Micro-SMs held on the own device from arrival to end."""


class StreamPlan(NamedTuple):
    """Ops of one stream of one rank class in order: the fields of Planned as columns."""

    ops: list[int]
    waits: list[tuple[int, ...]]
    issue_ps: list[int]
    activity: list[Activity | None]
    meeting: list[int]
    hold: list[int]

    def planned(self) -> Iterator[Planned]:
        """The ops one by one."""
        return map(Planned, *self)


class Lowered(NamedTuple):
    """Everything the executor needs."""

    capacities: list[int]
    resource_names: list[str]
    streams: list[dict[str, StreamPlan]]
    """For each rank class: stream name -> its ops."""
    meetings: list[Meeting]
    islands: list[int]
    """For each resource the rank class whose device it is a part of; -1 for a link."""


class _Kind(NamedTuple):
    """What all classes of a body have in common; demands are on resources of one device."""

    streams: list[tuple[str, list[int], list[tuple[int, ...]], list[int]]]
    """Name, ops, and the waits and issue times of these."""
    work: list[int]
    """For each op, the index of its work."""
    alone: list[Activity | None]
    """For each work, what a device does of it alone."""
    placed_on: list[tuple[str, int]]
    """Pairs of stream and work that occur, for works that a device does alone."""
    meets: list[tuple[int, str, Collective | Transfer, int]]
    """Ops that meet others: index, stream, work, and how many of its group came on the stream up to it."""


def lower(program: Program, prune: bool = True) -> Lowered:
    """Turn the ops of every rank class into lengths and demands; `prune` drops what can never bind."""
    return _Lowering(program).result(prune)


class _Lowering:
    def __init__(self, program: Program) -> None:
        job = program.job
        self.program = program
        device, host = job.cluster.device, job.cluster.host
        caps = device_capacities(device)
        self.per_device = [0] * PER_DEVICE
        for resource, capacity in (
            (SM, caps.sm),
            (TENSOR, caps.tensor),
            (VECTOR, caps.vector),
            (HBM, caps.hbm),
            (H2D, int(device.host_link_bytes_per_second)),
            (D2H, int(device.host_link_bytes_per_second)),
            (LOADER, int(host.loader_bytes_per_second)),
        ):
            self.per_device[resource] = capacity
        self.launch_ps = 0 if job.fixed_times else to_ps(host.launch_seconds)
        slow = left_of(job.faults, "straggler")
        self.left = [slow.get(c.members[0], Fraction(1)) for c in program.classes]
        self.capacities = self.per_device * len(program.classes)
        for c, left in enumerate(self.left):
            for resource in CLOCKED:
                self.capacities[c * PER_DEVICE + resource] = int(self.per_device[resource] * left)
        self.names = [f"rank{c.members[0]}.{name}" for c in program.classes for name in RESOURCE_NAMES]
        self.relative = cache(self._relative)
        # The most that each slot can want of a resource: in a slot, one activity runs at a time.
        self.most: dict[int, dict[tuple[object, ...], int]] = defaultdict(dict)
        self.meetings = Meetings(program, self.capacities, self.names, self._most)

    def result(self, prune: bool) -> Lowered:
        kinds: dict[Body, _Kind] = {}
        kind_of = []
        for rank_class in self.program.classes:
            body = self.program.templates[rank_class.template].body
            if body not in kinds:
                kinds[body] = self._kind(body)
            kind_of.append(kinds[body])
        meets = self._meets(kind_of)
        for c, kind in enumerate(kind_of):
            for stream, work in kind.placed_on:
                own = kind.alone[work]
                assert own
                for resource, demand in own.demands:
                    self._most(c * PER_DEVICE + resource, (c, stream), demand * own.bound)
        binding = {
            r
            for r, slots in self.most.items()
            if not prune or sum(slots.values()) > self.capacities[r] << LEVEL_BITS
        }
        if not self.program.job.contention:
            binding = set()
        # One activity for all meetings that do the same, so that the pool knows it again.
        placed = cache(lambda activity: _placed(activity, 0, binding))
        meetings = [m._replace(activity=placed(m.activity)) for m in self.meetings.all]
        streams = [self._place(c, kind_of[c], meets[c], meetings, binding) for c in range(len(kind_of))]
        devices = [c for c in range(len(kind_of)) for _ in range(PER_DEVICE)]
        islands = devices + [-1] * (len(self.capacities) - len(devices))
        return Lowered(self.capacities, self.names, streams, meetings, islands)

    def _kind(self, body: Body) -> _Kind:
        # Worker processes load, and nothing is launched to join streams.
        by_host = body.of_work(work is not None and not isinstance(work, Load) for work in body.works)
        issue = np.where(by_host, np.cumsum(by_host) * self.launch_ps, -1).tolist()
        waits = body.waits.rows()
        streams = []
        for s, name in enumerate(body.streams):
            ops = np.flatnonzero(body.stream == s).tolist()
            streams.append((name, ops, [waits[op] for op in ops], [issue[op] for op in ops]))
        meets = [isinstance(work, Collective | Transfer) for work in body.works]
        alone = [
            None if meet or work is None else self.relative(work)
            for meet, work in zip(meets, body.works, strict=True)
        ]
        pairs = np.unique(body.stream * len(body.works) + body.work).tolist()
        occurring = [divmod(pair, len(body.works)) for pair in pairs]
        placed_on = [(body.streams[stream], work) for stream, work in occurring if alone[work]]
        return _Kind(streams, body.work.tolist(), alone, placed_on, self._met(body, meets))

    @staticmethod
    def _met(body: Body, meets: list[bool]) -> list[tuple[int, str, Collective | Transfer, int]]:
        found = []
        counts: dict[tuple[str, str], int] = defaultdict(int)
        for op in np.flatnonzero(body.of_work(meets)).tolist():
            work, stream = body.works[body.work[op]], body.streams[body.stream[op]]
            assert isinstance(work, Collective | Transfer)
            group = work.group if isinstance(work, Collective) else ""
            counts[stream, group] += 1
            found.append((op, stream, work, counts[stream, group]))
        return found

    def _meets(self, kinds: list[_Kind]) -> list[dict[int, tuple[int, int]]]:
        """For each class, meeting and held micro-SMs of each op that meets others.

        Sends come first: it is their stream that says which transfers may be under way at once.
        """
        found: list[dict[int, tuple[int, int]]] = [{} for _ in kinds]
        for receives in (False, True):
            for c, kind in enumerate(kinds):
                rank_class = self.program.classes[c]
                for op, stream, work, number in kind.meets:
                    if (work.kind == "recv") != receives:
                        continue
                    if isinstance(work, Collective):
                        found[c][op] = self.meetings.collective(rank_class, work, stream, number)
                    else:
                        found[c][op] = self.meetings.transfer(rank_class, work, stream)
                    self._most(c * PER_DEVICE + SM, (c, stream, "hold"), found[c][op][1] << LEVEL_BITS)
        return found

    def _fair_hold(self, c: int) -> int:
        """Most that one stream of a class may hold, so that all of them together leave one SM free.

        Blocks of several collectives share an SM where there are not enough for all (one has room for 2,048
        threads). If a hold waited for another to end, as only the peer of that one can make it, or took the
        last SM from the kernel that the peer waits for, the ranks would wait for each other.
        """
        slots = self.most[c * PER_DEVICE + SM]
        held = sorted(most >> LEVEL_BITS for slot, most in slots.items() if slot[2:] == ("hold",))
        left = self.per_device[SM] - MICRO_SM
        for i, hold in enumerate(held):
            share = left // (len(held) - i)
            if hold > share:
                return share
            left -= hold
        return self.per_device[SM]

    def _place(
        self,
        c: int,
        kind: _Kind,
        meets: dict[int, tuple[int, int]],
        meetings: list[Meeting],
        binding: set[int],
    ) -> dict[str, StreamPlan]:
        """The ops of one class, with demands on the resources of its device that can bind."""
        base = c * PER_DEVICE
        most = self._fair_hold(c) if base + SM in binding else 0
        held = {
            wanted: int(min(wanted, most) * self.left[c])
            for wanted in {wanted for _, wanted in meets.values()}
        }
        own = [_placed(self._at_clock(alone, base, self.left[c]), base, binding) for alone in kind.alone]
        activity = [own[work] for work in kind.work]
        meeting, hold = [-1] * len(activity), [0] * len(activity)
        for op, (number, wanted) in meets.items():
            meeting[op], hold[op] = number, held[wanted]
            if len(meetings[number].parties) == 1:
                activity[op] = meetings[number].activity
        return {
            name: StreamPlan(
                ops,
                waits,
                issue,
                [activity[op] for op in ops],
                [meeting[op] for op in ops],
                [hold[op] for op in ops],
            )
            for name, ops, waits, issue in kind.streams
        }

    def _at_clock(self, activity: Activity | None, base: int, left: Fraction) -> Activity | None:
        """An activity of one device with the level that it has alone there.

        The device's resources begin at `base`, and `left` is what is left of its clock. A fixed time, which
        asks for nothing, is one of a sound device.
        """
        if activity is None or left == 1:
            return activity
        rooms = [(self.capacities[base + r] << LEVEL_BITS) // d for r, d in activity.demands]
        bound = min([activity.bound, *rooms]) if rooms else int(activity.bound * left)
        if bound == activity.bound:
            return activity
        return Activity(activity.demands, activity.length, bound)

    def _most(self, resource: int, slot: tuple[object, ...], wanted: int) -> None:
        """Note the most that a slot can want of a resource."""
        slots = self.most[resource]
        slots[slot] = max(slots.get(slot, 0), wanted)

    def _relative(self, work: Work) -> Activity | None:
        device = self.program.job.cluster.device
        demands: Demands
        if isinstance(work, Fixed):
            demands, duration = (), work.duration_ps
        elif isinstance(work, Kernel):
            cost = kernel_cost(work, device, self.program.job.attention)
            demands = ((SM, cost.sm), (TENSOR, cost.tensor), (VECTOR, cost.vector), (HBM, cost.hbm))
            duration = cost.duration_ps
        elif isinstance(work, HostCopy):
            engine = H2D if work.direction == "h2d" else D2H
            rate = self.per_device[engine]
            demands, duration = ((engine, rate), (HBM, rate)), -(-work.bytes * PS_PER_SECOND // rate)
        else:
            assert isinstance(work, Load)
            rate = self.per_device[LOADER]
            demands, duration = ((LOADER, rate),), -(-work.bytes * PS_PER_SECOND // rate)
        if not duration:
            return None
        demands = tuple((r, d) for r, d in demands if d)
        assert all(d <= self.per_device[r] for r, d in demands), f"{work} wants more than its device has"
        return Activity(demands, duration << LEVEL_BITS, FULL)


def _placed(activity: Activity | None, base: int, binding: set[int]) -> Activity | None:
    """The activity on the device whose resources begin at `base`, without what cannot bind."""
    if activity is None:
        return None
    demands = tuple((base + r, d) for r, d in activity.demands if base + r in binding)
    return Activity(demands, activity.length, activity.bound, activity.delay_ps)
