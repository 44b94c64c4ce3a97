"""Answers known beforehand, to the picosecond: pipelines, DDP, FSDP, contention."""

from __future__ import annotations

from fractions import Fraction
from itertools import accumulate

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emulator.plan import check, plan
from emulator.plan.program import COMPUTE, Collective, Kernel, Program
from emulator.report import measure
from emulator.report.audit import audit
from emulator.run import run, run_audited
from emulator.run.lower import lower
from emulator.run.trace import Trace
from emulator.spec.cluster import Host, dgx_h100
from emulator.spec.device import device
from emulator.spec.job import DataParallel, FixedTimes, Job, Layout, Pipeline
from emulator.spec.model import Model, model
from emulator.spec.units import to_ps

TINY = Model(name="tiny", layers=8, hidden=256, ffn_hidden=512, heads=4, kv_heads=2, vocab=1000)


def play(job: Job, steps: int | None = None) -> tuple[Program, Trace]:
    """Plan, check, run and audit a job."""
    program = plan(job)
    check(program)
    trace, recording = run_audited(program, steps)
    audit(trace, recording)
    return program, trace


def teaching(stages: int, microbatches: int, schedule: str, forward: float, backward: float) -> Job:
    """A pipeline whose passes take these seconds on every stage."""
    return Job(
        model=TINY,
        cluster=dgx_h100(nodes=1),
        seq_len=64,
        global_batch=microbatches,
        layout=Layout(pp=stages),
        pipeline=Pipeline(schedule),
        fixed_times=FixedTimes(forward=forward, backward=backward),
    )


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 8), st.integers(1, 32), st.integers(1, 5), st.integers(1, 9))
def test_gpipe_takes_m_plus_p_minus_1_slots(p: int, m: int, f: int, b: int) -> None:
    """Eq. 12.10: forward and backward sweeps take m + p - 1 slots each, for any times of a slot."""
    _, trace = play(teaching(p, m, "gpipe", f * 1e-3, b * 1e-3))
    slot = to_ps(f * 1e-3) + to_ps(b * 1e-3)
    assert trace.end_ps == (m + p - 1) * slot
    busy = sum(trace.where(rank=r, stream=COMPUTE).busy_ps for r in range(p))
    assert Fraction(busy, p * trace.end_ps) == Fraction(m, m + p - 1)
    if p > 1:
        assert measure(trace).bubble.of_step == pytest.approx((p - 1) / (m + p - 1), abs=1e-12)


def test_gpipe_for_every_depth_and_number_of_microbatches() -> None:
    """All of p <= 8 and m <= 32, one by one."""
    for p in range(1, 9):
        for m in range(1, 33):
            end = run(plan(teaching(p, m, "gpipe", 1.0, 2.0))).end_ps
            assert end == (m + p - 1) * 3 * 10**12, f"{p} stages, {m} microbatches"


def test_gpipe_4_by_4_uses_four_sevenths() -> None:
    _, trace = play(teaching(4, 4, "gpipe", 1.0, 1.0))
    busy = sum(trace.where(rank=r, stream=COMPUTE).busy_ps for r in range(4))
    assert Fraction(busy, 4 * trace.end_ps) == Fraction(4, 7)


@pytest.mark.parametrize("microbatches", [1, 4])
def test_a_naive_pipeline_of_8_uses_one_eighth(microbatches: int) -> None:
    """One microbatch in flight: at every instant exactly one stage works."""
    _, trace = play(teaching(8, microbatches, "naive", 1.0, 2.0))
    busy = sum(trace.where(rank=r, stream=COMPUTE).busy_ps for r in range(8))
    assert Fraction(busy, 8 * trace.end_ps) == Fraction(1, 8)


@pytest.mark.parametrize(
    ("m", "of_step", "of_ideal"), [(32, 7 / 39, 7 / 32), (8, 7 / 15, 7 / 8), (64, 7 / 71, 7 / 64)]
)
def test_both_bubble_ratios_have_their_names(m: int, of_step: float, of_ideal: float) -> None:
    """8 stages, 64 microbatches: 9.86 % of the step, 10.94 % of the ideal; a reader must know which."""
    _, trace = play(teaching(8, m, "gpipe", 1.0, 1.0))
    bubble = measure(trace).bubble
    assert bubble.of_step == pytest.approx(of_step, abs=1e-12)
    assert bubble.of_ideal == pytest.approx(of_ideal, abs=1e-12)


def ddp_job(nic_gbit: float, **data_parallel: object) -> Job:
    """16 ranks on two nodes, so that the network's rate decides what hides."""
    return Job(
        model=msgspec.structs.replace(TINY, hidden=2048, ffn_hidden=8192, heads=16, kv_heads=16, vocab=32000),
        cluster=msgspec.structs.replace(dgx_h100(nodes=2), nic_gbit_per_gpu=nic_gbit),
        seq_len=2048,
        global_batch=32,
        micro_batch=2,
        layout=Layout(dp_replicate=16),
        data_parallel=DataParallel(sharding="ddp", **data_parallel),  # type: ignore[arg-type]
        contention=False,
    )


@pytest.mark.parametrize(("nic_gbit", "compute_bound"), [(3200.0, True), (10.0, False)])
def test_ddp_ends_where_its_buckets_say(nic_gbit: float, compute_bound: bool) -> None:
    """The last bucket ends at max over k of (r_k + sum of c_j for j >= k), exactly.

    In the compute-bound regime only the last ones are left when backward ends, in the communication-bound one
    they have queued from an early k on.
    """
    program, trace = play(ddp_job(nic_gbit))
    ops = program.templates[0].ops
    op_of = {op.name: op for op in ops}
    ended = {span.name: span.end_ps for span in trace.where(rank=0)}
    buckets = list(trace.where(rank=0, stream="dp"))
    assert len(buckets) > 10
    ready = [max(b.issued_ps, *(ended[ops[w].name] for w in op_of[b.name].waits)) for b in buckets]
    rest = list(accumulate(b.alone_ps for b in reversed(buckets)))[::-1]
    ends = [r + c for r, c in zip(ready, rest, strict=True)]
    assert buckets[-1].end_ps == max(ends)
    binding = ends.index(max(ends))
    assert binding >= len(buckets) - 2 if compute_bound else binding < len(buckets) // 2
    assert sorted(ready) == ready


def communicated(program: Program, kind: str) -> int:
    """Sum of the buffer sizes of a kind of collective on rank 0."""
    ops = program.templates[program.classes[0].template].ops
    return sum(op.work.bytes for op in ops if isinstance(op.work, Collective) and op.work.kind == kind)


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("reduce", ["bf16", "fp32"])
def test_fsdp_moves_weights_twice_and_gradients_once(keep: bool, reduce: str) -> None:
    """Bytes are exact; a kept last unit is unsharded once only."""
    job = Job(
        model=TINY,
        cluster=dgx_h100(nodes=1),
        seq_len=256,
        global_batch=8,
        layout=Layout(dp_shard=8),
        data_parallel=DataParallel(sharding="fsdp", keep_last_layer=keep, reduce_precision=reduce),  # type: ignore[arg-type]
    )
    program, trace = play(job)
    total, last = TINY.parameters, TINY.head_parameters
    gathered = 2 * 2 * total - (2 * last if keep else 0)
    assert communicated(program, "all_gather") == gathered
    each = 4 if reduce == "fp32" else 2
    assert communicated(program, "reduce_scatter") == each * total
    wire = measure(trace).communication["dp"].bytes_per_gpu
    assert wire == (gathered + each * total) * 7 // 8


def seven_and_a_half_billion() -> Model:
    """A GPT of about the size of ZeRO's example; its exact count is used below."""
    return Model(
        name="zero-7.5b", layers=36, hidden=4096, ffn_hidden=16384, heads=32, kv_heads=32, vocab=50257,
        activation="gelu", norm="layernorm", rotary=False, learned_positions=1024,
    )  # fmt: skip


@pytest.mark.parametrize(("sharding", "per_parameter"), [("ddp", 16), ("fsdp", 16 / 64)])
def test_state_of_zeros_table(sharding: str, per_parameter: float) -> None:
    """ZeRO paper's table (1910.02054): 64 ranks, 16 bytes a parameter, 7.5 B parameters: 120 GB or 1.9 GB."""
    a_model = seven_and_a_half_billion()
    layout = Layout(dp_replicate=64) if sharding == "ddp" else Layout(dp_shard=64)
    job = Job(
        model=a_model, cluster=dgx_h100(nodes=8), seq_len=1024, global_batch=64, layout=layout,
        data_parallel=DataParallel(sharding=sharding),  # type: ignore[arg-type]
    )  # fmt: skip
    program = plan(job)
    terms = ("weights", "gradients", "optimizer")
    state = sum(b.bytes for b in program.templates[0].buffers if b.persistent and b.term in terms)
    assert state == pytest.approx(per_parameter * a_model.parameters, rel=1e-4)
    of_7_5_billion = state / a_model.parameters * 7.5e9
    assert of_7_5_billion == pytest.approx(120e9 if sharding == "ddp" else 1.875e9, rel=1e-4)


def longest_path(program: Program) -> int:
    """End of the last op when everything takes its time alone, from the graph and without the engine.

    Nodes are the ops; those of one meeting begin together.
    """
    lowered = lower(program)
    end: dict[tuple[int, int], int] = {}
    parties: dict[int, list[tuple[int, int]]] = {}
    todo: dict[tuple[int, int], tuple[tuple[int, ...], int | None, int, int, int]] = {}
    for c, streams in enumerate(lowered.streams):
        for stream in streams.values():
            before: int | None = None
            for op in stream.planned():
                duration = op.activity.alone_ps if op.activity else 0
                todo[c, op.op_index] = (op.waits, before, max(0, op.issue_ps), duration, op.meeting)
                if op.meeting >= 0:
                    parties.setdefault(op.meeting, []).append((c, op.op_index))
                before = op.op_index
    waiting = list(todo)
    while waiting:
        later = []
        start: dict[tuple[int, int], int] = {}
        for key in waiting:
            waits, before, issued, _, _ = todo[key]
            needs = [(key[0], w) for w in (*waits, *([] if before is None else [before]))]
            if all(need in end for need in needs):
                start[key] = max([issued, *(end[need] for need in needs)])
        for key in waiting:
            *_, duration, meeting = todo[key]
            together = parties.get(meeting, [key]) if meeting >= 0 else [key]
            if all(k in start for k in together):
                begin = max(start[k] for k in together)
                plan_of = lowered.meetings[meeting].activity if meeting >= 0 else None
                end[key] = begin + (plan_of.alone_ps if plan_of else duration)
            else:
                later.append(key)
        assert len(later) < len(waiting), "the graph has a cycle"
        waiting = later
    return max(end.values())


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from(["none", "ddp", "fsdp"]),
    st.sampled_from(["tensor", "layer"]),
    st.booleans(),
    st.booleans(),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([(1, 1), (2, 2), (1, 3)]),
)
def test_without_contention_a_step_is_its_longest_path(
    sharding: str, ownership: str, keep: bool, in_backward: bool, dp: int, pipeline: tuple[int, int]
) -> None:
    """The engine agrees with a longest path found without it, to the picosecond.

    With contention off everything takes its time alone, so nothing else may matter than who waits for whom.
    """
    p, m = pipeline
    job = Job(
        model=msgspec.structs.replace(TINY, layers=3),
        cluster=dgx_h100(nodes=1),
        seq_len=128,
        global_batch=m * dp,
        layout=Layout(pp=p, dp_shard=dp),
        pipeline=Pipeline("gpipe"),
        data_parallel=DataParallel(
            sharding=sharding,  # type: ignore[arg-type]
            ownership=ownership if sharding == "fsdp" else "tensor",  # type: ignore[arg-type]
            keep_last_layer=keep,
            optimizer_in_backward=in_backward and sharding != "none",
        ),
        contention=False,
    )
    program, trace = play(job)
    assert trace.end_ps == longest_path(program)


def overlapped(contention: bool) -> tuple[Trace, Program]:
    """An FSDP step whose GEMMs run beside gathers and reductions."""
    job = Job(
        model=msgspec.structs.replace(model("llama3-8b"), layers=4),
        cluster=dgx_h100(nodes=2),
        seq_len=8192,
        global_batch=16,
        layout=Layout(dp_shard=16),
        contention=contention,
    )
    program, trace = play(job)
    return trace, program


def test_a_gemm_beside_a_collective_loses_the_sms_it_holds() -> None:
    """A compute-bound GEMM slows by SMs / (SMs - held), to the picosecond."""
    trace, program = overlapped(contention=True)
    lowered = lower(program)
    holds = {op.op_index: op.hold for s in lowered.streams[0].values() for op in s.planned() if op.hold}
    ops = program.templates[0].ops
    comm = [s for s in trace.where(rank=0) if s.kind in ("all_gather", "reduce_scatter")]
    hold_of = {ops[i].name: held // 10**6 for i, held in holds.items()}
    sms = device("h100-sxm").sms
    seen = set()
    for span in trace.where(rank=0, stream=COMPUTE, kind="gemm"):
        beside = [c for c in comm if c.overlaps(span)]
        throughout = [c for c in beside if c.start_ps <= span.start_ps and c.end_ps >= span.end_ps]
        if len(beside) == len(throughout) == 1 and span.name.startswith("l"):
            held = hold_of[beside[0].name]
            work = ops[[op.name for op in ops].index(span.name)].work
            assert isinstance(work, Kernel)
            if lowered_sm(program, work) == sms * 10**6:
                slowed = Fraction(span.end_ps - span.begin_ps, span.alone_ps)
                assert abs(slowed - Fraction(sms, sms - held)) * span.alone_ps <= 1
                seen.add(held)
    assert seen, "no GEMM ran wholly beside one collective"


def lowered_sm(program: Program, kernel: Kernel) -> int:
    from emulator.run.cost import kernel_cost

    return kernel_cost(kernel, program.job.cluster.device).sm


def test_without_contention_nothing_is_slowed() -> None:
    """The account shows overlap's cost as contention; where nothing is shared it vanishes."""
    slowed, _ = overlapped(contention=True)
    free, _ = overlapped(contention=False)
    assert measure(slowed).time_ps["contention"] > 0
    assert measure(free).time_ps["contention"] == 0
    assert free.end_ps < slowed.end_ps


def test_hosts_without_cost() -> None:
    """A host that launches for free never appears in the account."""
    job = Job(
        model=TINY,
        cluster=msgspec.structs.replace(dgx_h100(nodes=1), host=Host(launch_seconds=0.0)),
        seq_len=128,
        global_batch=1,
        layout=Layout(),
    )
    _, trace = play(job)
    assert measure(trace).time_ps["launch"] == 0
