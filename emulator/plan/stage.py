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
from itertools import pairwise
from typing import Literal, NamedTuple

import msgspec

from emulator.plan.blocks import TOKEN_BYTES
from emulator.plan.body import Body
from emulator.plan.data_parallel import Plan, Replicated, Visit, gradient_bytes
from emulator.plan.fsdp import Sharded
from emulator.plan.memory import RESERVED_BYTES, is_sharded
from emulator.plan.program import COMPUTE, Fixed, HostCopy, Kernel, Load, Phase, Transfer
from emulator.plan.schedule import Action
from emulator.plan.template import TemplateDraft, Tile
from emulator.plan.unit import Stage, Step, boundary_bytes
from emulator.spec.job import Job
from emulator.spec.units import to_ps

NEXT, PREV = "next", "prev"


def write(job: Job, stage: Stage, actions: Sequence[Action], owner: int | None = None) -> Body:
    """Write what a rank of this stage does in one step; `owner` as in `fsdp.Sharded`."""
    draft = TemplateDraft()
    draft.buffer("reserved", "reserved", RESERVED_BYTES, persistent=True)
    backward = [action.microbatch for action in actions if action.kind != "F"]
    plan = Plan(job, stage, draft, visits(stage, actions), backward[0], backward[-1])
    traffic = Sharded(plan, owner) if is_sharded(job) else Replicated(plan)
    return _Writer(plan, traffic).write(actions)


def visits(stage: Stage, actions: Iterable[Action]) -> list[Visit]:
    """Pieces in the order in which the actions take the microbatches through them."""
    ups = [piece.unit for piece in stage.pieces]
    first = {unit: p for p, unit in reversed(list(enumerate(ups)))}
    final = {unit: p for p, unit in enumerate(ups)}
    ahead = [(p, unit, first[unit] == p, final[unit] == p) for p, unit in enumerate(ups)]
    back = [(p, unit, is_final, is_first) for p, unit, is_first, is_final in reversed(ahead)]
    return [
        Visit(p, unit, action.kind == "F", action.microbatch, is_first, is_final)
        for action in actions
        for p, unit, is_first, is_final in (ahead if action.kind == "F" else back)
    ]


@lru_cache(maxsize=4096)
def _with_bytes(kernel: Kernel, extra: int) -> Kernel:
    """The kernel with more HBM traffic; one object for all layers and microbatches that need it."""
    return msgspec.structs.replace(kernel, hbm_bytes=kernel.hbm_bytes + extra)


class _Part(NamedTuple):
    """Ops of a visit between two moments at which data parallelism wants to know what is done."""

    tile: Tile
    completes: tuple[int, ...]
    """Indices in the unit's parameters of those whose gradient the last op completes."""


class _Writer:
    """Writes one body, action by action.

    A visit lays tiles. Their slots are the tensors of the piece's flow, and after them the microbatch's
    labels, the unit's unsharded parameters and its gradient.
    """

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
        self.parts: dict[tuple[object, ...], list[_Part]] = {}

    def write(self, actions: Sequence[Action]) -> Body:
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
        return self.draft.build()

    def _tensors(self, piece: int, microbatch: int) -> list[int]:
        key = (piece, microbatch)
        if key not in self.buffers:
            self.buffers[key] = [-1] * len(self.stage.pieces[piece].flow.tensors)
        return self.buffers[key]

    def _bind(self, piece: int, microbatch: int, tensor: str) -> int:
        """Buffer of a tensor, made now if nothing has touched it yet."""
        return self._made(piece, self._tensors(piece, microbatch), self.number[piece][tensor], microbatch)

    def _made(self, piece: int, held: list[int], tensor: int, mb: int) -> int:
        if held[tensor] < 0:
            of = self.stage.pieces[piece]
            name, size = of.flow.tensors[tensor]
            held[tensor] = self.draft.buffer(
                f"{of.name}.{name}.mb{{mb}}", "activations", size, microbatch=mb, layer=of.layer
            )
        return held[tensor]

    def _input(self, action: Action, last: int) -> tuple[int, ...]:
        """Issue what brings a microbatch, or its gradient, here; returns what its first op waits for.

        `last` is the last op of the action before, -1 if there is none.
        """
        after = (last,) if last >= 0 else ()
        mb, first, end = action.microbatch, self.stage.index == 0, len(self.stage.pieces) - 1
        if action.kind == "F":
            loaded = self._load(mb) if self.plan.kernels and (first or self.stage.last) else ()
            if first:
                return loaded
            return (*loaded, self._transfer("recv", PREV, "F", mb, after, self._bind(0, mb, "x")))
        if self.stage.last:
            return ()
        return (self._transfer("recv", NEXT, "B", mb, after, self._bind(end, mb, "dy")),)

    def _output(self, action: Action, last: int) -> None:
        """Send what the stage has made of a microbatch, once the action's last op has ended."""
        mb, end = action.microbatch, len(self.stage.pieces) - 1
        if action.kind == "F" and not self.stage.last:
            y = self._bind(end, mb, "y")
            self.sent[y] = self._transfer("send", NEXT, "F", mb, (last,), y)
        elif action.kind != "F" and self.stage.index > 0:
            self._transfer("send", PREV, "B", mb, (last,), self.passed_back)

    def _transfer(
        self,
        kind: Literal["send", "recv"],
        peer: str,
        way: str,
        mb: int,
        waits: tuple[int, ...],
        buffer: int,
    ) -> int:
        size, fixed = self.boundary, self.transfer_ps
        work = Transfer(kind=kind, peer=peer, axis="pp", bytes=size, tag=f"{way}{mb}", duration_ps=fixed)
        name = f"{{stage}}{kind.upper()}_{way}{{mb}}"
        return self.draft.op(name, f"pp.{kind}_{peer}", work, waits=waits, touches=(buffer,), microbatch=mb)

    def _load(self, mb: int) -> tuple[int, ...]:
        """Load a microbatch's token ids (first stage) and labels (last stage) and copy them to the device."""
        size = self.job.micro_batch * self.job.seq_len * TOKEN_BYTES
        touches = []
        if self.stage.index == 0:
            touches.append(self._bind(0, mb, "x"))
        if self.stage.last:
            self.labels[mb] = self.draft.buffer("labels.mb{mb}", "activations", size, microbatch=mb)
            touches.append(self.labels[mb])
        load = self.draft.op("load.mb{mb}", "loader", Load(size * len(touches)), microbatch=mb)
        copy = HostCopy(size * len(touches), "h2d")
        return (self.draft.op("copy.mb{mb}", "copy", copy, waits=(load,), touches=touches, microbatch=mb),)

    def _visit(self, index: int, waits: tuple[int, ...]) -> int:
        """Write the ops of one piece for one microbatch, one way; returns the last."""
        visit = self.plan.visits[index]
        piece, mb = self.stage.pieces[visit.piece], visit.microbatch
        entry = self.traffic.enter(index)
        held = self._tensors(visit.piece, mb)
        self._connect(visit, held)
        gradient = -1 if visit.forward else self.traffic.gradient(visit)
        op, first = -1, (*waits, *entry.waits)
        for tile, completes in self._parts(visit):
            for slot in tile.first:
                if slot < len(held):
                    self._made(visit.piece, held, slot, mb)
            after = self._after_sends(tile, held)
            after[0] = (*first, *after.get(0, ()))
            buffers = (*held, self.labels.get(mb, -1), entry.unsharded, gradient)
            op = self.draft.lay(tile, COMPUTE, buffers, after, microbatch=mb, layer=piece.layer)
            first = ()
            if completes:
                self.traffic.completed(visit, completes, op)
        self.traffic.leave(index, op)
        if not visit.forward:
            del self.buffers[visit.piece, mb]
        return op

    def _after_sends(self, tile: Tile, held: list[int]) -> dict[int, tuple[int, ...]]:
        """Waits of a tile's ops for sends of what they touch, which were issued before; by place."""
        waits: dict[int, tuple[int, ...]] = {}
        for slot in tile.first if self.sent else ():
            if slot < len(held) and held[slot] in self.sent:
                at = tile.first[slot]
                waits[at] = (*waits.get(at, ()), self.sent.pop(held[slot]))
        return waits

    def _parts(self, visit: Visit) -> list[_Part]:
        """Tiles of a visit; alike for all microbatches and layers for which gradients do the same."""
        piece = self.stage.pieces[visit.piece]
        listens = self.traffic.listens(visit)
        key = (id(piece.flow), piece.pattern, visit.forward, listens, self.traffic.adds(visit))
        if key not in self.parts:
            steps = piece.flow.forward if visit.forward else piece.flow.backward
            ends = [i + 1 for i, step in enumerate(steps) if listens and step.completes]
            cuts = [0, *(end for end in ends if end < len(steps)), len(steps)]
            self.parts[key] = [
                _Part(
                    self.draft.cut([self._op(visit, step) for step in steps[a:b]]),
                    steps[b - 1].completes if listens else (),
                )
                for a, b in pairwise(cuts)
            ]
        return self.parts[key]

    def _op(self, visit: Visit, step: Step) -> tuple[str, Kernel | Fixed, Phase, tuple[int, ...]]:
        """A step as an op of a tile, with the traffic of its gradient."""
        piece, work = self.stage.pieces[visit.piece], step.work
        labels = len(piece.flow.tensors)
        unsharded, gradient = labels + 1, labels + 2
        slots = [*step.touches, unsharded]
        if isinstance(work, Kernel) and work.kind == "loss":
            slots.append(labels)
        if step.gradient_elements:
            slots.append(gradient)
            extra = gradient_bytes(
                self.plan, step, self.traffic.gradient_element_bytes, self.traffic.adds(visit)
            )
            if extra and isinstance(work, Kernel):
                work = _with_bytes(work, extra)
        return piece.pattern % step.label, work, step.phase, tuple(slots)

    def _connect(self, visit: Visit, held: list[int]) -> None:
        """Give a piece the tensor that the piece before it, on this way, has written."""
        p, mb = visit.piece, visit.microbatch
        if visit.forward and p > 0:
            held[self.number[p]["x"]] = self._bind(p - 1, mb, "y")
        elif not visit.forward and p < len(self.stage.pieces) - 1:
            held[self.number[p]["dy"]] = self.passed_back
        if not visit.forward and "dx" in self.number[p]:
            self.passed_back = self._bind(p, mb, "dx")
