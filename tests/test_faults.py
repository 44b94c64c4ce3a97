"""Parts that are slow from the beginning: what a straggler or a degraded NIC costs, and whom."""

from __future__ import annotations

from fractions import Fraction

import msgspec
import pytest

from emulator.plan import plan
from emulator.plan.program import COMPUTE, Program
from emulator.report import measure
from emulator.report.account import account
from emulator.report.audit import audit
from emulator.run import run, run_audited
from emulator.run.cost import device_capacities, kernel_cost
from emulator.run.trace import Trace
from emulator.spec.cluster import dgx_h100, llama3_24k
from emulator.spec.faults import Fault
from emulator.spec.job import DataParallel, FixedTimes, Job, Layout, Pipeline
from emulator.spec.model import Model

SLOW = Fault(kind="straggler", rank=3, factor=0.8)
SMALL = Model(name="small", layers=3, hidden=4096, ffn_hidden=14336, heads=32, kv_heads=8, vocab=32000)


def job(*faults: Fault, ranks: int = 8, **fields: object) -> Job:
    base = {
        "model": SMALL, "cluster": dgx_h100(nodes=-(-ranks // 8)), "seq_len": 4096, "global_batch": ranks,
        "layout": Layout(dp_shard=ranks), "faults": faults,
    }  # fmt: skip
    return Job(**{**base, **fields})  # type: ignore[arg-type]


def play(a_job: Job) -> tuple[Program, Trace]:
    program = plan(a_job)
    trace, recording = run_audited(program)
    audit(trace, recording)
    return program, trace


def test_a_slow_clock_stretches_what_the_clock_binds() -> None:
    """Compute-bound kernels take 1/0.8 as long, bandwidth-bound ones as long as ever, to the picosecond."""
    program, trace = play(job(SLOW, contention=False))
    device = program.job.cluster.device
    sms = device_capacities(device).sm
    seen = set()
    works = {op.name: op.work for op in program.templates[0].ops}
    for span in trace.where(rank=3, stream=COMPUTE):
        cost = kernel_cost(works[span.name], device)  # type: ignore[arg-type]
        bound_by_clock = cost.sm == sms
        expected = Fraction(cost.duration_ps) / (Fraction(4, 5) if bound_by_clock else 1)
        if bound_by_clock or cost.sm < sms * 0.7:
            assert abs(span.end_ps - span.begin_ps - expected) <= 1
            seen.add((span.kind, bound_by_clock))
    assert {("gemm", True), ("elementwise", False)} <= seen


def test_one_straggler_is_a_class_of_its_own_and_sets_the_pace() -> None:
    program, trace = play(job(SLOW))
    assert [c.members for c in program.classes] == [(0, 1, 2, 4, 5, 6, 7), (3,)]
    sound = run(plan(job()))
    slowdown = trace.end_ps / sound.end_ps
    assert 1.15 < slowdown < 1 / 0.8
    assert run(plan(job(SLOW), folded=False)).end_ps == trace.end_ps


def test_the_culprit_shows_although_all_take_the_same_time() -> None:
    """Every rank's step is as long; only the straggler's account has a fault, the others wait for it."""
    _, trace = play(job(SLOW))
    mine, other = account(trace, rank=3), account(trace, rank=0)
    assert mine.step_ps == other.step_ps == trace.end_ps
    assert mine.fault > 0.1 * mine.step_ps
    assert other.fault == 0
    assert other.exposed["dp"] > mine.exposed["dp"]
    for each in (mine, other):
        flat = [v for k, v in each.time_ps().items() if k != "exposed"]
        assert sum(flat) + sum(each.exposed.values()) == each.step_ps  # type: ignore[arg-type]
    report = measure(trace)
    assert report.faults == [{"kind": "straggler", "rank": 3, "factor": 0.8}]
    assert any("rank 3" in hint and "80%" in hint for hint in report.hints)


@pytest.mark.parametrize("kernels", ["flash2", "flash_triton"])
def test_what_a_sound_device_needs_does_not_depend_on_the_fault(kernels: str) -> None:
    """Without contention the straggler's account, its fault apart, has the kernel time of a sound rank."""
    _, trace = play(job(SLOW, attention=kernels, contention=False))
    mine, other = account(trace, rank=3), account(trace, rank=0)
    assert mine.fault > 0
    for cause in ("compute", "recompute", "optimizer"):
        assert abs(getattr(mine, cause) - getattr(other, cause)) <= len(trace), cause


def test_a_degraded_nic_slows_its_group_but_no_kernel() -> None:
    tight = msgspec.structs.replace(dgx_h100(nodes=2), nic_gbit_per_gpu=50.0)
    fields = {"ranks": 16, "cluster": tight, "seq_len": 512}
    _, sound = play(job(**fields))  # type: ignore[arg-type]
    program, trace = play(job(Fault(kind="nic", rank=3, factor=0.5), **fields))  # type: ignore[arg-type]
    assert 1.5 < trace.end_ps / sound.end_ps < 2
    assert len(program.classes) == 1, "all members of the group wait alike"
    assert account(trace).fault == 0


@pytest.mark.parametrize("microbatches", [1, 8])
def test_a_slow_stage_costs_its_delay_for_every_microbatch(microbatches: int) -> None:
    """GPipe: each sweep takes the three sound stages once and the slow one m times."""
    world = job(
        Fault(kind="straggler", rank=1, factor=0.8),
        model=msgspec.structs.replace(SMALL, layers=4),
        layout=Layout(pp=4),
        pipeline=Pipeline("gpipe"),
        global_batch=microbatches,
        fixed_times=FixedTimes(forward=1.0, backward=1.0),
    )
    program, trace = play(world)
    assert trace.end_ps == 2 * (3 + microbatches * Fraction(5, 4)) * 10**12
    assert len(program.classes) == 4
    assert account(trace, rank=1).fault == 2 * microbatches * 10**12 // 4


def stages_of_four(ranks: int, sharding: str, *faults: Fault) -> Job:
    """Four stages of a layer each on the Llama 3 cluster, as large as it must be."""
    axis = "dp_shard" if sharding == "fsdp" else "dp_replicate"
    return job(
        *faults,
        ranks=ranks,
        model=msgspec.structs.replace(SMALL, layers=4),
        cluster=llama3_24k(nodes=ranks // 8),
        seq_len=8192,
        layout=Layout(pp=4, **{axis: ranks // 4}),
        pipeline=Pipeline("gpipe"),
        data_parallel=DataParallel(sharding=sharding, reshard_after_forward=False),  # type: ignore[arg-type]
    )


def cost_of_a_straggler(ranks: int, sharding: str, folded: bool) -> tuple[int, float]:
    """What one straggler adds to the step, and the step with it over the step without."""
    slow = plan(stages_of_four(ranks, sharding, Fault(kind="straggler", rank=ranks - 5, factor=0.8)), folded)
    sound = plan(stages_of_four(ranks, sharding), folded)
    with_it, without = run(slow), run(sound).end_ps
    if folded:
        # Its own pipeline's four ranks are apart from those of all the other pipelines.
        assert measure(with_it).emulation.classes == 8
        assert with_it.members(ranks - 5) == (ranks - 5,)
        assert len(with_it.members(3)) == ranks // 4 - 1
    return with_it.end_ps - without, with_it.end_ps / without


@pytest.mark.parametrize("sharding", ["fsdp", "ddp"])
def test_one_straggler_costs_the_same_at_any_scale(sharding: str) -> None:
    """One among 16,384 and one among 131,072 ranks cost what one of 64 does, each of these played alone.

    The delay is the same but for what the longer rings' latencies leave of overlap. So is the slowdown with
    ddp; with fsdp the step itself grows by these latencies.
    """
    delay, slowdown = cost_of_a_straggler(64, sharding, folded=False)
    assert 1.1 < slowdown < 1 / 0.8
    assert cost_of_a_straggler(64, sharding, folded=True) == (delay, slowdown)
    for ranks in (16_384, 131_072):
        far_delay, far_slowdown = cost_of_a_straggler(ranks, sharding, folded=True)
        assert far_delay == pytest.approx(delay, rel=0.005)
        if sharding == "ddp":
            assert far_slowdown == pytest.approx(slowdown, rel=0.002)
