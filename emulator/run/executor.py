"""Plays a Program: every stream of a rank class is a SimPy process, and so is every host.

A stream takes its ops in order. For each it waits until the ops it depends on have ended, until the host has
issued it, and, if it holds SMs, until those are free; then it starts the op's activity in the pool, or comes
to its meeting, and waits for the end. Only what has not happened yet is waited for:

    ready  =  the latest end of the op before it on the stream and of its waits
    start  =  max(ready, issued), later if SMs to hold are not free
    begin  =  start, or when the last party has come to the meeting
    end    =  when the activity has ended

A step of a rank begins when all its ops of the step before have ended: its host starts issuing then.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Generator
from itertools import count
from typing import NamedTuple

import numpy as np
import simpy

from emulator.plan.program import Program
from emulator.run.activity import Running
from emulator.run.clock import Clock
from emulator.run.cost import MICRO_SM
from emulator.run.errors import DeadlockError
from emulator.run.lower import Lowered, StreamPlan, lower
from emulator.run.meetings import PER_DEVICE, SM
from emulator.run.pool import Pool
from emulator.run.trace import Outcome, Trace
from emulator.spec.arrays import Int64

Process = Generator[simpy.Event, None, None]
Progress = Callable[[int, int], None]
"""Called now and then with (spans recorded, spans in all)."""

PROGRESS_EVENTS = 20_000
"""SimPy events between two calls of a progress function."""
TIMES = 4
"""What is noted of an op: ready, start, begin and end."""


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

    def __init__(self, env: Clock, index: int, streams: dict[str, StreamPlan], steps: int) -> None:
        self.env = env
        self.index = index
        self.sm = index * PER_DEVICE + SM
        self.streams = streams
        self.ops = sum(len(plan.ops) for plan in streams.values())
        self.ended = bytearray(self.ops)
        self.joins: dict[int, list[_Join]] = {}
        self.began_ps: list[int] = []
        """When the host began with each step."""
        self.running = 0
        self.go = [simpy.Event(env) for _ in range(steps)]
        self.over = [simpy.Event(env) for _ in range(steps)]
        self.noted: dict[str, list[int]] = {name: [] for name in streams}
        """For each stream the times of its ops of this step, in the order in which they ended,"""
        self.times = {name: array("q") for name in streams}
        """and those of steps that are over."""

    def join(self, ops: list[int]) -> simpy.Event:
        """Event of the moment when all these ops have ended; none of them has yet."""
        join = _Join(self.env, len(ops))
        for op in ops:
            self.joins.setdefault(op, []).append(join)
        return join.event

    def wake(self, op: int) -> None:
        """Wake who waited for this op last."""
        for join in self.joins.pop(op):
            join.missing -= 1
            if not join.missing:
                join.event.succeed()

    @property
    def spans(self) -> int:
        """Ops that have ended so far, in all steps."""
        return sum(map(self.spans_of, self.streams))

    def spans_of(self, stream: str) -> int:
        """Ops of a stream that have ended so far, in all steps."""
        return (len(self.times[stream]) + len(self.noted[stream])) // TIMES

    def end_step(self) -> None:
        """Keep the times of this step as plain numbers."""
        for name, noted in self.noted.items():
            self.times[name].frombytes(np.array(noted, dtype=np.int64).tobytes())
            noted.clear()


def _stop(_event: simpy.Event) -> None:
    raise simpy.core.StopSimulation


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
        told = (lambda *event: note.append(event)) if audit else None
        self.pool = Pool(self.env, self.lowered.capacities, told, islands=self.lowered.islands)
        self.meetings: dict[int, _Meeting] = {}
        """Those to which some, but not all have come."""
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
            for name, stream in rank.streams.items():
                env.process(self._stream(rank, stream, rank.noted[name]))
        self.finished.callbacks.append(_stop)
        events, step = 0, env.step
        try:
            for events in count(1):
                step()
                if not events % PROGRESS_EVENTS:
                    self._report_progress()
        except simpy.core.StopSimulation:
            self._report_progress()
        except simpy.core.EmptySchedule:
            raise DeadlockError(env.now, self._blocked()) from None
        return self._trace(events, time.perf_counter() - began)

    def _report_progress(self) -> None:
        if self.progress:
            in_all = sum(rank.ops for rank in self.ranks) * self.steps
            self.progress(sum(rank.spans for rank in self.ranks), in_all)

    def _host(self, rank: _Rank) -> Process:
        for go, over in zip(rank.go, rank.over, strict=True):
            rank.began_ps.append(self.env.now)
            rank.ended = bytearray(rank.ops)
            rank.running = len(rank.streams)
            go.succeed()
            if rank.streams:
                yield over
            rank.end_step()
        self.unfinished -= 1
        if not self.unfinished:
            self.finished.succeed()

    def _stream(self, rank: _Rank, plan: StreamPlan, noted: list[int]) -> Process:
        env, pool = self.env, self.pool
        for step in range(self.steps):
            yield rank.go[step]
            ended, joins, began = rank.ended, rank.joins, rank.began_ps[step]
            now = env._now
            for op, waits, issue, activity, number, hold in zip(*plan, strict=True):
                if waits:
                    blockers = [w for w in waits if not ended[w]]
                    if blockers:
                        yield rank.join(blockers)
                        now = env._now
                ready, issued = now, began + issue
                if issued > now:
                    yield env.timeout(issued - now)
                    now = issued
                if hold:
                    free = pool.hold(rank.sm, hold)
                    if free:
                        yield free
                        now = env._now
                start = begin = now
                if activity:
                    yield pool.start(activity)
                    now = env._now
                elif number >= 0:
                    meeting = self._meet(rank, number)
                    yield meeting.done
                    begin, now = meeting.begin_ps, env._now
                if hold:
                    pool.release(rank.sm, hold)
                ended[op] = True
                if op in joins:
                    rank.wake(op)
                noted += ready, start, begin, now
            rank.running -= 1
            if not rank.running:
                rank.over[step].succeed()

    def _meet(self, rank: _Rank, number: int) -> _Meeting:
        """Come to a meeting; the last to come starts what it is about.

        It is over before any of its parties can come to it again in the next step.
        """
        meeting = self.meetings.get(number)
        if meeting is None:
            meeting = self.meetings[number] = _Meeting(self.env)
        meeting.arrived.append(rank.index)
        plan = self.lowered.meetings[number]
        if len(meeting.arrived) == len(plan.parties):
            del self.meetings[number]
            meeting.begin_ps = self.env.now
            if plan.activity:
                self.pool.start(plan.activity, meeting.done)
            else:
                meeting.done.succeed()
        return meeting

    def _blocked(self) -> list[str]:
        """Who waits for what, a line per stream that is not done."""
        lines = []
        for rank in self.ranks:
            for name, plan in rank.streams.items():
                place = rank.spans_of(name)
                if len(rank.began_ps) * len(plan.ops) > place:
                    head = place % len(plan.ops)
                    op = self._op_name(rank, plan.ops[head])
                    lines.append(f"{self._who(rank.index)} {name}: {op} {self._reason(rank, plan, head)}")
        return lines

    def _who(self, rank_class: int) -> str:
        return f"rank {self.program.classes[rank_class].members[0]}"

    def _op_name(self, rank: _Rank, op: int) -> str:
        return self.program.templates[self.program.classes[rank.index].template].op_name(op)

    def _reason(self, rank: _Rank, plan: StreamPlan, head: int) -> str:
        blockers = [self._op_name(rank, w) for w in plan.waits[head] if not rank.ended[w]]
        if blockers:
            return f"waits for {', '.join(blockers[:3])}"
        meeting = self.meetings.get(plan.meeting[head])
        if meeting and rank.index in meeting.arrived:
            what = self.lowered.meetings[plan.meeting[head]]
            missing = [self._who(party) for party in what.parties if party not in meeting.arrived]
            return f"waits in {what.name} for {', '.join(missing[:3])}"
        if plan.hold[head]:
            return f"waits for {plan.hold[head] / MICRO_SM:g} free SMs, or for a link without capacity"
        return "runs on a resource without capacity"

    def _trace(self, events: int, wall_seconds: float) -> Trace:
        """Put the times of all classes together: rows by class, step and op."""
        counts = [rank.ops * self.steps for rank in self.ranks]
        op_index = [np.tile(np.arange(rank.ops), self.steps) for rank in self.ranks]
        step = [np.repeat(np.arange(self.steps), rank.ops) for rank in self.ranks]
        issued, alone, times = zip(*map(self._columns, self.ranks), strict=True)
        ready, start, begin, end = np.concatenate(times).T
        return Trace(
            program=self.program,
            class_index=np.repeat(np.arange(len(counts)), counts),
            op_index=np.concatenate(op_index),
            step=np.concatenate(step),
            issued_ps=np.concatenate(issued),
            ready_ps=ready,
            start_ps=start,
            begin_ps=begin,
            end_ps=end,
            alone_ps=np.concatenate(alone),
            outcome=Outcome("complete", int(end.max(initial=0))),
            events=events,
            wall_seconds=wall_seconds,
        )

    def _columns(self, rank: _Rank) -> tuple[Int64, Int64, Int64]:
        """When each op was issued, how long it takes alone, and its times, steps one after the other."""
        issue, alone = np.zeros(rank.ops, dtype=np.int64), np.zeros(rank.ops, dtype=np.int64)
        times = np.empty((self.steps, rank.ops, TIMES), dtype=np.int64)
        for name, plan in rank.streams.items():
            issue[plan.ops] = plan.issue_ps
            alone[plan.ops] = [
                what.alone_ps if what else 0
                for what in (
                    activity or (self.lowered.meetings[number].activity if number >= 0 else None)
                    for activity, number in zip(plan.activity, plan.meeting, strict=True)
                )
            ]
            ended = np.frombuffer(rank.times[name], dtype=np.int64)
            times[:, plan.ops] = ended.reshape(self.steps, len(plan.ops), TIMES)
        issued = np.array(rank.began_ps, dtype=np.int64)[:, None] + issue
        return issued.ravel(), np.tile(alone, self.steps), times.reshape(-1, TIMES)
