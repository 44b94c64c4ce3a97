"""The Trace: what happened, as columns of spans with integer picosecond ends.

    trace.where(rank=3, stream="compute").names[:4] == ["3F0", "3B0", "3F1", "3B1"]
    trace.where(name="0F0").one().precedes(trace.where(name="1F0").one())

One row per op of each rank class and step; the trace answers for any rank by way of its class.
"""

from __future__ import annotations

from functools import cached_property
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

from emulator.plan.op import PHASES
from emulator.plan.program import Op, Program, Template
from emulator.run.op_index import OpIndex, axis_of, kind_of
from emulator.run.spans import Span, Spans
from emulator.spec.arrays import Bool, Int64

__all__ = ["Columns", "Outcome", "Span", "Spans", "Trace"]


class Outcome(msgspec.Struct, frozen=True):
    """How a run ended."""

    kind: Literal["complete", "interrupted"]
    at_ps: int
    cause: str = ""


class Columns(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Frozen int64 arrays of equal length, one element per op of each class and step.

    class_index  index into program.classes
    op_index     index into the class's template's ops
    step         0-based training step
    issued_ps    when the host had issued the op
    ready_ps     when its predecessor on the stream and all its waits had ended (whatever the host did)
    start_ps     when it began on its stream: max(issued, ready), later if it had to wait for SMs to hold
    begin_ps     when its work began to move: start for a kernel; when the last member arrived, for a
                 collective or a transfer
    end_ps       when it ended
    alone_ps     how long begin..end would have been with nobody else on any resource
    """

    class_index: Int64
    op_index: Int64
    step: Int64
    issued_ps: Int64
    ready_ps: Int64
    start_ps: Int64
    begin_ps: Int64
    end_ps: Int64
    alone_ps: Int64


class Trace:
    """Spans of a run: `columns`, one row per op of each class and step, and how the run ended.

    Raises ValueError when the columns differ in length.
    """

    def __init__(
        self,
        program: Program,
        *,
        class_index: npt.ArrayLike,
        op_index: npt.ArrayLike,
        step: npt.ArrayLike,
        issued_ps: npt.ArrayLike,
        ready_ps: npt.ArrayLike,
        start_ps: npt.ArrayLike,
        begin_ps: npt.ArrayLike,
        end_ps: npt.ArrayLike,
        alone_ps: npt.ArrayLike,
        outcome: Outcome | None = None,
        events: int = 0,
        wall_seconds: float = 0.0,
    ) -> None:
        self.program = program
        self.columns = Columns(
            class_index=_column(class_index),
            op_index=_column(op_index),
            step=_column(step),
            issued_ps=_column(issued_ps),
            ready_ps=_column(ready_ps),
            start_ps=_column(start_ps),
            begin_ps=_column(begin_ps),
            end_ps=_column(end_ps),
            alone_ps=_column(alone_ps),
        )
        sizes = {name: getattr(self.columns, name).shape for name in Columns.__struct_fields__}
        if len(set(sizes.values())) != 1 or len(sizes["step"]) != 1:
            raise ValueError(f"the columns of a trace must have one length, not {sizes}")
        self.outcome = outcome or Outcome("complete", self.end_ps)
        self.events = events
        """SimPy events processed."""
        self.wall_seconds = wall_seconds

    def __len__(self) -> int:
        return len(self.columns.step)

    def __repr__(self) -> str:
        return (
            f"<Trace {self.outcome.kind}: {len(self)} spans of {len(self.program.classes)} rank classes, "
            f"{self.steps} steps, {self.end_ps} ps>"
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Trace):
            return NotImplemented
        return self.to_bytes() == other.to_bytes() and self.program == other.program

    def __hash__(self) -> int:
        return hash(self.to_bytes())

    @cached_property
    def end_ps(self) -> int:
        """When the last span ended; 0 for an empty trace."""
        return int(self.columns.end_ps.max(initial=0))

    @cached_property
    def steps(self) -> int:
        """Training steps that left a span."""
        return int(self.columns.step.max(initial=-1)) + 1

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks, in order."""
        return tuple(np.flatnonzero(self._class_of >= 0).tolist())

    @cached_property
    def index(self) -> OpIndex:
        """Attributes of the program's ops, for filters."""
        return OpIndex(self.program)

    @cached_property
    def template_of(self) -> Int64:
        """For every rank class, the index of its template."""
        return np.array([rank_class.template for rank_class in self.program.classes], dtype=np.int64)

    @cached_property
    def op_row(self) -> Int64:
        """For every row of the trace, the row of its op in `index`."""
        rows: Int64 = self.index.offset[self.template_of[self.columns.class_index]] + self.columns.op_index
        return rows

    @cached_property
    def _class_of(self) -> Int64:
        return self.program.class_of_ranks()

    @cached_property
    def _rows_by_class(self) -> list[Int64]:
        order = np.argsort(self.columns.class_index, kind="stable")
        edges = np.searchsorted(self.columns.class_index[order], np.arange(len(self.program.classes) + 1))
        return [order[edges[i] : edges[i + 1]] for i in range(len(self.program.classes))]

    def rank_class(self, rank: int) -> int:
        """Index of the class that this rank belongs to; ValueError for a rank that the program lacks."""
        if not 0 <= rank < len(self._class_of) or self._class_of[rank] < 0:
            raise ValueError(
                f"rank {rank} is not in the program: it has ranks {self.ranks[0]}..{self.ranks[-1]}"
            )
        return int(self._class_of[rank])

    def members(self, rank: int) -> tuple[int, ...]:
        """Return all ranks that did the same at the same instants as this one, itself included.

        Raises ValueError for a rank that the program lacks.
        """
        return self.program.classes[self.rank_class(rank)].members

    def template(self, index: int) -> Template:
        """Return the template of a rank class."""
        return self.program.templates[self.program.classes[index].template]

    def class_rows(self, index: int) -> Int64:
        """Return the rows of a rank class, all steps, in the order of the columns."""
        return self._rows_by_class[index]

    def step_rows(self, index: int, step: int) -> Int64:
        """Return the row of each op of a rank class in one step; -1 for an op that left no span."""
        rows = self.class_rows(index)
        rows = rows[self.columns.step[rows] == step]
        found = np.full(len(self.template(index)), -1, dtype=np.int64)
        found[self.columns.op_index[rows]] = rows
        return found

    def op(self, row: int) -> Op:
        """Return the op of a row."""
        return self.template(int(self.columns.class_index[row])).op(int(self.columns.op_index[row]))

    def span(self, row: int, rank: int | None = None) -> Span:
        """Return a row as a Span of `rank`; by default of the first member of the row's class."""
        c = self.columns
        rank_class, i = int(c.class_index[row]), int(c.op_index[row])
        template = self.template(rank_class)
        body = template.body
        work = body.works[body.work[i]]
        return Span(
            rank=self.program.classes[rank_class].members[0] if rank is None else rank,
            stream=body.streams[body.stream[i]],
            name=template.op_name(i),
            kind=kind_of(work),
            phase=PHASES[body.phase[i]],
            axis=axis_of(work),
            stage=template.stage,
            microbatch=int(body.microbatch[i]),
            layer=int(template.layer[i]),
            step=int(c.step[row]),
            issued_ps=int(c.issued_ps[row]),
            ready_ps=int(c.ready_ps[row]),
            start_ps=int(c.start_ps[row]),
            begin_ps=int(c.begin_ps[row]),
            end_ps=int(c.end_ps[row]),
            alone_ps=int(c.alone_ps[row]),
        )

    def where(
        self,
        *,
        rank: int | None = None,
        stream: str | None = None,
        name: str | None = None,
        kind: str | None = None,
        phase: str | None = None,
        axis: str | None = None,
        stage: int | None = None,
        microbatch: int | None = None,
        layer: int | None = None,
        step: int | None = None,
    ) -> Spans:
        """Spans with all of the given attributes, by start.

        Without `rank`, one span per class stands for all the class's members. An attribute that no op has
        selects nothing; a rank that the program lacks raises ValueError.
        """
        every = np.arange(len(self), dtype=np.int64)
        rows = every if rank is None else self.class_rows(self.rank_class(rank))
        wanted: dict[str, str | int | None] = {
            "stream": stream,
            "name": name,
            "kind": kind,
            "phase": phase,
            "axis": axis,
            "stage": stage,
            "microbatch": microbatch,
            "layer": layer,
        }
        keep: Bool | None = None
        for attribute, value in wanted.items():
            if value is not None:
                match = self.index.matches(attribute, value)
                keep = match if keep is None else keep & match
        if keep is not None:
            rows = rows[keep[self.op_row[rows]]]
        if step is not None:
            rows = rows[self.columns.step[rows] == step]
        return Spans(self, rows, rank)

    def to_bytes(self) -> bytes:
        """Return the columns as one canonical byte string, rows by class, step and op, without wall times.

        Two runs are the same run when their strings are equal.
        """
        c = self.columns
        order = np.lexsort((c.op_index, c.step, c.class_index))
        parts = [f"{self.outcome.kind} {self.outcome.at_ps} {self.outcome.cause}\n{len(self)}\n".encode()]
        parts += [getattr(c, name)[order].astype("<i8").tobytes() for name in Columns.__struct_fields__]
        return b"".join(parts)


def _column(values: npt.ArrayLike) -> Int64:
    column = np.array(values, dtype=np.int64)
    column.setflags(write=False)
    return column
