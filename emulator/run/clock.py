"""The clock of a run: SimPy's environment in picoseconds, with an alarm, and with ends of instants.

At every instant SimPy's urgent events come first, then the alarm, if it is set for that time, then all other
events, and when nothing is left, the end of the instant, if it was asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import simpy
from simpy.events import URGENT, EventPriority

NEVER = -1
FIRST = EventPriority(-1)
"""Priority before URGENT: of what a stop of the simulation has cut short, as SimPy has it."""


class Clock(simpy.Environment):
    """SimPy's environment with a time that counts picoseconds: it starts at 0 and all delays are integers."""

    if TYPE_CHECKING:
        _now: int  # the same, without the call of a property

        @property
        def now(self) -> int:
            """The time, in picoseconds."""

    def __init__(self) -> None:
        super().__init__()
        self.alarm_ps = NEVER
        """When to call `ring`: later than now. It is not set then."""
        self.closing = False
        """Whether to call `close` at the end of this instant. It is not asked for any more then."""
        self.ring: Callable[[], None]
        self.close: Callable[[], None]
        """Both are set by the one pool that goes by this clock."""

    def more_now(self) -> bool:
        """Whether something else is left in the queue for this instant."""
        return bool(self._queue) and self._queue[0][0] == self._now

    def peek(self) -> float:
        """When something happens next."""
        if self.closing:
            return self._now
        return super().peek() if self.alarm_ps == NEVER else min(self.alarm_ps, super().peek())

    def step(self) -> None:
        """Process what comes next; raises EmptySchedule if nothing does."""
        queue, alarm = self._queue, self.alarm_ps
        if self.closing and alarm != self._now:  # it is due now if the clock was stopped before it
            if not queue or queue[0][0] != self._now:
                self.closing = False
                self.close()
                return
        elif alarm >= 0:
            when = queue[0][0] if queue else alarm
            if alarm < when or (alarm == when and not (queue and queue[0][1] <= URGENT)):
                self.alarm_ps = NEVER
                self._now = alarm
                self.ring()
                return
        super().step()
