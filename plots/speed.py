"""How long a step of Llama 3 405B's layers takes to emulate, over ranks, microbatches and layers.

One should see that ranks cost nothing beyond planning (two orders of magnitude more of them, the same run
time), and that microbatches and layers, which are events, cost in proportion. Beside it stand two tools of
the field.

The figures are those of the last `make bench` (plots/data/speed.json), on whatever machine it ran.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from plots import style

FIGURES = Path(__file__).parent / "data" / "speed.json"
YARD = 1.2e6
"""Timeouts a second of bare SimPy to which seconds are brought."""

Row = dict[str, Any]


def at_yard(row: Row, seconds: float) -> float:
    """Seconds on a machine where bare SimPy makes 1.2 million timeouts a second."""
    return float(seconds * row["timeouts_per_second"] / YARD)


def executor_table(rows: Sequence[Row]) -> str:
    """Ops a second of the executor against timeouts a second."""
    lines = ["| case | ops | ops/s | SimPy timeouts/s | ratio |", "|---|--:|--:|--:|--:|"]
    for row in rows:
        lines.append(
            f"| {row['case']} | {row['ops']:,} | {row['ops_per_second']:,.0f} | "
            f"{row['timeouts_per_second']:,.0f} | 1/{row['ratio']:.1f} |"
        )
    return "\n".join(lines) + "\n"


def job_table(rows: Sequence[Row]) -> str:
    """Seconds and memory of whole jobs, by part."""
    lines = [
        "| job | ranks | classes | spans | plan | lower | run | report | total s | "
        "at 1.2 M timeouts/s | peak MB |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        s = row["seconds"]
        parts = " | ".join(f"{s[part]:.2f}" for part in ("plan", "lower", "run", "report", "total"))
        lines.append(
            f"| {_named(row['case'])} | {row['ranks']:,} | {row['classes']} | {row['spans']:,} | {parts} | "
            f"{at_yard(row, s['total']):.2f} | {row['peak_bytes'] / 1e6:.0f} |"
        )
    return "\n".join(lines) + "\n"


def _named(case: Row) -> str:
    name = f"{case['sharding'].upper()}, {case['microbatches']} microbatches, {case['layers']} layers"
    return name + (", uplink full" if case["uplink"] else "")


def flow_table(rows: Sequence[Row]) -> str:
    """Flows a second that share links."""
    lines = ["| flows that share links | flows/s | SimPy timeouts/s | timeouts a flow |", "|---|--:|--:|--:|"]
    for row in rows:
        rate, yard = row["flows_per_second"], row["timeouts_per_second"]
        lines.append(f"| {row['flows']:,} | {rate:,.0f} | {yard:,.0f} | {yard / rate:.0f} |")
    return "\n".join(lines) + "\n"


def _lines(ax: Axes, rows: Sequence[Row], what: str, unit: str) -> None:
    across = [row["ranks"] if what == "ranks" else row["case"][what] for row in rows]
    for part, colour, marker in (
        ("total", style.BLACK, "o"),
        ("run", style.BLUE, "s"),
        ("plan", style.ORANGE, "^"),
    ):
        seconds = [at_yard(row, row["seconds"][part]) for row in rows]
        ax.plot(across, seconds, color=colour, marker=marker, label=part)
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_xticks(across, [f"{x:,}" for x in across])
    ax.minorticks_off()
    ax.set_xlabel(unit)


@style.styled
def draw() -> Figure:
    """Draw three panels: over ranks with the field beside them, over microbatches, over layers."""
    figures = json.loads(FIGURES.read_text())
    fig = style.figure(11.0, 3.8)
    ranks, microbatches, layers = style.axes(fig, columns=3)
    _lines(ranks, figures["ranks"], "ranks", "GPUs (16 stages, 16 microbatches, 126 layers)")
    _lines(microbatches, figures["microbatches"], "microbatches", "microbatches (16,384 GPUs)")
    _lines(layers, figures["layers"], "layers", "layers (16,384 GPUs)")
    # Both tried on two cores: ASTRA-sim 2 takes 75 to 97 s for an all_reduce alone on 4,096 devices;
    # SimuMax 1.2 in its event mode 23.8 s for the ranks of one pipeline of 16 stages and 16 microbatches.
    ranks.plot([4096], [75], color=style.VERMILION, marker="v", linestyle="none")
    ranks.annotate("ASTRA-sim: one all-reduce", (4096, 75), xytext=(6, -3), textcoords="offset points")
    ranks.axhline(23.8, color=style.PURPLE, linestyle=":")
    ranks.annotate("SimuMax: one pipeline", (1024, 23.8), xytext=(0, 4), textcoords="offset points")
    for ax in (ranks, microbatches, layers):
        ax.set_ylim(0.02, 150)
    ranks.set_ylabel("seconds, where SimPy\nmakes 1.2 M timeouts/s")
    microbatches.legend(loc="upper left")
    ranks.set_title("A step of Llama 3 405B's layers with FSDP, kernel by kernel", loc="left")
    return fig


if __name__ == "__main__":
    style.save(draw(), "speed")
