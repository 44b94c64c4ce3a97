"""Job checks, mesh coordinates, balanced stages, and the resolved job."""

import re
from dataclasses import dataclass

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from emulator.spec.cluster import Cluster, dgx_h100
from emulator.spec.device import DEVICES
from emulator.spec.errors import JobError, NotAvailableYetError
from emulator.spec.faults import Fault
from emulator.spec.job import (
    DataParallel,
    FixedTimes,
    Job,
    Layout,
    Pipeline,
    coordinates,
    rank_of,
    reduce_precision,
    resolved,
    stage_layers,
)
from emulator.spec.model import Model
from emulator.spec.schema import build

DEGREES = st.integers(1, 4)
ORDERS = st.permutations(["tp", "cp", "pp", "dp"]).map("-".join)
NAIVE = Pipeline("naive")


@dataclass(frozen=True)
class Case:
    """What a job changes of the small one, and what its error must say."""

    changes: dict[str, object]
    message: str


def small_model(**changes: object) -> Model:
    shape: dict[str, object] = {
        "name": "small",
        "layers": 8,
        "hidden": 64,
        "ffn_hidden": 128,
        "heads": 4,
        "kv_heads": 4,
        "vocab": 100,
    }
    return build({**shape, **changes}, Model)


def small_job(**changes: object) -> Job:
    fields: dict[str, object] = {
        "model": small_model(),
        "cluster": dgx_h100(nodes=8),
        "seq_len": 128,
        "global_batch": 64,
    }
    return Job(**{**fields, **changes})  # type: ignore[arg-type]


WRONG = [
    Case(
        {"layout": Layout(tp=8, pp=4, dp_shard=3)},
        "tp(8) x pp(4) x dp_shard(3) = 96 ranks, but the cluster has 64 GPUs",
    ),
    Case({"layout": Layout(dp_shard=65)}, "take 9 nodes instead of 8"),
    Case(
        {"layout": Layout(dp_shard=4), "gpus": 8},
        "dp_shard(4) = 4 ranks, but gpus = 8; set gpus = 4, or dp_shard = 8",
    ),
    Case({"gpus": 2}, "dp_shard(1) = 1 rank, but gpus = 2"),
    Case({"gpus": -1}, "gpus = -1 must be at least 0"),
    Case({"layout": Layout(pp=16), "pipeline": NAIVE}, "16 stages, but small has 8 layers"),
    Case(
        {"layout": Layout(pp=2, stage_layers=(4, 3)), "pipeline": NAIVE},
        "4 + 3 = 7, but small has 8 layers; 1 too few",
    ),
    Case(
        {"layout": Layout(pp=2, stage_layers=(5, 4)), "pipeline": NAIVE},
        "5 + 4 = 9, but small has 8 layers; 1 too many",
    ),
    Case(
        {"global_batch": 33, "micro_batch": 2, "layout": Layout(dp_shard=4)},
        "global_batch = 33 cannot be cut evenly: micro_batch(2) x dp(4) = 8 sequences each pass; "
        "nearest valid: 32 or 40",
    ),
    Case({"global_batch": 3, "layout": Layout(dp_shard=4)}, "nearest valid: 4"),
    Case({"global_batch": 0}, "global_batch = 0 must be at least 1"),
    Case({"micro_batch": 0}, "micro_batch = 0 must be at least 1"),
    Case({"seq_len": 0}, "seq_len = 0 must be at least 1"),
    Case({"seq_len": 12.5}, "seq_len = 12.5 must be a whole number"),
    Case({"steps": 0}, "steps = 0 must be at least 1"),
    Case({"steps": True}, "steps = true must be a whole number"),
    Case({"seed": -1}, "seed = -1 must be at least 0"),
    Case(
        {"seq_len": 2049, "model": small_model(learned_positions=2048)},
        "longer than the 2048 learned positions",
    ),
    Case({"precision": "bf61"}, "must be fp32, tf32, fp16, bf16 or fp8; did you mean bf16?"),
    Case(
        {"precision": "fp8", "cluster": Cluster(device=DEVICES["a100-80"], nodes=8)},
        'precision = "fp8": a100-80 has no units for it; it has',
    ),
    Case(
        {"precision": "bf16", "cluster": Cluster(device=DEVICES["k40"], nodes=8)},
        "k40 has no units for it; it has fp32",
    ),
    Case(
        {"precision": "fp16", "cluster": Cluster(device=DEVICES["k40"], nodes=8)},
        "k40 has no units for it; it has fp32",
    ),
    Case({"attention": "flash1"}, 'attention = "flash1" must be flash2 or flash_triton'),
    Case({"recompute": "fulll"}, "did you mean full?"),
    Case({"recompute": {"each": 2}}, "recompute = {each = 2} must be none"),
    Case({"recompute": {"every": 0}}, "recompute.every = 0 must be at least 1"),
    Case({"contention": 1}, "contention = 1 must be true or false"),
    Case({"collective_algorithm": "rings"}, "did you mean ring?"),
    Case(
        {"collective_algorithm": "hierarchical", "layout": Layout(dp_shard=12), "global_batch": 12},
        "of the 12 dp ranks of stage 0 node 0 has 8 and node 1 has 4",
    ),
    Case({"recovery": {"policy": "retry"}}, 'recovery.policy = "retry" must be restart, shrink or wait'),
]

LATER = [
    Case({"layout": Layout(tp=2)}, "layout.tp = 2: tensor parallelism is not available yet"),
    Case({"layout": Layout(cp=2)}, "context parallelism is not available yet"),
    Case({"layout": Layout(dp_shard=2, ep=2)}, "expert parallelism is not available yet"),
    Case({"layout": Layout(pp=2, virtual_stages=2)}, "layout.virtual_stages = 2: more than one stage a rank"),
    Case({"layout": Layout(dp_replicate=2, dp_shard=2)}, "(HSDP) is not available yet"),
    Case({"layout": Layout(pp=2)}, 'layout.pp = 2 with pipeline.schedule = "1f1b"'),
    Case({"recompute": "selective"}, 'recompute = "selective" is not available yet'),
    Case({"recompute": {"every": 2}}, "recompute = {every = 2} is not available yet"),
    Case({"faults": (Fault(kind="straggler", factor=0.5, at="2s"),)}, "[[faults]] with at"),
    Case({"faults": (Fault(kind="gpu"),)}, '[[faults]] with kind = "gpu" is not available yet'),
    Case({"failures": {"rates": "llama3"}}, "[failures] is not available yet"),
    Case({"checkpoint": {"mode": "async"}}, "[checkpoint] is not available yet"),
    Case({"recovery": {"spares": 1}}, "[recovery] is not available yet"),
]


@pytest.mark.parametrize("case", WRONG, ids=lambda case: case.message[:40])
def test_a_job_that_cannot_be_says_why(case: Case) -> None:
    with pytest.raises(JobError, match=re.escape(case.message)) as caught:
        small_job(**case.changes)
    assert not isinstance(caught.value, NotAvailableYetError)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("case", LATER, ids=lambda case: case.message[:40])
def test_what_is_named_but_not_built_says_so(case: Case) -> None:
    with pytest.raises(NotAvailableYetError, match=re.escape(case.message)):
        small_job(**case.changes)


def test_wrong_comes_before_not_built() -> None:
    """1,472 ranks, TP8 PP8, so DP 23 (SimAI#202); a batch of 32 is wrong, whether or not TP is built."""
    layout = Layout(tp=8, pp=8, dp_shard=23)
    with pytest.raises(JobError, match=r"dp\(23\) = 23 sequences each pass; nearest valid: 23 or 46$"):
        small_job(cluster=dgx_h100(nodes=184), layout=layout, global_batch=32)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Layout(tp=0), "layout.tp = 0 must be at least 1"),
        (lambda: Layout(pp="2"), 'layout.pp = "2" must be a whole number'),  # type: ignore[arg-type]
        (lambda: Layout(order="tp-cp-pp"), 'layout.order = "tp-cp-pp" must name tp, cp, pp and dp once each'),
        (lambda: Layout(order="tp-cp-pp-pp-dp"), "must name tp, cp, pp and dp once each"),
        (
            lambda: Layout(pp=2, stage_layers=(4, 2, 2)),
            "has 3 entries, but pp(2) x virtual_stages(1) = 2 stages",
        ),
        (lambda: Layout(pp=2, stage_layers=(8, 0)), "layout.stage_layers[1] = 0 must be at least 1"),
        (lambda: Layout(dp_shard=4, ep=3), "layout.ep = 3 must divide dp_shard(4) x cp(1) x tp(1) = 4"),
        (lambda: Layout(context="rings"), "did you mean ring?"),  # type: ignore[arg-type]
        (lambda: Layout(sequence_parallel=1), "must be true or false"),  # type: ignore[arg-type]
        (lambda: Pipeline("1b1f"), "must be naive, gpipe, 1f1b"),
        (lambda: DataParallel(sharding="fdsp"), "did you mean fsdp?"),  # type: ignore[arg-type]
        (
            lambda: DataParallel(backward_prefetch="late"),  # type: ignore[arg-type]
            'data_parallel.backward_prefetch = "late" must be pre or post',
        ),
        (lambda: DataParallel(prefetch=-1), "data_parallel.prefetch = -1 must be at least 0"),
        (lambda: DataParallel(prefetch=2), "data_parallel.prefetch = 2 needs limit_all_gathers = false"),
        (lambda: DataParallel(bucket_bytes=0), "data_parallel.bucket_bytes = 0 must be at least 1"),
        (lambda: DataParallel(first_bucket_bytes=0), "first_bucket_bytes = 0 must be at least 1"),
        (lambda: DataParallel(sharding="ddp", ownership="layer"), 'needs sharding = "fsdp", not "ddp"'),
        (lambda: DataParallel(sharding="none", optimizer_in_backward=True), 'not "none"'),
        (
            lambda: FixedTimes(forward=0.0, backward=1.0),
            "fixed_times.forward = 0.0 must be a finite number above",
        ),
        (
            lambda: FixedTimes(forward=1.0, backward=float("inf")),
            "fixed_times.backward = inf must be a finite",
        ),
        (lambda: FixedTimes(forward=1.0, backward=-1.0), "fixed_times.backward = -1.0 must be a finite"),
        (lambda: FixedTimes(forward=1.0), "given: none of them"),
        (lambda: FixedTimes(forward=1.0, input_gradient=1.0), "given: input_gradient"),
        (
            lambda: FixedTimes(forward=1.0, backward=1.0, weight_gradient=1.0),
            "given: backward, weight_gradient",
        ),
        (lambda: FixedTimes(forward=1.0, backward=1.0, transfer=float("nan")), "fixed_times.transfer = nan"),
    ],
)
def test_a_table_that_cannot_be_says_why(make: object, message: str) -> None:
    with pytest.raises(JobError, match=re.escape(message)):
        make()  # type: ignore[operator]


@pytest.mark.parametrize("sharding", ["zero1", "zero2"])
def test_zero_stages_are_not_available(sharding: str) -> None:
    with pytest.raises(NotAvailableYetError, match=f'"{sharding}" is not available yet'):
        DataParallel(sharding=sharding)  # type: ignore[arg-type]


def test_a_schedule_file_is_not_available() -> None:
    with pytest.raises(NotAvailableYetError, match=r"mine\.csv"):
        Pipeline("mine.csv")


@pytest.mark.parametrize("schedule", ["naive", "gpipe", "1f1b", "interleaved_1f1b", "zbv"])
def test_any_schedule_accumulates_on_one_stage(schedule: str) -> None:
    assert small_job(pipeline=Pipeline(schedule)).microbatches == 64


def test_replicas_and_shards_replicate_together_without_fsdp() -> None:
    job = small_job(layout=Layout(dp_replicate=2, dp_shard=4), data_parallel=DataParallel(sharding="ddp"))
    assert job.layout.dp == 8
    assert job.microbatches == 8


def test_deep_prefetch_without_the_limit() -> None:
    assert DataParallel(prefetch=3, limit_all_gathers=False).prefetch == 3


def test_coordinates_are_megatrons() -> None:
    """Megatron-LM's parallel_state: 16 ranks, TP2 PP4, tp-cp-ep-dp-pp: TP [0,1], DP [0,2], PP [0,4,8,12]."""
    layout = Layout(tp=2, pp=4, dp_shard=2, order="tp-cp-ep-dp-pp")
    assert [rank_of(layout, tp=i) for i in range(2)] == [0, 1]
    assert [rank_of(layout, dp=i) for i in range(2)] == [0, 2]
    assert [rank_of(layout, pp=i) for i in range(4)] == [0, 4, 8, 12]
    assert [rank_of(layout, tp=1, dp=i) for i in range(2)] == [1, 3]


def test_coordinates_are_llama_3s() -> None:
    """Llama 3: [TP, CP, PP, DP] innermost first puts the pipeline inside data parallelism."""
    layout = Layout(tp=2, pp=4, dp_shard=2)
    assert [rank_of(layout, pp=i) for i in range(4)] == [0, 2, 4, 6]
    assert [rank_of(layout, dp=i) for i in range(2)] == [0, 8]


def test_shards_are_inside_replicas() -> None:
    layout = Layout(dp_replicate=2, dp_shard=3)
    assert [coordinates(layout, r)[4:] for r in range(6)] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]


@given(tp=DEGREES, cp=DEGREES, pp=DEGREES, replicate=DEGREES, shard=DEGREES, order=ORDERS)
def test_rank_of_inverts_coordinates(
    tp: int, cp: int, pp: int, replicate: int, shard: int, order: str
) -> None:
    layout = Layout(tp=tp, cp=cp, pp=pp, dp_replicate=replicate, dp_shard=shard, order=order)
    seen = set()
    for rank in range(layout.world_size):
        at = coordinates(layout, rank)
        assert rank_of(layout, tp=at.tp, cp=at.cp, pp=at.pp, dp=at.dp) == rank
        assert at.dp == at.dp_replicate * shard + at.dp_shard
        seen.add(at)
    assert len(seen) == layout.world_size


@pytest.mark.parametrize(
    ("layers", "stages", "expected"),
    [
        (126, 16, (7, *[8] * 14, 7)),
        (30, 4, (7, 8, 8, 7)),
        (32, 4, (8, 8, 8, 8)),
        (5, 2, (3, 2)),
        (5, 4, (1, 1, 2, 1)),
        (4, 4, (1, 1, 1, 1)),
        (7, 1, (7,)),
        (33, 4, (8, 9, 9, 7)),
    ],
)
def test_balanced_stages(layers: int, stages: int, expected: tuple[int, ...]) -> None:
    """No layer is dropped where they do not divide; 126 over 16 is how Llama 3 405B was cut."""
    job = small_job(model=small_model(layers=layers), layout=Layout(pp=stages), pipeline=NAIVE)
    assert stage_layers(job) == expected


@given(stages=st.integers(1, 24), more=st.integers(0, 100))
def test_balanced_stages_keep_every_layer(stages: int, more: int) -> None:
    job = small_job(model=small_model(layers=stages + more), layout=Layout(pp=stages), pipeline=NAIVE)
    layers = stage_layers(job)
    assert sum(layers) == stages + more
    assert len(layers) == stages
    assert min(layers) >= 1
    # With the embedding and the head counted as a layer, no two stages differ by more than one, unless
    # a stage would be left without a layer, or the layers divide and are cut evenly.
    units = [*layers]
    units[0] += 1
    units[-1] += 1
    assert max(units) - min(units) <= 1 or (stages + more) % stages == 0 or stages + more + 2 < 2 * stages


def test_given_stages_are_kept() -> None:
    job = small_job(layout=Layout(pp=3, stage_layers=(2, 5, 1)), pipeline=NAIVE)
    assert stage_layers(job) == (2, 5, 1)


@pytest.mark.parametrize(
    ("sharding", "precision", "expected"),
    [
        ("fsdp", "bf16", "fp32"),
        ("ddp", "bf16", "bf16"),
        ("ddp", "fp16", "fp16"),
        ("ddp", "tf32", "fp32"),
        ("none", "fp8", "bf16"),
    ],
)
def test_gradients_travel_in(sharding: str, precision: str, expected: str) -> None:
    job = small_job(precision=precision, data_parallel=DataParallel(sharding=sharding))  # type: ignore[arg-type]
    assert reduce_precision(job) == expected


def test_resolved_fills_every_default_and_loads_back() -> None:
    job = small_job(layout=Layout(pp=3, dp_shard=4), pipeline=NAIVE)
    table = resolved(job)
    assert table["gpus"] == 12
    layout = table["layout"]
    assert isinstance(layout, dict)
    assert layout["stage_layers"] == [2, 4, 2]
    again = build(msgspec.json.decode(msgspec.json.encode(table)), Job)
    assert resolved(again) == table
    assert stage_layers(again) == stage_layers(job)
    assert again.cluster.nic_bytes_per_second == job.cluster.nic_bytes_per_second
