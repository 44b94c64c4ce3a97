"""Pipeline schedules against torch's dump, closed forms and their own validity check."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emulator.plan import schedule as sched
from emulator.plan.schedule import Action
from emulator.spec.errors import JobError, NotAvailableYetError

DATA = Path(__file__).parent / "data"


def test_gpipe_is_torchs_dump() -> None:
    """Cell for cell what torch 2.14.1 writes for ScheduleGPipe, 4 ranks, 4 microbatches."""
    golden = (DATA / "GPipe_p4_v1_m4.csv").read_bytes().decode()
    assert sched.to_csv(sched.gpipe(4, 4)).splitlines() == golden.splitlines()
    assert sched.from_csv(golden) == sched.gpipe(4, 4)


@given(st.sampled_from(sorted(sched.SCHEDULES)), st.integers(1, 8), st.integers(1, 12))
def test_every_schedule_is_valid_and_survives_its_csv(name: str, p: int, m: int) -> None:
    actions = sched.schedule(name, p, m)
    sched.validate(actions, m)
    assert sched.from_csv(sched.to_csv(sched.grid(actions))) == actions


@given(st.integers(1, 8), st.integers(1, 32))
def test_gpipe_fills_m_plus_p_minus_1_slots_twice(p: int, m: int) -> None:
    """(m + p - 1) slots forward and as many backward when both take one slot."""
    rows = sched.grid(sched.gpipe(p, m))
    assert {len(row) for row in rows} == {2 * (m + p - 1)}
    assert sum(cell is not None for row in rows for cell in row) == 2 * p * m


@given(st.integers(1, 8), st.integers(1, 6))
def test_naive_has_one_microbatch_in_flight(p: int, m: int) -> None:
    """Each microbatch takes 2p slots, one rank busy in each, so 1/p of the slots do work."""
    rows = sched.grid(sched.naive(p, m))
    assert {len(row) for row in rows} == {2 * p * m}
    assert all(sum(cell is not None for cell in column) == 1 for column in zip(*rows, strict=True))


def test_one_rank_accumulates() -> None:
    assert [str(a) for a in sched.schedule("1f1b", 1, 2)[0]] == ["0F0", "0B0", "0F1", "0B1"]
    assert [str(a) for a in sched.schedule("gpipe", 1, 2)[0]] == ["0F0", "0F1", "0B0", "0B1"]
    with pytest.raises(NotAvailableYetError, match=r"1f1b.*not available yet"):
        sched.schedule("1f1b", 2, 2)


@pytest.mark.parametrize("cell", ["", "F0", "2F", "2X0", "2SEND_F1", "-1F0"])
def test_a_bad_cell_is_named(cell: str) -> None:
    with pytest.raises(JobError, match="not an action such as 2F0"):
        Action.parse(cell)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("0F0,0F0,0B0", "0F0 is done a second time"),
        ("0F0", "0B0 is missing"),
        ("0B0,0F0", "0B0 comes before 0F0"),
        ("0F0,0I0,0B0", "0B0 is a full backward, but I or W"),
        ("0F0,0W0,0I0", "0W0 comes before 0I0"),
        ("0F0,0B0,0F1,0B1", "0F1, but there are 1 microbatches"),
        ("0F0\n0B0", "0F0 and 0B0 are on different ranks"),
    ],
)
def test_an_invalid_schedule_is_refused(text: str, says: str) -> None:
    with pytest.raises(JobError, match=says):
        sched.validate(sched.from_csv(text), 1)


def test_a_schedule_that_cannot_be_played_names_the_heads() -> None:
    """Stage 1 wants its second microbatch before stage 0 has sent it, stage 0 a gradient that never comes."""
    actions = sched.from_csv("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1")
    with pytest.raises(JobError, match="0B0, 1F1 wait for each other"):
        sched.grid(actions)
