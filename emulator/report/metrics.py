"""A Trace measured: the Report.

All figures of time are those of the last step on the critical rank (see `account`); a report of several steps
lists each step's duration beside them. A teaching world has times but no physics: its MFU and HFU are null.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from emulator.plan.body import Body
from emulator.plan.program import COMPUTE, Kernel, Program
from emulator.report import text
from emulator.report.account import Account, account, critical_rank, step_bounds
from emulator.report.communication import AxisTraffic, communication
from emulator.report.hints import Busiest, hints
from emulator.report.memory import Memory, memory_by_stage
from emulator.run import intervals
from emulator.run.op_index import bodies, in_phase, kernels, on_stream
from emulator.run.trace import Trace
from emulator.spec.arrays import Int64
from emulator.spec.job import Job, resolved
from emulator.spec.model import FlopConvention
from emulator.spec.units import to_seconds
from emulator.version import __version__

CONVENTIONS: dict[str, FlopConvention] = {
    "causal": "causal",
    "full_attention": "full_attention",
    "6nd": "6nd",
    "with_embedding": "causal_with_embedding",
}
"""Keys of mfu_conventions and how the model counts each."""


class Bubble(msgspec.Struct, frozen=True, kw_only=True):
    """Pipeline bubble as fractions; null without a pipeline.

    The bubble is what remains of the makespan without the busiest rank's kernels and without the critical
    rank's exposed communication, launch and loader time: (p-1)(F+B) for GPipe and 1F1B (arXiv 2104.04473).
    """

    of_step: float | None
    """Bubble over the step: (p-1)/(m+p-1)."""
    of_ideal: float | None
    """Bubble over the step without it: (p-1)/m."""
    rank_local: float | None
    """The zero-bubble papers' own: largest over ranks of last end - first start - busy, over the step."""


class Emulation(msgspec.Struct, frozen=True, kw_only=True):
    """What it took to emulate."""

    ranks: int
    classes: int
    ops: int
    """Spans in the trace; ops planned when nothing ran."""
    events: int
    """SimPy events processed."""
    wall_seconds: float
    """From the beginning of planning, or of the run where nobody noted when that was, to this report."""
    version: str


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """How it ended: complete, interrupted, deadlock, or not run."""

    kind: str
    why: str | None
    at_seconds: float | None


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The report, as `--json` writes it; SI units, null where a figure does not apply."""

    job: dict[str, Any]  # JSON of a job
    outcome: Outcome
    step_seconds: float | None = None
    step_ps: int | None = None
    step_seconds_each: list[float] = []
    tokens_per_second_per_gpu: float | None = None
    tflops_per_gpu: float | None = None
    """Model FLOP (causal) per second and GPU, in units of 1e12."""
    mfu: float | None = None
    """The causal convention."""
    hfu: float | None = None
    """FLOPs of all GEMM and attention kernels, recompute included, over the dense peak."""
    mfu_conventions: dict[str, float | None] = {}
    bubble: Bubble
    critical_rank: int | None = None
    time: dict[str, float | dict[str, float]] | None = None
    time_ps: dict[str, int | dict[str, int]] | None = None
    communication: dict[str, AxisTraffic] = {}
    memory: Memory
    faults: list[dict[str, Any]] | None = None
    emulation: Emulation
    hints: list[str] = []

    def to_dict(self) -> dict[str, Any]:
        """Return builtins, ready for JSON."""
        table: dict[str, Any] = msgspec.to_builtins(self)
        return table

    def __str__(self) -> str:
        return text.render(self)


def measure(trace: Trace, began: float | None = None) -> Report:
    """Measure a trace with at least one span.

    `began` is what time.perf_counter() said when the emulation did; the wall time reported runs from there to
    now. Without it, it is that of the run and of this call.
    """
    began = time.perf_counter() - trace.wall_seconds if began is None else began
    program, job = trace.program, trace.program.job
    rank = critical_rank(trace)
    times = account(trace, rank)
    seconds = to_seconds(times.step_ps)
    mfu = _utilisation(job, seconds)
    memory = memory_by_stage(program, trace)
    stages = _stage_times(trace, times.step) if job.layout.pp > 1 else []
    busiest = max((Busiest(each.stage, each.busy_ps) for each in stages), key=lambda b: b.ps, default=None)
    traffic = communication(trace, times)
    tokens = job.global_batch * job.seq_len
    ranks = job.layout.world_size
    flops = job.model.training_flops_per_token(job.seq_len) * tokens
    physical = job.fixed_times is None and seconds > 0
    return Report(
        job=resolved(job),
        outcome=Outcome(
            kind=trace.outcome.kind,
            why=trace.outcome.cause or None,
            at_seconds=to_seconds(trace.outcome.at_ps),
        ),
        step_seconds=seconds,
        step_ps=times.step_ps,
        step_seconds_each=[to_seconds(end - start) for start, end in step_bounds(trace, rank)],
        tokens_per_second_per_gpu=tokens / seconds / ranks if seconds else None,
        tflops_per_gpu=flops / seconds / ranks / 1e12 if physical else None,
        mfu=mfu["causal"],
        hfu=_hardware_flops(program) / seconds / ranks / _peak(job) if physical else None,
        mfu_conventions=mfu,
        bubble=_bubble(times, stages),
        critical_rank=rank,
        time=_seconds(times),
        time_ps=times.time_ps(),
        communication=traffic,
        memory=memory,
        faults=[{"kind": f.kind, "rank": f.rank, "factor": f.factor} for f in job.faults] or None,
        hints=hints(job, times, memory, mfu["causal"], busiest),
        emulation=_emulation(program, len(trace), trace.events, began),
    )


def unmeasured(program: Program, kind: str, why: str, began: float | None = None) -> Report:
    """Report on a job that was not played to the end: memory from the plan, and why there is nothing else.

    `kind` is "not run" or "deadlock"; `began` as in `measure`.
    """
    began = time.perf_counter() if began is None else began
    memory = memory_by_stage(program)
    return Report(
        job=resolved(program.job),
        outcome=Outcome(kind=kind, why=why, at_seconds=None),
        mfu_conventions=dict.fromkeys(CONVENTIONS),
        bubble=Bubble(of_step=None, of_ideal=None, rank_local=None),
        memory=memory,
        hints=[] if memory.fits else hints(program.job, None, memory, None),
        emulation=_emulation(program, _planned_ops(program), 0, began),
    )


def _peak(job: Job) -> float:
    return job.cluster.device.peak(job.precision)


def _utilisation(job: Job, seconds: float) -> dict[str, float | None]:
    if job.fixed_times is not None or not seconds:
        return dict.fromkeys(CONVENTIONS)
    rate = job.global_batch * job.seq_len / seconds / job.layout.world_size
    return {
        name: job.model.mfu(rate, job.seq_len, _peak(job), convention)
        for name, convention in CONVENTIONS.items()
    }


def _hardware_flops(program: Program) -> int:
    """FLOPs of the GEMM and attention kernels of all ranks in one step."""
    flops: dict[Body, int] = {}
    for body in bodies(program):
        count = np.bincount(body.work, minlength=len(body.works)).tolist()
        flops[body] = sum(
            work.flops * times
            for work, times in zip(body.works, count, strict=True)
            if isinstance(work, Kernel) and work.kind in ("gemm", "attention")
        )
    return sum(flops[program.templates[c.template].body] * len(c.members) for c in program.classes)


class _StageTimes(NamedTuple):
    """Kernels on the compute stream of one rank class in one step."""

    stage: int
    busy_ps: int
    idle_ps: int
    """Between the first and the last kernel of forward and backward, what none of them filled."""


def _stage_times(trace: Trace, step: int) -> list[_StageTimes]:
    """Times of every class."""
    c = trace.columns
    marks = {
        body: (kernels(body) & on_stream(body, COMPUTE), in_phase(body, "FBIWR"))
        for body in bodies(trace.program)
    }
    found = []
    for i in range(len(trace.program.classes)):
        template = trace.template(i)
        kernel, pipeline = marks[template.body]
        rows = trace.step_rows(i, step)
        kernel = kernel & (rows >= 0)

        def ran(rows: Int64) -> Int64:
            return intervals.union(intervals.pairs(c.start_ps[rows], c.end_ps[rows]))

        own = rows[kernel & pipeline]
        whole = int(c.end_ps[own].max() - c.start_ps[own].min()) if len(own) else 0
        idle = whole - intervals.length(ran(own))
        found.append(_StageTimes(template.stage, intervals.length(ran(rows[kernel])), idle))
    return found


def _bubble(times: Account, stages: Sequence[_StageTimes]) -> Bubble:
    if not stages or not times.step_ps:
        return Bubble(of_step=None, of_ideal=None, rank_local=None)
    busiest, idle = max(each.busy_ps for each in stages), max(each.idle_ps for each in stages)
    elsewhere = sum(times.exposed.values()) + times.launch + times.loader
    bubble = max(0, times.step_ps - busiest - elsewhere)
    ideal = times.step_ps - bubble
    return Bubble(
        of_step=bubble / times.step_ps,
        of_ideal=bubble / ideal if ideal else None,
        rank_local=idle / times.step_ps,
    )


def _seconds(times: Account) -> dict[str, float | dict[str, float]]:
    return {
        name: {axis: to_seconds(ps) for axis, ps in value.items()}
        if isinstance(value, dict)
        else to_seconds(value)
        for name, value in times.time_ps().items()
    }


def _planned_ops(program: Program) -> int:
    return sum(len(program.templates[rank_class.template]) for rank_class in program.classes)


def _emulation(program: Program, ops: int, events: int, began: float) -> Emulation:
    return Emulation(
        ranks=program.ranks,
        classes=len(program.classes),
        ops=ops,
        events=events,
        wall_seconds=time.perf_counter() - began,
        version=__version__,
    )
