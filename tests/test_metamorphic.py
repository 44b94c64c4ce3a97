"""What must not happen when one thing of a job changes: faster parts never make a step longer."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from msgspec.structs import replace
from random_jobs import random_job

from emulator.plan import plan
from emulator.plan.collectives import ALGORITHMS
from emulator.plan.nccl import P2P_LL_BYTES
from emulator.plan.program import CollectiveKind
from emulator.run import run
from emulator.run.network import alone_ps, collective_wire, transfer_wire
from emulator.spec.cluster import Cluster
from emulator.spec.device import DEVICES
from emulator.spec.fabric import Fabric
from emulator.spec.job import Algorithm, Job

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
SIZES = sorted({2**power + more for power in range(1, 34) for more in (-1, 0, 1, 2 ** (power - 1))})
"""Both sides of every power of two, where tables and thresholds step, and one size between."""


def _never_falls(times: list[int]) -> bool:
    return all(0 < few <= many for few, many in itertools.pairwise(times))


@pytest.mark.parametrize("algorithm", ["auto", "ring", "tree"])
@pytest.mark.parametrize("kind", [kind for kind in ALGORITHMS if kind != "all_to_all"])
def test_more_bytes_never_arrive_sooner(kind: CollectiveKind, algorithm: Algorithm) -> None:
    for cluster, ranks in FABRICS:
        fabric = Fabric(cluster)
        wires = [collective_wire(kind, range(ranks), size, algorithm, fabric) for size in SIZES]
        assert _never_falls([alone_ps(wire, fabric.capacity) for wire in wires])


@pytest.mark.parametrize("kind", ["transfer", "all_to_all"])
def test_only_the_end_of_ll_may_make_more_bytes_arrive_sooner(kind: str) -> None:
    """Past NCCL's fixed threshold a message no longer takes LL's twofold bytes; slow links feel it."""
    for cluster, ranks in FABRICS:
        fabric = Fabric(cluster)
        last = P2P_LL_BYTES * (ranks if kind == "all_to_all" else 1)
        for sizes in ([s for s in SIZES if s <= last], [s for s in SIZES if s > last]):
            wires = [
                transfer_wire(0, ranks - 1, size, fabric)
                if kind == "transfer"
                else collective_wire("all_to_all", range(ranks), size, "auto", fabric)
                for size in sizes
            ]
            assert _never_falls([alone_ps(wire, fabric.capacity) for wire in wires])


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
