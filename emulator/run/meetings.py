"""What rank classes do together: collectives and transfers, as activities on links and on the members' HBM.

A class of meetings is played once. It loads a link with what all its members put on the link that stands for
that link's class, and it is as fast alone as its first member would be.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from emulator.plan.program import Collective, Program, RankClass, Transfer
from emulator.run.activity import Activity
from emulator.run.cost import MICRO_SM
from emulator.run.maxmin import FULL, LEVEL_BITS
from emulator.run.network import ClassWire, GroupClass, transfer_class_wire
from emulator.spec.fabric import Fabric
from emulator.spec.faults import left_of

SM, HBM = 0, 3
"""Resources of a device, counted from its first."""
PER_DEVICE = 7


class Meeting(NamedTuple):
    """A collective, or a transfer: an activity that starts when all its parties have come."""

    name: str
    parties: tuple[int, ...]
    """Rank classes that must come; both ends of a transfer, though they may be of one class."""
    activity: Activity | None
    """None for what takes no time (a group of one)."""


class _Fluid(NamedTuple):
    """What some rank classes do together, as often as they do it."""

    activity: Activity | None
    parties: tuple[int, ...]
    hold: int
    """Micro-SMs held on each of their devices."""


class Meetings:
    """All meetings of a program, found as the ops of its classes name them.

    Links that some meeting loads are added to `capacities` and `names`; `most(resource, slot, wanted)` is
    told what a meeting can want of a resource.
    """

    def __init__(
        self,
        program: Program,
        capacities: list[int],
        names: list[str],
        most: Callable[[int, tuple[object, ...], int], None],
    ) -> None:
        self.all: list[Meeting] = []
        self.program = program
        self.fabric = Fabric(program.job.cluster)
        self._capacities, self._names, self._most = capacities, names, most
        self._hbm = capacities[HBM]
        self._class_of = program.class_of_ranks()
        folding = program.folding
        self._onto = folding.links[folding.links == folding.link_class] if folding else None
        self._slower = {
            link: int(self.fabric.capacity(link) * left)
            for rank, left in left_of(program.job.faults, "nic").items()
            for link in (self.fabric.gpu_link(rank, "nic.out"), self.fabric.gpu_link(rank, "nic.in"))
        }
        self._alike: dict[int, list[int]] = defaultdict(list)
        for group in range(len(program.groups)):
            self._alike[program.class_of_group(group)].append(group)
        self._groups: dict[int, tuple[GroupClass, tuple[int, ...]]] = {}
        self._links: dict[int, int] = {}
        self._fluids: dict[tuple[object, ...], _Fluid] = {}
        self._keys: dict[tuple[object, ...], tuple[int, int]] = {}

    def collective(
        self, rank_class: RankClass, work: Collective, stream: str, number: int
    ) -> tuple[int, int]:
        """Meeting of the number-th collective of a group on a stream, and the micro-SMs its channels hold."""
        g = self.program.class_of_group(rank_class.groups[work.group])
        key = (g, stream, number)
        if key not in self._keys:
            what = (g, stream, work.kind, work.bytes, work.root)
            if what not in self._fluids:
                groups, parties = self._group_class(g)
                wire = groups.wire(work.kind, work.bytes, self.program.job.collective_algorithm, work.root)
                self._fluids[what] = self._fluid(wire, parties, (g, stream))
            self._meet(key, f"{work.axis} {work.kind} {number} of group {g}", self._fluids[what])
        return self._keys[key]

    def _group_class(self, g: int) -> tuple[GroupClass, tuple[int, ...]]:
        """Groups of the class that group g stands for, and the rank classes in g."""
        if g not in self._groups:
            groups = [self.program.groups[each].ranks for each in self._alike[g]]
            parties = np.unique(self._class_of[np.array(groups[0])])
            shared = GroupClass(groups, self.fabric, self._onto, self._slower)
            self._groups[g] = shared, tuple(parties.tolist())
        return self._groups[g]

    def transfer(self, rank_class: RankClass, work: Transfer, stream: str) -> tuple[int, int]:
        """Meeting of a transfer with its other end, and the micro-SMs that each end holds."""
        me, peer = rank_class.members[0], rank_class.peers[work.peer]
        src, dst = (me, peer) if work.kind == "send" else (peer, me)
        parties = (int(self._class_of[src]), int(self._class_of[dst]))
        key = (*parties, work.tag)
        if key not in self._keys:
            what = (*parties, stream, work.bytes, work.duration_ps)
            if what not in self._fluids:
                self._fluids[what] = self._transfer_fluid(rank_class, work, parties, stream)
            name = f"{work.axis} transfer {work.tag} from rank {src} to rank {dst}"
            self._meet(key, name, self._fluids[what])
        return self._keys[key]

    def _transfer_fluid(
        self, rank_class: RankClass, work: Transfer, parties: tuple[int, int], stream: str
    ) -> _Fluid:
        if work.duration_ps is not None:
            fixed = Activity((), work.duration_ps << LEVEL_BITS, FULL) if work.duration_ps else None
            return _Fluid(fixed, parties, 0)
        here = np.array(rank_class.members)
        folding = self.program.folding
        peers = folding.seats.peers[work.peer][here] if folding else np.array([rank_class.peers[work.peer]])
        src, dst = (here, peers) if work.kind == "send" else (peers, here)
        wire = transfer_class_wire(src, dst, work.bytes, self.fabric, onto=self._onto, slower=self._slower)
        return self._fluid(wire, parties, (*parties, stream))

    def _fluid(self, wire: ClassWire, parties: tuple[int, ...], slot: tuple[object, ...]) -> _Fluid:
        if not wire.length_q:
            return _Fluid(None, parties, 0)
        alone = wire.level
        onto = [(self._link(link), demand) for link, demand in wire.demands]
        if wire.hbm:
            alone = min(alone, (self._hbm << LEVEL_BITS) // wire.hbm)
            # A device that sends to one of its own class also receives from one.
            onto += [(c * PER_DEVICE + HBM, n * wire.hbm) for c, n in Counter(parties).items()]
        for resource, demand in onto:
            self._most(resource, slot, demand * alone)
        hold = 0 if self.program.job.cluster.device.collective_engines else wire.sms * MICRO_SM
        return _Fluid(Activity(tuple(onto), wire.length_q, alone, wire.alpha_ps), parties, hold)

    def _meet(self, key: tuple[object, ...], name: str, fluid: _Fluid) -> None:
        self._keys[key] = len(self.all), fluid.hold
        self.all.append(Meeting(name, fluid.parties, fluid.activity))

    def _link(self, link: int) -> int:
        if link not in self._links:
            self._links[link] = len(self._capacities)
            self._capacities.append(self._slower.get(link, self.fabric.capacity(link)))
            self._names.append(self.fabric.name(link))
        return self._links[link]
