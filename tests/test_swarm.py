"""Random jobs through plan, check, run, audit, account, memory and export.

Every job comes from one number, which a failure prints with the job: `SWARM_SEED=<number> pytest
tests/test_swarm.py` plays that job first. The slow swarm draws a fresh seed each time.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from collections import defaultdict
from pathlib import Path

import msgspec
import pytest
from random_jobs import random_job

from emulator.plan import plan
from emulator.plan.check import check
from emulator.plan.program import Program
from emulator.plan.text import show
from emulator.report.account import account
from emulator.report.audit import audit
from emulator.report.export import save_trace
from emulator.report.memory import live_bytes, memory_by_stage
from emulator.report.metrics import measure
from emulator.run import run, run_audited
from emulator.run.trace import Trace

FIRST_SEED = 1
SECONDS = 15.0
"""Time that the swarm of the normal suite takes; the slow one takes SLOW_SECONDS."""
SLOW_SECONDS = 1200.0
MOST_OPS = 6_000
"""Spans of a random run: small runs find as much as large ones, and more of them fit in the time."""


def planned_spans(program: Program) -> int:
    sizes = [len(template.ops) for template in program.templates]
    return sum(sizes[c.template] for c in program.classes) * program.job.steps


def examine(program: Program, folder: Path) -> None:
    """Play a program, and hold everything that is said of the run against everything else."""
    check(program)
    trace, recording = run_audited(program)
    audit(trace, recording)
    assert len(trace) == planned_spans(program)
    assert trace.outcome.kind == "complete"
    assert run(program).to_bytes() == trace.to_bytes()
    _order_of_classes_does_not_matter(program, trace)
    _accounts(trace)
    _memory(program, trace)
    report = measure(trace)
    json.dumps(report.to_dict(), allow_nan=False)
    assert str(report)
    assert show(program)
    _export(trace, folder)


def _order_of_classes_does_not_matter(program: Program, trace: Trace) -> None:
    backwards = msgspec.structs.replace(program, classes=program.classes[::-1])
    other = run(backwards)
    last = len(program.classes) - 1
    c = other.columns
    flipped = msgspec.structs.replace(c, class_index=last - c.class_index)
    columns = {name: getattr(flipped, name) for name in flipped.__struct_fields__}
    again = Trace(program, outcome=other.outcome, **columns)
    assert again.to_bytes() == trace.to_bytes()


def _accounts(trace: Trace) -> None:
    ends = [trace.where(rank=rank).end_ps for rank in trace.ranks]
    assert max(ends) == trace.end_ps
    for rank, step in itertools.product(trace.ranks, range(trace.steps)):
        times = account(trace, rank, step)
        causes = times.causes()
        assert sum(causes.values()) == times.step_ps
        assert min(causes.values()) >= 0
    assert sum(account(trace, rank, step).step_ps for step in range(trace.steps)) == ends[rank]
    report = measure(trace)
    for axis, traffic in report.communication.items():
        assert traffic.overlapped_seconds <= traffic.seconds * (1 + 1e-9), axis
        assert traffic.bytes_per_gpu >= 0
        # In a pipeline and among members exposure also counts the wait for others, so time is its bound.
        assert 0 <= traffic.exposed_seconds <= report.step_seconds + 1e-12
    bubble = report.bubble
    assert bubble.of_step is None or 0 <= bubble.of_step < 1
    if trace.program.job.fixed_times is None:
        assert report.mfu is not None
        assert 0 < report.mfu <= 1
        assert report.hfu is not None
        assert report.mfu <= report.hfu * (1 + 1e-9)


def _memory(program: Program, trace: Trace) -> None:
    before, after = memory_by_stage(program), memory_by_stage(program, trace)
    assert [stage.stage for stage in before.stages] == [stage.stage for stage in after.stages]
    for rank_class in program.classes:
        template = program.templates[rank_class.template]
        persistent = sum(b.bytes for b in template.buffers if b.persistent)
        everything = sum(b.bytes for b in template.buffers)
        for step in range(trace.steps):
            live = live_bytes(trace, rank_class.members[0], step).bytes
            assert (live >= 0).all()
            totals = live.sum(axis=1)
            assert totals[0] == totals[-1] == persistent
            assert persistent <= totals.max() <= everything


def _export(trace: Trace, folder: Path) -> None:
    path = folder / "trace.json"
    save_trace(trace, path, trace.ranks)
    events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    lanes: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            assert event["dur"] >= 0
            lanes[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    assert lanes
    for spans in lanes.values():
        spans.sort()
        assert all(one[1] <= two[0] for one, two in itertools.pairwise(spans))
    starts = {event["id"] for event in events if event["ph"] == "s"}
    ends = {event["id"] for event in events if event["ph"] == "f"}
    assert starts == ends


def swarm(first: int, seconds: float, folder: Path) -> int:
    """Play jobs from `first` on until the time is up; return how many were played."""
    until = time.monotonic() + seconds
    played = 0
    for seed in itertools.count(first):
        job = random_job(seed)
        program = plan(job)
        if planned_spans(program) <= MOST_OPS:
            try:
                examine(program, folder)
            except Exception as error:
                error.add_note(f"SWARM_SEED={seed} plays it again: {job}")
                raise
            played += 1
        if time.monotonic() > until:
            break
    return played


def test_random_jobs_keep_every_rule(tmp_path: Path) -> None:
    """A few dozen jobs, the same ones every time unless SWARM_SEED says where to begin."""
    assert swarm(int(os.environ.get("SWARM_SEED", FIRST_SEED)), SECONDS, tmp_path) > 5


@pytest.mark.slow
def test_thousands_of_random_jobs_keep_every_rule(tmp_path: Path) -> None:
    seed = int(os.environ.get("SWARM_SEED", time.time_ns() % 2**40))
    print(f"\nswarm from SWARM_SEED={seed}")
    print(f"{swarm(seed, SLOW_SECONDS, tmp_path)} jobs")


def test_a_seed_means_one_job() -> None:
    assert random_job(7) == random_job(7)
    assert len({repr(random_job(seed)) for seed in range(20)}) == 20
