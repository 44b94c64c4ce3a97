"""Blocks: FLOPs, bytes, liveness and gradients of the kernels of an embedding, a layer and a head."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emulator.plan.blocks import embedding_block, head_block, layer_block, optimizer_kernel
from emulator.plan.kernels import Block, BlockOp
from emulator.spec.model import MODELS, Model, layer_tensors, model, tensors
from emulator.spec.units import GIB

PRECISIONS = ("fp32", "tf32", "fp16", "bf16", "fp8")
PRODUCTS = {"gemm", "attention"}


def product_flops(ops: tuple[BlockOp, ...]) -> int:
    return sum(op.kernel.flops for op in ops if op.kernel.kind in PRODUCTS)


def one(block: Block, name: str) -> BlockOp:
    (op,) = [op for op in block.forward + block.backward if op.name == name]
    return op


def blocks(m: Model, b: int, s: int, precision: str) -> list[Block]:
    return [make(m, b, s, precision) for make in (embedding_block, layer_block, head_block)]


@st.composite
def models(draw: st.DrawFn) -> Model:
    """Any dense decoder that a Model can describe, small."""
    kv_heads, groups = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    flags = {
        field: draw(st.booleans())
        for field in ("rotary", "attention_bias", "projection_bias", "mlp_bias", "qk_norm", "tied_embeddings")
    }
    choices: dict[str, Any] = {
        "activation": draw(st.sampled_from(["swiglu", "geglu", "gelu", "relu"])),
        "norm": draw(st.sampled_from(["rmsnorm", "layernorm"])),
    }
    return Model(
        name="m",
        layers=draw(st.integers(1, 3)),
        hidden=draw(st.integers(1, 64)),
        ffn_hidden=draw(st.integers(1, 64)),
        heads=kv_heads * groups,
        kv_heads=kv_heads,
        head_dim=2 * draw(st.integers(1, 8)),
        vocab=draw(st.integers(1, 99)),
        learned_positions=draw(st.integers(0, 64)),
        **flags,
        **choices,
    )


@given(models(), st.integers(1, 3), st.integers(1, 40), st.sampled_from(PRECISIONS))
def test_dataflow_holds(m: Model, b: int, s: int, precision: str) -> None:
    """A tensor is written once, before it is read; y and dx come out; nothing is declared and unused."""
    for block in blocks(m, b, s, precision):
        known = {"x", "dy"} if block.name != "head" else {"x"}
        for op in block.forward + block.backward:
            assert set(op.reads) <= known, (block.name, op.name)
            assert not set(op.writes) & known, (block.name, op.name)
            known |= set(op.writes)
            assert op.kernel.hbm_bytes > 0
            assert op.kernel.flops >= 0
        assert known == set(block.tensors)
        assert "y" in {t for op in block.forward for t in op.writes}
        assert ("dx" in known) is (block.name != "embedding")
        assert "dy" not in {t for op in block.forward for t in op.reads}
        assert all(size > 0 for size in block.tensors.values())


@given(models(), st.sampled_from(PRECISIONS))
def test_every_parameter_gets_its_gradient_once(m: Model, precision: str) -> None:
    """Over embedding, layer and head, the parameters whose gradient completes are the model's, each once."""
    embedding, layer, head = (
        Counter(name for op in block.backward for name in op.gradients)
        for block in blocks(m, 1, 8, precision)
    )
    assert layer == Counter(name for name, _ in layer_tensors(m))
    assert embedding == Counter(t.name for t in tensors(m) if t.layer == -1)
    assert head == Counter(t.name for t in tensors(m) if t.layer == m.layers)


@given(models(), st.integers(1, 3), st.integers(1, 40), st.sampled_from(PRECISIONS))
def test_flops_sum_to_the_models(m: Model, b: int, s: int, precision: str) -> None:
    """Forward is the model's own count; backward twice that, and half an attention more for QK^T again."""
    _, layer, head = blocks(m, b, s, precision)
    attention = one(layer, "attention").kernel.flops
    assert m.layers * product_flops(layer.forward) + product_flops(head.forward) == b * s * (
        m.forward_flops_per_token(s)
    )
    assert product_flops(layer.backward) == 2 * product_flops(layer.forward) + attention // 2
    assert product_flops(head.backward) == 2 * product_flops(head.forward)


@given(models(), st.sampled_from(PRECISIONS))
def test_weight_gradients_can_wait(m: Model, precision: str) -> None:
    """What leads to dx never reads what a weight-gradient kernel writes, so W may run at any later time."""
    for block in blocks(m, 1, 8, precision):
        late = {t for op in block.backward if op.phase == "W" for t in op.writes}
        for op in block.backward:
            assert op.phase in {"I", "W", "B"}
            if op.phase != "W":
                assert not late & set(op.reads)
        assert all(op.phase == "F" for op in block.forward)


def saved_per_token(m: Model, extras: bool) -> float:
    """Bytes saved per token and hidden feature, with or without the FP32 statistics."""
    b, s = 2, 4096
    saved = layer_block(m, b, s, "bf16").saved
    return sum(
        size for name, size in saved.items() if extras or not (name.endswith("_stats") or name == "lse")
    ) / (b * s * m.hidden)


@pytest.mark.parametrize(
    ("name", "bytes_per_sbh"),
    [("llama3-8b", 34.0), ("llama3-405b", 31.75), ("llama2-7b", 12 + 4 + 6 * 11008 / 4096)],
)
def test_saved_activations_of_llama(name: str, bytes_per_sbh: float) -> None:
    """Tensors that fused kernels keep: s b h (12 + 4 k/a + 6 f/h)."""
    m = model(name)
    assert saved_per_token(m, extras=False) == bytes_per_sbh
    assert 12 + 4 * m.kv_heads / m.heads + 6 * m.ffn_hidden / m.hidden == bytes_per_sbh


def test_saved_statistics_are_small_and_named() -> None:
    """Beside the formula: 4 a bytes a token of log-sum-exp, and 4 of each RMSNorm."""
    m, tokens = model("llama3-8b"), 8192
    saved = layer_block(m, 1, tokens, "bf16").saved
    assert {n: v for n, v in saved.items() if n == "lse" or n.endswith("_stats")} == {
        "lse": 4 * m.heads * tokens,
        "norm1_stats": 4 * tokens,
        "norm2_stats": 4 * tokens,
    }


def test_saved_activations_of_gpt() -> None:
    """Korthikanti's 34 s b h counts two dropout masks of one byte an element; nothing is dropped here: 32."""
    assert saved_per_token(model("gpt3-175b"), extras=False) == 34 - 2 * 1


def test_relu_keeps_only_its_output() -> None:
    """The derivative follows from the output that the down projection keeps: 8 s b h less than GELU."""
    shape: dict[str, Any] = {
        "name": "m", "layers": 1, "hidden": 64, "ffn_hidden": 256, "heads": 4, "kv_heads": 4, "vocab": 9,
    }  # fmt: skip
    gelu, relu = (layer_block(Model(activation=act, **shape), 1, 16, "bf16") for act in ("gelu", "relu"))
    assert gelu.saved_bytes - relu.saved_bytes == 8 * 16 * 64


@pytest.mark.parametrize("name", MODELS)
def test_kernel_detail(name: str) -> None:
    """At least 9 kernels forward and 18 backward in a layer; a product for every projection, three passes."""
    m = model(name)
    layer = layer_block(m, 1, 2048, "bf16")
    assert len(layer.forward) >= 9
    assert len(layer.backward) >= 18
    projections = 7 if m.gated else 6
    assert sum(op.kernel.kind == "gemm" for op in layer.forward) == projections
    assert sum(op.kernel.kind == "gemm" for op in layer.backward) == 2 * projections
    names = [op.name for op in layer.forward + layer.backward]
    assert len(names) == len(set(names))


def test_gemm_by_hand() -> None:
    """Gate of Llama 3 8B on 8,192 tokens: 2 m n k FLOPs; operands and product once, two bytes each."""
    layer = layer_block(model("llama3-8b"), 1, 8192, "bf16")
    m, n, k = 8192, 14336, 4096
    both = (m * k + n * k + m * n) * 2
    for name, shape in (
        ("gate", (1, m, n, k)),
        ("gate_I", (1, m, k, n)),
        ("gate_W", (1, n, k, m)),
    ):
        kernel = one(layer, name).kernel
        assert (kernel.shape, kernel.flops, kernel.hbm_bytes) == (shape, 2 * m * n * k, both)
        assert (kernel.unit, kernel.precision) == ("tensor", "bf16")


def test_attention_by_hand() -> None:
    """Causal: 2 b s^2 h FLOPs forward, 5 backward; q, k, v, o and gradients once, 4 bytes of lse."""
    b, s, h, kv, heads = 2, 4096, 4096, 1024, 32
    layer = layer_block(model("llama3-8b"), b, s, "bf16")
    forward, backward = one(layer, "attention").kernel, one(layer, "attention_backward").kernel
    assert forward.flops == 2 * b * s * s * h
    assert backward.flops == 5 * b * s * s * h
    assert forward.shape == backward.shape == (b, heads, 8, s, s, 128, 1)
    assert forward.hbm_bytes == b * s * ((2 * h + 2 * kv) * 2 + 4 * heads)
    assert backward.hbm_bytes == b * s * ((2 * h + 2 * kv) * 2 + (2 * h + 2 * kv) * 2 + 4 * heads)


def test_elementwise_by_hand() -> None:
    """A residual add reads two and writes one; SwiGLU the same of ffn_hidden, its backward 3 and 2."""
    tokens, h, f = 1024, 4096, 14336
    layer = layer_block(model("llama3-8b"), 1, tokens, "bf16")
    assert one(layer, "add1").kernel.hbm_bytes == 3 * tokens * h * 2
    assert one(layer, "act_mul").kernel.hbm_bytes == 3 * tokens * f * 2
    assert one(layer, "act_mul_backward").kernel.hbm_bytes == 5 * tokens * f * 2
    assert one(layer, "norm1").kernel.hbm_bytes == 2 * tokens * h * 2 + 4 * tokens + 2 * h
    assert one(layer, "norm1_backward").kernel.hbm_bytes == 3 * tokens * h * 2 + 4 * tokens + 2 * 2 * h


def test_precisions() -> None:
    """fp32 computes on the vector units; fp32 and tf32 store four bytes; fp8 halves what products read."""
    m, tokens = model("llama3-8b"), 256
    by = {p: layer_block(m, 1, tokens, p) for p in PRECISIONS}
    assert {p: one(b, "gate").kernel.unit for p, b in by.items()} == {
        "fp32": "vector", "tf32": "tensor", "fp16": "tensor", "bf16": "tensor", "fp8": "tensor",
    }  # fmt: skip
    assert {p: b.tensors["x"] // (tokens * m.hidden) for p, b in by.items()} == {
        "fp32": 4, "tf32": 4, "fp16": 2, "bf16": 2, "fp8": 2,
    }  # fmt: skip
    assert one(by["fp32"], "attention").kernel.unit == "vector"
    assert one(by["fp32"], "gate").kernel.hbm_bytes == 2 * one(by["bf16"], "gate").kernel.hbm_bytes
    operands = tokens * 4096 + 14336 * 4096
    assert one(by["bf16"], "gate").kernel.hbm_bytes - one(by["fp8"], "gate").kernel.hbm_bytes == operands
    assert one(by["fp8"], "attention").kernel.precision == "bf16"
    assert by["fp8"].saved == by["bf16"].saved


def test_fp8_casts_each_operand_once_a_direction() -> None:
    """Forward: 4 inputs (n1, attn, n2, p) and 7 weights. Backward: those, and 7 output gradients."""
    layer = layer_block(model("llama3-8b"), 1, 64, "fp8")
    assert sum(op.name.startswith("cast_") for op in layer.forward) == 4 + 7
    assert sum(op.name.startswith("cast_") for op in layer.backward) == 4 + 7 + 7
    cast = one(layer, "cast_n1_fp8")
    assert cast.kernel.hbm_bytes == 5 * 64 * 4096
    assert {op.kernel.precision for op in head_block(model("llama3-8b"), 1, 64, "fp8").forward} == {"bf16"}


def peak_bytes(block: Block) -> int:
    """Largest sum of live tensors, each alive from its writer to its last reader."""
    ops = block.forward + block.backward
    last = {t: i for i, op in enumerate(ops) for t in op.reads + op.writes}
    alive, peak = {"x"}, 0
    for i, op in enumerate(ops):
        alive |= set(op.writes)
        peak = max(peak, sum(block.tensors[t] for t in alive))
        alive -= {t for t in alive if last[t] == i}
    return peak


def test_logits_take_six_bytes() -> None:
    """16-bit logits and their FP32 copy; 15.66 GiB for the copy at 32,768 tokens of Llama 3 8B (stas00)."""
    m, s = model("llama3-8b"), 32_768
    head = head_block(m, 1, s, "bf16")
    assert round(head.tensors["logits_fp32"] / GIB, 2) == 15.66
    hidden = s * m.hidden * 2
    assert peak_bytes(head) - 6 * s * m.vocab == pytest.approx(2 * hidden, rel=0.01)


def test_loss_is_where_forward_turns() -> None:
    """The head's backward begins with the loss and needs no dy; in fp32 there is nothing to copy."""
    head = head_block(model("llama3-8b"), 1, 128, "bf16")
    assert head.forward[-1].writes == ("lse", "y")
    assert head.backward[0].name == "loss_backward"
    assert head.backward[-1].writes == ("dx",)
    assert "logits_fp32" not in head_block(model("llama3-8b"), 1, 128, "fp32").tensors


def test_embedding_bytes() -> None:
    """Gather: ids, rows read, rows written. Gradient: zero the table, read dy, read and write rows."""
    m, tokens = model("llama3-8b"), 512
    block = embedding_block(m, 1, tokens, "bf16")
    row = 2 * m.hidden
    assert one(block, "embedding").kernel.hbm_bytes == tokens * (8 + 2 * row)
    assert one(block, "embedding_W").kernel.hbm_bytes == m.vocab * row + tokens * (8 + 3 * row)


@pytest.mark.parametrize(
    ("kwargs", "bytes_per_parameter"),
    [
        ({}, 28),
        ({"weight_bytes": 2, "master_bytes": 4}, 30),
        ({"weight_bytes": 2, "gradient_bytes": 2, "moment_bytes": 2}, 14),
        ({"weight_bytes": 2, "gradient_bytes": 2, "master_bytes": 4}, 28),
    ],
)
def test_optimizer_bytes(kwargs: dict[str, int], bytes_per_parameter: int) -> None:
    """FP32 shards: read g, m, v, w and write m, v, w. With a master, the working weight is written beside."""
    kernel = optimizer_kernel(1000, **kwargs)
    assert kernel.hbm_bytes == 1000 * bytes_per_parameter
    assert kernel.unit == "vector"


def test_blocks_are_shared() -> None:
    """All layers of a job share one block, so planning does not grow with the depth."""
    m = model("llama3-8b")
    assert layer_block(m, 1, 8192, "bf16") is layer_block(m, 1, 8192, "bf16")
