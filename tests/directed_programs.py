"""Small programs, each of which needs one thing of folding that random programs seldom need."""

from __future__ import annotations

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
    Work,
)
from emulator.spec.cluster import Cluster
from emulator.spec.device import device
from emulator.spec.faults import Fault
from emulator.spec.job import Job, Layout
from emulator.spec.model import Model

MODEL = Model(name="tiny", layers=1, hidden=64, ffn_hidden=64, heads=4, kv_heads=4, vocab=100)
MEGABYTES = 10_000_000


def _job(ranks: int, faults: tuple[Fault, ...] = (), **cluster: object) -> Job:
    fields: dict[str, object] = {"gpus_per_node": 1, "nodes": ranks, "nodes_per_rack": 1}
    return Job(
        model=MODEL,
        cluster=Cluster(device=device("h100-sxm"), **(fields | cluster)),  # type: ignore[arg-type]
        seq_len=64,
        global_batch=ranks,
        layout=Layout(dp_shard=ranks),
        collective_algorithm="ring",
        faults=faults,
    )


def _template(name: str, *works: tuple[str, Work]) -> Template:
    """Ops one after the other, each on its stream, each after the one before."""
    ops = [
        Op(name=f"{name} {i}", stream=stream, work=work, waits=(i - 1,) if i else (), stage=0)
        for i, (stream, work) in enumerate(works)
    ]
    return Template(name, 0, ops, ())


GATHER = ("x", Collective(kind="all_gather", group="x", axis="dp", bytes=MEGABYTES))
COMPUTES = (COMPUTE, Kernel(kind="elementwise", flops=10**12, hbm_bytes=10**6))


def one_group_or_two_on_an_uplink() -> Program:
    """Pods of two ranks in pairs: two groups share the uplinks of the first pair, one has those of the other.

    But for the number of groups on a link, all is alike.
    """
    gathers, idle = _template("gathers", GATHER), _template("idle", COMPUTES)
    groups = tuple(Group("x", ranks) for ranks in ((0, 2), (1, 3), (4, 6)))
    bound = {rank: {"x": g} for g, group in enumerate(groups) for rank in group.ranks}
    seats = (RankClass((r,), 0 if r in bound else 1, bound.get(r, {}), {}) for r in range(8))
    job = _job(8, racks_per_pod=2, pod_oversubscription=2.0)
    return Program(job, (gathers, idle), tuple(seats), groups)


def groups_in_a_node_and_over_two() -> Program:
    """Two pairs that differ by their nodes only."""
    groups = (Group("x", (0, 1)), Group("x", (2, 4)))
    gathers, idle = _template("gathers", GATHER), _template("idle", COMPUTES)
    bound = {rank: {"x": g} for g, group in enumerate(groups) for rank in group.ranks}
    seats = (RankClass((r,), 0 if r in bound else 1, bound.get(r, {}), {}) for r in range(6))
    job = _job(6, gpus_per_node=2, nodes=3, racks_per_pod=None)
    return Program(job, (gathers, idle), tuple(seats), groups)


def two_senders_of_one_name() -> Program:
    """Ranks 0 and 1 send to 2 by the same name, as 3 and 4 to 5, but 3 is slow."""

    def transfer(kind: str, peer: str) -> Transfer:
        return Transfer(kind=kind, peer=peer, axis="pp", bytes=MEGABYTES, tag="0")  # type: ignore[arg-type]

    sends = _template("sends", COMPUTES, ("to", transfer("send", "to")))
    receives = _template("receives", ("one", transfer("recv", "one")), ("other", transfer("recv", "other")))
    peers = [{"to": 2}, {"to": 2}, {"one": 0, "other": 1}, {"to": 5}, {"to": 5}, {"one": 3, "other": 4}]
    seats = (RankClass((r,), int("one" in to), {}, to) for r, to in enumerate(peers))
    job = _job(6, (Fault(kind="straggler", rank=3, factor=0.5),), racks_per_pod=None)
    return Program(job, (sends, receives), tuple(seats), ())


def directed_programs() -> list[Program]:
    """All of them."""
    return [one_group_or_two_on_an_uplink(), groups_in_a_node_and_over_two(), two_senders_of_one_name()]
