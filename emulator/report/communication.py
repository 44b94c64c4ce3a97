"""Communication of one rank's step, by axis: bytes, time, and how much of it was overlapped."""

from __future__ import annotations

from fractions import Fraction

import msgspec
import numpy as np

from emulator.plan.program import COMPUTE, Collective, Fixed, Kernel, Transfer
from emulator.report.account import Account, report_axis
from emulator.run import intervals
from emulator.run.op_index import kernels, on_stream
from emulator.run.trace import Trace
from emulator.spec.arrays import Int64
from emulator.spec.units import PS_PER_SECOND, to_seconds


class AxisTraffic(msgspec.Struct, frozen=True, kw_only=True):
    """Communication of the critical rank along one axis in one step."""

    bytes_per_gpu: int | float
    """Bytes that the GPU sends, by the ring's count (`sent_bytes`)."""
    seconds: float
    """Time in which at least one collective or transfer moved (begin to end)."""
    exposed_seconds: float
    """The account's part: time in which the rank's compute stream could do nothing but wait for it."""
    overlapped_seconds: float
    """Time in which it moved while a kernel ran on the compute stream."""
    busbw: float | None
    """Bytes per second while moving: bytes_per_gpu over the sum of each collective's and send's time."""


def sent_bytes(work: Collective | Transfer, members: int) -> Fraction:
    """Payload bytes that one member of a group sends.

    Ring counts, the factors of nccl-tests' PERFORMANCE.md: with S = work.bytes and n members, 2 (n-1)/n S for
    all_reduce; (n-1)/n S for all_gather, reduce_scatter and all_to_all; S for broadcast, reduce and send
    (what each link of the chain carries); 0 for recv, whose bytes the sender counts.
    """
    match work.kind:
        case "recv":
            return Fraction(0)
        case "send":
            return Fraction(work.bytes)
        case "broadcast" | "reduce":
            return Fraction(work.bytes if members > 1 else 0)
        case "all_reduce":
            return Fraction(2 * (members - 1) * work.bytes, members)
        case _:
            return Fraction((members - 1) * work.bytes, members)


def communication(trace: Trace, account: Account) -> dict[str, AxisTraffic]:
    """Sum up the account's rank and step by axis; only axes along which the rank communicates appear."""
    index = trace.rank_class(account.rank)
    body, rows = trace.template(index).body, trace.step_rows(index, account.step)
    count = np.bincount(body.work[rows >= 0], minlength=len(body.works)).tolist()
    computing = _merged(trace, rows[kernels(body) & on_stream(body, COMPUTE)])
    axis_of = [
        report_axis(work.axis) if isinstance(work, Collective | Transfer) and n else ""
        for work, n in zip(body.works, count, strict=True)
    ]
    found = {}
    for axis in sorted({*axis_of} - {""}):
        on_axis = body.of_work(each == axis for each in axis_of)
        receives = body.of_work(isinstance(work, Transfer) and work.kind == "recv" for work in body.works)
        moving = _merged(trace, rows[on_axis], moving=True)
        moving_ps = _total(trace, rows[on_axis & ~receives])
        payload = sum(
            (
                sent_bytes(work, _parties(trace, index, work)) * n
                for work, n, each in zip(body.works, count, axis_of, strict=True)
                if each == axis and isinstance(work, Collective | Transfer)
            ),
            Fraction(0),
        )
        found[axis] = AxisTraffic(
            bytes_per_gpu=int(payload) if payload.denominator == 1 else float(payload),
            seconds=to_seconds(intervals.length(moving)),
            exposed_seconds=to_seconds(account.exposed[axis]),
            overlapped_seconds=to_seconds(intervals.length(intervals.intersection(moving, computing))),
            busbw=float(payload * PS_PER_SECOND / moving_ps) if moving_ps and payload else None,
        )
    return found


def _parties(trace: Trace, rank_class: int, work: Collective | Transfer) -> int:
    if isinstance(work, Transfer):
        return 2
    program = trace.program
    return len(program.groups[program.classes[rank_class].groups[work.group]].ranks)


def _merged(trace: Trace, rows: Int64, moving: bool = False) -> Int64:
    """Time in which any of these rows ran; -1 stands for no row."""
    c, rows = trace.columns, rows[rows >= 0]
    return intervals.union(intervals.pairs((c.begin_ps if moving else c.start_ps)[rows], c.end_ps[rows]))


def _total(trace: Trace, rows: Int64) -> int:
    """Time in which these rows moved, one after the other; -1 stands for no row."""
    c, rows = trace.columns, rows[rows >= 0]
    return int((c.end_ps[rows] - c.begin_ps[rows]).sum())


def overlap_fraction(trace: Trace, rank: int) -> float | None:
    """Return the part of a rank's communication time that compute covers; None when it never communicates.

    HolisticTraceAnalysis's definition: |communication and compute| / |communication| over merged spans,
    start to end (the wait for other members is inside the collective's kernel), kernels of any stream.
    """
    spans, of_work = trace.where(rank=rank), trace.index.of_work
    talking = spans.only(of_work(lambda work: isinstance(work, Collective | Transfer))).intervals
    computing = spans.only(of_work(lambda work: isinstance(work, Kernel | Fixed))).intervals
    whole = intervals.length(talking)
    return intervals.length(intervals.intersection(talking, computing)) / whole if whole else None
