"""An accelerator as its datasheet and its driver describe it, and the catalogue of those that are known."""

import tomllib
from importlib import resources
from typing import Literal

import msgspec

from emulator.spec.checks import choice, finite, flag, hint, listed, whole
from emulator.spec.errors import JobError
from emulator.spec.units import GIB

PRECISIONS = ("fp32", "tf32", "fp16", "bf16", "fp8", "fp4")

SLOWEST = 1e6
"""Least of any rate of a device: rates are whole numbers a second once played, and none is near this."""

# Matrix units of one device do at most this many times their 16-bit rate; fp4's factor differs by generation.
_TIMES_16_BIT = {"tf32": 1, "fp16": 1, "bf16": 1, "fp8": 2}
_ROUNDING = 0.01
"""Datasheets round their peaks and clocks to within a hundredth."""


class Device(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One accelerator. Peaks are dense; links are one direction, per device."""

    name: str
    peak_flops: dict[str, float]
    """Dense FLOP/s of a matrix product by precision (fp32 tf32 fp16 bf16 fp8 fp4); `unit` says on what."""
    vector_flops: float
    """FP32 FLOP/s of the vector units (CUDA cores), where norms, softmax and elementwise kernels run."""
    hbm_bytes: int
    """Memory capacity as the driver reports it."""
    hbm_label_gb: int = 0
    """The number of "GB" on the label, which counts GiB on NVIDIA parts; 0 where there is no label."""
    hbm_bytes_per_second: float
    l2_bytes: int
    l1_bytes_per_sm: int = 0
    register_bytes_per_sm: int = 0
    sms: int
    """Streaming multiprocessors in use (compute units, tensor cores of a TPU, Neuron cores)."""
    sms_on_die: int
    """What the die holds; the rest is switched off for yield."""
    fp32_units_per_sm: int = 0
    tensor_cores_per_sm: int = 0
    tensor_flops_per_sm_cycle: int = 0
    """bf16/fp16 FLOP per SM and cycle on the matrix units; 0 where there are none."""
    vector_flops_per_sm_cycle: int = 0
    tensor_clock_hz: float = 0.0
    """The clock the bf16 peak implies: peak / (sms x FLOP per SM and cycle)."""
    vector_clock_hz: float = 0.0
    """The clock the FP32 peak implies; a datasheet's two clocks can differ."""
    scale_up_bytes_per_second: float
    """NVLink, xGMI, ICI, NeuronLink or PCIe port, one direction, all links of the device."""
    nic_bytes_per_second: float
    """Scale-out share of one device, one direction, in the vendor's reference system."""
    collective_engines: bool = False
    """Collectives run on engines of their own, and hold no SMs."""
    host_link_bytes_per_second: float
    """PCIe or C2C to the host, one direction: the copy engines' ceiling."""
    gemm_efficiency: dict[str, float]
    """Fraction of the dense peak that the best matrix product reaches in a short run, by precision."""
    gemm_sustained: dict[str, float] = {}
    """Fraction that big matrix products of random numbers hold at the power limit, run after run; where it is
    not known, gemm_efficiency."""
    hbm_efficiency: float
    """Achieved fraction of the HBM bandwidth in a copy or triad."""
    scale_up_efficiency: float
    """Payload fraction of the scale-up line rate that collectives reach with the bulk protocol."""
    headline: dict[str, str] = {}
    """What the vendor's headline or the course notes print where that differs from the above, by field."""
    year: int = 0
    """Year of launch; 0 where it does not matter."""
    source: str = ""

    def __post_init__(self) -> None:
        """Check what the rest of the emulator divides by; raises JobError."""
        for field in ("hbm_bytes", "sms"):
            whole(f"device.{field}", getattr(self, field))
        whole("device.sms_on_die", self.sms_on_die, least=self.sms)
        for field in (
            "vector_flops",
            "hbm_bytes_per_second",
            "scale_up_bytes_per_second",
            "nic_bytes_per_second",
            "host_link_bytes_per_second",
        ):
            finite(f"device.{field}", getattr(self, field), positive=True)
            if getattr(self, field) < SLOWEST:
                raise JobError(
                    f"device.{field} = {getattr(self, field):g} must be at least {SLOWEST:g} a second"
                )
        finite("device.vector_clock_hz", self.vector_clock_hz)
        if self.tensor_flops_per_sm_cycle:
            finite("device.tensor_clock_hz", self.tensor_clock_hz, positive=True)
        flag("device.collective_engines", self.collective_engines)
        for field in ("hbm_efficiency", "scale_up_efficiency"):
            _fraction(f"device.{field}", getattr(self, field))
        scale_up = self.scale_up_bytes_per_second * self.scale_up_efficiency
        if scale_up < SLOWEST:
            raise JobError(
                f"device.scale_up_bytes_per_second = {self.scale_up_bytes_per_second:g} x "
                f"scale_up_efficiency({self.scale_up_efficiency:g}) = {scale_up:g} bytes a second; "
                f"it must be at least {SLOWEST:g}"
            )
        hbm = self.hbm_bytes_per_second * self.hbm_efficiency
        if self.host_link_bytes_per_second > hbm:
            raise JobError(
                f"device.host_link_bytes_per_second = {self.host_link_bytes_per_second:g} must not exceed "
                f"hbm_bytes_per_second x hbm_efficiency = {hbm:g}: what is copied ends in HBM"
            )
        if not self.peak_flops:
            raise JobError("device.peak_flops is empty: give the dense FLOP/s of at least one precision")
        for precision, peak in self.peak_flops.items():
            choice("device.peak_flops", precision, PRECISIONS)
            finite(f"device.peak_flops.{precision}", peak, positive=True)
            self._check_dense(precision, peak)
        for field in ("gemm_efficiency", "gemm_sustained"):
            for precision, efficiency in getattr(self, field).items():
                choice(f"device.{field}", precision, tuple(self.peak_flops))
                _fraction(f"device.{field}.{precision}", efficiency)

    def _check_dense(self, precision: str, peak: float) -> None:
        """Refuse a peak above what the units do in a cycle: most often a headline that counts sparsity."""
        if precision not in _TIMES_16_BIT or self.unit(precision) == "vector":
            return
        per_cycle = self.tensor_flops_per_sm_cycle * _TIMES_16_BIT[precision]
        dense = self.sms * per_cycle * self.tensor_clock_hz
        if peak > dense * (1 + _ROUNDING):
            raise JobError(
                f"device.peak_flops.{precision} = {peak:.4g} is {peak / dense:.2f} times what the units do, "
                f"{self.sms} SMs x {per_cycle} FLOP x {self.tensor_clock_hz:.4g} Hz = {dense:.4g}: "
                "peaks are dense, half of a headline with 2:1 sparsity"
            )

    def peak(self, precision: str) -> float:
        """Dense FLOP/s of a matrix product; JobError where the device has no units for the precision."""
        if precision not in self.peak_flops:
            has = listed(self.peak_flops)
            raise JobError(f'precision = "{precision}": {self.name} has no units for it; it has {has}')
        return self.peak_flops[precision]

    def unit(self, precision: str) -> Literal["tensor", "vector"]:
        """Units that run a matrix product: vector where there are no matrix units, or none for full fp32."""
        if self.tensor_flops_per_sm_cycle == 0:
            return "vector"
        full = precision == "fp32" and self.peak(precision) == self.vector_flops
        return "vector" if full else "tensor"

    @property
    def hbm_label_bytes(self) -> int:
        """Capacity if the label's GB are read as GiB, as the course notes' cluster totals do."""
        return self.hbm_label_gb * GIB


def _fraction(field: str, value: float) -> None:
    finite(field, value, positive=True)
    if value > 1:
        raise JobError(f"{field} = {value} must be a fraction of at most 1")


def _catalogue() -> dict[str, Device]:
    text = resources.files("emulator.spec").joinpath("data/devices.toml").read_text(encoding="utf-8")
    entries = tomllib.loads(text).items()
    return {name: msgspec.convert({"name": name, **entry}, Device, strict=False) for name, entry in entries}


DEVICES = _catalogue()
"""Every accelerator of the catalogue by name."""


def device(name: str) -> Device:
    """Accelerator of the catalogue; JobError with the names that are close where there is none."""
    if name not in DEVICES:
        family = [known for known in DEVICES if name and known.startswith(name.lower())]
        near = f"; did you mean {listed(family)}?" if family else hint(name, DEVICES)
        raise JobError(f'device = "{name}" is not in the catalogue, which has {listed(DEVICES)}{near}')
    return DEVICES[name]
