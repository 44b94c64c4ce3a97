"""The time account adds up and names causes; metrics, memory and hints follow from events."""

from __future__ import annotations

import json
import time
import tomllib
from pathlib import Path

import msgspec
import numpy as np
import pytest
from handmade import US, gpipe, job, timed, trace
from hypothesis import given, settings
from hypothesis import strategies as st

from emulator import simulate
from emulator.plan import plan
from emulator.plan.program import Buffer, Collective, Fixed, Group, HostCopy, Kernel, Load, Op, Transfer
from emulator.report import measure, unmeasured
from emulator.report.account import Account, account, critical_rank
from emulator.report.communication import overlap_fraction, sent_bytes
from emulator.report.hints import mfu_verdict
from emulator.report.memory import TERMS, live_bytes, memory_by_stage
from emulator.run import intervals, run
from emulator.run.trace import Trace
from emulator.spec.parallel import DataParallel, Pipeline
from emulator.version import __version__

GROUP = (Group("dp_shard", (0, 1)),)
GATHER = Collective(kind="all_gather", group="dp_shard", axis="dp_shard", bytes=1000)
K = Fixed(0)


def nonzero(found: Account) -> dict[str, int]:
    assert sum(found.causes().values()) == found.step_ps
    return {cause: ps for cause, ps in found.causes().items() if ps}


def on_rank_0(*ops: object, **fields: object) -> Trace:
    """Two ranks of which rank 1 does nothing."""
    return trace(job(dp=2, **fields), [list(ops), []], groups=GROUP)  # type: ignore[list-item]


def test_kernels_count_by_phase_and_what_others_cost_them_as_contention() -> None:
    found = account(
        on_rank_0(
            timed("f", K, 0, 10, phase="F"),
            timed("r", K, 10, 14, phase="R", alone=3),
            timed("b", K, 14, 30, phase="B", alone=12),
            timed("o", K, 30, 35, phase="O"),
        )
    )
    assert nonzero(found) == {"compute": 22, "recompute": 3, "optimizer": 5, "contention": 5}


def test_waiting_for_bytes_that_move_is_exposed_and_for_members_too() -> None:
    """A gather that starts at 10, waits for its other member until 13, and moves until 20."""
    gather = timed("ag", GATHER, 10, 20, stream="dp", begin=13)
    found = account(on_rank_0(timed("a", K, 0, 12), gather, timed("b", K, 20, 25, waits=(1,))))
    assert nonzero(found) == {"compute": 17, "exposed dp": 8}


def test_communication_that_nobody_waits_for_is_not_exposed() -> None:
    """The second kernel waits for the host, not for the reduction beside it; the end of the step does."""
    reduce = timed("rs", GATHER, 10, 40, stream="dp")
    found = account(on_rank_0(timed("a", K, 0, 10), reduce, timed("b", K, 16, 30, issued=16, ready=10)))
    assert nonzero(found) == {"compute": 24, "launch": 6, "exposed dp": 10}


def test_of_several_transfers_the_one_that_ends_last_counts() -> None:
    recv = Transfer(kind="recv", peer="1", axis="pp", bytes=10, tag="t")
    ops = (
        timed("ag", GATHER, 0, 8, stream="dp"),
        timed("recv", recv, 0, 6, stream="pp"),
        timed("a", K, 8, 9, waits=(0, 1)),
    )
    assert nonzero(account(on_rank_0(*ops))) == {"compute": 1, "exposed dp": 8}


def test_waiting_for_another_stage_is_bubble_and_its_transfer_exposed() -> None:
    recv = Transfer(kind="recv", peer="1", axis="pp", bytes=10, tag="t")
    ops = (timed("recv", recv, 0, 9, begin=7, stream="pp"), timed("a", K, 9, 12, waits=(0,)))
    assert nonzero(account(on_rank_0(*ops))) == {"bubble": 7, "exposed pp": 2, "compute": 3}


def test_loader_copy_launch_and_held_sms_have_names() -> None:
    """Load until 10, copy until 14; a gather issued late (16) that then waits for SMs until 19."""
    ops = (
        timed("load", Load(1), 0, 10, stream="loader"),
        timed("copy", HostCopy(1), 10, 14, stream="copy", waits=(0,)),
        timed("ag", GATHER, 19, 25, stream="dp", ready=14, issued=16, waits=(1,)),
        timed("a", K, 25, 30, waits=(2,)),
    )
    found = nonzero(account(on_rank_0(*ops)))
    assert found == {"loader": 14, "launch": 2, "contention": 3, "exposed dp": 6, "compute": 5}


def test_an_update_on_its_own_stream_counts_where_compute_is_idle() -> None:
    """Half of an update of 8 (6 alone) runs beside compute; the other half counts, in proportion."""
    ops = (timed("b", K, 0, 10, phase="B"), timed("o", K, 6, 14, stream="optimizer", phase="O", alone=6))
    assert nonzero(account(on_rank_0(*ops))) == {"compute": 10, "optimizer": 3, "contention": 1}


def test_idle_without_anything_under_way_is_bubble() -> None:
    ops = (timed("a", K, 0, 10), timed("b", K, 15, 20))
    assert nonzero(account(on_rank_0(*ops))) == {"compute": 15, "bubble": 5}


def test_critical_is_the_rank_that_ends_last_and_of_several_the_lowest() -> None:
    assert critical_rank(trace(job(dp=2), [[timed("a", K, 0, 10)], [timed("a", K, 0, 11)]])) == 1
    assert critical_rank(trace(job(dp=2), [[timed("a", K, 0, 11)], [timed("a", K, 0, 11)]])) == 0


def test_of_several_steps_the_last_counts_and_all_are_listed() -> None:
    one = [[timed("a", K, 0, 10), timed("b", K, 12, 20)]]
    two = [[timed("a", K, 20, 31), timed("b", K, 31, 39)]]
    a_trace = trace(job(), one, two)
    found = account(a_trace)
    assert (found.start_ps, found.end_ps) == (20, 39)
    assert nonzero(found) == {"compute": 19}
    assert nonzero(account(a_trace, step=0)) == {"compute": 18, "bubble": 2}
    assert measure(a_trace).step_seconds_each == [20e-12, 19e-12]


times = st.lists(
    st.tuples(
        st.sampled_from(["compute", "dp", "pp", "loader", "optimizer"]),
        st.integers(0, 9),
        st.integers(0, 5),
        st.integers(0, 5),
        st.integers(0, 9),
        st.lists(st.integers(0, 30), max_size=2),
    ),
    min_size=1,
    max_size=14,
)


@settings(max_examples=150)
@given(times)
def test_the_account_adds_up_for_any_trace(plan: list[tuple[str, int, int, int, int, list[int]]]) -> None:
    """Random ops on five streams, with dependencies, waits of every kind and contention: nothing is lost."""
    works = {
        "compute": K,
        "dp": GATHER,
        "pp": Transfer(kind="recv", peer="1", axis="pp", bytes=1, tag="t"),
        "loader": Load(1),
        "optimizer": K,
    }
    ops = []
    last: dict[str, int] = {}
    for i, (stream, length, late, wait, alone, waits) in enumerate(plan):
        depends = tuple(sorted({w for w in waits if w < i and ops[w].op.stream != stream}))
        ready = max([last.get(stream, 0), *(ops[w].end for w in depends)])
        start = ready + late
        begin = start + (wait if stream in ("dp", "pp") else 0)
        end = begin + length
        last[stream] = end
        phase = "O" if stream == "optimizer" else "F"
        issued = start - late // 2
        ops.append(
            timed(
                f"op{i}",
                works[stream],
                start,
                end,
                stream=stream,
                begin=begin,
                ready=ready,
                issued=issued,
                alone=min(alone, length),
                waits=depends,
                phase=phase,
            )
        )
    a_trace = on_rank_0(*ops)
    found = account(a_trace, rank=0, step=0)
    assert sum(found.causes().values()) == found.step_ps == max(t.end for t in ops)
    assert min(found.causes().values()) >= 0
    kernels = a_trace.where(rank=0, kind="fixed").intervals
    working = found.compute + found.optimizer
    assert working <= intervals.length(kernels) <= working + found.contention


@pytest.mark.parametrize(("p", "m"), [(8, 64), (4, 4), (2, 1), (3, 7)])
def test_both_bubbles_of_gpipe(p: int, m: int) -> None:
    """Bubble over step and over ideal, by name; p = 8, m = 64 gives 9.86 % and 10.94 %."""
    report = measure(run(gpipe(p, m, 1 * US, 2 * US)))
    assert report.step_ps == (m + p - 1) * 3 * US
    assert report.bubble.of_step == (p - 1) / (m + p - 1)
    assert report.bubble.of_ideal == (p - 1) / m
    assert report.bubble.rank_local == (p - 1) / (m + p - 1)
    assert report.time_ps is not None
    assert report.time_ps["bubble"] == (p - 1) * 3 * US
    if (p, m) == (8, 64):
        assert f"{report.bubble.of_ideal:.2%} {report.bubble.of_step:.2%}" == "10.94% 9.86%"


def test_transfers_between_stages_are_exposed_on_the_way_back_only_once() -> None:
    """Stage 0 sees its own last hop as exposed; the hops further down are part of what it waits for."""
    found = account(run(gpipe(4, 4, 1 * US, 2 * US, US // 10)))
    assert found.exposed["pp"] == US // 10
    assert found.bubble == 3 * (3 * US) + 5 * US // 10
    assert found.compute == 12 * US


@pytest.mark.parametrize(
    ("kind", "members", "expected"),
    [
        ("all_reduce", 4, 1500),
        ("all_gather", 4, 750),
        ("reduce_scatter", 4, 750),
        ("all_to_all", 4, 750),
        ("broadcast", 4, 1000),
        ("reduce", 4, 1000),
        ("all_reduce", 1, 0),
        ("broadcast", 1, 0),
    ],
)
def test_ring_bytes(kind: str, members: int, expected: int) -> None:
    """nccl-tests' factors."""
    work = Collective(kind=kind, group="g", axis="dp_shard", bytes=1000)  # type: ignore[arg-type]
    assert sent_bytes(work, members) == expected


def test_communication_by_axis_counts_bytes_time_and_overlap() -> None:
    """Two gathers of 1000 B over two ranks: 500 B each way; 30 of 40 ps under compute."""
    ops = [
        timed("a", K, 0, 20),
        timed("ag0", GATHER, 0, 20, stream="dp"),
        timed("ag1", GATHER, 20, 40, stream="dp"),
        timed("b", K, 30, 50),
    ]
    report = measure(trace(job(dp=2), [ops, ops], groups=GROUP))
    dp = report.communication["dp"]
    assert (dp.bytes_per_gpu, dp.seconds, dp.overlapped_seconds) == (1000, 40e-12, 30e-12)
    assert dp.busbw == 1000 / 40e-12
    assert list(report.communication) == ["dp"]


def test_overlap_is_talk_under_compute_over_talk() -> None:
    """Communication [10, 20) and compute [15, 30) overlap by half; none at all is no number."""
    a_trace = on_rank_0(timed("ag", GATHER, 10, 20, stream="dp"), timed("a", K, 15, 30))
    assert overlap_fraction(a_trace, 0) == 0.5
    assert overlap_fraction(on_rank_0(timed("a", K, 15, 30)), 0) is None


def test_mfu_follows_from_step_time_and_conventions() -> None:
    the_job = job(teaching=False, microbatches=4)
    kernel = Kernel(kind="gemm", unit="tensor", flops=10**9)
    norm = Kernel(kind="norm", flops=10**6)
    report = measure(trace(the_job, [[timed("a", kernel, 0, 3 * US), timed("n", norm, 3 * US, 5 * US)]]))
    tokens, peak = 4 * 64, the_job.cluster.device.peak("bf16")
    assert report.tokens_per_second_per_gpu == pytest.approx(tokens / 5e-6)
    for name, convention in {
        "causal": "causal",
        "full_attention": "full_attention",
        "6nd": "6nd",
        "with_embedding": "causal_with_embedding",
    }.items():
        flops = the_job.model.training_flops_per_token(64, convention) * tokens  # type: ignore[arg-type]
        assert report.mfu_conventions[name] == pytest.approx(flops / 5e-6 / peak)
    assert report.mfu == report.mfu_conventions["causal"]
    assert report.hfu == pytest.approx(1e9 / 5e-6 / peak), "norms do not count"
    assert report.tflops_per_gpu == pytest.approx((report.mfu or 0) * peak / 1e12)


def test_a_teaching_world_has_no_mfu() -> None:
    report = measure(run(gpipe(2, 2, US, US)))
    assert report.mfu is None
    assert report.hfu is None
    assert report.tflops_per_gpu is None
    assert set(report.mfu_conventions.values()) == {None}


def test_without_a_pipeline_there_is_no_bubble_ratio() -> None:
    bubble = measure(on_rank_0(timed("a", K, 0, 5))).bubble
    assert (bubble.of_step, bubble.of_ideal, bubble.rank_local) == (None, None, None)


BUFFERS = (
    Buffer("w", "weights", 100, persistent=True),
    Buffer("x", "activations", 10),
    Buffer("y", "buffers", 7),
)


def test_memory_lives_from_start_to_end_and_frees_come_first() -> None:
    """One buffer is freed at 20 as the other is born: never alive together, so the peak is 110."""
    ops = [
        timed("a", K, 0, 10, allocates=(1,)),
        timed("b", K, 10, 20, frees=(1,)),
        timed("c", K, 20, 30, allocates=(2,), frees=(2,)),
    ]
    a_trace = trace(job(), [ops], buffers=BUFFERS)
    timeline = live_bytes(a_trace, 0, 0)
    assert timeline.times_ps.tolist() == [0, 0, 20, 20, 30]
    assert timeline.bytes.sum(axis=1).tolist() == [100, 110, 100, 107, 100]
    stage = memory_by_stage(a_trace.program, a_trace).stages[0]
    assert (stage.peak, stage.weights, stage.activations, stage.buffers) == (110, 100, 10, 0)


def test_memory_before_the_run_plays_the_plan_in_issue_order() -> None:
    """On paper y may live beside x; in the run its stream was late, so it did not."""
    ops = [
        timed("a", K, 0, 10, allocates=(1,)),
        timed("c", K, 20, 30, stream="side", allocates=(2,), frees=(2,)),
        timed("b", K, 10, 20, frees=(1,)),
    ]
    a_trace = trace(job(), [ops], buffers=BUFFERS)
    assert memory_by_stage(a_trace.program).stages[0].peak == 117
    assert memory_by_stage(a_trace.program, a_trace).stages[0].peak == 110


def test_a_buffer_can_be_allocated_again_and_one_never_freed_stays() -> None:
    ops = [
        timed("a", K, 0, 10, allocates=(1,), frees=(1,)),
        timed("b", K, 10, 20, allocates=(1, 2), frees=(1,)),
        timed("c", K, 20, 30),
    ]
    a_trace = trace(job(), [ops], buffers=BUFFERS)
    assert live_bytes(a_trace, 0, 0).bytes.sum(axis=1).tolist()[-1] == 107
    assert memory_by_stage(a_trace.program, a_trace).stages[0].peak == 117


@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(0, 6), st.integers(1, 50)), min_size=1, max_size=10)
)
def test_the_peak_is_the_largest_sum_of_what_lives(lives: list[tuple[int, int, int]]) -> None:
    """Against a count instant by instant; each buffer lives through one op on a stream of its own."""
    buffers = tuple(Buffer(f"b{i}", "activations", size) for i, (_, _, size) in enumerate(lives))
    ops = [
        timed(f"o{i}", K, at, at + n, stream=f"s{i}", allocates=(i,), frees=(i,))
        for i, (at, n, _) in enumerate(lives)
    ]
    a_trace = trace(job(), [ops], buffers=buffers)
    by_instant = [sum(s for at, n, s in lives if at <= t < at + n) for t in range(30)]
    assert memory_by_stage(a_trace.program, a_trace).stages[0].peak == max(by_instant)


def test_gpipe_keeps_every_microbatch_in_flight() -> None:
    a_trace = run(gpipe(3, 5, US, US))
    for memory in (memory_by_stage(a_trace.program), memory_by_stage(a_trace.program, a_trace)):
        assert [stage.in_flight for stage in memory.stages] == [5, 5, 5]
        assert [stage.activations for stage in memory.stages] == [500, 500, 500]
        assert [stage.weights for stage in memory.stages] == [1000, 1000, 1000]


def test_what_does_not_fit_names_stage_term_and_excess() -> None:
    capacity = job().cluster.device.hbm_bytes
    gib = 2**30
    buffers = (
        Buffer("w", "weights", 30 * gib, persistent=True),
        Buffer("g", "gradients", 30 * gib, persistent=True),
        Buffer("o", "optimizer", 40 * gib, persistent=True),
        Buffer("x", "activations", 5 * gib),
    )
    a_trace = trace(
        job(pp=2, microbatches=1),
        [[timed("a", K, 0, 1)], [timed("a", K, 0, 1, allocates=(3,), frees=(3,))]],
        buffers=buffers,
        stages=(0, 1),
    )
    memory = memory_by_stage(a_trace.program)
    assert memory.over is not None
    assert (memory.over.stage, memory.over.term, memory.over.bytes) == (1, "optimizer", 105 * gib - capacity)
    assert "stage 1 needs 105.00 GiB" in memory.verdict()
    assert (
        "optimizer (40.00 GiB) broke the budget after weights 30.00 GiB + gradients 30.00 GiB"
        in memory.verdict()
    )
    report = unmeasured(a_trace.program, "not run", memory.verdict())
    assert report.step_seconds is None
    assert report.memory == memory
    assert 'sharding = "fsdp"' not in report.hints[0], "it shards already"
    assert "broke the budget" in " ".join(str(report).split())


def test_the_report_is_json_with_every_key_of_the_interface() -> None:
    the_job = job(pp=2, microbatches=2)
    report = measure(run(msgspec.structs.replace(gpipe(2, 2, US, US), job=the_job)))
    table = json.loads(json.dumps(report.to_dict()))
    assert set(table) >= {
        "job", "step_seconds", "step_seconds_each", "tokens_per_second_per_gpu", "tflops_per_gpu", "mfu",
        "hfu", "mfu_conventions", "bubble", "time", "time_ps", "step_ps", "communication", "memory", "faults",
        "emulation", "hints",
    }  # fmt: skip
    assert set(table["bubble"]) == {"of_step", "of_ideal", "rank_local"}
    assert list(table["time"]) == [
        "compute", "recompute", "optimizer", "bubble", "exposed", "contention", "launch", "loader", "fault",
    ]  # fmt: skip
    flat = [v for v in table["time_ps"].values() if isinstance(v, int)] + list(
        table["time_ps"]["exposed"].values()
    )
    assert sum(flat) == table["step_ps"]
    assert set(table["communication"]["pp"]) >= {"bytes_per_gpu", "seconds", "exposed_seconds", "busbw"}
    assert set(table["memory"]) == {"capacity_bytes", "fits", "stages", "over"}
    assert set(table["memory"]["stages"][0]) >= {"stage", *TERMS, "peak", "in_flight"}
    assert set(table["emulation"]) == {"ranks", "classes", "ops", "events", "wall_seconds", "version"}
    assert table["job"]["layout"]["pp"] == 2


def test_wall_time_runs_from_where_the_emulation_began() -> None:
    began = time.perf_counter()
    a_trace = run(gpipe(2, 2, US, US))
    alone, whole = measure(a_trace), measure(a_trace, began - 100)
    assert a_trace.wall_seconds < alone.emulation.wall_seconds < 100 < whole.emulation.wall_seconds
    assert whole.emulation.wall_seconds < 100 + time.perf_counter() - began
    assert unmeasured(a_trace.program, "not run", "", began - 100).emulation.wall_seconds > 100
    text = str(whole)
    e = whole.emulation
    assert f"Emulated 2 ranks in 2 classes: {e.ops} ops, {e.events} events, {e.wall_seconds:.2f} s" in text


def test_the_text_fits_a_terminal_and_names_units() -> None:
    kernel = Kernel(kind="gemm", unit="tensor", flops=10**9)
    text = str(measure(trace(job(teaching=False), [[timed("a", kernel, 0, US)]])))
    assert max(len(line) for line in text.splitlines()) <= 100
    for part in ("MFU", "HFU", "tokens/s per GPU", "TFLOP/s", "GiB", "1 us", "causal attention counted half"):
        assert part in text
    pipeline = str(measure(run(gpipe(8, 64, US, 2 * US))))
    assert max(len(line) for line in pipeline.splitlines()) <= 100
    assert "9.86%  of the step; 10.94% of the ideal" in pipeline


def test_a_result_prints_its_report_and_fills_one_line_of_a_prompt() -> None:
    result = simulate(job(pp=2, microbatches=2))
    assert str(result) == str(result.report)
    assert len(repr(result)) < 200
    assert str(result.trace.end_ps) in repr(result)


def test_hints_name_the_largest_cost_and_its_knob() -> None:
    report = measure(run(gpipe(8, 8, US, 2 * US)))
    assert report.hints[0].startswith("The pipeline bubble takes 46.7% of the step")
    assert "now 8" in report.hints[0]
    assert "layout.pp = 8" in report.hints[0]
    slow = measure(trace(job(teaching=False, precision="fp32"), [[timed("a", Kernel(kind="gemm"), 0, US)]]))
    assert "bf16 has 14.8 times the peak" in slow.hints[0]


def test_hint_on_a_bubble_names_what_would_shrink_it() -> None:
    """Microbatches help neither naive, nor a rank that waits for a slower stage."""
    naive = simulate(job(pp=4, microbatches=3, pipeline=Pipeline("naive"))).report
    assert 'pipeline.schedule = "gpipe" would keep all 3' in naive.hints[0]
    assert "more microbatches" not in naive.hints[0]
    # Stage 1 has 3 layers' work and stage 0 one, so most of rank 0's wait is not GPipe's fill and drain.
    send = [timed(f"F{i}", K, i * 10, i * 10 + 10) for i in range(4)]
    slow = [timed(f"F{i}", K, 10 + i * 30, 40 + i * 30) for i in range(4)]
    back = timed("B", K, 130, 140, phase="B")
    report = measure(trace(job(pp=2, microbatches=4), [[*send, back], slow], stages=(0, 1)))
    assert report.hints[0] == (
        "The pipeline bubble takes 64.3% of the step; it waits for stage 1, whose kernels take 85.7% of the "
        "step against 35.7% on this rank: fewer layers there (layout.stage_layers) or fewer stages "
        "(layout.pp = 2) would even that out."
    )


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"micro_batch": 4}, "a smaller micro_batch (now 4) needs fewer activations"),
        ({"micro_batch": 1}, "a shorter seq_len (now 64) needs fewer activations"),
        (
            {"pp": 2, "microbatches": 8},
            "a shorter seq_len (now 64) or a smaller global_batch (now 8 microbatches in flight) needs fewer",
        ),
    ],
)
def test_hint_on_activations_that_do_not_fit_asks_for_what_can_be_done(
    fields: dict[str, int], says: str
) -> None:
    stages = fields.get("pp", 1)
    the_job = job(**({"global_batch": 4} if "micro_batch" in fields else {}) | fields)  # type: ignore[arg-type]
    ranks = [[timed("a", K, 0, 1, allocates=(0,), frees=(0,))] for _ in range(stages)]
    program = trace(
        the_job, ranks, buffers=(Buffer("x", "activations", 200 * 2**30),), stages=range(stages)
    ).program
    assert says in unmeasured(program, "not run", "").hints[0]


@pytest.mark.parametrize(
    ("mfu", "word"), [(0.43, "excellent"), (0.35, "good"), (0.25, "below good"), (0.08, "broken")]
)
def test_verdict_on_an_mfu(mfu: float, word: str) -> None:
    assert word in mfu_verdict(mfu)


def test_a_join_takes_no_time_and_hides_nothing() -> None:
    """An op without work passes waits on: the kernel behind it waits for the gather before it."""
    ops = (
        timed("ag", GATHER, 0, 10, stream="dp"),
        timed("join", None, 10, 10, waits=(0,)),
        timed("a", K, 10, 20),
    )
    assert nonzero(account(on_rank_0(*ops))) == {"compute": 10, "exposed dp": 10}


def test_version_is_that_of_the_package() -> None:
    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["project"]["version"] == __version__


def test_ops_are_looked_up_by_row() -> None:
    a_trace = run(gpipe(2, 1, US, US))
    assert isinstance(a_trace.op(0), Op)
    assert np.array_equal(a_trace.op_row[:3], [0, 1, 2])


@pytest.mark.parametrize("sharding", ["fsdp", "ddp", "none"])
@pytest.mark.parametrize("pp", [1, 2])
def test_a_planned_step_adds_up_on_every_rank(sharding: str, pp: int) -> None:
    """Real kernels, launches, loader and collectives: compute is what the kernels take alone."""
    fields = {"pipeline": Pipeline("gpipe"), "data_parallel": DataParallel(sharding=sharding)}  # type: ignore[arg-type]
    program = plan(job(pp=pp, dp=4, microbatches=4, teaching=False, steps=2, **fields))
    a_trace = run(program)
    for rank in a_trace.ranks:
        for step in (0, 1):
            found = account(a_trace, rank, step)
            assert sum(found.causes().values()) == found.step_ps
            kernels = a_trace.where(rank=rank, stream="compute", step=step)
            alone = int(a_trace.columns.alone_ps[kernels.rows].sum())
            kernel = a_trace.index.of_work(lambda work: isinstance(work, Kernel))
            beside = kernel & ~a_trace.index.matches("stream", "compute")
            aside = a_trace.where(rank=rank, step=step).only(beside).busy_ps
            assert alone <= found.compute + found.optimizer <= alone + aside
    report = measure(a_trace)
    assert report.mfu is not None
    assert report.hfu is not None
    assert 0 < report.mfu < report.hfu < 1
    memory = memory_by_stage(program)
    for planned, seen in zip(memory.stages, report.memory.stages, strict=True):
        assert planned.weights == seen.weights
        assert planned.in_flight == seen.in_flight
