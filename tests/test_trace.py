"""Selections, spans and interval algebra of a trace."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
from handmade import COLUMNS, US, gpipe, job, timed, trace
from hypothesis import given
from hypothesis import strategies as st

from emulator.plan import plan
from emulator.plan.program import (
    COMPUTE,
    Collective,
    Fixed,
    Group,
    HostCopy,
    Kernel,
    Load,
    Op,
    Program,
    RankClass,
    Template,
    Transfer,
)
from emulator.report import measure
from emulator.report.audit import AuditError, audit
from emulator.report.export import save_trace
from emulator.report.memory import memory_by_stage
from emulator.run import intervals, run, run_audited
from emulator.run.op_index import axis_of, kind_of
from emulator.run.trace import Outcome, Trace
from emulator.spec.parallel import DataParallel

F, B = 1 * US, 2 * US


@pytest.fixture(scope="module")
def pipeline() -> Trace:
    return run(gpipe(4, 4, F, B, US // 10))


def test_where_reads_as_in_the_design(pipeline: Trace) -> None:
    assert pipeline.where(rank=3, stream="compute").names[:5] == ["3F0", "3F1", "3F2", "3F3", "3B0"]
    assert pipeline.end_ps == 4 * F + 3 * (F + US // 10) + 4 * B + 3 * (B + US // 10)


def test_where_filters_by_every_attribute(pipeline: Trace) -> None:
    assert pipeline.where(rank=2, phase="B", microbatch=1).one().name == "2B1"
    assert pipeline.where(stage=1, kind="fixed").names == [f"1{p}{i}" for p in "FB" for i in range(4)]
    assert len(pipeline.where(kind="recv", axis="pp")) == 24
    assert len(pipeline.where(kind="recv", axis="dp")) == 0
    assert len(pipeline.where(step=1)) == 0
    assert len(pipeline.where(layer=-1)) == len(pipeline)


def test_one_refuses_none_and_many(pipeline: Trace) -> None:
    with pytest.raises(ValueError, match="found <0 spans"):
        pipeline.where(name="9F9").one()
    with pytest.raises(ValueError, match="found <4 spans: 0F0"):
        pipeline.where(microbatch=0, phase="F").one()


def test_spans_tell_order_and_overlap(pipeline: Trace) -> None:
    first, second = pipeline.where(name="0F0").one(), pipeline.where(name="1F0").one()
    assert first.precedes(second)
    assert not second.precedes(first)
    assert pipeline.where(name="0F1").one().overlaps(pipeline.where(name="1F0").one())
    assert not first.overlaps(pipeline.where(name="0F1").one())
    assert (first.rank, first.stage, first.kind, first.duration_ps) == (0, 0, "fixed", F)


def test_busy_and_gaps_of_a_selection(pipeline: Trace) -> None:
    compute = pipeline.where(rank=0, stream=COMPUTE)
    assert compute.busy_ps == 4 * (F + B)
    assert compute.gaps() == [(4 * F, pipeline.end_ps - 4 * B)]
    assert (compute.start_ps, compute.end_ps) == (0, pipeline.end_ps)
    nothing = pipeline.where(name="no such op")
    assert nothing.busy_ps == 0
    assert nothing.gaps() == []
    with pytest.raises(ValueError, match="no spans match"):
        _ = nothing.end_ps


def test_a_rank_is_answered_by_its_class() -> None:
    template = Template("all", 0, (Op(name="k", stream=COMPUTE, work=Fixed(5)),), ())
    program = Program(
        job(dp=4), (template,), (RankClass((0, 2), 0, {}, {}), RankClass((1, 3), 0, {}, {})), ()
    )
    zero = {name: [0, 0] for name in ("step", "op_index", "issued_ps", "ready_ps", "start_ps", "begin_ps")}
    a_trace = Trace(program, class_index=[0, 1], end_ps=[5, 7], alone_ps=[5, 5], **zero)
    assert a_trace.where(rank=2).one().rank == 2
    assert [a_trace.where(rank=r).one().end_ps for r in range(4)] == [5, 7, 5, 7]
    assert [a_trace.members(rank) for rank in range(4)] == [(0, 2), (1, 3)] * 2
    assert [span.rank for span in a_trace.where()] == [0, 1]
    assert a_trace.ranks == (0, 1, 2, 3)
    with pytest.raises(ValueError, match=r"rank 4 is not in the program: it has ranks 0\.\.3"):
        a_trace.where(rank=4)
    for rank in (4, -1):
        with pytest.raises(ValueError, match=f"rank {rank} is not in the program"):
            a_trace.members(rank)


@pytest.mark.parametrize("sharding", ["fsdp", "ddp"])
def test_every_filter_finds_what_the_ops_say(sharding: str) -> None:
    """On a planned program, whose names are patterns and whose stages share bodies."""
    data = DataParallel(sharding=sharding)  # type: ignore[arg-type]
    program = plan(job(pp=3, dp=2, microbatches=2, teaching=False, data_parallel=data))
    a_trace = run(program)
    ops = [op for template in program.templates for op in template.ops]
    assert len(a_trace.index) == len(ops)
    for name in ("name", "stream", "phase", "stage", "microbatch", "layer"):
        values = [getattr(op, name) for op in ops]
        for value in dict.fromkeys(values):
            found = a_trace.index.matches(name, value).tolist()
            assert found == [each == value for each in values], (name, value)
    for name, of in (("kind", kind_of), ("axis", axis_of)):
        for value in {of(op.work) for op in ops}:
            assert a_trace.index.matches(name, value).tolist() == [of(op.work) == value for op in ops]
    for row in range(0, len(a_trace), 7):
        op, span = a_trace.op(row), a_trace.span(row)
        said = (op.name, op.stream, op.phase, op.stage, op.microbatch, op.layer, kind_of(op.work))
        assert said == (
            span.name, span.stream, span.phase, span.stage, span.microbatch, span.layer, span.kind
        )  # fmt: skip


@pytest.mark.parametrize("name", ["l0.q.F.mb00", "l0.q.F.mb", "l{layer}.q.F.mb{mb}", "", "lx.q.F.mb0"])
def test_a_name_that_nearly_fits_a_pattern_is_no_name(name: str) -> None:
    a_trace = run(plan(job(microbatches=2, teaching=False)))
    assert len(a_trace.where(name="l0.q.F.mb0")) == 1
    assert len(a_trace.where(name=name)) == 0


def test_braces_in_a_name_written_by_hand_are_braces() -> None:
    ops = [timed("a{mb}", Fixed(1), 0, 1), timed("{x}", Fixed(1), 1, 2), timed("{{}", Fixed(1), 2, 3)]
    a_trace = trace(job(), [ops])
    for i, name in enumerate(("a{mb}", "{x}", "{{}")):
        assert a_trace.where(name=name).rows.tolist() == [i]
        assert a_trace.where().names[i] == name


def test_from_job_to_report_and_file_no_op_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of a large model has 100,000 ops: only columns may be touched on the way."""
    result = run(plan(job(pp=2, dp=4, microbatches=2, teaching=False)))

    def refuse(_: Template) -> None:
        raise AssertionError("all ops of a template were made")

    monkeypatch.setattr(Template, "ops", property(refuse))
    monkeypatch.setattr(Template, "buffers", property(refuse))
    monkeypatch.setattr(Template, "op_names", property(refuse))
    report = measure(result)
    assert memory_by_stage(result.program).stages[0].weights == report.memory.stages[0].weights
    save_trace(result, tmp_path / "t.json")
    assert str(report)
    last = result.members(0)[-1]
    assert result.where(name="l0.q.F.mb0", rank=last).names == ["l0.q.F.mb0"]


def test_columns_are_frozen_and_of_one_length(pipeline: Trace) -> None:
    with pytest.raises(ValueError, match="read-only"):
        pipeline.columns.end_ps[0] = 1
    columns = {name: [0] for name in COLUMNS[:-1]}
    with pytest.raises(ValueError, match="one length"):
        Trace(pipeline.program, alone_ps=[0, 1], **columns)


def test_bytes_do_not_depend_on_row_order_or_wall_time(pipeline: Trace) -> None:
    c = pipeline.columns
    backwards = {name: getattr(c, name)[::-1] for name in COLUMNS}
    other = Trace(pipeline.program, outcome=pipeline.outcome, wall_seconds=9.0, **backwards)
    assert other == pipeline
    later = Trace(pipeline.program, **(backwards | {"end_ps": backwards["end_ps"] + 1}))
    assert later != pipeline
    stopped = Trace(pipeline.program, outcome=Outcome("interrupted", 5, "gpu"), **backwards)
    assert stopped != pipeline
    assert run(gpipe(4, 4, F, B, US // 10)) == pipeline


def test_kinds_and_axes_of_works() -> None:
    works = [
        Kernel(kind="gemm"),
        Fixed(1),
        HostCopy(1),
        Load(1),
        Collective(kind="all_gather", group="g", axis="dp_shard", bytes=1),
        Transfer(kind="send", peer="p", axis="pp", bytes=1, tag="t"),
        None,
    ]
    assert [kind_of(w) for w in works] == ["gemm", "fixed", "copy", "load", "all_gather", "send", "join"]
    assert [axis_of(w) for w in works] == ["", "", "", "", "dp_shard", "pp", ""]


def test_a_collective_names_its_group_axis() -> None:
    work = Collective(kind="all_reduce", group="dp_shard", axis="dp_shard", bytes=8)
    ranks = [[timed("ar", work, 0, 10, stream="dp", begin=4)]] * 2
    a_trace = trace(job(dp=2), ranks, groups=(Group("dp_shard", (0, 1)),))
    span = a_trace.where(rank=1, axis="dp_shard").one()
    assert (span.kind, span.begin_ps, span.alone_ps) == ("all_reduce", 4, 6)
    assert a_trace.where(rank=1).moving.tolist() == [[4, 10]]


def test_filters_are_quick_on_a_hundred_thousand_spans() -> None:
    program = gpipe(4, 32, F, B)
    sizes = [len(t.ops) for t in program.templates]
    steps = 100_000 // sum(sizes) + 1
    op = np.concatenate([np.arange(n) for n in sizes] * steps)
    cls = np.concatenate([np.full(n, i) for i, n in enumerate(sizes)] * steps)
    step = np.repeat(np.arange(steps), sum(sizes))
    at = np.arange(len(op))
    times = dict.fromkeys(("issued_ps", "ready_ps", "start_ps", "begin_ps"), at)
    a_trace = Trace(
        program, class_index=cls, op_index=op, step=step, end_ps=at + 1, alone_ps=at * 0 + 1, **times
    )
    began = time.perf_counter()
    for rank in range(4):
        assert len(a_trace.where(rank=rank, stream=COMPUTE)) == 64 * steps
    assert a_trace.where(phase="F").busy_ps == 4 * 32 * steps
    assert time.perf_counter() - began < 1.0


rows = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 8)), max_size=12).map(
    lambda pairs: np.array([(lo, lo + n) for lo, n in pairs], dtype=np.int64).reshape(-1, 2)
)


def instants(merged: intervals.Int64) -> set[int]:
    return {t for lo, hi in merged.tolist() for t in range(lo, hi)}


@given(rows, rows)
def test_interval_algebra_is_set_algebra(one: intervals.Int64, other: intervals.Int64) -> None:
    """Against sets of instants; and what comes back is merged."""
    a, b = intervals.union(one), intervals.union(other)
    assert instants(a) == instants(one)
    assert instants(intervals.intersection(a, b)) == instants(a) & instants(b)
    assert instants(intervals.difference(a, b)) == instants(a) - instants(b)
    assert instants(intervals.complement(a, 3, 20)) == set(range(3, 20)) - instants(a)
    assert intervals.length(a) == len(instants(a))
    for merged in (a, intervals.intersection(a, b), intervals.difference(a, b)):
        assert (merged[:, 1] > merged[:, 0]).all()
        assert (merged[1:, 0] > merged[:-1, 1]).all()


@pytest.mark.parametrize(
    ("op", "column", "says"),
    [
        ("1F0", "ready_ps", "1F0 did not wait for 1RECV_F0"),
        ("0F1", "ready_ps", "0F1 did not wait for 0F0"),
        ("0F1", "start_ps", "a span starts too early"),
        ("0F1", "end_ps", "a span runs backwards"),
    ],
)
def test_the_checker_sees_a_span_that_came_too_early(op: str, column: str, says: str) -> None:
    """One picosecond is enough."""
    a_trace, recording = run_audited(gpipe(2, 2, F, B, US // 10))
    audit(a_trace, recording)
    columns = {name: getattr(a_trace.columns, name).copy() for name in COLUMNS}
    row = a_trace.where(name=op).rows[0]
    columns[column][row] = columns["begin_ps"][row] - 1
    with pytest.raises(AuditError, match=says):
        audit(Trace(a_trace.program, **columns), recording)
    less = {name: np.delete(values, row) for name, values in columns.items()}
    with pytest.raises(AuditError, match="7 spans for 8 ops"):
        audit(Trace(a_trace.program, **less), recording)
