"""GPipe with four stages and four microbatches, and its bubble (figure 12.9).

One should see a fill of three slots, a steady run, and a drain of three slots, twice: once for the
forwards and once for the backwards. A colour is a microbatch, whose number stands in the cell; what is
shaded is the bubble. The title's utilisation is counted from the trace: 4/7.

The run is that of the scenario `gpipe_4x4`, a teaching world in which every pass takes one second.
"""

from __future__ import annotations

from fractions import Fraction

from matplotlib.figure import Figure

from emulator import simulate
from emulator.run.trace import Trace
from emulator.spec.units import PS_PER_SECOND
from plots import gantt, style
from plots.gantt import Bar
from scenarios.gpipe_4x4 import job

_COLOURS = (style.SKY, style.ORANGE, style.GREEN, style.PURPLE)


def utilisation(trace: Trace) -> Fraction:
    """Busy time of all compute streams over the makespan of all ranks, exact."""
    busy = sum(trace.where(rank=rank, stream="compute").busy_ps for rank in trace.ranks)
    return Fraction(busy, len(trace.ranks) * trace.end_ps)


@style.styled
def draw() -> Figure:
    """Draw one row for each stage."""
    trace = simulate(job).trace
    fig = style.figure(9.0, 3.4)
    (ax,) = style.axes(fig)
    for rank in trace.ranks:
        spans = [span for span in trace.where(rank=rank, stream="compute") if span.duration_ps]
        bars = [
            Bar(s.start_ps, s.end_ps, _COLOURS[s.microbatch % len(_COLOURS)], f"{s.phase}{s.microbatch}")
            for s in spans
        ]
        edges = [0, *(edge for s in spans for edge in (s.start_ps, s.end_ps)), trace.end_ps]
        gaps = [(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if b > a]
        gantt.bubble(ax, rank, gaps, PS_PER_SECOND)
        gantt.row(ax, rank, bars, PS_PER_SECOND)
    gantt.frame(ax, [f"stage {rank}" for rank in trace.ranks], trace.end_ps / PS_PER_SECOND, "s")
    used = utilisation(trace)
    shape = f"GPipe, {job.layout.pp} stages x {job.microbatches} microbatches"
    ax.set_title(f"{shape}: utilisation {used} = {float(used):.1%}", loc="left")
    return fig


if __name__ == "__main__":
    style.save(draw(), "gpipe")
