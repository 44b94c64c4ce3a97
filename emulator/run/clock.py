"""The clock of a run: SimPy's environment in picoseconds, and what the pool needs of its queue."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappush
from typing import TYPE_CHECKING

import simpy
from simpy.events import NORMAL, EventPriority

END_OF_INSTANT = EventPriority(2)
"""SimPy priority after URGENT (0) and NORMAL (1): what is scheduled so runs when nothing else is left now."""

Callbacks = list[Callable[[simpy.Event], None]]


class _Alarm(simpy.Event):
    """Nobody waits for it: it calls back, and may then be set again."""

    _ok, _value = True, None


class Clock(simpy.Environment):
    """SimPy's environment with a time that counts picoseconds: it starts at 0 and all delays are integers."""

    if TYPE_CHECKING:
        _now: int  # the same, without the call of a property

        @property
        def now(self) -> int:
            """The time, in picoseconds."""

    def __init__(self) -> None:
        super().__init__()
        self._alarms: list[simpy.Event] = []
        """Those that are not set."""

    def callbacks(self, call: Callable[[simpy.Event], None]) -> Callbacks:
        """What `call_at` takes to make this call."""
        return [call, self._alarms.append]

    def call_at(self, when: int, callbacks: Callbacks, priority: EventPriority = NORMAL) -> None:
        """Call back at a time; at once, but after everything else of this instant, if it is for its end."""
        alarm = self._alarms.pop() if self._alarms else _Alarm(self)
        alarm.callbacks = callbacks
        heappush(self._queue, (when, priority, next(self._eid), alarm))
