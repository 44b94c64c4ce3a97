"""A body while it is being written: ops in issue order, and buffers whose lives follow from their use."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from emulator.plan.body import Body, BufferColumns, Lists
from emulator.plan.op import PHASES, TERMS, Phase, Term, Work
from emulator.spec.arrays import Int64


class Tile(NamedTuple):
    """Consecutive ops of one stream that come again and again, each time over other buffers.

    An op touches slots; whoever lays the tile says which buffer is in which slot.
    """

    name: list[int]
    work: list[int]
    phase: list[int]
    touched: list[int]
    """How many slots each op touches."""
    slots: list[int]
    """These slots, op by op."""
    first: dict[int, int]
    """For each slot that is touched, the first op that does."""


class TemplateDraft:
    """Collects ops in the order in which the host issues them.

    A buffer that is not persistent is allocated by the first op that touches it and freed by the last one, in
    issue order. Where the touching ops are on several streams, whoever writes the ops must order the last
    after the others by waits; `check.check` finds out. Names have places {stage}, {layer} and {mb}.
    """

    def __init__(self) -> None:
        self._names: dict[str, int] = {}
        self._streams: dict[str, int] = {}
        self._works: dict[Work, int] = {}
        # Columns of the ops, and of the buffers.
        self._name: list[int] = []
        self._stream: list[int] = []
        self._work: list[int] = []
        self._phase: list[int] = []
        self._microbatch: list[int] = []
        self._layer: list[int] = []
        self._touched: list[int] = []
        self._touches: list[int] = []
        self._waits: dict[int, tuple[int, ...]] = {}
        self._buffers: list[tuple[int, int, int, int, int, bool]] = []

    def __len__(self) -> int:
        return len(self._name)

    def name(self, name: str) -> int:
        """Number of a name."""
        return self._names.setdefault(name, len(self._names))

    def buffer(
        self,
        name: str,
        term: Term,
        size: int,
        *,
        microbatch: int = -1,
        layer: int = -1,
        persistent: bool = False,
    ) -> int:
        """Add a buffer of `size` bytes; returns its index."""
        self._buffers.append((self.name(name), layer, microbatch, TERMS.index(term), size, persistent))
        return len(self._buffers) - 1

    def op(
        self,
        name: str,
        stream: str,
        work: Work,
        *,
        waits: Iterable[int] = (),
        touches: Sequence[int] = (),
        phase: Phase = "-",
        microbatch: int = -1,
        layer: int = -1,
    ) -> int:
        """Issue an op that touches these buffers; returns its index. Waits on its own stream are implied."""
        at, on = len(self._name), self._streams.setdefault(stream, len(self._streams))
        self._wait(at, on, waits)
        self._name.append(self.name(name))
        self._stream.append(on)
        self._work.append(self._works.setdefault(work, len(self._works)))
        self._phase.append(PHASES.index(phase))
        self._microbatch.append(microbatch)
        self._layer.append(layer)
        self._touched.append(len(touches))
        self._touches.extend(touches)
        return at

    def cut(self, ops: Sequence[tuple[str, Work, Phase, Sequence[int]]]) -> Tile:
        """Make a tile of ops, given as name, work, phase and the slots that each touches."""
        first: dict[int, int] = {}
        for at, (_, _, _, slots) in enumerate(ops):
            for slot in slots:
                first.setdefault(slot, at)
        return Tile(
            name=[self.name(name) for name, *_ in ops],
            work=[self._works.setdefault(work, len(self._works)) for _, work, *_ in ops],
            phase=[PHASES.index(phase) for _, _, phase, _ in ops],
            touched=[len(slots) for *_, slots in ops],
            slots=[slot for *_, slots in ops for slot in slots],
            first=first,
        )

    def lay(
        self,
        tile: Tile,
        stream: str,
        buffers: Sequence[int],
        waits: Mapping[int, Iterable[int]],
        *,
        microbatch: int,
        layer: int,
    ) -> int:
        """Issue the ops of a tile; returns the last one's index.

        buffers: the buffer in each slot, -1 for none. waits: by the op's place in the tile.
        """
        at, on, count = len(self._name), self._streams.setdefault(stream, len(self._streams)), len(tile.name)
        for place, these in waits.items():
            self._wait(at + place, on, these)
        self._name.extend(tile.name)
        self._stream.extend([on] * count)
        self._work.extend(tile.work)
        self._phase.extend(tile.phase)
        self._microbatch.extend([microbatch] * count)
        self._layer.extend([layer] * count)
        self._touched.extend(tile.touched)
        self._touches.extend([buffers[slot] for slot in tile.slots])
        return at + count - 1

    def _wait(self, op: int, stream: int, waits: Iterable[int]) -> None:
        across = {w for w in waits if self._stream[w] != stream}
        if across:
            self._waits[op] = tuple(sorted(across))

    def build(self) -> Body:
        """Finish the body: fill in where buffers come to life and where they die."""
        buffers = self._buffer_columns()
        allocates, uses, frees = self._lives(buffers)
        ops = range(len(self))
        return Body(
            names=tuple(self._names),
            name=_column(self._name),
            streams=tuple(self._streams),
            stream=_column(self._stream),
            works=tuple(self._works),
            work=_column(self._work),
            phase=_column(self._phase),
            microbatch=_column(self._microbatch),
            layer=_column(self._layer),
            waits=Lists.of(self._waits.get(op, ()) for op in ops),
            allocates=allocates,
            uses=uses,
            frees=frees,
            buffers=buffers,
        )

    def _buffer_columns(self) -> BufferColumns:
        table = np.array(self._buffers, dtype=np.int64).reshape(-1, 6)
        name, layer, microbatch, term, size, persistent = np.ascontiguousarray(table.T)
        return BufferColumns(
            name=name,
            layer=layer,
            microbatch=microbatch,
            term=term,
            bytes=size,
            persistent=persistent.astype(np.bool_),
        )

    def _lives(self, buffers: BufferColumns) -> tuple[Lists, Lists, Lists]:
        """What each op allocates, only uses, and frees."""
        count, most = len(self), len(buffers.name)
        owner = np.repeat(np.arange(count), self._touched)
        buffer = _column(self._touches)
        there = buffer >= 0
        # Each pair of op and buffer once, by op.
        pairs = np.unique(owner[there] * most + buffer[there])
        owner, buffer = np.divmod(pairs, max(most, 1))
        first = np.full(most, count)
        np.minimum.at(first, buffer, owner)
        last = np.full(most, -1)
        np.maximum.at(last, buffer, owner)
        passing = ~buffers.persistent[buffer]
        born, dies = passing & (first[buffer] == owner), passing & (last[buffer] == owner)

        def lists(keep: np.ndarray) -> Lists:
            each = np.bincount(owner[keep], minlength=count)
            return Lists(np.concatenate([[0], np.cumsum(each)]), buffer[keep])

        return lists(born), lists(~born & ~dies), lists(dies)


def _column(values: Sequence[int]) -> Int64:
    return np.array(values, dtype=np.int64)
