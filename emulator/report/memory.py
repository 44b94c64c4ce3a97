"""Memory by stage and by term: before a run, by playing the plan in issue order, and from a trace, exactly.

A buffer lives from the start of the op that allocates it to the end of the op that frees it; at one instant,
frees come first (a stream-ordered allocator hands memory from an op to the next). Persistent buffers live
throughout. The peak of a stage is that of its fullest rank, divided by term at its first instant.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from emulator.plan.body import Body, Lists
from emulator.plan.op import TERMS
from emulator.plan.program import Program
from emulator.run.op_index import bodies, in_phase, kernels
from emulator.run.trace import Trace
from emulator.spec.arrays import Int64
from emulator.spec.units import GIB

__all__ = ["TERMS", "Memory", "StageMemory", "gib", "live_bytes", "memory_by_stage"]

NEVER = np.iinfo(np.int64).max
"""Start and end of an op that an interruption cut off."""

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
    plans = {body: BodyMemory(body) for body in bodies(program)}
    planned = {body: [plan.peak(*plan.issued())] for body, plan in plans.items()} if trace is None else {}
    best: dict[int, StageMemory] = {}
    for i, rank_class in enumerate(program.classes):
        template = program.templates[rank_class.template]
        plan = plans[template.body]
        if trace is None:
            peaks = planned[template.body]
        else:
            peaks = [plan.peak(*_times(trace, i, step)) for step in range(trace.steps)]
        for peak in peaks:
            stage = peak.of_stage(template.stage, min(rank_class.members))
            if stage.stage not in best or best[stage.stage].peak < stage.peak:
                best[stage.stage] = stage
    return _judge(tuple(best[stage] for stage in sorted(best)), program.job.cluster.device.hbm_bytes)


def live_bytes(trace: Trace, rank: int, step: int, plans: dict[Body, BodyMemory] | None = None) -> Timeline:
    """Live bytes of one rank through one step; `plans` keeps what is known of bodies between calls."""
    index = trace.rank_class(rank)
    body = trace.template(index).body
    plans = {} if plans is None else plans
    if body not in plans:
        plans[body] = BodyMemory(body)
    return plans[body].timeline(*_times(trace, index, step))


class Peak(NamedTuple):
    """Bytes by term (as TERMS) at the first instant at which they are most, and microbatches in flight."""

    terms: Int64
    in_flight: int

    def of_stage(self, stage: int, rank: int) -> StageMemory:
        """The same as a line of the report."""
        terms = dict(zip(TERMS, self.terms.tolist(), strict=True))
        return StageMemory(
            stage=stage, rank=rank, peak=sum(terms.values()), in_flight=self.in_flight, **terms
        )


class BodyMemory:
    """What of a template's body bears on memory, as arrays: who allocates and frees what, and when.

    Of a buffer that is allocated several times, the n-th life ends with the n-th op that frees it.
    """

    def __init__(self, body: Body) -> None:
        buffers = body.buffers
        self.ops = len(body)
        self.base = np.zeros(len(TERMS), dtype=np.int64)
        np.add.at(self.base, buffers.term[buffers.persistent], buffers.bytes[buffers.persistent])
        born, allocator = _lives(body.allocates)
        died, freer = _lives(body.frees)
        at = np.searchsorted(died, born)
        freed = at < len(died)
        freed[freed] = died[at[freed]] == born[freed]
        ends = np.full(len(born), -1, dtype=np.int64)
        ends[freed] = freer[at[freed]]
        order = np.argsort(allocator, kind="stable")  # in time they come nearly so, which is quick to sort
        self.allocator, self.freer, buffer = allocator[order], ends[order], born[order] >> _LIFE_BITS
        self.bytes, self.term = buffers.bytes[buffer], buffers.term[buffer]
        kernel = kernels(body) & (body.microbatch >= 0)
        self.forward = _Extent.of(body, kernel & in_phase(body, "F"))
        backward = _Extent.of(body, kernel & in_phase(body, "BIW"))
        self.backward, self.begun = backward, np.isin(backward.microbatches, self.forward.microbatches)

    def issued(self) -> tuple[Int64, Int64]:
        """Starts and ends of the ops of a step that runs one after the other in the order of issue."""
        ticks = np.arange(self.ops, dtype=np.int64) * 2
        return ticks, ticks + 1

    def peak(self, start: Int64, end: Int64) -> Peak:
        """When most is alive, given when each op started and ended."""
        _, term, change = self._changes(start, end)
        totals = np.cumsum(change)
        at = int(totals.argmax()) + 1 if len(totals) and totals.max() > 0 else 0
        terms = self.base.copy()
        np.add.at(terms, term[:at], change[:at])
        return Peak(terms, self.in_flight(start, end))

    def timeline(self, start: Int64, end: Int64) -> Timeline:
        """Live bytes, given when each op started and ended."""
        when, term, change = self._changes(start, end)
        table = np.zeros((len(when) + 1, len(TERMS)), dtype=np.int64)
        table[0] = self.base
        table[np.arange(1, len(table)), term] = change
        first = int(start.min()) if len(start) else 0
        return Timeline(np.concatenate([[first], when]), np.cumsum(table, axis=0))

    def _changes(self, start: Int64, end: Int64) -> tuple[Int64, Int64, Int64]:
        """Time, term and bytes of every birth and death within the step, in order."""
        born = start[self.allocator]
        died = np.where(self.freer < 0, NEVER, end[self.freer])
        real = died > born
        size, term = self.bytes[real], self.term[real]
        when = np.concatenate([died[real], born[real]])
        order = np.argsort(when, kind="stable")  # deaths stand first, so of one instant they come first
        order = order[: np.searchsorted(when, NEVER, sorter=order)]
        return when[order], np.concatenate([term, term])[order], np.concatenate([-size, size])[order]

    def in_flight(self, start: Int64, end: Int64) -> int:
        """Largest number of microbatches between the start of their forward and the end of their backward."""
        begun, over = self.forward.each(start, np.minimum), self.backward.each(end, np.maximum)[self.begun]
        when = np.concatenate([over, begun])
        change = np.repeat([-1, 1], [len(over), len(begun)])
        order = np.argsort(when, kind="stable")
        return int(np.cumsum(change[order]).max(initial=0))


class _Extent(NamedTuple):
    """Ops of each microbatch: those of microbatches[i] are ops[begin[i] : begin[i + 1]]."""

    microbatches: Int64
    ops: Int64
    begin: Int64

    @classmethod
    def of(cls, body: Body, marks: npt.NDArray[np.bool_]) -> _Extent:
        ops = np.flatnonzero(marks)
        ops = ops[np.argsort(body.microbatch[ops], kind="stable")]
        microbatches, begin = np.unique(body.microbatch[ops], return_index=True)
        return cls(microbatches, ops, begin)

    def each(self, times: Int64, extreme: np.ufunc) -> Int64:
        """The first or the last of each microbatch's times."""
        found: Int64 = extreme.reduceat(times[self.ops], self.begin) if len(self.begin) else times[:0]
        return found


_LIFE_BITS = 32
"""A life of a buffer as one number: the buffer above these bits, below them how many it had before."""


def _lives(touched: Lists) -> tuple[Int64, Int64]:
    """Lives that ops begin or end, ascending, and the op that does."""
    order = np.argsort(touched.items, kind="stable")
    buffer = touched.items[order]
    before = np.arange(len(buffer)) - np.searchsorted(buffer, buffer)
    return (buffer << _LIFE_BITS) + before, touched.owners[order]


def _times(trace: Trace, index: int, step: int) -> tuple[Int64, Int64]:
    """Start and end of each op of a class in a step."""
    rows = trace.step_rows(index, step)
    start, end = trace.columns.start_ps[rows], trace.columns.end_ps[rows]
    missing = rows < 0
    start[missing] = end[missing] = NEVER
    return start, end


def _judge(stages: tuple[StageMemory, ...], capacity: int) -> Memory:
    over = None
    fullest = max(stages, key=lambda stage: stage.peak)
    if fullest.peak > capacity:
        claimed = np.cumsum([getattr(fullest, term) for term in FIXED_FIRST])
        term = FIXED_FIRST[int(np.argmax(claimed > capacity))]
        over = Over(stage=fullest.stage, term=term, bytes=fullest.peak - capacity)
    return Memory(capacity_bytes=capacity, fits=over is None, stages=stages, over=over)
