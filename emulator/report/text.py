"""A Report as text for a terminal of 100 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from emulator.report.hints import mfu_verdict
from emulator.report.memory import TERMS, gib
from emulator.spec.units import GB, counted

if TYPE_CHECKING:
    from emulator.report.metrics import Report

COLUMNS = 100

BAR = 40
"""Columns of a bar that stands for the whole step."""

CONVENTION_NAMES = {
    "full_attention": "attention in full",
    "6nd": "6ND",
    "with_embedding": "input embedding counted",
}


def render(report: Report) -> str:
    """Lay a report out: speed, time account, communication, memory, emulation, hints."""
    parts = [_title(report.job), _speed(report)]
    if report.time_ps is not None:
        parts += [_time(report), _communication(report)]
    parts += [_memory(report), _emulation(report)]
    if report.hints:
        parts.append("\n".join(_wrapped(hint, "* ") for hint in report.hints))
    return "\n\n".join(part for part in parts if part) + "\n"


def seconds_text(seconds: float) -> str:
    """Write a duration with a unit that suits its size."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.4g} {unit}"
    return f"{seconds / 1e-9:.4g} ns" if seconds else "0 s"


def _wrapped(sentence: str, bullet: str) -> str:
    return textwrap.fill(sentence, COLUMNS, initial_indent=bullet, subsequent_indent=" " * len(bullet))


def _title(job: dict[str, Any]) -> str:
    layout, data = job["layout"], job["data_parallel"]
    degrees = [f"{axis} {layout[axis]}" for axis in ("tp", "cp", "pp", "dp_replicate", "dp_shard")]
    shown = ", ".join(d for d in degrees if not d.endswith(" 1")) or "1 rank"
    replicas = layout["dp_replicate"] * layout["dp_shard"]
    sharding = f"; {data['sharding']}" if replicas > 1 else ""
    schedule = f"; {job['pipeline']['schedule']}" if layout["pp"] > 1 else ""
    microbatches = counted(
        job["global_batch"] // (job["micro_batch"] * replicas), "microbatch", "microbatches"
    )
    lines = [
        f"{job['model']['name']} on {job['gpus']} x {job['cluster']['device']['name']} "
        f"({job['cluster']['name']}), {job['precision']}",
        f"{shown}{sharding}{schedule}; {job['global_batch']} sequences of {job['seq_len']} tokens a step, "
        f"{microbatches} of {job['micro_batch']} a replica",
    ]
    return "\n".join(lines)


def _speed(report: Report) -> str:
    if report.step_seconds is None:
        return _wrapped(f"{report.outcome.kind}: {report.outcome.why}", "")
    lines = []
    if report.outcome.kind != "complete":
        lines.append(f"{report.outcome.kind} at {report.outcome.at_seconds:.6g} s: {report.outcome.why}")
    steps = len(report.step_seconds_each)
    each = ", ".join(seconds_text(s) for s in report.step_seconds_each[:8]) + (", ..." if steps > 8 else "")
    lines.append(_row("step", seconds_text(report.step_seconds), f"last of {each}" if steps > 1 else ""))
    if report.tokens_per_second_per_gpu is not None:
        lines.append(_row("throughput", f"{report.tokens_per_second_per_gpu:,.1f}", "tokens/s per GPU"))
    if report.mfu is not None and report.hfu is not None and report.tflops_per_gpu is not None:
        others = "; ".join(
            f"{CONVENTION_NAMES[name]} {value:.1%}"
            for name, value in report.mfu_conventions.items()
            if name in CONVENTION_NAMES and value is not None
        )
        peak = report.job["cluster"]["device"]["peak_flops"][report.job["precision"]] / 1e12
        of = f"TFLOP/s per GPU of {peak:.4g} ({report.job['precision']}, dense)"
        lines.append(_row("model FLOPs", f"{report.tflops_per_gpu:.1f}", of))
        lines.append(
            _row("MFU", f"{report.mfu:.1%}", f"{mfu_verdict(report.mfu)}; causal attention counted half")
        )
        lines.append(_row("", "", others))
        lines.append(_row("HFU", f"{report.hfu:.1%}", "all GEMM and attention kernels, recompute included"))
    bubble = report.bubble
    if bubble.of_step is not None and bubble.of_ideal is not None and bubble.rank_local is not None:
        lines.append(
            _row(
                "bubble",
                f"{bubble.of_step:.2%}",
                f"of the step; {bubble.of_ideal:.2%} of the ideal, which the busiest stage sets",
            )
        )
        lines.append(_row("", "", f"rank-local {bubble.rank_local:.2%}: what the idlest stage waits"))
    return "\n".join(lines)


def _row(name: str, value: str, note: str) -> str:
    return f"  {name:<12}{value:>12}  {note}".rstrip()


def _time(report: Report) -> str:
    assert report.time_ps is not None
    assert report.step_ps is not None
    lines = [f"Where the step of rank {report.critical_rank} went (the rank that ends last)"]
    flat: dict[str, int] = {}
    for name, value in report.time_ps.items():
        if isinstance(value, dict):
            flat |= {f"{name} {axis}": ps for axis, ps in value.items()}
        else:
            flat[name] = value
    for name, ps in flat.items():
        if ps or name in ("compute", "bubble"):
            share = ps / report.step_ps if report.step_ps else 0.0
            bar = "#" * round(share * BAR)
            lines.append(f"  {name:<14}{seconds_text(ps / 1e12):>12}  {share:>6.1%}  {bar}".rstrip())
    return "\n".join(lines)


def _communication(report: Report) -> str:
    if not report.communication:
        return ""
    header = ("axis", "GB per GPU", "moving", "exposed", "overlapped", "busbw GB/s")
    rows = [
        (
            axis,
            f"{traffic.bytes_per_gpu / GB:.3f}",
            seconds_text(traffic.seconds),
            seconds_text(traffic.exposed_seconds),
            seconds_text(traffic.overlapped_seconds),
            "-" if traffic.busbw is None else f"{traffic.busbw / GB:.1f}",
        )
        for axis, traffic in report.communication.items()
    ]
    return f"Communication of rank {report.critical_rank}\n" + _table(header, rows)


def _memory(report: Report) -> str:
    header = ("stage", *TERMS, "peak", "in flight")
    rows = [
        (
            str(stage.stage),
            *(f"{getattr(stage, term) / 2**30:.2f}" for term in TERMS),
            f"{stage.peak / 2**30:.2f}",
            str(stage.in_flight),
        )
        for stage in report.memory.stages
    ]
    title = f"Memory at each stage's peak, GiB of {gib(report.memory.capacity_bytes)} on a GPU"
    return f"{title}\n{_table(header, rows)}\n{_wrapped(report.memory.verdict(), '  ')}"


def _emulation(report: Report) -> str:
    e = report.emulation
    ranks, classes = counted(e.ranks, "rank"), counted(e.classes, "class", "classes")
    return (
        f"Emulated {ranks} in {classes}: {e.ops:,} ops, {e.events:,} events, "
        f"{e.wall_seconds:.2f} s (emulator {e.version})"
    )


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(line[i]) for line in (header, *rows)) for i in range(len(header))]
    lines = (
        "  ".join(cell.rjust(w) for cell, w in zip(line, widths, strict=True)) for line in (header, *rows)
    )
    return "\n".join(f"  {line}" for line in lines)
