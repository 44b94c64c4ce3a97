"""Random valid jobs with odd sizes, each from one number."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from emulator.spec.cluster import Cluster, Host
from emulator.spec.device import DEVICES
from emulator.spec.errors import JobError, NotAvailableYetError
from emulator.spec.faults import Fault
from emulator.spec.job import Job
from emulator.spec.model import Model
from emulator.spec.parallel import SCHEDULES, DataParallel, FixedTimes, Layout, Pipeline


def random_job(seed: int) -> Job:
    """A valid job with odd sizes; the same for the same seed, whatever Python hashes to."""
    draw = _Draw(seed)
    while True:
        fields = _fields(draw)
        try:
            return Job(**fields)
        except NotAvailableYetError:
            continue
        except JobError as error:
            # The only rule that the draw does not foresee: it depends on where every group lies.
            if "hierarchical" not in str(error):
                raise


class _Draw:
    def __init__(self, seed: int) -> None:
        self.numbers = np.random.default_rng(seed)

    def one(self, *choices: Any) -> Any:
        return choices[int(self.numbers.integers(len(choices)))]

    def chance(self, probability: float) -> bool:
        return bool(self.numbers.random() < probability)

    def log(self, low: float, high: float) -> float:
        return float(np.exp(self.numbers.uniform(np.log(low), np.log(high))))


def _model(draw: _Draw, stages: int) -> Model:
    kv_heads = draw.one(1, 2, 3)
    heads = kv_heads * draw.one(1, 1, 2, 4)
    width = draw.one(2, 8, 64, 128)
    return Model(
        name="swarm",
        layers=stages + draw.one(0, 0, 1, 2, 3),
        hidden=draw.one(1, 7, 64, 257, 4096) if draw.chance(0.5) else heads * width,
        ffn_hidden=draw.one(1, 3, 128, 1001, 14336),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=width,
        vocab=draw.one(1, 2, 255, 50257, 128256),
        activation=draw.one("swiglu", "geglu", "gelu", "relu"),
        norm=draw.one("rmsnorm", "layernorm"),
        learned_positions=draw.one(0, 0, 8192),
        attention_bias=draw.chance(0.3),
        projection_bias=draw.chance(0.3),
        mlp_bias=draw.chance(0.3),
        qk_norm=draw.chance(0.3),
        tied_embeddings=draw.chance(0.4),
    )


def _cluster(draw: _Draw, ranks: int) -> Cluster:
    per_node = draw.one(1, 2, 3, 5, 8)
    nodes = -(-ranks // per_node) + draw.one(0, 0, 1, 3)
    device = DEVICES[draw.one(*DEVICES)]
    if draw.chance(0.2):
        device = msgspec.structs.replace(
            device,
            nic_bytes_per_second=draw.log(1e7, 1e13),
            scale_up_bytes_per_second=draw.log(1e7, 1e13),
        )
    nic = draw.one(None, None, 0.1, 400, 12345.678)
    return Cluster(
        device=device,
        gpus_per_node=per_node,
        nodes=nodes,
        nic_gbit_per_gpu=nic,
        nodes_per_rack=draw.one(1, 2, 3),
        racks_per_pod=draw.one(None, 1, 2),
        pod_oversubscription=draw.one(1, 1.5, 7, 1000 if nic == 400 else 1),
        rail_optimised=draw.chance(0.3),
        host=Host(
            launch_seconds=draw.one(0, 6e-6, 6e-6, draw.log(1e-9, 1e-3)),
            loader_bytes_per_second=draw.one(1e9, draw.log(1e6, 1e12)),
        ),
    )


def _fixed_times(draw: _Draw) -> FixedTimes | None:
    if draw.chance(0.8):
        return None

    def seconds() -> float:
        return float(draw.one(0.0, 1.0, 1e-6, draw.log(1e-12, 1e3)))

    transfer = seconds()
    if draw.chance(0.5):
        return FixedTimes(forward=draw.log(1e-12, 1e3), backward=seconds(), transfer=transfer)
    return FixedTimes(
        forward=draw.log(1e-12, 1e3),
        input_gradient=seconds(),
        weight_gradient=seconds(),
        transfer=transfer,
    )


def _data_parallel(draw: _Draw) -> DataParallel:
    sharding = draw.one("none", "ddp", "fsdp", "fsdp", "fsdp")
    limited = draw.chance(0.5)
    return DataParallel(
        sharding=sharding,
        reshard_after_forward=draw.chance(0.6),
        keep_last_layer=draw.chance(0.6),
        bucket_bytes=draw.one(1, 5_000, 26_214_400, 2**40),
        first_bucket_bytes=draw.one(1, 1_048_576),
        prefetch=draw.one(0, 1) if limited else draw.one(0, 1, 2, 5),
        limit_all_gathers=limited,
        ownership=draw.one("tensor", "layer") if sharding == "fsdp" else "tensor",
        optimizer_in_backward=sharding != "none" and draw.chance(0.4),
        reduce_precision=draw.one("auto", "fp32", "bf16", "fp16"),
    )


def _fields(draw: _Draw) -> dict[str, Any]:
    pp, dp = draw.one(1, 1, 2, 3, 4), draw.one(1, 2, 3, 5, 9)
    data = _data_parallel(draw)
    replicas = draw.one(1, dp) if data.sharding != "fsdp" else 1
    layers = _model(draw, pp)
    cluster = _cluster(draw, pp * dp)
    stage_layers = (layers.layers - pp + 1, *[1] * (pp - 1)) if draw.chance(0.2) else ()
    micro_batch = draw.one(1, 1, 2, 3)
    microbatches = draw.one(1, 1, 2, 3, 5)
    return {
        "model": layers,
        "cluster": cluster,
        "gpus": draw.one(0, pp * dp),
        "seq_len": draw.one(1, 2, 17, 1024, 8192),
        "global_batch": dp * micro_batch * microbatches,
        "micro_batch": micro_batch,
        "precision": draw.one(*(p for p in cluster.device.peak_flops if p != "fp4")),
        "steps": draw.one(1, 1, 2, 3),
        "layout": Layout(
            pp=pp,
            dp_replicate=replicas,
            dp_shard=dp // replicas,
            order="-".join(draw.numbers.permutation(["tp", "cp", "pp", "dp"])),
            stage_layers=stage_layers,
        ),
        "pipeline": Pipeline(draw.one("naive", "gpipe") if pp > 1 else draw.one(*SCHEDULES)),
        "data_parallel": data,
        "fixed_times": _fixed_times(draw),
        "contention": draw.chance(0.8),
        "collective_algorithm": draw.one("auto", "auto", "ring", "tree", "hierarchical"),
        "faults": tuple(_fault(draw, pp * dp) for _ in range(draw.one(0, 0, 0, 1, 2))),
    }


def _fault(draw: _Draw, ranks: int) -> Fault:
    factor = draw.one(0.001, 0.3, 0.8, 0.999)
    return Fault(kind=draw.one("straggler", "nic"), rank=int(draw.numbers.integers(ranks)), factor=factor)
