"""A Trace as Kineto writes it: Chrome trace events, for Perfetto and HolisticTraceAnalysis.

The format is that of kineto's output_json.cpp, within what HolisticTraceAnalysis 0.5.0 reads: `"rank": ` with
a space and before traceEvents, one file per rank, names that tell communication from compute, launches that
match kernels when there are several steps. Times are whole microseconds: begin and end are rounded, not
durations, so slices that did not overlap still do not. Every slice carries its exact picoseconds in `args`.

One process per rank, one thread per stream; the host's launches, its loader and the step marks have threads
of their own. Slices of one thread never overlap (checked before anything is written).
"""

from __future__ import annotations

import gzip
import io
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, NamedTuple, cast

import numpy as np

from emulator.plan.program import COMPUTE, Collective, Fixed, HostCopy, Kernel, Load, Op, RankClass, Transfer
from emulator.report.account import step_bounds
from emulator.report.memory import TERMS, TemplateMemory, live_bytes
from emulator.run.trace import Int64, Trace
from emulator.spec.job import Job, reduce_precision
from emulator.spec.units import BYTES_PER_ELEMENT, to_ps
from emulator.version import __version__

PS_PER_US = 10**6

EVENTS_A_WRITE = 4096

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


def save_trace(trace: Trace, path: str | Path, ranks: Sequence[int] | None = None) -> list[Path]:
    """Write a trace and return the files written.

    A path that ends in .json or .json.gz becomes one file with a process per rank; any other is a directory
    and gets one file per rank, `rank<r>.json.gz`. `ranks` defaults to one representative of each class. A
    file appears under its name only when it is complete. Raises ValueError for an unknown rank.
    """
    target = Path(path)
    chosen = [min(c.members) for c in trace.program.classes] if ranks is None else list(ranks)
    for rank in chosen:
        check_streams(trace, rank)
    if target.name.endswith((".json", ".json.gz")):
        target.parent.mkdir(parents=True, exist_ok=True)
        _write(trace, target, chosen)
        return [target]
    target.mkdir(parents=True, exist_ok=True)
    files = [target / f"rank{rank}.json.gz" for rank in chosen]
    for rank, file in zip(chosen, files, strict=True):
        _write(trace, file, [rank])
    return files


def check_streams(trace: Trace, rank: int) -> None:
    """Raise ValueError if two spans of one stream of a rank overlap: viewers would draw nonsense."""
    for stream in _streams(trace, rank):
        rows = trace.where(rank=rank, stream=stream).rows
        start, end = trace.columns.start_ps[rows], trace.columns.end_ps[rows]
        bad = np.flatnonzero(start[1:] < end[:-1])
        if len(bad):
            one, other = trace.op(int(rows[bad[0]])).name, trace.op(int(rows[bad[0] + 1])).name
            raise ValueError(f"rank {rank}, stream {stream}: {other} starts before {one} has ended")


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """Open a file that takes its name only when the block ends without an exception.

    A link is followed, and what is no regular file (/dev/null, a pipe) is written to as it is. An OSError
    names the file, also where a write found the disk full.
    """
    try:
        with _whole(path) as file:
            yield file
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


@contextmanager
def _whole(path: Path) -> Iterator[IO[bytes]]:
    if path.exists() and not path.is_file():
        with path.open("wb") as file:
            yield file
        return
    path = path.resolve()
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            yield file
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _write(trace: Trace, path: Path, ranks: list[int]) -> None:
    with replacing(path) as raw:
        if path.name.endswith(".gz"):
            # no name and no time in the header: the same trace gives the same bytes
            packed = gzip.GzipFile(filename="", mode="wb", compresslevel=3, fileobj=raw, mtime=0)
            with io.BufferedWriter(cast(io.RawIOBase, packed), 1 << 20) as file:
                _stream(trace, file, ranks)
        else:
            _stream(trace, raw, ranks)


def _stream(trace: Trace, file: IO[bytes], ranks: list[int]) -> None:
    head = json.dumps(_head(trace, ranks), indent=1)
    file.write(head.removesuffix("\n}").encode() + b',\n "traceEvents": [\n')
    first = True
    shared = _Shared({}, {})
    for rank in ranks:
        for chunk in _RankEvents(trace, rank, set(ranks), shared).chunks():
            for at in range(0, len(chunk), EVENTS_A_WRITE):
                block = ",\n".join(chunk[at : at + EVENTS_A_WRITE])
                file.write((b"" if first else b",\n") + block.encode())
                first = False
    file.write(b"\n]}\n")


def _head(trace: Trace, ranks: list[int]) -> dict[str, object]:
    job = trace.program.job
    device = job.cluster.device
    groups = trace.program.groups
    return {
        "schemaVersion": 1,
        "distributedInfo": {
            "backend": "nccl",
            "rank": ranks[0] if ranks else 0,
            "world_size": job.layout.world_size,
            "pg_count": len(groups),
            "pg_config": [
                {"pg_name": str(i), "pg_desc": g.axis, "pg_size": len(g.ranks), "ranks": list(g.ranks)}
                for i, g in enumerate(groups)
                if set(g.ranks) & set(ranks)
            ],
        },
        "deviceProperties": [
            {"id": gpu, "name": device.name, "totalGlobalMem": device.hbm_bytes, "numSms": device.sms}
            for gpu in sorted({rank % job.cluster.gpus_per_node for rank in ranks})
        ],
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": 0,
        "traceName": f"{job.model.name} by emulator {__version__}",
    }


def _streams(trace: Trace, rank: int) -> list[str]:
    """Streams of a rank, compute first."""
    rank_class = trace.program.classes[trace.rank_class(rank)]
    streams = trace.program.templates[rank_class.template].streams
    return sorted(streams, key=lambda stream: stream != COMPUTE)


def _us(ps: Int64) -> list[int]:
    """Whole microseconds, halves up."""
    rounded: list[int] = ((ps + PS_PER_US // 2) // PS_PER_US).tolist()
    return rounded


def _kernel_args(op: Op) -> dict[str, object]:
    if not isinstance(op.work, Kernel):
        return {}
    return {"kind": op.work.kind, "flops": op.work.flops, "hbm bytes": op.work.hbm_bytes}


def _plan_args(op: Op) -> dict[str, object]:
    where = {"op": op.name, "phase": op.phase, "stage": op.stage}
    return {**where, "microbatch": op.microbatch, "layer": op.layer}


def _inner(args: dict[str, object]) -> str:
    """JSON of an object without its braces, ready for more members."""
    return json.dumps(args)[1:-1] + ", "


class _Shared(NamedTuple):
    """What ranks of one template have in common."""

    kernels: dict[int, str]
    """Arguments of a kernel's slice by row of the op index, as JSON."""
    memory: dict[int, TemplateMemory]


class _RankEvents:
    """The events of one rank, as JSON text in chunks."""

    def __init__(self, trace: Trace, rank: int, shown: set[int], shared: _Shared) -> None:
        self.trace, self.rank, self.shown, self.shared = trace, rank, shown, shared
        self.job: Job = trace.program.job
        self.device = rank % self.job.cluster.gpus_per_node
        self.seat: RankClass = trace.program.seat(rank)
        self.tids = {stream: COMPUTE_TID + i for i, stream in enumerate(_streams(trace, rank))}
        c = trace.columns
        rows = trace.where(rank=rank).rows
        ops = trace.index.ops
        seen = np.array([ops[i].work is not None for i in trace.op_row[rows]], dtype=np.bool_)
        self.rows: Int64 = rows[seen]
        self.op_rows: list[int] = trace.op_row[self.rows].tolist()
        self.start, self.end = _us(c.start_ps[self.rows]), _us(c.end_ps[self.rows])

    def chunks(self) -> Iterator[list[str]]:
        """Metadata, step marks, slices, launches, memory counters."""
        yield list(self._names())
        yield list(self._step_marks())
        yield self._slices()
        yield self._launches()
        for step in range(self.trace.steps):
            yield self._memory(step)

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
        for step, (start, end) in enumerate(step_bounds(self.trace, self.rank)):
            lo, hi = _us(np.array([start, end], dtype=np.int64))
            yield (
                f'{{"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#{step}", "pid": {self.rank}, '
                f'"tid": {STEP_TID}, "ts": {lo}, "dur": {hi - lo}, "args": {{}}}}'
            )

    def _slices(self) -> list[str]:
        c = self.trace.columns
        fixed: dict[int, tuple[str, str]] = {}  # the part of an op's event that is the same in every step
        exact_start = c.start_ps[self.rows].tolist()
        exact_begin = c.begin_ps[self.rows].tolist()
        exact_end = c.end_ps[self.rows].tolist()
        steps = c.step[self.rows].tolist()
        events = []
        for i, row in enumerate(self.op_rows):
            op = self.trace.index.ops[row]
            if row not in fixed:
                fixed[row] = self._fixed_part(op, row)
            head, args = fixed[row]
            start, end = self.start[i], self.end[i]
            events.append(
                f'{head}"ts": {start}, "dur": {end - start}, "args": {{{args}"correlation": {i + 1}, '
                f'"step": {steps[i]}, "start_ps": {exact_start[i]}, "begin_ps": {exact_begin[i]}, '
                f'"end_ps": {exact_end[i]}}}}}'
            )
            if isinstance(op.work, Transfer) and self.seat.peers[op.work.peer] in self.shown:
                at = (exact_begin[i] + PS_PER_US // 2) // PS_PER_US
                events.append(self._arrow(op.work, self.tids[op.stream], steps[i], at))
        return events

    def _arrow(self, work: Transfer, tid: int, step: int, at: int) -> str:
        """One end of the arrow from a send to its recv; both begin to move at the same instant."""
        peer = self.seat.peers[work.peer]
        source, target = (self.rank, peer) if work.kind == "send" else (peer, self.rank)
        shape = {"ph": "s"} if work.kind == "send" else {"ph": "f", "bp": "e"}
        name = {"cat": "transfer", "name": "transfer", "id": f"{source}-{target} {work.tag} {step}"}
        return json.dumps({**shape, **name, "pid": self.rank, "tid": tid, "ts": at})

    def _fixed_part(self, op: Op, row: int) -> tuple[str, str]:
        """What comes before "ts", and the arguments, of an op's slices in any step."""
        tid = self.tids[op.stream]
        if isinstance(op.work, Kernel | Fixed):
            name, category = op.name, "kernel"
            if row not in self.shared.kernels:
                self.shared.kernels[row] = _inner(_kernel_args(op) | _plan_args(op))
            args = self.shared.kernels[row]
        else:
            name, category, own = self._communication(op)
            args = _inner(own | _plan_args(op))
            tid = LOADER_TID if isinstance(op.work, Load) else tid
        if not isinstance(op.work, Load):
            args = f'"device": {self.device}, "context": 1, "stream": {tid}, {args}'
        where = f'"pid": {self.rank}, "tid": {tid}, '
        return f'{{"ph": "X", "cat": "{category}", "name": {json.dumps(name)}, {where}', args

    def _communication(self, op: Op) -> tuple[str, str, dict[str, object]]:
        """Name, category and arguments of what is not a kernel of the model."""
        match op.work:
            case Collective() | Transfer() as work:
                return self._nccl_name(work), "kernel", self._nccl_args(work)
            case HostCopy(bytes=count, direction="h2d"):
                return "Memcpy HtoD (Pinned -> Device)", "gpu_memcpy", {"bytes": count}
            case HostCopy(bytes=count):
                return "Memcpy DtoH (Device -> Pinned)", "gpu_memcpy", {"bytes": count}
            case Load(bytes=count):
                return op.name, "cpu_op", {"bytes": count}
        raise AssertionError(f"{op.name} has no slice")

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
            ranks: tuple[int, ...] = (source, target)
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

    def _launches(self) -> list[str]:
        """Return the host's issue of every op on a stream, with the correlation of its slice."""
        c = self.trace.columns
        order = np.lexsort((c.op_index[self.rows], c.issued_ps[self.rows]))
        issued = c.issued_ps[self.rows][order]
        cost = to_ps(self.job.cluster.host.launch_seconds) if self.job.fixed_times is None else 0
        began = np.maximum(issued - cost, np.concatenate([[0], issued[:-1]]))
        events = []
        for i, start, end in zip(order.tolist(), _us(began), _us(issued), strict=True):
            if not isinstance(self.trace.index.ops[self.op_rows[i]].work, Load):
                events.append(
                    f'{{"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": {self.rank}, '
                    f'"tid": {HOST_TID}, "ts": {start}, "dur": {end - start}, '
                    f'"args": {{"correlation": {i + 1}}}}}'
                )
        return events

    def _memory(self, step: int) -> list[str]:
        """Live bytes by term, where they change; of changes in one microsecond the last."""
        times, table = live_bytes(self.trace, self.rank, step, self.shared.memory)
        at = np.array(_us(times), dtype=np.int64)
        last = np.flatnonzero(np.append(at[1:] != at[:-1], True))
        terms = ", ".join(f'"{term}": %d' for term in TERMS)
        event = (
            f'{{"ph": "C", "name": "memory", "pid": {self.rank}, "tid": 0, "ts": %d, "args": {{{terms}}}}}'
        )
        return [event % tuple(row) for row in np.column_stack([at, table])[last].tolist()]
