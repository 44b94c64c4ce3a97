"""How fast the emulator is: ratios to bare SimPy, measured in the same run. Prints; asserts no times.

`make bench` runs it, writes the figures to plots/data/speed.json, and draws them. Absolute figures depend on
the machine, ratios much less: a second here is shown beside what it would be where bare SimPy makes 1.2
million timeouts a second.
"""

from __future__ import annotations

import cProfile
import gc
import io
import json
import os
import pstats
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from big_jobs import Case, simpy_timeouts
from test_pool import G, play, star

from emulator.plan import plan
from emulator.plan.program import COMPUTE, Fixed, Kernel, Op, Program, RankClass, Template
from emulator.report.export import save_trace
from emulator.run import run
from emulator.spec.cluster import Host, dgx_h100
from emulator.spec.job import Job, Layout, Pipeline
from emulator.spec.load import load_job
from emulator.spec.model import model
from plots import speed

pytestmark = pytest.mark.bench

REPEATS = 5
OPS = 40_000


def hand_made(*streams: list[Fixed | Kernel]) -> Program:
    """One rank whose streams run side by side."""
    free = msgspec.structs.replace(dgx_h100(nodes=1), host=Host(launch_seconds=0.0))
    job = Job(model=model("llama3-8b"), cluster=free, seq_len=8192, global_batch=1, layout=Layout())
    ops = tuple(
        Op(name=f"{s}.{i}", stream=COMPUTE if not s else f"side{s}", work=work)
        for s, works in enumerate(streams)
        for i, work in enumerate(works)
    )
    return Program(job, (Template("t", 0, ops, ()),), (RankClass((0,), 0, {}, {}),), ())


def uncontended() -> Program:
    """One stream of kernels that meet nobody."""
    return hand_made([Fixed(10**6 + i % 7) for i in range(OPS)])


def contended() -> Program:
    """Two streams of bandwidth-bound kernels on one HBM: every start and end changes the other's level."""
    kernels = [Kernel(kind="elementwise", hbm_bytes=10**8 + 10**6 * (i % 7)) for i in range(OPS // 2)]
    return hand_made(kernels, kernels[::-1])


def fsdp() -> Program:
    """The main job: every kernel and collective of a step on 64 GPUs, folded, 40 microbatches long."""
    return plan(load_job("llama3_8b_fsdp64", ["global_batch=2560"]))


def fsdp_unfolded() -> Program:
    """One step of the main job, each rank on its own."""
    return plan(load_job("llama3_8b_fsdp64", []), folded=False)


def pipeline() -> Program:
    """GPipe at kernel detail: 8 stages, 16 microbatches."""
    return plan(
        Job(
            model=model("llama3-8b"),
            cluster=dgx_h100(nodes=1),
            seq_len=4096,
            global_batch=16,
            layout=Layout(pp=8),
            pipeline=Pipeline("gpipe"),
        )
    )


CASES: dict[str, Callable[[], Program]] = {
    "uncontended, one stream": uncontended,
    "contended, two streams on one HBM": contended,
    "Llama 3 8B, FSDP, 64 ranks in 1 class": fsdp,
    "Llama 3 8B, FSDP, 64 ranks unfolded": fsdp_unfolded,
    "Llama 3 8B, GPipe 8 x 16": pipeline,
    "Llama 3 405B, FSDP, 16,384 ranks in 16 classes": lambda: plan(Case().job()),
    "Llama 3 405B, DDP, 16,384 ranks": lambda: plan(Case(sharding="ddp").job()),
}


def keep(part: str, rows: Sequence[dict[str, Any]]) -> None:
    """Put a part of the figures into the file that the picture and the README are drawn from."""
    figures = json.loads(speed.FIGURES.read_text()) if speed.FIGURES.exists() else {}
    figures[part] = rows
    speed.FIGURES.parent.mkdir(exist_ok=True)
    speed.FIGURES.write_text(json.dumps(dict(sorted(figures.items())), indent=1) + "\n")


def test_executor(capsys: pytest.CaptureFixture[str]) -> None:
    """Ops a second of each case against SimPy's timeouts a second, medians of interleaved repeats."""
    rows = []
    for name, make in CASES.items():
        program = make()
        yard, rate, ops = [], [], 0
        for _ in range(REPEATS):
            gc.collect()
            yard.append(simpy_timeouts())
            trace = run(program)
            ops = len(trace)
            rate.append(ops / trace.wall_seconds)
        ratio = statistics.median(y / s for y, s in zip(yard, rate, strict=True))
        rows.append(
            {
                "case": name,
                "ops": ops,
                "ops_per_second": statistics.median(rate),
                "timeouts_per_second": statistics.median(yard),
                "ratio": ratio,
            }
        )
    keep("executor", rows)
    with capsys.disabled():
        print("\n" + speed.executor_table(rows))


def alone(cases: Sequence[Case], repeats: int = 3) -> list[dict[str, Any]]:
    """Measure each job in a process of its own."""
    here = Path(__file__).parent
    rows = []
    for case in cases:
        command = [
            sys.executable,
            str(here / "big_jobs.py"),
            json.dumps(msgspec.to_builtins(case)),
            str(repeats),
        ]
        done = subprocess.run(
            command,
            check=True,
            capture_output=True,
            text=True,
            env=os.environ | {"PYTHONPATH": str(here.parent)},
        )
        rows.append(json.loads(done.stdout))
    return rows


def test_llama_3_405b(capsys: pytest.CaptureFixture[str]) -> None:
    """A step on 16,384 GPUs, planned, played and reported; with an uplink that binds; and on 131,072 GPUs."""
    rows = alone(
        [
            Case(),
            Case(sharding="ddp"),
            Case(uplink=True),
            Case(gpus=131_072),
            Case(gpus=131_072, sharding="ddp"),
        ]
    )
    keep("jobs", rows)
    with capsys.disabled():
        print("\n" + speed.job_table(rows))


def test_growth(capsys: pytest.CaptureFixture[str]) -> None:
    """Seconds over ranks (flat), microbatches and layers (linear)."""
    parts = {
        "ranks": [Case(gpus=gpus) for gpus in (1024, 4096, 16_384, 131_072)],
        "microbatches": [Case(microbatches=m) for m in (4, 8, 16, 32, 64)],
        "layers": [Case(layers=layers) for layers in (32, 64, 126, 256, 512)],
    }
    for part, cases in parts.items():
        rows = alone(cases, repeats=2)
        keep(part, rows)
        with capsys.disabled():
            print(f"\nover {part}:\n" + speed.job_table(rows))


def test_flow_sharing(capsys: pytest.CaptureFixture[str]) -> None:
    """Flows a second of many flows that share links, as in the tables (tests/data)."""
    rows = []
    for name in ("star_1000", "star_3000"):
        flows = star(f"{name}.txt")
        # What is compiled or loaded once is not a flow's time.
        play([50 * G] * 256, star("star_1000.txt"), 50 * G)
        yard, seconds = [], []
        for _ in range(REPEATS):
            gc.collect()
            yard.append(simpy_timeouts())
            began = time.perf_counter()
            play([50 * G] * 256, flows, 50 * G)
            seconds.append(time.perf_counter() - began)
        rows.append(
            {
                "case": name,
                "flows": len(flows),
                "flows_per_second": len(flows) / statistics.median(seconds),
                "timeouts_per_second": statistics.median(yard),
            }
        )
    keep("flows", rows)
    with capsys.disabled():
        print("\n" + speed.flow_table(rows))


def test_export(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A trace of some 90,000 spans written as the viewers read it."""
    trace = run(plan(Case().job()))
    seconds = []
    for name in ("trace.json", "trace.json.gz"):
        began = time.perf_counter()
        save_trace(trace, tmp_path / name)
        seconds.append((name, time.perf_counter() - began, (tmp_path / name).stat().st_size))
    with capsys.disabled():
        for name, took, size in seconds:
            print(f"\nexport of {len(trace):,} spans: {name} {took:.2f} s, {size / 1e6:.1f} MB")


@pytest.mark.parametrize("name", list(CASES)[:3])
def test_where_the_time_goes(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    program = CASES[name]()
    profile = cProfile.Profile()
    profile.runcall(run, program)
    text = io.StringIO()
    stats = pstats.Stats(profile, stream=text)
    stats.strip_dirs().sort_stats("tottime").print_stats(12)
    with capsys.disabled():
        print(f"\n{name}")
        print("\n".join(line for line in text.getvalue().splitlines()[4:] if line.strip()))
