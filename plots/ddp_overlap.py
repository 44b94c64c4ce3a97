"""DDP against one all_reduce at the end: the same gradients, hidden under the backward pass.

One should see the same step twice on one time axis. Above, the network waits for all of backward and the
tensor cores then wait for the network. Below, buckets of gradients leave while earlier layers are still
being differentiated; backward grows a little, since a collective takes SMs and HBM bandwidth from the
kernels beside it, and the step ends earlier all the same. What stays exposed is the last bucket, the
embedding's.

The job is four layers of Llama 2 7B on the eight H100s of one server; every length is the emulator's.
"""

from __future__ import annotations

import msgspec
from matplotlib.figure import Figure

from emulator import DataParallel, Layout, simulate
from emulator.run.trace import Trace
from plots import gantt, style
from plots.data_parallelism import MS, compute_bars
from plots.data_parallelism import job as three_ranks
from plots.gantt import Bar

job = msgspec.structs.replace(
    three_ranks,
    layout=Layout(dp_replicate=8),
    global_batch=8,
    data_parallel=DataParallel(sharding="ddp"),
)
without = msgspec.structs.replace(job, data_parallel=DataParallel(sharding="none"))


@style.styled
def draw() -> Figure:
    """Draw rank 0 of both runs, one above the other."""
    plain, buckets = simulate(without).trace, simulate(job).trace
    count = len(buckets.where(rank=0, stream="dp"))
    runs = {
        "none: one all_reduce after backward": plain,
        f"ddp: {count} buckets under backward": buckets,
    }
    fig = style.figure(9.0, 4.2)
    grid = style.axes(fig, 2, 1, share_x=True)
    longest = max(trace.end_ps for trace in runs.values())
    for ax, (name, trace) in zip(grid, runs.items(), strict=True):
        gantt.row(ax, 0, compute_bars(trace, 0), MS)
        gantt.bubble(ax, 0, trace.where(rank=0, stream="compute").gaps(), MS)
        gantt.row(ax, 1, _network(trace), MS)
        gantt.frame(ax, ["compute", "network"], longest / MS * 1.01, "ms")
        ax.axvline(trace.end_ps / MS, color=style.BLACK, linewidth=1, linestyle=":")
        ax.set_title(f"{name}; the step takes {trace.end_ps / MS:.1f} ms", loc="left")
    grid[0].set_xlabel("")
    return fig


def _network(trace: Trace) -> list[Bar]:
    buckets = list(trace.where(rank=0, stream="dp"))
    shades = (style.ORANGE, style.YELLOW)
    text = "all_reduce" if len(buckets) == 1 else ""
    return [Bar(b.begin_ps, b.end_ps, shades[i % 2], text) for i, b in enumerate(buckets)]


if __name__ == "__main__":
    style.save(draw(), "ddp_overlap")
