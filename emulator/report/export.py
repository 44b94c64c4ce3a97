"""A Trace as Kineto writes it: Chrome trace events, for Perfetto and HolisticTraceAnalysis.

The format is that of kineto's output_json.cpp, within what HolisticTraceAnalysis 0.5.0 reads: `"rank": ` with
a space and before traceEvents, one file per rank, names that tell communication from compute, launches that
match kernels when there are several steps. Slices of one thread never overlap (checked before anything is
written). The events themselves are in `kineto`.
"""

from __future__ import annotations

import gzip
import io
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, cast

import numpy as np

from emulator.plan.body import Body
from emulator.report.kineto import RankEvents
from emulator.report.memory import BodyMemory
from emulator.run.trace import Trace
from emulator.version import __version__


def save_trace(trace: Trace, path: str | Path, ranks: Sequence[int] | None = None) -> list[Path]:
    """Write a trace and return the files written.

    A path that ends in .json or .json.gz becomes one file with a process per rank; any other is a directory
    and gets one file per rank, `rank<r>.json.gz`. `ranks` defaults to one representative of each class. A
    file appears under its name only when it is complete. Raises ValueError for an unknown rank.
    """
    target = Path(path)
    chosen = [min(c.members) for c in trace.program.classes] if ranks is None else list(ranks)
    for rank in chosen:
        check_streams(trace, rank)
    if target.name.endswith((".json", ".json.gz")):
        target.parent.mkdir(parents=True, exist_ok=True)
        _write(trace, target, chosen)
        return [target]
    target.mkdir(parents=True, exist_ok=True)
    files = [target / f"rank{rank}.json.gz" for rank in chosen]
    for rank, file in zip(chosen, files, strict=True):
        _write(trace, file, [rank])
    return files


def check_streams(trace: Trace, rank: int) -> None:
    """Raise ValueError if two spans of one stream of a rank overlap: viewers would draw nonsense."""
    c, body = trace.columns, trace.template(trace.rank_class(rank)).body
    rows = trace.where(rank=rank).rows
    rows = rows[np.argsort(body.stream[c.op_index[rows]], kind="stable")]
    stream = body.stream[c.op_index[rows]]
    bad = np.flatnonzero((c.start_ps[rows[1:]] < c.end_ps[rows[:-1]]) & (stream[1:] == stream[:-1]))
    if len(bad):
        one, other = (trace.op(int(row)).name for row in rows[bad[0] : bad[0] + 2])
        name = body.streams[stream[bad[0]]]
        raise ValueError(f"rank {rank}, stream {name}: {other} starts before {one} has ended")


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """Open a file that takes its name only when the block ends without an exception.

    A link is followed, and what is no regular file (/dev/null, a pipe) is written to as it is. An OSError
    names the file, also where a write found the disk full.
    """
    try:
        with _whole(path) as file:
            yield file
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


@contextmanager
def _whole(path: Path) -> Iterator[IO[bytes]]:
    if path.exists() and not path.is_file():
        with path.open("wb") as file:
            yield file
        return
    path = path.resolve()
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            yield file
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _write(trace: Trace, path: Path, ranks: list[int]) -> None:
    with replacing(path) as raw:
        if path.name.endswith(".gz"):
            # no name and no time in the header: the same trace gives the same bytes
            packed = gzip.GzipFile(filename="", mode="wb", compresslevel=3, fileobj=raw, mtime=0)
            with io.BufferedWriter(cast(io.RawIOBase, packed), 1 << 20) as file:
                _stream(trace, file, ranks)
        else:
            _stream(trace, raw, ranks)


def _stream(trace: Trace, file: IO[bytes], ranks: list[int]) -> None:
    head = json.dumps(_head(trace, ranks), indent=1)
    file.write(head.removesuffix("\n}").encode() + b',\n "traceEvents": [\n')
    plans: dict[Body, BodyMemory] = {}
    comma = ""
    for rank in ranks:
        for block in RankEvents(trace, rank, set(ranks), plans).blocks():
            file.write((comma + ",\n".join(block)).encode())
            comma = ",\n"
    file.write(b"\n]}\n")


def _head(trace: Trace, ranks: list[int]) -> dict[str, object]:
    job = trace.program.job
    device = job.cluster.device
    groups, shown = trace.program.groups, set(ranks)
    return {
        "schemaVersion": 1,
        "distributedInfo": {
            "backend": "nccl",
            "rank": ranks[0] if ranks else 0,
            "world_size": job.layout.world_size,
            "pg_count": len(groups),
            "pg_config": [
                {"pg_name": str(i), "pg_desc": g.axis, "pg_size": len(g.ranks), "ranks": list(g.ranks)}
                for i, g in enumerate(groups)
                if not shown.isdisjoint(g.ranks)
            ],
        },
        "deviceProperties": [
            {"id": gpu, "name": device.name, "totalGlobalMem": device.hbm_bytes, "numSms": device.sms}
            for gpu in sorted({rank % job.cluster.gpus_per_node for rank in ranks})
        ],
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": 0,
        "traceName": f"{job.model.name} by emulator {__version__}",
    }
