"""Fully sharded data parallelism: weights are unsharded for use, gradients go back to where the state lives.

Two forms. "tensor": every tensor is cut over all ranks, as FSDP2 does; all_gather before use, reduce_scatter
after backward. "layer", the course notes' form: unit u is owned by rank u mod dp, which broadcasts it before
use and to which its gradients are reduced; only the owner has state and updates it.

What follows FSDP2 (torch 2.14, torch.distributed.fsdp.fully_shard):

* An all_gather may begin when the visit 1 + prefetch before its own has ended: with the limit of two, one
  unit computes and one is on its way. In backward that is the unshard of l-1 beside the compute of l.
* With backward_prefetch = "post" a gather of backward is issued after the reduction of the visit before, and
  follows it: one process group runs its collectives in order (FSDP's BACKWARD_POST, torch 1.12 and later).
* The gather's input is copied into place (and cast) on a stream of its own, its output is copied out to the
  tensors on the compute stream. The reduction's input is copied in on the compute stream, which first waits
  for the reduction before, so that at most two inputs live at once.
* Gradients of every microbatch are reduced and added to the shard; with pp > 1 they stay unsharded, in the
  precision of the reduction, until the last backward, as torch.distributed.pipelining sets it.
* A unit reshards after forward and after backward. reshard_after_forward = false keeps it from forward to
  backward and, with pp > 1, for the whole step; keep_last_layer keeps the unit with which backward begins.

Sizes are elements times bytes: no padding where the degree does not divide a tensor's rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from emulator.plan.data_parallel import (
    Entry,
    Plan,
    Visit,
    copy_kernel,
    holds_tied,
    share_tied,
    update,
)
from emulator.plan.memory import FULL, state_bytes
from emulator.plan.program import COMPUTE, Collective
from emulator.plan.unit import shared_parameter, stored_bytes
from emulator.spec.job import reduce_precision
from emulator.spec.units import BYTES_PER_ELEMENT

UNSHARD, REDUCE, COPY_IN = "dp.unshard", "dp.reduce", "dp.copy_in"


def owner_of(plan: Plan, unit: int) -> int:
    """Data-parallel rank that owns a unit in the layer form; both copies of a tied matrix have the same."""
    return 0 if holds_tied(plan, plan.stage.units[unit]) else unit % plan.job.layout.dp


class Sharded:
    """FSDP on one rank; `owner` is its data-parallel rank in the layer form, None in the tensor form."""

    def __init__(self, plan: Plan, owner: int | None) -> None:
        self.plan, self.owner = plan, owner
        job, units = plan.job, plan.stage.units
        self.options = job.data_parallel
        self.dp = job.layout.dp
        self.stored = stored_bytes(job.precision)
        self.travel = BYTES_PER_ELEMENT[reduce_precision(job)]
        self.each_microbatch = job.layout.pp == 1
        self.depth = (
            min(self.options.prefetch, 1) if self.options.limit_all_gathers else self.options.prefetch
        )
        self.after_reduction = self.options.backward_prefetch == "post"
        self.held = [self._held(u) for u in range(len(units))]
        self._state()
        self.gathers, self.releases = self._residency()
        self.pending: dict[int, tuple[int, int]] = {}  # visit -> (gather op, buffer of its output)
        self.issued = 0
        self.ended: list[int] = []
        self.unsharded: dict[int, int] = {}
        self.running: dict[int, int] = {}
        self.sent: list[int] = []
        self.last_reduce = -1

    def _held(self, unit: int) -> int:
        """Parameters of a unit whose state is on this rank."""
        elements = self.plan.stage.units[unit].elements
        if self.owner is None:
            return -(-elements // self.dp)
        return elements if owner_of(self.plan, unit) == self.owner else 0

    def _state(self) -> None:
        each, held = state_bytes(self.plan.job), sum(self.held)
        draft, units = self.plan.draft, self.plan.stage.units
        draft.buffer("weights", "weights", each.weights * held, persistent=True)
        draft.buffer("optimizer", "optimizer", each.optimizer * held, persistent=True)
        if self.options.optimizer_in_backward:
            self.gradients = [
                draft.buffer(f"{unit.name}.gradients", "gradients", each.gradients * mine, layer=unit.layer)
                for unit, mine in zip(units, self.held, strict=True)
            ]
        else:
            whole = draft.buffer("gradients", "gradients", each.gradients * held, persistent=True)
            self.gradients = [whole] * len(units)

    def _residency(self) -> tuple[list[bool], list[bool]]:
        """For each visit, whether it must gather its unit first, and whether it reshards it at its end."""
        visits = self.plan.visits
        last_use = {visit.unit: index for index, visit in enumerate(visits)}
        last_unit = visits[-1 + len(self.plan.stage.pieces)].unit
        gathers, releases = [], []
        resident: set[int] = set()
        for index, visit in enumerate(visits):
            gathers.append(visit.unit not in resident)
            resident.add(visit.unit)
            reshard = self.options.reshard_after_forward
            if visit.forward:
                reshard = reshard and not (self.options.keep_last_layer and visit.unit == last_unit)
            else:
                reshard = reshard or self.each_microbatch or last_use[visit.unit] == index
            releases.append(visit.final and reshard)
            if releases[-1]:
                resident.discard(visit.unit)
        return gathers, releases

    def enter(self, index: int) -> Entry:
        """Issue the gathers up to the prefetch depth ahead; copy this visit's out."""
        while self.issued < len(self.gathers) and self.issued <= index + self._ahead(self.issued):
            if self.gathers[self.issued]:
                if self._still_used(self.issued):
                    break
                self._unshard(self.issued)
            self.issued += 1
        visit = self.plan.visits[index]
        waits: tuple[int, ...] = ()
        if index in self.pending:
            gather, output = self.pending.pop(index)
            waits = (gather,)
            if self._copies_out:
                waits = (self._copy_out(visit, gather, output),)
            else:
                self.unsharded[visit.unit] = output
        return Entry(waits, self.unsharded[visit.unit])

    def _ahead(self, index: int) -> int:
        """Visits by which the gather for this one is issued early."""
        return self.depth if self.plan.visits[index].forward or not self.after_reduction else 0

    def _still_used(self, ahead: int) -> bool:
        """Whether an earlier visit, not yet written, has yet to reshard the unit that this one gathers."""
        unit = self.plan.visits[ahead].unit
        return any(self.plan.visits[i].unit == unit for i in range(len(self.ended), ahead))

    @property
    def _copies_out(self) -> bool:
        return self.owner is None and self.plan.kernels

    def _unshard(self, index: int) -> None:
        visit, draft = self.plan.visits[index], self.plan.draft
        unit = self.plan.stage.units[visit.unit]
        suffix = "F.mb{mb}" if visit.forward else "B.mb{mb}"
        size = unit.elements * self.stored
        # The owner of a whole FP32 layer computes with the state itself.
        in_place = self.owner is not None and self.held[visit.unit] and self.stored == FULL
        what = "gathered" if self._copies_out else "unsharded"
        output = -1 if in_place else self._buffer(visit, f"{what}.{suffix}", size)
        touches = (output,) if output >= 0 else ()
        before = max(index - 1 - self._ahead(index), self._last_use(index))
        waits = (self.ended[before],) if before >= 0 else ()
        if self.after_reduction and not visit.forward:
            waits = (*waits, *self.sent[-1:])
        if self.plan.kernels and self.held[visit.unit] and not in_place:
            copy = copy_kernel(self.held[visit.unit], FULL, self.stored)
            copied = draft.op(
                f"{unit.name}.unshard_copy_in.{suffix}", COPY_IN, copy, waits=waits,
                touches=touches, microbatch=visit.microbatch, layer=unit.layer,
            )  # fmt: skip
            waits = (copied,)
        work = (
            Collective(kind="all_gather", group="dp", axis="dp", bytes=size)
            if self.owner is None
            else Collective(
                kind="broadcast", group="dp", axis="dp", bytes=size, root=owner_of(self.plan, visit.unit)
            )
        )
        gather = draft.op(
            f"{unit.name}.unshard.{suffix}", UNSHARD, work, waits=waits, touches=touches,
            microbatch=visit.microbatch, layer=unit.layer,
        )  # fmt: skip
        self.pending[index] = gather, output

    def _last_use(self, index: int) -> int:
        """The visit before this one that used its unit; -1 if none did."""
        unit = self.plan.visits[index].unit
        return next((i for i in range(index - 1, -1, -1) if self.plan.visits[i].unit == unit), -1)

    def _copy_out(self, visit: Visit, gather: int, output: int) -> int:
        draft, unit = self.plan.draft, self.plan.stage.units[visit.unit]
        suffix = "F.mb{mb}" if visit.forward else "B.mb{mb}"
        self.unsharded[visit.unit] = self._buffer(visit, f"unsharded.{suffix}", unit.elements * self.stored)
        return draft.op(
            f"{unit.name}.unshard_copy_out.{suffix}",
            COMPUTE,
            copy_kernel(unit.elements, self.stored, self.stored),
            waits=(gather,),
            touches=(output, self.unsharded[visit.unit]),
            phase="F" if visit.forward else "B",
            microbatch=visit.microbatch,
            layer=unit.layer,
        )

    def _buffer(self, visit: Visit, what: str, size: int) -> int:
        unit = self.plan.stage.units[visit.unit]
        return self.plan.draft.buffer(
            f"{unit.name}.{what}", "buffers", size, microbatch=visit.microbatch, layer=unit.layer
        )

    @property
    def gradient_element_bytes(self) -> int:
        """Bytes of an element of a unit's unsharded gradients, a sum where microbatches meet in them."""
        sums = not self.each_microbatch and self.plan.first_microbatch != self.plan.last_microbatch
        return self.travel if sums else self.stored

    def gradient(self, visit: Visit) -> int:
        """Buffer that a backward writes its unsharded gradients to."""
        if visit.unit not in self.running:
            size = self.gradient_element_bytes * self.plan.stage.units[visit.unit].elements
            name = "unsharded_gradients.mb{mb}" if self.each_microbatch else "unsharded_gradients"
            self.running[visit.unit] = self._buffer(visit, name, size)
        return self.running[visit.unit]

    def adds(self, visit: Visit) -> bool:
        """Whether a backward adds to the unsharded gradients of an earlier microbatch."""
        later = visit.microbatch != self.plan.first_microbatch
        return not visit.forward and not self.each_microbatch and later

    def listens(self, visit: Visit) -> bool:
        """Nothing is sent before a unit's backward has ended."""
        del visit
        return False

    def completed(self, visit: Visit, parameters: Iterable[int], op: int) -> None:
        """Never told of single gradients."""
        raise AssertionError(f"{self} does not listen to {visit}: {parameters}, {op}")

    def leave(self, index: int, op: int) -> None:
        """End a visit: the unit is resharded if it is to be, and its gradients are reduced."""
        self.ended.append(op)
        visit = self.plan.visits[index]
        if self.releases[index]:
            del self.unsharded[visit.unit]
        last = visit.microbatch == self.plan.last_microbatch
        if visit.forward or not visit.final or not (self.each_microbatch or last):
            return
        done = self._reduce(visit, op)
        if last and self.options.optimizer_in_backward:
            self._update(visit.unit, (done,))

    def _reduce(self, visit: Visit, after: int) -> int:
        """Issue the reduction of a unit's gradients and, where state is kept, their addition to it."""
        draft, unit, mine = self.plan.draft, self.plan.stage.units[visit.unit], self.held[visit.unit]
        source = self.running.pop(visit.unit)
        size = unit.elements * self.travel
        waits: Sequence[int] = (after,)
        if self.plan.kernels and (self.owner is None or self.travel != self.stored):
            target = self._buffer(visit, "reduce_input.mb{mb}", size)
            copy = copy_kernel(unit.elements, self.gradient_element_bytes, self.travel)
            copied = draft.op(
                unit.name + ".reduce_copy_in.mb{mb}", COMPUTE, copy, waits=self.sent[-1:], phase="B",
                touches=(source, target), microbatch=visit.microbatch, layer=unit.layer,
            )  # fmt: skip
            source, waits = target, (copied,)
        touches = [source]
        if self.options.optimizer_in_backward:
            touches.append(self.gradients[visit.unit])
        adds = visit.microbatch != self.plan.first_microbatch and self.each_microbatch
        lands = self.plan.kernels and mine and (adds or self.owner is not None)
        if lands and self.owner is None:
            # Where there is a sum already, the shard arrives beside it and is added.
            source = self._buffer(visit, "reduce_output.mb{mb}", mine * self.travel)
            touches.append(source)
        work = (
            Collective(kind="reduce_scatter", group="dp", axis="dp", bytes=size)
            if self.owner is None
            else Collective(
                kind="reduce", group="dp", axis="dp", bytes=size, root=owner_of(self.plan, visit.unit)
            )
        )
        done = draft.op(
            unit.name + ".reduce.mb{mb}", REDUCE, work, waits=waits, touches=touches,
            microbatch=visit.microbatch, layer=unit.layer,
        )  # fmt: skip
        self.sent.append(done)
        if lands:
            done = draft.op(
                unit.name + ".accumulate.mb{mb}", REDUCE, copy_kernel(mine, self.travel, FULL, adds=adds),
                touches=(source, self.gradients[visit.unit]), microbatch=visit.microbatch, layer=unit.layer,
            )  # fmt: skip
        self.last_reduce = done
        return done

    def _update(self, unit: int, waits: Sequence[int]) -> None:
        mine, owner = self.held[unit], self.plan.stage.units[unit]
        if not mine:
            return
        gradients = (self.gradients[unit],)
        if holds_tied(self.plan, owner):
            shared = shared_parameter(self.plan.job).count
            part = -(-shared // self.dp) if self.owner is None else shared
            waits = (*waits, share_tied(self.plan, part, waits, gradients))
        update(self.plan, unit, mine, waits, gradients)

    def finish(self, last: int) -> None:
        """Update all units when the last gradient has arrived, unless each was updated inside backward."""
        if not self.options.optimizer_in_backward:
            for unit in range(len(self.plan.stage.units)):
                self._update(unit, (last, self.last_reduce))
