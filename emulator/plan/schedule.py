"""Pipeline schedules: in which order each rank works through its stages and microbatches.

A schedule is a function (pipeline ranks p, microbatches m) -> one list of actions a rank. It knows no clock.
Actions print and parse as torch.distributed.pipelining writes them (`2F0`: stage 2, forward, microbatch 0),
and a schedule is written as that module's compute-only CSV: no header, one row a rank.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Literal, cast

import msgspec

from emulator.spec.errors import JobError, NotAvailableYetError

ActionKind = Literal["F", "B", "I", "W"]
_ACTION = re.compile(r"(\d+)([FBIW])(\d+)")


class Action(msgspec.Struct, frozen=True, order=True):
    """A pass of a microbatch through a stage: F forward, B full backward, I input, W weight gradient."""

    stage: int
    kind: ActionKind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Read a cell such as `2F0`; raises JobError for anything else."""
        match = _ACTION.fullmatch(text.strip())
        if match is None:
            raise JobError(
                f"schedule cell {text!r} is not an action such as 2F0 (stage, one of F B I W, microbatch)"
            )
        return cls(int(match[1]), cast("ActionKind", match[2]), int(match[3]))


Actions = tuple[tuple[Action, ...], ...]
"""Per pipeline rank, what it does in order."""


def gpipe(p: int, m: int) -> Actions:
    """All forwards, then all backwards, both in the order of the microbatches (as torch's GPipe dumps)."""
    return tuple(
        tuple(Action(stage, "F", mb) for mb in range(m)) + tuple(Action(stage, "B", mb) for mb in range(m))
        for stage in range(p)
    )


def naive(p: int, m: int) -> Actions:
    """One microbatch in flight: forward through all stages and backward through all before the next starts.

    The first stage starts a microbatch only after the backward of the last one, which by then has crossed
    every stage, so the order on each rank is enough.
    """
    return tuple(
        tuple(Action(stage, kind, mb) for mb in range(m) for kind in ("F", "B")) for stage in range(p)
    )


SCHEDULES: dict[str, Callable[[int, int], Actions]] = {"naive": naive, "gpipe": gpipe}
"""Schedules that can be planned, by name."""


def schedule(name: str, p: int, m: int) -> Actions:
    """Order the actions of each of `p` pipeline ranks for `m` microbatches.

    With p = 1 there is nothing to fill: every schedule but gpipe, which keeps its order of all forwards
    first, is plain gradient accumulation F0 B0 F1 B1.
    """
    if p == 1 and name not in SCHEDULES:
        return naive(p, m)
    if name not in SCHEDULES:
        raise NotAvailableYetError(f"pipeline.schedule = {name!r} with layout.pp = {p}")
    return SCHEDULES[name](p, m)


def validate(actions: Actions, microbatches: int) -> None:
    """Raise JobError unless every stage does every microbatch once, forward before backward.

    A backward is one B, or an I followed by a W.
    """
    place: dict[Action, tuple[int, int]] = {}
    for rank, row in enumerate(actions):
        for slot, action in enumerate(row):
            if action in place:
                raise JobError(f"schedule: rank {rank} slot {slot}: {action} is done a second time")
            if action.microbatch >= microbatches:
                raise JobError(
                    f"schedule: rank {rank} slot {slot}: {action}, but there are {microbatches} microbatches"
                )
            place[action] = (rank, slot)
    for stage in sorted({action.stage for action in place}):
        for mb in range(microbatches):
            _validate_chain(place, stage, mb)


def _validate_chain(place: dict[Action, tuple[int, int]], stage: int, mb: int) -> None:
    split = Action(stage, "I", mb) in place or Action(stage, "W", mb) in place
    if split and Action(stage, "B", mb) in place:
        raise JobError(
            f"schedule: {stage}B{mb} is a full backward, but I or W of the same microbatch is there too"
        )
    kinds: tuple[ActionKind, ...] = ("F", "I", "W") if split else ("F", "B")
    chain = [Action(stage, kind, mb) for kind in kinds]
    for action in chain:
        if action not in place:
            raise JobError(f"schedule: {action} is missing")
    for before, after in pairwise(chain):
        if place[before][0] != place[after][0]:
            raise JobError(f"schedule: {before} and {after} are on different ranks")
        if place[before] > place[after]:
            raise JobError(f"schedule: rank {place[after][0]}: {after} comes before {before}")


def grid(actions: Actions) -> list[list[Action | None]]:
    """Lay the schedule out in slots of unit time, transfers free; None is a bubble slot.

    Rows have equal length. Raises JobError when the order cannot be played (a rank waits for ever).
    """
    last = max((action.stage for row in actions for action in row), default=0)
    done: set[Action] = set()
    rows: list[list[Action | None]] = [[] for _ in actions]
    heads = [0] * len(actions)
    while any(head < len(row) for head, row in zip(heads, actions, strict=True)):
        started: list[Action] = []
        for rank, row in enumerate(actions):
            action = row[heads[rank]] if heads[rank] < len(row) else None
            if action is not None and not _ready(action, done, last):
                action = None
            rows[rank].append(action)
            if action is not None:
                started.append(action)
                heads[rank] += 1
        if not started:
            stuck = [str(row[h]) for h, row in zip(heads, actions, strict=True) if h < len(row)]
            raise JobError(f"schedule cannot be played: {', '.join(stuck)} wait for each other")
        done.update(started)
    return rows


def _ready(action: Action, done: set[Action], last: int) -> bool:
    stage, mb = action.stage, action.microbatch
    if action.kind == "F":
        return stage == 0 or Action(stage - 1, "F", mb) in done
    if action.kind == "W":
        return Action(stage, "I", mb) in done
    if Action(stage, "F", mb) not in done:
        return False
    return stage == last or any(Action(stage + 1, kind, mb) in done for kind in ("B", "I"))


def to_csv(rows: Sequence[Sequence[Action | None]]) -> str:
    """Write what torch.distributed.pipelining reads: row i is rank i, an empty cell a bubble slot."""
    text = io.StringIO(newline="")
    csv.writer(text).writerows([["" if cell is None else str(cell) for cell in row] for row in rows])
    return text.getvalue()


def from_csv(text: str) -> Actions:
    """Read a compute-only CSV; empty cells are dropped."""
    return tuple(
        tuple(Action.parse(cell) for cell in row if cell.strip())
        for row in csv.reader(io.StringIO(text, newline=""))
    )
