"""Folding is exact: the trace of the classes, expanded to all ranks, is the trace of all ranks.

Two generators, both directed at what can go wrong: narrow links above the leaves, groups that straddle racks
and pods, uneven nodes, several groups on one link, slow devices and NICs. One draws jobs and plans them; the
other writes programs with more groups and transfers than can be planned yet. Both count how many examples had
a shared link that bound.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import hypothesis
import msgspec
import numpy as np
import pytest
from directed_programs import directed_programs
from hypothesis import given, settings
from hypothesis import strategies as st
from random_jobs import random_job
from random_programs import random_program

from emulator.plan import check, folding, plan
from emulator.plan.folding import fold
from emulator.plan.program import Program, Seats
from emulator.plan.refine import Column
from emulator.report import measure
from emulator.report.audit import audit
from emulator.run import run, run_audited
from emulator.run.executor import Executor
from emulator.run.trace import Trace
from emulator.spec.cluster import Cluster, dgx_h100
from emulator.spec.device import device
from emulator.spec.errors import JobError
from emulator.spec.fabric import Fabric
from emulator.spec.faults import Fault
from emulator.spec.job import DataParallel, Job, Layout, Pipeline
from emulator.spec.model import Model

SEEN: Counter[str] = Counter()


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    """Small jobs on small clusters with much to share."""
    gpus_per_node = draw(st.sampled_from([1, 2, 4]))
    nodes = draw(st.integers(3, 16 // gpus_per_node + 4))
    cluster = Cluster(
        device=device("h100-sxm"),
        gpus_per_node=gpus_per_node,
        nodes=nodes,
        nic_gbit_per_gpu=draw(st.sampled_from([8.0, 80.0, 400.0])),
        nodes_per_rack=draw(st.integers(1, 2)),
        racks_per_pod=draw(st.sampled_from([1, 2, 3])),
        pod_oversubscription=draw(st.sampled_from([100.0, 3.0, 20.0, 1.0])),
        rail_optimised=draw(st.booleans()),
    )
    gpus = cluster.gpus
    pp = draw(st.sampled_from([p for p in (1, 2, 3, 4) if p <= gpus]))
    most = min(gpus // pp, 12)
    dp = most - draw(st.integers(0, max(0, most - 2)))
    sharding = draw(st.sampled_from(["none", "ddp", "fsdp", "fsdp"]))
    model = Model(
        name="tiny",
        layers=draw(st.integers(pp, pp + 2)),
        hidden=draw(st.sampled_from([64, 512])),
        ffn_hidden=512,
        heads=4,
        kv_heads=draw(st.sampled_from([2, 4])),
        vocab=1000,
        tied_embeddings=draw(st.booleans()),
    )
    microbatches = draw(st.integers(1, 3))
    order = draw(st.sampled_from(["tp-cp-pp-dp", "tp-cp-dp-pp", "dp-tp-pp-cp"]))
    fields: dict[str, Any] = {
        "model": model,
        "cluster": cluster,
        "seq_len": draw(st.sampled_from([64, 512])),
        "global_batch": dp * microbatches,
        "layout": Layout(pp=pp, dp_shard=dp, order=order),
        "pipeline": Pipeline("gpipe"),
        "steps": draw(st.sampled_from([1, 1, 2])),
        "data_parallel": DataParallel(
            sharding=sharding,
            ownership=draw(st.sampled_from(["tensor", "layer"])) if sharding == "fsdp" else "tensor",
            bucket_bytes=draw(st.sampled_from([200_000, 26_214_400])),
            optimizer_in_backward=draw(st.booleans()) if sharding != "none" else False,
            keep_last_layer=draw(st.booleans()),
        ),
    }
    fault = st.builds(
        Fault,
        kind=st.sampled_from(["straggler", "nic"]),
        rank=st.integers(0, pp * dp - 1),
        factor=st.sampled_from([0.5, 0.8]),
    )
    fields["faults"] = tuple(draw(st.lists(fault, max_size=2)))
    algorithm = draw(st.sampled_from(["auto", "ring", "hierarchical", "tree"]))
    try:
        return Job(**fields, collective_algorithm=algorithm)
    except JobError:  # hierarchical, on uneven nodes
        return Job(**fields)


def spans_of(trace: Trace, rank: int) -> np.ndarray:
    """Every column of a rank's spans but the class, in order of op and step."""
    rows = trace.class_rows(trace.rank_class(rank))
    columns = trace.columns
    names = [name for name in type(columns).__struct_fields__ if name != "class_index"]
    table = np.stack([getattr(columns, name)[rows] for name in names])
    return table[:, np.lexsort((columns.op_index[rows], columns.step[rows]))]


def shared_links_bind(program: Program) -> bool:
    """Whether some link above the GPUs' own ports was full at some time."""
    executor = Executor(program, 1)
    executor.run()
    pool, names = executor.pool, executor.lowered.resource_names
    return any("rack" in names[r] or "pod" in names[r] for r in pool.ever_contended)


def assert_folding_is_exact(job: Job) -> None:
    folded = plan(job)
    check(folded)
    assert_plays_the_same(plan(job, folded=False), folded)


def assert_plays_the_same(unfolded: Program, folded: Program) -> None:
    """Every rank in one class, bound as its first member is; every span the same, to the picosecond."""
    everyone = run(unfolded)
    trace, recording = run_audited(folded)
    audit(trace, recording)
    ranks = len(unfolded.classes)
    assert sorted(rank for c in folded.classes for rank in c.members) == list(range(ranks))
    for c in folded.classes:
        assert list(c.members) == sorted(c.members)
        assert c == msgspec.structs.replace(unfolded.classes[c.members[0]], members=c.members)
    for rank in range(ranks):
        np.testing.assert_array_equal(spans_of(trace, rank), spans_of(everyone, rank), err_msg=f"rank {rank}")
    SEEN["examples"] += 1
    SEEN["folded"] += len(folded.classes) < ranks
    SEEN["something is slow"] += bool(folded.job.faults)
    SEEN["several classes of a stage"] += len(folded.classes) > len(folded.templates)
    SEEN["a shared link binds"] += shared_links_bind(unfolded)


@settings(max_examples=200, deadline=None, suppress_health_check=list(hypothesis.HealthCheck))
@given(jobs())
def test_folded_is_unfolded(job: Job) -> None:
    assert_folding_is_exact(job)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(20))
def test_folded_is_unfolded_thousands_of_times(part: int) -> None:
    """A hundred and fifty examples in each part, so that a part takes minutes."""

    @hypothesis.seed(part)
    @settings(
        max_examples=150, deadline=None, database=None, suppress_health_check=list(hypothesis.HealthCheck)
    )
    @given(jobs())
    def folds(job: Job) -> None:
        assert_folding_is_exact(job)

    folds()


@pytest.mark.parametrize("first", range(200, 400, 50))
def test_what_cannot_be_planned_yet_folds_too(first: int) -> None:
    """Programs with groups on two axes, rings of transfers, one-way chains, and roots."""
    for seed in range(first, first + 50):
        program = random_program(seed)
        assert_plays_the_same(program, fold(program))


@pytest.mark.parametrize("first", range(1200, 1400, 50))
def test_the_partition_is_equitable_in_columns_too(first: int) -> None:
    """What refinement compares on the way holds in the end: each neighbour, each crowd."""
    for seed in range(first, first + 50):
        program = random_program(seed)
        graph = folding._Graph(program.job, program.templates, program.groups, Seats.of(program.classes))
        graph.refine()
        for family in graph.families:
            for each in family.neighbours:
                if isinstance(each, Column):
                    colours = each.values(family.colours)
                    np.testing.assert_array_equal(colours, colours[family.colours])
                else:
                    assert each.agrees(family.colours)


@pytest.mark.parametrize("number", range(len(directed_programs())))
def test_what_random_programs_seldom_need(number: int) -> None:
    program = directed_programs()[number]
    assert_plays_the_same(program, fold(program))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1000, 5000, 500))
def test_thousands_of_programs(first: int) -> None:
    for seed in range(first, first + 500):
        program = random_program(seed)
        assert_plays_the_same(program, fold(program))


def test_what_the_generator_reaches() -> None:
    print(dict(SEEN))


def test_the_order_in_a_ring_does_not_leak_into_the_classes() -> None:
    """Rings of 16 and 24 ranks over pods with narrow uplinks: all wait for the same, so all are one class."""
    for pods in (2, 3):
        narrow = msgspec.structs.replace(
            dgx_h100(nodes=pods), nodes_per_rack=1, racks_per_pod=1, pod_oversubscription=20.0
        )
        job = Job(
            model=Model(name="tiny", layers=3, hidden=64, ffn_hidden=64, heads=4, kv_heads=4, vocab=100),
            cluster=narrow,
            seq_len=64,
            global_batch=8 * pods,
            layout=Layout(dp_shard=8 * pods),
            collective_algorithm="ring",
        )
        folded = plan(job)
        assert {"pod.up", "pod.down"} <= {Fabric(narrow).kind(link) for link in folded.folding.links.tolist()}
        assert [c.members for c in folded.classes] == [tuple(range(8 * pods))]


def test_the_main_job_is_one_class() -> None:
    job = Job(
        model=Model(name="tiny", layers=3, hidden=256, ffn_hidden=512, heads=4, kv_heads=4, vocab=1000),
        cluster=dgx_h100(nodes=8),
        seq_len=512,
        global_batch=64,
        layout=Layout(dp_shard=64),
    )
    folded = plan(job)
    assert [len(c.members) for c in folded.classes] == [64]
    one, all_ = measure(run(folded)), measure(run(plan(job, folded=False)))
    assert msgspec.structs.replace(one, emulation=None) == msgspec.structs.replace(all_, emulation=None)


@pytest.mark.parametrize("seed", [45, 115, 368, 455])
def test_crowds_are_told_apart_whose_colours_and_tags_change_places(seed: int) -> None:
    """Jobs on which a hash that is symmetric in colour and tag took two crowds for one."""
    assert_folding_is_exact(random_job(seed))
