"""Programs and traces written by hand, for tests of what a trace means."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from emulator.plan.program import (
    COMPUTE,
    Buffer,
    Fixed,
    Group,
    Op,
    Program,
    RankClass,
    Template,
    Transfer,
    Work,
)
from emulator.run.trace import Columns, Trace
from emulator.spec.cluster import Cluster, Host
from emulator.spec.device import device
from emulator.spec.job import Job
from emulator.spec.model import Model
from emulator.spec.parallel import DataParallel, FixedTimes, Layout, Pipeline

COLUMNS = Columns.__struct_fields__

US = 10**6
"""Picoseconds of a microsecond."""

MODEL = Model(name="tiny", layers=8, hidden=64, ffn_hidden=128, heads=4, kv_heads=4, vocab=256)


def job(pp: int = 1, dp: int = 1, microbatches: int = 1, teaching: bool = True, **fields: object) -> Job:
    """A job that a handmade program can belong to; a teaching world unless told otherwise."""
    given: dict[str, object] = {
        "model": MODEL,
        "cluster": Cluster(device=device("h100-sxm"), nodes=8, host=Host()),
        "seq_len": 64,
        "global_batch": dp * microbatches,
        "layout": Layout(pp=pp, dp_shard=dp),
        "pipeline": Pipeline("gpipe"),
        "data_parallel": DataParallel(),
        "fixed_times": FixedTimes(forward=1e-6, backward=2e-6) if teaching else None,
    }
    return Job(**(given | fields))  # type: ignore[arg-type]


class Timed(NamedTuple):
    """An op and when it happened."""

    op: Op
    issued: int
    ready: int
    start: int
    begin: int
    end: int
    alone: int


def timed(
    name: str,
    work: Work,
    start: int,
    end: int,
    *,
    stream: str = COMPUTE,
    issued: int = 0,
    ready: int | None = None,
    begin: int | None = None,
    alone: int | None = None,
    **fields: object,
) -> Timed:
    """An op that was ready and began when it started, and took as long as alone, unless told otherwise."""
    begin = start if begin is None else begin
    ready = start if ready is None else ready
    op = Op(name=name, stream=stream, work=work, **fields)  # type: ignore[arg-type]
    return Timed(op, issued, ready, start, begin, end, end - begin if alone is None else alone)


def trace(
    the_job: Job,
    *steps: Sequence[Sequence[Timed]],
    groups: tuple[Group, ...] = (),
    buffers: tuple[Buffer, ...] = (),
    stages: Sequence[int] = (),
) -> Trace:
    """One list of ranks a step; each rank its own class; groups go by axis, peers by rank ("0", "1", ...)."""
    templates, classes = [], []
    for r, ops in enumerate(steps[0]):
        templates.append(Template(f"rank{r}", stages[r] if stages else 0, tuple(t.op for t in ops), buffers))
        named = {group.axis: g for g, group in enumerate(groups) if r in group.ranks}
        classes.append(RankClass((r,), r, named, {str(i): i for i in range(len(steps[0]))}))
    program = Program(the_job, tuple(templates), tuple(classes), groups)
    rows = [
        (rank, i, step, t.issued, t.ready, t.start, t.begin, t.end, t.alone)
        for step, ranks in enumerate(steps)
        for rank, ops in enumerate(ranks)
        for i, t in enumerate(ops)
    ]
    columns = dict(zip(COLUMNS, zip(*rows, strict=True), strict=True))
    return Trace(program, **columns)  # type: ignore[arg-type]


def gpipe(p: int, m: int, forward: int, backward: int, transfer: int = 0) -> Program:
    """GPipe with p stages and m microbatches, one rank a stage, one activation buffer a microbatch."""
    templates, classes = [], []
    for s in range(p):
        builder = _Stage(s, p)
        for phase, duration, source, target in (("F", forward, s - 1, s + 1), ("B", backward, s + 1, s - 1)):
            for i in range(m):
                builder.action(phase, i, duration, source, target, transfer)
        buffers = tuple(Buffer(f"activations {i}", "activations", 100) for i in range(m))
        weights = Buffer("weights", "weights", 1000, persistent=True)
        templates.append(Template(f"stage{s}", s, tuple(builder.ops), (*buffers, weights)))
        classes.append(RankClass((s,), s, {}, {"prev": s - 1, "next": s + 1}))
    return Program(job(pp=p, microbatches=m), tuple(templates), tuple(classes), ())


class _Stage:
    def __init__(self, stage: int, stages: int) -> None:
        self.stage, self.stages = stage, stages
        self.ops: list[Op] = []

    def action(self, phase: str, i: int, duration: int, source: int, target: int, transfer: int) -> None:
        waits: tuple[int, ...] = ()
        if 0 <= source < self.stages:
            waits = (self.transfer("recv", phase, i, source, transfer, ()),)
        self.ops.append(
            Op(
                name=f"{self.stage}{phase}{i}",
                stream=COMPUTE,
                work=Fixed(duration),
                waits=waits,
                phase=phase,  # type: ignore[arg-type]
                stage=self.stage,
                microbatch=i,
                allocates=(i,) if phase == "F" else (),
                frees=(i,) if phase == "B" else (),
            )
        )
        if 0 <= target < self.stages:
            self.transfer("send", phase, i, target, transfer, (len(self.ops) - 1,))

    def transfer(
        self, kind: str, phase: str, i: int, other: int, duration: int, waits: tuple[int, ...]
    ) -> int:
        peer = "next" if other > self.stage else "prev"
        boundary = f"{phase}{i} {min(self.stage, other)}-{max(self.stage, other)}"
        work = Transfer(
            kind=kind,  # type: ignore[arg-type]
            peer=peer,
            axis="pp",
            bytes=8192,
            tag=boundary,
            duration_ps=duration,
        )
        name = f"{self.stage}{kind.upper()}_{phase}{i}"
        self.ops.append(
            Op(name=name, stream=f"pp.{kind}_{peer}", work=work, waits=waits, stage=self.stage, microbatch=i)
        )
        return len(self.ops) - 1
