"""A template while it is being written: ops in issue order, and buffers whose lives follow from their use."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from emulator.plan.program import Buffer, Op, Phase, Template, Work

Term = Literal["weights", "gradients", "optimizer", "activations", "buffers", "reserved"]


class _Pending(NamedTuple):
    name: str
    stream: str
    work: Work
    waits: tuple[int, ...]
    touches: Sequence[int]
    phase: Phase
    microbatch: int
    layer: int


class TemplateDraft:
    """Collects ops in the order in which the host issues them.

    A buffer that is not persistent is allocated by the first op that touches it and freed by the last one, in
    issue order. Where the touching ops are on several streams, whoever writes the ops must order the last
    after the others by waits; `check.check` finds out.
    """

    def __init__(self, stage: int) -> None:
        self.stage = stage
        self._ops: list[_Pending] = []
        self._buffers: list[Buffer] = []

    def __len__(self) -> int:
        return len(self._ops)

    def buffer(self, name: str, term: Term, size: int, *, persistent: bool = False) -> int:
        """Add a buffer of `size` bytes; returns its index."""
        self._buffers.append(Buffer(name, term, size, persistent))
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
        across = tuple(sorted({w for w in waits if self._ops[w].stream != stream}))
        self._ops.append(_Pending(name, stream, work, across, touches, phase, microbatch, layer))
        return len(self._ops) - 1

    def build(self, name: str) -> Template:
        """Finish the template: fill in where buffers come to life and where they die."""
        first: dict[int, int] = {}
        last: dict[int, int] = {}
        for index, op in enumerate(self._ops):
            for buffer in op.touches:
                if not self._buffers[buffer].persistent:
                    first.setdefault(buffer, index)
                    last[buffer] = index
        ops = []
        for index, op in enumerate(self._ops):
            touched = tuple(dict.fromkeys(op.touches))
            ops.append(
                Op(
                    name=op.name,
                    stream=op.stream,
                    work=op.work,
                    waits=op.waits,
                    phase=op.phase,
                    stage=self.stage,
                    microbatch=op.microbatch,
                    layer=op.layer,
                    allocates=tuple(b for b in touched if first.get(b) == index),
                    uses=tuple(b for b in touched if first.get(b) != index and last.get(b) != index),
                    frees=tuple(b for b in touched if last.get(b) == index),
                )
            )
        return Template(name, self.stage, tuple(ops), tuple(self._buffers))
