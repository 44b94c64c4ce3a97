"""Job to Program: templates for the stages, seats for the ranks, groups and peers from the mesh."""

from __future__ import annotations

import numpy as np

from emulator.plan import folding
from emulator.plan import stage as stages_of
from emulator.plan.body import Body, Template
from emulator.plan.data_parallel import TIED
from emulator.plan.memory import is_sharded
from emulator.plan.program import Group, Program, Seats
from emulator.plan.schedule import Actions, schedule, validate
from emulator.plan.stage import NEXT, PREV
from emulator.plan.unit import Stage, stages
from emulator.spec.arrays import Int64
from emulator.spec.job import Job, axis_index, rank_of


def plan(job: Job, folded: bool = True) -> Program:
    """Plan one step of a job; unless `folded`, every rank is a class of its own.

    Ranks of a stage share a template (in the layer form of fsdp, ranks that own the same units). Rank r sits
    on GPU r of the cluster. Raises NotAvailableYetError for a schedule that cannot be planned; all else
    was checked when the job was constructed.
    """
    layout = job.layout
    cut = stages(job)
    actions = schedule(job.pipeline.schedule, layout.pp, job.microbatches)
    validate(actions, job.microbatches)
    pp, dp = axis_index(layout, "pp"), axis_index(layout, "dp")
    templates, template = _templates(job, cut, actions, pp, dp)
    groups, bound = _groups(job, pp, dp)
    stride = rank_of(layout, pp=1) if layout.pp > 1 else 0
    ranks = np.arange(layout.world_size)
    peers = {
        PREV: np.where(pp > 0, ranks - stride, -1),
        NEXT: np.where(pp < layout.pp - 1, ranks + stride, -1),
    }
    seats = Seats(template, bound, peers)
    if folded:
        return folding.folded(job, templates, groups, seats)
    return Program(job, templates, tuple(seats.seat(rank) for rank in range(len(seats))), groups)


def _templates(
    job: Job, cut: tuple[Stage, ...], actions: Actions, pp: Int64, dp: Int64
) -> tuple[tuple[Template, ...], Int64]:
    """Templates, in the order in which the ranks come to them, and the index of each rank's.

    Stages that are alike, and do the same in the same order, share a body.
    """
    layered = is_sharded(job) and job.data_parallel.ownership == "layer"
    units = np.array([len(stage.units) for stage in cut])
    # All ranks beyond the units own nothing and are alike.
    owner = np.minimum(dp, units[pp]) if layered else np.full_like(dp, -1)
    _, first, inverse = np.unique(pp * (units.max() + 2) + owner + 1, return_index=True, return_inverse=True)
    order = np.argsort(first)
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    bodies: dict[object, Body] = {}
    templates = []
    for rank in first[order].tolist():
        stage, mine = cut[int(pp[rank])], int(owner[rank])
        row = actions[stage.index]
        does = tuple((action.kind, action.microbatch) for action in row)
        key = (id(stage.pieces), stage.index == 0, stage.last, mine, does)
        if key not in bodies:
            bodies[key] = stages_of.write(job, stage, row, None if mine < 0 else mine)
        name = f"stage{stage.index}{_owner_name(mine, stage)}"
        templates.append(Template.written(name, stage.index, stage.first_layer, bodies[key]))
    return tuple(templates), place[inverse]


def _owner_name(owner: int, stage: Stage) -> str:
    if owner < 0:
        return ""
    return f".owner{owner}" if owner < len(stage.units) else ".no_owner"


def _groups(job: Job, pp: Int64, dp: Int64) -> tuple[tuple[Group, ...], dict[str, Int64]]:
    """Groups of the job, and by name the one of each rank."""
    layout = job.layout
    groups: list[Group] = []
    bound: dict[str, Int64] = {}
    if layout.dp > 1:
        bound["dp"] = pp
        stride = rank_of(layout, dp=1)
        for stage in range(layout.pp):
            first = rank_of(layout, pp=stage)
            groups.append(Group("dp", range(first, first + layout.dp * stride, stride)))
    if job.model.tied_embeddings and layout.pp > 1 and job.fixed_times is None:
        at_end = (pp == 0) | (pp == layout.pp - 1)
        bound[TIED] = np.where(at_end, dp + len(groups), -1)
        away = rank_of(layout, pp=layout.pp - 1)
        for replica in range(layout.dp):
            first = rank_of(layout, dp=replica)
            groups.append(Group("pp", range(first, first + away + 1, away)))
    return tuple(groups), bound
