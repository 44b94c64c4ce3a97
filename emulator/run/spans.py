"""Spans of a trace: one as it happened, and selections of them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import TYPE_CHECKING, overload

import msgspec
import numpy as np
import numpy.typing as npt

from emulator.run import intervals
from emulator.spec.arrays import Int64

if TYPE_CHECKING:
    from emulator.run.trace import Trace


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """One op of one rank as it happened; the times are those of Trace's columns."""

    rank: int
    stream: str
    name: str
    kind: str
    phase: str
    axis: str
    stage: int
    microbatch: int
    layer: int
    step: int
    issued_ps: int
    ready_ps: int
    start_ps: int
    begin_ps: int
    end_ps: int
    alone_ps: int

    @property
    def duration_ps(self) -> int:
        """From the start on its stream to the end, waiting for other members included."""
        return self.end_ps - self.start_ps

    def overlaps(self, other: Span) -> bool:
        """Whether there is an instant that lies in both."""
        return max(self.start_ps, other.start_ps) < min(self.end_ps, other.end_ps)

    def precedes(self, other: Span) -> bool:
        """Whether it ended no later than the other started."""
        return self.end_ps <= other.start_ps


class Spans:
    """A selection of a trace's rows, sorted by start (ties: end, then op order)."""

    def __init__(self, trace: Trace, rows: Int64, rank: int | None = None) -> None:
        self.trace = trace
        self._selected = rows
        self._rank = rank

    @cached_property
    def rows(self) -> Int64:
        """Rows of the trace's columns, in order."""
        c, rows = self.trace.columns, self._selected
        found: Int64 = rows[np.lexsort((c.op_index[rows], c.end_ps[rows], c.start_ps[rows]))]
        return found

    def __len__(self) -> int:
        return len(self._selected)

    @overload
    def __getitem__(self, index: int) -> Span: ...
    @overload
    def __getitem__(self, index: slice) -> list[Span]: ...
    def __getitem__(self, index: int | slice) -> Span | list[Span]:
        if isinstance(index, slice):
            return [self.trace.span(int(row), self._rank) for row in self.rows[index]]
        return self.trace.span(int(self.rows[index]), self._rank)

    def __iter__(self) -> Iterator[Span]:
        return (self.trace.span(int(row), self._rank) for row in self.rows)

    def __repr__(self) -> str:
        head = ", ".join(self.names[:4])
        return f"<{len(self)} spans: {head}{', ...' if len(self) > 4 else ''}>"

    @property
    def names(self) -> list[str]:
        """Names of the ops, in order."""
        columns, templates = self.trace.columns, self.trace.program.templates
        template = self.trace.template_of[columns.class_index[self.rows]].tolist()
        ops = columns.op_index[self.rows].tolist()
        return [templates[t].op_name(i) for t, i in zip(template, ops, strict=True)]

    def only(self, ops: npt.ArrayLike) -> Spans:
        """Keep the spans whose op is marked in a boolean array over the ops of `trace.index`."""
        keep, rows = np.asarray(ops, dtype=np.bool_), self._selected
        return Spans(self.trace, rows[keep[self.trace.op_row[rows]]], self._rank)

    def one(self) -> Span:
        """Return the only span; ValueError when there is none or more than one."""
        if len(self) != 1:
            raise ValueError(f"expected one span, found {self!r}")
        return self[0]

    @property
    def start_ps(self) -> int:
        """Earliest start; ValueError when empty."""
        return int(self.trace.columns.start_ps[self._some()].min())

    @property
    def end_ps(self) -> int:
        """Latest end; ValueError when empty."""
        return int(self.trace.columns.end_ps[self._some()].max())

    @property
    def intervals(self) -> Int64:
        """Merged [start, end) rows, shape (n, 2)."""
        c, rows = self.trace.columns, self._selected
        return intervals.union(intervals.pairs(c.start_ps[rows], c.end_ps[rows]))

    @property
    def moving(self) -> Int64:
        """Merged [begin, end) rows, shape (n, 2): without the wait for other members."""
        c, rows = self.trace.columns, self._selected
        return intervals.union(intervals.pairs(c.begin_ps[rows], c.end_ps[rows]))

    @property
    def busy_ps(self) -> int:
        """Time in which at least one of the spans ran."""
        return intervals.length(self.intervals)

    def gaps(self) -> list[tuple[int, int]]:
        """Intervals between the first start and the last end in which none of the spans ran."""
        if not len(self):
            return []
        free = intervals.complement(self.intervals, self.start_ps, self.end_ps)
        return [(int(start), int(end)) for start, end in free]

    def _some(self) -> Int64:
        if not len(self):
            raise ValueError("no spans match")
        return self._selected
