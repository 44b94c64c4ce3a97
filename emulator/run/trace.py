"""The Trace: what happened, as columns of spans with integer picosecond ends."""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt

from emulator.plan.program import Op, Program

Int64 = npt.NDArray[np.int64]


class Outcome:
    """How a run ended."""

    def __init__(self, kind: Literal["complete", "interrupted"], at_ps: int, cause: str = "") -> None:
        self.kind, self.at_ps, self.cause = kind, at_ps, cause


class Trace:
    """Spans of a run, one row per op of each class and step, in columns of equal length.

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

    program: Program
    class_index: Int64
    op_index: Int64
    step: Int64
    issued_ps: Int64
    ready_ps: Int64
    start_ps: Int64
    begin_ps: Int64
    end_ps: Int64
    alone_ps: Int64
    outcome: Outcome
    events: int
    """SimPy events processed."""
    wall_seconds: float

    def op(self, row: int) -> Op:
        """The op of a row."""
        rank_class = self.program.classes[self.class_index[row]]
        return self.program.templates[rank_class.template].ops[self.op_index[row]]
