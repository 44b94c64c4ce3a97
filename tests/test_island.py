"""Islands settled by themselves play as if everybody were solved together; their mutants are caught."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from test_compiled import NOBODY, World, logged, worlds

from emulator.run import island, together
from emulator.run.island import ANYTHING, Device, State
from emulator.run.maxmin import FULL

islands = st.lists(st.integers(-1, 2), min_size=6, max_size=6)
"""The device of each resource, -1 for a link."""

TWO_DEVICES_AND_A_LINK: World = (
    [10, 10, 5],
    [
        (((0, 10),), 100, FULL, 0, 0),
        (((0, 9),), 100, FULL, 7, 0),
        (((1, 10),), 150, FULL, 20, 0),
        (((0, 2), (2, 5)), 90, FULL, 0, 0),
        (((1, 2), (2, 5)), 90, FULL, 0, 0),
    ],
    [(0, 3, 11, 40)],
)


def same(world: World, of: list[int]) -> None:
    assert logged(world, NOBODY, of[: len(world[0])])[:2] == logged(world, NOBODY)[:2]


@settings(max_examples=300, deadline=None)
@given(worlds(), islands)
@example(TWO_DEVICES_AND_A_LINK, [0, 1, -1, 0, 0, 0])
def test_islands_and_everybody_together_play_the_same(world: World, of: list[int]) -> None:
    """Levels, ends and their order, whatever resources are taken to be one device."""
    same(world, of)


@settings(max_examples=100, deadline=None)
@given(worlds(), islands)
def test_islands_beside_a_crowd(world: World, of: list[int]) -> None:
    assert logged(world, 5, of[: len(world[0])])[:2] == logged(world, NOBODY)[:2]


@pytest.mark.slow
@settings(max_examples=5000, deadline=None)
@given(worlds(), islands)
def test_islands_play_the_same_many_times(world: World, of: list[int]) -> None:
    same(world, of)


def test_a_full_link_leaves_the_devices_under_it_to_themselves() -> None:
    """Two rings fill a link; kernels come and go on their devices, and only who shares a device is solved."""
    kernels = [(((0, 10),), 10, FULL, 3 + 15 * i, 0) for i in range(20)]
    rings = [(((d, 2), (2, 10)), 400, FULL, 0, 0) for d in (0, 1)]
    world: World = ([10, 10, 10], [*kernels, *rings], [])
    _, _, pool = logged(world, NOBODY, [0, 1, -1])
    assert pool.ever_contended == {0, 2}
    assert len(pool._together.known) <= 3, (
        "everybody together is solved when the rings come and go, not for a kernel"
    )
    same(world, [0, 1, -1])


def test_holds_of_one_amount_and_of_another() -> None:
    """Of the same device in the same state once little is held, and once much."""
    twins = [(((0, 10),), 100, FULL, 0, 0)] * 2
    world: World = ([10], twins, [(0, 2, 10, 10), (0, 7, 30, 10), (0, 2, 50, 10)])
    _, levels, _ = logged(world, NOBODY, [0])
    seen = {level for (_, number), level in levels.items() if number == 1}
    assert seen == {0, FULL * 8 // 10 // 2, FULL * 3 // 10 // 2, FULL // 2}
    same(world, [0])


def test_devices_that_are_equal_know_the_same() -> None:
    """What one has solved, the other need not; a slower one knows nothing of it."""
    acts = [(((d, 10),), 100, FULL, at + 1000 * d, 0) for d in (0, 1, 2) for at in (0, 7)]
    _, levels, equal = logged(([10, 10, 10], acts, []), NOBODY, [0, 1, 2])
    assert equal.solves == 1
    _, slower, pool = logged(([10, 10, 5], acts, []), NOBODY, [0, 1, 2])
    assert pool.solves == 2
    assert slower != levels


@settings(max_examples=100, deadline=None)
@given(worlds(), islands, st.integers(1, 3))
def test_what_has_been_forgotten_is_found_out_again(world: World, of: list[int], most: int) -> None:
    """With room for next to no states, and none piles up."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(island, "MOST_KNOWN", most)
        patch.setattr(together, "MOST_KNOWN", most)
        ends, levels, pool = logged(world, NOBODY, of[: len(world[0])])
    assert (ends, levels) == logged(world, NOBODY)[:2]
    for make in pool._makes.values():
        states = reachable(make.idle)
        assert len(make._states) <= most
        assert len(states) <= 3 * most + 3, "those that a state leads to are forgotten with it"


def reachable(first: State) -> set[State]:
    """All states that are known from a state on."""
    found = [first]
    for state in found:
        ways = [*state.entered.values(), *state.left.values(), *state.taken.values()]
        found += [after for after, _ in ways if after not in found]
    return set(found)


def caps_forgotten(device: Device) -> tuple[int, ...]:
    return (ANYTHING,) * len(device.members)


def stopped_here_or_there(device: Device) -> tuple[int, ...]:
    return tuple(r.level if r.tight > device.tight else ANYTHING for r in device.members)


@pytest.mark.parametrize("mutant", [caps_forgotten, stopped_here_or_there])
def test_mutant_is_caught(mutant: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Device, "_caps", mutant)

    @settings(max_examples=300, deadline=None, database=None, derandomize=True, phases=[Phase.generate])
    @given(worlds(), islands)
    def play(world: World, of: list[int]) -> None:
        same(world, of)

    with pytest.raises(AssertionError):
        play()
