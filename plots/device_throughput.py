"""Device throughput from K40 to B200: a thousandfold, or seventeenfold like for like.

One should see two lines: matrix products on the fastest 16-bit units a device has (FP32 cores before there
were tensor cores) and FP32 on the vector units. Filled markers are the catalogue's dense peaks, open ones
the figures of the course notes (section 12.2.2). Their thousandfold compares
tensor cores with FP32 cores, and their 5,000 for B200 is a sparse figure: the dense factor is less than
half of it. FP32 against FP32 grew seventeenfold.

Every number is read from `emulator/spec/data/devices.toml`: the peaks, and the notes' where they differ
from the `headline` texts.
"""

from __future__ import annotations

import re

import msgspec
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from emulator.spec.device import DEVICES, Device
from emulator.spec.units import TB
from plots import style

GENERATIONS = ("k40", "p100", "v100", "a100-80", "h100-sxm", "b200")
"""The devices of section 12.2.2 of the course notes, one a generation."""

_NOTES = re.compile(r"course notes: (?:roughly )?([\d,.]*\d)")


class Series(msgspec.Struct, frozen=True):
    """One line of the picture: FLOP/s of each generation, dense and as the notes have it."""

    label: str
    dense: tuple[float, ...]
    notes: tuple[float, ...]

    @property
    def dense_factor(self) -> float:
        """Growth from the first generation to the last by the catalogue's dense peaks."""
        return self.dense[-1] / self.dense[0]

    @property
    def notes_factor(self) -> float:
        """The same growth by the notes' figures."""
        return self.notes[-1] / self.notes[0]


def series() -> tuple[Series, Series]:
    """Read both lines off the catalogue: matrix units at 16 bits, then vector units in FP32."""
    devices = [DEVICES[name] for name in GENERATIONS]
    fastest = [_fastest(device) for device in devices]
    matrix = Series(
        "matrix products, fastest 16-bit units",
        tuple(device.peak_flops[precision] for device, precision in zip(devices, fastest, strict=True)),
        tuple(notes_figure(device, precision) for device, precision in zip(devices, fastest, strict=True)),
    )
    vector = Series(
        "FP32 on the vector units",
        tuple(device.vector_flops for device in devices),
        tuple(notes_figure(device, "fp32") for device in devices),
    )
    return matrix, vector


def notes_figure(device: Device, precision: str) -> float:
    """FLOP/s as the notes print it: from the headline text, or the catalogue's own where they agree."""
    text = device.headline.get(f"peak_flops.{precision}", "")
    found = _NOTES.search(text)
    return float(found[1].replace(",", "")) * TB if found else device.peak_flops[precision]


def _fastest(device: Device) -> str:
    # The notes count the P100's FP32: it has no matrix units, and its fp16 rate runs on the same cores.
    if device.unit("fp32") == "vector" and device.tensor_flops_per_sm_cycle == 0:
        return "fp32"
    return "bf16" if "bf16" in device.peak_flops else "fp16"


@style.styled
def draw() -> Figure:
    """Draw both lines against the generations, on a logarithmic axis."""
    fig = style.figure(8.6, 5.0)
    (ax,) = style.axes(fig)
    for line, colour in zip(series(), (style.BLUE, style.VERMILION), strict=True):
        _line(ax, line, colour)
    devices = [DEVICES[name] for name in GENERATIONS]
    ax.set_yscale("log")
    ax.set_xlim(-0.3, len(devices) + 1.05)
    ax.set_ylim(2, 2e4)
    ax.set_xticks(
        range(len(devices)), [f"{device.name.split('-')[0].upper()}\n{device.year}" for device in devices]
    )
    ax.set_ylabel("TFLOP/s of one device")
    ax.set_title("Device throughput, K40 to B200: dense peaks (filled), course notes (open)", loc="left")
    ax.grid(axis="y", alpha=0.3)
    ax.legend(loc="upper left")
    return fig


def _line(ax: Axes, line: Series, colour: str) -> None:
    x = range(len(line.dense))
    ax.plot(x, [value / TB for value in line.dense], "-o", color=colour, label=line.label, zorder=3)
    ax.plot(
        x, [value / TB for value in line.notes], "o", mfc="white", mec=colour, mew=1.5, ms=9, zorder=2,
    )  # fmt: skip
    for at, value in enumerate(line.dense):
        below = colour == style.VERMILION
        # The lines are one before the first tensor cores, and the last point has the factors beside it.
        if (at in (0, 1) and not below) or at == len(line.dense) - 1:
            continue
        ax.annotate(
            f"{value / TB:,.4g}", (at, value / TB), (0, -17 if below else 11), textcoords="offset points",
            ha="center", color=colour, fontsize=9,
        )  # fmt: skip
    last = len(line.dense) - 1
    text = (
        f"notes {line.notes[-1] / TB:,.4g}: ×{line.notes_factor:,.0f}\n"
        f"dense {line.dense[-1] / TB:,.4g}: ×{line.dense_factor:,.3g}"
    )
    middle = (line.notes[-1] * line.dense[-1]) ** 0.5 / TB
    ax.annotate(text, (last, middle), (16, 0), textcoords="offset points", va="center", color=colour)


if __name__ == "__main__":
    style.save(draw(), "device_throughput")
