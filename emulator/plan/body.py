"""Templates: the ops of one kind of rank, kept as columns.

Ops are values, but a step of a large model has 100,000 of them. So a template keeps columns (its *body*),
which stages that are alike but for their number share, and makes an Op when somebody asks for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from emulator.plan.op import PHASES, TERMS, Buffer, Op, Work
from emulator.spec.arrays import Int64


class Lists(NamedTuple):
    """A list of numbers for each row: those of row i are items[begin[i] : begin[i + 1]]."""

    begin: Int64
    items: Int64

    @classmethod
    def of(cls, rows: Iterable[Sequence[int]]) -> Lists:
        """Put rows into columns."""
        lists = list(rows)
        begin = np.cumsum([0, *map(len, lists)], dtype=np.int64)
        return cls(begin, np.array([item for row in lists for item in row], dtype=np.int64))

    def row(self, index: int) -> tuple[int, ...]:
        """Numbers of one row."""
        return tuple(self.items[self.begin[index] : self.begin[index + 1]].tolist())

    def rows(self) -> list[tuple[int, ...]]:
        """Numbers of all rows."""
        items, edges = self.items.tolist(), self.begin.tolist()
        return [tuple(items[a:b]) if b > a else () for a, b in pairwise(edges)]

    @property
    def owners(self) -> Int64:
        """For each item, the row that it is in."""
        return np.repeat(np.arange(len(self.begin) - 1), np.diff(self.begin))


class BufferColumns(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Buffers of a template, one element each. `name` is an index into the body's names."""

    name: Int64
    layer: Int64
    microbatch: Int64
    term: Int64
    """Index into TERMS."""
    bytes: Int64
    persistent: npt.NDArray[np.bool_]


class Body(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Ops of a template as int64 columns, one element each in issue order; shared by stages that are alike.

    A layer counts from the stage's first one (-1: none). Names have places {stage}, {layer} and {mb} to fill.
    """

    names: tuple[str, ...]
    name: Int64
    """Index into names."""
    streams: tuple[str, ...]
    """In order of first use."""
    stream: Int64
    """Index into streams."""
    works: tuple[Work, ...]
    """Each once."""
    work: Int64
    """Index into works."""
    phase: Int64
    """Index into PHASES."""
    microbatch: Int64
    layer: Int64
    waits: Lists
    allocates: Lists
    uses: Lists
    frees: Lists
    buffers: BufferColumns

    def __len__(self) -> int:
        return len(self.name)

    def predecessors(self) -> Int64:
        """For each op the one before it on its stream; -1 for the first."""
        order = np.argsort(self.stream, kind="stable")
        stream = self.stream[order]
        before = np.full(len(self), -1, dtype=np.int64)
        before[order[1:]] = np.where(stream[1:] == stream[:-1], order[:-1], -1)
        return before

    def of_work(self, marks: Iterable[bool]) -> npt.NDArray[np.bool_]:
        """Mark the ops whose work is marked."""
        return np.fromiter(marks, dtype=np.bool_, count=len(self.works))[self.work]


class Template:
    """What one kind of rank does in one step: a body, seen from one stage.

    Written from ops and buffers; `written` binds a body that there is already.
    """

    def __init__(self, name: str, stage: int, ops: Iterable[Op], buffers: Iterable[Buffer]) -> None:
        ops, buffers = tuple(ops), tuple(buffers)
        assert all(op.stage in (0, stage) for op in ops), "an op of another stage"
        self.name = name
        self.stage = stage
        self.first_layer = 0
        self.body = _body(ops, buffers)

    @classmethod
    def written(cls, name: str, stage: int, first_layer: int, body: Body) -> Template:
        """Template of a stage whose layers begin with `first_layer`."""
        template = cls.__new__(cls)
        template.name, template.stage, template.first_layer, template.body = name, stage, first_layer, body
        return template

    def __len__(self) -> int:
        return len(self.body)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Template):
            return NotImplemented
        same = self.body is other.body or (self.ops, self.buffers) == (other.ops, other.buffers)
        return same and self._place == other._place

    def __hash__(self) -> int:
        return hash((self._place, len(self)))

    def __repr__(self) -> str:
        return f"<Template {self.name}: {len(self)} ops on {len(self.body.streams)} streams>"

    @property
    def _place(self) -> tuple[str, int, int]:
        return self.name, self.stage, self.first_layer

    @property
    def streams(self) -> tuple[str, ...]:
        """Streams in order of first use."""
        return self.body.streams

    @cached_property
    def layer(self) -> Int64:
        """Layer of each op in the model; -1: none."""
        return np.where(self.body.layer < 0, -1, self.body.layer + self.first_layer)

    @cached_property
    def ops(self) -> tuple[Op, ...]:
        """All ops."""
        body = self.body
        columns = (body.name, body.stream, body.work, body.phase, body.microbatch, self.layer)
        lists = (body.waits, body.allocates, body.uses, body.frees)
        return tuple(
            self._op(*row)
            for row in zip(*(c.tolist() for c in columns), *(each.rows() for each in lists), strict=True)
        )

    def op(self, index: int) -> Op:
        """One op."""
        body = self.body
        columns = (body.name, body.stream, body.work, body.phase, body.microbatch, self.layer)
        lists = (body.waits, body.allocates, body.uses, body.frees)
        name, stream, work, phase, microbatch, layer = (int(column[index]) for column in columns)
        waits, allocates, uses, frees = (each.row(index) for each in lists)
        return self._op(name, stream, work, phase, microbatch, layer, waits, allocates, uses, frees)

    def op_name(self, index: int) -> str:
        """Name of one op."""
        body = self.body
        return self._named(int(body.name[index]), int(self.layer[index]), int(body.microbatch[index]))

    @cached_property
    def op_names(self) -> list[str]:
        """Names of all ops."""
        columns = (self.body.name, self.layer, self.body.microbatch)
        return [self._named(*row) for row in zip(*(c.tolist() for c in columns), strict=True)]

    @cached_property
    def buffers(self) -> tuple[Buffer, ...]:
        """All buffers."""
        b = self.body.buffers
        layer = np.where(b.layer < 0, -1, b.layer + self.first_layer)
        columns = (b.name, layer, b.microbatch, b.term, b.bytes, b.persistent)
        return tuple(
            Buffer(self._named(name, at, mb), TERMS[term], size, persistent)
            for name, at, mb, term, size, persistent in zip(*(c.tolist() for c in columns), strict=True)
        )

    def _named(self, name: int, layer: int, microbatch: int) -> str:
        return self.body.names[name].format(stage=self.stage, layer=layer, mb=microbatch)

    def _op(
        self, name: int, stream: int, work: int, phase: int, microbatch: int, layer: int,
        waits: tuple[int, ...], allocates: tuple[int, ...], uses: tuple[int, ...], frees: tuple[int, ...],
    ) -> Op:  # fmt: skip
        return Op(
            name=self._named(name, layer, microbatch),
            stream=self.body.streams[stream],
            work=self.body.works[work],
            waits=waits,
            phase=PHASES[phase],
            stage=self.stage,
            microbatch=microbatch,
            layer=layer,
            allocates=allocates,
            uses=uses,
            frees=frees,
        )


def _body(ops: Sequence[Op], buffers: Sequence[Buffer]) -> Body:
    """Columns of ops that are there; braces of their names stand for themselves."""
    names: dict[str, int] = {}
    streams: dict[str, int] = {}
    works: dict[Work, int] = {}

    def plain(name: str) -> int:
        return names.setdefault(name.replace("{", "{{").replace("}", "}}"), len(names))

    def column(values: Iterable[int]) -> Int64:
        return np.fromiter(values, dtype=np.int64)

    return Body(
        name=column([plain(op.name) for op in ops]),
        stream=column([streams.setdefault(op.stream, len(streams)) for op in ops]),
        work=column([works.setdefault(op.work, len(works)) for op in ops]),
        phase=column([PHASES.index(op.phase) for op in ops]),
        microbatch=column([op.microbatch for op in ops]),
        layer=column([op.layer for op in ops]),
        waits=Lists.of(op.waits for op in ops),
        allocates=Lists.of(op.allocates for op in ops),
        uses=Lists.of(op.uses for op in ops),
        frees=Lists.of(op.frees for op in ops),
        buffers=BufferColumns(
            name=column([plain(b.name) for b in buffers]),
            layer=np.full(len(buffers), -1),
            microbatch=np.full(len(buffers), -1),
            term=column([TERMS.index(b.term) for b in buffers]),
            bytes=column([b.bytes for b in buffers]),
            persistent=np.array([b.persistent for b in buffers], dtype=np.bool_),
        ),
        names=tuple(names),
        streams=tuple(streams),
        works=tuple(works),
    )
