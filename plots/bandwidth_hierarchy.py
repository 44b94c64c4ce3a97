"""The bandwidth hierarchy of the Llama 3 cluster (figure 12.1): further away means larger and slower.

One should see four bars that shrink from the HBM of one GPU to another pod, while the memory reachable at
each level, printed at the right, grows by four orders of magnitude. Rates are one direction and per GPU;
the course notes count both of NVLink's directions, which the dashed outline
shows. The cross-pod rate is the pod's over its 1:7 oversubscription: what a GPU gets when its whole pod
sends outward.

Every number comes from the cluster `llama3-24k` of the catalogue; the notes' from its `headline` texts.
"""

from __future__ import annotations

import re

import msgspec
from matplotlib.figure import Figure

from emulator.spec.cluster import Cluster, llama3_24k
from emulator.spec.units import GB, GIB, PIB, TIB
from plots import style

_GB_PER_SECOND = re.compile(r"course notes: ([\d,.]*\d) GB/s")


class Level(msgspec.Struct, frozen=True, kw_only=True):
    """One step outward: how fast one GPU reaches it, and how much memory lies within."""

    name: str
    bytes_per_second: float
    notes_bytes_per_second: float
    reach_gpus: int
    reach_bytes: int


def levels(cluster: Cluster) -> tuple[Level, ...]:
    """Read the four levels off a cluster, the nearest first; capacity by the label, as the notes count it."""
    device = cluster.device
    reach = {
        "HBM": (device.hbm_bytes_per_second, _notes(cluster, "hbm_bytes_per_second"), 1),
        "NVLink, in a server": (
            device.scale_up_bytes_per_second,
            _notes(cluster, "scale_up_bytes_per_second"),
            cluster.gpus_per_node,
        ),
        "network, in a pod": (cluster.nic_bytes_per_second,) * 2 + (cluster.gpus_per_pod,),
        "network, across pods": (cluster.nic_bytes_per_second / cluster.pod_oversubscription,) * 2
        + (cluster.gpus,),
    }
    return tuple(
        Level(
            name=name,
            bytes_per_second=rate,
            notes_bytes_per_second=notes,
            reach_gpus=gpus,
            reach_bytes=gpus * device.hbm_label_bytes,
        )
        for name, (rate, notes, gpus) in reach.items()
    )


@style.styled
def draw() -> Figure:
    """Draw a bar for each level on a logarithmic axis, with the memory it reaches at the right."""
    cluster = llama3_24k()
    fig = style.figure(9.2, 3.8)
    (ax,) = style.axes(fig)
    every = levels(cluster)
    rows = range(len(every))
    colours = (style.BLUE, style.SKY, style.GREEN, style.ORANGE)
    ax.barh(rows, [level.bytes_per_second / GB for level in every], 0.62, color=colours)
    for row, level in enumerate(every):
        rate, notes = level.bytes_per_second / GB, level.notes_bytes_per_second / GB
        text = f"{rate:,.4g} GB/s"
        if notes != rate:
            text += f"  (course notes: {notes:,.4g})"
        # Where the notes count both directions the difference is worth an outline; a rounding is not.
        if notes > 1.5 * rate:
            ax.barh(row, notes, 0.62, fill=False, edgecolor=style.GREY, linestyle="--")
        ax.annotate(text, (max(rate, notes), row), (6, 0), textcoords="offset points", va="center")
        gpus = "1 GPU" if level.reach_gpus == 1 else f"{level.reach_gpus:,} GPUs"
        ax.text(
            1.02, row, f"{_size(level.reach_bytes)}\n{gpus}", transform=ax.get_yaxis_transform(), va="center"
        )
    ax.text(1.02, -0.72, "memory reached", transform=ax.get_yaxis_transform(), va="center", weight="bold")
    ax.set_xscale("log")
    ax.set_xlim(1, 9e5)
    ax.set_ylim(len(every) - 0.5, -0.95)
    ax.set_yticks(rows, [level.name for level in every])
    ax.set_xlabel("GB/s of one GPU, one direction")
    ax.set_title(f"Bandwidth hierarchy of {cluster.name}", loc="left")
    return fig


def _notes(cluster: Cluster, field: str) -> float:
    found = _GB_PER_SECOND.search(cluster.device.headline[field])
    assert found is not None, f"no course notes' figure in headline.{field} of {cluster.device.name}"
    return float(found[1].replace(",", "")) * GB


def _size(count: int) -> str:
    unit, name = next((u, n) for u, n in ((PIB, "PiB"), (TIB, "TiB"), (GIB, "GiB")) if count >= u)
    return f"{count / unit:,.4g} {name}"


if __name__ == "__main__":
    style.save(draw(), "bandwidth_hierarchy")
