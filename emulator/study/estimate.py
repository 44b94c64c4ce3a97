"""The arithmetic before any run: compute, time, memory, and what an MFU means."""

import math
from typing import Literal

import msgspec

from emulator.report.hints import BROKEN_MFU, EXCELLENT_MFU, GOOD_MFU
from emulator.spec.checks import finite, whole
from emulator.spec.device import Device
from emulator.spec.errors import JobError
from emulator.spec.model import Model
from emulator.spec.units import GB, TB

DEFAULT_MFU = 0.40
"""CS231n's threshold of an excellent run; Llama 3 405B reached 41 % on 16,384 H100s (its Table 4)."""
TOKENS_PER_PARAMETER = 20
"""Compute-optimal tokens per parameter (Hoffmann et al. 2022, arXiv 2203.15556), where a model names none."""
SEQ_LEN = 8192
"""Sequence of the activation figure: Llama 3's first pre-training stage."""
SECONDS_PER_DAY = 86_400

BEST_PUBLISHED_MFU = 0.552
"""MegaScale, 175B on 12,288 A100s (arXiv 2402.15627)."""

Band = Literal["impossible", "beyond published", "excellent", "good", "below good", "broken"]


class Accounting(msgspec.Struct, frozen=True):
    """One way to count what training state takes: weights, gradients and Adam's moments."""

    name: str
    bytes_per_parameter: int
    terms: str


ACCOUNTINGS = (
    Accounting("16-bit", 8, "course notes' lower bound: weight 2 + gradient 2 + m 2 + v 2"),
    Accounting(
        "fp32 shards", 16, "FSDP mixed precision: weight 4 + gradient 4 + m 4 + v 4, or ZeRO's 2 + 2 + 12"
    ),
    Accounting("fp32 master", 18, "Megatron bf16: weight 2 + gradient 4 + master 4 + m 4 + v 4"),
)
"""The first is Equation 12.3 of the course notes; ZeRO: arXiv 1910.02054; Megatron: distrib_optimizer.py."""


class State(msgspec.Struct, frozen=True):
    """What the training state takes in one accounting."""

    accounting: Accounting
    bytes: int
    device_bytes: int
    """Capacity that it is divided by: label gigabytes of 1e9 for the course notes' accounting, else the
    driver's."""
    devices: float
    """State / capacity: how many devices' worth of memory."""
    largest_model: float
    """Parameters whose state fills one device."""

    @property
    def devices_needed(self) -> int:
        """Whole devices that hold the state."""
        return math.ceil(self.devices)


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """What can be said of a training run before running it."""

    model: str
    device: str
    parameters: int
    tokens: float
    gpus: int
    precision: str
    peak_flops_per_second: float
    """Dense, of one device."""
    flops_per_second: float
    """Sustained, of one device."""
    mfu: float
    flops: float
    """C = 6ND."""
    seconds: float
    seconds_with_full_recompute: float
    """8ND: a second forward pass in backward (arXiv 2104.04473, section 5.1)."""
    states: tuple[State, ...]
    seq_len: int
    """SEQ_LEN, or the longest sequence that the model has positions for."""
    activation_bytes_one_tensor: int
    """One 16-bit hidden state per layer for one sequence of seq_len tokens."""
    band: Band
    verdict: str
    assumptions: tuple[str, ...]
    """Every option that was not given and what was taken for it."""

    @property
    def days(self) -> float:
        """Wall-clock days at the sustained rate."""
        return self.seconds / SECONDS_PER_DAY

    @property
    def gpu_hours(self) -> float:
        """Device hours at the sustained rate."""
        return self.gpus * self.seconds / 3600

    def to_dict(self) -> dict[str, object]:
        """Return plain JSON types, SI units, derived figures included."""
        plain: dict[str, object] = msgspec.to_builtins(self)
        plain["days"] = self.days
        plain["gpu_hours"] = self.gpu_hours
        plain["states"] = [
            {**msgspec.to_builtins(state), "devices_needed": state.devices_needed} for state in self.states
        ]
        return plain

    def text(self) -> str:
        """Return the estimate as lines to read."""
        rate = (
            f"{self.flops_per_second / 1e12:,.4g} TFLOP/s a GPU, MFU {self.mfu:.1%} of {self.precision} "
            f"{self.peak_flops_per_second / 1e12:,.4g} (6ND, dense peak)"
        )
        rows = [
            ("model", f"{self.model}, {self.parameters:,} parameters"),
            ("compute", f"6 x {self.parameters:.4g} x {self.tokens:.4g} tokens = {self.flops:.3g} FLOP"),
            ("rate", rate),
            (
                "time",
                f"{_duration(self.seconds)} on {self.gpus:,} {self.device}; {self.gpu_hours:,.4g} GPU-hours",
            ),
            (
                "",
                f"with full recomputation (8ND) at that rate: {_duration(self.seconds_with_full_recompute)}",
            ),
        ]
        for state in self.states:
            head = "state" if state is self.states[0] else ""
            rows.append((head, _state_line(state, self.device)))
            rows.append(("", f"  {state.accounting.terms}"))
        one = self.activation_bytes_one_tensor
        rows.append(
            (
                "activations",
                f"{one / GB:.3g} GB for one tensor per layer, one sequence of {self.seq_len} tokens",
            )
        )
        rows.append(("verdict", self.verdict))
        rows += [("assumed" if i == 0 else "", text) for i, text in enumerate(self.assumptions)]
        return "\n".join(f"{head:<12}{text}".rstrip() for head, text in rows)


def training_seconds(
    parameters: float, tokens: float, gpus: int, flops_per_second: float, *, recompute: bool = False
) -> float:
    """Return seconds of 6ND FLOPs (8ND with full recomputation) on `gpus` devices of that rate each."""
    return (8 if recompute else 6) * parameters * tokens / (gpus * flops_per_second)


def estimate(
    model: Model,
    *,
    tokens: float | None,
    gpus: int | None,
    device: Device,
    tflops: float | None,
    mfu: float | None,
) -> Estimate:
    """Work out compute, time, state and a verdict for training `model`.

    `tflops` is the sustained rate of one device in TFLOP/s, `mfu` a fraction of its dense peak; at most one
    of them. What is None takes a default that `assumptions` states. Raises JobError for what cannot be.
    """
    assumptions: list[str] = []
    tokens = _tokens(model, tokens, assumptions)
    if gpus is None:
        gpus = 1
        assumptions.append("--gpus 1: time is that of one device")
    whole("gpus", gpus)
    precision = next((p for p in ("bf16", "fp16", "fp32") if p in device.peak_flops), None)
    if precision is None:
        raise JobError(f"device: {device.name} names no bf16, fp16 or fp32 peak to measure an MFU against")
    peak = device.peak(precision)
    rate = _rate(device, precision, tflops, mfu, assumptions)
    flops = 6.0 * model.parameters * tokens
    band, verdict = judge(rate / peak)
    seq_len = min(SEQ_LEN, model.learned_positions or SEQ_LEN)
    return Estimate(
        model=model.name,
        device=device.name,
        parameters=model.parameters,
        tokens=tokens,
        gpus=gpus,
        precision=precision,
        peak_flops_per_second=peak,
        flops_per_second=rate,
        mfu=rate / peak,
        flops=flops,
        seconds=training_seconds(model.parameters, tokens, gpus, rate),
        seconds_with_full_recompute=training_seconds(model.parameters, tokens, gpus, rate, recompute=True),
        states=tuple(_state(model, device, accounting) for accounting in ACCOUNTINGS),
        seq_len=seq_len,
        activation_bytes_one_tensor=model.layers * seq_len * model.hidden * 2,
        band=band,
        verdict=verdict,
        assumptions=tuple(assumptions),
    )


def judge(mfu: float) -> tuple[Band, str]:
    """Return the band that an MFU falls in, and what to make of it."""
    finite("mfu", mfu, positive=True)
    shown = f"MFU {mfu:.1%}"
    if mfu > 1:
        return "impossible", f"{shown} is impossible: more than the dense peak (was the peak a sparse one?)"
    if mfu > BEST_PUBLISHED_MFU:
        return "beyond published", (
            f"{shown} is beyond what large runs have published (MegaScale, 55.2 %): check the peak and the "
            "FLOP count"
        )
    if mfu > EXCELLENT_MFU:
        return "excellent", f"{shown} is excellent (over 40 %)"
    if mfu > GOOD_MFU:
        return "good", f"{shown} is good (over 30 %)"
    if mfu >= BROKEN_MFU:
        return "below good", (
            f"{shown} is not over 30 %, nor far below it: the run works, but something costs more than it "
            "should"
        )
    return "broken", f"{shown} is well below 30 %: something is broken; find it before tuning anything"


def _tokens(model: Model, tokens: float | None, assumptions: list[str]) -> float:
    if tokens is not None:
        finite("tokens", tokens, positive=True)
        return float(tokens)
    if model.training_tokens:
        assumptions.append(
            f"--tokens {model.training_tokens:.4g}: what the published run of {model.name} saw"
        )
        return model.training_tokens
    chosen = float(TOKENS_PER_PARAMETER * model.parameters)
    assumptions.append(f"--tokens {chosen:.4g}: {TOKENS_PER_PARAMETER} a parameter (Hoffmann et al. 2022)")
    return chosen


def _rate(
    device: Device, precision: str, tflops: float | None, mfu: float | None, assumptions: list[str]
) -> float:
    """Sustained FLOP/s of one device."""
    peak = device.peak(precision)
    if tflops is not None and mfu is not None:
        raise JobError(
            f"tflops = {tflops:g} and mfu = {mfu:g} both say how fast a GPU is; give one "
            f"({tflops:g} TFLOP/s is an MFU of {tflops * 1e12 / peak:.3f} on {device.name})"
        )
    if tflops is not None:
        finite("tflops", tflops, positive=True)
        if tflops * 1e12 > peak:
            raise JobError(
                f"tflops = {tflops:g} is more than the dense {precision} peak of {device.name}, "
                f"{peak / 1e12:g} TFLOP/s; it is the sustained rate of one GPU"
            )
        return tflops * 1e12
    if mfu is None:
        mfu = DEFAULT_MFU
        assumptions.append(f"--mfu {mfu:g}: over it a run is excellent, by CS231n's rule")
    finite("mfu", mfu, positive=True)
    if mfu > 1:
        aside = f"; for {mfu:g} % write {mfu / 100:g}" if mfu <= 100 else ""
        raise JobError(f"mfu = {mfu:g} must be a fraction of at most 1{aside}")
    return mfu * peak


def _state(model: Model, device: Device, accounting: Accounting) -> State:
    """Divide the state by the label's GB (1e9) in the notes' accounting, else by the driver's bytes."""
    by_label = accounting is ACCOUNTINGS[0]
    capacity = device.hbm_label_gb * GB if by_label and device.hbm_label_gb else device.hbm_bytes
    size = accounting.bytes_per_parameter * model.parameters
    return State(
        accounting=accounting,
        bytes=size,
        device_bytes=capacity,
        devices=size / capacity,
        largest_model=capacity / accounting.bytes_per_parameter,
    )


def _state_line(state: State, device: str) -> str:
    whose = "by the label" if state.accounting.name == ACCOUNTINGS[0].name else "by the driver"
    size = f"{state.bytes / TB:.1f} TB" if state.bytes >= TB else f"{state.bytes / GB:.1f} GB"
    return (
        f"{state.accounting.bytes_per_parameter} B a parameter ({state.accounting.name}): {size} = "
        f"{state.devices:.3g} {device} of {state.device_bytes / GB:.1f} GB {whose}, "
        f"so {state.devices_needed}; one holds {state.largest_model / 1e9:.1f} billion parameters"
    )


def _duration(seconds: float) -> str:
    return f"{seconds:,.4g} s = {seconds / SECONDS_PER_DAY:,.4g} days"
