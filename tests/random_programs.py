"""Random programs with more in them than can be planned yet, each from one number.

Every rank has a group on one or two axes of its stage, perhaps one with its partner of the last stage, a ring
of transfers in its stage and a one-way chain of them through the stages. Groups and rings lie in order, in
strides or anyhow. So groups of one stage differ by nothing but their links, and several of one class share a
link: what planned jobs, with one data-parallel group a stage, cannot show.
"""

from __future__ import annotations

from itertools import pairwise
from random import Random
from typing import Literal

from emulator.plan.program import (
    COMPUTE,
    Collective,
    Group,
    Kernel,
    Op,
    Program,
    RankClass,
    Template,
    Transfer,
)
from emulator.spec.cluster import Cluster
from emulator.spec.device import device
from emulator.spec.faults import Fault
from emulator.spec.job import Job, Layout
from emulator.spec.model import Model

MODEL = Model(name="tiny", layers=1, hidden=64, ffn_hidden=64, heads=4, kv_heads=4, vocab=100)
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "all_to_all")
BYTES = (1_000, 100_000, 1_000_000, 30_000_000)


def random_program(seed: int) -> Program:
    """Unfolded program of 4 to 24 ranks; the same for the same seed."""
    return _Draw(Random(seed)).program()


class _Draw:
    def __init__(self, random: Random) -> None:
        self.random = random
        self.world = random.choice([4, 6, 8, 8, 12, 12, 16, 16, 24])
        self.stages = random.choice([s for s in (1, 2, 3, 4) if self.world % s == 0 and self.world // s > 1])
        self.each = self.world // self.stages
        self.groups: list[Group] = []
        self.bound: list[dict[str, int]] = [{} for _ in range(self.world)]
        self.peers: list[dict[str, int]] = [{} for _ in range(self.world)]
        self.axes = ["x", "y"][: random.choice([1, 2, 2])]

    def program(self) -> Program:
        job, random = self._job(), self.random
        ranks = self._stage_ranks()
        for axis in self.axes:
            self._partition(axis, ranks)
        tied = self.stages > 1 and random.random() < 0.4
        for pair in zip(ranks[0], ranks[-1], strict=True) if tied else ():
            self._group("tied", pair)
        for here, after in pairwise(ranks):
            for source, target in zip(here, self._perhaps_shuffled(after), strict=True):
                self._edge(source, target, "next", "prev")
        ring = self._ring(ranks) if random.random() < 0.4 else False
        actions = ["kernel", "collective", "collective", *["chain"] * (self.stages > 1)]
        actions += ["ring"] * 2 * ring + ["tied"] * tied
        script = [self._action(random.choice(actions)) for _ in range(random.randint(3, 8))]
        variants = random.choice([1, 1, 1, 2])
        templates = [
            Template(f"stage{s} {v}", s, tuple(self._ops(script, s, 1 + v)), ())
            for s in range(self.stages)
            for v in range(variants)
        ]
        template = {
            rank: s * variants + random.choice([0, i % 2]) % variants
            for s, here in enumerate(ranks)
            for i, rank in enumerate(here)
        }
        seats = (RankClass((r,), template[r], self.bound[r], self.peers[r]) for r in range(self.world))
        return Program(job, tuple(templates), tuple(seats), tuple(self.groups))

    def _job(self) -> Job:
        random = self.random
        algorithm: Literal["auto", "ring", "tree"] = random.choice(["auto", "ring", "tree"])
        per_node = random.choice([1, 2, 2, 4])
        racks = random.choice([None, 1, 2, 3])
        cluster = Cluster(
            device=device("h100-sxm"),
            gpus_per_node=per_node,
            nodes=-(-self.world // per_node) + random.choice([0, 0, 1, 3]),
            nic_gbit_per_gpu=random.choice([8.0, 80.0, 400.0]),
            nodes_per_rack=random.choice([1, 1, 2, 3]),
            racks_per_pod=racks,
            pod_oversubscription=random.choice([1.0, 2.0, 3.0, 20.0]),
            rail_optimised=random.random() < 0.4,
        )
        faults = [
            Fault(kind=kind, rank=random.randrange(self.world), factor=random.choice([0.5, 0.8]))
            for kind in ("straggler", "nic")
            if random.random() < 0.25
        ]
        return Job(
            model=MODEL, cluster=cluster, seq_len=64, global_batch=self.world,
            layout=Layout(dp_shard=self.world), collective_algorithm=algorithm,
            steps=random.choice([1, 1, 2]), faults=tuple(faults),
        )  # fmt: skip

    def _stage_ranks(self) -> list[list[int]]:
        order = list(range(self.world))
        how = self.random.choice(["blocks", "blocks", "strides", "strides", "anyhow"])
        if how == "strides":
            return [order[s :: self.stages] for s in range(self.stages)]
        if how == "anyhow":
            self.random.shuffle(order)
        return [order[s * self.each : (s + 1) * self.each] for s in range(self.stages)]

    def _perhaps_shuffled(self, ranks: list[int]) -> list[int]:
        return self.random.sample(ranks, len(ranks)) if self.random.random() < 0.2 else ranks

    def _group(self, axis: str, ranks: tuple[int, ...]) -> None:
        for rank in ranks:
            self.bound[rank][axis] = len(self.groups)
        self.groups.append(Group(axis, ranks))

    def _edge(self, source: int, target: int, there: str, back: str) -> None:
        self.peers[source][there], self.peers[target][back] = target, source

    def _partition(self, axis: str, stages: list[list[int]]) -> None:
        size = self.random.choice([k for k in range(2, self.each + 1) if self.each % k == 0])
        how = self.random.choice(["blocks", "blocks", "strides", "strides", "anyhow"])
        for ranks in stages:
            order = self.random.sample(ranks, len(ranks)) if how == "anyhow" else ranks
            count = len(order) // size
            for i in range(count):
                part = order[i::count] if how == "strides" else order[i * size : (i + 1) * size]
                self._group(axis, tuple(part))

    def _ring(self, stages: list[list[int]]) -> bool:
        size = self.random.choice([k for k in range(2, self.each + 1) if self.each % k == 0])
        for ranks in stages:
            order = self._perhaps_shuffled(ranks)
            for i in range(0, len(order), size):
                ring = order[i : i + size]
                for source, target in zip(ring, ring[1:] + ring[:1], strict=True):
                    self._edge(source, target, "right", "left")
        return True

    def _action(self, what: str) -> tuple[str, int, bool, Collective | None]:
        """What all stages do next: its kind, bytes, whether it waits for compute, and the collective."""
        random = self.random
        size, waits = random.choice(BYTES), random.random() < 0.5
        work = None
        if what == "collective":
            axis = random.choice(self.axes)
            least = min(len(group.ranks) for group in self.groups if group.axis == axis)
            kind, root = random.choice(KINDS), random.randrange(least)
            rooted = root if kind in ("broadcast", "reduce") else 0
            work = Collective(kind=kind, group=axis, axis="dp", bytes=size, root=rooted)  # type: ignore[arg-type]
        elif what == "tied":
            work = Collective(kind="all_reduce", group="tied", axis="pp", bytes=size)
        return what, size, waits, work

    def _ops(
        self, script: list[tuple[str, int, bool, Collective | None]], stage: int, slowness: int
    ) -> list[Op]:
        """Write the script as one stage does it; all stages meet in the order of the script."""
        ops: list[Op] = []
        computed: tuple[int, ...] = ()
        arrived: list[int] = []

        def add(stream: str, work: Kernel | Collective | Transfer, waits: tuple[int, ...]) -> int:
            ops.append(Op(name=f"{stream} {len(ops)}", stream=stream, work=work, waits=waits, stage=stage))
            return len(ops) - 1

        def send(number: int, peer: str, size: int, waits: tuple[int, ...]) -> None:
            to = Transfer(kind="send", peer=peer, axis="pp", bytes=size, tag=f"{number}")
            add(f"to {peer}", to, waits)

        def receive(number: int, peer: str, size: int) -> None:
            come = Transfer(kind="recv", peer=peer, axis="pp", bytes=size, tag=f"{number}")
            arrived.append(add(f"from {peer}", come, ()))

        for number, (what, size, waits, collective) in enumerate(script):
            after = computed if waits else ()
            if what == "kernel":
                amount = size * slowness
                flops = amount * (1000 if number % 2 else 1)  # bound by the clock, or by HBM
                kernel = Kernel(kind="elementwise", flops=flops, hbm_bytes=10 * amount)
                computed = (add(COMPUTE, kernel, tuple(arrived) if waits else ()),)
            elif collective and (what != "tied" or stage in (0, self.stages - 1)):
                arrived.append(add(collective.group, collective, after))
            elif what == "chain":
                if stage < self.stages - 1:
                    send(number, "next", size, after)
                if stage:
                    receive(number, "prev", size)
            elif what == "ring":
                send(number, "right", size, after)
                receive(number, "left", size)
        return ops
