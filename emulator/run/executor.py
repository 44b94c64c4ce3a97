"""Plays a Program: every stream of a rank class is a SimPy process, and so is every host.

A stream takes its ops in order. For each it waits until the ops it depends on have ended, until the host has
issued it, and, if it holds SMs, until those are free; then it starts the op's activity in the pool, or comes
to its meeting, and waits for the end. Only what has not happened yet is waited for.

A step of a rank begins when all its ops of the step before have ended: its host starts issuing then.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from typing import NamedTuple

import numpy as np
import simpy

from emulator.plan.program import Op, Program
from emulator.run.cost import MICRO_SM
from emulator.run.errors import DeadlockError
from emulator.run.lower import PER_DEVICE, SM, Lowered, Planned, lower
from emulator.run.pool import Clock, Pool, Running
from emulator.run.trace import Outcome, Trace

Process = Generator[simpy.Event, None, None]
Progress = Callable[[int, int], None]
"""Called now and then with (spans recorded, spans in all)."""

PROGRESS_EVENTS = 20_000
"""SimPy events between two calls of a progress function."""


class _Meeting:
    """One occurrence of a collective or a transfer."""

    __slots__ = ("arrived", "begin_ps", "done")

    def __init__(self, env: Clock) -> None:
        self.arrived: list[int] = []
        self.begin_ps = 0
        self.done = simpy.Event(env)


class _Join:
    """A stream's wait for several ops: `event` fires when `missing` has come down to zero."""

    __slots__ = ("event", "missing")

    def __init__(self, env: Clock, missing: int) -> None:
        self.event = simpy.Event(env)
        self.missing = missing


class _Rank:
    """State of one rank class while it is played."""

    def __init__(self, env: Clock, index: int, streams: dict[str, list[Planned]], steps: int) -> None:
        self.env = env
        self.index = index
        self.sm = index * PER_DEVICE + SM
        self.streams = streams
        self.ended = [False] * sum(map(len, streams.values()))
        self.joins: dict[int, list[_Join]] = {}
        self.host_began_ps = 0
        self.running = 0
        self.go = [simpy.Event(env) for _ in range(steps)]
        self.over = [simpy.Event(env) for _ in range(steps)]
        self.head: dict[str, Planned] = {}
        self.spans: list[tuple[int, ...]] = []

    def join(self, ops: list[int]) -> simpy.Event:
        """Event of the moment when all these ops have ended; none of them has yet."""
        join = _Join(self.env, len(ops))
        for op in ops:
            self.joins.setdefault(op, []).append(join)
        return join.event

    def end(self, op: int) -> None:
        """Note that an op has ended, and wake who waited for it last."""
        self.ended[op] = True
        for join in self.joins.pop(op, ()):
            join.missing -= 1
            if not join.missing:
                join.event.succeed()


class Recording(NamedTuple):
    """What an audited run leaves beside its trace, for the checker."""

    lowered: Lowered
    levels: list[tuple[int, Running, int]]
    """(time, running activity, new level) in order; level 0 at the end."""


class Executor:
    """One run of one Program."""

    def __init__(
        self, program: Program, steps: int, audit: bool = False, progress: Progress | None = None
    ) -> None:
        self.program = program
        self.env = Clock()
        self.lowered = lower(program)
        self.recording = Recording(self.lowered, [])
        note = self.recording.levels
        self.pool = Pool(self.env, self.lowered.capacities, (lambda *e: note.append(e)) if audit else None)
        self.meetings: dict[tuple[int, int], _Meeting] = {}
        self.ranks = [_Rank(self.env, c, s, steps) for c, s in enumerate(self.lowered.streams)]
        self.steps = steps
        self.unfinished = len(self.ranks)
        self.finished = simpy.Event(self.env)
        self.progress = progress

    def run(self) -> Trace:
        """Play all steps; raises DeadlockError if the run comes to rest with ops left."""
        began = time.perf_counter()
        env = self.env
        for rank in self.ranks:
            env.process(self._host(rank))
            for name, ops in rank.streams.items():
                env.process(self._stream(rank, name, ops))
        events = 0
        try:
            while not self.finished.triggered:
                for _ in range(PROGRESS_EVENTS):
                    env.step()
                    events += 1
                    if self.finished.triggered:
                        break
                if self.progress:
                    in_all = sum(len(rank.ended) for rank in self.ranks) * self.steps
                    self.progress(sum(len(rank.spans) for rank in self.ranks), in_all)
        except simpy.core.EmptySchedule:
            raise DeadlockError(env.now, self._blocked()) from None
        return self._trace(events, time.perf_counter() - began)

    def _host(self, rank: _Rank) -> Process:
        for go, over in zip(rank.go, rank.over, strict=True):
            rank.host_began_ps = self.env.now
            rank.ended = [False] * len(rank.ended)
            rank.running = len(rank.streams)
            go.succeed()
            if rank.streams:
                yield over
        self.unfinished -= 1
        if not self.unfinished:
            self.finished.succeed()

    def _stream(self, rank: _Rank, name: str, ops: list[Planned]) -> Process:
        env, pool, spans = self.env, self.pool, rank.spans
        for step in range(self.steps):
            yield rank.go[step]
            ended, began = rank.ended, rank.host_began_ps
            for op in ops:
                rank.head[name] = op
                op_index, waits, issue, activity, number, hold = op
                if waits:
                    blockers = [w for w in waits if not ended[w]]
                    if blockers:
                        yield rank.join(blockers)
                ready = env.now
                issued = began + issue
                if issued > ready:
                    yield env.timeout(issued - ready)
                if hold:
                    free = pool.hold(rank.sm, hold)
                    if free:
                        yield free
                start = begin = env.now
                alone = 0
                if activity:
                    alone = activity.alone_ps
                    yield pool.start(activity)
                elif number >= 0:
                    meeting = self._meet(rank, number, step)
                    yield meeting.done
                    begin = meeting.begin_ps
                    planned = self.lowered.meetings[number].activity
                    alone = planned.alone_ps if planned else 0
                if hold:
                    pool.release(rank.sm, hold)
                rank.end(op_index)
                spans.append((op_index, step, issued, ready, start, begin, env.now, alone))
            rank.running -= 1
            if not rank.running:
                rank.over[step].succeed()
        del rank.head[name]

    def _meet(self, rank: _Rank, number: int, step: int) -> _Meeting:
        """Come to a meeting; the last to come starts what it is about."""
        key = (number, step)
        meeting = self.meetings.get(key)
        if meeting is None:
            meeting = self.meetings[key] = _Meeting(self.env)
        meeting.arrived.append(rank.index)
        plan = self.lowered.meetings[number]
        if len(meeting.arrived) == len(plan.parties):
            del self.meetings[key]
            meeting.begin_ps = self.env.now
            activity = plan.activity
            if activity:
                self.pool.start(activity, meeting.done)
            else:
                meeting.done.succeed()
        return meeting

    def _blocked(self) -> list[str]:
        """Who waits for what, a line per stream that is not done."""
        lines = []
        for rank in self.ranks:
            ops = self.program.templates[self.program.classes[rank.index].template].ops
            for name, planned in rank.head.items():
                if not rank.ended[planned.op_index]:
                    reason = self._reason(rank, planned, ops)
                    lines.append(f"{self._who(rank.index)} {name}: {ops[planned.op_index].name} {reason}")
        return lines

    def _who(self, rank_class: int) -> str:
        return f"rank {self.program.classes[rank_class].members[0]}"

    def _reason(self, rank: _Rank, planned: Planned, ops: tuple[Op, ...]) -> str:
        blockers = [ops[w].name for w in planned.waits if not rank.ended[w]]
        if blockers:
            return f"waits for {', '.join(blockers[:3])}"
        for (number, _), meeting in self.meetings.items():
            if number == planned.meeting:
                plan = self.lowered.meetings[number]
                if rank.index in meeting.arrived:
                    missing = [self._who(party) for party in plan.parties if party not in meeting.arrived]
                    return f"waits in {plan.name} for {', '.join(missing[:3])}"
        if planned.hold:
            return f"waits for {planned.hold / MICRO_SM:g} free SMs, or for a link without capacity"
        return "runs on a resource without capacity"

    def _trace(self, events: int, wall_seconds: float) -> Trace:
        rows = np.array([span for rank in self.ranks for span in rank.spans], dtype=np.int64).reshape(-1, 8)
        counts = [len(rank.spans) for rank in self.ranks]
        classes = np.repeat(np.arange(len(counts), dtype=np.int64), counts)
        op_index, step, issued, ready, start, begin, end, alone = rows.T
        return Trace(
            program=self.program,
            class_index=classes,
            op_index=op_index,
            step=step,
            issued_ps=issued,
            ready_ps=ready,
            start_ps=start,
            begin_ps=begin,
            end_ps=end,
            alone_ps=alone,
            outcome=Outcome("complete", int(end.max()) if len(end) else 0),
            events=events,
            wall_seconds=wall_seconds,
        )
