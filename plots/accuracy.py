"""Predicted against measured step times: every public training run that is in reach, none of them fitted.

One should see a cloud along the diagonal, mostly under it: what the emulator leaves out only takes time. MPT
on A100 and H100 lies some 10 % low, from 1 % at 13b to 16 % at 125m; furthest off are nanotron and JAX (too
fast) and Megatron-Bridge's fp8 (too slow), whose software does what is not emulated.

`tests/data/measured.csv` has the runs and their sources. The cost models were fitted on single kernels and
know none of these rows.
"""

from __future__ import annotations

import csv
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import msgspec
from matplotlib.figure import Figure

from emulator import Job
from emulator.plan import plan
from emulator.run import run
from emulator.spec.cluster import Cluster
from emulator.spec.device import DEVICES
from emulator.spec.model import Model
from plots import style

TABLE = Path(__file__).parents[1] / "tests" / "data" / "measured.csv"

# What the rows of a shape have in common; what a source does not print is its software's default.
_SHAPES: dict[str, dict[str, object]] = {
    "mpt": {"gpt": True, "tied_embeddings": True},
    "gpt3": {"gpt": True, "tied_embeddings": True},
    "llama": {},
    "llama-tied": {"tied_embeddings": True},
}
_GPT = {
    "activation": "gelu", "norm": "layernorm", "rotary": False,
    "attention_bias": True, "projection_bias": True, "mlp_bias": True,
}  # fmt: skip

COLOURS = {
    "llm-foundry, A100": style.BLUE,
    "llm-foundry, H100": style.GREEN,
    "llm-foundry, H100 fp8": style.SKY,
    "torchtitan, A100": style.PURPLE,
    "dgxc-benchmarking, H100": style.ORANGE,
    "dgxc-benchmarking, H100 fp8": style.YELLOW,
    "megatron-bridge, H100 fp8": style.GREY,
    "nanotron, H100": style.VERMILION,
}
"""Colour of each class of rows, in the order of the legend."""

Row = dict[str, str]


class Point(NamedTuple):
    """One measured run and what the emulator makes of it."""

    row: Row
    measured: float
    predicted: float
    null: float
    """FLOPs of the model (attention with its mask) at half the dense peak: a model without a machine."""

    @property
    def group(self) -> str:
        """Source and device generation, and fp8 apart."""
        part = self.row["device"].split("-")[0].upper()
        return f"{self.row['source']}, {part}" + (" fp8" if self.row["precision"] == "fp8" else "")

    @property
    def error(self) -> float:
        """Signed error of the prediction as a fraction of what was measured."""
        return self.predicted / self.measured - 1

    @property
    def null_error(self) -> float:
        """The same of the null model."""
        return self.null / self.measured - 1


class Summary(NamedTuple):
    """Errors of some points: count, median and 90th percentile of the absolute ones, median of the signed."""

    n: int
    median: float
    p90: float
    bias: float

    def __str__(self) -> str:
        return f"n {self.n:3d}  median {self.median:6.1%}  p90 {self.p90:6.1%}  bias {self.bias:+6.1%}"


def summary(errors: Sequence[float]) -> Summary:
    """Summarise signed errors; the percentile is the smallest that nine tenths do not exceed."""
    size = sorted(abs(error) for error in errors)
    ninth = size[-(-9 * len(size) // 10) - 1]
    return Summary(len(size), statistics.median(size), ninth, statistics.median(errors))


@cache
def rows() -> tuple[Row, ...]:
    """Read the table of measured runs."""
    with TABLE.open(encoding="utf-8") as lines:
        return tuple(csv.DictReader(line for line in lines if not line.startswith("#")))


def sample() -> list[Row]:
    """Rows of every source that take seconds together."""
    return [row for row in rows() if row["sample"] == "1"]


def job(row: Row) -> Job:
    """Build the job of a row."""
    shape = dict(_SHAPES[row["shape"]])
    if shape.pop("gpt", False):
        shape |= {**_GPT, "learned_positions": int(row["seq_len"])}
    sizes = ("layers", "hidden", "ffn_hidden", "heads", "kv_heads", "vocab")
    gpus = int(row["gpus"])
    cluster = Cluster(
        device=DEVICES[row["device"]], nodes=-(-gpus // 8), nic_gbit_per_gpu=float(row["nic_gbit_per_gpu"]),
        rail_optimised=True,
    )  # fmt: skip
    return msgspec.convert(
        {
            "model": msgspec.convert(
                {"name": row["model"], **{k: int(row[k]) for k in sizes}, **shape}, Model
            ),
            "cluster": cluster,
            "layout": {"dp_shard": gpus},
            "data_parallel": {
                "sharding": row["sharding"],
                "reshard_after_forward": row["reshard_after_forward"] == "true",
                "backward_prefetch": row["backward_prefetch"],
                "reduce_precision": row["reduce_precision"],
            },
            "attention": row["attention"],
            "precision": row["precision"],
            "seq_len": int(row["seq_len"]),
            "micro_batch": int(row["micro_batch"]),
            "global_batch": int(row["global_batch"]),
        },
        Job,
    )


def point(row: Row) -> Point:
    """Emulate the step of a row, every rank of it."""
    of = job(row)
    tokens = of.global_batch * of.seq_len / of.layout.world_size
    peak = of.cluster.device.peak(of.precision)
    null = tokens * of.model.training_flops_per_token(of.seq_len) / (peak / 2)
    return Point(row, float(row["step_seconds"]), run(plan(of)).end_ps / 1e12, null)


def by_group(points: Iterable[Point]) -> dict[str, list[Point]]:
    """Sort points by source and device, in the order of the colours."""
    groups: dict[str, list[Point]] = defaultdict(list)
    for each in points:
        groups[each.group].append(each)
    return {name: groups[name] for name in COLOURS if name in groups}


def table(points: Sequence[Point]) -> str:
    """Errors by source and device as the table of the README."""
    lines = [
        "| source, device | runs | median abs. error | p90 | bias | null model: median / p90 |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for name, those in {**by_group(points), "**all**": list(points)}.items():
        ours, null = summary([p.error for p in those]), summary([p.null_error for p in those])
        lines.append(
            f"| {name} | {ours.n} | {ours.median:.1%} | {ours.p90:.1%} | {ours.bias:+.1%} "
            f"| {null.median:.1%} / {null.p90:.1%} |"
        )
    return "\n".join(lines) + "\n"


@style.styled
def draw(points: Sequence[Point] | None = None) -> Figure:
    """Draw the points, by default of every row (minutes), on two logarithmic axes with a band of 10 %."""
    points = points if points is not None else [point(row) for row in rows()]
    fig = style.figure(7.0, 6.6)
    (ax,) = style.axes(fig)
    ends = [0.8 * min(p.measured for p in points), 1.25 * max(p.measured for p in points)]
    ax.fill_between(ends, [0.9 * e for e in ends], [1.1 * e for e in ends], color="0.9", label="±10 %")
    ax.plot(ends, ends, color="0.5", linewidth=1)
    for name, those in by_group(points).items():
        errors = summary([p.error for p in those])
        ax.plot(
            [p.measured for p in those], [p.predicted for p in those], "o", ms=5, alpha=0.85,
            mec="white", mew=0.4, color=COLOURS[name], label=f"{name} ({errors.n}): {errors.bias:+.0%}",
        )  # fmt: skip
    ax.set(xscale="log", yscale="log", xlim=ends, ylim=ends, aspect="equal")
    ax.set_xlabel("measured seconds a step")
    ax.set_ylabel("predicted seconds a step")
    ax.set_title("Predicted against measured steps (number of runs: median signed error)", loc="left")
    ax.grid(alpha=0.3)
    ax.legend(loc="upper left", fontsize=9)
    return fig


if __name__ == "__main__":
    style.save(draw(), "accuracy")
