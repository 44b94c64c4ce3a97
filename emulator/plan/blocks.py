"""The kernels of a transformer's units, as a little dataflow from which memory follows by liveness.

A block is one unit (embedding, layer, head) on one microbatch. FLOPs of its matrix products and of attention
sum to what Megatron counts (`spec.model.Model.forward_flops_per_token`). Tensors are those that fused kernels
keep for backward: s b h (12 + 4 k/a + 6 f/h) bytes for a Llama layer of 16-bit activations. Bytes are HBM
traffic of kernels that pass once over what they touch; flash attention keeps the scores on chip.
"""

from functools import lru_cache

from emulator.plan.kernels import (
    GELU_BACKWARD_FLOPS,
    GELU_FLOPS,
    RELU_FLOPS,
    ROPE_FLOPS,
    SILU_MUL_BACKWARD_FLOPS,
    SILU_MUL_FLOPS,
    Block,
    BlockOp,
    Linear,
    Sketch,
)
from emulator.plan.program import Kernel
from emulator.spec.model import Model

TOKEN_BYTES = 8
"""A token id or label: PyTorch's int64."""

_ADAM_FLOPS = 16
"""AdamW per parameter: decay 2, m 3, v 4, bias corrections 2, sqrt, + eps, divide, times rate, minus."""


@lru_cache(maxsize=256)
def embedding_block(model: Model, micro_batch: int, seq_len: int, precision: str) -> Block:
    """Return the token embedding (and learned positions): x are token ids, there is no dx.

    Forward gathers one row of the table per token. Backward writes a dense gradient, as PyTorch does: zeros
    for the whole table, then each token's row is read, added to and written. With a tied head this is where
    the shared matrix's gradient becomes complete.
    """
    d = Sketch(model, micro_batch, seq_len, precision)
    h = model.hidden
    d.tensors["x"] = d.tokens * TOKEN_BYTES
    row = d.tokens * h * d.element
    out = d.activation("tok" if model.learned_positions else "y", h)
    d.activation("dy", h)
    gather = Kernel(kind="embedding", precision=d.stored, hbm_bytes=d.tensors["x"] + 2 * row)
    d.emit(BlockOp(name="embedding", kernel=gather, phase="F", reads=("x",), writes=(out,)))
    if model.learned_positions:
        d.activation("y", h)
        positions = d.seq_len * h * d.element
        d.stream("add_positions", "F", ("tok",), ("y",), d.tokens * h, extra_bytes=positions)
        d.stream(
            "positions_W", "W", ("dy",), (), d.tokens * h,
            extra_bytes=model.learned_positions * h * d.element,
            gradients=("model.embed_positions.weight",),
        )  # fmt: skip
    scatter = Kernel(
        kind="embedding",
        flops=d.tokens * h,
        precision=d.stored,
        hbm_bytes=d.tensors["x"] + model.vocab * h * d.element + 3 * row,
    )
    d.emit(
        BlockOp(
            name="embedding_W",
            kernel=scatter,
            phase="W",
            reads=("dy", "x"),
            gradients=("model.embed_tokens.weight",),
        )
    )
    return d.block("embedding")


@lru_cache(maxsize=256)
def layer_block(model: Model, micro_batch: int, seq_len: int, precision: str) -> Block:
    """Return one transformer layer: pre-norm attention and MLP, each with a residual.

    Gradients are named without the layer's prefix (`spec.model.layer_prefix`), so that all layers share it.
    """
    d = Sketch(model, micro_batch, seq_len, precision)
    for name in ("x", "dy"):
        d.activation(name, model.hidden)
    _attention_forward(d)
    _mlp_forward(d)
    _mlp_backward(d)
    _attention_backward(d)
    return d.block("layer")


@lru_cache(maxsize=256)
def head_block(model: Model, micro_batch: int, seq_len: int, precision: str) -> Block:
    """Return final norm, LM head and loss, where forward turns into backward: y is the loss, there is no dy.

    Logits are written in the activations' precision and copied to FP32 for the loss (6 bytes a logit while
    both live); the loss's backward writes the gradient in the activations' precision. The head stays in 16
    bits when the layers run in fp8, as torchtitan filters it out.
    """
    d = Sketch(model, micro_batch, seq_len, "bf16" if precision == "fp8" else precision)
    h, vocab = model.hidden, model.vocab
    lin = Linear("lm_head", "lm_head", h, vocab, complete=not model.tied_embeddings)
    d.activation("x", h)
    d.norm("norm", "x", "n", width=h)
    d.linear(lin, "n", "logits")
    logits = d.tokens * vocab
    scores = "logits"
    if d.element == 2:
        scores = d.statistic("logits_fp32", vocab)
        d.stream("logits_to_fp32", "F", ("logits",), (scores,), 0)
    d.tensors["y"] = 4
    lse = d.statistic("lse", 1)
    labels = d.tokens * TOKEN_BYTES
    # Per logit: max, minus max, exp, sum; backward: minus lse, exp, minus the label's one, times 1/tokens.
    d.stream("loss", "F", (scores,), (lse, "y"), 4 * logits, kind="loss", extra_bytes=labels)
    d.activation("dlogits", vocab)
    d.stream("loss_backward", "I", (scores, lse), ("dlogits",), 4 * logits, kind="loss", extra_bytes=labels)
    d.linear_backward(lin, "dlogits", "n", "dn")
    d.norm_backward("norm", "model.norm", "dn", "x", "dx", width=h)
    return d.block("head")


def optimizer_kernel(
    parameters: int,
    weight_bytes: int = 4,
    *,
    gradient_bytes: int = 4,
    moment_bytes: int = 4,
    master_bytes: int = 0,
) -> Kernel:
    """Return Adam's elementwise pass over `parameters` weights; the arguments are bytes per parameter.

    It reads gradient, m, v and the weight and writes m, v and the weight. With an FP32 master copy it is that
    which is read and written, and the working weight is written beside it. Bytes per parameter:
    FSDP over FP32 shards (4, gradient 4, moments 4): 4 + 4x4 + 2x4 = 28.
    Megatron's bf16 with FP32 main gradients and master (weight 2, master 4): 4 + 4x4 + 2x4 + 2 = 30.
    All at 16 bits, the course notes' accounting (2, 2, 2): 2 + 4x2 + 2x2 = 14.
    """
    weight = 2 * master_bytes + weight_bytes if master_bytes else 2 * weight_bytes
    per_parameter = gradient_bytes + 4 * moment_bytes + weight
    return Kernel(
        kind="optimizer",
        flops=_ADAM_FLOPS * parameters,
        unit="vector",
        precision="fp32",
        hbm_bytes=per_parameter * parameters,
    )


def _attention_linears(model: Model) -> tuple[Linear, Linear, Linear, Linear]:
    """Return q, k, v and o."""
    h, q, kv = model.hidden, model.q_width, model.kv_width
    return (
        Linear("q", "self_attn.q_proj", h, q, model.attention_bias),
        Linear("k", "self_attn.k_proj", h, kv, model.attention_bias),
        Linear("v", "self_attn.v_proj", h, kv, model.attention_bias),
        Linear("o", "self_attn.o_proj", q, h, model.projection_bias),
    )


def _mlp_linears(model: Model) -> tuple[Linear, Linear, Linear]:
    """Return gate, up and down."""
    h, f = model.hidden, model.ffn_hidden
    return (
        Linear("gate", "mlp.gate_proj", h, f, model.mlp_bias),
        Linear("up", "mlp.up_proj", h, f, model.mlp_bias),
        Linear("down", "mlp.down_proj", f, h, model.mlp_bias),
    )


def _qk_names(model: Model) -> tuple[tuple[str, str], tuple[str, str]]:
    """Return names of q and k as projected, and as the rotation reads them."""
    if not model.rotary and not model.qk_norm:
        return ("q", "k"), ("q", "k")
    if not model.qk_norm:
        return ("q_in", "k_in"), ("q_in", "k_in")
    return ("q_in", "k_in"), ("q_normed", "k_normed") if model.rotary else ("q", "k")


def _attention_forward(d: Sketch) -> None:
    """Draw norm1, q, k, v, (head norms), (rotation), attention, o, residual: x to x1."""
    m = d.model
    q, k, v, o = _attention_linears(m)
    (q_in, k_in), (q_normed, k_normed) = _qk_names(m)
    d.norm("norm1", "x", "n1", width=m.hidden)
    d.linear(q, "n1", q_in)
    d.linear(k, "n1", k_in)
    d.linear(v, "n1", "v")
    if m.qk_norm:
        d.norm("q_norm", q_in, q_normed, width=m.head_width, groups=m.heads)
        d.norm("k_norm", k_in, k_normed, width=m.head_width, groups=m.kv_heads)
    if m.rotary:
        d.activation("q", m.q_width)
        d.activation("k", m.kv_width)
        flops = d.tokens * (m.q_width + m.kv_width) * ROPE_FLOPS
        d.stream("rope", "F", (q_normed, k_normed), ("q", "k"), flops, extra_bytes=_rope_table_bytes(d))
    d.activation("attn", m.q_width)
    d.statistic("lse", m.heads)
    _attention_kernel(d, "attention", ("q", "k", "v"), ("attn", "lse"))
    d.linear(o, "attn", "attn_out")
    d.add("add1", "F", "x", "attn_out", "x1")


def _rope_table_bytes(d: Sketch) -> int:
    """Cosines and sines of every position, read once for all heads."""
    return 2 * d.seq_len * d.model.head_width * d.element


def _attention_kernel(d: Sketch, name: str, reads: tuple[str, ...], writes: tuple[str, ...]) -> None:
    """Emit flash attention. Bytes: its tensors once; the scores never reach HBM.

    FLOPs as the hardware does them: a causal mask halves each of the two products of forward (QK^T, PV);
    backward has five (QK^T again, dV, dP, dQ, dK), 2.5 times forward (FlashAttention-2, arXiv 2307.08691,
    section 4.1). The numerator of an MFU counts backward twice forward and comes from
    `spec.model.Model.training_flops_per_token`.
    """
    m = d.model
    one_product = d.batch * d.seq_len**2 * m.q_width  # 2 b s^2 a d, halved by the mask
    backward = name.endswith("backward")
    kernel = Kernel(
        kind="attention",
        flops=(5 if backward else 2) * one_product,
        unit="vector" if d.precision == "fp32" else "tensor",
        precision="bf16" if d.precision == "fp8" else d.precision,
        hbm_bytes=sum(d.tensors[t] for t in reads + writes),
        shape=(d.batch, m.heads, m.kv_heads, d.seq_len, d.seq_len, m.head_width, 1),
    )
    d.emit(BlockOp(name=name, kernel=kernel, phase="I" if backward else "F", reads=reads, writes=writes))


def _mlp_forward(d: Sketch) -> None:
    """Draw norm2, (gate), up, activation, down, residual: x1 to y."""
    m = d.model
    gate, up, down = _mlp_linears(m)
    elements = d.tokens * m.ffn_hidden
    d.norm("norm2", "x1", "n2", width=m.hidden)
    if m.gated:
        d.linear(gate, "n2", "g")
    d.linear(up, "n2", "u")
    d.activation("p", m.ffn_hidden)
    if m.gated:
        flops = SILU_MUL_FLOPS if m.activation == "swiglu" else GELU_FLOPS + 1
        d.stream("act_mul", "F", ("g", "u"), ("p",), flops * elements)
    else:
        flops = GELU_FLOPS if m.activation == "gelu" else RELU_FLOPS
        d.stream("act", "F", ("u",), ("p",), flops * elements)
    d.linear(down, "p", "mlp_out")
    d.add("add2", "F", "x1", "mlp_out", "y")


def _mlp_backward(d: Sketch) -> None:
    """Draw the way from dy to dx1, the gradient of the attention's residual stream."""
    m = d.model
    gate, up, down = _mlp_linears(m)
    elements = d.tokens * m.ffn_hidden
    d.linear_backward(down, "dy", "p", "dp")
    d.activation("du", m.ffn_hidden)
    if m.gated:
        d.activation("dg", m.ffn_hidden)
        flops = SILU_MUL_BACKWARD_FLOPS if m.activation == "swiglu" else GELU_BACKWARD_FLOPS + GELU_FLOPS + 2
        d.stream("act_mul_backward", "I", ("dp", "g", "u"), ("du", "dg"), flops * elements)
        d.linear_backward(up, "du", "n2", "dn2_up")
        d.linear_backward(gate, "dg", "n2", "dn2_gate")
        d.add("add_dn2", "I", "dn2_up", "dn2_gate", "dn2")
    else:
        # ReLU's derivative follows from its output, which the down projection keeps anyway.
        source, flops = ("u", GELU_BACKWARD_FLOPS) if m.activation == "gelu" else ("p", RELU_FLOPS)
        d.stream("act_backward", "I", ("dp", source), ("du",), flops * elements)
        d.linear_backward(up, "du", "n2", "dn2")
    d.norm_backward("norm2", "post_attention_layernorm", "dn2", "x1", "dx1_norm", width=m.hidden)
    d.add("add_dx1", "I", "dy", "dx1_norm", "dx1")


def _attention_backward(d: Sketch) -> None:
    """Draw the way from dx1 to dx."""
    m = d.model
    q, k, v, o = _attention_linears(m)
    (q_in, k_in), (q_normed, k_normed) = _qk_names(m)
    d.linear_backward(o, "dx1", "attn", "dattn")
    for name, width in (("dq", m.q_width), ("dk", m.kv_width), ("dv", m.kv_width)):
        d.activation(name, width)
    _attention_kernel(d, "attention_backward", ("dattn", "q", "k", "v", "attn", "lse"), ("dq", "dk", "dv"))
    if m.rotary:
        d.activation(f"d{q_normed}", m.q_width)
        d.activation(f"d{k_normed}", m.kv_width)
        flops = d.tokens * (m.q_width + m.kv_width) * ROPE_FLOPS
        d.stream(
            "rope_backward", "I", ("dq", "dk"), (f"d{q_normed}", f"d{k_normed}"), flops,
            extra_bytes=_rope_table_bytes(d),
        )  # fmt: skip
    if m.qk_norm:
        d.norm_backward(
            "q_norm", "self_attn.q_norm", f"d{q_normed}", q_in, f"d{q_in}", width=m.head_width, groups=m.heads
        )
        d.norm_backward(
            "k_norm",
            "self_attn.k_norm",
            f"d{k_normed}",
            k_in,
            f"d{k_in}",
            width=m.head_width,
            groups=m.kv_heads,
        )
    d.linear_backward(v, "dv", "n1", "dn1_v")
    d.linear_backward(k, f"d{k_in}", "n1", "dn1_k")
    d.add("add_dn1_vk", "I", "dn1_v", "dn1_k", "dn1_vk")
    d.linear_backward(q, f"d{q_in}", "n1", "dn1_q")
    d.add("add_dn1", "I", "dn1_vk", "dn1_q", "dn1")
    d.norm_backward("norm1", "input_layernorm", "dn1", "x", "dx_norm", width=m.hidden)
    d.add("add_dx", "I", "dx1", "dx_norm", "dx")
