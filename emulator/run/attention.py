"""What flash attention costs alone.

A block of 128 query rows walks over the blocks of 128 keys that its mask leaves. Beyond the FLOP that are
counted it pays for its prologue and epilogue (`attention_fill`, in key blocks) and, under a causal mask, for
half a block on the diagonal. Blocks spread over the SMs: in whole waves of equal blocks under a full mask;
under a causal one they differ and fill the gaps, but nothing ends before the longest does, twice the average.
The fractions of peak follow the convention of the FlashAttention figures: a causal mask halves the FLOP,
backward counts 2.5 times the forward ones.
"""

from emulator.run.generation import generation
from emulator.spec.device import Device

BLOCK = 128
"""Query rows and keys of a block; FlashAttention-2 takes 64 to 128 of either by head dimension."""

HEAD_DIM_STEP = 32
"""FlashAttention-2 pads the head dimension to a multiple of this."""

BACKWARD_FROM = 1.75
"""Backward has 2.5 times the FLOP of forward; halfway between the two tells them apart."""


SPEED = {"flash2": (1.0, 1.0), "flash_triton": (1 / 1.4, 1 / 2)}
"""Speed of forward and of backward over FlashAttention-2's. That one is 1.3 to 1.5 times as fast forward and
about twice as fast backward as FlashAttention in Triton, on A100 (arXiv 2307.08691, section 4.1); Hopper is
taken to be alike."""


def head_dim_fraction(head_dim: int, table: dict[int, float]) -> float:
    """Fraction of peak for a head dimension: a line between measured ones, padding counted as loss."""
    padded = -(-head_dim // HEAD_DIM_STEP) * HEAD_DIM_STEP
    known = sorted(table)
    clamped = min(max(padded, known[0]), known[-1])
    low = max(dim for dim in known if dim <= clamped)
    high = min(dim for dim in known if dim >= clamped)
    weight = (clamped - low) / (high - low) if high > low else 0.0
    return (table[low] + weight * (table[high] - table[low])) * head_dim / padded


def attention_seconds(
    shape: tuple[int, ...], flops: int, peak: float, device: Device, kernels: str = "flash2"
) -> tuple[float, int]:
    """Seconds of a flash attention kernel without its ramp and without HBM, and the SMs that it keeps busy.

    `shape` is (batch, heads, kv_heads, seq_q, seq_k, head_dim, causal); `kernels` one of SPEED.
    """
    batch, heads, _, seq_q, seq_k, head_dim, causal = shape
    model = generation(device)
    forward = 4 * batch * heads * seq_q * seq_k * head_dim * (0.5 if causal else 1.0)
    backward = flops > BACKWARD_FROM * forward
    rate = peak * head_dim_fraction(head_dim, model.attention) * SPEED[kernels][backward]
    if causal:
        rate *= model.attention_causal
    if backward:
        rate *= model.attention_backward
    walked = seq_k / BLOCK * (0.5 if causal else 1.0)
    extra = model.attention_fill[backward] + (0.5 if causal else 0.0)
    blocks = batch * heads * -(-seq_q // BLOCK)
    waves = blocks / device.sms
    rounded = max(waves, 2.0) if causal else float(-(-blocks // device.sms))
    return flops / rate * (1.0 + extra / walked) * rounded / waves, min(device.sms, blocks)
