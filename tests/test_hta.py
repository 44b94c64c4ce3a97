"""HolisticTraceAnalysis reads our traces and finds the overlap and the idle time that we do, exactly.

In a teaching world in whole microseconds, since HolisticTraceAnalysis rounds fractions away.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from handmade import US, gpipe, job, timed, trace

from emulator.plan.program import Collective, Fixed, Group
from emulator.report.communication import overlap_fraction
from emulator.report.export import save_trace
from emulator.run import intervals, run
from emulator.run.trace import Trace

pytestmark = pytest.mark.hta


def analysis(trace_dir: Path) -> Any:  # HolisticTraceAnalysis has no types
    trace_analysis = pytest.importorskip("hta.trace_analysis")
    return trace_analysis.TraceAnalysis(trace_dir=str(trace_dir))


def sharded() -> Trace:
    """Two ranks, gathers under compute, a straggler on rank 1, and a reduction nobody covers."""
    gather = Collective(kind="all_gather", group="dp_shard", axis="dp_shard", bytes=1 << 20)
    reduce = Collective(kind="reduce_scatter", group="dp_shard", axis="dp_shard", bytes=1 << 20)
    ranks = []
    for late in (0, 3 * US):
        ranks.append(
            [
                timed("ag0", gather, late, 8 * US, stream="dp.unshard", begin=3 * US),
                timed("ag1", gather, 8 * US, 13 * US, stream="dp.unshard"),
                timed("f0", Fixed(0), 8 * US, 11 * US, phase="F"),
                timed("f1", Fixed(0), 13 * US, 20 * US + late, phase="F"),
                timed("rs0", reduce, 20 * US + late, 31 * US, stream="dp.reduce", begin=23 * US),
                timed("b0", Fixed(0), 25 * US, 29 * US, phase="B"),
            ]
        )
    return trace(job(dp=2), ranks, groups=(Group("dp_shard", (0, 1)),))


@pytest.mark.parametrize("world", ["sharded", "pipeline"])
def test_overlap_and_idle_agree_exactly(world: str, tmp_path: Path) -> None:
    a_trace = sharded() if world == "sharded" else run(gpipe(4, 6, 2 * US, 4 * US, US))
    save_trace(a_trace, tmp_path)
    theirs = analysis(tmp_path)
    overlap = theirs.get_comm_comp_overlap(visualize=False).set_index("rank")
    breakdown = theirs.get_temporal_breakdown(visualize=False).set_index("rank")
    for rank in a_trace.ranks:
        spans = a_trace.where(rank=rank)
        computing = a_trace.where(rank=rank, kind="fixed").busy_ps
        kernel_time = spans.end_ps - spans.start_ps
        idle = kernel_time - spans.busy_ps
        row = breakdown.loc[rank]
        assert row["kernel_time(us)"] * US == kernel_time
        assert row["idle_time(us)"] * US == idle
        assert row["compute_time(us)"] * US == computing
        assert row["non_compute_time(us)"] * US == spans.busy_ps - computing
        ours = overlap_fraction(a_trace, rank)
        assert ours is not None
        assert overlap.loc[rank, "comp_comm_overlap_pctg"] == pytest.approx(100 * ours, abs=0.005)


def test_idle_time_of_each_stream_agrees(tmp_path: Path) -> None:
    a_trace = sharded()
    save_trace(a_trace, tmp_path)
    idle, _ = analysis(tmp_path).get_idle_time_breakdown(ranks=[0], visualize=False)
    compute = a_trace.where(rank=0, stream="compute")
    gaps = sum(hi - lo for lo, hi in compute.gaps())
    assert idle[idle["stream"] == 7]["idle_time"].sum() * US == gaps


def test_several_steps_load_and_the_last_is_dropped(tmp_path: Path) -> None:
    """With two step marks it keeps the kernels whose launches came before the last step."""
    one = run(gpipe(2, 2, 2 * US, 4 * US, US), steps=3)
    save_trace(one, tmp_path)
    breakdown = analysis(tmp_path).get_temporal_breakdown(visualize=False).set_index("rank")
    for rank in one.ranks:
        c = one.columns
        rows = [r for r in one.where(rank=rank).rows.tolist() if c.step[r] < 2]
        merged = intervals.union(intervals.pairs(c.start_ps[rows], c.end_ps[rows]))
        assert breakdown.loc[rank, "kernel_time(us)"] * US == merged[-1, 1] - merged[0, 0]
