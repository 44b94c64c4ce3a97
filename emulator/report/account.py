"""The time account: where every picosecond of the critical rank's step went.

The critical rank is the one whose last op ends last (ties: the lowest). Its step begins when its ops of the
step before have ended (at 0 for the first) and ends with its last op. The causes are integers that add up to
the step exactly. The law, first match wins:

1. While the compute stream runs a kernel, `alone_ps` of its time goes to `recompute` (phase R), `optimizer`
   (phase O) or `compute` (any other phase), and the rest, which it took because others used the same
   resources, to `contention`. On a straggler, what a sound device would not have needed goes to `fault`.
2. While only other streams run kernels (an update inside backward), these count in the same way; a kernel
   that is partly covered by an earlier one counts in proportion.
3. Otherwise the rank waits: for the next kernel of the compute stream, or for the end of the step. What this
   waits for are the ops it depends on, directly or not, that have not ended; each instant goes to
   a. `exposed` by axis: one of them is a collective or transfer whose bytes move (begin to end; of several,
      the one that ends last);
   b. `launch`: one of them, or the kernel itself, is ready but the host has not issued it;
   c. `contention`: one of them is issued and ready but waits for SMs to hold;
   d. `loader`: the loader or a copy engine is at work for one of them;
   e. `bubble`: a transfer or collective of the pipeline axis waits for the other stage to arrive;
      `exposed` by axis: one of another axis waits for its other members (stragglers: their delay shows here);
   f. `bubble`: nothing of this rank is under way, as in the fill and drain of a pipeline.

The delay that a fault on another rank causes here is a wait for that rank, by 3e.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal

import msgspec
import numpy as np

from emulator.plan.op import PHASES
from emulator.plan.program import COMPUTE, Collective, Fixed, HostCopy, Kernel, Load, Transfer, Work
from emulator.run import intervals
from emulator.run.cost import kernel_cost
from emulator.run.op_index import kernels, on_stream
from emulator.run.trace import Trace
from emulator.spec.arrays import Int64
from emulator.spec.faults import left_of
from emulator.spec.job import Job

AXES = ("tp", "cp", "pp", "dp", "ep")
"""Axes of the report; dp_replicate and dp_shard count as dp."""

Cause = Literal["compute", "recompute", "optimizer", "bubble", "contention", "launch", "loader", "fault"]

_OF_PHASE: dict[str, Cause] = {"R": "recompute", "O": "optimizer"}

Interval = tuple[int, int]


class Account(msgspec.Struct, frozen=True, kw_only=True):
    """Integer picoseconds by cause of one rank's step; they add up to `step_ps`."""

    rank: int
    step: int
    start_ps: int
    end_ps: int
    compute: int
    recompute: int
    optimizer: int
    bubble: int
    exposed: dict[str, int]
    contention: int
    launch: int
    loader: int
    fault: int

    @property
    def step_ps(self) -> int:
        """Duration of the step."""
        return self.end_ps - self.start_ps

    def causes(self) -> dict[str, int]:
        """Return the account flat, exposed communication as `exposed tp` and so on."""
        flat = {name: getattr(self, name) for name in ("compute", "recompute", "optimizer", "bubble")}
        flat |= {f"exposed {axis}": ps for axis, ps in self.exposed.items()}
        return flat | {name: getattr(self, name) for name in ("contention", "launch", "loader", "fault")}

    def time_ps(self) -> dict[str, int | dict[str, int]]:
        """Return the causes as the report nests them."""
        nested: dict[str, int | dict[str, int]] = {"exposed": dict(self.exposed)}
        names = (
            "compute",
            "recompute",
            "optimizer",
            "bubble",
            "exposed",
            "contention",
            "launch",
            "loader",
            "fault",
        )
        return {name: nested[name] if name in nested else getattr(self, name) for name in names}


def report_axis(axis: str) -> str:
    """Return the report's name of a mesh axis: both data-parallel axes are dp."""
    return "dp" if axis.startswith("dp") else axis


def critical_rank(trace: Trace) -> int:
    """Return the rank whose last op ends last; of several, the lowest. ValueError for an empty trace."""
    c = trace.columns
    if not len(trace):
        raise ValueError("an empty trace has no critical rank")
    last = np.unique(c.class_index[c.end_ps == trace.end_ps])
    return min(min(trace.program.classes[int(i)].members) for i in last)


def step_bounds(trace: Trace, rank: int) -> list[Interval]:
    """Return begin and end of every step of a rank; each begins where the one before ended."""
    rows = trace.class_rows(trace.rank_class(rank))
    last = np.zeros(trace.steps, dtype=np.int64)
    np.maximum.at(last, trace.columns.step[rows], trace.columns.end_ps[rows])
    ends: list[int] = np.maximum.accumulate(last).tolist()
    return list(zip([0, *ends[:-1]], ends, strict=True))


def account(trace: Trace, rank: int | None = None, step: int | None = None) -> Account:
    """Divide a rank's step among its causes; by default the critical rank's last step."""
    rank = critical_rank(trace) if rank is None else rank
    step = trace.steps - 1 if step is None else step
    start, end = step_bounds(trace, rank)[step]
    view = _RankStep(trace, rank, step)
    totals: dict[str, int] = dict.fromkeys(Cause.__args__, 0)  # type: ignore[attr-defined]
    exposed = dict.fromkeys(AXES, 0)
    busy = _kernels(view, start, end, totals)
    for gap, following in _gaps(view, busy, start, end):
        for cause, axis, duration in _waits(view, gap, following):
            if axis:
                exposed[axis] += duration
            else:
                totals[cause] += duration
    return Account(rank=rank, step=step, start_ps=start, end_ps=end, exposed=exposed, **totals)


class _RankStep:
    """Spans of one rank and step by op index, and what each op depends on; an op without span has end -1."""

    def __init__(self, trace: Trace, rank: int, step: int) -> None:
        index = trace.rank_class(rank)
        body = trace.template(index).body
        rows = trace.step_rows(index, step)
        c, job = trace.columns, trace.program.job
        self.issued, self.ready, self.start, self.begin, self.end, self.alone = (
            np.where(rows < 0, -1, column[rows]).tolist()
            for column in (c.issued_ps, c.ready_ps, c.start_ps, c.begin_ps, c.end_ps, c.alone_ps)
        )
        self.work: list[int] = body.work.tolist()
        self.phase: list[int] = body.phase.tolist()
        self.waits = body.waits.rows()
        self.before = body.predecessors().tolist()
        kernel, on_compute = kernels(body) & (rows >= 0), on_stream(body, COMPUTE)
        self.kernels: list[int] = np.flatnonzero(kernel & on_compute).tolist()
        """Those of the compute stream."""
        self.aside: list[int] = np.flatnonzero(kernel & ~on_compute).tolist()
        """Kernels of other streams."""
        self.axis = [report_axis(w.axis) if isinstance(w, Collective | Transfer) else "" for w in body.works]
        self.loads = [isinstance(work, Load | HostCopy) for work in body.works]
        slow = rank in left_of(job.faults, "straggler")
        self.sound = [_sound_ps(work, job) if slow else None for work in body.works]

    def sound_ps(self, op: int) -> int:
        """How long an op takes alone on a device without a fault."""
        sound, alone = self.sound[self.work[op]], int(self.alone[op])
        return alone if sound is None else min(sound, alone)

    def unfinished(self, following: int | None, since: int) -> list[int]:
        """Ops that had not ended at `since` and that this op, or the end of the step, depends on."""
        if following is None:
            return [i for i, end in enumerate(self.end) if end > since]
        found: dict[int, None] = {}
        stack = [following]
        while stack:
            op = stack.pop()
            for i in (self.before[op], *self.waits[op]):
                # what ended by then waited for nothing that ended later
                if i >= 0 and i not in found and self.end[i] > since:
                    found[i] = None
                    stack.append(i)
        return list(found)


def _sound_ps(work: Work, job: Job) -> int | None:
    """How long a kernel takes alone on a device without a fault; None for what is no kernel."""
    if isinstance(work, Fixed):
        return work.duration_ps
    if isinstance(work, Kernel):
        return kernel_cost(work, job.cluster.device, job.attention).duration_ps
    return None


def _kernels(view: _RankStep, start: int, end: int, totals: dict[str, int]) -> Int64:
    """Account for the kernels, compute stream first; return the merged time in which any ran."""
    spans = np.array([(view.start[i], view.end[i]) for i in view.kernels], dtype=np.int64).reshape(-1, 2)
    spans = np.clip(spans, start, end)
    for i, (lo, hi) in zip(view.kernels, spans.tolist(), strict=True):
        _count(view, i, hi - lo, totals)
    busy = intervals.union(spans)
    for i in view.aside:
        lo, hi = max(view.start[i], start), min(view.end[i], end)
        free = [(lo, hi)] if lo < hi else []
        # only those can cover it that end after its start and start before its end
        for row in busy[np.searchsorted(busy[:, 1], lo) : np.searchsorted(busy[:, 0], hi)].tolist():
            _, free = _take(free, row)
        if free:
            _count(view, i, sum(hi - lo for lo, hi in free), totals)
            busy = intervals.union(np.concatenate([busy, free]))
    return busy


def _count(view: _RankStep, kernel: int, part: int, totals: dict[str, int]) -> None:
    """Divide that part of a kernel's time that counts among its causes."""
    whole = view.end[kernel] - view.start[kernel]
    if part <= 0:
        return
    own = min(view.alone[kernel], whole) * part // whole
    sound = min(view.sound_ps(kernel), whole) * part // whole
    totals[_OF_PHASE.get(PHASES[view.phase[kernel]], "compute")] += sound
    totals["fault"] += own - sound
    totals["contention"] += part - own


def _gaps(view: _RankStep, busy: Int64, start: int, end: int) -> Iterator[tuple[Interval, int | None]]:
    """Intervals without any kernel, each with the compute kernel that follows (None: the step ends)."""
    compute = [i for i in view.kernels if view.end[i] > start]
    edges = [view.start[i] for i in compute]
    at = 0
    for lo, hi in intervals.complement(busy, start, end):
        while at < len(edges) and edges[at] < hi:
            at += 1
        yield (int(lo), int(hi)), compute[at] if at < len(edges) else None


def _waits(view: _RankStep, gap: Interval, following: int | None) -> Iterator[tuple[str, str, int]]:
    """Divide an idle interval: (cause, axis or "", duration)."""
    candidates: list[tuple[int, int, int, Interval, str, str]] = []
    pending = view.unfinished(following, gap[0])
    for i in [*pending, *([] if following is None else [following])]:
        for order, interval, cause, axis in _claims(view, i):
            candidates.append((order, -view.end[i], i, interval, cause, axis))
    free: list[Interval] = [gap]
    for _, _, _, interval, cause, axis in sorted(candidates):
        taken, free = _take(free, interval)
        if taken:
            yield cause, axis, taken
    rest = sum(hi - lo for lo, hi in free)
    if rest:
        yield "bubble", "", rest


def _claims(view: _RankStep, i: int) -> Iterable[tuple[int, Interval, str, str]]:
    """Intervals in which an op keeps the rank waiting: (order of the law, interval, cause, axis or "")."""
    yield 1, (view.ready[i], view.issued[i]), "launch", ""
    yield 2, (max(view.ready[i], view.issued[i]), view.start[i]), "contention", ""
    axis = view.axis[view.work[i]]
    if axis:
        waiting = (view.start[i], view.begin[i])
        yield 0, (view.begin[i], view.end[i]), "exposed", axis
        yield (4, waiting, "bubble", "") if axis == "pp" else (4, waiting, "exposed", axis)
    elif view.loads[view.work[i]]:
        yield 3, (view.start[i], view.end[i]), "loader", ""


def _take(free: list[Interval], interval: Interval) -> tuple[int, list[Interval]]:
    """Cut an interval out of disjoint ones: the length found there, and what remains."""
    lo, hi = interval
    taken, rest = 0, []
    for start, end in free:
        inner_lo, inner_hi = max(lo, start), min(hi, end)
        if inner_lo >= inner_hi:
            rest.append((start, end))
            continue
        taken += inner_hi - inner_lo
        if start < inner_lo:
            rest.append((start, inner_lo))
        if inner_hi < end:
            rest.append((inner_hi, end))
    return taken, rest
