"""Memory by stage and by term: before a run, by playing the plan in issue order, and from a trace, exactly.

A buffer lives from the start of the op that allocates it to the end of the op that frees it; at one instant,
frees come first (a stream-ordered allocator hands memory from an op to the next). Persistent buffers live
throughout. The peak of a stage is that of its fullest rank, divided by term at its first instant.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import numpy as np

from emulator.plan.program import Fixed, Kernel, Program, Template
from emulator.run.trace import Int64, Trace
from emulator.spec.units import GIB

TERMS = ("weights", "gradients", "optimizer", "activations", "buffers", "reserved")

FIXED_FIRST = ("reserved", "weights", "gradients", "optimizer", "buffers", "activations")
"""Order in which terms claim the capacity: what is there before the step first, the easiest to move last."""


class StageMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes on the fullest rank of a stage at the instant of its peak."""

    stage: int
    weights: int
    gradients: int
    optimizer: int
    activations: int
    buffers: int
    reserved: int
    peak: int
    """Sum of the terms."""
    in_flight: int
    """Largest number of microbatches between the start of their forward and the end of their backward."""
    rank: int
    """The fullest rank; of several, the lowest."""


class Over(msgspec.Struct, frozen=True, kw_only=True):
    """What broke the memory budget: the first term of FIXED_FIRST with which the sum passes the capacity."""

    stage: int
    term: str
    bytes: int
    """By how much the stage's peak exceeds the capacity."""


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of a job, stage by stage, against the capacity of one device."""

    capacity_bytes: int
    fits: bool
    stages: tuple[StageMemory, ...]
    over: Over | None

    def verdict(self) -> str:
        """Say in one line whether the job fits; if not, which term on which stage broke it, by how much."""
        fullest = max(self.stages, key=lambda stage: stage.peak)
        if self.over is None:
            return (
                f"fits: stage {fullest.stage} is the fullest with {gib(fullest.peak)} "
                f"of {gib(self.capacity_bytes)} a GPU"
            )
        before = FIXED_FIRST[: FIXED_FIRST.index(self.over.term)]
        beside = " + ".join(
            f"{term} {gib(getattr(fullest, term))}" for term in before if getattr(fullest, term)
        )
        return (
            f"does not fit: stage {fullest.stage} needs {gib(fullest.peak)}, {gib(self.over.bytes)} more "
            f"than the {gib(self.capacity_bytes)} of a GPU; {self.over.term} "
            f"({gib(getattr(fullest, self.over.term))}) broke the budget"
            + (f" after {beside}" if beside else "")
        )


class Timeline(NamedTuple):
    """Live bytes over time: row i of `bytes` (columns as TERMS) holds from `times_ps[i]` on."""

    times_ps: Int64
    bytes: Int64


def gib(count: int) -> str:
    """Write bytes in GiB."""
    return f"{count / GIB:.2f} GiB"


def memory_by_stage(program: Program, trace: Trace | None = None) -> Memory:
    """Find the peak of every stage: exactly from a trace, or from the plan alone, played in issue order.

    Without a trace the streams of a rank are taken to advance together as the host issues them; what overlaps
    more loosely in the run can hold more or less at once.
    """
    plans = [TemplateMemory(template) for template in program.templates]
    best: dict[int, StageMemory] = {}
    known: dict[int, tuple[Timeline, int]] = {}
    for i, rank_class in enumerate(program.classes):
        plan = plans[rank_class.template]
        if trace is None:
            if rank_class.template not in known:
                ticks = np.arange(len(plan.template.ops), dtype=np.int64) * 2
                known[rank_class.template] = plan.timeline(ticks, ticks + 1), plan.in_flight(ticks, ticks + 1)
            found = [known[rank_class.template]]
        else:
            found = [
                (plan.timeline(start, end), plan.in_flight(start, end))
                for start, end in (_times(trace, i, step, plan) for step in range(trace.steps))
            ]
        for timeline, in_flight in found:
            stage = _peak(plan.template.stage, min(rank_class.members), timeline, in_flight)
            if stage.stage not in best or best[stage.stage].peak < stage.peak:
                best[stage.stage] = stage
    return _judge(tuple(best[stage] for stage in sorted(best)), program.job.cluster.device.hbm_bytes)


def live_bytes(
    trace: Trace, rank: int, step: int, plans: dict[int, TemplateMemory] | None = None
) -> Timeline:
    """Live bytes of one rank through one step; `plans` keeps what is known of templates between calls."""
    index = trace.rank_class(rank)
    template = trace.program.classes[index].template
    plans = {} if plans is None else plans
    plan = plans.get(template)
    if plan is None:
        plan = plans[template] = TemplateMemory(trace.program.templates[template])
    return plan.timeline(*_times(trace, index, step, plan))


class TemplateMemory:
    """What of a template bears on memory, as arrays."""

    def __init__(self, template: Template) -> None:
        self.template = template
        self.base = np.zeros(len(TERMS), dtype=np.int64)
        for buffer in template.buffers:
            if buffer.persistent:
                self.base[TERMS.index(buffer.term)] += buffer.bytes
        allocated: dict[int, list[int]] = {}
        freed: dict[int, list[int]] = {}
        for i, op in enumerate(template.ops):
            for buffer_index in op.allocates:
                allocated.setdefault(buffer_index, []).append(i)
            for buffer_index in op.frees:
                freed.setdefault(buffer_index, []).append(i)
        lives = [
            (buffer, at, freed.get(buffer, [])[k] if k < len(freed.get(buffer, [])) else -1)
            for buffer, starts in allocated.items()
            for k, at in enumerate(starts)
        ]
        table = np.array(lives, dtype=np.int64).reshape(-1, 3)
        self.allocator, self.freer = table[:, 1], table[:, 2]
        self.bytes = np.array([template.buffers[b].bytes for b in table[:, 0]], dtype=np.int64)
        self.term = np.array([TERMS.index(template.buffers[b].term) for b in table[:, 0]], dtype=np.int64)
        kernels = [(i, op) for i, op in enumerate(template.ops) if isinstance(op.work, Kernel | Fixed)]
        self.forward = [(i, op.microbatch) for i, op in kernels if op.phase == "F" and op.microbatch >= 0]
        self.backward = [(i, op.microbatch) for i, op in kernels if op.phase in "BIW" and op.microbatch >= 0]

    def timeline(self, start: Int64, end: Int64) -> Timeline:
        """Live bytes, given when each op started and ended."""
        born = start[self.allocator]
        never = int(end.max(initial=0)) + 1  # after the step
        died = np.where(self.freer < 0, never, end[self.freer])
        real = died > born
        born, died, size, term = born[real], died[real], self.bytes[real], self.term[real]
        when = np.concatenate([born, died])
        is_birth = np.repeat([1, 0], len(born))
        order = np.lexsort((is_birth, when))
        order = order[when[order] < never]
        change = np.zeros((len(when), len(TERMS)), dtype=np.int64)
        change[np.arange(len(born)), term] = size
        change[len(born) + np.arange(len(born)), term] = -size
        running = np.cumsum(change[order], axis=0) + self.base
        first = int(start.min()) if len(start) else 0
        return Timeline(np.concatenate([[first], when[order]]), np.concatenate([self.base[None], running]))

    def in_flight(self, start: Int64, end: Int64) -> int:
        """Largest number of microbatches between the start of their forward and the end of their backward."""
        begun: dict[int, int] = {}
        over: dict[int, int] = {}
        for i, microbatch in self.forward:
            begun[microbatch] = min(begun.get(microbatch, int(start[i])), int(start[i]))
        for i, microbatch in self.backward:
            over[microbatch] = max(over.get(microbatch, 0), int(end[i]))
        events = [(at, 1) for at in begun.values()] + [(over[m], -1) for m in begun if m in over]
        count = most = 0
        for _, change in sorted(events):
            count += change
            most = max(most, count)
        return most


def _times(trace: Trace, index: int, step: int, plan: TemplateMemory) -> tuple[Int64, Int64]:
    """Start and end of each op of a class in a step; an op that an interruption cut off never starts."""
    rows = trace.class_rows(index)
    rows = rows[trace.columns.step[rows] == step]
    start = np.full(len(plan.template.ops), np.iinfo(np.int64).max // 2, dtype=np.int64)
    end = start.copy()
    start[trace.columns.op_index[rows]] = trace.columns.start_ps[rows]
    end[trace.columns.op_index[rows]] = trace.columns.end_ps[rows]
    return start, end


def _peak(stage: int, rank: int, timeline: Timeline, in_flight: int) -> StageMemory:
    totals = timeline.bytes.sum(axis=1)
    at = int(totals.argmax())
    terms = {term: int(value) for term, value in zip(TERMS, timeline.bytes[at], strict=True)}
    return StageMemory(stage=stage, rank=rank, peak=int(totals[at]), in_flight=in_flight, **terms)


def _judge(stages: tuple[StageMemory, ...], capacity: int) -> Memory:
    over = None
    fullest = max(stages, key=lambda stage: stage.peak)
    if fullest.peak > capacity:
        claimed = np.cumsum([getattr(fullest, term) for term in FIXED_FIRST])
        term = FIXED_FIRST[int(np.argmax(claimed > capacity))]
        over = Over(stage=fullest.stage, term=term, bytes=fullest.peak - capacity)
    return Memory(capacity_bytes=capacity, fits=over is None, stages=stages, over=over)
