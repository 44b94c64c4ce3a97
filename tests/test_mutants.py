"""Mutants of folding: each leaves out one thing that exactness needs, and the random programs tell.

The partition's own check is turned off, so that what is found is found by playing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from random_programs import random_program
from test_folding import assert_plays_the_same

from emulator.plan import folding
from emulator.plan.folding import _Graph, _numbered
from emulator.plan.program import Program
from emulator.run.errors import DeadlockError
from emulator.run.lower import _Lowering
from emulator.spec.faults import left_of

SEEDS = range(200, 320)

Patch = pytest.MonkeyPatch
MUTANTS: dict[str, Callable[[Patch], None]] = {}


def mutant(patch: Callable[[Patch], None]) -> Callable[[Patch], None]:
    MUTANTS[patch.__name__] = patch
    return patch


def begin(patch: Patch, change: Callable[[_Graph], None]) -> None:
    original = _Graph._begin

    def begun(graph: _Graph, *rest: Any) -> None:
        original(graph, *rest)
        change(graph)

    patch.setattr(_Graph, "_begin", begun)


@mutant
def one_member_loads_for_all(patch: Patch) -> None:
    original = _Lowering._fluid
    patch.setattr(
        _Lowering, "_fluid", lambda self, wires, parties, slot: original(self, wires[:1], parties, slot)
    )


@mutant
def a_class_does_not_contend_with_itself(patch: Patch) -> None:
    """On each link the most that one member puts there, not the sum."""
    original = _Lowering._fluid

    def fluid(self: _Lowering, wires: list[Any], parties: list[int], slot: tuple[object, ...]) -> Any:
        most: dict[int, int] = {}
        for wire in wires:
            for link, demand in wire.demands:
                most[link] = max(most.get(link, 0), demand)
        first, *others = wires
        own = {link for link, _ in first.demands}
        rest = tuple((link, demand) for link, demand in most.items() if link not in own)
        held = tuple((link, most[link]) for link in own)
        wires = [msgspec.structs.replace(first, demands=held)]
        if others:
            wires.append(msgspec.structs.replace(first, demands=rest))
        return original(self, wires, parties, slot)

    patch.setattr(_Lowering, "_fluid", fluid)


@mutant
def stage_dropped(patch: Patch) -> None:
    def change(graph: _Graph) -> None:
        slow = left_of(graph.program.job.faults, "straggler")
        graph.ranks = _numbered(slow.get(rank, 1) for rank in range(len(graph.program.classes)))

    begin(patch, change)


@mutant
def speed_dropped(patch: Patch) -> None:
    def change(graph: _Graph) -> None:
        graph.ranks = _numbered(seat.template for seat in graph.program.classes)

    begin(patch, change)


@mutant
def degraded_nic_dropped(patch: Patch) -> None:
    def change(graph: _Graph) -> None:
        graph.links = _numbered(graph.fabric.kind(link) for link in graph.link_ids.tolist())

    begin(patch, change)


@mutant
def what_is_put_on_a_link_dropped(patch: Patch) -> None:
    def change(graph: _Graph) -> None:
        graph.loads = graph.loads._replace(tag=np.zeros_like(graph.loads.tag))

    begin(patch, change)


@mutant
def groups_do_not_see_links(patch: Patch) -> None:
    patch.setattr(_Graph, "_next_to_groups", lambda graph: [(graph.members, graph.ranks)])


@mutant
def transfers_do_not_see_links(patch: Patch) -> None:
    patch.setattr(
        _Graph,
        "_next_to_edges",
        lambda graph: [(graph.sources, graph.ranks), (graph.targets, graph.ranks)],
    )


@mutant
def links_see_nobody(patch: Patch) -> None:
    patch.setattr(_Graph, "_next_to_links", lambda _graph: [])


@mutant
def ranks_do_not_see_groups(patch: Patch) -> None:
    patch.setattr(
        _Graph,
        "_next_to_ranks",
        lambda graph: [(graph.sources.turned(), graph.edges), (graph.targets.turned(), graph.edges)],
    )


@mutant
def ranks_do_not_see_transfers(patch: Patch) -> None:
    patch.setattr(_Graph, "_next_to_ranks", lambda graph: [(graph.members.turned(), graph.groups)])


@mutant
def one_round(patch: Patch) -> None:
    patch.setattr(_Graph, "refine", lambda graph: graph._round())


@mutant
def no_switch_link_binds(patch: Patch) -> None:
    patch.setattr(_Graph, "_binding", lambda _graph, _ranks: set())


@mutant
def uplinks_never_bind(patch: Patch) -> None:
    original = _Graph._binding
    patch.setattr(_Graph, "_binding", lambda graph, ranks: original(graph, ranks) - {"leaf.up", "pod.up"})


def changed(patch: Patch, change: Callable[[Program], Program]) -> None:
    original = folding.fold
    patch.setattr(folding, "fold", lambda program: change(original(program)))


@mutant
def last_member_represents(patch: Patch) -> None:
    def change(program: Program) -> Program:
        turned = (msgspec.structs.replace(c, members=c.members[::-1]) for c in program.classes)
        return msgspec.structs.replace(program, classes=tuple(turned))

    changed(patch, change)


@mutant
def group_classes_merged(patch: Patch) -> None:
    def change(program: Program) -> Program:
        first: dict[object, int] = {}
        merged = (first.setdefault((g.axis, len(g.ranks)), i) for i, g in enumerate(program.groups))
        assert program.folding
        wrong = msgspec.structs.replace(program.folding, group_class=np.array(list(merged)))
        return msgspec.structs.replace(program, folding=wrong)

    changed(patch, change)


def play(patch: Patch) -> None:
    patch.setattr(_Graph, "_equitable", lambda _graph: True)
    for seed in SEEDS:
        program = random_program(seed)
        assert_plays_the_same(program, folding.fold(program))


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_caught(name: str, monkeypatch: Patch) -> None:
    """By another time, a broken rule, a deadlock, or a group that is not where it should be."""
    MUTANTS[name](monkeypatch)
    with pytest.raises((AssertionError, DeadlockError, KeyError)):
        play(monkeypatch)


def test_what_is_not_mutated_survives(monkeypatch: Patch) -> None:
    """The control: nothing left out but the partition's own check."""
    play(monkeypatch)
