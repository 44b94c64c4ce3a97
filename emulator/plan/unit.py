"""What a stage is made of: pieces that compute (embedding, layers, head) and units that own parameters.

Usually a unit is one piece: the embedding, each layer, and final norm with head (torchtitan's wrapping). With
tied embeddings and both ends on one stage, embedding and head are two pieces of one unit, since they share a
matrix; on different stages the last one has a copy of it. In a teaching world a stage is a single piece and a
single unit.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import cached_property

import msgspec

from emulator.plan.blocks import embedding_block, head_block, layer_block
from emulator.plan.kernels import Block, BlockOp
from emulator.plan.program import Fixed, Kernel, Phase
from emulator.spec.job import Job, stage_layers
from emulator.spec.model import Parameter, layer_prefix, tensors
from emulator.spec.units import BYTES_PER_ELEMENT, to_ps


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One op of a piece on one microbatch, before it has a place in a template."""

    label: str
    work: Kernel | Fixed
    phase: Phase
    touches: tuple[int, ...]
    """Indices of the flow's tensors that it reads or writes."""
    gradient_elements: int = 0
    """Elements of the parameters whose gradient it writes."""
    adds: bool = False
    """Whether an earlier step of the same backward has written this gradient already."""
    completes: tuple[int, ...] = ()
    """Indices in the unit's parameters of those whose gradient of this microbatch it completes."""


class Flow(msgspec.Struct, frozen=True):
    """Steps of a piece and the tensors that pass between them; layers of one stage share one flow."""

    forward: tuple[Step, ...]
    backward: tuple[Step, ...]
    tensors: tuple[tuple[str, int], ...]
    """Name and bytes. `x` comes from the piece before, `y` goes to the one after; `dy` and `dx` go back."""


class Piece(msgspec.Struct, frozen=True):
    """One thing that computes: the embedding, a layer, the head; the whole stage in a teaching world."""

    name: str
    layer: int
    """Counted from the stage's first one; -1: none."""
    unit: int
    """Index of the unit that owns its parameters."""
    flow: Flow
    pattern: str
    """What its ops are called, their label in the place of %s: l3.gate.F.mb0, or 2F0 in a teaching world."""


class Unit(msgspec.Struct, frozen=True, dict=True):
    """Parameters that are unsharded, reduced and updated together."""

    name: str
    layer: int
    """Counted from the stage's first one; -1: none."""
    parameters: tuple[Parameter, ...]

    @cached_property
    def elements(self) -> int:
        """Number of parameters."""
        return sum(parameter.count for parameter in self.parameters)


class Stage(msgspec.Struct, frozen=True, kw_only=True):
    """All that one pipeline stage computes with.

    Names have places {stage} and {layer}, so that stages alike share their pieces and units (as objects).
    """

    index: int
    first_layer: int
    last: bool
    pieces: tuple[Piece, ...]
    units: tuple[Unit, ...]

    @property
    def elements(self) -> int:
        """Parameters of the stage."""
        return sum(unit.elements for unit in self.units)


def stored_bytes(precision: str) -> int:
    """Bytes of a stored element of weights, gradients and activations.

    fp8 is what matrix products read; what is kept and sent stays in 16 bits (`plan.kernels.Sketch`).
    """
    return max(BYTES_PER_ELEMENT[precision], 2)


def boundary_bytes(job: Job) -> int:
    """Bytes that a microbatch sends across a stage boundary, either way: b s h elements."""
    return job.micro_batch * job.seq_len * job.model.hidden * stored_bytes(job.precision)


def shared_parameter(job: Job) -> Parameter:
    """Return the token embedding, which a tied head multiplies with too."""
    return tensors(job.model)[0]


def stages(job: Job) -> tuple[Stage, ...]:
    """Cut the model into the pipeline's stages."""
    owned: dict[int, list[Parameter]] = defaultdict(list)
    for parameter in tensors(job.model):
        owned[parameter.layer].append(parameter)
    out: list[Stage] = []
    known: dict[object, Stage] = {}
    first = 0
    counts = stage_layers(job)
    for index, count in enumerate(counts):
        last = index == len(counts) - 1
        layers = range(first, first + count)
        kind = (index == 0, last, tuple(p.shape for layer in layers for p in owned[layer]))
        if kind not in known:
            stage = _stage(job, index, last, layers, owned)
            known[kind] = _fixed(job, stage) if job.fixed_times else stage
        out.append(msgspec.structs.replace(known[kind], index=index, first_layer=first))
        first += count
    return tuple(out)


def _stage(job: Job, index: int, last: bool, inner: range, owned: dict[int, list[Parameter]]) -> Stage:
    model = job.model
    layers = [*([-1] if index == 0 else []), *inner, *([model.layers] if last else [])]
    shape = (model, job.micro_batch, job.seq_len, job.precision)
    names = {-1: "embedding", model.layers: "head"}

    def place(layer: int) -> int:
        return layer if layer < 0 else layer - inner.start

    shared = shared_parameter(job) if model.tied_embeddings else None
    units: list[tuple[str, int, list[Parameter]]] = []
    unit_of: dict[int, int] = {}
    for layer in layers:
        name = names.get(layer, "l{layer}")
        if layer == model.layers and shared and index == 0:
            units[0] = ("embedding+head", -1, units[0][2] + owned[layer])
            unit_of[layer] = 0
            continue
        unit_of[layer] = len(units)
        copy = [shared] if layer == model.layers and shared else []
        units.append((name, place(layer), owned[layer] + copy))
    layer_flow: Flow | None = None
    pieces = []
    for layer in layers:
        parameters = units[unit_of[layer]][2]
        if layer in names:
            block = (embedding_block if layer == -1 else head_block)(*shape)
            # Backward comes to the head first: where both ends are here, the embedding adds to its gradient.
            flow = _flow(block, "", parameters, shared, first_writer=layer != -1, alone=index > 0 or not last)
        else:
            layer_flow = layer_flow or _flow(layer_block(*shape), layer_prefix(layer), parameters, None)
            flow = layer_flow
        name = names.get(layer, "l{layer}")
        pieces.append(Piece(name, place(layer), unit_of[layer], flow, name + ".%s.mb{mb}"))
    return Stage(
        index=index,
        first_layer=inner.start,
        last=last,
        pieces=tuple(pieces),
        units=tuple(Unit(name, at, tuple(parameters)) for name, at, parameters in units),
    )


def _flow(
    block: Block,
    prefix: str,
    parameters: Sequence[Parameter],
    shared: Parameter | None,
    *,
    first_writer: bool = True,
    alone: bool = True,
) -> Flow:
    """Write a block as steps over numbered tensors and parameters.

    `shared` is the tied matrix, if the block multiplies with it; `alone` says that no other piece of the
    stage does, `first_writer` that backward comes to this piece before the other one.
    """
    tensor = {name: i for i, name in enumerate(block.tensors)}
    at = {p.name.removeprefix(prefix): i for i, p in enumerate(parameters)}

    def step(op: BlockOp) -> Step:
        written = [at[name] for name in op.gradients]
        completes = tuple(written)
        if shared and op.phase == "W" and not op.writes and not op.gradients:
            # The tied head's product: its gradient is complete here only if the embedding is elsewhere.
            written = [at[shared.name]]
            completes = tuple(written) if alone else ()
        adds = not first_writer and not alone and any(parameters[i] == shared for i in written)
        label = op.name.removesuffix("_I").removesuffix("_W").removesuffix("_backward")
        return Step(
            label=f"{label}.{op.phase}",
            work=op.kernel,
            phase=op.phase,
            touches=tuple(dict.fromkeys(tensor[name] for name in (*op.reads, *op.writes))),
            gradient_elements=sum(parameters[i].count for i in written),
            adds=adds,
            completes=completes,
        )

    forward, backward = (tuple(step(op) for op in ops) for ops in (block.forward, block.backward))
    return Flow(forward, backward, tuple(block.tensors.items()))


def _fixed(job: Job, stage: Stage) -> Stage:
    """Merge a stage into one piece and one unit whose passes take fixed times; its memory stays real."""
    times = job.fixed_times
    assert times is not None
    held, forward_peak, backward_peak = _live(stage)
    sizes = {"held": held, "forward": forward_peak - held, "backward": backward_peak - held}
    if stage.index > 0:
        sizes |= {"x": boundary_bytes(job), "dx": boundary_bytes(job)}
    if not stage.last:
        sizes |= {"y": boundary_bytes(job), "dy": boundary_bytes(job)}
    number = {name: i for i, name in enumerate(sizes)}

    def step(phase: Phase, seconds: float, touches: Iterable[str], final: bool = False) -> Step:
        return Step(
            label=phase,
            work=Fixed(to_ps(seconds)),
            phase=phase,
            touches=tuple(number[name] for name in touches if name in number),
            gradient_elements=unit.elements if phase in ("B", "W") else 0,
            completes=tuple(range(len(unit.parameters))) if final else (),
        )

    unit = Unit("stage{stage}", -1, tuple(p for u in stage.units for p in u.parameters))
    forward = step("F", times.forward, ("x", "held", "forward", "y"))
    back = ("x", "held", "backward", "dy", "dx")
    if times.backward is not None:
        backward = [step("B", times.backward, back, final=True)]
    else:
        assert times.input_gradient is not None
        assert times.weight_gradient is not None
        backward = [
            step("I", times.input_gradient, back),
            step("W", times.weight_gradient, ("x", "held"), final=True),
        ]
    flow = Flow((forward,), tuple(backward), tuple(sizes.items()))
    piece = Piece(unit.name, -1, 0, flow, "{stage}%s{mb}")
    return msgspec.structs.replace(stage, pieces=(piece,), units=(unit,))


def _live(stage: Stage) -> tuple[int, int, int]:
    """Bytes that a microbatch holds between forward and backward, and the peaks of both.

    Played kernel by kernel; what crosses the stage's own boundary is not counted.
    """
    marks: list[list[tuple[int, int]]] = []
    size: dict[tuple[int, int], int] = {}
    inner = len(stage.pieces) - 1
    for p, piece in enumerate(stage.pieces):
        for i, (name, count) in enumerate(piece.flow.tensors):
            outside = (p == 0 and name in ("x", "dx")) or (p == inner and name in ("y", "dy"))
            size[p, i] = 0 if outside else count
    alias = _aliases(stage)
    for p, piece in enumerate(stage.pieces):
        marks += [[alias.get((p, t), (p, t)) for t in step.touches] for step in piece.flow.forward]
    turn = len(marks)
    for p in range(inner, -1, -1):
        flow = stage.pieces[p].flow
        marks += [[alias.get((p, t), (p, t)) for t in step.touches] for step in flow.backward]
    last = {key: i for i, touched in enumerate(marks) for key in touched}
    live, alive, peaks, held = 0, set[tuple[int, int]](), [0, 0], 0
    for i, touched in enumerate(marks):
        if i == turn:
            held = live
        for key in touched:
            if key not in alive:
                alive.add(key)
                live += size[key]
        peaks[i >= turn] = max(peaks[i >= turn], live)
        live -= sum(size[key] for key in dict.fromkeys(touched) if last[key] == i)
    return held, max(peaks[0], held), max(peaks[1], held)


def _aliases(stage: Stage) -> dict[tuple[int, int], tuple[int, int]]:
    """Where two pieces name one tensor: the later one's x is the earlier one's y, its dx the other's dy."""
    out: dict[tuple[int, int], tuple[int, int]] = {}
    index = [{name: i for i, (name, _) in enumerate(piece.flow.tensors)} for piece in stage.pieces]
    for p in range(1, len(stage.pieces)):
        out[p, index[p]["x"]] = (p - 1, index[p - 1]["y"])
        out[p - 1, index[p - 1]["dy"]] = (p, index[p]["dx"])
    return out
