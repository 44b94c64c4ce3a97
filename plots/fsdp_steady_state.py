"""The steady state of FSDP's backward pass, cut out of an emulated step (figure 12.4).

One should see three layers in play at once: while the tensor cores differentiate layer l (middle row,
framed), the network unshards l-1 (upper row) and reduces the gradients of l+1 (lower row). Communication
is free as long as both are shorter than the middle one. A colour is a layer.

A layer's bar ends with the copy of its gradients into the reduction's buffer; the next unshard need not
wait for it and begins a little earlier.

The run is that of the scenario `fsdp_steady_state`: Llama 3 8B on the eight H100s of one server.
"""

from __future__ import annotations

from matplotlib.figure import Figure

from emulator import simulate
from emulator.run.trace import Trace
from plots import gantt, style
from plots.gantt import Bar
from scenarios.fsdp_steady_state import job

MS = 10**9
"""Picoseconds of a millisecond."""
MIDDLE = 16
"""The layer in the middle of the window."""

_COLOURS = (style.SKY, style.ORANGE, style.GREEN, style.PURPLE)


def compute_bar(trace: Trace, layer: int) -> Bar:
    """The backward pass of a layer on rank 0, from its first kernel to its last."""
    parts = [trace.where(rank=0, stream="compute", layer=layer, phase=p) for p in "BIW"]
    parts = [spans for spans in parts if len(spans)]
    start, end = min(spans.start_ps for spans in parts), max(spans.end_ps for spans in parts)
    return Bar(start, end, _COLOURS[layer % len(_COLOURS)], f"layer {layer}")


def communication_bar(trace: Trace, name: str, layer: int) -> Bar:
    """One collective of rank 0, from when it moves."""
    span = trace.where(rank=0, name=name).one()
    return Bar(span.begin_ps, span.end_ps, _COLOURS[layer % len(_COLOURS)], f"{layer}")


@style.styled
def draw() -> Figure:
    """Draw three rows over a window of five layers."""
    trace = simulate(job).trace
    fig = style.figure(9.0, 3.4)
    (ax,) = style.axes(fig)
    layers = range(MIDDLE + 4, MIDDLE - 5, -1)
    first, middle, last = (compute_bar(trace, n) for n in (MIDDLE + 2, MIDDLE, MIDDLE - 2))
    start, end = first.start_ps, last.end_ps
    rows = {
        "unshard (all_gather)": [communication_bar(trace, f"l{n}.unshard.B.mb0", n) for n in layers],
        "compute (backward)": [compute_bar(trace, n) for n in layers],
        "reduce_scatter": [communication_bar(trace, f"l{n}.reduce.mb0", n) for n in layers],
    }
    ax.axvspan(middle.start_ps / MS, middle.end_ps / MS, color="#E8E8E8", zorder=0)
    for y, bars in enumerate(rows.values()):
        gantt.row(ax, y, gantt.clip(bars, start, end), MS)
    gantt.frame(ax, list(rows), end / MS, "ms", start / MS)
    ax.set_title(
        f"FSDP backward: reduce layer {MIDDLE + 1}, differentiate layer {MIDDLE}, unshard layer {MIDDLE - 1}",
        loc="left",
    )
    return fig


if __name__ == "__main__":
    style.save(draw(), "fsdp_steady_state")
