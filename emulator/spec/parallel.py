"""How a job is cut: degrees of the axes, pipeline order, data parallelism; and a teaching world's times."""

from typing import Literal, NamedTuple, get_args

import msgspec
import numpy as np
import numpy.typing as npt

from emulator.spec.checks import choice, finite, flag, shown, whole
from emulator.spec.errors import JobError, NotAvailableYetError

Sharding = Literal["none", "ddp", "zero1", "zero2", "fsdp"]
Context = Literal["ring", "ulysses", "all_gather"]

SCHEDULES = {
    "naive": "one microbatch in flight",
    "gpipe": "all forwards, then all backwards",
    "1f1b": "one forward, one backward",
    "interleaved_1f1b": "1F1B over several virtual stages a rank",
    "looped_bfs": "breadth first over several virtual stages a rank",
    "zb_h1": "zero bubble, the memory of 1F1B",
    "zb_h2": "zero bubble, twice the memory",
    "zbv": "zero bubble, stages placed in a V",
    "dualpipev": "DualPipe, stages placed in a V",
}
"""Names of the pipeline schedules, with what each does."""

_AXES = ("tp", "cp", "pp", "dp")


class Layout(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Degrees of the parallel axes; their product is the number of GPUs used."""

    tp: int = 1
    cp: int = 1
    pp: int = 1
    ep: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    virtual_stages: int = 1
    order: str = "tp-cp-pp-dp"
    """Axes from the fastest-varying rank digit to the slowest."""
    stage_layers: tuple[int, ...] = ()
    """Layers of each stage; empty balances them."""
    sequence_parallel: bool = True
    context: Context = "all_gather"

    def __post_init__(self) -> None:
        for axis in ("tp", "cp", "pp", "ep", "dp_replicate", "dp_shard", "virtual_stages"):
            whole(f"layout.{axis}", getattr(self, axis))
        for index, layers in enumerate(self.stage_layers):
            whole(f"layout.stage_layers[{index}]", layers)
        if self.stage_layers and len(self.stage_layers) != self.stages:
            raise JobError(
                f"layout.stage_layers has {len(self.stage_layers)} entries, but pp({self.pp}) x "
                f"virtual_stages({self.virtual_stages}) = {self.stages} stages"
            )
        flag("layout.sequence_parallel", self.sequence_parallel)
        choice("layout.context", self.context, get_args(Context))
        # Megatron writes ep as well; it cuts dp_shard x cp x tp once more and is no digit of its own.
        axes = [axis for axis in str(self.order).split("-") if axis != "ep"]
        if sorted(axes) != sorted(_AXES):
            raise JobError(
                f"layout.order = {shown(self.order)} must name tp, cp, pp and dp once each, "
                'for example "tp-cp-pp-dp"'
            )
        ranks = self.dp_shard * self.cp * self.tp
        if ranks % self.ep:
            raise JobError(
                f"layout.ep = {self.ep} must divide "
                f"dp_shard({self.dp_shard}) x cp({self.cp}) x tp({self.tp}) = {ranks}"
            )

    @property
    def dp(self) -> int:
        """Data-parallel degree, replicated and sharded together."""
        return self.dp_replicate * self.dp_shard

    @property
    def stages(self) -> int:
        """Stages of the pipeline, virtual ones counted."""
        return self.pp * self.virtual_stages

    @property
    def world_size(self) -> int:
        """GPUs that the layout needs."""
        return self.tp * self.cp * self.pp * self.dp_replicate * self.dp_shard

    @property
    def product(self) -> str:
        """The arithmetic of the world size: `tp(8) x pp(4) x dp_shard(3) = 96 ranks`."""
        degrees = {axis: getattr(self, axis) for axis in ("tp", "cp", "pp", "dp_replicate", "dp_shard")}
        factors = [f"{axis}({degree})" for axis, degree in degrees.items() if degree > 1]
        return f"{' x '.join(factors) or 'dp_shard(1)'} = {_ranks(self.world_size)}"


class Pipeline(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Order in which the stages of a pipeline work through the microbatches."""

    schedule: str = "1f1b"

    def __post_init__(self) -> None:
        if isinstance(self.schedule, str) and self.schedule.endswith(".csv"):
            raise NotAvailableYetError(f"pipeline.schedule = {shown(self.schedule)}: a schedule from a file")
        choice("pipeline.schedule", self.schedule, SCHEDULES)


class DataParallel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How gradients meet and where the state lives."""

    sharding: Sharding = "fsdp"
    reshard_after_forward: bool = True
    keep_last_layer: bool = True
    """fsdp that reshards: the last unit stays unsharded after forward, since backward begins with it."""
    bucket_bytes: int = 26_214_400
    first_bucket_bytes: int = 1_048_576
    prefetch: int = 1
    """fsdp: units unsharded ahead of the one that computes."""
    backward_prefetch: Literal["pre", "post"] = "pre"
    """fsdp: in backward the next unit is unsharded while the one before it computes (FSDP's BACKWARD_PRE) or
    after that one's reduction (BACKWARD_POST)."""
    limit_all_gathers: bool = True
    """fsdp: at most two unsharded-but-unused or in-use units at once."""
    ownership: Literal["tensor", "layer"] = "tensor"
    """fsdp: every tensor cut over all ranks (as frameworks do), or a layer's owner broadcasts it whole."""
    optimizer_in_backward: bool = False
    """Update a layer as soon as its gradient is complete, inside backward."""
    reduce_precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """What gradients travel in; auto: fp32 for fsdp, the job's precision otherwise."""

    def __post_init__(self) -> None:
        choice("data_parallel.sharding", self.sharding, get_args(Sharding))
        choice("data_parallel.ownership", self.ownership, ("tensor", "layer"))
        choice("data_parallel.backward_prefetch", self.backward_prefetch, ("pre", "post"))
        choice("data_parallel.reduce_precision", self.reduce_precision, ("auto", "fp32", "bf16", "fp16"))
        for name in (
            "reshard_after_forward",
            "keep_last_layer",
            "limit_all_gathers",
            "optimizer_in_backward",
        ):
            flag(f"data_parallel.{name}", getattr(self, name))
        whole("data_parallel.bucket_bytes", self.bucket_bytes)
        whole("data_parallel.first_bucket_bytes", self.first_bucket_bytes)
        whole("data_parallel.prefetch", self.prefetch, least=0)
        if self.sharding in ("zero1", "zero2"):
            raise NotAvailableYetError(f"data_parallel.sharding = {shown(self.sharding)}")
        if self.prefetch > 1 and self.limit_all_gathers:
            raise JobError(
                f"data_parallel.prefetch = {self.prefetch} needs limit_all_gathers = false: the limit keeps "
                "at most two units unsharded, the one that computes and one ahead, so no prefetch goes deeper"
            )
        if self.ownership == "layer" and self.sharding != "fsdp":
            raise JobError(
                f'data_parallel.ownership = "layer" needs sharding = "fsdp", not {shown(self.sharding)}: '
                "where the state is replicated no layer has one owner"
            )
        if self.optimizer_in_backward and self.sharding == "none":
            raise JobError(
                'data_parallel.optimizer_in_backward = true needs sharding = "ddp" or "fsdp", not "none": '
                "with none the gradients meet only after backward"
            )


class FixedTimes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A teaching world: seconds per stage and microbatch instead of the cost models."""

    forward: float
    backward: float | None = None
    input_gradient: float | None = None
    weight_gradient: float | None = None
    transfer: float = 0.0

    def __post_init__(self) -> None:
        finite("fixed_times.forward", self.forward, positive=True)
        for name in ("backward", "input_gradient", "weight_gradient", "transfer"):
            if getattr(self, name) is not None:
                finite(f"fixed_times.{name}", getattr(self, name))
        parts = (self.input_gradient, self.weight_gradient)
        whole_given = self.backward is not None and parts == (None, None)
        parts_given = self.backward is None and None not in parts
        if not whole_given and not parts_given:
            given = [
                n for n in ("backward", "input_gradient", "weight_gradient") if getattr(self, n) is not None
            ]
            raise JobError(
                "fixed_times needs either backward, or input_gradient and weight_gradient; given: "
                + (", ".join(given) or "none of them")
            )


class Coordinates(NamedTuple):
    """Where a rank sits in the mesh: its index along each axis."""

    tp: int
    cp: int
    pp: int
    dp: int
    """dp_replicate x (degree of dp_shard) + dp_shard: replicas outside, shards inside."""
    dp_replicate: int
    dp_shard: int


def coordinates(layout: Layout, rank: int) -> Coordinates:
    """Index of a rank along every axis; `layout.order` names the fastest axis first (Megatron's `order`)."""
    assert 0 <= rank < layout.world_size, f"rank {rank} of {layout.world_size}"
    at, rest = {}, rank
    for axis, degree in _digits(layout):
        rest, at[axis] = divmod(rest, degree)
    return Coordinates(at["tp"], at["cp"], at["pp"], at["dp"], *divmod(at["dp"], layout.dp_shard))


def axis_index(layout: Layout, axis: str) -> "npt.NDArray[np.int64]":
    """Index along one of the axes tp, cp, pp and dp of every rank, as an array over the ranks."""
    stride = 1
    for name, degree in _digits(layout):
        if name == axis:
            return np.arange(layout.world_size) // stride % degree
        stride *= degree
    raise AssertionError(f"no axis {axis}")


def rank_of(layout: Layout, *, tp: int = 0, cp: int = 0, pp: int = 0, dp: int = 0) -> int:
    """Rank at these indices; the inverse of `coordinates`."""
    at = {"tp": tp, "cp": cp, "pp": pp, "dp": dp}
    rank, stride = 0, 1
    for axis, degree in _digits(layout):
        assert 0 <= at[axis] < degree, f"{axis} = {at[axis]} of {degree}"
        rank += at[axis] * stride
        stride *= degree
    return rank


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


def _digits(layout: Layout) -> list[tuple[str, int]]:
    return [(axis, getattr(layout, axis)) for axis in layout.order.split("-") if axis != "ep"]
