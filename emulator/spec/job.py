"""A job: what is trained, on what, cut how. If it was constructed, it can be planned."""

from typing import Literal

import msgspec

from emulator.spec.cluster import Cluster
from emulator.spec.model import Model

Precision = Literal["fp32", "tf32", "fp16", "bf16", "fp8"]


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
    context: Literal["ring", "ulysses", "all_gather"] = "all_gather"

    @property
    def dp(self) -> int:
        """Data-parallel degree, replicated and sharded together."""
        return self.dp_replicate * self.dp_shard

    @property
    def world_size(self) -> int:
        """GPUs that the layout needs."""
        return self.tp * self.cp * self.pp * self.dp_replicate * self.dp_shard


class Pipeline(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Order in which the stages of a pipeline work through the microbatches."""

    schedule: str = "1f1b"


class DataParallel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How gradients meet and where the state lives."""

    sharding: Literal["none", "ddp", "zero1", "zero2", "fsdp"] = "fsdp"
    reshard_after_forward: bool = True
    keep_last_layer: bool = True
    """fsdp: the last unit stays unsharded between forward and backward, which begins with it."""
    bucket_bytes: int = 26_214_400
    first_bucket_bytes: int = 1_048_576
    prefetch: int = 1
    """fsdp: units unsharded ahead of the one that computes."""
    limit_all_gathers: bool = True
    """fsdp: at most two unsharded-but-unused or in-use units at once."""
    ownership: Literal["tensor", "layer"] = "tensor"
    """fsdp: every tensor cut over all ranks (as frameworks do), or a whole layer with one owner that broadcasts."""
    optimizer_in_backward: bool = False
    """Update a layer as soon as its gradient is complete, inside backward."""
    reduce_precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """What gradients travel in; auto: fp32 for fsdp, the job's precision otherwise."""


class FixedTimes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A teaching world: seconds per stage and microbatch instead of the cost models."""

    forward: float
    backward: float | None = None
    input_gradient: float | None = None
    weight_gradient: float | None = None
    transfer: float = 0.0


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
    recompute: str = "none"
    steps: int = 1
    seed: int = 0
    layout: Layout = Layout()
    pipeline: Pipeline = Pipeline()
    data_parallel: DataParallel = DataParallel()
    fixed_times: FixedTimes | None = None
    contention: bool = True
    """False: collectives take no SMs and no HBM (an idealisation, for closed forms)."""
    collective_algorithm: Literal["auto", "ring", "tree", "hierarchical"] = "auto"

    @property
    def microbatches(self) -> int:
        """Microbatches a step and pipeline replica."""
        return self.global_batch // (self.micro_batch * self.layout.dp)
