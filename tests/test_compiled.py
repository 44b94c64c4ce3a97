"""Compiled code for large components plays every run as Python does, bit for bit; its mutants are caught."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from fractions import Fraction
from random import Random
from typing import Any

import pytest
import simpy
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from test_pool import G, play, star

from emulator.run import compiled, crowd, pairs, tables
from emulator.run.activity import SLACK, Activity, Running, ends_in_ps
from emulator.run.clock import Clock
from emulator.run.maxmin import FULL, LEVEL_BITS
from emulator.run.pool import Pool

NOBODY = sys.maxsize
"""A size that no crowd reaches: Python plays it all."""

Act = tuple[tuple[tuple[int, int], ...], int, int, int, int]
Hold = tuple[int, int, int, int]
World = tuple[list[int], list[Act], list[Hold]]


TIDIED_UP: World = (
    [4, 1],
    [
        (((1, 2),), 1, FULL, 0, 0),
        (((0, 2),), 1, FULL, 0, 0),
        *[(((0, 2), (1, 2)), 1, FULL, at, 0) for at in (1, 0, 1)],
        (((0, 2),), 1, 1, 0, 0),
        (((1, 2),), 1, FULL, 0, 0),
    ],
    [],
)
"""A crowd of one tidies up while a link that only its old members use is contended."""


HELD_AGAIN: World = (
    [10, 1, 1],
    [
        (((0, 1), (1, 2)), 400, FULL, 0, 0),
        (((1, 2),), 400, FULL, 0, 0),
        (((0, 5), (2, 1)), 400, FULL, 10, 0),
        (((2, 1),), 400, FULL, 10, 0),
    ],
    [(0, 8, 0, 1), (0, 8, 20, 5)],
)
"""The first link is not contended when a hold on it ends, and is when the same is held again."""


@st.composite
def worlds(draw: st.DrawFn) -> World:
    """Capacities; activities as (demands, length, bound, start, delay); holds as (resource, amount, at, for).

    Small numbers, so that levels, times and quotients tie; large ones, so that both halves of a pair count;
    twins; resources of no capacity.
    """
    unit = draw(st.sampled_from([1, 1, 7, 10**9, 50 * 10**9, 10**15 + 1]))
    n = draw(st.integers(1, 6))
    capacities = [unit * c for c in draw(st.lists(st.integers(0, 30), min_size=n, max_size=n))]
    demands = st.dictionaries(st.integers(0, n - 1), st.integers(1, 40), min_size=1, max_size=3).map(
        lambda d: tuple((r, unit * x + x % 2) for r, x in d.items())
    )
    bound = st.one_of(st.just(FULL), st.integers(1, FULL), st.integers(1, 9).map(lambda x: FULL // x))
    activity = st.tuples(
        demands, st.integers(1, 400), bound, st.integers(0, 60), st.sampled_from([0, 0, 0, 5])
    )
    some = draw(st.lists(activity, min_size=1, max_size=14))
    twins = draw(st.lists(st.sampled_from(some), max_size=8))
    hold = st.tuples(st.integers(0, n - 1), st.integers(1, 10), st.integers(0, 60), st.integers(1, 90))
    holds = [(r, unit * x, at, time) for r, x, at, time in draw(st.lists(hold, max_size=4))]
    return capacities, some + twins, [h for h in holds if h[1] <= capacities[h[0]]]


def logged(
    world: World, crowd_size: int, islands: Sequence[int] = ()
) -> tuple[list[tuple[int, int]], dict[tuple[int, int], int], Pool]:
    """Ends as (number, time), in order, and (time, number) -> level after it, where it changed."""
    capacities, activities, holds = world
    env = Clock()
    levels: dict[tuple[int, int], int] = {}
    ends: list[tuple[int, int]] = []

    def audit(now: int, running: Running, level: int) -> None:
        levels[now, running.number] = level

    pool = Pool(env, capacities, audit, crowd_size, islands)

    def one(i: int, activity: Activity, at: int) -> simpy.events.ProcessGenerator:
        yield env.timeout(at)
        yield pool.start(activity)
        ends.append((i, env.now))

    def held(resource: int, amount: int, at: int, time: int) -> simpy.events.ProcessGenerator:
        yield env.timeout(at)
        free = pool.hold(resource, amount)
        if free:
            yield free
        yield env.timeout(time)
        pool.release(resource, amount)

    for i, (demands, length, bound, at, delay) in enumerate(activities):
        env.process(one(i, Activity(demands, length << LEVEL_BITS, pool.alone(demands, bound), delay), at))
    for hold in holds:
        env.process(held(*hold))
    env.run()
    changes = {}
    last: dict[int, int] = {}
    for (now, number), level in sorted(levels.items()):
        if last.get(number) != level:
            changes[now, number] = last[number] = level
    return ends, changes, pool


def same(world: World, sizes: tuple[int, ...] = (1, 3, 6)) -> None:
    expected = logged(world, NOBODY)[:2]
    for size in sizes:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(crowd, "SPARE", size - 1)  # so that it tidies up at each chance, or seldom,
            assert logged(world, size)[:2] == expected, f"crowd of {size}"


@settings(max_examples=300, deadline=None)
@given(worlds())
@example(([10], [(((0, 7),), 100, FULL, 0, 0), (((0, 7),), 50, FULL, 3, 0)], []))
@example(TIDIED_UP)
@example(HELD_AGAIN)
def test_compiled_and_python_play_the_same(world: World) -> None:
    """Levels, ends and their order, with crowds of any size: the last sizes are crossed up and down."""
    same(world)


@pytest.mark.slow
@settings(max_examples=5000, deadline=None)
@given(worlds())
def test_compiled_and_python_play_the_same_many_times(world: World) -> None:
    same(world)


def large_world(seed: int) -> World:
    """Up to 120 activities on up to 30 resources: what changes on one reaches others, but not all."""
    rng = Random(seed)
    n, unit = rng.randint(4, 30), rng.choice([1, 7, 10**9, 50 * 10**9])
    capacities = [unit * rng.randint(1, 40) for _ in range(n)]
    activities: list[Act] = []
    for _ in range(rng.randint(20, 120)):
        used = rng.sample(range(n), rng.randint(1, min(4, n)))
        demands = tuple((r, unit * rng.choice([1, 1, 1, 2, 5, rng.randint(1, 30)])) for r in used)
        length = rng.choice([50, 100, rng.randint(1, 400)])
        bound = rng.choice([FULL, FULL, FULL // 3, rng.randint(1, FULL)])
        activities.append(
            (demands, length, bound, rng.choice([0, 0, rng.randint(0, 60)]), rng.choice([0, 0, 5]))
        )
    holds = [
        (rng.randrange(n), unit * rng.randint(1, 10), rng.randint(0, 60), rng.randint(1, 90))
        for _ in range(4)
    ]
    return capacities, activities, [hold for hold in holds if hold[1] <= capacities[hold[0]]]


def same_large(seed: int) -> None:
    """Alone, and with devices of several resources, of which only some change at a time."""
    world = large_world(seed)
    same(world, (1, 10))
    devices = [Random(seed).randrange(-1, 5) for _ in world[0]]
    assert logged(world, 1, devices)[:2] == logged(world, NOBODY)[:2]


def test_what_has_not_changed_on_a_device_is_full_where_it_was() -> None:
    """On one resource of it somebody ends; later, elsewhere, one who was held back more than all."""
    world: World = (
        [1, 10, 1],
        [
            (((0, 4), (2, 1)), 1000, FULL, 0, 0),
            (((0, 4),), 1000, FULL, 0, 0),
            (((1, 20),), 2, FULL, 0, 0),
            (((1, 20),), 1000, FULL, 0, 0),
            (((2, 1),), 1000, FULL, 0, 0),
            (((2, 1),), 2, FULL // 16, 0, 0),
        ],
        [],
    )
    assert logged(world, 1, [0, 0, -1])[:2] == logged(world, NOBODY)[:2]


@pytest.mark.parametrize("first", range(0, 60, 20))
def test_large_crowds_play_the_same(first: int) -> None:
    for seed in range(first, first + 20):
        same_large(seed)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1000, 5000, 1000))
def test_thousands_of_large_crowds_play_the_same(first: int) -> None:
    for seed in range(first, first + 1000):
        same_large(seed)


def test_a_crowd_forms_and_disbands() -> None:
    """What the property is about happens: of three flows on one link, two in a crowd of four are too few."""
    flows = [(((0, 10),), 10 * (i + 1), FULL, 0, 0) for i in range(9)]
    ends, _, pool = logged(([10], flows, []), 6)
    assert pool._together.crowd is None
    assert len(ends) == 9
    assert "emulator.run.compiled" in sys.modules


@settings(deadline=None)
@given(st.integers(0, FULL), st.integers(0, FULL))
@example(FULL, FULL)
def test_products(a: int, b: int) -> None:
    high, low = pairs.times(a, b)
    assert (high << LEVEL_BITS) + low == a * b
    assert 0 <= low < FULL


@settings(max_examples=500, deadline=None)
@given(st.integers(0, FULL), st.integers(0, FULL - 1), st.integers(1, FULL), st.integers(-3, 3))
@example(FULL - 1, FULL - 1, FULL, 0)
@example(FULL, FULL - 1, 1, 0)
def test_quotients(high: int, low: int, divisor: int, hair: int) -> None:
    """Of any pair, and of multiples of the divisor and their neighbours."""
    near = max(0, (high * low // divisor) % FULL * divisor + hair)
    for pair in ((high << LEVEL_BITS) + low, near):
        expected = min(pair // divisor, FULL)
        assert pairs.quotient(pair >> LEVEL_BITS, pair & tables.LOW, divisor) == expected


@settings(deadline=None)
@given(st.integers(0, FULL << LEVEL_BITS), st.integers(1, FULL))
@example(SLACK, 1)
@example(SLACK + 1, 1)
def test_ends(left: int, level: int) -> None:
    expected = min(ends_in_ps(left, level), FULL)
    assert pairs.ends_in(left >> LEVEL_BITS, left & tables.LOW, level) == expected


def test_what_does_not_fit_goes_on_in_python() -> None:
    """A bound above level 1, a length of 2**124, loads of 2**62, an end in a month: the same numbers."""
    for activity in (
        (((0, 10),), 100, 3 * FULL, 5, 0),
        (((0, 10),), 1 << 62, FULL, 5, 0),
        (((0, FULL),), 1, FULL, 5, 0),
        (((0, FULL // 2),), 1, FULL, 5, 0),
        (((0, 10),), 1, 1, 5, 0),
        (((0, 10),), (1 << 62) - 1, FULL, 5, 0),
    ):
        others = [(((0, 10),), 10 * (i + 1), FULL, 0, 0) for i in range(5)]
        same(([10], [*others, activity, activity, activity], []), (1, 3, 4))


def exact_ends(flows: list[tuple[int, ...]], sizes: list[int], capacity: int) -> list[Fraction]:
    """Ends of flows that start together, in seconds and rationals: progressive filling again at each end."""
    left = {i: Fraction(size) for i, size in enumerate(sizes)}
    now, ends = Fraction(0), [Fraction(0)] * len(flows)
    while left:
        rates: dict[int, Fraction] = {}
        room = {link: Fraction(capacity) for i in left for link in flows[i]}
        users = {link: [i for i in left if link in flows[i]] for link in room}
        while len(rates) < len(left):
            rising = {link: [i for i in there if i not in rates] for link, there in users.items()}
            share, full = min((room[link] / len(there), link) for link, there in rising.items() if there)
            for i in rising[full]:
                rates[i] = share
                for link in flows[i]:
                    room[link] -= share
        step = min(left[i] / rates[i] for i in left)
        now += step
        for i in list(left):
            left[i] -= step * rates[i]
            if not left[i]:
                ends[i] = now
                del left[i]
    return ends


def test_ends_of_flows_are_exact_to_a_picosecond() -> None:
    """120 flows of the star between 16 hosts, from rationals."""
    flows = [
        flow._replace(links=(flow.links[0] % 16, 16 + flow.links[1] % 16)) for flow in star("star_1000.txt")
    ]
    flows = flows[:120]
    exact = exact_ends([f.links for f in flows], [f.size for f in flows], 50 * G)
    ends, pool = play([50 * G] * 32, flows, 50 * G)
    assert pool.solves
    assert all(
        abs(Fraction(end) - there) <= Fraction(2, 10**12) for end, there in zip(ends, exact, strict=True)
    )


@pytest.mark.parametrize("name", ["star_1000.txt"])
def test_a_star_is_the_same_in_python(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    flows = star(name)[:500]
    ends, _ = play([50 * G] * 256, flows, 50 * G)
    monkeypatch.setattr("emulator.run.together.Together._new_crowd", lambda _pool, _size: None)
    assert play([50 * G] * 256, flows, 50 * G)[0] == ends


def test_without_a_compiler_python_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    flows = star("star_1000.txt")[:100]
    ends, _ = play([50 * G] * 256, flows, 50 * G)
    crowd.compiled.cache_clear()
    monkeypatch.setitem(sys.modules, "emulator.run.compiled", None)
    assert crowd.compiled() is None
    assert play([50 * G] * 256, flows, 50 * G)[0] == ends
    crowd.compiled.cache_clear()


def test_a_small_job_does_not_wait_for_the_compiler() -> None:
    code = "import sys, emulator.run.executor; sys.exit('numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


Mutant = Callable[[pytest.MonkeyPatch], None]


Settled = tuple[int, int]
Play = Callable[..., Settled]


def wrapped(patch: pytest.MonkeyPatch, settle: Callable[..., Settled]) -> None:
    """Have `settle` called with the compiled function and its arguments, tables by name."""
    original = compiled.settle

    def mutated(now: int, *args: Any) -> Settled:
        kept, sizes, (state, changed, gone, *news, same) = tables.Tables(*args[:5]), args[5:8], args[8:]

        def play(same: int = same, change: bool = True) -> Settled:
            which = changed if change else changed[len(changed) - gone :]
            return original(now, *kept, *sizes, state, which, gone, *news, same)

        members, _, resources = kept.named(*sizes)
        return settle(play, members, resources)

    patch.setattr(compiled, "settle", mutated)


def level_off_by_one(patch: pytest.MonkeyPatch) -> None:
    def settle(play: Play, members: tables.Members, _resources: tables.Resources) -> Settled:
        settled = play()
        members.level[members.level > 1] -= 1
        return settled

    wrapped(patch, settle)


def length_off_by_one(patch: pytest.MonkeyPatch) -> None:
    """Caught where an end is a whole number of picoseconds away but for the slack."""

    def settle(play: Play, members: tables.Members, _resources: tables.Resources) -> Settled:
        members.left_low[:] += 1
        return play()

    wrapped(patch, settle)


def end_off_by_one(patch: pytest.MonkeyPatch) -> None:
    def settle(play: Play, _members: tables.Members, _resources: tables.Resources) -> Settled:
        earliest, count = play()
        return earliest + 1, count

    wrapped(patch, settle)


def one_end_of_several(patch: pytest.MonkeyPatch) -> None:
    wrapped(patch, lambda play, _members, _resources: (play()[0], 1))


def room_off_by_one(patch: pytest.MonkeyPatch) -> None:
    def settle(play: Play, _members: tables.Members, resources: tables.Resources) -> Settled:
        resources.room[:] -= 1
        settled = play()
        resources.room[:] += 1
        return settled

    wrapped(patch, settle)


def full_off_by_one(patch: pytest.MonkeyPatch) -> None:
    """Resources that are not in the sweep are full one unit higher than they were."""

    def settle(play: Play, _members: tables.Members, resources: tables.Resources) -> Settled:
        resources.level[resources.level < tables.ALL] += 1
        return play()

    wrapped(patch, settle)


def nothing_has_changed(patch: pytest.MonkeyPatch) -> None:
    """Resources that somebody has left are full where they were."""
    wrapped(patch, lambda play, _members, _resources: play(change=False))


def rooms_stop_nobody(patch: pytest.MonkeyPatch) -> None:
    """All levels below those of who has gone or come are as they were, whatever room there is now."""
    wrapped(patch, lambda play, _members, _resources: play(same=tables.ALL))


def nothing_binds(patch: pytest.MonkeyPatch) -> None:
    def settle(play: Play, _members: tables.Members, resources: tables.Resources) -> Settled:
        resources.binds[:] = 0
        return play()

    wrapped(patch, settle)


MUTANTS: list[Mutant] = [
    level_off_by_one,
    length_off_by_one,
    end_off_by_one,
    one_end_of_several,
    room_off_by_one,
    full_off_by_one,
    nothing_has_changed,
    rooms_stop_nobody,
    nothing_binds,
]


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutant_is_caught(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the property that compiled code and Python play the same."""
    mutant(monkeypatch)
    property_ = settings(
        max_examples=300, deadline=None, database=None, derandomize=True, phases=[Phase.generate]
    )

    @property_
    @given(worlds())
    def plays_the_same(world: World) -> None:
        same(world)

    with pytest.raises((AssertionError, simpy.core.EmptySchedule)):
        plays_the_same()
