"""A job: what is trained, on what, cut how. If it was constructed, it can be planned."""

from collections import Counter
from typing import Literal, get_args

import msgspec

from emulator.spec.checks import LARGEST_WHOLE, choice, flag, hint, listed, shown, whole
from emulator.spec.cluster import Cluster
from emulator.spec.errors import JobError, NotAvailableYetError
from emulator.spec.faults import Fault
from emulator.spec.model import Model
from emulator.spec.parallel import (
    SCHEDULES,
    Coordinates,
    DataParallel,
    FixedTimes,
    Layout,
    Pipeline,
    axis_index,
    coordinates,
    rank_of,
)

__all__ = [
    "PIPELINED",
    "SCHEDULES",
    "Coordinates",
    "DataParallel",
    "FixedTimes",
    "Job",
    "Layout",
    "Pipeline",
    "Precision",
    "axis_index",
    "coordinates",
    "rank_of",
    "reduce_precision",
    "resolved",
    "stage_layers",
]

Precision = Literal["fp32", "tf32", "fp16", "bf16", "fp8"]
Algorithm = Literal["auto", "ring", "tree", "hierarchical"]
Attention = Literal["flash2", "flash_triton"]

PIPELINED = ("naive", "gpipe")
"""Schedules that run with more than one stage; with one stage every schedule is plain accumulation."""

MOST_LAYER_PASSES = 1_000_000
"""Layers x microbatches x steps of a rank: at some 30 kernels a pass and 100 bytes a span, 3 GB of trace."""

_RECOMPUTE = ("none", "selective", "full")
_RECOMPUTE_TABLES = ("every", "checkpoints")
_LATER: dict[str, dict[str, tuple[str, ...]]] = {
    "failures": {"rates": ("llama3", "rsc1", "rsc2", "none")},
    "checkpoint": {"mode": ("blocking", "async", "in_memory")},
    "recovery": {"policy": ("restart", "shrink", "wait")},
}  # fmt: skip
"""Tables of the job file that nothing plays yet, with the words that each of their keys takes."""

Table = dict[str, object]


class Job(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One training job; raises JobError on construction when it cannot be planned."""

    model: Model
    cluster: Cluster
    gpus: int = 0
    """GPUs of the cluster that the job uses; 0 takes what the layout needs."""
    seq_len: int
    global_batch: int
    """Sequences a step."""
    micro_batch: int = 1
    """Sequences."""
    precision: Precision = "bf16"
    attention: Attention = "flash2"
    """Attention kernels: FlashAttention-2, or the first FlashAttention as written in Triton."""
    recompute: str | dict[str, int] = "none"
    """none, selective, full, {every = K} layers or {checkpoints = C} a stage."""
    steps: int = 1
    seed: int = 0
    layout: Layout = Layout()
    pipeline: Pipeline = Pipeline()
    data_parallel: DataParallel = DataParallel()
    fixed_times: FixedTimes | None = None
    contention: bool = True
    """False: all runs as fast as it would alone, whatever it shares (an idealisation, for closed forms)."""
    collective_algorithm: Algorithm = "auto"
    faults: tuple[Fault, ...] = ()
    failures: Table = {}
    checkpoint: Table = {}
    recovery: Table = {}

    def __post_init__(self) -> None:
        # What is wrong comes before what is not built: a user fixes the first once, and the second may come.
        self._check_numbers()
        self._check_layout()
        self._check_batch()
        self._check_size()
        self._check_hierarchy()
        self._check_recompute()
        self._refuse_what_is_not_built()

    @property
    def microbatches(self) -> int:
        """Microbatches a step and pipeline replica."""
        return self.global_batch // (self.micro_batch * self.layout.dp)

    def _check_numbers(self) -> None:
        whole("gpus", self.gpus, least=0)
        for name in ("seq_len", "global_batch", "micro_batch", "steps"):
            whole(name, getattr(self, name))
        whole("seed", self.seed, least=0)
        flag("contention", self.contention)
        choice("precision", self.precision, get_args(Precision))
        choice("attention", self.attention, get_args(Attention))
        choice("collective_algorithm", self.collective_algorithm, get_args(Algorithm))
        rows = self.model.learned_positions
        if rows and self.seq_len > rows:
            raise JobError(
                f"seq_len = {self.seq_len} is longer than the {rows} learned positions of {self.model.name}; "
                f"at most {rows} fit"
            )
        # Raises JobError, naming what the device has, where no unit of it computes in this precision.
        self.cluster.device.peak(self.precision)

    def _check_layout(self) -> None:
        layout, available = self.layout, self.cluster.gpus
        world = layout.world_size
        if world > available:
            nodes = -(-world // self.cluster.gpus_per_node)
            raise JobError(
                f"layout: {layout.product}, but the cluster has {available} GPUs; lower a degree, or take "
                f"{nodes} nodes instead of {self.cluster.nodes}"
            )
        if self.gpus and self.gpus != world:
            raise JobError(
                f"layout: {layout.product}, but gpus = {self.gpus}; {_right_gpus(layout, self.gpus)}"
            )
        for fault in self.faults:
            if fault.rank >= world:
                raise JobError(f"faults.rank = {fault.rank}: the job has ranks 0 to {world - 1}")
        layers = self.model.layers
        if layout.stages > layers:
            raise JobError(
                f"layout: pp({layout.pp}) x virtual_stages({layout.virtual_stages}) = {layout.stages} stages"
                f", but {self.model.name} has {layers} layers; a stage needs at least one layer"
            )
        total = sum(layout.stage_layers)
        if layout.stage_layers and total != layers:
            terms = " + ".join(str(each) for each in layout.stage_layers)
            raise JobError(
                f"layout.stage_layers: {terms} = {total}, but {self.model.name} has {layers} layers; "
                f"{abs(layers - total)} {'too few' if total < layers else 'too many'}"
            )

    def _check_hierarchy(self) -> None:
        """Refuse a hierarchical algorithm where a group has more ranks on one node than on another."""
        layout = self.layout
        for pp in range(layout.pp if self.collective_algorithm == "hierarchical" else 0):
            ranks = [rank_of(layout, pp=pp, dp=dp) for dp in range(layout.dp)]
            nodes = Counter(self.cluster.node_of(rank) for rank in ranks)
            most, least = max(nodes, key=nodes.__getitem__), min(nodes, key=nodes.__getitem__)
            if nodes[most] != nodes[least]:
                raise JobError(
                    'collective_algorithm = "hierarchical" needs as many ranks of a group on each of its '
                    f"nodes, but of the {layout.dp} dp ranks of stage {pp} node {most} has {nodes[most]} "
                    f'and node {least} has {nodes[least]}; use "auto", "ring" or "tree"'
                )

    def _check_batch(self) -> None:
        unit = self.micro_batch * self.layout.dp
        if self.global_batch % unit:
            below = self.global_batch // unit * unit
            near = [str(batch) for batch in (below, below + unit) if batch]
            raise JobError(
                f"global_batch = {self.global_batch} cannot be cut evenly: micro_batch({self.micro_batch}) x "
                f"dp({self.layout.dp}) = {unit} sequences each pass; nearest valid: {' or '.join(near)}"
            )

    def _check_size(self) -> None:
        """Refuse what could never be played, before anyone waits; what is left fits in 64-bit bytes."""
        layers = max(stage_layers(self))
        passes = layers * self.microbatches * self.steps
        if passes > MOST_LAYER_PASSES:
            raise JobError(
                f"layers({layers}) x microbatches({self.microbatches}) x steps({self.steps}) = {passes} "
                f"passes on a rank, but at most {MOST_LAYER_PASSES} can be played: "
                "lower global_batch or steps, or raise micro_batch"
            )
        model = self.model
        width = max(model.hidden, model.ffn_hidden, model.q_width, model.vocab)
        tensor = self.micro_batch * self.seq_len * width * 4
        if tensor > LARGEST_WHOLE:
            raise JobError(
                f"micro_batch({self.micro_batch}) x seq_len({self.seq_len}) x width({width}) x 4 = {tensor} "
                f"bytes in one tensor, but at most {LARGEST_WHOLE} (a PiB) can be planned"
            )
        weights = (model.layers * model.layer_matmul_parameters + 2 * model.vocab * model.hidden) * 4
        if weights > LARGEST_WHOLE:
            raise JobError(
                f"model: {model.name} has matrices of {weights} bytes in fp32, but at most {LARGEST_WHOLE} "
                "(a PiB) can be planned"
            )

    def _check_recompute(self) -> None:
        known = f"{listed((*_RECOMPUTE, '{every = K}', '{checkpoints = C}'))}"
        if isinstance(self.recompute, dict):
            if len(self.recompute) != 1 or next(iter(self.recompute)) not in _RECOMPUTE_TABLES:
                raise JobError(f"recompute = {shown(self.recompute)} must be {known}")
            for key, count in self.recompute.items():
                whole(f"recompute.{key}", count)
        elif self.recompute not in _RECOMPUTE:
            near = hint(str(self.recompute), _RECOMPUTE)
            raise JobError(f"recompute = {shown(self.recompute)} must be {known}{near}")
        if self.recompute != "none":
            raise NotAvailableYetError(f"recompute = {shown(self.recompute)}")

    def _refuse_what_is_not_built(self) -> None:
        layout = self.layout
        for axis, what in (("tp", "tensor"), ("cp", "context"), ("ep", "expert")):
            if getattr(layout, axis) > 1:
                raise NotAvailableYetError(f"layout.{axis} = {getattr(layout, axis)}: {what} parallelism")
        if layout.virtual_stages > 1:
            raise NotAvailableYetError(
                f"layout.virtual_stages = {layout.virtual_stages}: more than one stage a rank"
            )
        if layout.dp_replicate > 1 and self.data_parallel.sharding == "fsdp":
            raise NotAvailableYetError(
                f'layout.dp_replicate = {layout.dp_replicate} with data_parallel.sharding = "fsdp" (HSDP)'
            )
        schedule = self.pipeline.schedule
        if layout.pp > 1 and schedule not in PIPELINED:
            raise NotAvailableYetError(
                f"layout.pp = {layout.pp} with pipeline.schedule = {shown(schedule)} "
                f"(only {' and '.join(PIPELINED)} run so far)"
            )
        for name, words in _LATER.items():
            table: Table = getattr(self, name)
            for key, known in words.items():
                if isinstance(table.get(key), str):
                    choice(f"{name}.{key}", table[key], known)
            if table:
                raise NotAvailableYetError(f"[{name}]")
        for fault in self.faults:
            fault.refuse_what_is_not_built()


def stage_layers(job: Job) -> tuple[int, ...]:
    """Layers of each (virtual) stage: as given, else even where they divide, else balanced; they sum to all.

    Balanced counts the embedding and the head as one layer each, so that the first and the last stage carry
    fewer: 126 over 16 stages gives 7, fourteen times 8, 7, as Llama 3 405B was cut (arXiv 2407.21783).
    """
    layers, stages = job.model.layers, job.layout.stages
    if job.layout.stage_layers:
        return job.layout.stage_layers
    if layers % stages == 0:
        return (layers // stages,) * stages
    each, extra = divmod(layers + 2, stages)
    if each < 2:
        # An end would be left with the embedding or the head alone: one layer everywhere comes first.
        counts, extra = [1] * stages, layers - stages
    else:
        counts = [each - 1, *[each] * (stages - 2), each - 1]
    # Late stages hold the fewest microbatches in flight, so they take the extra layers; the ends come last.
    for stage in [*range(stages - 2, 0, -1), 0][:extra]:
        counts[stage] += 1
    return tuple(counts)


def reduce_precision(job: Job) -> str:
    """Precision in which gradients travel, `auto` resolved."""
    given = job.data_parallel.reduce_precision
    if given != "auto":
        return given
    # FSDP2's mixed-precision policy keeps the reduction in fp32; gradients are never stored in fp8 or tf32.
    if job.data_parallel.sharding == "fsdp" or job.precision in ("fp32", "tf32"):
        return "fp32"
    return "fp16" if job.precision == "fp16" else "bf16"


def resolved(job: Job) -> Table:
    """Write the job as builtins with every default filled in; it loads back as a job of the same meaning."""
    table: Table = msgspec.to_builtins(job)
    table["gpus"] = job.layout.world_size
    tables: dict[str, Table] = {
        "layout": {"stage_layers": list(stage_layers(job))},
        "data_parallel": {"reduce_precision": reduce_precision(job)},
        "cluster": {"nic_gbit_per_gpu": job.cluster.nic_bytes_per_second * 8 / 1e9},
    }
    for name, filled in tables.items():
        table[name] = {**msgspec.to_builtins(getattr(job, name)), **filled}
    return table


def _right_gpus(layout: Layout, gpus: int) -> str:
    rest = layout.world_size // layout.dp_shard
    shard = f", or dp_shard = {gpus // rest}" if gpus % rest == 0 else ""
    return f"set gpus = {layout.world_size}{shard}"
