"""Attributes of a program's ops as arrays: what the filters of a trace look up."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from emulator.plan.program import Collective, Fixed, HostCopy, Kernel, Load, Op, Program, Transfer, Work

Int64 = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]


def kind_of(work: Work) -> str:
    """Name what an op does: a kernel's or collective's kind, send, recv, copy, load, fixed or join."""
    match work:
        case Kernel() | Collective() | Transfer():
            return work.kind
        case Fixed():
            return "fixed"
        case HostCopy():
            return "copy"
        case Load():
            return "load"
        case None:
            return "join"


def axis_of(work: Work) -> str:
    """Return the mesh axis of a collective or transfer; "" for anything else."""
    return work.axis if isinstance(work, Collective | Transfer) else ""


class OpIndex:
    """Attributes of all ops of all templates of a program, as arrays: what filters look up.

    Op i of template t stands at `offset[t] + i`.
    """

    def __init__(self, program: Program) -> None:
        self.ops: list[Op] = [op for template in program.templates for op in template.ops]
        sizes = [len(template.ops) for template in program.templates]
        self.offset: Int64 = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        self.kind: list[str] = [kind_of(op.work) for op in self.ops]
        self.axis: list[str] = [axis_of(op.work) for op in self.ops]
        self._text: dict[str, tuple[dict[str, int], Int64]] = {
            "name": _coded([op.name for op in self.ops]),
            "stream": _coded([op.stream for op in self.ops]),
            "phase": _coded([op.phase for op in self.ops]),
            "kind": _coded(self.kind),
            "axis": _coded(self.axis),
        }
        self._number: dict[str, Int64] = {
            "stage": np.array([op.stage for op in self.ops], dtype=np.int64),
            "microbatch": np.array([op.microbatch for op in self.ops], dtype=np.int64),
            "layer": np.array([op.layer for op in self.ops], dtype=np.int64),
        }

    def matches(self, attribute: str, value: str | int) -> Bool:
        """Tell for every op of the table whether its attribute has this value."""
        found: Bool
        if isinstance(value, int):
            found = self._number[attribute] == value
        else:
            codes, column = self._text[attribute]
            found = column == codes.get(value, -1)
        return found


def _coded(values: list[str]) -> tuple[dict[str, int], Int64]:
    codes: dict[str, int] = {}
    column = [codes.setdefault(value, len(codes)) for value in values]
    return codes, np.array(column, dtype=np.int64)
