"""What a matrix product costs alone: tiles, waves, a power cap.

cuBLAS cuts C (m x n) into tiles, one per SM at a time, and may cut k as well (split-k). Time on the SMs, for
tiles of tm x tn and s cuts:

    waves = ceil(batch * ceil(m / tm) * ceil(n / tn) * s / SMs)
    seconds = waves * 2 tm tn (k / s + fill) / (peak / SMs * rate(tm, tn)),  k / s rounded up to whole k tiles

plus, for s > 1, the float32 partial sums written to and read from HBM. The choice is the fastest one. The
power limit is a limit on the average: a product never takes less than FLOP / (sustained fraction * peak), and
idle SMs in the last wave cost nothing while that binds (so quantisation does not show in large products).
"""

from emulator.run.generation import Generation, best, generation, sustained
from emulator.spec.device import Device
from emulator.spec.units import BYTES_PER_ELEMENT

SPLITS = (1, 2, 3, 4, 5, 6, 8)
"""Cuts of k that are tried; beyond eight the partial sums cost more than they bring."""

SPLIT_WAVES = 4
"""With this many waves of tiles quantisation wastes at most a fifth, less than the partial sums cost."""

K_TILE_BYTES = 128
"""Bytes of k in one step of the main loop: a 128-byte row of shared memory (64 bf16 elements)."""

ALIGNMENT_BYTES = 16
"""Rows must start on this boundary for TMA and 16-byte asynchronous copies (CUDA programming guide)."""

MISALIGNED_SLOWDOWN = 1.46
"""A row length off that boundary: h = 4096, d_ff = 10,922 against 10,944 (stas00/ml-engineering)."""

LARGE_TILE_INTENSITY = 128 * 256 / (128 + 256)


def tile_rate(tile: tuple[int, int], feed: float) -> float:
    """Speed of a tile's main loop over that of a 128 x 256 tile, at most 1 / (1 - feed).

    Of the large tile's time a share `feed` goes with operand bytes, tm + tn, the rest with FLOP, tm * tn.
    """
    rows, columns = tile
    intensity = rows * columns / (rows + columns)
    return min(1.0, 1.0 / (1.0 - feed + feed * LARGE_TILE_INTENSITY / intensity))


def _ceil(numerator: int, denominator: int) -> int:
    return -(-numerator // denominator)


def tiled_seconds(
    shape: tuple[int, ...], precision: str, peak: float, device: Device, model: Generation
) -> tuple[float, int]:
    """Seconds on the SMs of the fastest tiling, before the power cap, and the SMs that it keeps busy.

    `shape` is (batch, m, n, k); `peak` the dense FLOP/s of the unit in this precision.
    """
    batch, m, n, k = shape
    element = BYTES_PER_ELEMENT.get(precision, 1)
    k_tile, fill = K_TILE_BYTES // element, model.fill_bytes / element
    speed = peak / device.sms * min(1.0, model.burst * best(device, precision))
    # float32 partial sums: 4 bytes out and 4 back for every element of C and every cut.
    partial_seconds = 8 * batch * m * n / (device.hbm_bytes_per_second * device.hbm_efficiency)
    fastest, busy = float("inf"), device.sms
    for tile in model.tiles:
        rows, columns = tile
        tiles = batch * _ceil(m, rows) * _ceil(n, columns)
        step = 2 * rows * columns / (speed * tile_rate(tile, model.feed))
        for splits in SPLITS if tiles < SPLIT_WAVES * device.sms else (1,):
            depth = _ceil(_ceil(k, splits), k_tile) * k_tile
            seconds = _ceil(tiles * splits, device.sms) * step * (depth + fill)
            if splits > 1:
                seconds += splits * partial_seconds
            if seconds < fastest:
                fastest, busy = seconds, min(device.sms, tiles * splits)
    return fastest, busy


def gemm_seconds(
    shape: tuple[int, ...], flops: int, precision: str, peak: float, device: Device
) -> tuple[float, int]:
    """Seconds of a matrix product without its ramp and without HBM, and the SMs that it keeps busy.

    `flops` is what the mathematics asks for; padding to tiles is time, not work.
    """
    seconds, busy = tiled_seconds(shape, precision, peak, device, generation(device))
    seconds = max(seconds, flops / (peak * sustained(device, precision)))
    elements = max(1, ALIGNMENT_BYTES // BYTES_PER_ELEMENT.get(precision, 1))
    if any(dim % elements for dim in shape[1:]):
        seconds *= MISALIGNED_SLOWDOWN
    return seconds, busy
