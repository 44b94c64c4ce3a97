"""The compute ops of one pipeline stage, with what feeds them and what they send: one template.

Streams: "compute"; "loader" and "copy" for the input; one per neighbour and direction for the pipeline;
those of data parallelism. Ops are written in the order in which the host issues them.

A receive begins when the action before it has ended, a send when its own has: the schedules here post both in
the order of the actions, and a process group starts an operation after the compute that was issued before it
(torch's ScheduleGPipe and ProcessGroupNCCL; Megatron's recv_forward). A microbatch's transfer is therefore
beside the sender's next pass, never beside the receiver's: with fixed times and a transfer of t, gpipe takes
(m + p - 2)(F + B + 2 t) + F + B for p > 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

import msgspec

from emulator.plan.blocks import TOKEN_BYTES
from emulator.plan.data_parallel import Plan, Replicated, Visit
from emulator.plan.fsdp import Sharded
from emulator.plan.memory import RESERVED_BYTES, is_sharded
from emulator.plan.program import COMPUTE, Fixed, HostCopy, Kernel, Load, Template, Transfer
from emulator.plan.schedule import Action
from emulator.plan.template import TemplateDraft
from emulator.plan.unit import Piece, Stage, Step, boundary_bytes
from emulator.spec.job import Job
from emulator.spec.units import to_ps

NEXT, PREV = "next", "prev"


def write(job: Job, stage: Stage, actions: Sequence[Action], owner: int | None = None) -> Template:
    """Write what a rank of this stage does in one step; `owner` as in `fsdp.Sharded`."""
    draft = TemplateDraft(stage.index)
    draft.buffer("reserved", "reserved", RESERVED_BYTES, persistent=True)
    backward = [action.microbatch for action in actions if action.kind != "F"]
    plan = Plan(job, stage, draft, visits(stage, actions), backward[0], backward[-1])
    traffic = Sharded(plan, owner) if is_sharded(job) else Replicated(plan)
    return _Writer(plan, traffic).write(actions, f"stage{stage.index}" + _owner_name(owner, stage))


def _owner_name(owner: int | None, stage: Stage) -> str:
    if owner is None:
        return ""
    return f".owner{owner}" if owner < len(stage.units) else ".no_owner"


def visits(stage: Stage, actions: Iterable[Action]) -> list[Visit]:
    """Pieces in the order in which the actions take the microbatches through them."""
    ups = [piece.unit for piece in stage.pieces]
    ahead = [(p, unit, unit not in ups[:p], unit not in ups[p + 1 :]) for p, unit in enumerate(ups)]
    back = [(p, unit, final, first) for p, unit, first, final in reversed(ahead)]
    return [
        Visit(p, unit, action.kind == "F", action.microbatch, first, final)
        for action in actions
        for p, unit, first, final in (ahead if action.kind == "F" else back)
    ]


@lru_cache(maxsize=4096)
def _with_bytes(kernel: Kernel, extra: int) -> Kernel:
    """The kernel with more HBM traffic; one object for all layers and microbatches that need it."""
    return msgspec.structs.replace(kernel, hbm_bytes=kernel.hbm_bytes + extra)


class _Writer:
    """Writes one template, action by action."""

    def __init__(self, plan: Plan, traffic: Sharded | Replicated) -> None:
        self.plan, self.traffic = plan, traffic
        self.job, self.stage, self.draft = plan.job, plan.stage, plan.draft
        self.boundary = boundary_bytes(plan.job)
        fixed = plan.job.fixed_times
        self.transfer_ps = to_ps(fixed.transfer) if fixed else None
        self.number = [
            {name: i for i, (name, _) in enumerate(piece.flow.tensors)} for piece in plan.stage.pieces
        ]
        # Buffers of a piece's tensors for a microbatch, by tensor number; -1 until something touches one.
        self.buffers: dict[tuple[int, int], list[int]] = {}
        self.labels: dict[int, int] = {}
        self.sent: dict[int, int] = {}  # buffer -> send op, in case it is read after that
        self.passed_back = -1  # dx of the piece whose backward was written last

    def write(self, actions: Sequence[Action], name: str) -> Template:
        """Write all actions, then what ends the step."""
        index, last = 0, -1
        pieces = len(self.stage.pieces)
        for action in actions:
            waits = self._input(action, last)
            for visit in range(index, index + pieces):
                last = self._visit(visit, waits)
                waits = ()
            index += pieces
            self._output(action, last)
        self.traffic.finish(last)
        return self.draft.build(name)

    def _tensors(self, piece: int, microbatch: int) -> list[int]:
        key = (piece, microbatch)
        if key not in self.buffers:
            self.buffers[key] = [-1] * len(self.stage.pieces[piece].flow.tensors)
        return self.buffers[key]

    def _bind(self, piece: int, microbatch: int, tensor: str) -> int:
        """Buffer of a tensor, made now if nothing has touched it yet."""
        at, held = self.number[piece][tensor], self._tensors(piece, microbatch)
        if held[at] < 0:
            of = self.stage.pieces[piece]
            held[at] = self.draft.buffer(
                f"{of.name}.{tensor}.mb{microbatch}", "activations", of.flow.tensors[at][1]
            )
        return held[at]

    def _input(self, action: Action, last: int) -> tuple[int, ...]:
        """Issue what brings a microbatch, or its gradient, here; returns what its first op waits for.

        `last` is the last op of the action before, -1 if there is none.
        """
        after = (last,) if last >= 0 else ()
        mb, stage, end = action.microbatch, self.stage.index, len(self.stage.pieces) - 1
        if action.kind == "F":
            loaded = self._load(mb) if self.plan.kernels and (stage == 0 or self.stage.last) else ()
            if stage == 0:
                return loaded
            x = self._bind(0, mb, "x")
            return (*loaded, self._transfer("recv", PREV, "F", mb, stage - 1, stage, after, x))
        if self.stage.last:
            return ()
        dy = self._bind(end, mb, "dy")
        return (self._transfer("recv", NEXT, "B", mb, stage + 1, stage, after, dy),)

    def _output(self, action: Action, last: int) -> None:
        """Send what the stage has made of a microbatch, once the action's last op has ended."""
        mb, stage, end = action.microbatch, self.stage.index, len(self.stage.pieces) - 1
        if action.kind == "F" and not self.stage.last:
            y = self._bind(end, mb, "y")
            self.sent[y] = self._transfer("send", NEXT, "F", mb, stage, stage + 1, (last,), y)
        elif action.kind != "F" and stage > 0:
            self._transfer("send", PREV, "B", mb, stage, stage - 1, (last,), self.passed_back)

    def _transfer(
        self,
        kind: str,
        peer: str,
        way: str,
        mb: int,
        source: int,
        target: int,
        waits: tuple[int, ...],
        buffer: int,
    ) -> int:
        work = Transfer(
            kind="send" if kind == "send" else "recv",
            peer=peer,
            axis="pp",
            bytes=self.boundary,
            tag=f"{way}{mb}:{source}>{target}",
            duration_ps=self.transfer_ps,
        )
        name = f"{self.stage.index}{kind.upper()}_{way}{mb}"
        return self.draft.op(name, f"pp.{kind}_{peer}", work, waits=waits, touches=(buffer,), microbatch=mb)

    def _load(self, mb: int) -> tuple[int, ...]:
        """Load a microbatch's token ids (first stage) and labels (last stage) and copy them to the device."""
        size = self.job.micro_batch * self.job.seq_len * TOKEN_BYTES
        touches = []
        if self.stage.index == 0:
            touches.append(self._bind(0, mb, "x"))
        if self.stage.last:
            self.labels[mb] = self.draft.buffer(f"labels.mb{mb}", "activations", size)
            touches.append(self.labels[mb])
        load = self.draft.op(f"load.mb{mb}", "loader", Load(size * len(touches)), microbatch=mb)
        copy = HostCopy(size * len(touches), "h2d")
        return (self.draft.op(f"copy.mb{mb}", "copy", copy, waits=(load,), touches=touches, microbatch=mb),)

    def _visit(self, index: int, waits: tuple[int, ...]) -> int:
        """Write the ops of one piece for one microbatch, one way; returns the last."""
        visit = self.plan.visits[index]
        piece, mb = self.stage.pieces[visit.piece], visit.microbatch
        entry = self.traffic.enter(index)
        waits = (*waits, *entry.waits)
        held = self._tensors(visit.piece, mb)
        self._connect(visit, held)
        op = -1
        for step in piece.flow.forward if visit.forward else piece.flow.backward:
            touches = [held[t] if held[t] >= 0 else self._made(piece, held, t, mb) for t in step.touches]
            waits = (*waits, *(self.sent.pop(b) for b in touches if b in self.sent)) if self.sent else waits
            if mb in self.labels and isinstance(step.work, Kernel) and step.work.kind == "loss":
                touches.append(self.labels[mb])
            touches += entry.touches
            op = self.draft.op(
                piece.op_name(step.label, mb), COMPUTE, self._work(visit, step, touches), waits=waits,
                touches=touches, phase=step.phase, microbatch=mb, layer=piece.layer,
            )  # fmt: skip
            waits = ()
            self.traffic.stepped(visit, step, op)
        self.traffic.leave(index, op)
        if not visit.forward:
            del self.buffers[visit.piece, mb]
        return op

    def _connect(self, visit: Visit, held: list[int]) -> None:
        """Give a piece the tensor that the piece before it, on this way, has written."""
        p, mb = visit.piece, visit.microbatch
        if visit.forward and p > 0:
            held[self.number[p]["x"]] = self._bind(p - 1, mb, "y")
        elif not visit.forward and p < len(self.stage.pieces) - 1:
            held[self.number[p]["dy"]] = self.passed_back
        if not visit.forward and "dx" in self.number[p]:
            self.passed_back = self._bind(p, mb, "dx")

    def _made(self, piece: Piece, held: list[int], tensor: int, mb: int) -> int:
        name, size = piece.flow.tensors[tensor]
        held[tensor] = self.draft.buffer(f"{piece.name}.{name}.mb{mb}", "activations", size)
        return held[tensor]

    def _work(self, visit: Visit, step: Step, touches: list[int]) -> Kernel | Fixed:
        """A step's work with the traffic of its gradient; adds the gradient's buffer to what it touches."""
        if not step.gradient_elements:
            return step.work
        buffer, extra = self.traffic.gradient(visit, step)
        touches.append(buffer)
        if extra and isinstance(step.work, Kernel):
            return _with_bytes(step.work, extra)
        return step.work
