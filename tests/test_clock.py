"""The clock: SimPy's order of events, with an alarm of its own and ends of instants."""

from __future__ import annotations

import pytest
import simpy

from emulator.run.clock import NEVER, Clock


def logging_clock() -> tuple[Clock, list[tuple[int, str]]]:
    """A clock whose alarm and ends of instants are written down."""
    clock = Clock()
    log: list[tuple[int, str]] = []
    clock.ring = lambda: log.append((clock.now, "alarm"))
    clock.close = lambda: log.append((clock.now, "end"))
    return clock, log


def says(clock: Clock, log: list[tuple[int, str]], at: int, what: str) -> None:
    """Something that happens at a time, and asks for the end of that instant."""

    def process() -> simpy.events.ProcessGenerator:
        yield clock.timeout(at)
        log.append((clock.now, what))
        clock.closing = True

    clock.process(process())


def test_the_alarm_comes_before_events_of_its_time_and_the_end_after_them() -> None:
    clock, log = logging_clock()
    says(clock, log, 7, "first")
    says(clock, log, 7, "second")
    clock.alarm_ps = 7
    clock.run()
    assert log == [(7, "alarm"), (7, "first"), (7, "second"), (7, "end")]


def test_an_instant_ends_once_and_before_the_next_begins() -> None:
    clock, log = logging_clock()
    says(clock, log, 1, "one")
    says(clock, log, 2, "two")
    clock.run()
    assert log == [(1, "one"), (1, "end"), (2, "two"), (2, "end")]


def test_an_alarm_that_is_set_anew_rings_at_its_last_time() -> None:
    clock, log = logging_clock()
    clock.alarm_ps = 9
    clock.alarm_ps = 4
    clock.run()
    assert log == [(4, "alarm")]
    assert clock.alarm_ps == NEVER


def test_a_clock_that_is_to_stop_stops_before_what_is_due_then() -> None:
    """As SimPy does: `until` is urgent."""
    clock, log = logging_clock()
    clock.alarm_ps = 5
    clock.run(until=5)
    assert (clock.now, log) == (5, [])
    clock.run()
    assert log == [(5, "alarm")]


def test_a_clock_runs_to_a_time_at_which_nothing_happens() -> None:
    clock, log = logging_clock()
    clock.alarm_ps = 5
    clock.run(until=6)
    assert (clock.now, log) == (6, [(5, "alarm")])


def test_peek_tells_what_comes_next() -> None:
    clock, log = logging_clock()
    assert clock.peek() == simpy.core.Infinity
    clock.alarm_ps = 5
    assert clock.peek() == 5
    clock.timeout(3)
    assert clock.peek() == 3
    clock.closing = True
    assert clock.peek() == clock.now
    clock.run()
    assert log == [(0, "end"), (5, "alarm")]


def test_when_nothing_is_left_it_says_so() -> None:
    clock, _ = logging_clock()
    with pytest.raises(simpy.core.EmptySchedule):
        clock.step()


def test_a_clock_that_stopped_before_its_alarm_rings_before_the_instant_ends() -> None:
    """Whoever starts something in between does not hold up what is due."""
    clock, log = logging_clock()
    clock.alarm_ps = 5
    clock.run(until=5)
    clock.closing = True
    clock.run()
    assert log == [(5, "alarm"), (5, "end")]


def test_what_is_urgent_after_a_stop_still_comes_before_the_alarm() -> None:
    clock, log = logging_clock()

    def sleeper() -> simpy.events.ProcessGenerator:
        try:
            yield clock.timeout(100)
        except simpy.Interrupt:
            log.append((clock.now, "interrupted"))

    process = clock.process(sleeper())
    clock.alarm_ps = 5
    clock.run(until=5)
    process.interrupt()
    clock.run(until=6)
    assert log == [(5, "interrupted"), (5, "alarm")]
