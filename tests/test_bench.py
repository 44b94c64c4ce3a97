"""How fast the executor is: ratios to bare SimPy, measured in the same run. Prints; asserts no times.

`make bench` runs it. Absolute figures depend on the machine, ratios much less.
"""

from __future__ import annotations

import cProfile
import gc
import io
import pstats
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import simpy

from emulator.plan import plan
from emulator.plan.program import COMPUTE, Fixed, Kernel, Op, Program, RankClass, Template
from emulator.run import run
from emulator.spec.cluster import Host, dgx_h100
from emulator.spec.job import Job, Layout, Pipeline
from emulator.spec.load import load_job
from emulator.spec.model import model

pytestmark = pytest.mark.bench

REPEATS = 5
OPS = 40_000


def simpy_timeouts(count: int = 200_000) -> float:
    """Timeouts a second of one process that yields them: the yardstick."""

    def process(env: simpy.Environment) -> simpy.events.ProcessGenerator:
        for _ in range(count):
            yield env.timeout(1)

    env = simpy.Environment()
    env.process(process(env))
    began = time.perf_counter()
    env.run()
    return count / (time.perf_counter() - began)


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
}


def test_executor_speed(capsys: pytest.CaptureFixture[str]) -> None:
    """Ops a second of each case against SimPy's timeouts a second, medians of interleaved repeats."""
    lines = [f"{'case':40} {'ops':>8} {'ops/s':>10} {'SimPy timeouts/s':>17} {'ratio':>7} {'wall s':>7}"]
    for name, make in CASES.items():
        program = make()
        yard, speed, ops, wall = [], [], 0, []
        for _ in range(REPEATS if name.startswith(("unc", "con")) else 3):
            gc.collect()
            yard.append(simpy_timeouts())
            began = time.perf_counter()
            trace = run(program)
            wall.append(time.perf_counter() - began)
            ops = len(trace)
            speed.append(ops / trace.wall_seconds)
        ratio = statistics.median(y / s for y, s in zip(yard, speed, strict=True))
        lines.append(
            f"{name:40} {ops:8} {statistics.median(speed):10,.0f} {statistics.median(yard):17,.0f} "
            f"  1/{ratio:4.1f} {statistics.median(wall):7.2f}"
        )
    with capsys.disabled():
        print("\n" + "\n".join(lines))


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


def test_planning_and_export_speed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from emulator.report import measure
    from emulator.report.export import save_trace

    job = load_job("llama3_8b_fsdp64", [])
    times = {}
    began = time.perf_counter()
    program = plan(job)
    times["plan"] = time.perf_counter() - began
    began = time.perf_counter()
    trace = run(program)
    times["run"] = time.perf_counter() - began
    began = time.perf_counter()
    measure(trace)
    times["measure"] = time.perf_counter() - began
    began = time.perf_counter()
    save_trace(trace, tmp_path / "trace.json")
    times["export"] = time.perf_counter() - began
    with capsys.disabled():
        print(
            f"\nLlama 3 8B on 64 ranks, {len(trace):,} spans: "
            + ", ".join(f"{k} {v:.2f} s" for k, v in times.items())
        )
