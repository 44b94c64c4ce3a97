"""Job to Program: templates for the stages, classes for the ranks, groups and peers from the mesh."""

from __future__ import annotations

from functools import cache

from emulator.plan import stage as stages_of
from emulator.plan.data_parallel import TIED
from emulator.plan.folding import fold
from emulator.plan.memory import is_sharded
from emulator.plan.program import Group, Program, RankClass
from emulator.plan.schedule import schedule, validate
from emulator.plan.stage import NEXT, PREV
from emulator.plan.unit import Stage, stages
from emulator.spec.job import Job, coordinates, rank_of


def plan(job: Job, folded: bool = True) -> Program:
    """Plan one step of a job; unless `folded`, every rank is a class of its own.

    Ranks of a stage share a template (in the layer form of fsdp, ranks that own the same units). Rank r sits
    on GPU r of the cluster. Raises NotAvailableYetError for a schedule that
    cannot be planned; everything else was checked when the job was constructed.
    """
    layout = job.layout
    cut = stages(job)
    actions = schedule(job.pipeline.schedule, layout.pp, job.microbatches)
    validate(actions, job.microbatches)
    templates = []

    @cache
    def template_of(pp: int, owner: int | None) -> int:
        templates.append(stages_of.write(job, cut[pp], actions[pp], owner))
        return len(templates) - 1

    groups, number = _groups(job)
    classes = []
    for rank in range(layout.world_size):
        at = coordinates(layout, rank)
        bound = {}
        if layout.dp > 1:
            bound["dp"] = number["dp", at.pp]
        if (TIED, at.dp) in number and at.pp in (0, layout.pp - 1):
            bound[TIED] = number[TIED, at.dp]
        peers = {}
        if at.pp > 0:
            peers[PREV] = rank_of(layout, pp=at.pp - 1, dp=at.dp)
        if at.pp < layout.pp - 1:
            peers[NEXT] = rank_of(layout, pp=at.pp + 1, dp=at.dp)
        template = template_of(at.pp, _owner(job, cut[at.pp], at.dp))
        classes.append(RankClass((rank,), template, bound, peers))
    program = Program(job, tuple(templates), tuple(classes), groups)
    return fold(program) if folded else program


def _groups(job: Job) -> tuple[tuple[Group, ...], dict[tuple[str, int], int]]:
    """Groups of the job, and the index of each by its name and where it lies on the other axis."""
    layout = job.layout
    groups: list[Group] = []
    number: dict[tuple[str, int], int] = {}
    if layout.dp > 1:
        for pp in range(layout.pp):
            number["dp", pp] = len(groups)
            groups.append(Group("dp", tuple(rank_of(layout, pp=pp, dp=dp) for dp in range(layout.dp))))
    if job.model.tied_embeddings and layout.pp > 1 and job.fixed_times is None:
        for dp in range(layout.dp):
            number[TIED, dp] = len(groups)
            groups.append(Group("pp", tuple(rank_of(layout, pp=pp, dp=dp) for pp in (0, layout.pp - 1))))
    return tuple(groups), number


def _owner(job: Job, stage: Stage, dp: int) -> int | None:
    """What a rank owns in the layer form of fsdp; all ranks beyond the units own nothing and are alike."""
    if not is_sharded(job) or job.data_parallel.ownership == "tensor":
        return None
    return min(dp, len(stage.units))
