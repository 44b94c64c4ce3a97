"""Program to planned ops: amounts of work become lengths and demands on numbered resources.

Resources of the pool: first `PER_DEVICE` for each rank class, then the fabric links that some op loads. A
resource that could not bind even if everything that may load it did so at once is dropped here: it would
change no level and only cost time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from fractions import Fraction
from functools import cache
from typing import NamedTuple

from emulator.plan.program import (
    Collective,
    Fixed,
    HostCopy,
    Kernel,
    Load,
    Program,
    RankClass,
    Template,
    Transfer,
    Work,
)
from emulator.run.cost import MICRO_SM, device_capacities, kernel_cost
from emulator.run.maxmin import FULL, LEVEL_BITS
from emulator.run.network import Wire, collective_wire, transfer_wire
from emulator.run.pool import Activity, Demands
from emulator.spec.fabric import Fabric
from emulator.spec.faults import left_of
from emulator.spec.units import PS_PER_SECOND, to_ps

SM, TENSOR, VECTOR, HBM, H2D, D2H, LOADER = range(7)
PER_DEVICE = 7
CLOCKED = (SM, TENSOR, VECTOR)
"""What runs at the device's clock, and so slows down with it."""
RESOURCE_NAMES = ("sm", "tensor", "vector", "hbm", "copy_h2d", "copy_d2h", "loader")


class Meeting(NamedTuple):
    """A collective, or a transfer: an activity that starts when all its parties have come."""

    name: str
    parties: tuple[int, ...]
    """Rank classes that must come; both ends of a transfer, though they may be of one class."""
    activity: Activity | None
    """None for what takes no time (a group of one)."""


class Planned(NamedTuple):
    """One op of one rank class, ready to be played."""

    op_index: int
    waits: tuple[int, ...]
    issue_ps: int
    """When the host has issued it, after the host began with the step; -1 if no host issues it."""
    activity: Activity | None
    """What it plays alone; None for a meeting or for nothing."""
    meeting: int
    """Index of its meeting; -1 if none."""
    hold: int
    """Micro-SMs held on the own device from arrival to end."""


class Lowered(NamedTuple):
    """Everything the executor needs."""

    capacities: list[int]
    resource_names: list[str]
    streams: list[dict[str, list[Planned]]]
    """For each rank class: stream name -> ops in order."""
    meetings: list[Meeting]


class _Draft(NamedTuple):
    """One op of a template."""

    op_index: int
    stream: str
    waits: tuple[int, ...]
    issue_ps: int
    activity: Activity | None
    """Its own work; resources are counted from the device's first."""


class _Fluid(NamedTuple):
    """What some rank classes do together, as often as they do it."""

    activity: Activity | None
    parties: tuple[int, ...]
    hold: int
    """Micro-SMs held on each of their devices."""


def _placed(activity: Activity | None, base: int, binding: set[int]) -> Activity | None:
    """The activity on the device whose resources begin at `base`, without what cannot bind."""
    if activity is None:
        return None
    demands = tuple((base + r, d) for r, d in activity.demands if base + r in binding)
    return Activity(demands, activity.length, activity.bound, activity.delay_ps)


def lower(program: Program, prune: bool = True) -> Lowered:
    """Turn the ops of every rank class into lengths and demands; `prune` drops what can never bind."""
    return _Lowering(program).result(prune)


class _Lowering:
    def __init__(self, program: Program) -> None:
        job = program.job
        self.program = program
        self.fabric = Fabric(job.cluster)
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
        self.class_of = {rank: c for c, rc in enumerate(program.classes) for rank in rc.members}
        self.slow = left_of(job.faults, "straggler")
        self.degraded = left_of(job.faults, "nic")
        self.capacities = self.per_device * len(program.classes)
        for c, rank_class in enumerate(program.classes):
            for resource in CLOCKED:
                left = self.slow.get(rank_class.members[0], 1)
                self.capacities[c * PER_DEVICE + resource] = int(self.per_device[resource] * left)
        self.names = [f"rank{rc.members[0]}.{name}" for rc in program.classes for name in RESOURCE_NAMES]
        self.alike: dict[int, list[int]] = defaultdict(list)
        for group in range(len(program.groups)):
            self.alike[program.class_of_group(group)].append(group)
        folding = program.folding
        self.stands_for = (
            dict(zip(folding.links.tolist(), folding.link_class.tolist(), strict=True)) if folding else {}
        )
        self.links: dict[int, int] = {}
        self.meetings: list[Meeting] = []
        self.fluids: dict[tuple[object, ...], _Fluid] = {}
        self.keys: dict[tuple[object, ...], int] = {}
        self.most: dict[int, dict[tuple[object, ...], int]] = defaultdict(dict)

    def result(self, prune: bool) -> Lowered:
        classes, relative = self.program.classes, cache(self._relative)
        drafts = [self._draft(template, relative) for template in self.program.templates]
        meets = [self._meets(c, rank_class) for c, rank_class in enumerate(classes)]
        for c, rank_class in enumerate(classes):
            for stream, own in dict.fromkeys((d.stream, d.activity) for d in drafts[rank_class.template]):
                if own:
                    for resource, demand in own.demands:
                        self._most(c * PER_DEVICE + resource, (c, stream), demand * own.bound)
        binding = {
            r
            for r, slots in self.most.items()
            if not prune or sum(slots.values()) > self.capacities[r] << LEVEL_BITS
        }
        if not self.program.job.contention:
            binding = set()
        streams = [
            self._place(c, drafts[rank_class.template], meets[c], binding)
            for c, rank_class in enumerate(classes)
        ]
        # One activity for all meetings that do the same, so that the pool knows it again.
        placed = cache(lambda activity: _placed(activity, 0, binding))
        meetings = [m._replace(activity=placed(m.activity)) for m in self.meetings]
        return Lowered(self.capacities, self.names, streams, meetings)

    def _draft(self, template: Template, relative: Callable[[Work], Activity | None]) -> list[_Draft]:
        """What all classes of a template have in common; demands are on resources of one device."""
        drafts, issued = [], 0
        for index, op in enumerate(template.ops):
            # Worker processes load, and nothing is launched to join streams.
            by_host = op.work is not None and not isinstance(op.work, Load)
            issued += self.launch_ps if by_host else 0
            solo = None if isinstance(op.work, Collective | Transfer | None) else relative(op.work)
            drafts.append(_Draft(index, op.stream, op.waits, issued if by_host else -1, solo))
        return drafts

    def _meets(self, c: int, rank_class: RankClass) -> dict[int, tuple[int, int]]:
        """Meeting and held micro-SMs of each op that meets others."""
        meets: dict[int, tuple[int, int]] = {}
        counts: dict[tuple[str, str], int] = defaultdict(int)
        for index, op in enumerate(self.program.templates[rank_class.template].ops):
            if isinstance(op.work, Collective):
                key = op.stream, op.work.group
                counts[key] += 1
                meets[index] = self._collective(rank_class, op.work, op.stream, counts[key])
            elif isinstance(op.work, Transfer):
                meets[index] = self._transfer(rank_class, op.work)
            else:
                continue
            self._most(c * PER_DEVICE + SM, (c, op.stream, "hold"), meets[index][1] << LEVEL_BITS)
        return meets

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
        self, c: int, drafts: list[_Draft], meets: dict[int, tuple[int, int]], binding: set[int]
    ) -> dict[str, list[Planned]]:
        """The ops of one class, with demands on the resources of its device that can bind."""
        base = c * PER_DEVICE
        most = self._fair_hold(c) if base + SM in binding else 0
        left = self.slow.get(self.program.classes[c].members[0], Fraction(1))
        streams: dict[str, list[Planned]] = {}
        placed: dict[int, Activity | None] = {}
        for index, stream, waits, issue, activity in drafts:
            meeting, hold = meets.get(index, (-1, 0))
            if id(activity) not in placed:
                placed[id(activity)] = _placed(self._at_clock(activity, base, left), base, binding)
            held = int(min(hold, most) * left)
            streams.setdefault(stream, []).append(
                Planned(index, waits, issue, placed[id(activity)], meeting, held)
            )
        return streams

    def _at_clock(self, activity: Activity | None, base: int, left: Fraction) -> Activity | None:
        """An activity of one device with the level that it has alone there.

        The device's resources begin at `base`, and `left` is what is left of its clock. A fixed time, which
        asks for nothing, is one of a sound device.
        """
        if activity is None:
            return None
        rooms = [(self.capacities[base + r] << LEVEL_BITS) // d for r, d in activity.demands]
        bound = min([activity.bound, *rooms]) if rooms else int(activity.bound * left)
        if bound == activity.bound:
            return activity
        return Activity(activity.demands, activity.length, bound)

    def _most(self, resource: int, slot: tuple[object, ...], wanted: int) -> None:
        """Note the most that one slot can want of a resource: in a slot, one activity runs at a time."""
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

    def _collective(
        self, rank_class: RankClass, work: Collective, stream: str, number: int
    ) -> tuple[int, int]:
        """Meeting of the number-th collective of a group on a stream, and the micro-SMs its channels hold."""
        g = self.program.class_of_group(rank_class.groups[work.group])
        key = (g, stream, number)
        what = (g, stream, work.kind, work.bytes, work.root)
        if what not in self.fluids:
            algorithm, groups = self.program.job.collective_algorithm, self.program.groups
            wires = [
                collective_wire(
                    work.kind, groups[each].ranks, work.bytes, algorithm, self.fabric, root=work.root
                )
                for each in self.alike[g]
            ]
            parties = tuple(dict.fromkeys(self.class_of[rank] for rank in groups[g].ranks))
            self.fluids[what] = self._fluid(wires, parties, (g, stream))
        if key not in self.keys:
            self._meet(key, f"{work.axis} {work.kind} {number} of group {g}", self.fluids[what])
        return self.keys[key], self.fluids[what].hold

    def _transfer(self, rank_class: RankClass, work: Transfer) -> tuple[int, int]:
        """Meeting of a transfer with its other end, and the micro-SMs that each end holds."""
        me, peer = rank_class.members[0], rank_class.peers[work.peer]
        src, dst = (me, peer) if work.kind == "send" else (peer, me)
        parties = (self.class_of[src], self.class_of[dst])
        key = (*parties, work.tag)
        what = (*parties, work.bytes, work.duration_ps)
        if what not in self.fluids and work.duration_ps is not None:
            fixed = Activity((), work.duration_ps << LEVEL_BITS, FULL) if work.duration_ps else None
            self.fluids[what] = _Fluid(fixed, parties, 0)
        elif what not in self.fluids:
            ends = [(rank, self.program.seat(rank).peers[work.peer]) for rank in rank_class.members]
            routes = ends if work.kind == "send" else [(to, rank) for rank, to in ends]
            wires = [transfer_wire(*route, work.bytes, self.fabric) for route in routes]
            self.fluids[what] = self._fluid(wires, parties, (*parties, "p2p"))
        if key not in self.keys:
            name = f"{work.axis} transfer {work.tag} from rank {src} to rank {dst}"
            self._meet(key, name, self.fluids[what])
        return self.keys[key], self.fluids[what].hold

    def _fluid(self, wires: list[Wire], parties: tuple[int, ...], slot: tuple[object, ...]) -> _Fluid:
        """What rank classes do together; `wires` are those of all members of its class, the first for all.

        What a class puts on a link is the sum over its members of what they put on the link that stands for
        its class; how fast it is alone is what its first member would be.
        """
        first = wires[0]
        if not first.length_q:
            return _Fluid(None, parties, 0)
        rooms = [(self._capacity(link) << LEVEL_BITS) // d for link, d in first.demands]
        rooms += [(self.per_device[HBM] << LEVEL_BITS) // first.hbm] if first.hbm else []
        alone = min([first.bound_q, *rooms])
        onto: dict[int, int] = defaultdict(int)
        stands_for = self.stands_for
        for wire in wires:
            for link, demand in wire.demands:
                if stands_for.get(link, -1 if stands_for else link) == link:
                    onto[self._link(link)] += demand
        for c in parties if first.hbm else ():
            onto[c * PER_DEVICE + HBM] += first.hbm
        for resource, demand in onto.items():
            self._most(resource, slot, demand * alone)
        hold = 0 if self.program.job.cluster.device.collective_engines else first.sms * MICRO_SM
        return _Fluid(Activity(tuple(onto.items()), first.length_q, alone, first.alpha_ps), parties, hold)

    def _meet(self, key: tuple[object, ...], name: str, fluid: _Fluid) -> None:
        self.keys[key] = len(self.meetings)
        self.meetings.append(Meeting(name, fluid.parties, fluid.activity))

    def _capacity(self, link: int) -> int:
        capacity = self.fabric.capacity(link)
        if not self.degraded:
            return capacity
        return int(capacity * self.degraded.get(self.fabric.gpu_of_nic(link), 1))

    def _link(self, link: int) -> int:
        if link not in self.links:
            self.links[link] = len(self.capacities)
            self.capacities.append(self._capacity(link))
            self.names.append(self.fabric.name(link))
        return self.links[link]
