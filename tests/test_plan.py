"""The planner: what a Program says about kernels, traffic and memory, without running it."""

from __future__ import annotations

import time
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from random_programs import random_program

from emulator.plan import ProgramError, check, plan
from emulator.plan.data_parallel import buckets
from emulator.plan.folding import fold
from emulator.plan.memory import state_bytes
from emulator.plan.program import Buffer, Collective, Fixed, Kernel, Op, Program, Template, Transfer
from emulator.plan.text import WIDTH, show
from emulator.plan.unit import boundary_bytes
from emulator.run import run
from emulator.spec.cluster import dgx_h100
from emulator.spec.job import DataParallel, FixedTimes, Job, Layout, Pipeline
from emulator.spec.model import MODELS, Model, tensors
from emulator.spec.units import PS_PER_SECOND

CLUSTER = dgx_h100(nodes=8)
TINY = Model(name="tiny", layers=6, hidden=64, ffn_hidden=128, heads=4, kv_heads=2, vocab=1000)


def job(*, pp: int = 1, dp: int = 1, m: int = 1, schedule: str = "gpipe", **fields: object) -> Job:
    """A small job of `m` microbatches; fields of DataParallel and of Job by name."""
    options = {name: fields.pop(name) for name in list(fields) if name in DataParallel.__struct_fields__}
    given: dict[str, object] = {
        "model": TINY,
        "cluster": CLUSTER,
        "seq_len": 32,
        "global_batch": dp * m,
        "layout": Layout(pp=pp, dp_shard=dp),
        "pipeline": Pipeline(schedule),
        "data_parallel": DataParallel(**options),  # type: ignore[arg-type]
    }
    return Job(**(given | fields))  # type: ignore[arg-type]


def collectives(template: Template, kind: str) -> list[Op]:
    return [op for op in template.ops if isinstance(op.work, Collective) and op.work.kind == kind]


def moved(template: Template, kind: str) -> int:
    """Bytes S of all collectives of a kind."""
    return sum(op.work.bytes for op in collectives(template, kind) if isinstance(op.work, Collective))


def peaks(template: Template) -> Counter[str]:
    """Largest live bytes of each term, played in the order of issue; persistent buffers included."""
    live: Counter[str] = Counter()
    for buffer in template.buffers:
        if buffer.persistent:
            live[buffer.term] += buffer.bytes
    most = Counter(live)
    for op in template.ops:
        for index in op.allocates:
            live[template.buffers[index].term] += template.buffers[index].bytes
        most |= live
        for index in op.frees:
            live[template.buffers[index].term] -= template.buffers[index].bytes
    return most


def before(template: Template, name: str) -> set[str]:
    """Names of the ops that have certainly ended when this one begins."""
    tail: dict[str, int] = {}
    earlier: list[set[int]] = []
    for index, op in enumerate(template.ops):
        direct = {*op.waits, *([tail[op.stream]] if op.stream in tail else [])}
        earlier.append(direct.union(*(earlier[i] for i in direct)))
        tail[op.stream] = index
    at = next(i for i, op in enumerate(template.ops) if op.name == name)
    return {template.ops[i].name for i in earlier[at]}


# Any job


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    layers = draw(st.integers(1, 5))
    pp, dp, m = draw(st.integers(1, min(layers, 4))), draw(st.integers(1, 6)), draw(st.integers(1, 4))
    model = Model(
        name="any", layers=layers, hidden=64, ffn_hidden=128, heads=4,
        kv_heads=draw(st.sampled_from([1, 2, 4])), vocab=100,
        activation=draw(st.sampled_from(["swiglu", "gelu"])),
        norm=draw(st.sampled_from(["rmsnorm", "layernorm"])),
        attention_bias=draw(st.booleans()), tied_embeddings=draw(st.booleans()),
        learned_positions=draw(st.sampled_from([0, 64])),
    )  # fmt: skip
    sharding = draw(st.sampled_from(["none", "ddp", "fsdp"]))
    options: dict[str, object] = {
        "sharding": sharding,
        "reduce_precision": draw(st.sampled_from(["auto", "fp32", "bf16"])),
        "bucket_bytes": draw(st.sampled_from([1000, 20000, 10**6])),
        "first_bucket_bytes": 500,
        "optimizer_in_backward": sharding != "none" and draw(st.booleans()),
    }
    if sharding == "fsdp":
        limited = draw(st.booleans())
        options |= {
            "ownership": draw(st.sampled_from(["tensor", "layer"])),
            "reshard_after_forward": draw(st.booleans()),
            "keep_last_layer": draw(st.booleans()),
            "limit_all_gathers": limited,
            "prefetch": draw(st.integers(0, 1 if limited else 3)),
            "backward_prefetch": draw(st.sampled_from(["pre", "post"])),
        }
    worlds = [
        None,
        FixedTimes(forward=1.0, backward=2.0),
        FixedTimes(forward=1.0, input_gradient=1.0, weight_gradient=0.5, transfer=0.1),
    ]
    names = ["naive", "gpipe", *(["1f1b", "zbv"] if pp == 1 else [])]
    return job(
        model=model, pp=pp, dp=dp, m=m, schedule=draw(st.sampled_from(names)),
        precision=draw(st.sampled_from(["fp32", "bf16", "fp8"])), fixed_times=draw(st.sampled_from(worlds)),
        **options,
    )  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(jobs())
def test_every_program_passes_the_check(spec: Job) -> None:
    """Whatever the options: acyclic, matched, and no buffer used outside its life; and it prints."""
    program = plan(spec)
    check(program)
    assert all(len(line) <= WIDTH for line in show(program).splitlines())


@settings(max_examples=100, deadline=None)
@given(jobs())
def test_state_is_sixteen_bytes_a_parameter_held_once_or_everywhere(spec: Job) -> None:
    """All ranks together hold 16 B per parameter: once if sharded, else once a data-parallel rank."""
    program = plan(spec)
    held = 0
    for rank_class in program.classes:
        buffers = program.templates[rank_class.template].buffers
        each = sum(b.bytes for b in buffers if b.term in ("weights", "gradients", "optimizer"))
        held += each * len(rank_class.members)
    copies = 1 if spec.data_parallel.sharding == "fsdp" else spec.layout.dp
    elements = spec.model.parameters
    if spec.model.tied_embeddings and spec.layout.pp > 1:
        elements += tensors(spec.model)[0].count  # the last stage has a copy of the matrix
    rounding = 16 * spec.layout.dp * (spec.model.layers + 2) if copies < spec.layout.dp else 0
    assert 0 <= held - 16 * elements * copies <= rounding


@given(jobs())
def test_each_microbatch_passes_each_layer_once_each_way(spec: Job) -> None:
    program = plan(replace(spec, fixed_times=None))
    passes = Counter(
        (op.layer, op.microbatch)
        for template in {c.template: program.templates[c.template] for c in program.classes}.values()
        for op in template.ops
        if isinstance(op.work, Kernel) and op.work.kind == "attention" and op.phase == "F"
    )
    owners = max(Counter(t.stage for t in program.templates).values())
    assert set(passes) == {
        (layer, mb) for layer in range(spec.model.layers) for mb in range(spec.microbatches)
    }
    assert max(passes.values()) <= owners


# Kernels


def test_a_layer_is_made_of_kernels() -> None:
    """At least 9 forward and 18 backward kernels a layer; layers and microbatches share the objects."""
    (template,) = plan(job(m=3)).templates
    layer = [op for op in template.ops if op.layer == 3 and op.microbatch == 1]
    assert sum(op.phase == "F" for op in layer) >= 9
    assert sum(op.phase in "BIW" for op in layer) >= 18
    assert {op.name for op in layer} >= {"l3.gate.F.mb1", "l3.gate.I.mb1", "l3.gate.W.mb1"}
    kernels = [op.work for op in template.ops if isinstance(op.work, Kernel)]
    assert len({id(kernel) for kernel in kernels}) < 130 < len(kernels) / 5


def test_later_microbatches_add_to_the_gradient() -> None:
    """A weight gradient's product reads the 2-byte sum that it adds to, from the second microbatch on."""
    (template,) = plan(job(m=3)).templates
    w = [op.work for op in template.ops if op.name.startswith("l3.up.W.")]
    assert all(isinstance(kernel, Kernel) for kernel in w)
    extra = [kernel.hbm_bytes - w[0].hbm_bytes for kernel in w if isinstance(kernel, Kernel)]  # type: ignore[union-attr]
    assert extra == [0, 2 * 64 * 128, 2 * 64 * 128]


def test_a_program_of_64_ranks_is_planned_at_once() -> None:
    """Llama 3 8B at kernel detail on 64 ranks: one template for all, in well under half a second."""
    spec = job(model=MODELS["llama3-8b"], dp=64, seq_len=8192)
    plan(spec)
    start = time.perf_counter()
    program = plan(spec)
    assert time.perf_counter() - start < 0.5
    assert (len(program.templates), [len(c.members) for c in program.classes]) == (1, [64])


# Pipeline


def test_transfers_are_named_as_torch_names_them_and_match() -> None:
    """SSEND_Fm pairs with (S+1)RECV_Fm, and backward the other way."""
    program = plan(job(pp=3, m=2))
    names: dict[tuple[str, int, int], set[str]] = {}
    for template in program.templates:
        for op in template.ops:
            if isinstance(op.work, Transfer):
                assert op.work.bytes == boundary_bytes(program.job) == 32 * 64 * 2
                there = template.stage + (1 if op.work.peer == "next" else -1)
                ends = (template.stage, there) if op.work.kind == "send" else (there, template.stage)
                names.setdefault((op.work.tag, *ends), set()).add(op.name)
    assert names == {
        (f"{way}{mb}", a, b): {f"{a}SEND_{way}{mb}", f"{b}RECV_{way}{mb}"}
        for mb in range(2)
        for way, a, b in (("F", 0, 1), ("F", 1, 2), ("B", 2, 1), ("B", 1, 0))
    }


def test_sends_wait_for_their_pass_and_passes_for_their_receive() -> None:
    program = plan(job(pp=3, m=2))
    middle = program.templates[1]
    assert "l3.add2.F.mb1" in before(middle, "1SEND_F1")
    assert "1RECV_F1" in before(middle, "l2.norm1.F.mb1")
    assert "1RECV_B0" in before(middle, "l3.down.I.mb0")
    assert "1RECV_F1" not in before(middle, "l3.add2.F.mb0")
    assert "l3.add2.F.mb0" in before(middle, "1RECV_F1")


def test_a_teaching_world_has_one_op_a_pass() -> None:
    program = plan(job(pp=3, m=2, fixed_times=FixedTimes(forward=1.0, backward=2.0, transfer=0.25)))
    check(program)
    compute = [op for op in program.templates[1].ops if op.stream == "compute"]
    assert [op.name for op in compute] == ["1F0", "1F1", "1B0", "1B1"]
    assert [op.work for op in compute] == [Fixed(10**12)] * 2 + [Fixed(2 * 10**12)] * 2
    assert {op.stream for op in program.templates[0].ops} == {"compute", "pp.send_next", "pp.recv_next"}
    transfers = [op.work for op in program.templates[1].ops if isinstance(op.work, Transfer)]
    assert {work.duration_ps for work in transfers} == {25 * 10**10}


def test_a_split_backward_is_two_ops() -> None:
    times = FixedTimes(forward=1.0, input_gradient=1.0, weight_gradient=0.5)
    (template,) = plan(job(m=1, fixed_times=times)).templates
    assert [(op.name, op.phase) for op in template.ops] == [("0F0", "F"), ("0I0", "I"), ("0W0", "W")]


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_teaching_world_keeps_the_memory_of_the_real_one(stage: int) -> None:
    """Up to the boundary gradients, which one op holds for the whole pass, and the ids and labels."""
    real = peaks(plan(job(pp=3, m=3)).templates[stage])["activations"]
    times = FixedTimes(forward=1.0, backward=2.0)
    fixed_job = job(pp=3, m=3, fixed_times=times)
    fixed = peaks(plan(fixed_job).templates[stage])["activations"]
    ids_and_labels = 3 * 2 * 8 * 32
    assert real - ids_and_labels <= fixed <= real + 2 * boundary_bytes(fixed_job)


def test_gpipe_holds_every_microbatch_and_naive_one() -> None:
    """In flight: m with gpipe, so each more costs the same bytes; one with naive, whatever m is."""
    by_m = [peaks(plan(job(pp=2, m=m)).templates[0])["activations"] for m in (2, 3, 4)]
    assert by_m[2] - by_m[1] == by_m[1] - by_m[0] > 0
    times = FixedTimes(forward=1.0, backward=2.0)
    held = plan(job(pp=2, m=1, fixed_times=times)).templates[0].buffers
    saved = next(b.bytes for b in held if b.name.endswith(".held.mb0"))
    assert by_m[1] - by_m[0] == saved + 32 * 8  # and the token ids
    naive = {peaks(plan(job(pp=2, m=m, schedule="naive")).templates[0])["activations"] for m in (1, 2, 4)}
    assert len(naive) == 1


@pytest.mark.parametrize("sharding", ["none", "ddp", "fsdp"])
@pytest.mark.parametrize("pp", [1, 2])
def test_gradients_are_one_running_buffer(sharding: str, pp: int) -> None:
    """Gradient memory does not grow with the microbatches."""
    # From three on there is a backward that is neither first nor last.
    terms = [peaks(plan(job(pp=pp, dp=2, m=m, sharding=sharding)).templates[0]) for m in (3, 6)]
    assert terms[0]["gradients"] == terms[1]["gradients"]
    assert terms[0]["buffers"] == terms[1]["buffers"]


@pytest.mark.parametrize(
    ("order", "dp_group", "next_of_0"), [("tp-cp-pp-dp", (0, 2, 4), 1), ("tp-cp-dp-pp", (0, 1, 2), 3)]
)
def test_groups_and_peers_follow_the_mesh(order: str, dp_group: tuple[int, ...], next_of_0: int) -> None:
    program = plan(job(pp=2, dp=3, layout=Layout(pp=2, dp_shard=3, order=order)))
    first = program.classes[0]
    assert tuple(program.groups[first.groups["dp"]].ranks) == dp_group
    assert first.peers == {"next": next_of_0}


def test_a_tied_matrix_on_two_stages_sums_its_gradients() -> None:
    """First and last stage hold a copy; their shards meet in an all_reduce over pp before the update."""
    program = plan(job(model=replace(TINY, tied_embeddings=True), pp=3, dp=2))
    for template, has in zip(program.templates, (True, False, True), strict=True):
        tied = [op for op in template.ops if op.name == "tied.all_reduce"]
        assert bool(tied) == has
        if has:
            assert isinstance(tied[0].work, Collective)
            assert tied[0].work.bytes == 1000 * 64 * 4 // 2
            assert tied[0].name in before(
                template, "embedding.optimizer" if template.stage == 0 else "head.optimizer"
            )
    tied_group = program.classes[0].groups["tied"]
    assert tuple(program.groups[tied_group].ranks) == (0, 2)


# DDP


def test_llama2_7b_has_226_buckets() -> None:
    """Every matrix exceeds 25 MiB, so each closes a bucket: 7 x 32, the head, the embedding."""
    model = MODELS["llama2-7b"]
    backward = [2 * p.count for p in reversed(tensors(model))]
    assert len(buckets(backward, 2**20, 25 * 2**20)) == 226
    (template,) = plan(job(model=model, dp=8, sharding="ddp", seq_len=4096)).templates
    reduces = collectives(template, "all_reduce")
    assert len(reduces) == 226
    assert moved(template, "all_reduce") == 2 * model.parameters
    # Last layers first: the head is alone in the first bucket, the embedding closes the last.
    first, last = reduces[0].work, reduces[-1].work
    assert isinstance(first, Collective)
    assert isinstance(last, Collective)
    assert first.bytes == 2 * 32000 * 4096
    assert last.bytes >= 2 * 32000 * 4096


@given(st.lists(st.integers(1, 100), min_size=1), st.integers(1, 50), st.integers(1, 120))
def test_buckets_cover_in_order_and_close_at_the_cap(sizes: list[int], first: int, cap: int) -> None:
    out = buckets(sizes, first, cap)
    assert [i for bucket in out for i in bucket] == list(range(len(sizes)))
    for number, bucket in enumerate(out):
        limit = cap if number else first
        assert sum(sizes[i] for i in bucket[:-1]) < limit
        assert number == len(out) - 1 or sum(sizes[i] for i in bucket) >= limit


def test_a_bucket_waits_only_for_its_own_gradients() -> None:
    """Reduced in the last backward only, each as soon as its last gradient is there; the update waits."""
    (template,) = plan(job(dp=2, m=2, sharding="ddp", bucket_bytes=20000, first_bucket_bytes=500)).templates
    reduces = collectives(template, "all_reduce")
    assert len(reduces) > 6
    for op in reduces:
        (cause,) = op.waits
        assert template.ops[cause].microbatch == 1
        assert template.ops[cause].phase in ("W", "B")
        assert template.ops.index(op) <= cause + 2  # issued at once
    assert {op.name for op in reduces} <= before(template, "embedding.optimizer")
    assert moved(template, "all_reduce") == 2 * TINY.parameters


def test_none_reduces_once_after_backward() -> None:
    (template,) = plan(job(dp=2, m=2, sharding="none")).templates
    (op,) = collectives(template, "all_reduce")
    assert moved(template, "all_reduce") == 2 * TINY.parameters
    assert template.ops[op.waits[0]].name == "embedding.embedding.W.mb1"


@pytest.mark.parametrize("sharding", ["none", "ddp", "fsdp"])
def test_one_rank_has_no_data_parallel_traffic(sharding: str) -> None:
    program = plan(job(pp=2, dp=1, sharding=sharding))
    assert not program.groups
    assert not any(isinstance(op.work, Collective) for t in program.templates for op in t.ops)


# FSDP

HEAD = 64 + 1000 * 64


@pytest.mark.parametrize(
    ("options", "gathered"),
    [
        ({"keep_last_layer": False}, 2 * TINY.parameters),
        ({"keep_last_layer": True}, 2 * TINY.parameters - HEAD),
        ({"reshard_after_forward": False}, TINY.parameters),
    ],
)
@pytest.mark.parametrize("m", [1, 3])
def test_fsdp_moves_weights_twice_and_gradients_once(options: dict[str, bool], gathered: int, m: int) -> None:
    """Exact bytes: 2-byte weights each way, 4-byte gradients once, for every microbatch."""
    spec = job(dp=4, m=m, schedule="1f1b", **options)
    (template,) = plan(spec).templates
    assert moved(template, "all_gather") == m * 2 * gathered
    assert moved(template, "reduce_scatter") == m * 4 * TINY.parameters
    layered = plan(replace(spec, data_parallel=replace(spec.data_parallel, ownership="layer"))).templates
    for owner in layered:
        assert moved(owner, "broadcast") == m * 2 * gathered
        assert moved(owner, "reduce") == m * 4 * TINY.parameters


def test_fsdp_in_a_pipeline_gathers_each_microbatch_or_once() -> None:
    """2 m gathers a layer if it reshards, one if it does not; gradients are reduced once."""
    resharded = plan(job(pp=2, dp=2, m=4, keep_last_layer=False)).templates[0]
    kept = plan(job(pp=2, dp=2, m=4, reshard_after_forward=False)).templates[0]
    units = 1 + 3
    assert len(collectives(resharded, "all_gather")) == 2 * 4 * units
    assert len(collectives(kept, "all_gather")) == units
    assert len(collectives(resharded, "reduce_scatter")) == len(collectives(kept, "reduce_scatter")) == units


def test_three_layers_are_in_play_in_backward() -> None:
    """While l computes, neither the unshard of l-1 nor the reduction of l+1 has to have begun or ended."""
    (template,) = plan(job(dp=4)).templates
    compute = before(template, "l3.down.I.mb0")
    assert "l3.unshard.B.mb0" in compute
    assert not compute & {"l2.unshard.B.mb0", "l4.reduce.mb0"}
    assert not before(template, "l2.unshard.B.mb0") & {"l3.down.I.mb0", "l4.reduce.mb0"}
    assert not before(template, "l4.reduce.mb0") & {"l3.down.I.mb0", "l2.unshard.B.mb0"}
    order = [op.name for op in template.ops]
    assert order.index("l2.unshard.B.mb0") < order.index("l3.down.I.mb0") < order.index("l3.reduce.mb0")


def test_copies_around_the_collectives_move_their_bytes() -> None:
    """FP32 shard to 2-byte input, gathered to unsharded, 2-byte gradients to FP32, one by one."""
    (template,) = plan(job(dp=4, m=2, schedule="1f1b")).templates
    n = TINY.layer_parameters
    sizes = {
        "l3.unshard_copy_in.F.mb0": n // 4 * (4 + 2),
        "l3.unshard_copy_out.F.mb0": n * (2 + 2),
        "l3.reduce_copy_in.mb0": n * (2 + 4),
        "l3.accumulate.mb1": n // 4 * (4 + 4 + 4),
    }
    for name, size in sizes.items():
        work = next(op.work for op in template.ops if op.name == name)
        assert isinstance(work, Kernel)
        assert work.hbm_bytes == size
    assert "l4.reduce.mb0" in before(template, "l3.reduce_copy_in.mb0")
    assert not any(op.name.startswith("l3.accumulate.mb0") for op in template.ops)


@pytest.mark.parametrize(("prefetch", "limited"), [(0, True), (1, True), (1, False), (2, False)])
def test_a_gather_waits_for_the_unit_before_its_prefetch(prefetch: int, limited: bool) -> None:
    (template,) = plan(job(dp=4, prefetch=prefetch, limit_all_gathers=limited)).templates
    ended = before(template, "l4.unshard.F.mb0")
    assert f"l{3 - prefetch}.add2.F.mb0" in ended
    assert f"l{4 - prefetch}.add2.F.mb0" not in ended


def test_backward_prefetch_post_gathers_after_the_reduction_and_only_in_backward() -> None:
    """Of l2 while l3 computes (pre), or once the gradients of l3 have been reduced (post)."""
    (pre,) = plan(job(dp=4, m=2)).templates
    (post,) = plan(job(dp=4, m=2, backward_prefetch="post")).templates
    for microbatch in ("mb0", "mb1"):
        assert f"l3.reduce.{microbatch}" in before(post, f"l2.unshard.B.{microbatch}")
        assert f"l3.norm1.B.{microbatch}" not in before(pre, f"l2.unshard.B.{microbatch}")
        forward = f"l2.unshard.F.{microbatch}"
        assert {n for n in before(pre, forward) if "norm" in n} == {
            n for n in before(post, forward) if "norm" in n
        }
    assert peaks(post)["buffers"] <= peaks(pre)["buffers"]


def test_unsharded_memory_does_not_grow_with_depth() -> None:
    """At most two units and a copy of one while they reshard; all of them if they do not."""
    deep = replace(TINY, layers=12)
    assert (
        peaks(plan(job(dp=4)).templates[0])["buffers"]
        == peaks(plan(job(dp=4, model=deep)).templates[0])["buffers"]
    )
    kept = [
        peaks(plan(job(dp=4, model=m, reshard_after_forward=False)).templates[0])["buffers"]
        for m in (TINY, deep)
    ]
    assert kept[1] - kept[0] == 6 * 2 * TINY.layer_parameters


@pytest.mark.parametrize(
    "options",
    [{}, {"ownership": "layer"}, {"sharding": "ddp", "bucket_bytes": 1000, "first_bucket_bytes": 1000}],
)
def test_the_optimizer_in_backward_follows_each_gradient(options: dict[str, object]) -> None:
    """Its stream is its own, it waits for its own unit's gradient alone, and it frees it."""
    program = plan(job(dp=2, optimizer_in_backward=True, **options))
    check(program)
    template = program.templates[1 if "ownership" in options else 0]
    updates = [op for op in template.ops if op.stream == "optimizer"]
    assert [op.layer for op in updates] == (
        [6, 4, 2, 0] if "ownership" in options else [6, 5, 4, 3, 2, 1, 0, -1]
    )
    assert not any("l1." in name and "B" in name for name in before(template, "l4.optimizer"))
    for op in updates:
        assert [template.buffers[b].name for b in op.frees] == [f"{op.name.split('.')[0]}.gradients"]
    assert not any(buffer.persistent and buffer.term == "gradients" for buffer in template.buffers)


def test_layers_have_owners() -> None:
    """Unit u is rank u mod dp's: it alone keeps the state and updates, everyone takes part in its traffic."""
    program = plan(job(dp=3, ownership="layer"))
    names = ["embedding", *(f"l{layer}" for layer in range(6)), "head"]
    for owner, template in enumerate(program.templates):
        updated = [op.name.removesuffix(".optimizer") for op in template.ops if op.phase == "O"]
        assert updated == names[owner::3]
        roots = [op.work.root for op in collectives(template, "reduce") if isinstance(op.work, Collective)]
        assert roots == [u % 3 for u in reversed(range(8))]
    spare = plan(job(dp=12, ownership="layer"))
    assert len(spare.templates) == 9  # eight owners, and all who own nothing share one
    assert sum(b.bytes for b in spare.templates[-1].buffers if b.persistent and b.term != "reserved") == 0


# Memory


def test_the_columns_of_the_zero_table() -> None:
    """ZeRO's: 7.5 billion parameters, 64 ranks, 16 B each: 120 GB replicated, 1.9 GB fully sharded."""
    replicated = state_bytes(job(dp=64, sharding="ddp"))
    sharded = state_bytes(job(dp=64, sharding="fsdp"))
    assert (replicated.weights, replicated.gradients, replicated.optimizer) == (2, 2, 12)
    assert (sharded.weights, sharded.gradients, sharded.optimizer) == (4, 4, 8)
    assert 7.5 * (replicated.weights + replicated.gradients + replicated.optimizer) == 120
    assert 7.5 * (sharded.weights + sharded.gradients + sharded.optimizer) / 64 == pytest.approx(1.875)
    in_fp32 = state_bytes(job(sharding="ddp", precision="fp32"))
    assert (in_fp32.weights, in_fp32.gradients, in_fp32.optimizer) == (4, 4, 8)


def test_the_terms_of_a_real_model() -> None:
    """Llama 3 8B over 64 ranks: state is 1/64, unsharded units are two layers' worth and a copy."""
    model = MODELS["llama3-8b"]
    most = peaks(plan(job(model=model, dp=64, seq_len=8192)).templates[0])
    assert most["weights"] == most["gradients"] == -(-4 * model.parameters // 64)
    assert most["optimizer"] == 2 * most["weights"]
    # s b h (12 + 4 k/a + 6 f/h) = 34 s b h a layer, then logits, 6 bytes each.
    layers, logits = 32 * 34 * 8192 * 4096, 6 * 8192 * model.vocab
    assert layers < most["activations"] < layers + 1.5 * logits
    head = 2 * model.head_parameters
    assert 2 * head < most["buffers"] < 5 * head


# The check itself


def mutate(program: Program, template: int, name: str, **fields: object) -> Program:
    """The program with one op changed."""
    old = program.templates[template]
    ops = tuple(replace(op, **fields) if op.name == name else op for op in old.ops)
    assert ops != old.ops
    new = Template(old.name, old.stage, ops, old.buffers)
    return replace(
        program, templates=tuple(new if t == template else x for t, x in enumerate(program.templates))
    )


def find(program: Program, template: int, name: str) -> tuple[int, Op]:
    return next((i, op) for i, op in enumerate(program.templates[template].ops) if op.name == name)


def test_use_before_allocation_is_found() -> None:
    program = plan(job(pp=2))
    (receive, _), (_, op) = find(program, 1, "1RECV_F0"), find(program, 1, "l3.norm1.F.mb0")
    others = tuple(wait for wait in op.waits if wait != receive)
    with pytest.raises(ProgramError, match=r"l3\.norm1\.F\.mb0 may use it before 1RECV_F0 allocates it"):
        check(mutate(program, 1, op.name, waits=others))


def test_use_after_free_is_found() -> None:
    """A reshard that comes too early, in the middle of the layer's forward."""
    program = plan(job(dp=2))
    (_, early), (_, late) = find(program, 0, "l3.q.F.mb0"), find(program, 0, "l3.add2.F.mb0")
    buffers = program.templates[0].buffers
    (unsharded,) = (b for b in late.frees if buffers[b].name == "l3.unsharded.F.mb0")
    moved_up = mutate(program, 0, late.name, frees=tuple(b for b in late.frees if b != unsharded))
    moved_up = mutate(moved_up, 0, early.name, frees=(*early.frees, unsharded))
    with pytest.raises(
        ProgramError, match=r"unsharded\.F\.mb0: l3\.k\.F\.mb0 may use it after l3\.q\.F\.mb0 has freed"
    ):
        check(moved_up)


def test_lost_frees_and_double_frees_are_found() -> None:
    program = plan(job())
    _, op = find(program, 0, "l3.add2.F.mb0")
    with pytest.raises(
        ProgramError, match=r"l3\.mlp_out\.mb0 is allocated by l3\.down\.F\.mb0 but never freed"
    ):
        check(mutate(program, 0, op.name, frees=()))
    _, other = find(program, 0, "l4.add2.F.mb0")
    with pytest.raises(ProgramError, match=r"freed twice, by l3\.add2\.F\.mb0 and l4\.add2\.F\.mb0"):
        check(mutate(program, 0, other.name, frees=(*other.frees, *op.frees)))
    first, *_ = (i for i, b in enumerate(program.templates[0].buffers) if b.persistent)
    with pytest.raises(ProgramError, match=r"persistent buffer reserved is freed by l3\.add2\.F\.mb0"):
        check(mutate(program, 0, op.name, frees=(*op.frees, first)))


def test_a_circle_of_waits_is_named() -> None:
    program = plan(job(pp=2))
    later, _ = find(program, 0, "0SEND_F0")
    _, op = find(program, 0, "l2.norm1.F.mb0")
    with pytest.raises(ProgramError, match=r"wait for each other: .*l2\.norm1\.F\.mb0.*0SEND_F0"):
        check(mutate(program, 0, op.name, waits=(*op.waits, later)))
    with pytest.raises(ProgramError, match="which cannot be"):
        check(mutate(program, 0, op.name, waits=(10**6,)))


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"bytes": 1}, r"0SEND_F0 and 1RECV_F0 \(tag F0\) differ: 4096 and 1 bytes"),
        ({"tag": "lost"}, r"0SEND_F0 has no recv with tag F0"),
        ({"duration_ps": 5}, "fixed times None and 5"),
        ({"kind": "send"}, "0SEND_F0 has no recv"),
        ({"peer": "nobody"}, "has no peer named nobody"),
    ],
)
def test_ends_of_a_transfer_must_agree(fields: dict[str, object], says: str) -> None:
    program = plan(job(pp=2))
    _, op = find(program, 1, "1RECV_F0")
    assert isinstance(op.work, Transfer)
    with pytest.raises(ProgramError, match=says):
        check(mutate(program, 1, op.name, work=replace(op.work, **fields)))


def test_receives_in_another_order_than_the_sends_are_a_deadlock() -> None:
    program = plan(job(pp=2, m=2))
    (_, a), (_, b) = find(program, 1, "1RECV_F0"), find(program, 1, "1RECV_F1")
    swapped = mutate(mutate(program, 1, a.name, work=b.work), 1, b.name, work=a.work)
    with pytest.raises(ProgramError, match="the ranks would wait for each other"):
        check(swapped)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        (
            {"bytes": 8},
            r"stage0\.owner0 does l3\.reduce\.mb0 .* but stage0\.owner1 does l3\.reduce\.mb0 \(reduce of 8",
        ),
        ({"root": 1}, r"root 0\), but .* root 1\)"),
        ({"group": "tp"}, "no group named tp"),
    ],
)
def test_members_of_a_collective_must_agree(fields: dict[str, object], says: str) -> None:
    program = plan(job(dp=2, ownership="layer"))
    check(program)
    _, op = find(program, 1, "l3.reduce.mb0")
    assert isinstance(op.work, Collective)
    assert op.work.root == 0
    with pytest.raises(ProgramError, match=says):
        check(mutate(program, 1, op.name, work=replace(op.work, **fields)))


def test_a_member_that_stays_away_is_found() -> None:
    program = plan(job(dp=2, ownership="layer"))
    with pytest.raises(
        ProgramError, match=r"stage0\.owner0 does head\.reduce\.mb0 .*, but stage0\.owner1 does"
    ):
        check(mutate(program, 1, "head.reduce.mb0", work=None))


def test_classes_must_cover_the_ranks() -> None:
    program = plan(job(dp=2), folded=False)
    with pytest.raises(ProgramError, match="are not ranks 0 to 0, once each"):
        check(replace(program, classes=program.classes[1:]))


# Text


def test_a_program_prints_on_a_screen() -> None:
    program = plan(job(pp=4, dp=2, m=4))
    text = show(program, rank=2)
    assert "pp   2  .   .   2F0 2F1 2F2 2F3" in text
    assert "2SEND_F0" in text
    assert "after l3.add2.F.mb0" in text
    assert "rank 2 (stage2, next is rank 3, prev is rank 1)" in text
    assert len(text.splitlines()) < 100
    whole = show(program, rank=2, full=True)
    assert all(op.name in whole for op in program.templates[2].ops)
    with pytest.raises(ValueError, match="rank 8"):
        show(program, rank=8)


def test_a_buffer_is_a_plain_value() -> None:
    """The same job plans to an equal Program: nothing in it depends on identity or hashing."""
    assert plan(job(pp=2, dp=2, m=2)) == plan(job(pp=2, dp=2, m=2))
    assert isinstance(plan(job()).templates[0].buffers[0], Buffer)


# Played


@pytest.mark.parametrize("p", [1, 2, 5, 8])
@pytest.mark.parametrize("m", [1, 3, 32])
@pytest.mark.parametrize("transfer", [0.0, 0.25])
def test_gpipe_takes_its_closed_form(p: int, m: int, transfer: float) -> None:
    """(m + p - 1)(F + B); a transfer of t adds 2 t to all but the first and the last of those slots."""
    times = FixedTimes(forward=1.0, input_gradient=0.5, weight_gradient=1.5, transfer=transfer)
    model = replace(TINY, layers=8)
    end = run(plan(job(model=model, pp=p, m=m, fixed_times=times))).end_ps
    hops = 0 if p == 1 else 2 * (m + p - 2) * transfer
    assert end == ((m + p - 1) * 3 + hops) * PS_PER_SECOND


def test_naive_keeps_one_stage_busy() -> None:
    """Eight stages, equal unit times: each works an eighth of the time."""
    times = FixedTimes(forward=1.0, backward=1.0)
    program = plan(job(model=replace(TINY, layers=8), pp=8, m=3, schedule="naive", fixed_times=times))
    assert run(program).end_ps == 8 * 3 * 2 * PS_PER_SECOND


def test_nobody_sends_to_himself() -> None:
    program = plan(job(pp=2), folded=False)
    first = program.classes[0]
    broken = replace(first, peers=first.peers | {"next": 0})
    with pytest.raises(ProgramError, match="rank 0: its peer next is itself"):
        check(replace(program, classes=(broken, *program.classes[1:])))


@pytest.mark.parametrize("folded", [True, False])
@pytest.mark.parametrize("rank", [-1, 4])
def test_a_rank_that_is_not_there_has_no_seat(folded: bool, rank: int) -> None:
    with pytest.raises(IndexError, match=f"rank {rank} is not in the program: it has ranks 0..3"):
        plan(job(pp=2, dp=2), folded).seat(rank)


@pytest.mark.parametrize("seed", [20004, 20519, *range(20020, 20060)])
def test_random_programs_are_found_valid_folded_or_not(seed: int) -> None:
    """Several names may lead to one rank, and to ranks of one class."""
    program = random_program(seed)
    check(program)
    check(fold(program))
