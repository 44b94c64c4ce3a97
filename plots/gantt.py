"""Rows of labelled bars on a time axis, for the pictures that teach."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.patches import Rectangle

from emulator.run.trace import Spans
from plots import style

HEIGHT = 0.78
"""Of a bar, in rows."""
SLIVER = 0.025
"""Share of a window below which a bar is too narrow for two digits."""

PHASES = {"F": ("forward", style.SKY), "B": ("backward", style.BLUE), "O": ("optimizer", style.GREEN)}
"""Label and colour of what a compute stream does; backward is both of its halves."""


class Bar(NamedTuple):
    """From one picosecond to another, with a text where it fits."""

    start_ps: int
    end_ps: int
    colour: str
    text: str = ""


def whole(spans: Spans, colour: str, text: str = "") -> list[Bar]:
    """One bar from the first start to the last end of some spans; none where there are no spans."""
    return [Bar(spans.start_ps, spans.end_ps, colour, text)] if len(spans) else []


def row(ax: Axes, y: float, bars: Sequence[Bar], unit_ps: float) -> None:
    """Draw the bars of one row, centred on `y`; the axis counts units of `unit_ps` picoseconds."""
    for bar in bars:
        start, length = bar.start_ps / unit_ps, (bar.end_ps - bar.start_ps) / unit_ps
        box = Rectangle((start, y - HEIGHT / 2), length, HEIGHT, facecolor=bar.colour)
        box.set(edgecolor="white", linewidth=0.8)
        ax.add_patch(box)
        ax.text(start + length / 2, y, bar.text, ha="center", va="center", color=ink(bar.colour))


def bubble(ax: Axes, y: float, gaps: Sequence[tuple[int, int]], unit_ps: float) -> None:
    """Shade the gaps of one row."""
    for start, end in gaps:
        box = Rectangle((start / unit_ps, y - HEIGHT / 2), (end - start) / unit_ps, HEIGHT, hatch="///")
        box.set(facecolor="#EEEEEE", edgecolor="#B5B5B5", linewidth=0)
        ax.add_patch(box)


def frame(ax: Axes, labels: Sequence[str], end: float, unit: str, start: float = 0.0) -> None:
    """Name the rows from the top, and set the time axis."""
    ax.set_ylim(len(labels) - 0.45, -0.55)
    ax.set_yticks(range(len(labels)), labels)
    ax.tick_params(axis="y", length=0)
    ax.spines["left"].set_visible(False)
    ax.set_xlim(start, end)
    ax.set_xlabel(f"time ({unit})")


def clip(bars: Sequence[Bar], start_ps: int, end_ps: int) -> list[Bar]:
    """Cut bars to a window, so that each text stands in the middle of what is seen; slivers lose theirs."""
    out = []
    for bar in bars:
        start, end = max(bar.start_ps, start_ps), min(bar.end_ps, end_ps)
        if end > start:
            seen = (end - start) / (end_ps - start_ps) >= SLIVER
            out.append(Bar(start, end, bar.colour, bar.text if seen else ""))
    return out


def ink(colour: str) -> str:
    """Black or white, whichever stands out on a colour."""
    red, green, blue = to_rgb(colour)
    # Brightness as the eye weighs the channels, ITU-R BT.601.
    return "white" if 0.299 * red + 0.587 * green + 0.114 * blue < 0.55 else "black"
