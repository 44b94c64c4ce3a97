"""What must not happen when one thing of a job changes: faster parts never make a step longer."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from random_jobs import random_job

from emulator.plan import plan
from emulator.plan.collectives import ALGORITHMS
from emulator.run import run
from emulator.run.nccl import P2P_LL_BYTES
from emulator.run.network import alone_ps, collective_wire, transfer_wire
from emulator.spec.cluster import Cluster
from emulator.spec.device import DEVICES
from emulator.spec.fabric import Fabric
from emulator.spec.job import Job

JOBS = range(100, 140)
"""Seeds of the jobs that are compared: any will do, and the slow test takes many more."""
MOST_OPS = 2_000

# Uneven nodes, one rank a node, rails, pods of one rack each with a seventh of the bandwidth above.
FABRICS = [
    (Cluster(device=DEVICES["h100-sxm"], nodes=1), 8),
    (Cluster(device=DEVICES["v100"], nodes=2), 9),
    (Cluster(device=DEVICES["k40"], nodes=5, gpus_per_node=1), 5),
    (Cluster(device=DEVICES["b200"], nodes=8), 64),
    (Cluster(device=DEVICES["a100-80"], nodes=2, gpus_per_node=5, rail_optimised=True), 7),
    (
        Cluster(device=DEVICES["tpu-v5p"], nodes=3, gpus_per_node=3, racks_per_pod=1, pod_oversubscription=7),
        7,
    ),
]
EDGES = st.tuples(st.integers(1, 33), st.integers(-1, 1)).map(lambda edge: 2 ** edge[0] + edge[1])
SIZES = st.one_of(
    st.tuples(EDGES, st.integers(0, 1).map(lambda more: 2**more)).map(lambda pair: (pair[0], sum(pair))),
    st.tuples(st.integers(1, 2**33), st.integers(1, 2**33)).map(lambda pair: (min(pair), max(pair))),
)
"""Two sizes, the smaller first: next to each other at a power of two, or anywhere."""


@pytest.mark.parametrize("algorithm", ["auto", "ring", "tree"])
@pytest.mark.parametrize("kind", [kind for kind in ALGORITHMS if kind != "all_to_all"])
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_more_bytes_never_arrive_sooner(kind: str, algorithm: str, data: st.DataObject) -> None:
    cluster, ranks = data.draw(st.sampled_from(FABRICS))
    fabric = Fabric(cluster)
    few, many = data.draw(SIZES)

    def time(size: int) -> int:
        wire = collective_wire(kind, range(ranks), size, algorithm, fabric)  # type: ignore[arg-type]
        return alone_ps(wire, fabric.capacity)

    assert 0 < time(few) <= time(many)


@given(SIZES, st.sampled_from(FABRICS))
def test_more_bytes_of_a_transfer_never_arrive_sooner(
    sizes: tuple[int, int], where: tuple[Cluster, int]
) -> None:
    """But for NCCL's fixed threshold, past which a message no longer takes LL's twofold bytes."""
    fabric = Fabric(where[0])
    few, many = (alone_ps(transfer_wire(0, where[1] - 1, size, fabric), fabric.capacity) for size in sizes)
    if not sizes[0] <= P2P_LL_BYTES < sizes[1]:
        assert 0 < few <= many


def _jobs(seeds: range) -> Iterator[Job]:
    for seed in seeds:
        job = random_job(seed)
        if sum(len(template.ops) for template in plan(job).templates) * job.layout.dp < MOST_OPS:
            yield job


def _end(job: Job) -> int:
    return run(plan(job)).end_ps


def _faster(job: Job) -> dict[str, Job]:
    """The job with one part of its cluster twice as fast."""
    cluster, device = job.cluster, job.cluster.device

    def twice(field: str) -> Job:
        return replace(job, cluster=replace(cluster, device=replace(device, **{field: 2 * _rate(field)})))

    def _rate(field: str) -> float:
        rate: float = getattr(device, field)
        return rate

    nic = replace(cluster, nic_gbit_per_gpu=2 * cluster.nic_bytes_per_second * 8 / 1e9)
    host = cluster.host
    return {
        "scale-up": twice("scale_up_bytes_per_second"),
        "HBM": twice("hbm_bytes_per_second"),
        "NIC": replace(job, cluster=nic),
        "full bisection": replace(job, cluster=replace(cluster, pod_oversubscription=1)),
        "launch": replace(job, cluster=replace(cluster, host=replace(host, launch_seconds=0))),
        "loader": replace(
            job,
            cluster=replace(
                cluster, host=replace(host, loader_bytes_per_second=2 * host.loader_bytes_per_second)
            ),
        ),
    }


def _compare(seeds: range) -> int:
    """Without contention a run is a longest path, so no exception is allowed; return the jobs compared."""
    compared = 0
    for job in _jobs(seeds):
        alone = replace(job, contention=False)
        before = _end(alone)
        assert before <= _end(job), f"contention shortens {job}"
        for part, faster in _faster(alone).items():
            assert _end(faster) <= before, f"a faster {part} lengthens {alone}"
        compared += 1
    return compared


def test_faster_parts_and_no_contention_never_lengthen_a_step() -> None:
    assert _compare(JOBS) > 10


@pytest.mark.slow
def test_faster_parts_and_no_contention_never_lengthen_many_steps() -> None:
    assert _compare(range(10_000, 12_000)) > 500
