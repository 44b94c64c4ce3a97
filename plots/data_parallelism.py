"""Data parallelism across three devices, as an emulated step (figure 12.3).

One should see three ranks do the same: each runs forward and backward on its own sequence without a word
to the others, all meet in one all_reduce of the gradients, and each applies the same update. Compute and
network are never at work together, which is what overlap repairs (`ddp_overlap`).

The job is four layers of Llama 2 7B on three H100s of one server; every length is the emulator's.
"""

from __future__ import annotations

import msgspec
from matplotlib.figure import Figure

from emulator import DataParallel, Job, Layout, clusters, models, simulate
from emulator.run.trace import Trace
from plots import gantt, style
from plots.gantt import Bar

MS = 10**9
"""Picoseconds of a millisecond."""

job = Job(
    # Four layers hold their state on one device and leave bars wide enough to read.
    model=msgspec.structs.replace(models.LLAMA2_7B, name="llama2-7b-4-layers", layers=4),
    cluster=clusters.dgx_h100(nodes=1),
    layout=Layout(dp_replicate=3),
    data_parallel=DataParallel(sharding="none"),
    global_batch=3,
    micro_batch=1,
    seq_len=2048,
)


def compute_bars(trace: Trace, rank: int) -> list[Bar]:
    """Forward, backward and optimizer of a rank, a bar each."""
    compute = {phase: trace.where(rank=rank, stream="compute", phase=phase) for phase in "FBIWO"}
    backward = [spans for phase in "BIW" if len(spans := compute[phase])]
    start, end = min(spans.start_ps for spans in backward), max(spans.end_ps for spans in backward)
    label, colour = gantt.PHASES["B"]
    forward, update = (gantt.whole(compute[p], gantt.PHASES[p][1], gantt.PHASES[p][0]) for p in "FO")
    return [*forward, Bar(start, end, colour, label), *update]


@style.styled
def draw() -> Figure:
    """Draw two rows for each rank: what it computes, and what it sends."""
    trace = simulate(job).trace
    fig = style.figure(9.0, 4.0)
    (ax,) = style.axes(fig)
    labels: list[str] = []
    for rank in trace.ranks:
        sent = trace.where(rank=rank, stream="dp").one()
        gantt.row(ax, len(labels), compute_bars(trace, rank), MS)
        gantt.row(ax, len(labels) + 1, [Bar(sent.begin_ps, sent.end_ps, style.ORANGE, "all_reduce")], MS)
        labels += [f"rank {rank}   compute", "network"]
        if rank:
            ax.axhline(len(labels) - 2.5, color=style.GREY, linewidth=0.6)
    gantt.frame(ax, labels, trace.end_ps / MS, "ms")
    ax.set_title(
        "Data parallelism over three devices: local passes, one all_reduce, the same update", loc="left"
    )
    return fig


if __name__ == "__main__":
    style.save(draw(), "data_parallelism")
