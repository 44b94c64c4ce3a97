"""The checker that every test's run passes through: whether what happened obeyed the rules.

It knows the Program, the Trace and the levels that the pool set, and replays them with arithmetic of its own.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from emulator.report.memory import memory_by_stage
from emulator.run.activity import SLACK, Running
from emulator.run.executor import Recording
from emulator.run.maxmin import LEVEL_BITS
from emulator.run.meetings import PER_DEVICE, SM
from emulator.run.trace import Trace


class AuditError(AssertionError):
    """A run broke a rule: our own bug."""


def audit(trace: Trace, recording: Recording, memory_limit: bool = False) -> None:
    """Raise AuditError unless the run kept to all rules.

    Streams run their ops one after the other and in order; nothing begins before what it waits for has ended
    nor before the host has issued it; the parties of a meeting move together; every activity does the work
    planned, no more and no less; at no time is a resource loaded past its capacity less what is held. With
    `memory_limit`, live memory also stays within the device.
    """
    _streams_and_dependencies(trace)
    _meetings(trace, recording)
    _work(recording)
    _loads(trace, recording)
    if memory_limit:
        for stage in memory_by_stage(trace.program, trace).stages:
            _require(0 <= stage.peak <= trace.program.job.cluster.device.hbm_bytes, f"memory of {stage}")


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise AuditError(what)


def _streams_and_dependencies(trace: Trace) -> None:
    columns = trace.columns
    for c in range(len(trace.program.classes)):
        template = trace.template(c)
        last = template.body.predecessors()
        follows = np.flatnonzero(last >= 0)
        waits = template.body.waits
        after = np.concatenate([follows, waits.owners])
        before = np.concatenate([last[follows], waits.items])
        for step in range(trace.steps):
            spans = np.count_nonzero(columns.step[trace.class_rows(c)] == step)
            rows = trace.step_rows(c, step)
            every = spans == len(template) and bool((rows >= 0).all())
            _require(every, f"class {c} step {step}: {spans} spans for {len(template)} ops")
            start, end = columns.start_ps[rows], columns.end_ps[rows]
            begin, ready, issued = (x[rows] for x in (columns.begin_ps, columns.ready_ps, columns.issued_ps))
            _require(
                bool((end >= begin).all() and (begin >= start).all()), f"class {c}: a span runs backwards"
            )
            _require(bool((start >= np.maximum(ready, issued)).all()), f"class {c}: a span starts too early")
            for i in np.flatnonzero(ready[after] < end[before])[:1].tolist():
                name, other = template.op_name(after[i]), template.op_name(before[i])
                _require(False, f"class {c}: {name} did not wait for {other}")


def _meetings(trace: Trace, recording: Recording) -> None:
    columns = trace.columns
    moving: dict[tuple[int, int], set[tuple[int, int]]] = defaultdict(set)
    present: dict[tuple[int, int], int] = defaultdict(int)
    planned = {
        (c, op.op_index): op.meeting
        for c, streams in enumerate(recording.lowered.streams)
        for stream in streams.values()
        for op in stream.planned()
        if op.meeting >= 0
    }
    for row in range(len(trace)):
        meeting = planned.get((int(columns.class_index[row]), int(columns.op_index[row])))
        if meeting is not None:
            key = (meeting, int(columns.step[row]))
            moving[key].add((int(columns.begin_ps[row]), int(columns.end_ps[row])))
            present[key] += 1
    for key, spans in moving.items():
        plan = recording.lowered.meetings[key[0]]
        _require(len(spans) == 1, f"{plan.name}: its parties did not move together: {spans}")
        _require(
            present[key] == len(plan.parties), f"{plan.name}: {present[key]} of {len(plan.parties)} came"
        )


def _work(recording: Recording) -> None:
    level: dict[Running, int] = {}
    since: dict[Running, int] = {}
    done: dict[Running, int] = defaultdict(int)
    last: dict[Running, int] = {}
    for now, activity, new in recording.levels:
        last[activity] = level.get(activity, 0)
        done[activity] += last[activity] * (now - since.get(activity, now))
        level[activity], since[activity] = new, now
    _require(not any(level.values()), "an activity never ended")
    # Level 0 in between is a wait for resources that others take whole; the last one is the end.
    for activity, before in last.items():
        excess = done[activity] - activity.activity.length
        _require(-SLACK <= excess < max(1, before), f"work done - work planned = {excess} >> 62 ps")


def _loads(trace: Trace, recording: Recording) -> None:
    """Replay the loads: at the end of every instant, used + held <= capacity on every resource."""
    held = _holds(trace, recording)
    used: dict[int, int] = defaultdict(int)
    level: dict[Running, int] = {}
    changes: dict[int, list[tuple[Running, int]]] = defaultdict(list)
    for now, activity, new in recording.levels:
        changes[now].append((activity, new))
    holding: dict[int, int] = defaultdict(int)
    for now in sorted(changes.keys() | held.keys()):
        touched = set()
        for resource, amount in held.get(now, ()):
            holding[resource] += amount
            touched.add(resource)
        for activity, new in changes.get(now, ()):
            delta = new - level.get(activity, 0)
            level[activity] = new
            for resource, demand in activity.demands:
                used[resource] += demand * delta
                touched.add(resource)
        for resource in touched:
            room = (recording.lowered.capacities[resource] - holding[resource]) << LEVEL_BITS
            name = recording.lowered.resource_names[resource]
            _require(
                0 <= used[resource] <= room,
                f"{name} is loaded {used[resource] / max(1, room):.6f} at {now} ps",
            )


def _holds(trace: Trace, recording: Recording) -> dict[int, list[tuple[int, int]]]:
    """Time -> (resource, change of what is held), from the spans of the ops that hold SMs."""
    columns = trace.columns
    amounts = {
        (c, op.op_index): op.hold
        for c, streams in enumerate(recording.lowered.streams)
        for stream in streams.values()
        for op in stream.planned()
        if op.hold
    }
    changes: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for row in range(len(trace)):
        c = int(columns.class_index[row])
        amount = amounts.get((c, int(columns.op_index[row])))
        if amount:
            resource = c * PER_DEVICE + SM
            changes[int(columns.start_ps[row])].append((resource, amount))
            changes[int(columns.end_ps[row])].append((resource, -amount))
    return changes
