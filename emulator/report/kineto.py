"""Trace events of one rank, as JSON text that Kineto's readers take.

One process per rank, one thread per stream; the host's launches, its loader and the step marks have threads
of their own. Times are whole microseconds: begin and end are rounded, not durations, so slices that did not
overlap still do not. Every slice carries its exact picoseconds in `args`.

Events come in blocks, so that a long trace is never in memory as text; what the ops of one work have in
common is put together once.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from emulator.plan.body import Body
from emulator.plan.op import PHASES, TERMS
from emulator.plan.program import (
    COMPUTE,
    Collective,
    Fixed,
    HostCopy,
    Kernel,
    Load,
    RankClass,
    Transfer,
    Work,
)
from emulator.report.account import step_bounds
from emulator.report.memory import BodyMemory, live_bytes
from emulator.run.trace import Trace
from emulator.spec.arrays import Int64
from emulator.spec.job import Job, reduce_precision
from emulator.spec.units import BYTES_PER_ELEMENT, to_ps

PS_PER_US = 10**6

EVENTS_A_BLOCK = 4096

COMPUTE_TID = 7
"""Thread of the compute stream: CUDA's default stream as Kineto numbers it. The others follow."""

HOST_TID, LOADER_TID, STEP_TID = 100_000, 100_001, 100_002

DTYPE = {"fp32": "Float", "tf32": "Float", "fp16": "Half", "bf16": "BFloat16", "fp8": "Float8_e4m3fn"}
"""Names of torch's scalar types as Kineto prints them."""

_KERNEL_DTYPE = {"fp32": "f32", "tf32": "f32", "fp16": "f16", "bf16": "bf16", "fp8": "u8"}
_REDUCING = ("all_reduce", "reduce_scatter", "reduce")
_KERNEL_NAME = {
    "all_reduce": "AllReduce_Sum_{dtype}_RING_LL",
    "reduce_scatter": "ReduceScatter_Sum_{dtype}_RING_LL",
    "reduce": "Reduce_Sum_{dtype}_RING_LL",
    "all_gather": "AllGather_RING_LL",
    "broadcast": "Broadcast_RING_LL",
    "all_to_all": "SendRecv",
    "send": "SendRecv",
    "recv": "SendRecv",
}
"""NCCL's kernels; the specialised one ends in _LL whatever protocol runs (NCCL's generate.py)."""

_COLLECTIVE_NAME = {
    "all_reduce": "allreduce",
    "reduce_scatter": "_reduce_scatter_base",
    "reduce": "reduce",
    "all_gather": "_allgather_base",
    "broadcast": "broadcast",
    "all_to_all": "all_to_allv",
    "send": "send",
    "recv": "recv",
}


def _us(ps: Int64) -> list[int]:
    """Whole microseconds, halves up."""
    rounded: list[int] = ((ps + PS_PER_US // 2) // PS_PER_US).tolist()
    return rounded


class _Look(NamedTuple):
    """What the slices of one work on one stream have in common."""

    before: str
    """Up to the name."""
    name: str
    """Empty where a slice has the name of its op."""
    after: str
    """From the name to the time."""
    args: str
    arrow: bool
    """Whether the other end of the transfer is shown too."""


class RankEvents:
    """The events of one rank, as JSON text in blocks.

    `shown` are the ranks of the same file: arrows lead from a send to its recv where both are there. `plans`
    keeps what is known of the memory of bodies between ranks.
    """

    def __init__(self, trace: Trace, rank: int, shown: set[int], plans: dict[Body, BodyMemory]) -> None:
        self.trace, self.rank, self.shown, self.plans = trace, rank, shown, plans
        self.job: Job = trace.program.job
        self.seat: RankClass = trace.program.seat(rank)
        self.template = trace.template(trace.rank_class(rank))
        self.body = self.template.body
        self.streams = sorted(self.body.streams, key=lambda stream: stream != COMPUTE)
        self.tids = {stream: COMPUTE_TID + i for i, stream in enumerate(self.streams)}
        works = self.body.works
        rows = trace.where(rank=rank).rows
        seen = self.body.of_work(work is not None for work in works)
        self.rows: Int64 = rows[seen[trace.columns.op_index[rows]]]
        self.looks: dict[tuple[int, int], _Look] = {}

    def blocks(self) -> Iterator[list[str]]:
        """Metadata, step marks, slices, launches, memory counters; no block is empty."""
        yield list(self._names())
        marks = list(self._step_marks())
        for at in range(0, len(marks), EVENTS_A_BLOCK):
            yield marks[at : at + EVENTS_A_BLOCK]
        for at in range(0, len(self.rows), EVENTS_A_BLOCK):
            yield list(self._slices(at, self.rows[at : at + EVENTS_A_BLOCK]))
        yield from self._launches()
        for step in range(self.trace.steps):
            yield from self._memory(step)

    def _names(self) -> Iterator[str]:
        labels = [("process_name", 0, f"rank {self.rank}")]
        labels += [("thread_name", tid, f"stream {tid} {name}") for name, tid in self.tids.items()]
        labels += [("thread_name", HOST_TID, "host"), ("thread_name", LOADER_TID, "loader")]
        labels += [("thread_name", STEP_TID, "steps")]
        for kind, tid, label in labels:
            yield json.dumps({"ph": "M", "name": kind, "pid": self.rank, "tid": tid, "args": {"name": label}})
        order = {"ph": "M", "name": "process_sort_index", "pid": self.rank, "tid": 0}
        yield json.dumps({**order, "args": {"sort_index": self.rank}})

    def _step_marks(self) -> Iterator[str]:
        for step, bounds in enumerate(step_bounds(self.trace, self.rank)):
            lo, hi = _us(np.array(bounds, dtype=np.int64))
            yield (
                f'{{"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#{step}", "pid": {self.rank}, '
                f'"tid": {STEP_TID}, "ts": {lo}, "dur": {hi - lo}, "args": {{}}}}'
            )

    def _slices(self, first: int, rows: Int64) -> Iterator[str]:
        """Slices of some rows, of which the first is the rank's slice number `first`."""
        c, body, stage = self.trace.columns, self.body, self.template.stage
        op = c.op_index[rows]
        names = [json.dumps(name)[1:-1] for name in body.names]
        of_op = (body.name, body.work, body.stream, body.phase, body.microbatch, self.template.layer)
        of_span = (c.step, c.start_ps, c.begin_ps, c.end_ps)
        times = (_us(c.start_ps[rows]), _us(c.end_ps[rows]))
        columns = [x[op].tolist() for x in of_op] + [x[rows].tolist() for x in of_span] + list(times)
        for number, row in enumerate(zip(*columns, strict=True), first + 1):
            name, work, stream, phase, mb, layer, step, start_ps, begin_ps, end_ps, start, end = row
            look = self.looks.get((work, stream)) or self._look(work, stream)
            text = names[name].format(stage=stage, layer=layer, mb=mb)
            yield (
                f'{look.before}{look.name or text}{look.after}"ts": {start}, "dur": {end - start}, "args": {{'
                f'{look.args}"op": "{text}", "phase": "{PHASES[phase]}", "stage": {stage}, '
                f'"microbatch": {mb}, "layer": {layer}, "correlation": {number}, "step": {step}, '
                f'"start_ps": {start_ps}, "begin_ps": {begin_ps}, "end_ps": {end_ps}}}}}'
            )
            if look.arrow:
                yield self._arrow(body.works[work], body.streams[stream], step, begin_ps)

    def _arrow(self, work: Work, stream: str, step: int, begin_ps: int) -> str:
        """One end of the arrow from a send to its recv; both begin to move at the same instant."""
        assert isinstance(work, Transfer)
        peer = self.seat.peers[work.peer]
        source, target = (self.rank, peer) if work.kind == "send" else (peer, self.rank)
        shape = {"ph": "s"} if work.kind == "send" else {"ph": "f", "bp": "e"}
        name = {"cat": "transfer", "name": "transfer", "id": f"{source}-{target} {work.tag} {step}"}
        at = (begin_ps + PS_PER_US // 2) // PS_PER_US
        return json.dumps({**shape, **name, "pid": self.rank, "tid": self.tids[stream], "ts": at})

    def _look(self, index: int, stream: int) -> _Look:
        work = self.body.works[index]
        name, category, args = self._described(work)
        tid = LOADER_TID if isinstance(work, Load) else self.tids[self.body.streams[stream]]
        text = json.dumps(args)[1:-1] + (", " if args else "")
        if not isinstance(work, Load):
            device = self.rank % self.job.cluster.gpus_per_node
            text = f'"device": {device}, "context": 1, "stream": {tid}, {text}'
        look = self.looks[index, stream] = _Look(
            before=f'{{"ph": "X", "cat": "{category}", "name": "',
            name=name,
            after=f'", "pid": {self.rank}, "tid": {tid}, ',
            args=text,
            arrow=isinstance(work, Transfer) and self.seat.peers[work.peer] in self.shown,
        )
        return look

    def _described(self, work: Work) -> tuple[str, str, dict[str, object]]:
        """Name (empty: the op's), category and arguments of a work."""
        match work:
            case Kernel():
                return "", "kernel", {"kind": work.kind, "flops": work.flops, "hbm bytes": work.hbm_bytes}
            case Fixed():
                return "", "kernel", {}
            case Collective() | Transfer():
                return self._nccl_name(work), "kernel", self._nccl_args(work)
            case HostCopy(bytes=count, direction="h2d"):
                return "Memcpy HtoD (Pinned -> Device)", "gpu_memcpy", {"bytes": count}
            case HostCopy(bytes=count):
                return "Memcpy DtoH (Device -> Pinned)", "gpu_memcpy", {"bytes": count}
            case Load(bytes=count):
                return "", "cpu_op", {"bytes": count}
        raise AssertionError("an op without work has no slice")

    def _precision(self, work: Collective | Transfer) -> str:
        return reduce_precision(self.job) if work.kind in _REDUCING else self.job.precision

    def _nccl_name(self, work: Collective | Transfer) -> str:
        kernel = _KERNEL_NAME[work.kind].format(dtype=_KERNEL_DTYPE[self._precision(work)])
        return f"ncclDevKernel_{kernel}(ncclDevKernelArgsStorage<4096ul>)"

    def _nccl_args(self, work: Collective | Transfer) -> dict[str, object]:
        precision = self._precision(work)
        elements = work.bytes // BYTES_PER_ELEMENT[precision]
        args: dict[str, object] = {"Collective name": _COLLECTIVE_NAME[work.kind], "dtype": DTYPE[precision]}
        if isinstance(work, Transfer):
            peer = self.seat.peers[work.peer]
            source, target = (self.rank, peer) if work.kind == "send" else (peer, self.rank)
            ranks: Sequence[int] = (source, target)
            args |= {"Src Rank": source, "Dst Rank": target, "Process Group Name": work.axis}
            inside = outside = elements
        else:
            index = self.seat.groups[work.group]
            ranks = self.trace.program.groups[index].ranks
            args["Process Group Name"] = str(index)
            inside = elements // len(ranks) if work.kind == "all_gather" else elements
            outside = elements // len(ranks) if work.kind == "reduce_scatter" else elements
        shown = f"[{', '.join(map(str, ranks[:64]))}{', ...' if len(ranks) > 64 else ''}]"
        return args | {
            "In msg nelems": inside,
            "Out msg nelems": outside,
            "Group size": len(ranks),
            "In split size": "[]",
            "Out split size": "[]",
            "Process Group Description": work.axis,
            "Process Group Ranks": shown,
        }

    def _launches(self) -> Iterator[list[str]]:
        """Yield the host's issue of every op on a stream, with the correlation of its slice."""
        c, body = self.trace.columns, self.body
        order = np.lexsort((c.op_index[self.rows], c.issued_ps[self.rows]))
        issued = c.issued_ps[self.rows][order]
        cost = to_ps(self.job.cluster.host.launch_seconds) if self.job.fixed_times is None else 0
        began = np.maximum(issued - cost, np.concatenate([[0], issued[:-1]]))
        launched = ~body.of_work(isinstance(work, Load) for work in body.works)
        shown = np.flatnonzero(launched[c.op_index[self.rows[order]]])
        before = f'{{"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": {self.rank}, '
        for first in range(0, len(shown), EVENTS_A_BLOCK):
            at = shown[first : first + EVENTS_A_BLOCK]
            yield [
                f'{before}"tid": {HOST_TID}, "ts": {start}, "dur": {end - start}, '
                f'"args": {{"correlation": {i + 1}}}}}'
                for i, start, end in zip(order[at].tolist(), _us(began[at]), _us(issued[at]), strict=True)
            ]

    def _memory(self, step: int) -> Iterator[list[str]]:
        """Live bytes by term, where they change; of changes in one microsecond the last."""
        times, table = live_bytes(self.trace, self.rank, step, self.plans)
        at = np.array(_us(times), dtype=np.int64)
        last = np.flatnonzero(np.append(at[1:] != at[:-1], True))
        terms = ", ".join(f'"{term}": %d' for term in TERMS)
        event = (
            f'{{"ph": "C", "name": "memory", "pid": {self.rank}, "tid": 0, "ts": %d, "args": {{{terms}}}}}'
        )
        rows = np.column_stack([at, table])[last]
        for first in range(0, len(rows), EVENTS_A_BLOCK):
            yield [event % tuple(row) for row in rows[first : first + EVENTS_A_BLOCK].tolist()]
