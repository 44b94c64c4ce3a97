"""Timelines: one row per stream, drawn with matplotlib's object API on the Agg canvas."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from emulator.plan.op import PHASES
from emulator.plan.program import COMPUTE, Collective, Fixed, HostCopy, Kernel, Load, Transfer, Work
from emulator.report.account import report_axis
from emulator.report.export import replacing
from emulator.run import intervals
from emulator.run.trace import Trace
from emulator.spec.arrays import Int64

MAX_ROWS = 64
"""Rows beyond this are left out, with a note."""

COLOURS = {
    "forward": "#4c78a8",
    "backward": "#f58518",
    "weight gradient": "#ffbf79",
    "recompute": "#b279a2",
    "optimizer": "#54a24b",
    "other kernels": "#9ecae9",
    "tp": "#e45756",
    "cp": "#ff9da6",
    "pp": "#9d755d",
    "dp": "#2a9d8f",
    "ep": "#d67195",
    "waiting for the others": "#d9d9d9",
    "loader, copy": "#bab0ac",
}
"""Fill colour by kind; a communication axis is drawn while its bytes move."""

IDLE = "#f3e3e3"
WAITING = "waiting for the others"
COLOUR_OF_PHASE = {
    "F": "forward",
    "B": "backward",
    "I": "backward",
    "W": "weight gradient",
    "R": "recompute",
    "O": "optimizer",
}

WIDTH_INCHES, ROW_INCHES, MARGIN_INCHES, DPI = 14.0, 0.3, 1.6, 150
FONT = 7.0
"""Points, of the numbers in cells."""
GLYPH = 0.62
"""Width of a digit over the font's size (DejaVu Sans: 0.636 em)."""
AXES_SHARE = 0.75
"""Part of the figure's width that the axes get beside labels and legend, roughly; for what fits in a cell."""


class _Bars(NamedTuple):
    """Rectangles of one row: interval rows, kind and microbatch of each."""

    times: Int64
    kinds: list[str]
    microbatches: list[int]


def timeline(
    trace: Trace,
    path: str | Path | None = None,
    ranks: Sequence[int] | None = None,
    streams: Sequence[str] | None = None,
    title: str | None = None,
) -> Figure:
    """Draw a trace, one row per stream of each rank, and save it if a path is given (.png, .svg or .pdf).

    Kernels are coloured by phase, communication by axis while it moves and grey while it waits for its other
    members; idle time of the compute stream is shaded. `ranks` defaults to one representative of each class;
    ranks whose rows would pass MAX_ROWS are left out, and a note says so. `streams` limits the rows further.
    """
    chosen = [min(c.members) for c in trace.program.classes] if ranks is None else list(ranks)
    rows = [(rank, stream) for rank in chosen for stream in _streams(trace, rank, streams)]
    shown = _cut(rows)
    figure = Figure(
        figsize=(WIDTH_INCHES, MARGIN_INCHES + ROW_INCHES * len(shown)), dpi=DPI, layout="constrained"
    )
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    unit, scale = _unit(trace.end_ps)
    used: dict[str, None] = {}
    for y, (rank, stream) in enumerate(shown):
        _draw_row(axes, trace, rank, stream, y, scale, used)
    _label(axes, shown, trace.end_ps / scale, unit)
    _legend(axes, used, trace.program.job.layout.pp > 1)
    job = trace.program.job
    axes.set_title(
        title or f"{job.model.name} on {job.layout.world_size} x {job.cluster.device.name}", loc="left"
    )
    notes = _notes(trace, rows, shown, everyone=ranks is None)
    if notes:
        figure.supxlabel("; ".join(notes), fontsize=8, x=0.5)
    if path is not None:
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        with replacing(target) as file, warnings.catch_warnings():
            # A model's name may have letters that the font lacks; the picture shows boxes in their place.
            warnings.filterwarnings("ignore", message="Glyph .* missing from")
            figure.savefig(file, format=target.suffix.lstrip(".") or "png")
    return figure


def _notes(
    trace: Trace, rows: list[tuple[int, str]], shown: list[tuple[int, str]], everyone: bool
) -> list[str]:
    """What a reader must know of rows that are not there."""
    notes = []
    drawn = list(dict.fromkeys(rank for rank, _ in shown))
    alike = {min(c.members): len(c.members) for c in trace.program.classes if len(c.members) > 1}
    several = [f"rank {rank} for {alike[rank]}" for rank in drawn if rank in alike][:4] if everyone else []
    if several:
        dots = ", .." if len([rank for rank in drawn if rank in alike]) > len(several) else ""
        notes.append(f"a rank stands for all that do the same: {', '.join(several)}{dots}")
    if len(shown) < len(rows):
        chosen = len(dict.fromkeys(rank for rank, _ in rows))
        notes.append(f"cut: {len(shown)} of {len(rows)} rows, {len(drawn)} of {chosen} ranks are shown")
    return notes


def _streams(trace: Trace, rank: int, wanted: Sequence[str] | None) -> list[str]:
    """Streams of a rank on which something moved, compute first."""
    template = trace.program.templates[trace.program.classes[trace.rank_class(rank)].template]
    moved = [
        stream
        for stream in template.streams
        if (wanted is None or stream in wanted) and len(trace.where(rank=rank, stream=stream).moving)
    ]
    return sorted(moved, key=lambda stream: stream != COMPUTE)


def _cut(rows: list[tuple[int, str]]) -> list[tuple[int, str]]:
    """Rows of the leading ranks that fit whole; at least the first rank's."""
    if len(rows) <= MAX_ROWS:
        return rows
    shown: list[tuple[int, str]] = []
    for rank in dict.fromkeys(rank for rank, _ in rows):
        its = [row for row in rows if row[0] == rank]
        if shown and len(shown) + len(its) > MAX_ROWS:
            break
        shown += its
    return shown[:MAX_ROWS]


def _unit(end_ps: int) -> tuple[str, float]:
    for unit, size in (("s", 1e12), ("ms", 1e9), ("us", 1e6)):
        if end_ps >= size:
            return unit, size
    return "ns", 1e3


def _kind(work: Work, phase: str) -> str:
    match work:
        case Collective() | Transfer():
            return report_axis(work.axis)
        case Load() | HostCopy():
            return "loader, copy"
        case Kernel() | Fixed():
            return COLOUR_OF_PHASE.get(phase, "other kernels")
        case None:
            return ""


def _bars(trace: Trace, rank: int, stream: str) -> _Bars:
    """Rectangles of a row in time order; communication gives one for its wait and one for its motion."""
    c = trace.columns
    times: list[tuple[int, int]] = []
    kinds: list[str] = []
    microbatches: list[int] = []
    body = trace.template(trace.rank_class(rank)).body
    rows = trace.where(rank=rank, stream=stream).rows
    ops = c.op_index[rows]
    ran = [x[ops].tolist() for x in (body.work, body.phase, body.microbatch)]
    span = [x[rows].tolist() for x in (c.start_ps, c.begin_ps, c.end_ps)]
    for number, phase, microbatch, start, begin, end in zip(*ran, *span, strict=True):
        work = body.works[number]
        communicates = isinstance(work, Collective | Transfer)
        if communicates and begin > start:
            times.append((start, begin))
            kinds.append(WAITING)
            microbatches.append(-1)
        moved = begin if communicates else start
        if end > moved and work is not None:
            times.append((moved, end))
            kinds.append(_kind(work, PHASES[phase]))
            microbatches.append(microbatch)
    return _Bars(np.array(times, dtype=np.int64).reshape(-1, 2), kinds, microbatches)


def _draw_row(
    axes: Axes, trace: Trace, rank: int, stream: str, y: int, scale: float, used: dict[str, None]
) -> None:
    bars = _bars(trace, rank, stream)
    pixel = trace.end_ps / (WIDTH_INCHES * DPI)
    if stream == COMPUTE:
        free = intervals.complement(intervals.union(bars.times), 0, trace.end_ps)
        _fill(axes, free[free[:, 1] - free[:, 0] > pixel], y, scale, IDLE, hatch="////", edge="#d9b8b8")
    kinds = np.array(bars.kinds)
    few = len(bars.kinds) <= 400
    for kind in dict.fromkeys(bars.kinds):
        used[kind] = None
        own = bars.times[kinds == kind]
        own = own if few else _merged(own, pixel / 4)
        wide = own[:, 1] - own[:, 0] >= 2 * pixel
        _fill(axes, own[wide], y, scale, COLOURS[kind], edge="white" if few and kind != WAITING else "none")
        # an outline in its own colour keeps what is thinner than a pixel visible, where no neighbour suffers
        outlined = stream != COMPUTE and kind != WAITING
        _fill(axes, own[~wide], y, scale, COLOURS[kind], edge=COLOURS[kind] if outlined else "none")
    if trace.program.job.microbatches > 1:
        _number(axes, _cells(bars, detailed=not few), y, scale, trace.end_ps)


def _fill(
    axes: Axes, times: Int64, y: int, scale: float, colour: str, edge: str = "none", hatch: str = ""
) -> None:
    if len(times):
        spans = [(start / scale, (end - start) / scale) for start, end in times.tolist()]
        axes.broken_barh(
            spans, (y - 0.4, 0.8), facecolors=colour, edgecolors=edge, linewidth=0.4, hatch=hatch or None
        )


def _merged(times: Int64, gap: float) -> Int64:
    """Join neighbours that are closer than a fraction of a pixel: what the eye cannot tell apart."""
    joined = intervals.union(np.stack([times[:, 0], times[:, 1] + int(gap)], axis=1))
    return np.stack([joined[:, 0], joined[:, 1] - int(gap)], axis=1)


def _cells(bars: _Bars, detailed: bool) -> _Bars:
    """Join neighbouring bars of one kind and microbatch; in kernel detail both gradients are backward."""
    merge = {"weight gradient": "backward"} if detailed else {}
    times: list[tuple[int, int]] = []
    kinds: list[str] = []
    microbatches: list[int] = []
    for (start, end), kind, microbatch in zip(
        bars.times.tolist(), bars.kinds, bars.microbatches, strict=True
    ):
        cell = merge.get(kind, kind)
        if kinds and (kinds[-1], microbatches[-1]) == (cell, microbatch):
            times[-1] = times[-1][0], end
        else:
            times.append((start, end))
            kinds.append(cell)
            microbatches.append(microbatch)
    return _Bars(np.array(times, dtype=np.int64).reshape(-1, 2), kinds, microbatches)


def _number(axes: Axes, cells: _Bars, y: int, scale: float, end_ps: int) -> None:
    """Write the microbatch into each cell in which it fits."""
    points_per_ps = WIDTH_INCHES * AXES_SHARE * 72 / end_ps
    for (start, end), kind, microbatch in zip(
        cells.times.tolist(), cells.kinds, cells.microbatches, strict=True
    ):
        text = str(microbatch)
        if microbatch < 0 or (end - start) * points_per_ps < GLYPH * FONT * len(text) + 2:
            continue
        red, green, blue = to_rgb(COLOURS[kind])
        # perceived brightness by the weights of ITU-R BT.601
        dark = 0.299 * red + 0.587 * green + 0.114 * blue < 0.6
        axes.text(
            (start + end) / 2 / scale,
            y,
            text,
            ha="center",
            va="center",
            fontsize=FONT,
            color="white" if dark else "black",
            clip_on=True,
        )


def _label(axes: Axes, rows: list[tuple[int, str]], end: float, unit: str) -> None:
    labels, last = [], None
    for y, (rank, stream) in enumerate(rows):
        labels.append(f"rank {rank}  {stream}" if rank != last else stream)
        if rank != last and y:
            axes.axhline(y - 0.5, color="#888888", linewidth=0.5)
        last = rank
    axes.set_yticks(range(len(rows)), labels, fontsize=8)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(0, end or 1)
    axes.set_xlabel(f"time ({unit})")
    axes.tick_params(axis="y", length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _legend(axes: Axes, used: dict[str, None], pipeline: bool) -> None:
    handles = [
        Patch(
            facecolor=colour,
            label=f"{kind} communication" if kind in ("tp", "cp", "pp", "dp", "ep") else kind,
        )
        for kind, colour in COLOURS.items()
        if kind in used
    ]
    idle = "bubble (compute idle)" if pipeline else "compute idle"
    handles.append(Patch(facecolor=IDLE, edgecolor="#d9b8b8", hatch="////", label=idle))
    axes.legend(handles=handles, loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8, frameon=False)
