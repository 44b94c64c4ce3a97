"""Islands settled by themselves play as if everybody were solved together; their mutants are caught."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from test_compiled import NOBODY, World, logged, worlds

from emulator.run.island import ANYTHING, Device
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
