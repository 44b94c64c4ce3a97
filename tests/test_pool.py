"""The max-min engine: hand-worked cases, reference values, and properties of any set of activities."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal, localcontext
from fractions import Fraction
from heapq import heapify, heappop, heappush
from pathlib import Path
from random import Random
from typing import NamedTuple

import pytest
import simpy
from hypothesis import given, settings
from hypothesis import strategies as st

from emulator.run.activity import SLACK, Activity, Running
from emulator.run.clock import Clock
from emulator.run.maxmin import FULL, LEVEL_BITS, solve
from emulator.run.pool import Pool
from emulator.spec.units import PS_PER_SECOND

G = 10**9
DATA = Path(__file__).parent / "data"


class Flow(NamedTuple):
    """Bytes over links, from a time on (seconds)."""

    links: tuple[int, ...]
    size: int = G
    at: float = 0.0


def play(capacities: Sequence[int], flows: Sequence[Flow], weight: int = G) -> tuple[list[float], Pool]:
    """End of each flow, in seconds; all have the same weight, so they share links as plain max-min does."""
    env = Clock()
    pool = Pool(env, capacities)
    ends = [0.0] * len(flows)

    def flow(i: int, links: tuple[int, ...], size: int, at: float) -> simpy.events.ProcessGenerator:
        yield env.timeout(round(at * PS_PER_SECOND))
        demands = tuple((link, weight) for link in links)
        length = -(-size * PS_PER_SECOND * FULL // weight)
        yield pool.start(Activity(demands, length, pool.alone(demands)))
        ends[i] = env.now / PS_PER_SECOND

    for i, (links, size, at) in enumerate(flows):
        env.process(flow(i, links, size, at))
    env.run()
    return ends, pool


HAND_WORKED = {
    "two flows share a link": ([G], [Flow((0,)), Flow((0,))], [2, 2]),
    "the longer has the link to itself in the end": ([G], [Flow((0,)), Flow((0,), 2 * G)], [2, 3]),
    "the second starts later": ([G], [Flow((0,)), Flow((0,), at=0.5)], [1.5, 2]),
    "one flow over three links, one on each": (
        [G] * 3,
        [Flow((0, 1, 2)), Flow((0,)), Flow((1,)), Flow((2,))],
        [2, 2, 2, 2],
    ),
    "the same on links of 1, 2 and 3 G": (
        [G, 2 * G, 3 * G],
        [Flow((0, 1, 2)), Flow((0,)), Flow((1,)), Flow((2,))],
        [2, 2, 2 / 3, 0.4],
    ),
    "a flow held back elsewhere leaves its share": (
        [10 * G, 2 * G],
        [Flow((0,), 9 * G), Flow((0, 1), 2 * G), Flow((1,))],
        [1, 1.5, 1],
    ),
    "four senders into one receiver, one of them slow": (
        [G, G, G, G // 10, G],
        [Flow((i, 4)) for i in range(4)],
        [10 / 3, 10 / 3, 10 / 3, 10],
    ),
}


@pytest.mark.parametrize("case", HAND_WORKED)
def test_hand_worked(case: str) -> None:
    capacities, flows, expected = HAND_WORKED[case]
    ends, _ = play(capacities, flows)
    assert ends == pytest.approx(expected, abs=1.01e-12)


def star(name: str) -> list[Flow]:
    """Flows of a star table: source, destination, bytes between 128 hosts."""
    rows = [line.split() for line in (DATA / name).read_text().splitlines()]
    return [Flow((int(s), 128 + int(d)), int(size)) for s, d, size in rows]


def test_star_of_1000_flows() -> None:
    """SimGrid's figures for the same table."""
    ends, pool = play([50 * G] * 256, star("star_1000.txt"))
    assert max(ends) == pytest.approx(0.017559217, abs=1e-9)
    assert sum(ends) == pytest.approx(6.928279281, abs=1e-9 * len(ends))
    assert pool.solves <= len(set(ends)) + 1


def exact_ends(flows: Sequence[Flow], capacity: int) -> list[Decimal]:
    """Ends in ps of flows that all start at 0, by progressive filling in decimals of 50 digits."""
    with localcontext() as context:
        context.prec = 50
        left = {i: Decimal(flow.size) for i, flow in enumerate(flows)}
        users: dict[int, set[int]] = {}
        for i, flow in enumerate(flows):
            for link in flow.links:
                users.setdefault(link, set()).add(i)
        ends, now = [Decimal(0)] * len(flows), Decimal(0)
        while left:
            rate = filled(flows, users, capacity)
            step = min(left[i] / rate[i] for i in left)
            now += step
            for i in list(left):
                left[i] -= rate[i] * step
                if left[i] < Decimal("1e-30"):
                    ends[i] = now * PS_PER_SECOND
                    del left[i]
                    for link in flows[i].links:
                        users[link].discard(i)
        return ends


def filled(flows: Sequence[Flow], users: dict[int, set[int]], capacity: int) -> dict[int, Decimal]:
    """Max-min rate of each flow."""
    room = {link: Decimal(capacity) for link, there in users.items() if there}
    load = {link: len(users[link]) for link in room}
    queue = [(room[link] / load[link], link) for link in room]
    heapify(queue)
    rate: dict[int, Decimal] = {}
    while queue:
        _, link = heappop(queue)
        if not load[link]:
            continue
        share = room[link] / load[link]
        if queue and share > queue[0][0]:
            heappush(queue, (share, link))
            continue
        for i in users[link] - rate.keys():
            rate[i] = share
            for other in flows[i].links:
                room[other] -= share
                load[other] -= 1
    return rate


def test_star_ends_hardly_late() -> None:
    """Each end is rounded up to a picosecond, and what it leaves is shared from then on: 2.2 ps at most."""
    flows = star("star_1000.txt")
    ends, _ = play([50 * G] * 256, flows, 50 * G)
    late = [
        round(end * PS_PER_SECOND) - exact for end, exact in zip(ends, exact_ends(flows, 50 * G), strict=True)
    ]
    assert min(late) > -1
    assert max(late) < Decimal("2.2")


@pytest.mark.slow
def test_star_of_3000_flows() -> None:
    ends, _ = play([50 * G] * 256, star("star_3000.txt"))
    assert max(ends) == pytest.approx(0.041263705, abs=1e-9)
    assert sum(ends) == pytest.approx(53.191091909, abs=1e-9 * len(ends))


def test_no_solve_where_nothing_binds() -> None:
    """Flows that fit beside each other at full rate never ask the solver, whenever they come and go."""
    flows = [Flow((0, i + 1), G, 0.1 * i) for i in range(8)]
    ends, pool = play([100 * G] + [G] * 8, flows)
    assert pool.solves == 0
    assert ends == pytest.approx([1 + 0.1 * i for i in range(8)], abs=1e-12)


def test_one_solve_an_instant() -> None:
    """A hundred flows that start together are solved once, and once at each of their two ends."""
    flows = [Flow((0,), G * (1 + i % 2)) for i in range(100)]
    _, pool = play([G], flows)
    assert pool.solves == 2


def test_a_hold_slows_a_kernel_by_the_units_left() -> None:
    """Of 132 SMs 20 are held: a kernel that needs all takes 132/112 as long, to the picosecond."""
    env = Clock()
    pool = Pool(env, [132_000_000])
    duration = 112 * 10**6
    assert pool.hold(0, 20_000_000) is None
    done = pool.start(Activity(((0, 132_000_000),), duration << LEVEL_BITS, FULL))
    env.run(until=done)
    assert env.now == 132 * 10**6


def test_what_was_solved_before_counts_only_for_the_same_room() -> None:
    """The same kernel beside 20, then 40, then no held SMs of 132, on a pool that knows it."""
    env = Clock()
    pool = Pool(env, [132])
    kernel = Activity(((0, 132),), 10**6 << LEVEL_BITS, FULL)
    ends = []

    def kernels() -> simpy.events.ProcessGenerator:
        for held in (20, 40, 0, 20):
            pool.hold(0, held)
            began = env.now
            yield pool.start(kernel)
            ends.append(env.now - began)
            pool.release(0, held)

    env.process(kernels())
    env.run()
    assert ends == [-(-(10**6) * 132 // room) for room in (112, 92, 132, 112)]
    assert pool.solves == 2


def test_a_hold_that_does_not_fit_waits_its_turn() -> None:
    env = Clock()
    pool = Pool(env, [10])
    assert pool.hold(0, 6) is None
    second, third = pool.hold(0, 6), pool.hold(0, 1)
    assert second is not None
    assert third is not None, "first come, first served: the third does not overtake"
    pool.release(0, 6)
    env.run()
    assert second.processed
    assert third.processed


def test_latency_passes_before_resources_are_touched() -> None:
    env = Clock()
    pool = Pool(env, [G])
    late = pool.start(Activity(((0, G),), 10 << LEVEL_BITS, FULL, delay_ps=5))
    early = pool.start(Activity(((0, G),), 5 << LEVEL_BITS, FULL))
    ends = {}
    for name, event in (("late", late), ("early", early)):
        event.callbacks.append(lambda _, name=name: ends.setdefault(name, env.now))
    env.run()
    assert ends == {"early": 5, "late": 15}


def test_what_no_longer_holds_does_not_pile_up() -> None:
    """A long activity is due at another time after each of ten thousand short ones beside it."""
    env = Clock()
    pool = Pool(env, [G])
    pool.start(Activity(((0, G),), 10**9 << LEVEL_BITS, FULL))
    longest = 0

    def short() -> simpy.events.ProcessGenerator:
        nonlocal longest
        for _ in range(10_000):
            yield pool.start(Activity(((0, G),), 10 << LEVEL_BITS, FULL))
            yield env.timeout(1)
            longest = max(longest, len(env._queue) + len(pool._due))

    env.process(short())
    env.run()
    assert 100 < longest <= 1010


Demands = tuple[tuple[int, int], ...]
World = tuple[list[int], list[tuple[Demands, int, int, int]]]


@st.composite
def worlds(draw: st.DrawFn) -> World:
    """Capacities, and activities as (demands, length, start, delay)."""
    capacities = draw(st.lists(st.integers(1, 50), min_size=1, max_size=4))
    activity = st.tuples(
        st.dictionaries(st.integers(0, len(capacities) - 1), st.integers(1, 60), min_size=1).map(
            lambda d: tuple(d.items())
        ),
        st.integers(1, 500),
        st.integers(0, 300),
        st.sampled_from([0, 0, 7]),
    )
    return capacities, draw(st.lists(activity, min_size=1, max_size=9))


def exact_levels(active: list[Running], capacities: Sequence[int]) -> dict[Running, Fraction]:
    """Progressive filling in rationals, written plainly: an independent answer."""
    level: dict[Running, Fraction] = {}
    left = [Fraction(c) for c in capacities]
    while len(level) < len(active):
        rising = [a for a in active if a not in level]
        rooms = {
            r: left[r] / load
            for r in range(len(capacities))
            if (load := sum(d for a in rising for q, d in a.demands if q == r))
        }
        lowest = min([*rooms.values(), *(Fraction(a.bound, FULL) for a in rising)])
        full = {r for r, room in rooms.items() if room == lowest}
        for a in rising:
            if Fraction(a.bound, FULL) == lowest or any(q in full for q, _ in a.demands):
                level[a] = lowest
                for q, d in a.demands:
                    left[q] -= d * lowest
    return level


@settings(max_examples=300, deadline=None)
@given(worlds())
def test_levels_are_max_min_fair_at_every_change(
    world: World,
) -> None:
    """At the end of every instant: feasible, and equal to exact progressive filling up to rounding.

    Over the run: the work planned is the work done, no end is early or late by more than rounding, and the
    number of solves is bounded by the number of changes (progress).
    """
    capacities, activities = world
    env = Clock()
    log: list[tuple[int, Running, int]] = []
    pool = Pool(env, capacities, audit=lambda *entry: log.append(entry))

    def one(demands: Demands, length: int, at: int, delay: int) -> simpy.events.ProcessGenerator:
        yield env.timeout(at)
        yield pool.start(Activity(demands, length << LEVEL_BITS, pool.alone(demands, 2 * FULL), delay))

    for activity in activities:
        env.process(one(*activity))
    env.run()
    times = sorted({now for now, _, _ in log})
    current: dict[Running, int] = {}
    work: dict[Running, int] = {}
    before = 0
    for now in times:
        for running, level in current.items():
            work[running] = work.get(running, 0) + level * (now - before)
        before = now
        for when, changed, level in log:
            if when == now:
                current[changed] = level
                if not level:
                    del current[changed]
                    assert -SLACK <= work[changed] - changed.activity.length < 2 * FULL
        expected = exact_levels(list(current), capacities)
        for running, level in current.items():
            assert abs(level - expected[running] * FULL) <= 64 * len(activities), "rounding only"
        for resource, capacity in enumerate(capacities):
            load = sum(d * level for a, level in current.items() for q, d in a.demands if q == resource)
            assert load <= capacity << LEVEL_BITS
    assert not current
    assert pool.solves <= 2 * len(log)


@settings(max_examples=200, deadline=None)
@given(worlds(), st.randoms(use_true_random=False))
def test_the_solver_does_not_care_for_order(world: World, random: Random) -> None:
    """Shuffled activities and resources get bit-identical levels."""
    capacities, activities = world
    env = Clock()
    pool = Pool(env, capacities)
    claims = [Running(env, Activity(d, 1, pool.alone(d)), None, i) for i, (d, *_) in enumerate(activities)]

    def levels(order: list[Running], names: list[int]) -> list[int]:
        users = {r: {a: dict(a.demands)[r] for a in order if r in dict(a.demands)} for r in names}
        users = {r: there for r, there in users.items() if there}
        solved = solve(users, {r: capacities[r] << LEVEL_BITS for r in users})
        return [solved[a] for a in claims]

    reference = levels(claims, list(range(len(capacities))))
    shuffled, names = list(claims), list(range(len(capacities)))
    random.shuffle(shuffled)
    random.shuffle(names)
    assert levels(shuffled, names) == reference


def test_a_run_that_was_stopped_goes_on_as_if_it_had_not_been() -> None:
    """Stopped by the end of a flow, in the middle of an instant: the others still get what it leaves."""

    def ends(stop: bool) -> list[int]:
        env = Clock()
        pool = Pool(env, [G])
        flows = [
            pool.start(Activity(((0, G),), (size * PS_PER_SECOND) << LEVEL_BITS, FULL)) for size in (1, 2, 3)
        ]
        times: list[int] = []
        for flow in flows:
            flow.callbacks.append(lambda _event: times.append(env.now))
        if stop:
            env.run(until=flows[0])
        env.run()
        return times

    assert ends(stop=True) == ends(stop=False) == [s * PS_PER_SECOND for s in (3, 5, 6)]


def test_a_stop_at_an_end_changes_nobodys_turn() -> None:
    """Who waits for what the stop was for, or for what ends with it, comes before all else then."""

    def turns(stop: bool) -> list[tuple[str, int]]:
        env = Clock()
        pool = Pool(env, [10])
        log: list[tuple[str, int]] = []
        first, second = (pool.start(Activity(((0, 1),), 10 << LEVEL_BITS, FULL)) for _ in range(2))

        def waits(name: str, begin: int, event: simpy.Event) -> simpy.events.ProcessGenerator:
            yield env.timeout(begin)
            yield event
            log.append((name, env.now))

        env.process(waits("early", 0, first))
        env.process(waits("late", 6, first))
        env.process(waits("with it", 0, second))
        env.process(waits("timeout", 7, env.timeout(10)))
        env.run(until=5)
        if stop:
            env.run(until=first)
        env.run()
        return log

    assert turns(stop=True) == turns(stop=False)
    assert [name for name, _ in turns(stop=False)] == ["early", "late", "with it", "timeout"]


def test_a_clock_goes_by_one_pool() -> None:
    env = Clock()
    Pool(env, [G])
    with pytest.raises(AssertionError, match="one pool"):
        Pool(env, [G])


def test_what_is_due_beside_a_crowd_does_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who ends next in a crowd is so, and is not, and is again, at the same time."""
    monkeypatch.setattr("emulator.run.pool.MOST_DUE", 100)
    env = Clock()
    pool = Pool(env, [10, 100], crowd_size=2)
    for _ in range(30):
        pool.start(Activity(((0, 10),), 10**9 << LEVEL_BITS, FULL))
    pool.start(Activity(((0, 10), (1, 60)), 10**9 << LEVEL_BITS, FULL))
    monkeypatch.setattr("emulator.run.together.PATIENCE", 0)

    def shorts() -> simpy.events.ProcessGenerator:
        short = Activity(((1, 99),), 10 << LEVEL_BITS, FULL)
        for _ in range(500):
            yield pool.start(short)
            yield env.timeout(1)

    env.process(shorts())
    env.run(until=20_000)
    assert pool._together.crowd
    assert len(pool._due) <= 100 + 2 * 31 + 31
