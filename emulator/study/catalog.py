"""The catalogue and a job's sizes, for people to read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.markup import escape
from rich.table import Table

from emulator.report.memory import TERMS, Memory, gib
from emulator.spec.cluster import CLUSTERS
from emulator.spec.device import DEVICES
from emulator.spec.job import PIPELINED, SCHEDULES, Job, stage_layers
from emulator.spec.model import MODELS
from emulator.spec.units import GIB, MIB, PIB, TIB

LEGEND = "(M): from general knowledge, not read in a primary text; a default to replace with your own figure"
"""What the mark in the sources of devices.toml means."""

_PRECISIONS = ("fp32", "tf32", "bf16", "fp16", "fp8", "fp4")


def _table(title: str, left: Sequence[str], right: Sequence[str], prose: Sequence[str] = ()) -> Table:
    """Table with columns of words, of numbers, and of prose that may be broken into lines."""
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    for name in left:
        table.add_column(name, no_wrap=True, vertical="top" if prose else "bottom")
    for name in right:
        table.add_column(name, justify="right", no_wrap=True, vertical="bottom")
    for name in prose:
        table.add_column(name)
    return table


def _uncut(table: Table) -> Table:
    """Give the columns that are not prose the width of their longest line, so that no figure is cut."""
    for column in table.columns:
        if column.no_wrap:
            lines = [line for cell in (column.header, *column.cells) for line in str(cell).splitlines()]
            column.min_width = max(map(len, lines))
    return table


def _notes(lines: Mapping[str, str]) -> Table:
    """Prose by name, below a table of numbers."""
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in lines.items():
        table.add_row(name, escape(text))
    return table


def devices() -> Group:
    """Peaks, memory and links of every device; below, headlines that differ, and sources."""
    numbers = [*_PRECISIONS, "HBM\nGiB", "HBM\nGB/s", "SMs,\non die", "scale-up\nGB/s", "NIC\nGB/s"]
    table = _table("devices: dense peaks in TFLOP/s; links in one direction", ["name"], numbers)
    notes = {}
    for name, device in DEVICES.items():
        peaks = [_or_dash(device.peak_flops.get(precision, 0.0) / 1e12) for precision in _PRECISIONS]
        table.add_row(
            name,
            *peaks,
            f"{device.hbm_bytes / GIB:.1f}",
            f"{device.hbm_bytes_per_second / 1e9:,.0f}",
            f"{device.sms}/{device.sms_on_die}",
            f"{device.scale_up_bytes_per_second / 1e9:,.4g}",
            f"{device.nic_bytes_per_second / 1e9:,.4g}",
        )
        headlines = [f"{field}: {text}." for field, text in device.headline.items()]
        notes[name] = " ".join([*headlines, f"Source: {device.source}"])
    return Group(_uncut(table), LEGEND, _notes(notes))


def clusters() -> Group:
    """Every cluster of the catalogue read as one machine, at its default size."""
    numbers = [
        "GPUs",
        "pods x racks\nx nodes x GPUs",
        "HBM by\nthe label",
        "HBM by\nthe driver",
        "FP32\ncores",
        "tensor\ncores",
        "dense\nEFLOP/s",
    ]
    title = "clusters: totals at the default size; name:NODES takes another"
    table = _table(title, ["name", "device"], numbers)
    for name, cluster in CLUSTERS.items():
        totals = cluster.totals()
        racks_per_pod = cluster.racks_per_pod or totals.racks
        table.add_row(
            name,
            cluster.device.name,
            f"{totals.gpus:,}",
            f"{totals.pods} x {racks_per_pod} x {cluster.nodes_per_rack} x {cluster.gpus_per_node}",
            _pib(totals.hbm_label_bytes),
            _pib(totals.hbm_bytes),
            _count(totals.fp32_units),
            _count(totals.tensor_cores),
            f"{totals.peak_flops / 1e18:.3g} ({totals.precision})",
        )
    return Group(_uncut(table), _notes({name: cluster.source for name, cluster in CLUSTERS.items()}))


def models() -> Group:
    """Shape and exact parameter count of every model."""
    columns = ["parameters", "layers", "hidden", "ffn", "heads", "kv", "vocab"]
    table = _table("models", ["name"], columns)
    for name, model in MODELS.items():
        shape = (model.layers, model.hidden, model.ffn_hidden, model.heads, model.kv_heads, model.vocab)
        numbers = [f"{number:,}" for number in (model.parameters, *shape)]
        table.add_row(name, *numbers)
    return Group(_uncut(table), _notes({name: model.source for name, model in MODELS.items()}))


def schedules() -> Table:
    """Pipeline schedules, and which of them run."""
    table = _table("schedules", ["name"], [], ["what it does"])
    for name, text in SCHEDULES.items():
        table.add_row(name, text if name in PIPELINED else f"{text} (with pp > 1 not available yet)")
    return _uncut(table)


TABLES: dict[str, Callable[[], Group | Table]] = {
    "devices": devices,
    "clusters": clusters,
    "models": models,
    "schedules": schedules,
}
"""What `emulator catalog` prints, by name."""


def sizes(job: Job) -> str:
    """Say in a few lines what a job is: model, cluster, cut, batch."""
    layout, model, cluster = job.layout, job.model, job.cluster
    layers = stage_layers(job)
    cut = f"{len(layers)} of {layers[0]}" if len(set(layers)) == 1 else " + ".join(map(str, layers))
    tokens = job.global_batch * job.seq_len
    lines = {
        "model": f"{model.name}: {model.parameters:,} parameters in {model.layers} layers",
        "cluster": f"{cluster.name}: {layout.world_size:,} of {cluster.gpus:,} {cluster.device.name}",
        "layout": f"{layout.product}; {layout.order}",
        "stages": f"{cut} layers; schedule {job.pipeline.schedule}",
        "data parallel": f"{job.data_parallel.sharding} over {layout.dp}",
        "batch": f"{job.global_batch:,} sequences of {job.seq_len:,} = {tokens:,} tokens; "
        f"microbatches {job.microbatches}, each of {job.micro_batch}",
        "precision": job.precision,
    }
    return "\n".join(f"{name:<14}{text}" for name, text in lines.items())


def memory_table(memory: Memory, how: str) -> str:
    """Lay out the memory of every stage by term in MiB, with the verdict below; `how` it was found."""
    head = ["stage", *TERMS, "peak", "in flight"]
    rows = [
        [
            str(stage.stage),
            *(f"{getattr(stage, term) / MIB:,.0f}" for term in (*TERMS, "peak")),
            str(stage.in_flight),
        ]
        for stage in memory.stages
    ]
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    body = "\n".join("  ".join(map(str.rjust, row, widths)) for row in [head, *rows])
    title = f"memory of a rank at its peak, MiB of {gib(memory.capacity_bytes)}, {how}"
    return f"{title}\n{body}\n{memory.verdict()}"


def _or_dash(tflops: float) -> str:
    return f"{tflops:,.4g}" if tflops else "-"


def _pib(count: int) -> str:
    return f"{count / PIB:.4g} PiB" if count >= PIB else f"{count / TIB:.4g} TiB"


def _count(number: int) -> str:
    return f"{number / 1e6:,.3g} million" if number >= 1e6 else f"{number:,}"
