"""What differs between generations of accelerators in how kernels reach their peaks.

A handful of numbers for each generation, fitted once for all shapes; none belongs to a shape, a model or a
job. The fits minimise the mean absolute log error on every second row of the public measurements that
`tests/data/gemm.csv` and `tests/data/attention.csv` keep; `tests/test_cost.py` holds the other half to the
error that this leaves.
"""

import msgspec

from emulator.spec.device import Device
from emulator.spec.errors import JobError


class Generation(msgspec.Struct, frozen=True, kw_only=True):
    """How matrix products and flash attention use one generation's matrix units."""

    name: str
    tiles: tuple[tuple[int, int], ...]
    """Output tiles (rows, columns) that the vendor's library chooses from."""
    burst: float
    """Speed of the main loop over the best product's, which pays for prologue and epilogue too."""
    feed: float
    """Share of a 128 x 256 tile's time that scales with its operand bytes (tm + tn), not with its FLOP
    (tm tn): 1 is bound by the operand feed, 0 by arithmetic."""
    fill_bytes: int
    """Bytes of k whose time equals a tile's prologue and epilogue together."""
    ramp_ps: int
    """Start of the first tile and drain of the last, once for each kernel."""
    attention: dict[int, float]
    """Flash attention forward, full mask, long sequences: fraction of the dense peak by head dimension."""
    attention_causal: float
    """Speed with a causal mask over speed with a full one, per FLOP that the mask leaves."""
    attention_backward: float
    """Speed of the backward pass over the forward one, in FLOP/s (backward has 2.5 times the FLOP)."""
    attention_fill: tuple[float, float]
    """Prologue and epilogue of a block of rows in forward and in backward, in key blocks of 128."""


CLASSIC_TILES = ((256, 128), (128, 256), (128, 128), (256, 64), (64, 256), (128, 64), (64, 128), (64, 64))
"""Thread-block tiles of cuBLAS on Ampere (NVIDIA, Matrix Multiplication Background User's Guide)."""

WIDE_TILES = (
    (256, 128), (128, 256), (192, 192), (320, 128), (128, 320), (256, 160), (160, 256), (192, 128),
    (128, 192), (256, 96), (128, 128), (256, 64), (64, 256), (128, 64), (64, 128), (64, 64),
)  # fmt: skip
"""Tiles in the names of cuBLAS's `nvjet` kernels in public profiles of Hopper and Blackwell runs."""

AMPERE = Generation(
    name="ampere", tiles=CLASSIC_TILES, burst=1.105, feed=0.986, fill_bytes=471, ramp_ps=445_000,
    # FlashAttention-2, forward with backward (flash2_a100_fwd_bwd_benchmark); no head dimension of 256 was
    # measured: it loses against 128 what it loses on Hopper. The ratio of backward to forward is Hopper's.
    attention={64: 0.621, 128: 0.698, 256: 0.628},
    attention_causal=0.965, attention_backward=0.901, attention_fill=(1.448, 1.467),
)  # fmt: skip

HOPPER = Generation(
    name="hopper", tiles=WIDE_TILES, burst=1.132, feed=0.324, fill_bytes=506, ramp_ps=2_390_000,
    # FlashAttention-2, which torch's scaled_dot_product_attention runs on Hopper in the years of the measured
    # jobs (cuDNN comes first only since cuDNN 9.15). Forward: flash3_fp16_fwd; both: flash2_h100_fwd_bwd.
    attention={64: 0.340, 128: 0.391, 256: 0.352},
    attention_causal=0.914, attention_backward=0.901, attention_fill=(0.855, 1.794),
)  # fmt: skip

BLACKWELL = Generation(
    name="blackwell", tiles=WIDE_TILES, burst=0.962, feed=0.403, fill_bytes=124, ramp_ps=1_910_000,
    # Extrapolated: cuDNN, torch's choice there, at the fractions of peak that it reaches on Hopper
    # (flash3_fp16_fwd); backward as FlashAttention-2 on Hopper.
    attention={64: 0.440, 128: 0.641, 256: 0.607},
    attention_causal=0.886, attention_backward=0.901, attention_fill=(0.953, 1.794),
)  # fmt: skip

_BY_TENSOR_WIDTH = {2048: AMPERE, 4096: HOPPER, 8192: BLACKWELL}
"""bf16 FLOP per SM and cycle name the generation (A100 4 x 512, H100 4 x 1,024 in NVIDIA's whitepapers)."""


def generation(device: Device) -> Generation:
    """Give the generation whose parameters a device takes: Ampere's where none was measured."""
    return _BY_TENSOR_WIDTH.get(device.tensor_flops_per_sm_cycle, AMPERE)


def sustained(device: Device, precision: str) -> float:
    """Fraction of the dense peak that matrix products of random numbers hold at the power limit."""
    return min(best(device, precision), device.gemm_sustained.get(precision, 1.0))


def best(device: Device, precision: str) -> float:
    """Fraction of the dense peak that the best matrix product reaches in a precision, in a short run.

    A precision without its own figure takes the one of bf16, fp16 or fp32, whichever comes first: the power
    limit behind it does not ask for the format. Raises JobError where the device has none of them.
    """
    for key in (precision, "bf16", "fp16", "fp32"):
        if key in device.gemm_efficiency:
            return device.gemm_efficiency[key]
    raise JobError(
        f"device.gemm_efficiency of {device.name} has no figure for {precision}: "
        f"give a fraction of its peak, for example {{ {precision} = 0.8 }}"
    )
