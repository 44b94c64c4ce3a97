"""Gradients and weights between the data-parallel ranks: what is sent when, and what memory it takes.

`Replicated` here is none and ddp, and any job with one data-parallel rank; `fsdp.Sharded` is fsdp. Both are
told by `stage.write` as it writes the compute ops: `enter` a visit (one piece of the stage on one microbatch,
one way), `completed` where gradients are, if it `listens` to the visit, `leave` the visit, `finish` after the
last.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from emulator.plan.blocks import optimizer_kernel
from emulator.plan.memory import state_bytes
from emulator.plan.program import COMPUTE, Collective, Kernel
from emulator.plan.template import TemplateDraft
from emulator.plan.unit import Stage, Step, Unit, shared_parameter, stored_bytes
from emulator.spec.job import Job, reduce_precision
from emulator.spec.units import BYTES_PER_ELEMENT

OPTIMIZER = "optimizer"
TIED = "tied"


class Visit(NamedTuple):
    """One piece of the stage computes on one microbatch, forward or backward."""

    piece: int
    unit: int
    forward: bool
    microbatch: int
    first: bool
    """No earlier piece of the same pass belongs to the unit."""
    final: bool
    """No later piece of the same pass belongs to the unit."""


class Plan(NamedTuple):
    """What both kinds of data parallelism need to know of the template that is being written."""

    job: Job
    stage: Stage
    draft: TemplateDraft
    visits: Sequence[Visit]
    first_microbatch: int
    """The microbatch whose backward comes first."""
    last_microbatch: int
    """The microbatch whose backward comes last."""

    @property
    def kernels(self) -> bool:
        """Whether kernels cost something: not in a teaching world."""
        return self.job.fixed_times is None


class Entry(NamedTuple):
    """What a visit must wait for, and the buffer of the unsharded parameters that its ops use; -1: none."""

    waits: tuple[int, ...] = ()
    unsharded: int = -1


def buckets(sizes: Sequence[int], first: int, cap: int) -> list[list[int]]:
    """Cut gradients, in the order in which they become ready, into DDP's buckets.

    As torch's reducer.cpp does (compute_bucket_assignment_by_size). `sizes` in bytes; returns
    lists of indices. A bucket closes when its bytes reach the cap, `first` for the first bucket and `cap` for
    the others; a gradient is never split.
    """
    out: list[list[int]] = []
    current: list[int] = []
    filled = 0
    for index, size in enumerate(sizes):
        current.append(index)
        filled += size
        if filled >= (cap if out else first):
            out.append(current)
            current, filled = [], 0
    return [*out, current] if current else out


def gradient_bytes(plan: Plan, step: Step, running: int, later: bool) -> int:
    """HBM bytes that a step moves beyond its kernel's own, which write a fresh gradient once.

    `running` is the bytes of an element of the buffer that it writes to; adding to what is there reads it too
    (a matrix product with beta = 1).
    """
    fresh = stored_bytes(plan.job.precision)
    return step.gradient_elements * (running * (2 if later or step.adds else 1) - fresh)


def copy_kernel(elements: int, read: int, written: int, adds: bool = False) -> Kernel:
    """Move `elements` of `read` bytes to `written` bytes each; `adds` reads the destination too."""
    return Kernel(
        kind="elementwise" if adds else "copy",
        flops=elements if adds else 0,
        precision="fp32",
        hbm_bytes=elements * (read + written * (2 if adds else 1)),
    )


def share_tied(plan: Plan, elements: int, waits: Iterable[int], touches: Sequence[int] = ()) -> int:
    """Sum the gradient of a tied matrix over the first and the last stage, which hold a copy each."""
    size = elements * BYTES_PER_ELEMENT[reduce_precision(plan.job)]
    work = Collective(kind="all_reduce", group=TIED, axis="pp", bytes=size)
    return plan.draft.op("tied.all_reduce", "pp.tied", work, waits=waits, touches=touches)


def holds_tied(plan: Plan, unit: Unit) -> bool:
    """Whether the unit has one of two copies of a tied matrix whose gradients must meet.

    In a teaching world nothing but the stages' passes and their data parallelism takes time.
    """
    apart = plan.job.model.tied_embeddings and plan.job.layout.pp > 1 and plan.kernels
    return apart and shared_parameter(plan.job) in unit.parameters


def update(plan: Plan, unit: int, elements: int, waits: Iterable[int], touches: Sequence[int]) -> None:
    """Issue the optimizer's pass over `elements` parameters of a unit."""
    bytes_each = state_bytes(plan.job)
    in_backward = plan.job.data_parallel.optimizer_in_backward
    if not plan.kernels and not in_backward:
        return
    kernel = optimizer_kernel(
        elements, bytes_each.weights, gradient_bytes=bytes_each.gradients, master_bytes=bytes_each.master
    )
    owner = plan.stage.units[unit]
    plan.draft.op(
        f"{owner.name}.optimizer",
        OPTIMIZER if in_backward else COMPUTE,
        kernel if plan.kernels else None,
        waits=waits,
        touches=touches,
        phase="O",
        layer=owner.layer,
    )


class Replicated:
    """Every rank holds all state; gradients meet in all_reduces (none: one; ddp: buckets).

    A bucket's all_reduce is issued right after the op that completes its last gradient, in the backward of
    the last microbatch, and overlaps with the rest. Gradients are views into the buckets (DDP's
    gradient_as_bucket_view, Megatron's contiguous buffer), so buckets take no memory of their own unless
    gradients travel in another precision than they are kept in. Buckets follow the order in which gradients
    become ready, as DDP rebuilds them after its first step. In a teaching world the stage is one
    bucket.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.stored = stored_bytes(plan.job.precision)
        options, draft, units = plan.job.data_parallel, plan.draft, plan.stage.units
        each, elements = state_bytes(plan.job), plan.stage.elements
        draft.buffer("weights", "weights", each.weights * elements, persistent=True)
        draft.buffer("optimizer", "optimizer", each.optimizer * elements, persistent=True)
        self.in_backward = options.optimizer_in_backward
        if self.in_backward:
            self.gradients = [
                draft.buffer(
                    f"{unit.name}.gradients", "gradients", each.gradients * unit.elements, layer=unit.layer
                )
                for unit in units
            ]
        else:
            whole = draft.buffer("gradients", "gradients", each.gradients * elements, persistent=True)
            self.gradients = [whole] * len(units)
        self.contents = self._contents() if plan.job.layout.dp > 1 else []
        self.bucket_of = {at: b for b, content in enumerate(self.contents) for at in content}
        self.missing = [len(content) for content in self.contents]
        # What the update of each unit waits for: its buckets' all_reduces, and (-1) the end of its backward,
        # which still reads the weights.
        self.awaited = [
            {-1, *(self.bucket_of.get((u, p), -1) for p in range(len(unit.parameters)))}
            for u, unit in enumerate(units)
        ]
        self.ends: list[list[int]] = [[] for _ in units]
        self.reduced: list[int] = []

    def _contents(self) -> list[list[tuple[int, int]]]:
        """(unit, parameter) of each bucket."""
        options, units = self.plan.job.data_parallel, self.plan.stage.units
        ready = [
            (piece.unit, parameter)
            for piece in reversed(self.plan.stage.pieces)
            for step in piece.flow.backward
            for parameter in step.completes
        ]
        if options.sharding != "ddp" or not self.plan.kernels:
            return [ready]
        sizes = [units[u].parameters[p].count * self.stored for u, p in ready]
        cut = buckets(sizes, options.first_bucket_bytes, options.bucket_bytes)
        return [[ready[i] for i in bucket] for bucket in cut]

    def enter(self, index: int) -> Entry:
        """Begin a visit: weights are always there."""
        del index
        return Entry()

    @property
    def gradient_element_bytes(self) -> int:
        """Bytes of an element of the buffer that gradients are written to."""
        return self.stored

    def gradient(self, visit: Visit) -> int:
        """Buffer that a backward writes its gradients to."""
        return self.gradients[visit.unit]

    def adds(self, visit: Visit) -> bool:
        """Whether a backward adds to the gradients of an earlier microbatch."""
        return not visit.forward and visit.microbatch != self.plan.first_microbatch

    def listens(self, visit: Visit) -> bool:
        """Whether to tell of each gradient that is complete: in the last backward, where they are sent."""
        last = not visit.forward and visit.microbatch == self.plan.last_microbatch
        return last and bool(self.contents)

    def completed(self, visit: Visit, parameters: Iterable[int], op: int) -> None:
        """Send the buckets that this op of the last backward completes; none waits for all of backward."""
        completed = [self.bucket_of[visit.unit, parameter] for parameter in parameters]
        for bucket in completed:
            self.missing[bucket] -= 1
        if self.plan.job.data_parallel.sharding != "none":
            for bucket in dict.fromkeys(completed):
                if not self.missing[bucket]:
                    self._reduce(bucket, op)

    def _reduce(self, bucket: int, after: int) -> None:
        draft, units, content = self.plan.draft, self.plan.stage.units, self.contents[bucket]
        elements = sum(units[u].parameters[p].count for u, p in content)
        size = elements * BYTES_PER_ELEMENT[reduce_precision(self.plan.job)]
        inside = dict.fromkeys(u for u, _ in content)
        touches = [self.gradients[u] for u in inside]
        if size != elements * self.stored:
            touches.append(draft.buffer(f"bucket{bucket}", "buffers", size))
        name = f"bucket{bucket}" if len(self.contents) > 1 else "gradients"
        work = Collective(kind="all_reduce", group="dp", axis="dp", bytes=size)
        op = draft.op(f"{name}.all_reduce", "dp", work, waits=(after,), touches=touches)
        self.reduced.append(op)
        for unit in inside:
            self._settle(unit, bucket, op)

    def leave(self, index: int, op: int) -> None:
        """End a visit: nothing is resharded."""
        visit = self.plan.visits[index]
        if visit.final and not visit.forward and visit.microbatch == self.plan.last_microbatch:
            self._settle(visit.unit, -1, op)

    def _settle(self, unit: int, what: int, op: int) -> None:
        """Note that what a unit's update waits for is issued; update it inside backward if that was all."""
        self.awaited[unit].discard(what)
        self.ends[unit].append(op)
        if not self.awaited[unit] and self.in_backward:
            self._update(unit, self.ends[unit])

    def _update(self, unit: int, waits: Sequence[int]) -> None:
        owner, gradients = self.plan.stage.units[unit], (self.gradients[unit],)
        if holds_tied(self.plan, owner):
            waits = (*waits, share_tied(self.plan, shared_parameter(self.plan.job).count, waits, gradients))
        update(self.plan, unit, owner.elements, waits, gradients)

    def finish(self, last: int) -> None:
        """Reduce after all of backward (none); update all units, unless each was inside backward."""
        if self.contents and self.plan.job.data_parallel.sharding == "none":
            self._reduce(0, last)
        if not self.in_backward:
            for unit in range(len(self.plan.stage.units)):
                self._update(unit, self.reduced[-1:] or (last,))
