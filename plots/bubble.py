"""Bubble against microbatches: emulated points on the curve of the formula.

One should see every point, one emulated step of GPipe each, lie on (p-1)/(m+p-1): with one microbatch all
but one of p stages wait, and the bubble shrinks as 1/m only once there are many more microbatches than
stages.

The points are teaching worlds with equal times for forward and backward; the curves are equation 12.10.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter, ScalarFormatter

from emulator import DataParallel, FixedTimes, Job, Layout, Pipeline, clusters, simulate
from emulator.spec.model import Model
from plots import style
from plots.gpipe import utilisation

STAGES = (2, 4, 8)
MICROBATCHES = (1, 2, 4, 8, 16, 32, 64)

# Only the number of layers matters: a teaching world costs a stage, not its kernels.
_MODEL = Model(name="eight-layers", layers=8, hidden=64, ffn_hidden=256, heads=1, kv_heads=1, vocab=64)


def formula(stages: int, microbatches: float) -> float:
    """Bubble as a fraction of the step (equation 12.10)."""
    return (stages - 1) / (microbatches + stages - 1)


def emulated(stages: int, microbatches: int) -> Fraction:
    """Bubble of one emulated GPipe step as a fraction of the step, exact."""
    job = Job(
        model=_MODEL,
        cluster=clusters.dgx_h100(nodes=1),
        layout=Layout(pp=stages),
        pipeline=Pipeline("gpipe"),
        data_parallel=DataParallel(sharding="none"),
        fixed_times=FixedTimes(forward=1.0, backward=1.0),
        global_batch=microbatches,
        seq_len=64,
    )
    return 1 - utilisation(simulate(job).trace)


@style.styled
def draw(stages: tuple[int, ...] = STAGES, microbatches: tuple[int, ...] = MICROBATCHES) -> Figure:
    """Draw a curve and its points for each number of stages."""
    fig = style.figure(8.0, 4.6)
    (ax,) = style.axes(fig)
    curve = np.geomspace(min(microbatches), max(microbatches), 200)
    colours = (style.GREEN, style.BLUE, style.VERMILION)
    for p, colour, marker in zip(stages, colours, "osD", strict=False):
        ax.plot(curve, [formula(p, m) for m in curve], color=colour, linewidth=1.2)
        points = [float(emulated(p, m)) for m in microbatches]
        ax.plot(microbatches, points, marker, color=colour, label=f"p = {p} stages")
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_formatter(ScalarFormatter())
    ax.set_xticks(microbatches)
    ax.yaxis.set_major_formatter(PercentFormatter(1.0))
    ax.set_ylim(0, 1)
    ax.grid(alpha=0.3)
    ax.set_xlabel("microbatches m")
    ax.set_ylabel("bubble, share of the step")
    ax.set_title("Bubble of GPipe: emulated (points) and (p-1)/(m+p-1) (curves)", loc="left")
    ax.legend()
    return fig


if __name__ == "__main__":
    style.save(draw(), "bubble")
