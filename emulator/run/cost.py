"""What a kernel costs alone on a device: a length, and how much of each resource it draws while it runs.

A kernel is a ramp and a body. The body runs at the tightest of three bounds: the SMs (tiles and waves in
gemm.py, blocks in attention.py, vector units here), the power cap, and HBM. The demands are those of the
body, so that a kernel bound by HBM draws all of it and one bound by its SMs holds all of them; the ramp is
charged at the same rates.
"""

import math

import msgspec

from emulator.plan.program import Kernel
from emulator.run.attention import attention_seconds
from emulator.run.gemm import gemm_seconds
from emulator.run.generation import generation
from emulator.spec.device import Device
from emulator.spec.units import PS_PER_SECOND

MICRO_SM = 10**6
"""Parts of one SM in the `sm` resource."""

TENSOR_WHOLE = 10**12
"""The `tensor` resource counts parts of the matrix units' time: precisions with different peaks share it."""

MEMORY_RAMP_PS = 3_000_000
"""Start and drain of a kernel that streams through HBM: aiconfigurator's h100_sxm.yaml,
`mem_empirical_constant_latency`."""

FMA_SHARE = 0.5
"""Elementwise arithmetic is not multiply-add, which the peak counts twice."""

MEMORY_LATENCY_CYCLES = 480
"""HBM load to use: 466 cycles on A100, 479 on H100 (arXiv:2402.13499, memory latency table)."""

BYTES_IN_FLIGHT_PER_SM = 2048 * 8
"""2,048 resident threads (CUDA programming guide: compute capability 7.0, 8.0, 9.0, 10.0), each with one load
of four bf16 elements, as in PyTorch's vectorised elementwise kernels."""


class KernelCost(msgspec.Struct, frozen=True):
    """A kernel alone on its device: length, and demand per second of it at that speed."""

    duration_ps: int
    sm: int
    """Micro-SMs it keeps busy; all of them when it is bound by compute and fills at least one wave."""
    tensor: int
    """Parts in 10**12 of the matrix units' time, at the peak of the kernel's own precision."""
    vector: int
    """FLOP/s on the vector units."""
    hbm: int
    """Bytes/s of HBM."""


class DeviceCapacities(msgspec.Struct, frozen=True):
    """What one device has of each resource that kernels demand, in the units of KernelCost."""

    sm: int
    tensor: int
    vector: int
    hbm: int


def device_capacities(device: Device) -> DeviceCapacities:
    """Capacities of a device: SMs, matrix units, vector FLOP/s, and the HBM bytes/s that a copy achieves."""
    return DeviceCapacities(
        sm=device.sms * MICRO_SM,
        tensor=TENSOR_WHOLE,
        vector=int(device.vector_flops),
        hbm=int(device.hbm_bytes_per_second * device.hbm_efficiency),
    )


def streaming_sms(bytes_per_second: float, device: Device) -> float:
    """SMs that keep enough bytes in flight for a rate of HBM traffic (Little's law), at most all.

    in flight = rate * latency; each SM contributes what its resident threads have outstanding. A device whose
    vector clock is not known takes all.
    """
    if not device.vector_clock_hz:
        return float(device.sms)
    in_flight = bytes_per_second * MEMORY_LATENCY_CYCLES / device.vector_clock_hz
    return min(float(device.sms), in_flight / BYTES_IN_FLIGHT_PER_SM)


def _unit_peak(kernel: Kernel, device: Device) -> tuple[bool, float]:
    """Whether the kernel runs on the matrix units, and the FLOP/s of the unit that it runs on."""
    if kernel.unit == "tensor":
        return device.unit(kernel.precision) == "tensor", device.peak(kernel.precision)
    if kernel.kind in ("gemm", "attention") and device.unit(kernel.precision) == "vector":
        return False, device.peak(kernel.precision)  # packed fp16 doubles the vector units of P100
    return False, device.vector_flops


def _compute(kernel: Kernel, device: Device, peak: float, attention: str) -> tuple[float, int, int]:
    """Seconds of the body without HBM, the SMs that it keeps busy in them, and the ramp in picoseconds."""
    if kernel.kind == "gemm":
        seconds, busy = gemm_seconds(kernel.shape, kernel.flops, kernel.precision, peak, device)
        return seconds, busy, generation(device).ramp_ps
    if kernel.kind == "attention":
        seconds, busy = attention_seconds(kernel.shape, kernel.flops, peak, device, attention)
        return seconds, busy, generation(device).ramp_ps
    return kernel.flops / (peak * FMA_SHARE), device.sms, MEMORY_RAMP_PS


def kernel_cost(kernel: Kernel, device: Device, attention: str = "flash2") -> KernelCost:
    """Length and demands of a kernel alone on a device, in integers; every demand is within its capacity.

    `attention` names the attention kernels of the job.

    Raises JobError for a precision that the device has no units for. A few tens of microseconds a call; equal
    kernels on equal devices have equal costs, so callers keep one for each distinct pair.
    """
    capacity = device_capacities(device)
    on_tensor, peak = _unit_peak(kernel, device)
    compute, busy, ramp_ps = _compute(kernel, device, peak, attention)
    memory = kernel.hbm_bytes / capacity.hbm
    body = max(compute, memory)
    body_ps = max(1, math.ceil(body * PS_PER_SECOND))
    hbm = min(capacity.hbm, kernel.hbm_bytes * PS_PER_SECOND // body_ps)
    if memory > 0 and memory >= compute:
        hbm = capacity.hbm  # not a byte less for the picosecond that rounding added
    share = kernel.flops * PS_PER_SECOND / (body_ps * peak)
    sms = busy * (compute / body) if body else 0.0
    if kernel.kind not in ("gemm", "attention"):  # those keep whole tiles in flight in shared memory
        sms = max(sms, streaming_sms(hbm, device))
    return KernelCost(
        duration_ps=ramp_ps + body_ps,
        sm=max(MICRO_SM, min(capacity.sm, math.ceil(sms * MICRO_SM))),
        tensor=min(capacity.tensor, int(share * capacity.tensor)) if on_tensor else 0,
        vector=0 if on_tensor else min(capacity.vector, int(share * capacity.vector)),
        hbm=hbm,
    )
