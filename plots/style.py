"""One look for all pictures: fonts, a palette that colour-blind readers can tell apart, saving."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

IMAGES = Path(__file__).parent / "images"
DPI = 120

# Okabe and Ito's palette (2008), chosen to stay apart under every common form of colour blindness.
BLACK, ORANGE, SKY, GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
YELLOW, BLUE, VERMILION, PURPLE = "#F0E442", "#0072B2", "#D55E00", "#CC79A7"
GREY = "#8C8C8C"

_LOOK = Path(__file__).parent / "common.mplstyle"
P = ParamSpec("P")
R = TypeVar("R")


def styled(draw: Callable[P, R]) -> Callable[P, R]:
    """Let a function draw in the common look and leave matplotlib's settings as they were."""

    @functools.wraps(draw)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        with mpl.rc_context(fname=_LOOK):
            return draw(*args, **kwargs)

    return wrapped


def figure(width: float, height: float) -> Figure:
    """Open an empty figure of this many inches; it has no window and no global state."""
    return Figure(figsize=(width, height), layout="constrained")


def axes(fig: Figure, rows: int = 1, columns: int = 1, *, share_x: bool = False) -> list[Axes]:
    """Add a grid of axes, row by row."""
    grid = fig.subplots(rows, columns, squeeze=False, sharex=share_x)
    return [each for row in grid for each in row]


def save(fig: Figure, name: str, folder: Path = IMAGES) -> Path:
    """Write `name`.png into the folder and return its path; no date or version goes into the file."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.png"
    fig.savefig(path, dpi=DPI, metadata={"Software": None})
    return path
