"""The four axes of a transformer and the parallelism that cuts each (figure 12.2).

One should see the same model four times: a row of layers, each a block of batch x sequence x feature. Each
panel cuts it once, in the colours of two ranks: through the batch (DP), through the sequence (CP), through
the feature dimension (TP), or between the layers (PP). Nothing is measured here; the picture is drawn.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Polygon

from plots import style

LAYERS = 4

Box = tuple[tuple[float, float], tuple[float, float], tuple[float, float]]
"""Extent of a part of a layer along sequence (right), feature (up) and batch (back), each within 0..1."""


class Cut(msgspec.Struct, frozen=True):
    """One way to cut the model in two."""

    axis: Literal["batch B", "sequence S", "feature D", "layers L"]
    name: str
    abbreviation: str


CUTS = (
    Cut("batch B", "data parallelism", "DP"),
    Cut("sequence S", "context parallelism", "CP"),
    Cut("feature D", "tensor parallelism", "TP"),
    Cut("layers L", "pipeline parallelism", "PP"),
)

_WHOLE: Box = ((0, 1), (0, 1), (0, 1))
_LOW, _HIGH = (0.0, 0.5), (0.5, 1.0)
_WIDTH, _HEIGHT, _DEPTH = 0.62, 1.0, 0.5
_RANKS = (style.SKY, style.ORANGE)


def parts(cut: Cut, layer: int) -> list[tuple[int, Box]]:
    """Which rank holds which part of a layer; the farther part first, for the nearer one covers it."""
    if cut.axis == "layers L":
        return [(0 if layer < LAYERS // 2 else 1, _WHOLE)]
    if cut.axis == "batch B":
        return [(1, (_WHOLE[0], _WHOLE[1], _HIGH)), (0, (_WHOLE[0], _WHOLE[1], _LOW))]
    if cut.axis == "sequence S":
        return [(0, (_LOW, _WHOLE[1], _WHOLE[2])), (1, (_HIGH, _WHOLE[1], _WHOLE[2]))]
    return [(0, (_WHOLE[0], _LOW, _WHOLE[2])), (1, (_WHOLE[0], _HIGH, _WHOLE[2]))]


@style.styled
def draw() -> Figure:
    """Draw one panel for each cut."""
    fig = style.figure(9.0, 4.6)
    grid = style.axes(fig, 2, 2)
    for ax, cut in zip(grid, CUTS, strict=True):
        for layer in range(LAYERS):
            for rank, box in parts(cut, layer):
                _box(ax, layer * 1.25, box, _RANKS[rank])
        ax.set_title(f"{cut.axis}: {cut.name}, {cut.abbreviation}", loc="left", weight="bold")
        _labels(ax)
        ax.set_aspect("equal")
        ax.set_xlim(-0.55, LAYERS * 1.25 + 0.35)
        ax.set_ylim(-0.42, 1.5)
        ax.set_axis_off()
    for rank, colour in enumerate(_RANKS):
        grid[0].scatter([], [], marker="s", s=80, color=colour, label=f"rank {rank}")
    fig.legend(loc="outside lower center", ncols=2)
    return fig


def _box(ax: Axes, left: float, box: Box, colour: str) -> None:
    (x0, x1), (y0, y1), (z0, z1) = box

    def at(x: float, y: float, z: float) -> tuple[float, float]:
        # Oblique projection: depth goes up and to the right.
        return left + x * _WIDTH + z * _DEPTH * 0.75, y * _HEIGHT + z * _DEPTH * 0.55

    faces = {
        1.0: [at(x0, y0, z0), at(x1, y0, z0), at(x1, y1, z0), at(x0, y1, z0)],
        0.86: [at(x1, y0, z0), at(x1, y0, z1), at(x1, y1, z1), at(x1, y1, z0)],
        0.94: [at(x0, y1, z0), at(x1, y1, z0), at(x1, y1, z1), at(x0, y1, z1)],
    }
    for shade, corners in faces.items():
        red, green, blue = (channel * shade for channel in to_rgb(colour))
        ax.add_patch(Polygon(corners, facecolor=(red, green, blue), edgecolor=style.BLACK, linewidth=0.9))


def _labels(ax: Axes) -> None:
    ax.text(_WIDTH / 2, -0.08, "S", ha="center", va="top")
    ax.text(-0.08, _HEIGHT / 2, "D", ha="right", va="center")
    ax.text(_DEPTH * 0.3, _HEIGHT + 0.22, "B", ha="right", va="center")
    end = (LAYERS - 1) * 1.25 + _WIDTH
    ax.annotate("", (end, -0.28), (_WIDTH + 0.2, -0.28), arrowprops={"arrowstyle": "->", "color": style.GREY})
    ax.text((end + _WIDTH) / 2, -0.27, "L layers", ha="center", va="bottom")


if __name__ == "__main__":
    style.save(draw(), "four_axes")
