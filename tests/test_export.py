"""Trace files: what Perfetto and HolisticTraceAnalysis rely on."""

from __future__ import annotations

import gzip
import json
import re
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from handmade import US, Timed, gpipe, job, timed, trace

from emulator.plan.program import Collective, Fixed, Group, HostCopy, Kernel, Load, Transfer
from emulator.report.export import check_streams, save_trace
from emulator.report.kineto import EVENTS_A_BLOCK, RankEvents
from emulator.run import run
from emulator.run.trace import Trace

GROUP = (Group("dp_shard", (0, 1)),)


def collective(kind: str, count: int = 1024) -> Collective:
    return Collective(kind=kind, group="dp_shard", axis="dp_shard", bytes=count)  # type: ignore[arg-type]


def mixed() -> list[Timed]:
    """A bit of everything on one rank."""
    return [
        timed("load", Load(64), 0, 2 * US, stream="loader"),
        timed("copy", HostCopy(64), 2 * US, 3 * US, stream="copy", issued=US),
        timed("gather", collective("all_gather"), 0, 4 * US, stream="dp.unshard", begin=US),
        timed("l0.q.F.mb0", Kernel(kind="gemm", flops=100, hbm_bytes=10), 4 * US, 6 * US, phase="F", layer=0),
        timed("join", None, 6 * US, 6 * US),
        timed("reduce", collective("reduce_scatter"), 6 * US, 9 * US, stream="dp.reduce", issued=6 * US),
    ]


@pytest.fixture
def everything() -> Trace:
    return trace(job(dp=2, teaching=False), [mixed(), mixed()], groups=GROUP)


def events(path: Path) -> list[dict[str, Any]]:
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    found: list[dict[str, Any]] = json.loads(text)["traceEvents"]
    return found


def slices(path: Path, category: str = "kernel") -> list[dict[str, Any]]:
    return [e for e in events(path) if e["ph"] == "X" and e["cat"] == category]


def test_a_directory_gets_a_file_per_rank_that_names_its_rank_first(
    tmp_path: Path, everything: Trace
) -> None:
    files = save_trace(everything, tmp_path / "traces")
    assert [f.name for f in files] == ["rank0.json.gz", "rank1.json.gz"]
    for rank, file in enumerate(files):
        text = gzip.decompress(file.read_bytes()).decode()
        match = re.search(r'"rank":\s+(\d+)', text)
        assert match is not None
        assert match[1] == str(rank)
        assert match.start() < text.index("traceEvents")
    only = save_trace(everything, tmp_path / "one", ranks=[1])
    assert [f.name for f in only] == ["rank1.json.gz"]


def test_head_describes_devices_and_groups(tmp_path: Path, everything: Trace) -> None:
    (file,) = save_trace(everything, tmp_path / "t.json")
    head = json.loads(file.read_text())
    assert head["schemaVersion"] == 1
    assert head["deviceProperties"][1] == {
        "id": 1,
        "name": "h100-sxm",
        "totalGlobalMem": everything.program.job.cluster.device.hbm_bytes,
        "numSms": 132,
    }
    assert head["distributedInfo"]["world_size"] == 2
    assert head["distributedInfo"]["pg_config"] == [
        {"pg_name": "0", "pg_desc": "dp_shard", "pg_size": 2, "ranks": [0, 1]}
    ]


def test_names_and_categories(tmp_path: Path, everything: Trace) -> None:
    (file,) = save_trace(everything, tmp_path / "t.json", ranks=[0])
    assert [e["name"].split("(")[0] for e in slices(file)] == [
        "ncclDevKernel_AllGather_RING_LL",
        "l0.q.F.mb0",
        "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL",
    ]
    (copy,) = slices(file, "gpu_memcpy")
    assert copy["name"] == "Memcpy HtoD (Pinned -> Device)"
    assert copy["args"]["bytes"] == 64
    (load,) = slices(file, "cpu_op")
    assert "stream" not in load["args"], "the loader is no GPU stream"


def test_collective_arguments_are_complete(tmp_path: Path, everything: Trace) -> None:
    (file,) = save_trace(everything, tmp_path / "t.json", ranks=[0])
    gather, _, reduce = slices(file)
    assert gather["args"]["Collective name"] == "_allgather_base"
    assert gather["args"]["dtype"] == "BFloat16"
    assert (gather["args"]["In msg nelems"], gather["args"]["Out msg nelems"]) == (256, 512)
    assert reduce["args"]["Collective name"] == "_reduce_scatter_base"
    assert reduce["args"]["dtype"] == "Float", "fsdp reduces in fp32"
    assert (reduce["args"]["In msg nelems"], reduce["args"]["Out msg nelems"]) == (256, 128)
    assert reduce["args"]["Group size"] == 2
    assert reduce["args"]["Process Group Ranks"] == "[0, 1]"
    assert (gather["args"]["start_ps"], gather["args"]["begin_ps"]) == (0, US)


def test_endpoints_are_rounded_so_neighbours_stay_neighbours(tmp_path: Path) -> None:
    """Three kernels of 1.4 us: rounded durations would lose a microsecond; rounded ends leave no gap."""
    ops = [timed(f"k{i}", Fixed(0), i * 1_400_000, (i + 1) * 1_400_000) for i in range(3)]
    (file,) = save_trace(trace(job(), [ops]), tmp_path / "t.json")
    found = slices(file)
    assert [(e["ts"], e["dur"]) for e in found] == [(0, 1), (1, 2), (3, 1)]
    assert [e["args"]["end_ps"] for e in found] == [1_400_000, 2_800_000, 4_200_000]


def test_slices_of_a_thread_never_overlap(tmp_path: Path) -> None:
    (file,) = save_trace(run(gpipe(4, 6, 1_300_000, 2_700_000, 111_111)), tmp_path / "t.json")
    by_thread: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for event in events(file):
        if event["ph"] == "X":
            row = (event["ts"], event["ts"] + event["dur"])
            by_thread.setdefault((event["pid"], event["tid"]), []).append(row)
    assert len(by_thread) == 4 + 2 * 2 + 2 * 4 + 2 * 4, "compute, pp of ends, pp between, host and steps"
    for rows in by_thread.values():
        rows.sort()
        assert all(one[1] <= other[0] for one, other in pairwise(rows))


def test_overlap_on_a_stream_is_refused_and_leaves_no_file(tmp_path: Path) -> None:
    """google/perfetto#503: viewers draw overlapping slices of one thread wrong, so they are not written."""
    bad = trace(job(), [[timed("a", Fixed(0), 0, 10), timed("b", Fixed(0), 9, 20)]])
    with pytest.raises(ValueError, match="rank 0, stream compute: b starts before a has ended"):
        check_streams(bad, 0)
    with pytest.raises(ValueError, match="b starts before a"):
        save_trace(bad, tmp_path / "t.json")
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "t.json"
    path.write_text("old")
    monkeypatch.setattr(
        "emulator.report.kineto.live_bytes", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)
    )
    with pytest.raises(KeyboardInterrupt):
        save_trace(run(gpipe(2, 2, US, US)), path)
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["t.json"]


def test_arrows_lead_from_send_to_recv(tmp_path: Path) -> None:
    (file,) = save_trace(run(gpipe(3, 2, US, 2 * US, US)), tmp_path / "t.json")
    tails = {e["id"]: e for e in events(file) if e["ph"] == "s"}
    heads = {e["id"]: e for e in events(file) if e["ph"] == "f"}
    assert len(tails) == len(heads) == 2 * 2 * 2
    assert tails.keys() == heads.keys()
    assert all(tails[i]["ts"] <= heads[i]["ts"] and tails[i]["pid"] != heads[i]["pid"] for i in tails)
    (alone,) = save_trace(run(gpipe(3, 2, US, 2 * US, US)), tmp_path / "one.json", ranks=[0])
    assert not [e for e in events(alone) if e["ph"] in "sf"], "no arrow without both ends"


def test_peers_of_a_transfer(tmp_path: Path) -> None:
    work = Transfer(kind="send", peer="1", axis="pp", bytes=8, tag="t")
    (file,) = save_trace(trace(job(pp=2), [[timed("s", work, 0, US)], []]), tmp_path / "t.json", ranks=[0])
    (send,) = slices(file)
    assert send["name"].startswith("ncclDevKernel_SendRecv(")
    assert (send["args"]["Src Rank"], send["args"]["Dst Rank"], send["args"]["In msg nelems"]) == (0, 1, 4)


def test_launches_match_kernels_and_steps_are_marked(tmp_path: Path) -> None:
    one = [[timed("a", Fixed(0), 0, 5 * US), timed("b", Fixed(0), 5 * US, 8 * US, issued=2 * US)]]
    two = [
        [
            timed("a", Fixed(0), 8 * US, 9 * US, issued=8 * US),
            timed("b", Fixed(0), 9 * US, 10 * US, issued=9 * US),
        ]
    ]
    (file,) = save_trace(trace(job(), one, two), tmp_path / "t.json")
    launches = slices(file, "cuda_runtime")
    assert sorted(e["args"]["correlation"] for e in launches) == sorted(
        e["args"]["correlation"] for e in slices(file)
    )
    marks = slices(file, "user_annotation")
    assert [(m["name"], m["ts"], m["dur"]) for m in marks] == [
        ("ProfilerStep#0", 0, 8),
        ("ProfilerStep#1", 8, 2),
    ]


def test_memory_is_counted_by_term(tmp_path: Path) -> None:
    (file,) = save_trace(run(gpipe(2, 2, US, US)), tmp_path / "t.json", ranks=[0])
    counters = [e for e in events(file) if e["ph"] == "C"]
    assert {e["args"]["weights"] for e in counters} == {1000}
    assert [e["args"]["activations"] for e in counters] == [100, 200, 100, 0]


def test_the_same_trace_gives_the_same_bytes(tmp_path: Path, everything: Trace) -> None:
    for name in ("a.json.gz", "b.json.gz", "a.json", "b.json"):
        save_trace(everything, tmp_path / name)
    assert (tmp_path / "a.json.gz").read_bytes() == (tmp_path / "b.json.gz").read_bytes()
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()


@pytest.fixture(scope="module")
def long() -> Trace:
    """A hundred thousand spans: one step, many times over."""
    a_trace = run(gpipe(1, 64, US, US), steps=1)
    steps = 100_000 // len(a_trace)
    c = a_trace.columns
    names = ("issued_ps", "ready_ps", "start_ps", "begin_ps", "end_ps")
    shift = np.repeat(np.arange(steps) * a_trace.end_ps, len(a_trace))
    times = {name: np.tile(getattr(c, name), steps) + shift for name in names}
    tiled = {name: np.tile(getattr(c, name), steps) for name in ("class_index", "op_index", "alone_ps")}
    return Trace(a_trace.program, step=np.repeat(np.arange(steps), len(a_trace)), **tiled, **times)


def test_a_hundred_thousand_spans_are_written_in_seconds(tmp_path: Path, long: Trace) -> None:
    """Under a second on the machine it was written on; the bound allows for a busy one."""
    began = time.perf_counter()
    (file,) = save_trace(long, tmp_path / "t.json")
    took = time.perf_counter() - began
    print(f"{len(long)} spans in {took:.2f} s")
    assert took < 8
    assert len(slices(file)) == len(long)


def test_a_long_trace_is_never_in_memory_as_text(long: Trace) -> None:
    """Events come a block at a time; a slice may bring an arrow along."""
    sizes = [len(block) for block in RankEvents(long, 0, {0}, {}).blocks()]
    assert sum(sizes) > 2 * len(long)
    assert 0 < min(sizes) <= max(sizes) <= 2 * EVENTS_A_BLOCK
