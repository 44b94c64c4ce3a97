"""A Program as text: the schedule's grid, one rank's streams, its groups, and who is in a class."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice, pairwise

import numpy as np

from emulator.plan.program import Collective, Op, Program, Template, Transfer
from emulator.plan.schedule import Action, grid, schedule
from emulator.spec.units import GB, counted

WIDTH = 110
"""Columns of the text."""

OPS_SHOWN = 6
ROWS_SHOWN = 8
"""Ops of a stream, and rows of any other list, unless all are asked for."""


def show(program: Program, *, rank: int = 0, full: bool = False) -> str:
    """Write a Program for people: about a screenful, or all of it with `full`.

    `rank` is the one whose streams are listed. An op says what it waits for on other streams.
    """
    most = None if full else ROWS_SHOWN
    lines = [*_head(program), "", *_grid(program, full), ""]
    lines += _streams(program, rank, None if full else OPS_SHOWN)
    lines += ["", *_groups(program, most), "", *_classes(program, most)]
    return "\n".join(lines) + "\n"


def _head(program: Program) -> list[str]:
    job = program.job
    ops = sum(len(program.templates[c.template]) for c in program.classes)
    ranks = program.ranks
    return [
        f"{job.model.name} on {ranks} x {job.cluster.device.name}, "
        f"{counted(job.microbatches, 'microbatch', 'microbatches')} of {job.micro_batch} x {job.seq_len} "
        "tokens",
        f"{counted(ranks, 'rank')} in {_kinds(program)}; {ops:,} ops a step",
    ]


def _kinds(program: Program) -> str:
    classes = counted(len(program.classes), "class", "classes")
    return f"{classes} on {counted(len(program.templates), 'template')}"


def _grid(program: Program, full: bool) -> Iterator[str]:
    """One row a pipeline rank, one column a slot of unit time; a dot is a bubble."""
    job = program.job
    rows = grid(schedule(job.pipeline.schedule, job.layout.pp, job.microbatches))
    cells = [[_cell(action) for action in row] for row in rows]
    wide = max(len(cell) for row in cells for cell in row) + 1
    room = len(rows[0]) if full else min(len(rows[0]), (WIDTH - 12) // wide)
    bubble = sum(action is None for row in rows for action in row) / (len(rows) * len(rows[0]))
    yield f"schedule {job.pipeline.schedule}: {len(rows[0])} slots of unit time, {bubble:.2%} of them bubble"
    shown = cells if full else cells[: 2 * ROWS_SHOWN]
    for number, row in enumerate(shown):
        text = "".join(cell.ljust(wide) for cell in row[:room]).rstrip()
        yield f"  pp {number:>3}  {text}{' ..' if room < len(row) else ''}"
    if len(shown) < len(cells):
        yield f"  .. and {len(cells) - len(shown)} more"


def _cell(action: Action | None) -> str:
    return "." if action is None else str(action)


def _streams(program: Program, rank: int, most: int | None) -> Iterator[str]:
    if not 0 <= rank < program.ranks:
        raise ValueError(f"rank {rank} is not in the program")
    seat = program.seat(rank)
    template = program.templates[seat.template]
    peers = "".join(f", {name} is rank {peer}" for name, peer in sorted(seat.peers.items()))
    number = int(program.class_of_ranks()[rank])
    others = [member for member in program.classes[number].members if member != rank]
    alike = f", with {counted(len(others), 'other')}: {_ranks(others)}" if others else ", alone"
    yield _cut(f"rank {rank} is in class {number}{alike}")
    yield f"rank {rank} ({template.name}{peers}), ops in the order of each stream:"
    for number, stream in enumerate(template.streams):
        ops = np.flatnonzero(template.body.stream == number).tolist()
        yield f"  {stream}: {len(ops)} ops"
        for op in map(template.op, ops[:most]):
            yield _cut(f"    {op.name:<34} {_work(op):<30} {_waits(template, op)}".rstrip())
        if most is not None and len(ops) > most:
            yield f"    .. and {len(ops) - most} more, the last {template.op_name(ops[-1])}"


def _work(op: Op) -> str:
    work = op.work
    if work is None:
        return "-"
    if isinstance(work, Collective):
        return f"{work.kind} {_size(work.bytes)} {work.axis}"
    if isinstance(work, Transfer):
        return f"{work.kind} {_size(work.bytes)} {work.peer}"
    name = type(work).__name__.lower()
    return getattr(work, "kind", name)


def _size(size: int) -> str:
    return f"{size / GB:.3g} GB"


def _waits(template: Template, op: Op) -> str:
    return f"after {', '.join(map(template.op_name, op.waits))}" if op.waits else ""


def _cut(line: str) -> str:
    return line if len(line) <= WIDTH else line[: WIDTH - 2] + ".."


def _groups(program: Program, most: int | None) -> Iterator[str]:
    yield counted(len(program.groups), "group") + (":" if program.groups else "")
    rows = (
        f"{number:>3} {group.axis:<3} {_ranks(group.ranks)}" for number, group in enumerate(program.groups)
    )
    yield from _some(rows, len(program.groups), most)


def _classes(program: Program, most: int | None) -> Iterator[str]:
    yield f"{_kinds(program)}:"
    rows = (_class(program, number) for number in range(len(program.classes)))
    yield from _some(rows, len(program.classes), most)


def _class(program: Program, number: int) -> str:
    rank_class = program.classes[number]
    template, ranks = program.templates[rank_class.template], rank_class.members
    who = f"{len(ranks):,} ranks: {_ranks(ranks)}" if len(ranks) > 1 else f"rank {ranks[0]}"
    return f"{number:>3} {template.name:<18} {len(template):>6} ops, {who}"


def _some(rows: Iterable[str], count: int, most: int | None) -> Iterator[str]:
    """Write the first rows of so many; only these are made."""
    for row in islice(rows, most):
        yield _cut(f"  {row}")
    if most is not None and count > most:
        yield f"  .. and {count - most} more"


def _ranks(ranks: Iterable[int]) -> str:
    """Ranks with constant steps run together: 0, 8, .., 56."""
    some = list(ranks)
    steps = {b - a for a, b in pairwise(some)}
    if len(some) > 3 and len(steps) == 1:
        return f"{some[0]}, {some[1]}, .., {some[-1]}"
    return ", ".join(map(str, some))
