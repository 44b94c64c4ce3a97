"""Communication of one rank's step, by axis: bytes, time, and how much of it compute hid."""

from __future__ import annotations

from fractions import Fraction

import msgspec
import numpy as np

from emulator.plan.program import COMPUTE, Collective, Fixed, Kernel, Transfer
from emulator.report.account import Account, report_axis
from emulator.run import intervals
from emulator.run.trace import Trace
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
    rank_class = trace.program.classes[trace.rank_class(account.rank)]
    spans = trace.where(rank=account.rank, step=account.step)
    on_axis: dict[str, list[int]] = {}
    kernels = []
    for row in spans.rows:
        op = trace.op(int(row))
        if isinstance(op.work, Collective | Transfer):
            on_axis.setdefault(report_axis(op.work.axis), []).append(int(row))
        elif op.stream == COMPUTE and isinstance(op.work, Kernel | Fixed):
            kernels.append(int(row))
    c = trace.columns
    computing = intervals.union(intervals.pairs(c.start_ps[kernels], c.end_ps[kernels]))
    found = {}
    for axis, rows in sorted(on_axis.items()):
        moving = intervals.union(intervals.pairs(c.begin_ps[rows], c.end_ps[rows]))
        payload, moving_ps = Fraction(0), 0
        for row in rows:
            work = trace.op(row).work
            if isinstance(work, Collective):
                size = len(trace.program.groups[rank_class.groups[work.group]].ranks)
                payload += sent_bytes(work, size)
            elif isinstance(work, Transfer):
                payload += sent_bytes(work, 2)
            if not (isinstance(work, Transfer) and work.kind == "recv"):
                moving_ps += int(c.end_ps[row] - c.begin_ps[row])
        found[axis] = AxisTraffic(
            bytes_per_gpu=int(payload) if payload.denominator == 1 else float(payload),
            seconds=to_seconds(intervals.length(moving)),
            exposed_seconds=to_seconds(account.exposed[axis]),
            overlapped_seconds=to_seconds(intervals.length(intervals.intersection(moving, computing))),
            busbw=float(payload * PS_PER_SECOND / moving_ps) if moving_ps and payload else None,
        )
    return found


def overlap_fraction(trace: Trace, rank: int) -> float | None:
    """Return the part of a rank's communication time that compute covers; None when it never communicates.

    HolisticTraceAnalysis's definition: |communication and compute| / |communication| over merged spans,
    start to end (the wait for other members is inside the collective's kernel), kernels of any stream.
    """
    spans = trace.where(rank=rank)
    works = [trace.op(int(row)).work for row in spans.rows]
    c = trace.columns

    def merged(kinds: tuple[type, ...]) -> intervals.Int64:
        rows = spans.rows[np.array([isinstance(work, kinds) for work in works], dtype=np.bool_)]
        return intervals.union(intervals.pairs(c.start_ps[rows], c.end_ps[rows]))

    talking, computing = merged((Collective, Transfer)), merged((Kernel, Fixed))
    whole = intervals.length(talking)
    return intervals.length(intervals.intersection(talking, computing)) / whole if whole else None
