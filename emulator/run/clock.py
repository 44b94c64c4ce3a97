"""The clock of a run: SimPy's environment in picoseconds, and what the pool needs of its queue."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import simpy
from simpy.events import NORMAL, EventPriority

END_OF_INSTANT = EventPriority(2)
"""SimPy priority after URGENT (0) and NORMAL (1): what is scheduled so runs when nothing else is left now."""

Callbacks = list[Callable[[simpy.Event], None]]


class Clock(simpy.Environment):
    """SimPy's environment with a time that counts picoseconds: it starts at 0 and all delays are integers."""

    if TYPE_CHECKING:
        _now: int  # the same, without the call of a property

        @property
        def now(self) -> int:
            """The time, in picoseconds."""

    def more_now(self) -> bool:
        """Whether something else is left in the queue for this instant."""
        return bool(self._queue) and self._queue[0][0] == self._now


class Alarm(simpy.Event):
    """Calls back after a delay; at once, but after everything else of this instant, if it is for its end."""

    def __init__(
        self,
        env: Clock,
        callbacks: Callbacks,
        delay: int,
        priority: EventPriority = NORMAL,
    ) -> None:
        self.env = env
        self.callbacks = callbacks
        self._ok, self._value = True, None
        env.schedule(self, priority, delay)


def wake(events: list[simpy.Event]) -> None:
    """Process events here and now, as SimPy would if it found them next in its queue."""
    woken = 0
    try:
        for event in events:
            woken += 1
            event._ok, event._value = True, None
            callbacks, event.callbacks = event.callbacks, None  # type: ignore[assignment]  # as SimPy does
            for callback in callbacks:
                callback(event)
    finally:
        for event in events[woken:]:  # somebody stopped the simulation: they are next if it goes on
            event.succeed()
